"""What did torch's profiler record, and what was each instant spent on? One reader for live profiles and trace files.

The profiler records a range for everything that passes the dispatcher, so the same work appears several times, one
range inside the other (`aten::linear` around `aten::addmm`). `nest` finds which range lies in which, `find_phases`
which part of the step each belongs to, `choose` whose FLOPs count, and `segments` what each instant is charged to.
Times are in any one unit: live profiles have nanoseconds, trace files microseconds. No torch is imported here.

`reduce_cpu` and `reduce_cuda` split a live step. Each moment of a thread belongs to the innermost operator that runs in
it, and where several threads or streams run at once, to the first in `Activity`. So the parts are exclusive and add up.
On a CPU the operators themselves are the work; on CUDA the kernels are, and an operator only says what its kernels were
for. Left out: time outside the forward, backward and optimizer windows, such as the wait for data; and inside a
compiled region whatever the compiler fused, which counts as non-matmul work as a whole.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from flopmeter.devices import NO_FLOP
from flopmeter.devices.kernels import is_communication, is_matmul
from flopmeter.flops.formulas import RECORDED_DTYPES, Formula, Spec, Work, is_closer, is_matrix_work

Phase = Literal["loading", "forward", "backward", "recompute", "optimizer", "other"]

NODE = "autograd::engine::evaluate_function"
LOADING = "enumerate(DataLoader)"
OPTIMIZER_MARK = "flopmeter: the optimizer steps"
_OPTIMIZER = ("Optimizer.", OPTIMIZER_MARK)
UNSEEN_MASKS = (
    "The profiler records shapes, not values: padding, masks given as tensors, and attention made of plain products "
    "count in full."
)


class Activity(IntEnum):
    """What the device is doing at an instant; where several things run at once, the first of this list is charged."""

    DATA = 0
    """Fetching a batch, on a device that is the host itself."""
    MATMUL = 1
    RECOMPUTE = 2
    OPTIMIZER = 3
    OTHER_COMPUTE = 4
    """Element-wise work, norms, softmax, embeddings, sorting."""
    COMMUNICATION = 5
    DEVICE_COPY = 6
    """Copies and fills within the device's memory."""
    HOST_COPY = 7
    """Copies between host and device, or between devices."""
    IDLE = 8


PARTS = {
    "matmul": Activity.MATMUL,
    "recompute": Activity.RECOMPUTE,
    "non_matmul": Activity.OTHER_COMPUTE,
    "optimizer": Activity.OPTIMIZER,
    "copy": Activity.HOST_COPY,
    "communication": Activity.COMMUNICATION,
    "gap": Activity.IDLE,
}
"""Names of the run file for what the time of a profiled step is charged to."""
COMPUTE = (Activity.MATMUL, Activity.RECOMPUTE, Activity.OPTIMIZER, Activity.OTHER_COMPUTE)


@dataclass(slots=True, eq=False)
class Range:
    """Something that a thread of the host did: an operator, a node of the backward pass, an annotation."""

    name: str
    start: float
    end: float
    thread: int
    sequence_nr: int = -1
    """Of the autograd node that the operator makes; negative where gradients are off."""
    is_node: bool = False
    """A node of the backward pass: `forward_thread` and `sequence_nr` name the operator it is the gradient of."""
    forward_thread: int = 0
    correlation_id: int = 0
    """What its kernels refer to."""
    formula: Formula | None = None
    flop: Work | None = None
    """See `recorded_flop`."""
    dtype: str = ""
    outer: Range | None = field(init=False)
    """The range that it lies directly in: see `nest`."""
    cursor: float = field(init=False)
    """Up to where its own time is shared out."""
    phase: Phase = field(init=False)
    """See `find_phases`."""
    activity: Activity | None = field(init=False)
    """What its own time counts as."""
    has_closer: bool = field(init=False)
    """Whether an operator inside is the same work, closer to what ran: see `choose`."""
    is_counted: bool = field(init=False)
    """Whether it is an operator whose FLOPs count; for a split of time, whether it is an operator at all."""
    is_inside: bool = field(init=False)
    """Whether it lies in one that is."""
    is_settled: bool = field(init=False)
    """Whether its FLOPs are counted, or listed as unknown, by itself or by a range inside: see `uncounted`."""

    def around(self) -> Iterator[Range]:
        """The ranges that it lies in, inner before outer."""
        outer = self.outer
        while outer is not None:
            yield outer
            outer = outer.outer


