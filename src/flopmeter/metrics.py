"""From FLOPs, seconds and tokens to the numbers people read: pure arithmetic, no tensors, no clock.

window = Window()
window.add(Step(step_s=0.5, model_flop={"bf16": 2e14}, tokens=8192))
window.compute({"bf16": 989.4e12})["perf/mfu"]          # 0.404
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flopmeter.schema import PHASES


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one optimizer step did."""

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


def utilisation(flop: Mapping[str, float], peak_flop_per_s: Mapping[str, float], wall_s: float) -> float | None:
    """Share of what the device could have done: the sum over dtypes of (FLOPs / peak) / wall time.

    Each dtype is held against its own peak, so that a run in bf16 with an fp32 head is not judged by one of them alone.
    None when a dtype that did work has no known peak. Never clipped: above 1 means a wrong peak, dtype or count.
    """
    if wall_s <= 0 or any(amount and not peak_flop_per_s.get(dtype) for dtype, amount in flop.items()):
        return None
    return sum(amount / peak_flop_per_s[dtype] for dtype, amount in flop.items() if amount) / wall_s


class Window:
    """Aggregates the steps between two log lines, so that a logged value is no single lucky step."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> None:
        """Take one more step into the aggregate."""
        self._steps.append(step)

    def compute(self, peak_flop_per_s: Mapping[str, float], num_devices: int = 1) -> dict[str, float]:
        """The window's metrics; a number that is not known for every step of it is left out."""
        wall_s = sum(step.step_s for step in self._steps)
        if not self._steps or wall_s <= 0:
            return {}
        result = {"perf/step_time": wall_s / len(self._steps), "perf/steps_per_second": len(self._steps) / wall_s}
        for name in ("tokens", "tokens_processed", "samples"):
            total = _total(getattr(step, name) for step in self._steps)
            if total is not None:
                result[f"perf/{name}_per_second"] = total / wall_s
        result |= self._phase_shares(wall_s)
        peak = {dtype: rate * num_devices for dtype, rate in peak_flop_per_s.items()}
        return result | self._flop_metrics(peak, wall_s)

    def _phase_shares(self, wall_s: float) -> dict[str, float]:
        seconds = {phase: sum(step.phase_s.get(phase, 0.0) for step in self._steps) for phase in PHASES}
        seconds["other"] += wall_s - sum(seconds.values())
        return {f"perf/{phase}_share": value / wall_s for phase, value in seconds.items()}

    def _flop_metrics(self, peak_flop_per_s: Mapping[str, float], wall_s: float) -> dict[str, float]:
        result = {}
        model = _sum_by_dtype(step.model_flop for step in self._steps)
        if model is not None:
            result["perf/model_flop"] = sum(model.values()) / len(self._steps)
            mfu = utilisation(model, peak_flop_per_s, wall_s)
            if mfu is not None:
                result["perf/mfu"] = mfu
                result["perf/mfu_percent"] = 100 * mfu
        others = {
            "perf/hfu": _sum_by_dtype(step.hardware_flop for step in self._steps),
            "perf/mfu_processed": _sum_by_dtype(step.processed_flop for step in self._steps),
        }
        for key, flop in others.items():
            share = utilisation(flop, peak_flop_per_s, wall_s) if flop is not None else None
            if share is not None:
                result[key] = share
        return result


def _total(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _sum_by_dtype(parts: Iterable[Mapping[str, float] | None]) -> dict[str, float] | None:
    total: dict[str, float] = {}
    for part in parts:
        if part is None:
            return None
        for dtype, flop in part.items():
            total[dtype] = total.get(dtype, 0.0) + flop
    return total


def summarise(columns: Mapping[str, Sequence[float]], steady: Sequence[int]) -> dict[str, float]:
    """The run in a few numbers, from the steps that are neither warm-up nor measured ones.

    Rates and shares are weighted by step time, which makes them those of the whole stretch. A column may hold NaN where
    a step did not know the value; such steps count for neither side.
    """
    step_s = columns.get("perf/step_time", ())
    times = [step_s[i] for i in steady if i < len(step_s) and math.isfinite(step_s[i])]
    if not times:
        return {}
    result = {
        "steady_steps": float(len(times)),
        "step_time_median_s": statistics.median(times),
        "step_time_p95_s": _quantile(times, 0.95),
    }
    for key, values in columns.items():
        if key.startswith("perf/") and key not in ("perf/step_time", "perf/steps_per_second", "perf/model_flop"):
            mean = _time_weighted(values, step_s, steady)
            if mean is not None:
                result[key] = mean
    return result


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _time_weighted(values: Sequence[float], step_s: Sequence[float], steady: Sequence[int]) -> float | None:
    pairs = [(values[i], step_s[i]) for i in steady if math.isfinite(values[i]) and math.isfinite(step_s[i])]
    total_s = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total_s if total_s > 0 else None
