"""Where did the time of this real step go? One step under torch's profiler, split at once and thrown away.

    sampled = SampledStep(model, "cpu")
    sampled.start()
    ...one training step...
    sampled.stop()
    sampled.profile.fields()

Each moment of a thread belongs to the innermost operator that runs in it, and where several threads or streams run
at once, to the first in `Activity`. So the parts are exclusive and add up. On a CPU the operators themselves are the
work; on CUDA the kernels are, and an operator only says what its kernels were for.

Left out: time outside the forward, backward and optimizer windows, such as the wait for data; and inside a compiled
region whatever the compiler fused, which counts as non-matmul work as a whole. Recording costs about a microsecond a
range, so that a profiled step is longer than an ordinary one, most of all where operators are tiny. Only the raw
results are read: torch's own parsing costs many times more than the recording.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from threading import get_ident
from time import time_ns
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from flopmeter.devices.kernels import is_communication, is_matmul
from flopmeter.devices.placement import devices_of
from flopmeter.flops.formulas import is_matrix_work
from flopmeter.hook_hiding import OwnHook, hide_hooks, surround_backward
from flopmeter.profiling.profiler_guard import Recording, range_of, step_blocker
from flopmeter.profiling.recorded import LOADING, PARTS, Activity, Cover, Range, find_phases, nest, segments
from flopmeter.torch_compat import HAS_ACTIVITY_FILTERS, DeviceType, graph_task_id, is_launch

MAX_TOP = 20

Span = tuple[int, int]
"""Start and end, in nanoseconds of Unix time, as the profiler has them."""

_COMPILED = "## Call CompiledFxGraph"
_COLLECTIVE = re.compile(r"nccl|gloo:|c10d::|_c10d_functional::", re.IGNORECASE)
_HOST_COPY = re.compile(r"HtoD|DtoH")
_is_collective = lru_cache(maxsize=4096)(lambda name: _COLLECTIVE.search(name) is not None)


class Kernel(NamedTuple):
    """Something that the device did."""

    name: str
    start_ns: int
    end_ns: int
    stream: int
    launch_id: int
    """Which call of the runtime launched it."""
    op_id: int = 0
    """`correlation_id` of the operator that did."""


class Marks(NamedTuple):
    """Where the parts of the step lay on the training thread."""

    step: Span
    forward: Sequence[Span]
    """One per call of the model; the loss that follows belongs to it."""
    backward: Sequence[Span]
    graph_building: Sequence[Span] = ()
    """Backward passes with `create_graph`: gradients are on there, which otherwise means recomputation."""
    launches: Mapping[int, int] = {}
    """`launch_id` to its time, for the launches that were recorded."""

    def windows(self) -> Cover:
        """Forward and backward passes with what lies between a forward and its backward."""
        starts = sorted(span[0] for span in self.backward)
        found = list(self.backward)
        for (start, end), following in pairwise([*sorted(self.forward), (self.step[1], self.step[1])]):
            found.append((start, next((at for at in starts if end <= at <= following[0]), end)))
        return Cover(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One step in exclusive seconds."""

    device: Literal["cpu", "cuda"]
    """Whose time this is."""
    seconds: Mapping[str, float]
    """By the names of `PARTS`."""
    num_ops: int
    """Operators that lie in no other operator; on CUDA, kernels."""
    top: tuple[tuple[str, float, int], ...]
    """Name, seconds of its own, and calls, longest first."""

    @property
    def kernels_s(self) -> float:
        """When anything but copies ran."""
        return sum(spent_s for part, spent_s in self.seconds.items() if part not in ("copy", "gap"))

    def fields(self) -> dict[str, Any]:
        """As the run file has it."""
        seconds = {f"{part}_s": spent_s for part, spent_s in self.seconds.items()}
        return {"device": self.device, **seconds, "num_ops": self.num_ops, "top": [list(item) for item in self.top]}