def nest(ranges: Iterable[Range]) -> list[Range]:
    """Find for each range the one that surrounds it on its thread; the result has outer before inner."""
    nested = sorted(ranges, key=lambda range_: (range_.thread, range_.start, -range_.end))
    stack: list[Range] = []
    for range_ in nested:
        while stack and (stack[-1].thread != range_.thread or stack[-1].end <= range_.start):
            stack.pop()
        range_.outer, range_.cursor = (stack[-1] if stack else None), range_.start
        stack.append(range_)
    return nested


def find_phases(nested: Sequence[Range], graph_building: Cover) -> None:
    """Say of every range of a live profile which part of the step it belongs to.

    Gradients are on in the forward pass. Inside the backward pass that means forward work done again, except in a pass
    that builds a graph (`create_graph`).
    """
    for range_ in nested:
        outer = range_.outer.phase if range_.outer is not None else "forward"
        if range_.is_node:
            range_.phase = "backward"
        elif outer in ("loading", "optimizer", "recompute"):
            range_.phase = outer
        elif range_.name.startswith(_OPTIMIZER):
            range_.phase = "optimizer"
        elif range_.name.startswith(LOADING):
            range_.phase = "loading"
        elif outer == "backward" and range_.sequence_nr >= 0 and not graph_building.holds(range_.start):
            range_.phase = "recompute"
        else:
            range_.phase = outer


def choose(nested: Sequence[Range]) -> list[Range]:
    """The ranges whose FLOPs count, so that no work counts twice.

    Of products inside a product that is the innermost, of an attention the whole: see `formulas.is_closer`.
    """
    for range_ in nested:
        range_.has_closer = False
        if range_.formula is not None and range_.flop is not None:
            for outer in range_.around():
                outer.has_closer |= outer.formula is not None and is_closer(range_.formula, outer.formula)
                if outer.formula is range_.formula and outer.flop is not None:
                    break  # what lies around that was asked for its sake
    for range_ in nested:
        around = range_.outer
        range_.is_inside = around is not None and (around.is_inside or around.is_counted)
        range_.is_counted = not range_.is_inside and not range_.has_closer and range_.flop is not None
        range_.is_settled = range_.is_inside or range_.is_counted
    return [range_ for range_ in nested if range_.is_counted]


def uncounted(nested: Sequence[Range], may_hide_flop: Callable[[str], bool] = lambda _: False) -> list[Range]:
    """After `choose`, the operators whose FLOPs are known nowhere: neither by their own record nor by one inside.

    Args:
        may_hide_flop: Whether an operator without a formula is to be listed too.
    """
    found = []
    for range_ in reversed(nested):
        if not range_.is_settled and (range_.formula is not None or may_hide_flop(range_.name)):
            found.append(range_)
            range_.is_settled = True
        if range_.is_settled and range_.outer is not None:
            range_.outer.is_settled = True
    return found


class FlopSums:
    """FLOPs of one step: by phase; by dtype what the mathematics needs, and all that ran; model FLOPs by operator."""

    def __init__(self) -> None:
        self.by_phase, self.model, self.hardware, self.by_op = (defaultdict[str, float](float) for _ in range(4))

    def fields(self) -> dict[str, Any]:
        """As a `FlopCount` and the event `count` name them."""
        phases = {f"{phase}_flop": self.by_phase[phase] for phase in ("forward", "backward", "recompute", "optimizer")}
        by = {"by_dtype": self.model, "hardware_by_dtype": self.hardware, "by_op": self.by_op}
        return {**phases, "hardware_flop": sum(self.hardware.values()), **{key: dict(part) for key, part in by.items()}}

    def add(self, op: str, phase: Phase, dtype: str, flop: float, hardware_flop: float) -> None:
        """Work of no known phase is forward work."""
        phase = "forward" if phase in ("other", "loading") else phase
        self.by_phase[phase] += flop
        self.hardware[dtype] += hardware_flop
        if phase in ("forward", "backward"):
            self.model[dtype] += flop
            self.by_op[op] += flop


def recorded_flop(formula: Formula, shapes: Any, dtypes: Any, values: Any) -> tuple[Work | None, str]:
    """FLOPs and dtype of a recorded call; the FLOPs are None when they do not follow from the record."""
    try:
        arguments = recorded_arguments(shapes, dtypes, values)
        dtype = next((argument.dtype for argument in arguments if isinstance(argument, Spec)), "")
        flop = formula.of_record(arguments)
        is_sound = all(isinstance(count, (int, float)) and 0 <= count < 1e30 for count in flop)
    except (ValueError, IndexError, TypeError, AttributeError, ZeroDivisionError):
        return None, ""
    if dtype in NO_FLOP:
        return Work(0, 0, 0), dtype
    return (flop if is_sound else None), dtype


