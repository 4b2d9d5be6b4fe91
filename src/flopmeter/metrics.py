"""From what was measured to the numbers people read. Nobody else makes a metric of other numbers.

A step as it was measured is a mapping; what is not known is not in it:

    ns                                          wall time, waiting for data included
    data_wait_ns, ... optimizer_ns              host time by phase; what is left of `ns` is the phase "other"
    exposed_communication_ns                    part of the backward pass that only waited for other ranks
    tokens, tokens_processed, samples           over all micro-batches; processed: padding included
    model_flop, hardware_flop, processed_flop   FLOPs by dtype: what the mathematics needs, what ran, and what it would
                                                need if padding were tokens like any other
    device_ns                                   `ns` times the devices of the job, where that is not `ns`

    derive([{"ns": 5e8, "tokens": 8192, "model_flop": {"bf16": 2e14}}], {"bf16": 989.4e12})["perf/mfu"]     # 0.404

The run file holds these numbers (`as_row`), and its reader derives the rest, with the same formulas on whole columns:
so a wrong peak is mended afterwards, by `Run.derived`. Pure arithmetic: no tensors, no clock.
"""

from __future__ import annotations

import math
import operator
import statistics
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partialmethod
from itertools import chain, compress, pairwise, repeat
from typing import Any, TypeAlias

from flopmeter.columns import LARGEST, finite, known, tamed_column
from flopmeter.schema import PHASES

NEGLIGIBLE = 1e-4
"""Share of the FLOPs that needs no peak of its own: at a hundredth of the others' speed it would be 1 % of the time.
Every Llama has such a product, for its rotary embedding in float32, and some makers state no fp32 peak."""
COUNTS = ("tokens", "tokens_processed", "samples")
FLOP = {"model_flop": "perf/mfu", "hardware_flop": "perf/hfu", "processed_flop": "perf/mfu_processed"}
UTILISATIONS = (*FLOP.values(), "perf/mfu_percent")
"""Metrics that depend on peaks."""
_SHARES = {f"{phase}_ns": f"perf/{phase}_share" for phase in PHASES if phase != "other"}
ROW = "."
"""Stands before the names of these numbers in a row, where they are among the user's own."""
MEASURED = frozenset(ROW + name for name in ("ns", *_SHARES, "exposed_communication_ns", *COUNTS))
"""What rates and shares are derived from, as rows call it."""
DEVICE_NS = f"{ROW}device_ns"
WORK = (DEVICE_NS, *(f"{ROW}{kind}/" for kind in FLOP))
"""How the names of what utilisations are derived from begin."""
_OF_STEPS = ("perf/step_time", "perf/model_flop")
"""Metrics that are so much a step; all others are weighted by the time of the steps."""

Columns: TypeAlias = "dict[str, array[float]]"
Parts: TypeAlias = tuple[Sequence[float], Sequence[float]]
Turns: TypeAlias = Sequence[tuple[int, Mapping[str, float]]]
Measured: TypeAlias = Mapping[str, Any]
"""A step, or several of them added up; or `Column`s in place of the numbers."""


class Column:
    """A number for each of many steps, to calculate with as if it were one."""

    __slots__ = ("values",)

    def __init__(self, values: Iterable[float]) -> None:
        self.values = array("d", values)

    def each(self, operation: Callable[[float, float], float], other: Any) -> Column:
        """The operation on each of them and the other: a column, too, or one number."""
        others = other.values if isinstance(other, Column) else repeat(other)
        return Column(list(map(operation, self.values, others)))  # an array is made of a list in half the time

    __add__ = __radd__ = partialmethod(each, operator.add)
    __sub__ = partialmethod(each, operator.sub)
    __mul__ = __rmul__ = partialmethod(each, operator.mul)
    __truediv__ = partialmethod(each, operator.truediv)


def derive(steps: Sequence[Measured], peaks: Mapping[str, float]) -> dict[str, float]:
    """The metrics of these steps together, so that a logged value is no single lucky step.

    What is not known of every one of them is left out.

    Args:
        peaks: FLOP/s by dtype, as far as known.
    """
    if not steps:
        return {}
    total = steps[0] if len(steps) == 1 else add_up(steps)
    found = rates(total, len(steps)) | utilisations(total, peaks, len(steps))
    for unknown in [key for key, value in found.items() if value != value]:
        del found[unknown]
    return found


def add_up(steps: Sequence[Measured]) -> Measured:
    """Steps as one; what is not known of every one of them is left out."""
    total: dict[str, Any] = {}
    for key in set(steps[0]).intersection(*steps):
        values = [step[key] for step in steps]
        if key in FLOP:
            dtypes = dict.fromkeys(chain.from_iterable(values))
            total[key] = {dtype: sum([flop.get(dtype, 0.0) for flop in values]) for dtype in dtypes}
        else:
            total[key] = sum(values)
    return total


