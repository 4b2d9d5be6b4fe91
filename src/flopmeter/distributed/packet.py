"""What does one rank tell the others about its last interval of steps? 160 bytes: 20 numbers, means per step."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

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
    means["own_variance"] = _variance([sum(own) - sum(waited) for own, waited in zip(phase_s, waits, strict=True)])
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
    own = [math.fsum(s.get(phase, 0.0) for phase in PHASES) for s in steps]
    return {**means, "blocked_s": exposed_s, "exposed_s": exposed_s, "own_variance": _variance(own)}


def _variance(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def unpack(packets: Iterable[bytes], num_ranks: int) -> Table:
    """Packets in rank order; what has another length counts as nothing said."""
    sound = [packet if len(packet) == PACKET_BYTES else NO_PACKET for packet in packets][:num_ranks]
    sound += [NO_PACKET] * (num_ranks - len(sound))
    numbers = array("d", b"".join(sound))
    return {name: numbers[at :: len(FIELDS)].tolist() for at, name in enumerate(FIELDS)}


def split(joined: bytes) -> list[bytes]:
    """The packets of a group, from the group leader's message."""
    return [joined[start : start + PACKET_BYTES] for start in range(0, len(joined), PACKET_BYTES)]