def reduce_cpu(ranges: Iterable[Range], marks: Marks) -> StepProfile | None:
    """Split a step whose work is done by the operators themselves; None when none was recorded in it."""
    host = _Host(ranges, marks)
    if not host.num_ops:
        return None
    seconds = _exclusive(host.intervals, marks.step, host.windows.overlap)
    return StepProfile(device="cpu", seconds=seconds, num_ops=host.num_ops, top=_top(host.spent))


def reduce_cuda(ranges: Iterable[Range], kernels: Iterable[Kernel], marks: Marks) -> StepProfile | None:
    """Split a step whose work is done by kernels; None when there is none, which is no sign of an idle device."""
    host = _Host(ranges, marks)
    own: list[tuple[Kernel, Activity]] = []
    spent: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for kernel in kernels:
        # Kernels of the step before run into this one: only what was launched in it is its own.
        by_op = host.by_id.get(kernel.op_id)
        launched_ns = marks.launches.get(kernel.launch_id, by_op.start if by_op is not None else -1)
        if marks.step[0] <= launched_ns < marks.step[1]:
            own.append((kernel, _kernel_activity(kernel.name, by_op.activity if by_op is not None else None)))
            spent[kernel.name][0] += kernel.end_ns - kernel.start_ns
            spent[kernel.name][1] += 1
    if not own:
        return None
    whole = _begin_ns(own), max(kernel.end_ns for kernel, _ in own)
    loading = Cover((range_.start, range_.end) for range_ in host.nested if range_.phase == "loading")
    intervals = [(kernel.start_ns, kernel.end_ns, activity) for kernel, activity in own]
    seconds = _exclusive(intervals, whole, lambda start, end: end - start - loading.overlap(start, end))
    return StepProfile(device="cuda", seconds=seconds, num_ops=len(own), top=_top(spent))


def _exclusive(
    intervals: Sequence[tuple[float, float, Activity]], whole: tuple[float, float], gap: Callable[[float, float], float]
) -> dict[str, float]:
    """Seconds by part; `gap` says how much of a stretch in which nothing ran is a gap."""
    spent, idle = [0.0] * len(Activity), int(Activity.IDLE)
    starts, ends, activities = ([interval[i] for interval in intervals] for i in range(3))
    for start, end, activity, _, _ in segments(starts, ends, [*map(int, activities)], whole):
        spent[activity] += gap(start, end) if activity == idle else end - start
    return {part: spent[activity] / 1e9 for part, activity in PARTS.items()}


class _Host:
    """What the threads of the host did: each moment belongs to the innermost operator that ran in it."""

    def __init__(self, ranges: Iterable[Range], marks: Marks) -> None:
        self.intervals: list[tuple[float, float, Activity]] = []
        self.spent: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.num_ops = 0
        self.windows, self._step = marks.windows(), marks.step
        self.nested = nest(ranges)
        self.by_id = {range_.correlation_id: range_ for range_ in self.nested if range_.correlation_id}
        find_phases(self.nested, Cover(marks.graph_building))
        recomputed_until: dict[int, float] = {}
        for range_ in self.nested:
            outer = range_.outer
            range_.is_counted = _is_operator(range_.name) and not range_.is_node
            range_.is_inside = outer is not None and (outer.is_inside or outer.is_counted)
            range_.activity = self._activity(range_)
            if range_.activity is not None:
                self.spent[range_.name][1] += 1
                self.num_ops += range_.is_counted and not range_.is_inside
            if outer is None:
                continue
            self._note_own(outer, range_.start)
            outer.cursor = max(outer.cursor, range_.end)
            # The interpreter between two recomputed operators recomputes too.
            if range_.phase == "recompute" and outer.phase != "recompute":
                if id(outer) in recomputed_until:
                    self.intervals.append((recomputed_until[id(outer)], range_.start, Activity.RECOMPUTE))
                recomputed_until[id(outer)] = range_.end
            elif range_.is_node:
                recomputed_until.pop(id(outer), None)
        for range_ in self.nested:
            self._note_own(range_, range_.end)

    def _note_own(self, range_: Range, until: float) -> None:
        """The time since the last inner range belongs to this one."""
        if range_.activity is not None and until > range_.cursor:
            self.intervals.append((range_.cursor, until, range_.activity))
            self.spent[range_.name][0] += int(until - range_.cursor)

    def _activity(self, range_: Range) -> Activity | None:
        """What the range's own time counts as; None for what only surrounds operators."""
        is_in_step = self._step[0] <= range_.start < self._step[1]
        if range_.phase == "optimizer":
            return Activity.OPTIMIZER if is_in_step else None
        if not range_.is_counted or range_.phase == "loading":
            return None
        if _is_collective(range_.name):
            return Activity.COMMUNICATION
        if range_.phase == "recompute":
            return Activity.RECOMPUTE
        if range_.phase == "forward" and not self.windows.holds(range_.start):
            if range_.outer is not None:
                return range_.outer.activity
            # After the last backward pass lies what prepares the update, such as clipping gradients.
            ends = self.windows.ends
            return Activity.OPTIMIZER if ends and ends[-1] <= range_.start and is_in_step else None
        return Activity.MATMUL if is_matrix_work(range_.name) else Activity.OTHER_COMPUTE


