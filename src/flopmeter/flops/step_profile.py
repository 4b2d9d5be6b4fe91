"""Where did the seconds of one profiled step go? From the ranges that a profiler recorded to an additive split.

Ranges nest: `aten::linear` surrounds `aten::addmm`, a node of the backward pass surrounds its operators. Each moment of
a thread belongs to the innermost operator that runs in it, and where several threads or streams run at once, to the
first in `KINDS`. So the parts are exclusive and add up. On a CPU the operators themselves are the work; on CUDA the
kernels are, and an operator only says what its kernels were for.

Left out: time outside the forward, backward and optimizer windows, such as the wait for data; and inside a compiled
region whatever the compiler fused, which counts as non-matmul work as a whole. Recording costs about a microsecond a
range, so that a profiled step is longer than an ordinary one, most of all where operators are tiny.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from flopmeter.devices.kernels import is_communication, is_matmul
from flopmeter.flops import formulas

Kind = Literal["matmul", "recompute", "non_matmul", "optimizer", "copy", "communication", "gap"]
KINDS: tuple[Kind, ...] = ("matmul", "recompute", "non_matmul", "optimizer", "copy", "communication", "gap")
"""In order of precedence: communication counts only where nothing else runs, a gap only where nothing runs at all."""

Span = tuple[int, int]
"""Start and end, in nanoseconds of Unix time, as the profiler has them."""

MAX_TOP = 20

_Phase = Literal["loading", "forward", "backward", "recompute", "optimizer"]
_NODE = "autograd::engine::evaluate_function"
_LOADING = "enumerate(DataLoader)"
_OPTIMIZER = "Optimizer."
_COMPILED = "## Call CompiledFxGraph"
_COLLECTIVE = re.compile(r"nccl|gloo:|c10d::|_c10d_functional::", re.IGNORECASE)
_HOST_COPY = re.compile(r"HtoD|DtoH")


class Range(NamedTuple):
    """Something that a thread of the host did."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    sequence_nr: int = -1
    """Negative where gradients are off."""
    is_node: bool = False
    """A node of the backward pass."""
    correlation_id: int = 0
    """What its kernels refer to."""


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

    def windows(self) -> list[Span]:
        """Forward and backward passes with what lies between a forward and its backward."""
        starts = sorted(span[0] for span in self.backward)
        found = list(self.backward)
        for (start, end), following in pairwise([*sorted(self.forward), (self.step[1], self.step[1])]):
            backward = next((at for at in starts if end <= at <= following[0]), end)
            found.append((start, backward))
        return union(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One step in exclusive seconds."""

    device: Literal["cpu", "cuda"]
    """Whose time this is."""
    seconds: Mapping[Kind, float]
    """By kind of work."""
    num_ops: int
    """Operators that lie in no other operator; on CUDA, kernels."""
    top: tuple[tuple[str, float, int], ...]
    """Name, seconds of its own, and calls, longest first."""

    @property
    def kernels_s(self) -> float:
        """When anything but copies ran."""
        return sum(spent_s for kind, spent_s in self.seconds.items() if kind not in ("copy", "gap"))

    def fields(self) -> dict[str, Any]:
        """As the run file has it."""
        return {
            "device": self.device,
            **{f"{kind}_s": self.seconds.get(kind, 0.0) for kind in KINDS},
            "num_ops": self.num_ops,
            "top": [list(item) for item in self.top],
        }


def reduce_cpu(ranges: Iterable[Range], marks: Marks) -> StepProfile | None:
    """Split a step whose work is done by the operators themselves; None when none was recorded in it."""
    walk = _Walk(ranges, marks)
    if not walk.num_ops:
        return None
    intervals = [*walk.intervals, *((*window, "gap") for window in marks.windows())]
    return StepProfile(device="cpu", seconds=exclusive(intervals), num_ops=walk.num_ops, top=walk.top())


def reduce_cuda(ranges: Iterable[Range], kernels: Iterable[Kernel], marks: Marks) -> StepProfile | None:
    """Split a step whose work is done by kernels; None when there is none, which is no sign of an idle device."""
    walk = _Walk(ranges, marks)
    own = [kernel for kernel in kernels if _was_launched_inside(kernel, walk, marks)]
    if not own:
        return None
    kinds = [_kernel_kind(k, walk) for k in own]
    begin_ns = _begin_ns(own, kinds)
    intervals = [
        (max(k.start_ns, begin_ns), k.end_ns, kind) for k, kind in zip(own, kinds, strict=True) if k.end_ns > begin_ns
    ]
    whole = (begin_ns, max(k.end_ns for k in own))
    intervals += [(start, end, "gap") for start, end in subtract([whole], walk.loading)]
    spent: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for kernel in own:
        spent[kernel.name][0] += kernel.end_ns - kernel.start_ns
        spent[kernel.name][1] += 1
    return StepProfile(device="cuda", seconds=exclusive(intervals), num_ops=len(own), top=_top(spent))


def exclusive(intervals: Iterable[tuple[int, int, Kind]]) -> dict[Kind, float]:
    """Seconds by kind, every moment given to the first kind of `KINDS` that is active in it."""
    edges: list[tuple[int, int, int]] = []
    for start, end, kind in intervals:
        rank = KINDS.index(kind)
        edges += [(start, 1, rank), (end, -1, rank)]
    edges.sort()
    active = [0] * len(KINDS)
    total_ns = [0] * len(KINDS)
    last = 0
    for at, change, rank in edges:
        if at > last:
            owner = next((i for i, count in enumerate(active) if count), None)
            if owner is not None:
                total_ns[owner] += at - last
            last = at
        active[rank] += change
    return {kind: total_ns[rank] / 1e9 for rank, kind in enumerate(KINDS)}


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(spans: Iterable[Span], holes: Iterable[Span]) -> list[Span]:
    """What is left of the spans without the holes."""
    left = union(spans)
    for hole_start, hole_end in union(holes):
        left = [
            piece
            for start, end in left
            for piece in ((start, min(end, hole_start)), (max(start, hole_end), end))
            if piece[1] > piece[0]
        ]
    return left


class _Frame:
    """A range that is open while its inner ones are looked at."""

    __slots__ = ("again_until_ns", "cursor_ns", "end_ns", "is_op", "kind", "name", "phase")

    def __init__(self, range_: Range, phase: _Phase, kind: Kind | None, is_op: bool) -> None:
        self.name = range_.name
        self.end_ns = range_.end_ns
        self.cursor_ns = range_.start_ns
        self.phase: _Phase = phase
        self.kind = kind
        self.is_op = is_op
        self.again_until_ns = 0
        """End of the last recomputed operator directly inside."""


class _Walk:
    """Goes through the ranges of each thread, outer before inner, and gives each moment to the innermost operator."""

    def __init__(self, ranges: Iterable[Range], marks: Marks) -> None:
        self.intervals: list[tuple[int, int, Kind]] = []
        self.kind_by_id: dict[int, Kind] = {}
        self.start_by_id: dict[int, int] = {}
        self.loading: list[Span] = []
        self.num_ops = 0
        self._spent: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._windows = marks.windows()
        self._graph_building = marks.graph_building
        self._step = marks.step
        stack: list[_Frame] = []
        thread = None
        for range_ in sorted(ranges, key=lambda r: (r.thread, r.start_ns, -r.end_ns)):
            while stack and (range_.thread != thread or stack[-1].end_ns <= range_.start_ns):
                self._close(stack)
            thread = range_.thread
            self._open(range_, stack)
        while stack:
            self._close(stack)

    def top(self) -> tuple[tuple[str, float, int], ...]:
        return _top(self._spent)

    def _open(self, range_: Range, stack: list[_Frame]) -> None:
        outer = stack[-1] if stack else None
        phase = self._phase(range_, outer)
        is_op = not range_.is_node and is_operator(range_.name)
        kind = self._kind(range_, phase, is_op, outer)
        if outer is not None:
            self._note_self(outer, range_.start_ns)
            self._note_again(outer, range_, phase)
        if phase == "loading" and (outer is None or outer.phase != "loading"):
            self.loading.append((range_.start_ns, range_.end_ns))
        if range_.correlation_id:
            self.start_by_id[range_.correlation_id] = range_.start_ns
        if kind is not None:
            self.kind_by_id[range_.correlation_id] = kind
            self._spent[range_.name][1] += 1
            self.num_ops += is_op and not (outer is not None and outer.is_op)
        stack.append(_Frame(range_, phase, kind, is_op or (outer is not None and outer.is_op)))

    def _note_again(self, outer: _Frame, range_: Range, phase: _Phase) -> None:
        """The interpreter between two recomputed operators recomputes too."""
        if phase == "recompute" and outer.phase != "recompute":
            if outer.again_until_ns:
                self.intervals.append((outer.again_until_ns, range_.start_ns, "recompute"))
            outer.again_until_ns = range_.end_ns
        elif range_.is_node:
            outer.again_until_ns = 0

    def _close(self, stack: list[_Frame]) -> None:
        frame = stack.pop()
        self._note_self(frame, frame.end_ns)
        if stack:
            stack[-1].cursor_ns = max(stack[-1].cursor_ns, frame.end_ns)

    def _note_self(self, frame: _Frame, until_ns: int) -> None:
        """The time since the last inner range belongs to this one."""
        if frame.kind is not None and until_ns > frame.cursor_ns:
            self.intervals.append((frame.cursor_ns, until_ns, frame.kind))
            self._spent[frame.name][0] += until_ns - frame.cursor_ns
        frame.cursor_ns = until_ns

    def _phase(self, range_: Range, outer: _Frame | None) -> _Phase:
        if range_.is_node or range_.name.startswith(_NODE):
            return "backward"
        if outer is not None and outer.phase in ("loading", "optimizer", "recompute"):
            return outer.phase
        if range_.name.startswith(_OPTIMIZER):
            return "optimizer"
        if range_.name.startswith(_LOADING):
            return "loading"
        if outer is None or outer.phase == "forward":
            return "forward"
        is_again = range_.sequence_nr >= 0 and not _is_in(range_.start_ns, self._graph_building)
        return "recompute" if is_again else "backward"

    def _kind(self, range_: Range, phase: _Phase, is_op: bool, outer: _Frame | None) -> Kind | None:
        """What the range's own time counts as; None for what only surrounds operators."""
        if phase == "optimizer":
            return "optimizer" if _is_in(range_.start_ns, [self._step]) else None
        if not is_op or phase == "loading":
            return None
        if is_collective(range_.name):
            return "communication"
        if phase == "recompute":
            return "recompute"
        if phase == "forward" and not _is_in(range_.start_ns, self._windows):
            if outer is not None:
                return outer.kind
            # After the last backward pass lies what prepares the update, such as clipping gradients.
            is_after = bool(self._windows) and self._windows[-1][1] <= range_.start_ns < self._step[1]
            return "optimizer" if is_after else None
        return "matmul" if is_matrix_op(range_.name) else "non_matmul"


@lru_cache(maxsize=4096)
def is_matrix_op(name: str) -> bool:
    """Whether an operator's own time is matrix work: it has a FLOP formula, or the name of one that would."""
    return formulas.is_matrix_work(name)


@lru_cache(maxsize=4096)
def is_operator(name: str) -> bool:
    """Whether a range is work; nodes of the backward pass and user annotations only surround some."""
    if name.startswith(("autograd::", "torch::autograd::")):
        return False
    return "::" in name or name.startswith(_COMPILED) or is_collective(name)


@lru_cache(maxsize=4096)
def is_collective(name: str) -> bool:
    """Whether an operator talks to other ranks."""
    return _COLLECTIVE.search(name) is not None


def _is_in(at_ns: int, spans: Sequence[Span]) -> bool:
    return any(start <= at_ns < end for start, end in spans)


def _was_launched_inside(kernel: Kernel, walk: _Walk, marks: Marks) -> bool:
    """Kernels of the step before run into this one: only what was launched in it is its own."""
    launched_ns = marks.launches.get(kernel.launch_id, walk.start_by_id.get(kernel.op_id))
    return launched_ns is not None and marks.step[0] <= launched_ns < marks.step[1]


def _begin_ns(kernels: Sequence[Kernel], kinds: Sequence[Kind]) -> int:
    """When the device comes to this step: when the stream that computes does.

    Until then that works for the step before, unrecorded, and what runs beside it (the next batch on its way, on a
    stream of its own) is hidden by it.
    """
    busy_ns: dict[int, int] = defaultdict(int)
    for kernel, kind in zip(kernels, kinds, strict=True):
        if kind not in ("copy", "communication"):
            busy_ns[kernel.stream] += kernel.end_ns - kernel.start_ns
    stream = max(busy_ns, key=busy_ns.__getitem__, default=None)
    return min(kernel.start_ns for kernel in kernels if stream is None or kernel.stream == stream)


def _kernel_kind(kernel: Kernel, walk: _Walk) -> Kind:
    if is_communication(kernel.name):
        return "communication"
    if _HOST_COPY.search(kernel.name):
        return "copy"
    kind = walk.kind_by_id.get(kernel.op_id)
    if kind is None or kind == "communication":
        return "matmul" if is_matmul(kernel.name) else "non_matmul"
    return kind


def _top(spent: Mapping[str, Sequence[int]]) -> tuple[tuple[str, float, int], ...]:
    rows = ((name, own_ns / 1e9, calls) for name, (own_ns, calls) in spent.items())
    return tuple(sorted(rows, key=lambda row: -row[1])[:MAX_TOP])
