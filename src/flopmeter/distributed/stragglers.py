"""Which rank holds the others up, in which phase, since when?

Collectives make every rank's step equally long, so step times name nobody. What tells is each rank's own time: its step
without what it was blocked in collectives. A rank is named when its own time exceeds the median of the others by a
tenth of a step and by two milliseconds in three intervals in a row or more, and by three standard errors over all of
them. Where most of the excess is waiting for a core, because the machine has more to run than cores, it takes twelve.

The last to arrive at a collective is the one that waits least. So the spread of the blocked times is the skew of the
arrivals, without comparing clocks between machines: large behind a slow peer, small behind a slow network, where even
the last to arrive waits. A network counts as slow when that shortest wait has at least doubled since the run's start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Literal

from flopmeter.distributed.packet import Table, column
from flopmeter.schema import PHASES

SUSTAINED = 3
"""Intervals in a row before anybody is named; noise takes turns."""
SUSTAINED_IF_STARVED = 12
"""The same where the rank mostly waited for a core: programs that share a machine take turns, too, but slowly."""
MIN_SHARE = 0.1
"""Of the step: what is less is not worth a name."""
MIN_EXTRA_S = 2e-3
"""On steps of a few milliseconds, what the operating system does to one of several processes is more than a share."""
STANDARD_ERRORS = 3.0
STEADINESS = 1 / 3
"""The smallest excess over the largest: noise fluctuates more."""
NETWORK_GROWTH = 2.0

Cause = Literal["slow_peer", "slow_network"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """What holds the job up."""

    rank: int | None
    """The slow rank; None where the network is slow, which slows all."""
    phase: str
    """Where most of the excess is."""
    extra_s: float
    """Seconds per step beyond the other ranks, or beyond the run's own start for a network."""
    since_step: int
    """First step of the first interval in which it showed."""
    cause: Cause
    """Whether a rank arrives late, or everybody waits though all are there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Excess:
    rank: int | None
    extra_s: float
    since_step: int
    phase: str
    error_s: float = 0.0
    """Standard error of the excess, from the spread of the steps."""
    starved_s: float = 0.0
    """How long the rank waited for a core. Not against the others: much of theirs falls into the wait for this one."""


class StragglerWatch:
    """Looks at one interval after the other; says something when there is news."""

    def __init__(self) -> None:
        self._peers: deque[_Excess] = deque(maxlen=SUSTAINED_IF_STARVED)
        self._waits: deque[_Excess] = deque(maxlen=SUSTAINED_IF_STARVED)
        self._usual_wait_s: list[float] = []
        self._named: tuple[int | None, str] | None = None

    def update(self, table: Table) -> Straggler | None:
        """Take an interval that all ranks have reported; a straggler is returned once, until it changes."""
        found = self._sustained(self._peers, slow_peer(table), "slow_peer")
        waiting = self._sustained(self._waits, self._slow_network(table), "slow_network")
        found = found or waiting
        key = (found.rank, found.phase) if found is not None else None
        is_news = key is not None and key != self._named
        self._named = key
        return found if is_news else None

    def _sustained(self, seen: deque[_Excess], new: _Excess | None, cause: Cause) -> Straggler | None:
        if new is None or (seen and seen[-1].rank != new.rank):
            seen.clear()
        if new is not None:
            seen.append(new)
        extras = [excess.extra_s for excess in seen]
        error_s = math.sqrt(math.fsum(excess.error_s**2 for excess in seen))
        is_starved = math.fsum(excess.starved_s for excess in seen) > math.fsum(extras) / 2
        num_needed = SUSTAINED_IF_STARVED if is_starved else SUSTAINED
        # What begins in the middle of an interval shows there in part: the first need not be like the others.
        steady = extras[1:] if len(extras) > num_needed else extras
        is_steady = len(extras) >= num_needed and min(steady) >= STEADINESS * max(extras)
        if not is_steady or math.fsum(extras) <= STANDARD_ERRORS * error_s:
            return None
        phases = [excess.phase for excess in seen]
        return Straggler(
            rank=seen[0].rank,
            phase=max(phases, key=phases.count),
            extra_s=median(extras),
            since_step=seen[0].since_step,
            cause=cause,
        )

    def _slow_network(self, table: Table) -> _Excess | None:
        """The shortest wait of all ranks, against what it was in the run's first intervals."""
        blocked = table["blocked_s"]
        if not all(map(math.isfinite, blocked)):
            return None
        shortest_s, step_s = min(blocked), _median(table["step_s"])
        if len(self._usual_wait_s) < SUSTAINED:
            self._usual_wait_s.append(shortest_s)
            return None
        usual_s = median(self._usual_wait_s)
        extra_s = shortest_s - usual_s
        is_long = extra_s > max(2 * MIN_SHARE * step_s, MIN_EXTRA_S) and shortest_s > NETWORK_GROWTH * usual_s
        if not is_long or max(blocked) - shortest_s > shortest_s:  # a skew: somebody arrives late
            return None
        in_backward = min(table["exposed_s"]) > shortest_s / 2
        return _Excess(
            rank=None, extra_s=extra_s, since_step=_first_step(table), phase="backward" if in_backward else "forward"
        )


def slow_peer(table: Table) -> _Excess | None:
    """The rank whose own time stands out in this interval."""
    own = column(table, "own_s")
    ranks = [rank for rank, own_s in enumerate(own) if math.isfinite(own_s)]
    if len(ranks) < 2:
        return None
    slowest = max(ranks, key=own.__getitem__)
    others = [rank for rank in ranks if rank != slowest]

    def excess(values: Sequence[float]) -> float:
        return values[slowest] - _median(values[rank] for rank in others)

    extra_s, step_s = excess(own), _median(table["step_s"][rank] for rank in ranks)
    if not extra_s > max(MIN_SHARE * step_s, MIN_EXTRA_S):
        return None
    variance = {rank: table["own_variance"][rank] / table["num_steps"][rank] for rank in ranks}
    error_s = math.sqrt(variance[slowest] + _median(variance[rank] for rank in others))
    if not math.isfinite(error_s):
        return None
    starved_s = table["starved_s"][slowest]
    return _Excess(
        rank=slowest,
        extra_s=extra_s,
        since_step=_first_step(table),
        phase=max(PHASES, key=lambda phase: excess(table[f"{phase}_s"])),
        error_s=error_s,
        starved_s=starved_s if math.isfinite(starved_s) else 0.0,
    )


def _median(values: Iterable[float]) -> float:
    """The lower one of two in the middle: a value that a rank had. NaN where one is unknown."""
    found = list(values)
    return math.nan if any(value != value for value in found) else median_low(found)


def _first_step(table: Table) -> int:
    """The first step of the interval, as rank 0 numbers them."""
    return int(table["last_step"][0] - table["num_steps"][0] + 1)