def rates(step: Measured, num_steps: int = 1) -> dict[str, Any]:
    """What follows from a step's times and counts: NaN where it took no time."""
    left = step["ns"]
    per_ns = _one_over(left)
    per_s = per_ns * 1e9
    found = {"perf/step_time": left / (1e9 * num_steps), "perf/steps_per_second": per_s * num_steps}
    found |= {f"perf/{name}_per_second": step[name] * per_s for name in COUNTS if name in step}
    for name, key in _SHARES.items():
        if name in step:
            found[key] = step[name] * per_ns
            left = left - step[name]
    found["perf/other_share"] = left * per_ns
    if "exposed_communication_ns" in step:
        found["perf/exposed_communication_share"] = step["exposed_communication_ns"] * per_ns
    return found


def utilisations(step: Measured, peaks: Mapping[str, float], num_steps: int = 1) -> dict[str, Any]:
    """What follows from a step's FLOPs and the peaks: NaN where a peak is missing. Never clipped."""
    per_s = _one_over(step.get("device_ns", step["ns"])) * 1e9
    found = {key: _ideal_s(step[kind], peaks) * per_s for kind, key in FLOP.items() if kind in step}
    if "model_flop" in step:
        found["perf/mfu_percent"] = found["perf/mfu"] * 100
        found["perf/model_flop"] = sum(step["model_flop"].values()) / num_steps
    return found


def utilisation(flop: Mapping[str, float], peaks: Mapping[str, float], wall_s: float) -> float | None:
    """Share of what the device could have done: the sum over dtypes of (FLOPs / peak) / wall time.

    Each dtype is held against its own peak, so that a run in bf16 with an fp32 head is not judged by one of them alone.
    None when a dtype that did work worth mentioning has no known peak. Never clipped: above 1 means a wrong peak, dtype
    or count.
    """
    share = _ideal_s(flop, peaks) / wall_s if wall_s > 0 else math.nan
    return share if share == share else None


def _ideal_s(flop: Mapping[str, Any], peaks: Mapping[str, float]) -> Any:
    """Seconds that the FLOPs take at the peaks of their dtypes."""
    total = sum(flop.values()) if not flop.keys() <= peaks.keys() else 0.0
    ideal_s: Any = 0.0
    for dtype, amount in flop.items():
        peak = peaks.get(dtype)
        part_s = amount / peak if peak else _nothing_if_little(amount, total)
        ideal_s = part_s + ideal_s if len(flop) > 1 else part_s
    return ideal_s


def _nothing_if_little(amount: Any, total: Any) -> Any:
    if isinstance(amount, Column):
        return amount.each(_nothing_if_little, total)
    return 0.0 if amount <= NEGLIGIBLE * total else math.nan


def _one_over(number: Any) -> Any:
    """NaN where it is not above 0."""
    if isinstance(number, Column):
        return Column([1 / value if value > 0 else math.nan for value in number.values])
    return 1 / number if number > 0 else math.nan


def as_row(step: Measured) -> dict[str, float]:
    """A step as the run file holds it: numbers by name."""
    row: dict[str, float] = {}
    for name, value in step.items():
        if name in FLOP:
            for dtype in value:
                row[f"{ROW}{name}/{dtype}"] = value[dtype]
        elif name != "device_ns" or value != step["ns"]:
            row[ROW + name] = value
    return row