def recorded_arguments(shapes: Any, dtypes: Any, values: Any) -> list[Any]:
    """What the operator was called with, each tensor as its `Spec`; what the record has lost is None."""
    return [_argument(*parts) for parts in zip(shapes, dtypes, values, strict=False)]


def _argument(shape: Any, dtype: str, value: Any) -> Any:
    if dtype == "TensorList":
        return [Spec(tuple(map(int, member))) for member in shape]
    if dtype not in ("", "Scalar", "ScalarList", "GenericList"):
        return Spec(tuple(map(int, shape)), RECORDED_DTYPES.get(dtype, dtype.removeprefix("c10::").lower()))
    if not isinstance(value, str):
        return value
    try:  # a value as a trace file prints it: "[2, 2]", "True", "0."
        return ast.literal_eval(value) if 0 < len(value) < 1000 else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


class Cover:
    """Stretches of time, merged; answers whether an instant lies in one."""

    def __init__(self, stretches: Iterable[tuple[float, float]]) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        for start, end in sorted(stretches):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            elif end > start:
                self.starts.append(start)
                self.ends.append(end)

    def without(self, other: Cover) -> Cover:
        """What the other does not cover."""
        edges = sorted({*self.starts, *self.ends, *other.starts, *other.ends})
        return Cover((a, b) for a, b in pairwise(edges) if self.holds(a) and not other.holds(a))

    def holds(self, instant: float) -> bool:
        position = bisect_right(self.starts, instant) - 1
        return position >= 0 and instant < self.ends[position]

    def overlap(self, start: float, end: float) -> float:
        """How much of the stretch from `start` to `end` is covered."""
        total = 0.0
        position = max(0, bisect_right(self.starts, start) - 1)
        while position < len(self.starts) and self.starts[position] < end:
            total += max(0.0, min(end, self.ends[position]) - max(start, self.starts[position]))
            position += 1
        return total


class Segment(NamedTuple):
    """A stretch in which nothing changed."""

    start: float
    end: float
    activity: int
    """What it is charged to; `Activity.IDLE` when nothing ran."""
    owner: int
    """Position of an event: of one that runs and is charged, or of the one that ends an idle stretch; -1 for none."""
    is_communicating: bool
    """Whether communication ran, charged or not."""


_IDLE = int(Activity.IDLE)
_IDLE_BIT, _COMMUNICATION_BIT = 1 << _IDLE, 1 << int(Activity.COMMUNICATION)
_END, _CUT, _START = 0, 1, 2


def segments(
    starts: Sequence[float], ends: Sequence[float], works: Sequence[int], cuts: Iterable[float]
) -> Iterator[Segment]:
    """The time from the first cut to the last, in order, cut at every change and at every cut.

    Where several things ran at once, the instant is charged to one of them, the first in the order of `Activity`:
    compute hides communication, and both hide copies. So the parts are exclusive and add up to the whole.
    """
    marks = sorted(set(cuts))
    if len(marks) < 2:
        return
    first, last = marks[0], marks[-1]
    changes = [(mark, _CUT, -1) for mark in marks]
    for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end > first and start < last and end > start:
            changes += [(max(start, first), _START, position), (min(end, last), _END, position)]
    changes.sort()  # at one instant ends come first
    active: list[set[int]] = [set() for _ in Activity]
    running = _IDLE_BIT  # a bit for each kind of work, so that the lowest one says what to charge
    now = first
    for index, (instant, kind, position) in enumerate(changes):
        if instant > now:
            work = (running & -running).bit_length() - 1
            if work != _IDLE:
                owner = next(iter(active[work]))
            else:
                owner = next((changes[i][2] for i in range(index, len(changes)) if changes[i][1] == _START), -1)
            yield Segment(now, instant, work, owner, bool(running & _COMMUNICATION_BIT))
            now = instant
        if kind == _START:
            work = works[position]
            active[work].add(position)
            running |= 1 << work
        elif kind == _END:
            work = works[position]
            active[work].discard(position)
            if not active[work]:
                running &= ~(1 << work)


MAX_TOP = 20

