"""From what was measured to the numbers people read. Nobody else makes a metric of other numbers.

A step as it was measured is a mapping; what is not known is not in it:

    ns                                          wall time, waiting for data included
    data_wait_ns, ... optimizer_ns              host time by phase; what is left of `ns` is the phase "other"
    exposed_communication_ns                    part of the backward pass that only waited for other ranks
    tokens, tokens_processed, samples           over all micro-batches; processed: padding included
    model_flop, hardware_flop, processed_flop   FLOPs by dtype: what the mathematics needs, what ran, and what it would
                                                need if padding were tokens like any other
    doubt                                       how far off predicted FLOPs may be: the largest error so far; 1
                                                (100 %) where nothing was tested, and absent where they were counted
    device_ns                                   `ns` times the devices of the job, where that is not `ns`

    derive([{"ns": 5e8, "tokens": 8192, "model_flop": {"bf16": 2e14}}], {"bf16": 989.4e12})["perf/mfu"]     # 0.404

The run file holds times and counts (`ROW_NAMES`) and, apart from them, the laws by which FLOPs follow from counts
(`work_of`). Its reader derives the rest, with the same formulas on whole columns: so a wrong peak or convention is
mended afterwards, by `Run.derived`. Pure arithmetic: no tensors, no clock.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partialmethod, reduce
from itertools import chain, compress, pairwise, repeat
from typing import Any, TypeAlias

from flopmeter.columns import LARGEST, at, finite, known, tamed_column
from flopmeter.schema import PHASES
from flopmeter.text import percent

NEGLIGIBLE = 1e-4
"""Share of the FLOPs that needs no peak of its own: at a hundredth of the others' speed it would be 1 % of the time.
Every Llama has such a product, for its rotary embedding in float32, and some makers state no fp32 peak."""
COUNTS = ("tokens", "tokens_processed", "samples")
FLOP = {"model_flop": "perf/mfu", "hardware_flop": "perf/hfu", "processed_flop": "perf/mfu_processed"}
UTILISATIONS = (*FLOP.values(), "perf/mfu_percent")
"""Metrics that depend on peaks."""
OTHER_FLOP = "other_flop"
"""Model FLOPs under the convention that the run does not have."""
NO_DOUBT, UNTESTED = 5e-4, 0.5
"""Below the first, the FLOPs are as good as counted; above the second, most of them were predicted and never tested."""
_SHARES = {f"{phase}_ns": f"perf/{phase}_share" for phase in PHASES if phase != "other"}
FIELDS = (
    *("samples", "tokens", "tokens_processed", "pairs_causal", "pairs_processed", "pairs_run", "images", "values"),
    *("values_squared", "values_padding", "values_squared_padding", "pairs_window", "pairs_window_processed"),
    *("decoder_tokens", "decoder_tokens_processed", "decoder_pairs_causal", "decoder_pairs_processed"),
    *("decoder_pairs_run", "cross_pairs", "cross_pairs_processed", "patches", "patch_pairs", "patch_pairs_window"),
)
"""What FLOPs grow with, as `Workload` calls it; what else it has follows from these."""
ROW_NAMES = ("law", "ns", *_SHARES, *FIELDS)
"""What the numbers of a row are, in this order: first the number of its law, 0 for none. -1 stands for unknown, and
what is 0 at the end is left out."""
MAX_LAWS = 1 << 20
"""Laws of one start of a run; each start has numbers of its own."""
ROW = "."
"""Stands before these names among the columns, where the user's own are, too."""
MEASURED = frozenset(ROW + name for name in (*ROW_NAMES, "exposed_communication_ns"))
"""What rates and shares are derived from, as columns are called."""
DEVICE_NS = f"{ROW}device_ns"
DOUBT = f"{ROW}doubt"
WORK = (DEVICE_NS, DOUBT, *(f"{ROW}{kind}/" for kind in (*FLOP, OTHER_FLOP)))
"""How the names of what utilisations are derived from begin."""
_OF_STEPS = ("perf/step_time", "perf/model_flop")
"""Metrics that are so much a step; all others are weighted by the time of the steps."""

