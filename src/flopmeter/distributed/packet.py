"""What does one rank tell the others about its last interval of steps, and what do all of them together say of the job?

A packet has 168 bytes: 21 numbers, means per step. The rest is arithmetic on a table with a value per rank and field.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import variance
from typing import Any, NamedTuple, TypeAlias

from flopmeter.schema import PHASES

FIELDS = (
    "interval", "num_steps", "last_step", "step_s", *(f"{phase}_s" for phase in PHASES), "blocked_s", "exposed_s",
    "own_variance", "starved_s", "memory_bytes", "peak_flop_per_s", "model_flop", "tokens_processed", "samples",
    "is_last",
)  # fmt: skip
"""In the order of the packet. Seconds by phase are the rank's own: what it was blocked in collectives is taken out."""

_LAYOUT = struct.Struct(f"{len(FIELDS)}d")
PACKET_BYTES = _LAYOUT.size
Table: TypeAlias = dict[str, list[float]]
"""Everybody's packets, by field: one value per rank. Lists, because most jobs have few ranks, where a tensor's
operations cost more than the sums."""
NO_PACKET = _LAYOUT.pack(0.0, *[math.nan] * (len(FIELDS) - 1))
"""What a rank has said before its first interval is over."""
LAST_WORD = _LAYOUT.pack(math.inf, *[math.nan] * (len(FIELDS) - 2), 1.0)
"""What a rank says that has nothing more to say."""


class RankStep(NamedTuple):
    """One step of this rank, as far as the others may want to know. None is unknown. Made on every step."""

    number: int
    """Steps of this process before it."""
    step_s: float
    """Wall time without pauses."""
    phase_s: Sequence[float]
    """Host seconds by phase, in the order of `schema.PHASES`."""
    blocked_s: Sequence[float] | None = None
    """Of these, seconds blocked in collectives; None where the host cannot tell (on a GPU)."""
    model_flop: float | None = None
    """FLOPs that the mathematics needs, from a count and not from an estimate."""
    ideal_s: float | None = None
    """Seconds that the model FLOPs would take at the peaks of their dtypes."""
    tokens_processed: int | None = None
    """All tokens, padding included."""
    samples: int | None = None
    """Rows of the batch."""


@dataclass(slots=True)
class Interval:
    """The steps of one interval. A number that one step does not know is unknown for the interval."""

    index: int
    """Which of this rank's intervals, from 1; it tells a new packet from an old one."""
    weight: float = 1.0
    """1 where this rank's tokens are its own, 0 where another rank of its group counts them."""
    seconds: float = 0.0
    """Step time so far."""
    memory_bytes: float = math.nan
    starved_share: float = math.nan
    _steps: list[RankStep] = field(default_factory=list)
    _device: list[Mapping[str, float]] = field(default_factory=list)

    def add(self, step: RankStep) -> None:
        """Take one more step."""
        self._steps.append(step)
        self.seconds += step.step_s

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return len(self._steps)

    def add_device(self, phase_s: Mapping[str, float]) -> None:
        """Take a step as the device went through it; where there are any, they say what was own time and what not."""
        self._device.append(phase_s)

    def pack(self, *, is_last: bool = False) -> bytes:
        """The packet: means per step."""
        means = {} if not self._steps else _host_means(self._steps, self.weight)
        means["starved_s"] = self.starved_share * means.get("step_s", math.nan)
        means |= _device_means(list(self._device))  # a copy: the training thread may be adding to it
        last_step = self._steps[-1].number if self._steps else 0
        means |= {"interval": self.index, "num_steps": self.num_steps, "last_step": last_step}
        means |= {"memory_bytes": self.memory_bytes, "is_last": float(is_last)}
        return _LAYOUT.pack(*(means.get(name, math.nan) for name in FIELDS))


_BACKWARD = PHASES.index("backward")
_NO_WAITS = (math.nan,) * len(PHASES)
COMMUNICATION = "communication"
"""The phase of the device between the end of its backward work and the end of the gradients' exchange."""


def _host_means(steps: Sequence[RankStep], weight: float) -> dict[str, float]:
    """Means of what the host noted; own time is what was not waiting for others."""
    _, step_s, phase_s, blocked_s, flop, ideal_s, tokens, samples = zip(*steps, strict=True)
    waits = [_NO_WAITS if waited is None else waited for waited in blocked_s]
    blocked = [_mean(waited) for waited in zip(*waits, strict=True)]
    means = {
        f"{phase}_s": _mean(seconds) - waited
        for phase, seconds, waited in zip(PHASES, zip(*phase_s, strict=True), blocked, strict=True)
    }
    means |= {"step_s": _mean(step_s), "blocked_s": sum(blocked), "exposed_s": blocked[_BACKWARD]}
    own_s = [sum(phases) - sum(waited) for phases, waited in zip(phase_s, waits, strict=True)]
    means["own_variance"] = variance(own_s) if len(own_s) > 1 else math.nan
    means |= {"tokens_processed": _mean(tokens) * weight, "samples": _mean(samples) * weight, "model_flop": _mean(flop)}
    ideal = _mean(ideal_s)
    means["peak_flop_per_s"] = means["model_flop"] / ideal if ideal else math.nan
    return means


def _mean(values: Sequence[float | None]) -> float:
    return math.nan if None in values else sum(values) / len(values)  # type: ignore[arg-type]


def _device_means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Own seconds by phase, from the device's timeline: a GPU's host does not wait for collectives.

    Nothing where communication is not marked apart: what a kernel waited for another rank would pass for own time.
    """
    if not steps or not all(COMMUNICATION in step for step in steps):
        return {}
    means = {f"{phase}_s": math.fsum(s.get(phase, 0.0) for s in steps) / len(steps) for phase in PHASES}
    exposed_s = math.fsum(s[COMMUNICATION] for s in steps) / len(steps)
    own_s = [math.fsum(s.get(phase, 0.0) for phase in PHASES) for s in steps]
    own_variance = variance(own_s) if len(own_s) > 1 else math.nan
    return {**means, "blocked_s": exposed_s, "exposed_s": exposed_s, "own_variance": own_variance}


def unpack(packets: Iterable[bytes], num_ranks: int) -> Table:
    """Packets in rank order; what has another length counts as nothing said."""
    sound = [packet if len(packet) == PACKET_BYTES else NO_PACKET for packet in packets][:num_ranks]
    sound += [NO_PACKET] * (num_ranks - len(sound))
    numbers = array("d", b"".join(sound))
    return {name: numbers[at :: len(FIELDS)].tolist() for at, name in enumerate(FIELDS)}


PHASE_COLUMNS = tuple(f"{phase}_s" for phase in PHASES)
QUANTITIES = ("step_s", "own_s", "blocked_s", *PHASE_COLUMNS, "memory_bytes")
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


class Heard:
    """Keeps track of who has said something new. A rank's last word holds until it counts as missing."""

    def __init__(self, world_size: int) -> None:
        self._used = [0.0] * world_size
        self._last = [0.0] * world_size
        self._since_s: list[float] | None = None
        self._num_same = [0] * world_size

    def update(self, table: Table, now_s: float) -> tuple[list[bool], bool, bool]:
        """Take everybody's newest packets, read at `now_s`.

        Gives by rank whether it is missing (it has said nothing new for long, though rank 0 went on); whether every
        rank that still takes part has said something new since this was last true; and whether each has said anything.
        """
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
        return is_missing, is_all_new, is_complete


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
        "own_s_by_rank": [s if math.isfinite(s) else None for s in _present(column(table, "own_s"), is_missing)],
        "num_steps": int(max(filter(math.isfinite, num_steps), default=0)),
    }


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
