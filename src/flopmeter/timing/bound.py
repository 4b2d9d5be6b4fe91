"""Does the device wait for the host, or the host for the device?

The evidence is the backlog: when the host has enqueued a whole phase and the device has not even begun it, the device
is the slower one. Where there never is any and the device ends each phase together with the host, it waits for the
host. Marks cannot tell a host that is slow to launch from one that synchronises inside a phase; a profiled step can.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from flopmeter.text import percent
from flopmeter.timing.events import DeviceStep

COMPUTE_PHASES = ("forward", "backward", "optimizer")
MIN_STEPS = 10
MIN_WAITING_SHARE = 0.9
"""Share of steps in which the device must be seen waiting before the run is called host-bound."""
LAG_TOLERANCE_S = 50e-6
"""A few launches: what the device may be behind at the end of a phase and still be called waiting."""
LAG_TOLERANCE_SHARE = 0.01
"""The same as a share of the step, for long steps that end a phase with one long kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Which of the two is the slower one."""

    bound: Literal["host", "device", "unknown"]
    """host: launching or synchronising keeps the device waiting. unknown: too few steps were measured."""
    num_steps: int
    """Steps without a flaw that have a phase of computing; all shares are of these."""
    waiting_share: float | None
    """Share of steps in which the device waited for the host; None when unknown."""
    reason: str
    """One sentence for the report."""


def judge(steps: Iterable[DeviceStep], *, min_steps: int = MIN_STEPS) -> Verdict:
    """Tell who waits for whom over a window of steps; steps with a flaw are left out."""
    waits = [found for step in steps if (found := _waits_by_phase(step))]
    if len(waits) < min_steps:
        reason = f"{len(waits)} steps were measured on the device, and it takes {min_steps} to tell"
        return Verdict(bound="unknown", num_steps=len(waits), waiting_share=None, reason=reason)
    waiting_share = fmean(all(found.values()) for found in waits)
    return Verdict(
        bound="host" if waiting_share >= MIN_WAITING_SHARE else "device",
        num_steps=len(waits),
        waiting_share=waiting_share,
        reason=_reason(waiting_share, len(waits)),
    )


def _waits_by_phase(step: DeviceStep) -> dict[str, bool]:
    """For each phase of computing: whether the device began it before the host left it, and ended it with the host."""
    if step.device_s is None:
        return {}
    tolerance_s = max(LAG_TOLERANCE_S, LAG_TOLERANCE_SHARE * step.device_s)
    times = {phase: step.phases[phase] for phase in COMPUTE_PHASES if phase in step.phases}
    return {phase: not time.has_backlog and time.lag_at_least_s <= tolerance_s for phase, time in times.items()}


def _reason(waiting_share: float, num_steps: int) -> str:
    if waiting_share >= MIN_WAITING_SHARE:
        share = percent(waiting_share, 0)
        return f"the device waited for the host to launch or synchronise in {share} of {num_steps} steps"
    return f"the device was behind the host in {percent(1 - waiting_share, 0)} of {num_steps} steps"