CHUNK = 1 << 13
"""Of a long column, so many numbers at a time: as objects of Python's they take four times as much memory."""

Columns: TypeAlias = "dict[str, array[float]]"
Parts: TypeAlias = tuple[Sequence[float], Sequence[float]]
Turns: TypeAlias = Sequence[tuple[int, Mapping[str, float]]]
Measured: TypeAlias = Mapping[str, Any]
"""A step, or several of them added up; or `Column`s in place of the numbers."""


class Column:
    """A number for each of many steps, to calculate with as if it were one."""

    __slots__ = ("values",)

    def __init__(self, values: Iterable[float]) -> None:
        self.values = values if isinstance(values, array) else array("d", values)  # no copy: nobody changes them

    def each(self, operation: Callable[[float, float], float], other: Any) -> Column:
        """The operation on each of them and the other: a column, too, or one number."""
        values = self.values
        found = array("d", [0.0]) * len(values)
        for start in range(0, len(values), CHUNK):
            others = other.values[start : start + CHUNK] if isinstance(other, Column) else repeat(other)
            # An array takes a list in half the time.
            found[start : start + CHUNK] = array("d", list(map(operation, values[start : start + CHUNK], others)))
        return Column(found)

    __add__ = __radd__ = partialmethod(each, operator.add)
    __sub__ = partialmethod(each, operator.sub)
    __mul__ = __rmul__ = partialmethod(each, operator.mul)
    __truediv__ = partialmethod(each, operator.truediv)


def derive(steps: Sequence[Measured], peaks: Mapping[str, float], num_steps: int = 0) -> dict[str, float]:
    """The metrics of these steps together, so that a logged value is no single lucky step.

    What is not known of every one of them is left out.

    Args:
        peaks: FLOP/s by dtype, as far as known.
        num_steps: How many there are, where some are added up already.
    """
    if not steps:
        return {}
    total = steps[0] if len(steps) == 1 else add_up(steps)
    num_steps = num_steps or len(steps)
    found = rates(total, num_steps) | utilisations(total, peaks, num_steps)
    for unknown in [key for key, value in found.items() if value != value]:
        del found[unknown]
    return found


def add_up(steps: Sequence[Measured]) -> Measured:
    """Steps as one; what is not known of every one of them is left out."""
    total: dict[str, Any] = {}
    for key in set(steps[0]).intersection(*steps):
        values = [step[key] for step in steps]
        if isinstance(values[0], Mapping):
            dtypes = dict.fromkeys(chain.from_iterable(values))
            total[key] = {dtype: sum([flop.get(dtype, 0.0) for flop in values]) for dtype in dtypes}
        else:
            total[key] = sum(values)
    return total


def work_of(law: Mapping[str, Any], amounts: Measured, convention: str, num_steps: int = 1) -> dict[str, Any]:
    """FLOPs of steps that had so much of everything that they grow with; nothing where the law says nothing.

    Args:
        law: For "exact", "full", "hardware" and "processed" FLOPs, by dtype and field: FLOPs for one of it. The field
            "once" is for what every step has.
        convention: Which of them are the model's: exact or full.
    """
    other, processed = ("full", "processed") if convention == "exact" else ("exact", "full")
    names = {"model_flop": convention, "hardware_flop": "hardware", "processed_flop": processed, OTHER_FLOP: other}
    found: dict[str, Any] = {}
    for kind, own in names.items():
        if law.get(own):
            # Without padding, say, some of them are alike: a run of a million steps then has one column of both.
            alike = next((other for other in found if law[names[other]] == law[own]), None)
            found[kind] = found[alike] if alike else {
                dtype: reduce(operator.add, [
                    flop * (num_steps if name == "once" else amounts.get(name, 0)) for name, flop in parts.items()
                ] or [0.0])
                for dtype, parts in law[own].items()
            }  # fmt: skip
    return found