def flop_per_s(peaks: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The peaks of a record that can be ones, by dtype."""
    found = {dtype: known([peak.get("flop_per_s")], LARGEST) for dtype, peak in peaks.items()}
    return {dtype: rates[0] for dtype, rates in found.items() if rates and rates[0] > 0}


def rate_columns(rows: Mapping[str, array[float]], time: array[float], starts: Sequence[int]) -> Columns:
    """What follows from the times and counts of rows, by metric; nothing where they hold none.

    Args:
        rows: What rows hold, as columns.
        time: When each of them ended.
        starts: Positions of the first row after each start of the run.
    """
    step = {key.removeprefix(ROW): Column(values) for key, values in rows.items() if key in MEASURED}
    if "ns" not in step:
        return {}
    found = rates(step)
    step_s, goodput = found["perf/step_time"].values, Column(())
    for start, stop in pairwise([*starts, len(time)]):
        goodput.values.extend(map(GoodputSoFar().add, time[start:stop], step_s[start:stop]))
    found["perf/goodput"] = goodput
    return {key: tamed_column(column.values) for key, column in found.items()}


def utilisation_columns(work: Columns, step_s: array[float], turns: Turns) -> Columns:
    """What follows from the FLOPs of rows, by metric; NaN where a row has none, or a peak is not known.

    Args:
        work: What rows hold of it, as columns.
        turns: Positions, and the peaks that the rows from there on are held against.
    """
    found: Columns = {}
    for (start, peaks), stop in zip(turns, [*(place for place, _ in turns[1:]), len(step_s)], strict=True):
        step: dict[str, Any] = {"ns": Column(step_s[start:stop]) * 1e9}
        for kind in FLOP:
            prefix = f"{ROW}{kind}/"
            dtypes = {key.removeprefix(prefix): key for key in work if key.startswith(prefix)}
            if dtypes:
                step[kind] = _by_dtype({dtype: work[key][start:stop] for dtype, key in dtypes.items()})
        if DEVICE_NS in work:
            pairs = zip(work[DEVICE_NS][start:stop], step["ns"].values, strict=True)
            step["device_ns"] = Column(ns if of_job != of_job else of_job for of_job, ns in pairs)
        for key, column in utilisations(step, peaks).items():
            found.setdefault(key, array("d")).extend(tamed_column(column.values))
    return {key: values for key, values in found.items() if any(map(math.isfinite, values))}


def _by_dtype(flop: Columns) -> dict[str, Column]:
    """A dtype that a row does not name did nothing in it; a row that names none is unknown."""
    if len(flop) == 1:
        return {dtype: Column(values) for dtype, values in flop.items()}
    least = [0.0 if any(value == value for value in row) else math.nan for row in zip(*flop.values(), strict=True)]
    return {
        dtype: Column(nothing if value != value else value for value, nothing in zip(values, least, strict=True))
        for dtype, values in flop.items()
    }


class GoodputSoFar:
    """Share of the wall time since the first step of a start that went into steps, after each of them."""

    def __init__(self) -> None:
        self._begin_s = math.nan
        self._steps_s = 0.0

    def add(self, time_s: float, step_s: float) -> float:
        """Take a step that ended then; NaN for the first one, which has nothing before it."""
        self._steps_s += step_s
        if math.isnan(self._begin_s):
            self._begin_s = time_s - step_s
            return math.nan
        return float(self._steps_s * _one_over(time_s - self._begin_s))


class Means:
    """Step time and other metrics over steps that come one by one, weighted by step time; running sums, no list."""

    def __init__(self, *keys: str) -> None:
        self.num_steps = 0
        self._sums = {key: [0.0, 0.0] for key in ("perf/step_time", *keys)}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take in one step; without a duration it does not count."""
        step_s = metrics.get("perf/step_time")
        self.num_steps += step_s is not None
        for key, sums in self._sums.items():
            if step_s is not None and (value := metrics.get(key)) is not None:
                weight = 1.0 if key in _OF_STEPS else step_s
                sums[0] += value * weight
                sums[1] += weight

    def compute(self) -> dict[str, float]:
        """What is known of each."""
        return {key: above / below for key, (above, below) in self._sums.items() if below > 0}


def summarise(columns: Mapping[str, Sequence[float]], steady: Sequence[int]) -> dict[str, float]:
    """The run in a few numbers, from the steps that are neither warm-up nor measured ones.

    Rates and shares are weighted by step time, which makes them those of the whole stretch. A column may hold NaN where
    a step did not know the value; such steps count for neither side.
    """
    if "perf/step_time" not in columns:
        return {}
    step_s = _at(columns["perf/step_time"], steady)
    ordered = sorted(finite(step_s))
    if not ordered:
        return {}
    result = {
        "steady_steps": float(len(ordered)),
        "step_time_median_s": statistics.median(ordered),
        "step_time_p95_s": ordered[math.ceil(0.95 * len(ordered)) - 1],
    }
    for key in columns:
        if key.startswith("perf/") and key not in (*_OF_STEPS, "perf/steps_per_second"):
            above, below = parts(columns, key, steady)
            if len(below) and math.isfinite(mean := sum(above) / sum(below)):
                result[key] = mean
    return result


def parts(columns: Mapping[str, Sequence[float]], key: str, places: Sequence[int], limit: float = LARGEST) -> Parts:
    """What a metric over many steps is a sum over a sum of, step by step; a step that lacks either is left out."""
    values = _at(columns[key], places)
    below = array("d", [1.0]) * len(values) if key in _OF_STEPS else _at(columns["perf/step_time"], places)
    above = array("d", map(operator.mul, values, below))
    if sum(map(abs, above)) < limit and sum(below) < limit and min(below, default=0.0) > 0:
        return above, below
    is_known = bytes(abs(a) < limit and 0 < b < limit for a, b in zip(above, below, strict=True))
    return array("d", compress(above, is_known)), array("d", compress(below, is_known))


def _at(values: Sequence[float], places: Sequence[int]) -> Sequence[float]:
    """The values at these places; not a copy where all are meant, for a run may have a million steps."""
    return values if len(values) == len(places) else array("d", map(values.__getitem__, places))
