"""What did the sampled steps show inside forward and backward, once the cost of sampling is taken off?

A profiled step is longer than an ordinary one. How much, we know: the seconds that it spent on computing, less those
that ordinary steps spend on it. Where the surplus sits, we do not know. Recording costs the host a few microseconds per
operator, between operators: so much is taken off the gaps. The rest is taken to be chance, another process on the core,
and comes off everything in proportion. On a GPU kernels are timed by the device, and last no longer because the host is
traced: there the whole surplus comes off the gaps, and off nothing else; where ordinary steps are longer than the
sampled one, the device idles for longer in them, and the gaps are larger. On a CPU where the thread waits for a core, a
sampled step that was faster than ordinary ones is stretched as a whole, as the waits stretch them. Elsewhere it is left
as it is, and leaves something unexplained. What was taken off a part is its uncertainty.

Where the thread waits for a core, a wait falls into whatever ran at that moment, and may be longer than all that a
small step does. It hardly falls into the same twice: of several such steps, the least that each kind of work took has
next to none of it. Where that gets rid of less than half of the waits, there are so many that chance evens them out.

A profile may see some of the loop's own code as well, that between the forward and the backward pass. Then the surplus
is known only between two bounds, and what the whole step took beyond a typical one decides within them. So much of the
gaps, as far as they go, is own code: what a loop does between its passes is Python more often than operators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from statistics import fmean, median
from typing import Any, NamedTuple

from flopmeter.columns import known, number_or_nan

OPERATORS = ("matmul_s", "recompute_s", "non_matmul_s")
INSIDE = (*OPERATORS, "gap_s")
"""What a step spends on computing, and the gaps in it; a profile may lack some."""
BESIDE = ("optimizer_s", "copy_s", "communication_s", "queued_s")
RECORDING_S = 5e-6
"""What recording costs per operator: it and the handful of ranges in and around it take about a microsecond each."""
MAX_PROFILES = 5
"""The latest ones count: the median of five survives two odd ones."""
MAX_OPS = 1e9
"""Above this, a number of operators is damage."""


class Ordinary(NamedTuple):
    """What ordinary steps spend, as the clock of every step tells it."""

    compute_s: float
    """On forward and backward."""
    loop_s: float
    """Outside all phases, in the loop's own code; a profile may see some of it."""
    num_optimizer_ops: float
    """Operators of the update, which a profile counts but does not leave gaps for."""
    is_starved: bool = False
    """Whether the thread waits for a core, which stretches all that it does alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """An ordinary step as the sampled ones show it: medians over the latest of them, or the mean of a whole trace."""

    device: str
    """Whose time it is: "cpu" (operators) or "cuda" (kernels, and the device's idle time as gaps)."""
    num_profiles: int
    """Sampled steps behind it."""
    seconds: Mapping[str, float]
    """By key of the profile event, corrected. A key that no profile has is absent."""
    uncertainty_s: Mapping[str, float]
    """For the same keys: what the correction may have put in the wrong place."""
    num_ops: float
    """Operators of a step; NaN when unknown."""
    own_operators_s: float
    """Operators of the loop's own code, between the passes, that are in these seconds; its gaps have been taken off."""
    own_idle_s: float
    """For how long a GPU idled between two steps while the loop ran its own code."""
    kept: float
    """Seconds of operators in these seconds over those of the latest sampled step as it was recorded."""
    waited_s: float
    """How much waiting for a core is in these seconds, over the number of steps that evens it out; 0 where unknown."""
    top: tuple[tuple[str, float, float], ...]
    """Name, seconds (corrected) and calls of the longest operators of the latest sampled step."""


def reduce_profiles(
    events: Sequence[Mapping[str, Any]], ordinary: Ordinary | None, *, are_all: bool = False
) -> Sampled | None:
    """The sampled steps as one ordinary step; None when there is none that can be used.

    Args:
        ordinary: None when unknown, and then nothing is corrected.
        are_all: Whether every step that is asked about was sampled, as in a trace: then the mean of all is no guess.
    """
    usable = [event for event in events if _seconds(event)][0 if are_all else -MAX_PROFILES :]
    if not usable:
        return None
    num_profiles, waited_s = len(usable), median(map(_waited_s, usable)) / len(usable)
    if ordinary is not None and ordinary.is_starved and num_profiles > 1:
        least = _least(usable)
        if _waited_s(least) < waited_s * num_profiles / 2:
            usable, waited_s = [least], _waited_s(least)
    middle = fmean if are_all else median
    profiles, corrected = [_seconds(event) for event in usable], [_correct(event, ordinary) for event in usable]
    keys = [key for key in (*INSIDE, *BESIDE) if any(key in profile for profile in profiles)]
    is_gpu, own_s = usable[-1].get("device") == "cuda", 0.0
    spent = profiles if is_gpu else corrected
    inside_s = middle([math.fsum(profile.get(key, 0.0) for key in INSIDE) for profile in spent])
    if ordinary is not None and not is_gpu:
        own_s = min(max(inside_s - ordinary.compute_s, 0.0), ordinary.loop_s)
    taken_off = {
        key: [before[key] - after[key] for before, after in zip(profiles, corrected, strict=True) if key in before]
        for key in keys
    }
    found = {key: middle([profile[key] for profile in corrected if key in profile]) for key in keys}
    own_gap_s = min(own_s, found.get("gap_s", 0.0))
    return Sampled(
        device="cuda" if is_gpu else "cpu",
        num_profiles=num_profiles,
        seconds={**found, "gap_s": found["gap_s"] - own_gap_s} if "gap_s" in found else found,
        uncertainty_s={key: max(median(values), 0.0) for key, values in taken_off.items()},
        num_ops=median(known(event.get("num_ops") for event in usable) or [math.nan]),
        own_operators_s=own_s - own_gap_s,
        own_idle_s=min(max(ordinary.compute_s - inside_s, 0.0), ordinary.loop_s) if ordinary and is_gpu else 0.0,
        waited_s=waited_s,
        kept=_kept(profiles[-1], corrected[-1]),
        top=_top(usable[-1].get("top"), _kept(profiles[-1], corrected[-1])),
    )


def _seconds(event: Mapping[str, Any]) -> dict[str, float]:
    found = {key: number_or_nan(event.get(key)) for key in (*INSIDE, *BESIDE)}
    return {key: value for key, value in found.items() if not math.isnan(value)}


def _waited_s(event: Mapping[str, Any]) -> float:
    return math.fsum(known([event.get("waited_s")]))


def _least(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A step of the least that each kind of work took in any of these, and the waits that must still be in it."""
    profiles = [_seconds(event) for event in events]
    found = {key: min(profile[key] for profile in profiles if key in profile) for key in {*chain(*profiles)}}
    computed_s = known(number_or_nan(event.get("step_s")) - _waited_s(event) for event in events)
    tops = [{name: row for name, *row in rows} for event in events if (rows := _top(event.get("top"), 1.0))]
    longest = {name: [name, *row] for top in tops for name, row in top.items()}
    for name, row in longest.items():  # what is not listed took less than all that is
        row[1] = min(top.get(name, min(top.values()))[0] for top in tops)
    waited_s = max(math.fsum(found.values()) - min(computed_s, default=0.0), 0.0)
    top = sorted(longest.values(), key=itemgetter(1), reverse=True)
    return {**events[-1], **found, "top": top, "step_s": None, "waited_s": waited_s}


def _surplus_s(event: Mapping[str, Any], ordinary: Ordinary | None) -> float:
    """What sampling added to the step's computing; below 0 on a CPU only where waits for a core stretch other steps."""
    if ordinary is None:
        return 0.0
    most_s = math.fsum(known(event.get(key) for key in INSIDE)) - ordinary.compute_s
    least_s = most_s - ordinary.loop_s
    longer_s = number_or_nan(event.get("step_s")) - number_or_nan(event.get("typical_step_s"))
    if event.get("device") == "cuda":  # what ordinary steps idle beyond the kernels' span, the loop's own code explains
        return most_s + min(max(-most_s, 0.0), ordinary.loop_s)
    if ordinary.is_starved and most_s < 0:
        return most_s
    return max(least_s if math.isnan(longer_s) else min(max(longer_s, least_s), most_s), 0.0)


def _correct(event: Mapping[str, Any], ordinary: Ordinary | None) -> dict[str, float]:
    """Take the surplus off. On a GPU the gaps hold all of it."""
    profile, surplus_s = _seconds(event), _surplus_s(event, ordinary)
    gap_s = profile.get("gap_s", 0.0)
    if event.get("device") == "cuda":
        return {**profile, "gap_s": max(gap_s - surplus_s, 0.0)} if "gap_s" in profile else profile
    num_ops = math.fsum(known([event.get("num_ops")], MAX_OPS)) - (ordinary.num_optimizer_ops if ordinary else 0.0)
    from_gap_s = min(RECORDING_S * max(num_ops, 0.0), surplus_s, gap_s) if surplus_s > 0 else 0.0
    inside_s = math.fsum(profile.get(key, 0.0) for key in INSIDE) - from_gap_s
    kept = 1 - (surplus_s - from_gap_s) / inside_s if inside_s > 0 else 1.0
    without = {**profile, "gap_s": gap_s - from_gap_s} if "gap_s" in profile else profile
    return {key: value * kept if key in INSIDE else value for key, value in without.items()}


def _kept(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Share of the operators' time that the correction left."""
    operators_s = math.fsum(before.get(key, 0.0) for key in OPERATORS)
    return math.fsum(after.get(key, 0.0) for key in OPERATORS) / operators_s if operators_s > 0 else 1.0


def _top(rows: Any, kept: float) -> tuple[tuple[str, float, float], ...]:
    found = []
    for row in rows[:20] if isinstance(rows, list) else ():
        if isinstance(row, list) and len(row) >= 3 and len(known(row[1:3])) == 2:
            found.append((str(row[0])[:200], row[1] * kept, float(row[2])))
    return tuple(found)