def of_job(step: Measured, job: Mapping[str, float]) -> Measured:
    """Rank 0's step as the whole job's, by how many times more FLOPs, tokens, samples and devices that has."""
    if not job:
        return step
    factors = {"tokens": job["tokens"], "tokens_processed": job["tokens"], "samples": job["samples"]}
    whole = {**step, **{name: step[name] * factor for name, factor in factors.items() if name in step}}
    for kind in (*FLOP, OTHER_FLOP):
        if kind in step:
            whole[kind] = {dtype: flop * job["flop"] for dtype, flop in step[kind].items()}
    return whole | {"device_ns": step["ns"] * job["devices"]}


def work_columns(rows: Columns, laws: Mapping[float, Mapping[str, Any]], convention: str) -> Columns:
    """FLOPs of rows by kind and dtype: what they hold themselves, else what follows from their laws.

    Args:
        rows: What they hold, as columns.
        laws: By the number that rows have.
    """
    found = {key: values for key, values in rows.items() if key.startswith(WORK)}
    numbers = rows.get(f"{ROW}law", array("d"))
    by_law: dict[float, Sequence[int]] = {number: range(len(numbers)) for number in numbers[:1]}
    if len(set(numbers)) > 1:
        by_law = defaultdict(list)
        for place, number in enumerate(numbers):
            by_law[number].append(place)  # type: ignore[attr-defined]
    for number in by_law.keys() & laws.keys():
        places, law = by_law[number], laws[number]
        is_all = len(places) == len(numbers)
        known = {name: rows[ROW + name] if is_all else array("d", map(rows[ROW + name].__getitem__, places))
                 for name in FIELDS if ROW + name in rows}  # fmt: skip
        amounts = {  # an amount that a row lacks is 0; a sum is NaN where any value is
            name: Column([0.0 if value != value else value for value in values] if math.isnan(sum(values)) else values)
            for name, values in known.items()
        }
        for kind, parts in work_of(law, amounts, convention).items():
            for dtype, flop in parts.items():
                values = flop.values if isinstance(flop, Column) else array("d", [flop]) * len(places)
                key = f"{ROW}{kind}/{dtype}"
                if is_all and key not in found:
                    found[key] = values
                    continue
                column = found.setdefault(key, array("d", [math.nan]) * len(numbers))
                for place, value in zip(places, values, strict=True):
                    column[place] = value
    return found


def job_columns(rows: Columns, jobs: Sequence[tuple[int, Mapping[str, float]]]) -> Columns:
    """Rows of rank 0 as the whole job's.

    Args:
        rows: What they hold, as columns, with their FLOPs.
        jobs: Positions, and the factors of `of_job` for the rows from there on; none for a job of one.
    """
    if not any(job for _, job in jobs) or f"{ROW}ns" not in rows:
        return rows
    ends = [*(place for place, _ in jobs[1:]), len(rows[f"{ROW}ns"])]
    spans = [(start, stop, job) for (start, job), stop in zip(jobs, ends, strict=True)]
    factors = {f"{ROW}{name}": name.partition("_")[0] for name in COUNTS} | {DEVICE_NS: "devices"}
    factors |= {key: "flop" for key in rows if key.startswith(WORK[2:])}
    whole = dict(rows)
    for key, name in factors.items():
        column, unknown = (rows[f"{ROW}ns"], math.nan) if name == "devices" else (rows.get(key), 1.0)
        if column is not None:
            parts = (column[start:stop] if not job and unknown == 1.0 else
                     array("d", [value * job.get(name, unknown) for value in column[start:stop]])
                     for start, stop, job in spans)  # fmt: skip
            whole[key] = array("d", chain.from_iterable(parts))
    return whole


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
    found: dict[str, Any] = {}
    for kind, key in FLOP.items():
        if kind in step:
            alike = next((FLOP[other] for other in FLOP if FLOP[other] in found and step[other] is step[kind]), None)
            found[key] = found[alike] if alike else _ideal_s(step[kind], peaks) * per_s
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
        return number.each(lambda value, nan: 1 / value if value > 0 else nan, math.nan)
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
    for name in COUNTS:
        if name in step and 0.0 in step[name].values:  # what a step had none of is no metric of it
            step[name] = Column([value or math.nan for value in step[name].values])
    found = rates(step)
    step_s, goodput = found["perf/step_time"].values, Column(())
    for start, stop in pairwise([*starts, len(time)]):
        goodput.values.extend(map(GoodputSoFar().add, time[start:stop], step_s[start:stop]))
    found["perf/goodput"] = goodput
    return {key: tamed_column(found.pop(key).values) for key in list(found)}


