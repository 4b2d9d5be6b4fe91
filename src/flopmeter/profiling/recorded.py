"""What did torch's profiler record, and what was each instant spent on? One reader for live profiles and trace files.

The profiler records a range for everything that passes the dispatcher, so the same work appears several times, one
range inside the other (`aten::linear` around `aten::addmm`). `nest` finds which range lies in which, `find_phases`
which part of the step each belongs to, `choose` whose FLOPs count, and `segments` what each instant is charged to.
Times are in any one unit: live profiles have nanoseconds, trace files microseconds. No torch is imported here.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from flopmeter.flops.formulas import RECORDED_DTYPES, Formula, Spec, Work, is_closer

Phase = Literal["loading", "forward", "backward", "recompute", "optimizer", "other"]

NODE = "autograd::engine::evaluate_function"
LOADING = "enumerate(DataLoader)"
OPTIMIZER_MARK = "flopmeter: the optimizer steps"
_OPTIMIZER = ("Optimizer.", OPTIMIZER_MARK)


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


@dataclass(slots=True)
class FlopSums:
    """FLOPs of one step."""

    by_phase: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """forward, backward, recompute, optimizer."""
    model: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What the mathematics needs, by dtype: forward and backward."""
    hardware: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """All that ran, by dtype."""
    by_op: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Model FLOPs by operator."""

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