@lru_cache(maxsize=4096)
def _is_operator(name: str) -> bool:
    """Whether a range is work; nodes of the backward pass and user annotations only surround some."""
    if name.startswith(("autograd::", "torch::autograd::")):
        return False
    return "::" in name or name.startswith(_COMPILED) or _is_collective(name)


def _begin_ns(own: Sequence[tuple[Kernel, Activity]]) -> int:
    """When the device comes to this step: when the stream that computes does.

    Until then that works for the step before, unrecorded, and what runs beside it (the next batch on its way, on a
    stream of its own) is hidden by it.
    """
    busy_ns: dict[int, int] = defaultdict(int)
    for kernel, work in own:
        if work not in (Activity.HOST_COPY, Activity.COMMUNICATION):
            busy_ns[kernel.stream] += kernel.end_ns - kernel.start_ns
    stream = max(busy_ns, key=busy_ns.__getitem__, default=None)
    return min(kernel.start_ns for kernel, _ in own if stream is None or kernel.stream == stream)


def _kernel_activity(name: str, of_operator: Activity | None) -> Activity:
    if is_communication(name):
        return Activity.COMMUNICATION
    if _HOST_COPY.search(name):
        return Activity.HOST_COPY
    if of_operator is None or of_operator == Activity.COMMUNICATION:
        return Activity.MATMUL if is_matmul(name) else Activity.OTHER_COMPUTE
    return of_operator


def _top(spent: Mapping[str, Sequence[int]]) -> tuple[tuple[str, float, int], ...]:
    rows = ((name, own_ns / 1e9, calls) for name, (own_ns, calls) in spent.items())
    return tuple(sorted(rows, key=lambda row: -row[1])[:MAX_TOP])


def why_not(device_type: str, *, is_asked_for: bool = False) -> str | None:
    """Why no step may be sampled now, or None when it may.

    Args:
        is_asked_for: The user wants it, whatever stays attached.
    """
    if device_type == "cuda" and not HAS_ACTIVITY_FILTERS and not is_asked_for:
        return f"torch {torch.__version__} would leave its tracer attached; profile_steps: true allows it"
    if device_type not in ("cpu", "cuda"):
        return f"steps on {device_type} are not sampled: nobody has tried it"
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return step_blocker()