def utilisation_columns(work: Columns, step_s: array[float], turns: Turns) -> Columns:
    """What follows from the FLOPs of rows, by metric; NaN where a row has none, or a peak is not known.

    Args:
        work: What rows hold of it, as columns.
        turns: Positions, and the peaks that the rows from there on are held against.
    """
    found: Columns = {}
    for (start, peaks), stop in zip(turns, [*(place for place, _ in turns[1:]), len(step_s)], strict=True):
        inside = [range(start, stop)]
        step: dict[str, Any] = {"ns": Column(at(step_s, inside)) * 1e9}
        for kind in FLOP:
            prefix = f"{ROW}{kind}/"
            dtypes = {key.removeprefix(prefix): key for key in work if key.startswith(prefix)}
            alike = [other for other in step if other in FLOP and all(
                work.get(f"{ROW}{other}/{dtype}") is work[key] for dtype, key in dtypes.items()
            ) and len(step[other]) == len(dtypes)]  # fmt: skip
            if alike:
                step[kind] = step[alike[0]]
            elif dtypes:
                step[kind] = _by_dtype({dtype: at(work[key], inside) for dtype, key in dtypes.items()})
        if DEVICE_NS in work:
            pairs = zip(work[DEVICE_NS][start:stop], step["ns"].values, strict=True)
            step["device_ns"] = Column(ns if of_job != of_job else of_job for of_job, ns in pairs)
        for key, column in utilisations(step, peaks).items():
            values = tamed_column(column.values)
            found[key] = found[key] + values if key in found else values
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


def summarise(columns: Mapping[str, array[float]], steady: Sequence[range]) -> dict[str, float]:
    """The run in a few numbers, from the steps that are neither warm-up nor measured ones.

    Rates and shares are weighted by step time, which makes them those of the whole stretch. A column may hold NaN where
    a step did not know the value; such steps count for neither side.
    """
    if "perf/step_time" not in columns:
        return {}
    ordered = sorted(finite(at(columns["perf/step_time"], steady)))
    if not ordered:
        return {}
    result = {
        "steady_steps": float(len(ordered)),
        "step_time_median_s": (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2,
        "step_time_p95_s": ordered[math.ceil(0.95 * len(ordered)) - 1],
    }
    for key in columns:
        if key.startswith("perf/") and key not in (*_OF_STEPS, "perf/steps_per_second"):
            above, below = parts(columns, key, steady)
            if len(below) and math.isfinite(mean := sum(above) / sum(below)):
                result[key] = mean
    return result


def certainty(summary: Mapping[str, float]) -> str | None:
    """How sure the MFU of a summary is, in a word that stands beside it; None where there is none."""
    if "perf/mfu" not in summary:
        return None
    if summary.get("uncounted"):
        return "at least"
    doubt = summary.get("flop_doubt", 0.0)
    if doubt < NO_DOUBT:
        return "counted"
    return f"predicted ({f'error so far {percent(doubt)}' if doubt < UNTESTED else 'not tested yet'})"


def parts(columns: Mapping[str, array[float]], key: str, places: Sequence[range], limit: float = LARGEST) -> Parts:
    """What a metric over many steps is a sum over a sum of, step by step; a step that lacks either is left out."""
    values = at(columns[key], places)
    below = array("d", [1.0]) * len(values) if key in _OF_STEPS else at(columns["perf/step_time"], places)
    above = array("d", map(operator.mul, values, below))
    if sum(map(abs, above)) < limit and sum(below) < limit and min(below, default=0.0) > 0:
        return above, below
    is_known = bytes(abs(a) < limit and 0 < b < limit for a, b in zip(above, below, strict=True))
    return array("d", compress(above, is_known)), array("d", compress(below, is_known))
