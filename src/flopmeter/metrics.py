"""From FLOPs, seconds and tokens to the numbers people read: pure arithmetic, no tensors, no clock.

window = Window()
window.add(Step(step_s=0.5, model_flop={"bf16": 2e14}, tokens=8192))
window.compute({"bf16": 989.4e12})["perf/mfu"]          # 0.404
"""

from __future__ import annotations

import math
import operator
import statistics
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

from msgspec import Struct, field

from flopmeter.columns import finite
from flopmeter.schema import PHASES

NEGLIGIBLE = 1e-4
"""Share of the FLOPs that needs no peak of its own: at a hundredth of the others' speed it would be 1 % of the time.
Every Llama has such a product, for its rotary embedding in float32, and some makers state no fp32 peak."""


class Step(Struct, frozen=True, kw_only=True):
    """What one optimizer step did. Made on every step."""

    step_s: float
    """Wall time, waiting for data included."""
    model_flop: Mapping[str, float] | None = None
    """FLOPs the mathematics needs, by dtype of the operation; None while they are unknown."""
    hardware_flop: Mapping[str, float] | None = None
    """FLOPs that ran, recomputation included, by dtype."""
    processed_flop: Mapping[str, float] | None = None
    """Model FLOPs as if padding were tokens like any other, by dtype."""
    tokens: int | None = None
    """Tokens that are not padding, over all micro-batches."""
    tokens_processed: int | None = None
    """All tokens, padding included."""
    samples: int | None = None
    """Samples, over all micro-batches."""
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase; what is missing up to `step_s` is the phase "other"."""
    exposed_s: float | None = None
    """Seconds of the backward pass that only waited for other ranks; None where that is not known."""


def utilisation(flop: Mapping[str, float], peak_flop_per_s: Mapping[str, float], wall_s: float) -> float | None:
    """Share of what the device could have done: the sum over dtypes of (FLOPs / peak) / wall time.

    Each dtype is held against its own peak, so that a run in bf16 with an fp32 head is not judged by one of them alone.
    None when a dtype that did work worth mentioning has no known peak. Never clipped: above 1 means a wrong peak, dtype
    or count.
    """
    if wall_s <= 0:
        return None
    ideal_s = 0.0
    for dtype, amount in flop.items():
        if peak := peak_flop_per_s.get(dtype):
            ideal_s += amount / peak
        elif amount > NEGLIGIBLE * sum(flop.values()):
            return None
    return ideal_s / wall_s


class Window:
    """Aggregates the steps between two log lines, so that a logged value is no single lucky step.

    A number that one step does not know is unknown for the window: its total is None from there on.
    """

    __slots__ = ("_counts", "_exposed_s", "_flop", "_num_steps", "_phase_s", "_wall_s")

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._num_steps = 0
        self._wall_s = 0.0
        self._exposed_s: float | None = 0.0
        self._counts: list[int | None] = [0] * len(_COUNTS)
        self._flop: list[dict[str, float] | None] = [{} for _ in _FLOP]
        self._phase_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for step in steps:
            self.add(step)

    def __len__(self) -> int:
        return self._num_steps

    def add(self, step: Step) -> None:
        """Take one more step into the aggregate."""
        self._num_steps += 1
        self._wall_s += step.step_s
        exposed_s = self._exposed_s
        self._exposed_s = None if step.exposed_s is None or exposed_s is None else exposed_s + step.exposed_s
        for phase, seconds in step.phase_s.items():
            self._phase_s[phase] += seconds
        for place, count in enumerate((step.tokens, step.tokens_processed, step.samples)):
            total = self._counts[place]
            self._counts[place] = None if count is None or total is None else total + count
        totals = self._flop
        for place, flop in enumerate((step.model_flop, step.hardware_flop, step.processed_flop)):
            total_flop = totals[place]
            if flop is None or total_flop is None:
                totals[place] = None
                continue
            for dtype, amount in flop.items():
                total_flop[dtype] = total_flop.get(dtype, 0.0) + amount

    def compute(self, peak_flop_per_s: Mapping[str, float], num_devices: float = 1) -> dict[str, float]:
        """The window's metrics; what is not known for every step of it is left out."""
        wall_s = self._wall_s
        if not self._num_steps or wall_s <= 0:
            return {}
        result = {"perf/step_time": wall_s / self._num_steps, "perf/steps_per_second": self._num_steps / wall_s}
        for key, total in zip(_COUNTS, self._counts, strict=True):
            if total is not None:
                result[key] = total / wall_s
        rest_s = wall_s - sum(self._phase_s.values())
        for phase, key in _SHARES:
            result[key] = self._phase_s[phase] / wall_s
        result["perf/other_share"] += rest_s / wall_s
        if self._exposed_s is not None:
            result["perf/exposed_communication_share"] = self._exposed_s / wall_s
        model_flop = self._flop[0]
        if model_flop is not None:
            result["perf/model_flop"] = sum(model_flop.values()) / self._num_steps
        for key, flop in zip(_FLOP, self._flop, strict=True):
            share = utilisation(flop, peak_flop_per_s, wall_s * num_devices) if flop is not None else None
            if share is not None:
                result[key] = share
        if "perf/mfu" in result:
            result["perf/mfu_percent"] = 100 * result["perf/mfu"]
        return result


_COUNTS = ("perf/tokens_per_second", "perf/tokens_processed_per_second", "perf/samples_per_second")
_FLOP = ("perf/mfu", "perf/hfu", "perf/mfu_processed")
"""Metrics that are FLOPs over peak and time, in the order of the step's fields."""
_SHARES = tuple((phase, f"perf/{phase}_share") for phase in PHASES)


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
    for key, values in columns.items():
        if key.startswith("perf/") and key not in ("perf/step_time", "perf/steps_per_second", "perf/model_flop"):
            mean = _time_weighted(_at(values, steady), step_s)
            if mean is not None:
                result[key] = mean
    return result


def _at(values: Sequence[float], places: Sequence[int]) -> Sequence[float]:
    """The values at these places; not a copy where all are meant, for a run may have a million steps."""
    return values if len(values) == len(places) else array("d", map(values.__getitem__, places))


def _time_weighted(values: Sequence[float], step_s: Sequence[float]) -> float | None:
    mean = _weighted(values, step_s)
    if not math.isfinite(mean):
        is_known = bytes(map(operator.and_, map(math.isfinite, values), map(math.isfinite, step_s)))
        mean = _weighted(compress(values, is_known), array("d", compress(step_s, is_known)))
    return mean if math.isfinite(mean) else None


def _weighted(values: Iterable[float], weights: Sequence[float]) -> float:
    """NaN as soon as one of them is."""
    total = sum(weights)
    return sum(map(operator.mul, values, weights)) / total if total > 0 else math.nan
