"""What do the ranks' packets say of the job? Pure arithmetic on a table with a row per rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flopmeter.distributed.packet import COLUMN
from flopmeter.schema import PHASES

PHASE_COLUMNS = slice(COLUMN[f"{PHASES[0]}_s"], COLUMN[f"{PHASES[-1]}_s"] + 1)
"""They stand side by side in the packet; a slice costs a fraction of an index."""
QUANTITIES = ("step_s", "own_s", "blocked_s", *(f"{phase}_s" for phase in PHASES), "memory_bytes")
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

    is_missing: torch.Tensor
    """By rank: it has said nothing new for long, though rank 0 went on."""
    is_all_new: bool
    """Whether every rank that still takes part has said something new since this was last true."""


class Heard:
    """Keeps track of who has said something new. A rank's last word holds until it counts as missing."""

    def __init__(self, world_size: int) -> None:
        self._used = torch.zeros(world_size, dtype=torch.float64)
        self._last = torch.zeros(world_size, dtype=torch.float64)
        self._since_s: torch.Tensor | None = None
        self._num_same = torch.zeros(world_size)

    def update(self, table: torch.Tensor, now_s: float) -> News:
        """Take everybody's newest packets, read at `now_s`."""
        number = column(table, "interval")
        if self._since_s is None:
            self._since_s = torch.full_like(number, now_s)
        is_same = number == self._last
        self._num_same = torch.where(is_same, self._num_same + 1, 0)
        self._since_s = torch.where(is_same, self._since_s, now_s)
        self._last = number
        is_over = column(table, "is_last") == 1
        is_missing = (self._num_same >= MISSED_READS) & (now_s - self._since_s >= MISSED_S)
        is_all_new = bool(((number > self._used) | is_missing | is_over).all())
        if is_all_new:
            self._used = number
        return News(is_missing, is_all_new)


def column(table: torch.Tensor, name: str) -> torch.Tensor:
    """One value per rank; NaN where the rank has not said it."""
    if name == "own_s":
        return table[:, PHASE_COLUMNS].sum(1)
    return table[:, COLUMN[name]]


def spread(table: torch.Tensor) -> dict[str, dict[str, float | int]]:
    """By quantity: smallest, mean and largest of the known values, and whose the largest is; none that nobody knows.

    All quantities at once: for a few ranks it is the number of operations that costs.
    """
    values = torch.stack([column(table, name) for name in QUANTITIES])
    is_unknown = torch.isnan(values)
    largest, whose = values.masked_fill(is_unknown, -math.inf).max(1)
    smallest = values.masked_fill(is_unknown, math.inf).amin(1)
    found = zip(
        QUANTITIES, smallest.tolist(), values.nanmean(1).tolist(), largest.tolist(), whose.tolist(), strict=True
    )
    return {
        name: {"min": low, "mean": mean, "max": high, "argmax": rank}
        for name, low, mean, high, rank in found
        if not math.isnan(mean)
    }


def describe(table: torch.Tensor, is_missing: torch.Tensor) -> dict[str, Any]:
    """The fields of the record's event `ranks`; those who are missing are left out of it."""
    seen = torch.where(is_missing[:, None], math.nan, table)
    return {
        "world_size": len(table),
        "missing": is_missing.nonzero().flatten().tolist(),
        "stats": spread(seen),
        "own_s_by_rank": _listed(column(seen, "own_s")),
        "num_steps": int(torch.nan_to_num(column(seen, "num_steps")).max()),
    }


def _listed(values: torch.Tensor) -> list[float | None]:
    if len(values) <= MAX_LISTED:
        return [value if math.isfinite(value) else None for value in values.tolist()]
    width = math.ceil(len(values) / MAX_LISTED)
    padded = torch.nn.functional.pad(values, (0, -len(values) % width), value=math.nan).view(-1, width)
    largest = torch.where(torch.isnan(padded), -math.inf, padded).amax(1)
    return [value if math.isfinite(value) else None for value in largest.tolist()]


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


def scale_of(table: torch.Tensor, sharers: Sequence[int], usual: JobScale, *, is_alike: bool) -> JobScale:
    """How rank 0's numbers grow to the job's. A rank that has said nothing for long must be a row of zeros.

    Args:
        sharers: For each rank, how many ranks use the same device, itself included.
        usual: What to go by where rank 0 does not know its own number.
        is_alike: Whether a rank that does not know its FLOPs does the same work as rank 0.
    """
    shares = torch.tensor(sharers, dtype=torch.float64)
    peaks = column(table, "peak_flop_per_s")
    filled = torch.where(torch.isnan(peaks), peaks[0], peaks) / shares
    devices = float(filled.sum() / peaks[0])
    flop = column(table, "model_flop")
    stand_in = flop[0] if is_alike else flop.nanmean()
    return JobScale(
        flop=_ratio(torch.where(torch.isnan(flop), stand_in, flop), usual.flop),
        tokens=_ratio(column(table, "tokens_processed"), usual.tokens),
        samples=_ratio(column(table, "samples"), usual.samples),
        devices=devices if math.isfinite(devices) else usual.devices,
    )


def _ratio(values: torch.Tensor, otherwise: float) -> float:
    """Sum over rank 0's own; `otherwise` when it is not known for every rank."""
    ratio = float(values.sum() / values[0])
    return ratio if math.isfinite(ratio) else otherwise
