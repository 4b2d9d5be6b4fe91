"""How many FLOPs did each step do, in which format, and for how much of the matrix work are the shapes known?

An operator counts when it launched a kernel: a recomputation that checkpointing stopped early has recorded an operator
that never ran. On a CPU nothing shows that, so such operators count (as recomputation, which MFU leaves out).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from flopmeter.devices import normalise_dtype
from flopmeter.devices.kernels import is_matmul, is_tf32
from flopmeter.errors import ConfigError
from flopmeter.profiling.recorded import Activity, FlopSums, Range, choose, nest, uncounted
from flopmeter.traces.placement import Host
from flopmeter.traces.steps import StepWindow
from flopmeter.traces.timeline import DeviceEvents, Timeline

_ATTENTION = frozenset({"attention", "flex_attention"})


@dataclass(kw_only=True, slots=True)
class Counting:
    """The FLOPs of a trace."""

    steps: list[FlopSums]
    """One for each window."""
    coverage: float | None = None
    """Share of the matrix work, by its time, whose shapes were recorded and understood; None when there is none."""
    uncounted: dict[str, int] = field(default_factory=dict)
    """Operators whose FLOPs do not follow from what was recorded, with their number of calls."""
    has_tf32: bool | None = None
    """Whether fp32 products ran in TF32; None when no kernel of one was seen."""
    has_flags_lost: bool = False
    """Whether attention was counted without knowing if it was causal."""


def count(timeline: Timeline, placed: DeviceEvents, host: Host, windows: list[StepWindow]) -> Counting:
    """Add up the operators of each window."""
    nested = nest(timeline.operators)
    counted, lost = choose(nested), uncounted(nested)
    result = Counting(steps=[FlopSums() for _ in windows], uncounted=Counter(operator.name for operator in lost))
    kernels = _Kernels(timeline, placed) if len(timeline.device_events) else None
    for operator in counted:
        launched = kernels.of(operator) if kernels else []
        index = bisect_right(windows, operator.start, key=lambda window: window.host_us) - 1
        if index < 0 or operator.start >= windows[index].host_end_us or (kernels and not launched):
            continue
        assert operator.formula is not None
        assert operator.flop is not None
        phase = host.phase(operator.thread, operator.start)
        if phase == "backward" and host.is_repeated(operator.thread, operator.start):
            phase = "recompute"
        dtype = _dtype(operator, kernels, launched, result)
        result.steps[index].add(operator.name, phase, dtype, operator.flop.exact, operator.flop.hardware)
        result.has_flags_lost |= operator.formula.family in _ATTENTION and not timeline.has_values
    if kernels:
        counted_us, other_us = kernels.seen_us()
    else:
        counted_us, other_us = (sum(operator.end - operator.start for operator in group) for group in (counted, lost))
    result.coverage = counted_us / (counted_us + other_us) if counted_us + other_us > 0 else None
    return result


class _Kernels:
    """The kernels that each thread launched, in the order of their launches."""

    def __init__(self, timeline: Timeline, placed: DeviceEvents) -> None:
        self._names, self._placed = timeline.kernel_names, placed
        self._launches: dict[int, tuple[list[float], list[int]]] = {}
        self._counted: set[int] = set()
        known = (position for position, thread in enumerate(placed.thread) if thread >= 0)
        for position in sorted(known, key=placed.launch_us.__getitem__):
            times, positions = self._launches.setdefault(placed.thread[position], ([], []))
            times.append(placed.launch_us[position])
            positions.append(position)

    def of(self, operator: Range) -> list[int]:
        """Positions of the kernels that an operator launched."""
        times, positions = self._launches.get(operator.thread, ([], []))
        found = positions[bisect_left(times, operator.start) : bisect_right(times, operator.end)]
        self._counted.update(found)
        return found

    def names(self, positions: list[int]) -> Iterator[str]:
        return (self._names[self._placed.name[position]] for position in positions)

    def seen_us(self) -> tuple[float, float]:
        """Time of the kernels that multiply matrices: those of counted operators, and the others."""
        spent_us = [0.0, 0.0]
        for position in range(len(self._placed)):
            if self._placed.activity[position] < Activity.COMMUNICATION and is_matmul(next(self.names([position]))):
                is_other = position not in self._counted
                spent_us[is_other] += self._placed.end_us[position] - self._placed.start_us[position]
        return spent_us[0], spent_us[1]


def _dtype(operator: Range, kernels: _Kernels | None, launched: list[int], result: Counting) -> str:
    try:
        dtype = normalise_dtype(operator.dtype)
    except ConfigError:
        return operator.dtype or "unknown"
    if dtype != "fp32" or kernels is None:
        return dtype
    is_tensor_core = any(is_tf32(name) for name in kernels.names(launched))
    result.has_tf32 = bool(result.has_tf32) or is_tensor_core
    return "tf32" if is_tensor_core else "fp32"
