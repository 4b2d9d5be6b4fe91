"""What does one rank tell the others about its last interval of steps? 184 bytes: 23 numbers, means per step."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from flopmeter.schema import PHASES

FIELDS = (
    "interval", "num_steps", "last_step", "step_s", *(f"{phase}_s" for phase in PHASES), "blocked_s", "exposed_s",
    "own_variance", "starved_s", "memory_bytes", "peak_flop_per_s", "model_flop", "hardware_flop", "processed_flop",
    "tokens", "tokens_processed", "samples", "is_last",
)  # fmt: skip
"""In the order of the packet. Seconds by phase are the rank's own: what it was blocked in collectives is taken out."""

_LAYOUT = struct.Struct(f"<{len(FIELDS)}d")
PACKET_BYTES = _LAYOUT.size
COLUMN = {name: index for index, name in enumerate(FIELDS)}
NO_PACKET = _LAYOUT.pack(0.0, *[math.nan] * (len(FIELDS) - 1))
"""What a rank has said before its first interval is over."""
LAST_WORD = _LAYOUT.pack(math.inf, *[math.nan] * (len(FIELDS) - 2), 1.0)
"""What a rank says that has nothing more to say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """One step of this rank, as far as the others may want to know. None is unknown."""

    index: int
    """Steps of this process before it."""
    step_s: float
    """Wall time without pauses."""
    phase_s: Sequence[float]
    """Host seconds by phase, in the order of `schema.PHASES`."""
    blocked_s: Sequence[float] | None = None
    """Of these, seconds blocked in collectives; None where the host cannot tell (on a GPU)."""
    model_flop: float | None = None
    """FLOPs that the mathematics needs, from a count and not from an estimate."""
    hardware_flop: float | None = None
    """FLOPs that ran."""
    processed_flop: float | None = None
    """Model FLOPs if padding counted as work."""
    ideal_s: float | None = None
    """Seconds that the model FLOPs would take at the peaks of their dtypes."""
    tokens: int | None = None
    """Tokens that are not padding."""
    tokens_processed: int | None = None
    """All tokens."""
    samples: int | None = None
    """Rows of the batch."""


@dataclass(slots=True)
class Interval:
    """Sums over the steps of one interval. A number that one step does not know is unknown for the interval."""

    index: int
    """Which of this rank's intervals, from 1; it tells a new packet from an old one."""
    weight: float = 1.0
    """1 where this rank's tokens are its own, 0 where another rank of its group counts them."""
    num_steps: int = 0
    last_step: int = 0
    memory_bytes: float = math.nan
    starved_share: float = math.nan
    _sums: dict[str, float] = field(default_factory=dict)
    _own_s: list[float] = field(default_factory=list)
    _device: list[Mapping[str, float]] = field(default_factory=list)

    def add(self, step: RankStep) -> None:
        """Take one more step."""
        self.num_steps += 1
        self.last_step = step.index
        blocked = step.blocked_s if step.blocked_s is not None else [math.nan] * len(PHASES)
        own = [seconds - waited for seconds, waited in zip(step.phase_s, blocked, strict=True)]
        self._own_s.append(math.fsum(own))
        values: dict[str, float | None] = {f"{phase}_s": own[i] for i, phase in enumerate(PHASES)}
        values |= {"step_s": step.step_s, "blocked_s": math.fsum(blocked), "exposed_s": blocked[_BACKWARD]}
        values |= {name: getattr(step, name) for name in ("model_flop", "hardware_flop", "processed_flop", "ideal_s")}
        for name in ("tokens", "tokens_processed", "samples"):
            count = getattr(step, name)
            values[name] = None if count is None else count * self.weight
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + (math.nan if value is None else value)

    @property
    def seconds(self) -> float:
        """Step time so far."""
        return self._sums.get("step_s", 0.0)

    def add_device(self, phase_s: Mapping[str, float]) -> None:
        """Take a step as the device went through it; where there are any, they say what was own time and what not."""
        self._device.append(phase_s)

    def pack(self, *, is_last: bool = False) -> bytes:
        """The packet: means per step."""
        count = self.num_steps or math.nan
        means = {name: total / count for name, total in self._sums.items()}
        means["own_variance"] = _variance(self._own_s)
        means["starved_s"] = self.starved_share * means.get("step_s", math.nan)
        means |= _device_means(list(self._device))  # a copy: the training thread may be adding to it
        ideal_s, flop = means.get("ideal_s", math.nan), means.get("model_flop", math.nan)
        means["peak_flop_per_s"] = flop / ideal_s if ideal_s else math.nan
        means |= {"interval": self.index, "num_steps": self.num_steps, "last_step": self.last_step}
        means |= {"memory_bytes": self.memory_bytes, "is_last": float(is_last)}
        return _LAYOUT.pack(*(means.get(name, math.nan) for name in FIELDS))


_BACKWARD = PHASES.index("backward")
COMMUNICATION = "communication"
"""The phase of the device between the end of its backward work and the end of the gradients' exchange."""


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


def unpack(packets: Iterable[bytes], num_ranks: int) -> torch.Tensor:
    """Packets in rank order as rows of float64; what has another length counts as nothing said."""
    sound = [packet if len(packet) == PACKET_BYTES else NO_PACKET for packet in packets][:num_ranks]
    sound += [NO_PACKET] * (num_ranks - len(sound))
    return torch.frombuffer(bytearray(b"".join(sound)), dtype=torch.float64).view(num_ranks, len(FIELDS))


def split(joined: bytes) -> list[bytes]:
    """The packets of a group, from the group leader's message."""
    return [joined[start : start + PACKET_BYTES] for start in range(0, len(joined), PACKET_BYTES)]