Span = tuple[int, int]
"""Start and end, in nanoseconds of Unix time, as the profiler has them."""
side_spans: list[list[Span]] = []
"""Takes, for each step that is recorded now, when it was about something else than training."""

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
    forward: list[Span]
    """One per call of the model; the loss that follows belongs to it."""
    backward: list[Span]
    graph_building: list[Span]
    """Backward passes with `create_graph`: gradients are on there, which otherwise means recomputation."""
    launches: Mapping[int, int] = {}
    """`launch_id` to its time, for the launches that were recorded."""
    side: Sequence[Span] = ()
    """What was no training: named roles, and passes without gradients."""

    def windows(self) -> Cover:
        """Forward and backward passes with what lies between a forward and its backward."""
        starts = sorted(span[0] for span in self.backward)
        found = list(self.backward)
        for (start, end), following in pairwise([*sorted(self.forward), (self.step[1], self.step[1])]):
            found.append((start, next((at for at in starts if end <= at <= following[0]), end)))
        return Cover(found).without(Cover(self.side))


def reduce_cpu(ranges: Iterable[Range], marks: Marks) -> dict[str, Any] | None:
    """Split a step whose work is done by the operators themselves; None when none was recorded in it.

    The result is as the run file has it: the device whose time this is, exclusive seconds by the names of `PARTS`, how
    many operators lie in no other, and name, seconds of its own and calls of those that took longest.
    """
    host = _Host(ranges, marks)
    if not host.num_ops:
        return None
    seconds = _exclusive(host.intervals, marks.step, host.windows.overlap)
    return {"device": "cpu", **seconds, "num_ops": host.num_ops, "top": _top(host.spent)}


def reduce_cuda(ranges: Iterable[Range], kernels: Iterable[Kernel], marks: Marks) -> dict[str, Any] | None:
    """Split a step whose work is done by kernels; None when there is none, which is no sign of an idle device."""
    host = _Host(ranges, marks)
    own: list[tuple[Kernel, Activity]] = []
    side, beside = Cover(marks.side), list(marks.side)
    spent: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for kernel in kernels:
        # Kernels of the step before run into this one: only what was launched in it is its own.
        by_op = host.by_id.get(kernel.op_id)
        launched_ns = marks.launches.get(kernel.launch_id, by_op.start if by_op is not None else -1)
        if side.holds(launched_ns):
            beside.append((kernel.start_ns, kernel.end_ns))
        elif marks.step[0] <= launched_ns < marks.step[1]:
            own.append((kernel, _kernel_activity(kernel.name, by_op.activity if by_op is not None else None)))
            spent[kernel.name][0] += kernel.end_ns - kernel.start_ns
            spent[kernel.name][1] += 1
    if not own:
        return None
    whole = _begin_ns(own), max(kernel.end_ns for kernel, _ in own)
    loading = Cover([*((range_.start, range_.end) for range_ in host.nested if range_.phase == "loading"), *beside])
    intervals = [(kernel.start_ns, kernel.end_ns, activity) for kernel, activity in own]
    seconds = _exclusive(intervals, whole, lambda start, end: end - start - loading.overlap(start, end))
    return {"device": "cuda", **seconds, "num_ops": len(own), "top": _top(spent)}


def _top(spent: Mapping[str, Sequence[int]]) -> list[list[Any]]:
    longest = sorted(spent.items(), key=lambda item: -item[1][0])[:MAX_TOP]
    return [[name, own_ns / 1e9, calls] for name, (own_ns, calls) in longest]


def _exclusive(
    intervals: Sequence[tuple[float, float, Activity]], whole: tuple[float, float], gap: Callable[[float, float], float]
) -> dict[str, float]:
    """Seconds by part; `gap` says how much of a stretch in which nothing ran is a gap."""
    spent, idle = [0.0] * len(Activity), int(Activity.IDLE)
    starts, ends, activities = ([interval[i] for interval in intervals] for i in range(3))
    for start, end, activity, _, _ in segments(starts, ends, [*map(int, activities)], whole):
        spent[activity] += gap(start, end) if activity == idle else end - start
    return {f"{part}_s": spent[activity] / 1e9 for part, activity in PARTS.items()}


class _Host:
    """What the threads of the host did: each moment belongs to the innermost operator that ran in it."""

    def __init__(self, ranges: Iterable[Range], marks: Marks) -> None:
        self.intervals: list[tuple[float, float, Activity]] = []
        self.spent: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.num_ops = 0
        self.windows, self._step, self._side = marks.windows(), marks.step, Cover(marks.side)
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
        if not range_.is_counted or range_.phase == "loading" or self._side.holds(range_.start):
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
