"""How did the run go over its steps: MFU, step time, phases, and what happened when?"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flopmeter.columns import at, finite
from flopmeter.record import Run
from flopmeter.report._thin import buckets, evenly, extremes, medians
from flopmeter.schema import PHASES
from flopmeter.text import clean, number, rounded

MAX_POINTS = 4000
"""Points of one line: more than a wide screen has pixels for."""
MAX_STRETCHES = 240
"""Points of the line through the medians."""
MAX_BARS = 48
"""Bars of the breakdown by phase."""
MAX_MARKS = 300
"""Pauses, measured steps and the like that are marked in a chart."""


def series_of(run: Run) -> dict[str, Any]:
    """MFU and step time over the steps, thinned with their extremes kept, and what is marked beside them."""
    return {
        "mfu": _line(run, "perf/mfu"),
        "step_s": _line(run, "perf/step_time"),
        "marks": _marks(run),
    }


def phases_of(run: Run) -> dict[str, Any] | None:
    """Mean seconds of a step by phase, over stretches of the run and for all steady steps; None without phases."""
    shares = {phase: run.column(f"perf/{phase}_share") for phase in PHASES if f"perf/{phase}_share" in run.columns}
    if not shares or not len(run):
        return None
    step_s = run.column("perf/step_time")
    parts, steady = list(buckets(len(run), MAX_BARS)), run.steady_stretches()
    means, steady_s = {}, {}
    for phase, share in shares.items():
        seconds = array("d", map(operator.mul, share, step_s))
        means[phase] = [rounded(_mean(seconds[part.start : part.stop])) for part in parts]
        steady_s[phase] = _mean(at(seconds, steady))
    return {
        "step": [[run.step[part.start], run.step[part.stop - 1]] for part in parts],
        "seconds": means,
        "steady_s": steady_s,
    }


def _line(run: Run, key: str) -> dict[str, Any] | None:
    values = run.columns.get(key)
    if values is None or not any(map(math.isfinite, values)):
        return None
    places = extremes(values, MAX_POINTS)
    points = list(_with_gaps(run, places, values))
    typical = medians(values, MAX_STRETCHES)
    return {
        "step": [step for step, _ in points],
        "value": [value for _, value in points],
        "typical_step": [run.step[place] for place, _ in typical],
        "typical": [rounded(value) for _, value in typical],
        "num_values": len(values),
    }


def _with_gaps(run: Run, places: Iterable[int], values: array[float]) -> Iterator[tuple[int | None, float | None]]:
    """Points of a line that breaks where a restart went back to an earlier step."""
    last: int | None = None
    for place in places:
        step = run.step[place]
        if last is not None and step < last:
            yield None, None
        last = step
        yield step, rounded(values[place])


def _marks(run: Run) -> dict[str, Any]:
    measured = sorted(place for place, marks in run.marks.items() if "warmup" not in marks)
    return {
        "warmup": [[run.step[first], run.step[last]] for first, last in _stretches(_warmup(run))][:MAX_MARKS],
        "measured": [run.step[place] for place in evenly(measured, MAX_MARKS)],
        "pauses": _pauses(run),
        "drops": [
            {"step": _step_of(event.get("since_step")), "from_mfu": number(event.get("from_mfu")), "to_mfu": to_mfu}
            for event in run.named("regime")
            if (to_mfu := number(event.get("to_mfu"))) is not None
        ][:MAX_MARKS],
        "num_restarts": len(run.headers) - 1,
    }


def _pauses(run: Run) -> list[dict[str, Any]]:
    """The pauses; of too many the longest."""
    found = [
        (duration_s, _step_of(event.get("after_step")), event.get("name"))
        for event in run.named("pause")
        if (duration_s := number(event.get("duration_s"))) is not None
    ]
    longest = sorted(found, key=lambda pause: -pause[0])[:MAX_MARKS]
    return [
        {"step": step, "name": clean(name, 40), "duration_s": duration_s}
        for duration_s, step, name in sorted(longest, key=lambda pause: pause[1] or 0)
    ]


def _step_of(value: Any) -> int | None:
    step = number(value)
    return None if step is None or abs(step) >= 1 << 53 else int(step)


def _warmup(run: Run) -> list[int]:
    return sorted(place for place, marks in run.marks.items() if "warmup" in marks)


def _stretches(places: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each unbroken stretch of positions."""
    first: int | None = None
    for place, following in zip(places, [*places[1:], None], strict=False):
        first = place if first is None else first
        if following != place + 1:
            yield first, place
            first = None


def _mean(values: Sequence[float]) -> float | None:
    total = sum(values) if len(values) else math.nan  # not fsum, which raises on both infinities
    if math.isfinite(total):
        return total / len(values)
    known = finite(values)
    return number(sum(known) / len(known)) if known else None
