"""What do the ranks' packets say about the job? Pure arithmetic on a table with a value per rank and field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flopmeter.distributed.packet import Table
from flopmeter.schema import PHASES

PHASE_COLUMNS = tuple(f"{phase}_s" for phase in PHASES)
QUANTITIES = ("step_s", "own_s", "blocked_s", *PHASE_COLUMNS, "memory_bytes")
MAX_LISTED = 1024
"""Own times by rank go into the record up to so many values; beyond, each value is the largest of a bucket of ranks."""


MISSED_READS, MISSED_S = 2, 10.0
"""A rank is missing when so many reads, over so many seconds, found nothing new of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobScale:
    """What rank 0's own numbers must be multiplied by to be those of the job."""

    flop: float
    """Model FLOPs of all ranks over those of rank 0."""
    tokens: float
    """Tokens of the job over those of rank 0, each token counted once however many ranks work on it."""
    samples: float
    """The same for samples."""
    devices: float
    """Peaks of all devices over the peak of rank 0's; a device that several ranks share counts once."""


class News(NamedTuple):
    """Who has been heard of."""

    is_missing: list[bool]
    """By rank: it has said nothing new for long, though rank 0 went on."""
    is_all_new: bool
    """Whether every rank that still takes part has said something new since this was last true."""
    is_complete: bool
    """Whether every rank that still takes part has said something at all."""


class Heard:
    """Keeps track of who has said something new. A rank's last word holds until it counts as missing."""

    def __init__(self, world_size: int) -> None:
        self._used = [0.0] * world_size
        self._last = [0.0] * world_size
        self._since_s: list[float] | None = None
        self._num_same = [0] * world_size

    def update(self, table: Table, now_s: float) -> News:
        """Take everybody's newest packets, read at `now_s`."""
        numbers = table["interval"]
        if self._since_s is None:
            self._since_s = [now_s] * len(numbers)
        for rank, number in enumerate(numbers):
            if number == self._last[rank]:
                self._num_same[rank] += 1
            else:
                self._num_same[rank], self._since_s[rank] = 0, now_s
        self._last = numbers
        is_missing = [
            num_same >= MISSED_READS and now_s - since_s >= MISSED_S
            for num_same, since_s in zip(self._num_same, self._since_s, strict=True)
        ]
        is_all_new = all(
            number > used or missing or is_last == 1
            for number, used, missing, is_last in zip(numbers, self._used, is_missing, table["is_last"], strict=True)
        )
        if is_all_new:
            self._used = numbers
        is_complete = all(number > 0 or missing for number, missing in zip(numbers, is_missing, strict=True))
        return News(is_missing, is_all_new, is_complete)


def column(table: Table, name: str) -> list[float]:
    """One value per rank; NaN where the rank has not said it."""
    if name == "own_s":
        return list(map(sum, zip(*(table[phase] for phase in PHASE_COLUMNS), strict=True)))
    return table[name]


def spread(table: Table, is_missing: Sequence[bool]) -> dict[str, dict[str, float | int]]:
    """By quantity: smallest, mean and largest of the known values, and whose the largest is; none that nobody knows."""
    found: dict[str, dict[str, float | int]] = {}
    for name in QUANTITIES:
        values = _present(column(table, name), is_missing)
        total = sum(values)
        known = values if total == total else [value for value in values if value == value]
        if known:
            highest, mean = max(known), sum(known) / len(known)
            found[name] = {"min": min(known), "mean": mean, "max": highest, "argmax": values.index(highest)}
    return found


def _present(values: list[float], is_missing: Sequence[bool]) -> list[float]:
    """The same with NaN for those who are missing."""
    if not any(is_missing):
        return values
    return [math.nan if missing else value for value, missing in zip(values, is_missing, strict=True)]


def describe(table: Table, is_missing: Sequence[bool]) -> dict[str, Any]:
    """The fields of the record's event `ranks`; those who are missing are left out of it."""
    num_steps = _present(table["num_steps"], is_missing)
    return {
        "world_size": len(is_missing),
        "missing": [rank for rank, missing in enumerate(is_missing) if missing],
        "stats": spread(table, is_missing),
        "own_s_by_rank": _listed(_present(column(table, "own_s"), is_missing)),
        "num_steps": int(max(filter(math.isfinite, num_steps), default=0)),
    }


def _listed(values: Sequence[float]) -> list[float | None]:
    width = math.ceil(len(values) / MAX_LISTED)
    buckets = (values[start : start + width] for start in range(0, len(values), width))
    return [max(filter(math.isfinite, bucket), default=None) for bucket in buckets]


def metrics_of(fields: dict[str, Any]) -> dict[str, float]:
    """The same for the sinks, under the keys of the schema."""
    stats = fields["stats"]
    metrics = {"rank/num_missing": float(len(fields["missing"]))}
    for key, quantity in (("step_time", "step_s"), ("own_time", "own_s"), ("blocked_time", "blocked_s")):
        if quantity in stats:
            metrics |= {f"rank/{key}_{name}": stats[quantity][name] for name in ("min", "mean", "max")}
    if "memory_bytes" in stats:
        metrics["rank/memory_max_bytes"] = stats["memory_bytes"]["max"]
    if "own_s" in stats:
        metrics["rank/slowest"] = float(stats["own_s"]["argmax"])
    return metrics


def scale_of(table: Table, sharers: Sequence[int], usual: JobScale, *, is_alike: bool) -> JobScale:
    """How rank 0's numbers grow to the job's. A rank that has said nothing for long must be a row of zeros.

    Args:
        sharers: For each rank, how many ranks use the same device, itself included.
        usual: What to go by where rank 0 does not know its own number.
        is_alike: Whether a rank that does not know its FLOPs does the same work as rank 0.
    """
    peaks, flop = table["peak_flop_per_s"], table["model_flop"]
    counted = [value for value in flop if value == value]
    stand_in = flop[0] if is_alike or not counted else sum(counted) / len(counted)
    by_device = [peak / number for peak, number in zip(_filled(peaks, peaks[0]), sharers, strict=True)]
    return JobScale(
        flop=_ratio(_filled(flop, stand_in), flop[0], usual.flop),
        tokens=_ratio(table["tokens_processed"], table["tokens_processed"][0], usual.tokens),
        samples=_ratio(table["samples"], table["samples"][0], usual.samples),
        devices=_ratio(by_device, peaks[0], usual.devices),
    )


def _filled(values: Sequence[float], stand_in: float) -> list[float]:
    return [value if value == value else stand_in for value in values]


def _ratio(values: Sequence[float], own: float, otherwise: float) -> float:
    """Sum over rank 0's own; `otherwise` when it is not known for every rank."""
    ratio = sum(values) / own if own else math.nan
    return ratio if math.isfinite(ratio) else otherwise
