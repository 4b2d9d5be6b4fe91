"""One rank is slower than the others, and all of them wait for it in every step.

How we know. The ranks exchange how long each of them worked by itself (own time: without waiting for others). One
rank's own time exceeds the others' in interval after interval, and the monitor has named it; in a run that is too
short for that, every exchange must show the same rank ahead, by a wider margin. The phase in which it falls behind
says where to look: waiting for data, copying, computing.

What to do. Look at that host: another process on the GPU or the CPU, a hot or power-capped GPU (nvidia-smi -q -d
PERFORMANCE: clocks and throttle reasons), a slow local disk, fewer CPU cores for the loader, a GPU on the wrong
socket or PCIe slot. If the phase is computing and the host is sound, the work is uneven: samples of different length;
sort them into buckets or balance tokens per rank. Swap the host out if nothing else helps.

The gain assumes that the rank becomes like the others (expected), or half as bad (low).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from flopmeter.columns import mapping, number_or_nan
from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding, NotCheckedError
from flopmeter.text import percent, seconds

EXPLAINS = ("exposed_communication",)
"""The others' wait for a slow rank shows as communication."""
MIN_SHARE = 0.03
"""Every step of every rank pays for it, so a small share is worth a look; below, ranks differ by chance."""
UNNAMED_SHARE = 0.1
"""The same where the monitor has not named a rank yet: a few intervals differ by chance more than many."""


class _Slow(NamedTuple):
    rank: str
    extra_s: float
    phase: str
    where: str


def check(evidence: Evidence) -> Finding | None:
    """Look for a rank that the monitor named, or that all statistics point to."""
    if evidence.world_size <= 1:
        return None
    named, statistics = evidence.window.latest("straggler"), evidence.window.events("ranks")
    if not named and not statistics:
        raise NotCheckedError("the record has no statistics of the other ranks")
    slow = _named(named) if named else _pointed_to(statistics)
    least = MIN_SHARE if named else UNNAMED_SHARE
    lost_s = slow.extra_s * evidence.num_steps if slow else math.nan
    share = lost_s / evidence.wall_s
    if slow is None or not share >= least:
        return None
    return Finding(
        rule="straggler",
        title=f"rank {slow.rank} holds up all others for {seconds(slow.extra_s)} a step",
        lost=share,
        evidence=(
            f"its own time exceeds the others' by {seconds(slow.extra_s)} a step, in {slow.phase}",
            slow.where,
            f"that is {percent(share)} of the time of {evidence.world_size} ranks",
        ),
        advice=(
            "look at that host: other processes, GPU clocks and throttling (nvidia-smi -q -d PERFORMANCE), disk, cores",
            "if its work is larger, balance tokens per rank or sort samples into buckets of like length",
        ),
        gain=evidence.gain(lost_s, low_s=lost_s / 2, high_s=lost_s),
    )


def _named(event: Mapping[str, Any]) -> _Slow | None:
    if event.get("cause") != "slow_peer":
        return None
    where = f"host {str(event.get('host'))[:80]}, since step {str(event.get('since_step'))[:20]}"
    return _Slow(
        str(event.get("rank"))[:20], number_or_nan(event.get("extra_s")), _phase_name(event.get("phase")), where
    )


def _pointed_to(events: list[dict[str, Any]]) -> _Slow | None:
    """The rank with the longest own time in every exchange; None when they do not agree."""
    all_stats = [mapping(event.get("stats")) for event in events]
    ranks = {str(mapping(stats.get("own_s")).get("argmax")) for stats in all_stats}
    if len(ranks) != 1 or ranks == {"None"}:
        return None
    extras_s = [_ahead_s(mapping(event.get("stats")).get("own_s"), event) for event in events]
    blocked_s = [number_or_nan(mapping(stats.get("blocked_s")).get("max")) for stats in all_stats]
    if median(extras_s) < median(blocked_s) / 2:  # the others wait for something else: the network
        return None
    phases = {name: _ahead_s(values, events[-1]) for name, values in all_stats[-1].items() if name not in _NO_PHASE}
    known_phases = {name: ahead_s for name, ahead_s in phases.items() if not math.isnan(ahead_s)}
    phase = max(known_phases, key=lambda name: known_phases[name], default="an unknown phase")
    return _Slow(ranks.pop()[:20], median(extras_s), _phase_name(phase), f"in all of {len(events)} exchanges")


def _ahead_s(values: Any, event: Mapping[str, Any]) -> float:
    """By how much the slowest rank exceeds the mean of the others; NaN when unknown."""
    size = number_or_nan(event.get("world_size"))
    highest_s, mean_s = (number_or_nan(mapping(values).get(key)) for key in ("max", "mean"))
    return (highest_s - mean_s) * size / (size - 1) if size > 1 else math.nan


def _phase_name(phase: Any) -> str:
    return str(phase)[:40].removesuffix("_s").replace("_", " ")


_NO_PHASE = ("step_s", "own_s", "blocked_s", "memory_bytes")