class SampledStep:
    """One step under the profiler: `start` and `stop` on the training thread, never in the first steps of a run.

    `discard` may come from another thread; the training thread has to call it then as well.

    Args:
        model: The object that the loop calls; without it forward passes are known by what surrounds them.
        device_type: Where it trains.
    """

    def __init__(self, model: nn.Module | None, device_type: str) -> None:
        self.profile: StepProfile | None = None
        """What the step came to; None when nothing was recorded, or another profiler cut it short."""
        self._model = model
        self.is_cuda = device_type == "cuda"
        """Whether kernels are recorded, by a tracer that stays attached."""
        self._recording = Recording(with_shapes=False, devices=devices_of(model) if self.is_cuda else ())
        self._forward: list[Span] = []
        self._backward: list[Span] = []
        self._graph_building: list[Span] = []
        self._start_ns = 0
        self._thread = 0
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to record.

        Raises:
            CountError: Another profiler is at work; ask `why_not` first.
        """
        self._recording.start()
        self._thread = get_ident()
        self._undo.append(surround_backward(self._note_backward))
        # The compiler would look into a hook on a module that it has compiled in place.
        if self._model is not None and getattr(self._model, "_compiled_call_impl", None) is None:
            hook = _CallHook(self._thread, self._forward)
            self._undo.append(self._model.register_forward_pre_hook(hook, prepend=True).remove)
            self._undo.append(self._model.register_forward_hook(hook).remove)
            self._undo.append(hide_hooks(self._model))
        self._start_ns = time_ns()

    def stop(self) -> None:
        """End the recording, reduce it, and give its memory back. Does nothing the second time."""
        end_ns = time_ns()
        while self._undo:
            self._undo.pop()()
        events = self._recording.stop()
        if events:
            self.profile = self._reduce(events, end_ns)

    def discard(self) -> None:
        """End the recording and throw it away."""
        while self._undo:
            self._undo.pop()()
        self._recording.give_way()

    def _reduce(self, events: list[Any], end_ns: int) -> StepProfile | None:
        launches = {raw.correlation_id(): raw.start_ns() for raw in events if is_launch(raw)} if self.is_cuda else {}
        ranges = [range_of(raw) for raw in events if raw.device_type() == DeviceType.CPU and not is_launch(raw)]
        forward = self._forward
        if not forward:  # from the last batch, or the step's beginning, to the first backward pass
            until_ns = min((start for start, _ in self._backward), default=self._start_ns)
            batches = [int(r.end) for r in ranges if r.name.startswith(LOADING) and r.end <= until_ns]
            forward = [(max(batches, default=self._start_ns), until_ns)]
        on_device = (raw for raw in events if raw.device_type() == DeviceType.CUDA and not raw.is_user_annotation())
        marks = Marks((self._start_ns, end_ns), forward, self._backward, self._graph_building, launches)
        return reduce_cuda(ranges, map(_kernel_of, on_device), marks) if self.is_cuda else reduce_cpu(ranges, marks)

    @contextmanager
    def _note_backward(self, builds_graph: bool) -> Iterator[None]:
        start_ns = time_ns()
        try:
            yield
        finally:
            span = (start_ns, time_ns())
            if get_ident() == self._thread:
                self._backward.append(span)
                if builds_graph:
                    self._graph_building.append(span)


class _CallHook(OwnHook):
    """Notes the calls of the model by the loop, not by the compiler or a backward pass; it is put before and after."""

    __slots__ = ("_spans", "_start_ns", "_thread")

    def __init__(self, thread: int, spans: list[Span]) -> None:
        self._start_ns = 0
        self._thread = thread
        self._spans = spans

    def __call__(self, module: nn.Module, inputs: Any, *output: Any) -> None:
        if torch.compiler.is_compiling() or graph_task_id() != -1 or get_ident() != self._thread:
            return
        if not output:
            self._start_ns = time_ns()
        elif self._start_ns:
            self._spans.append((self._start_ns, time_ns()))


def _kernel_of(raw: Any) -> Kernel:
    start_ns, end_ns = raw.start_ns(), raw.start_ns() + raw.duration_ns()
    ids = raw.correlation_id(), raw.linked_correlation_id()
    return Kernel(raw.name(), start_ns, end_ns, raw.device_resource_id(), *ids)
