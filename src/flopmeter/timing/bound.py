"""Does the device wait for the host, or the host for the device?

Marks at the borders of phases prove when the device had work queued. When the host has left a phase and the device has
not even begun it, all of the phase is queued, and nothing that the host does holds it up. When the device is behind
only at the end of a phase, work was queued for at least as long as it is behind. Together that is the least share of
its time with work queued. Where it is never behind, it waits for the host to launch or to synchronise.

In between, marks cannot tell: one long kernel at the end of a phase of tiny ones looks like a phase of long ones. A
sampled step can, because it times every kernel. Without one the verdict is "unknown" there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum
from statistics import fmean
from typing import Literal

from flopmeter.text import percent
from flopmeter.timing.events import DeviceStep

COMPUTE_PHASES = ("forward", "backward", "optimizer")
MIN_STEPS = 10
MIN_WAITING_SHARE = 0.9
"""Share of steps in which the device must be seen waiting before the run is called host-bound by marks alone."""
LAG_TOLERANCE_S = 50e-6
"""A few launches: what the device may be behind at the end of a phase and still be called waiting."""
LAG_TOLERANCE_SHARE = 0.01
"""The same as a share of the step, for long steps that end a phase with one long kernel."""
HALF = 0.5
"""A device that has work for more than half of its time is the slower one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Which of the two is the slower one."""

    bound: Literal["host", "device", "unknown"]
    """host: launching or synchronising keeps the device waiting. device: it has work, or waits for other ranks.
    unknown: too few steps, or marks that fit both."""
    num_steps: int
    """Steps without a flaw that have a phase of computing; all shares are of these."""
    queued_share: float | None
    """Least share of the device's time in which work was queued for it; None when unknown."""
    reason: str
    """One sentence for the report."""


def judge(steps: Iterable[DeviceStep], *, kernel_share: float | None = None, min_steps: int = MIN_STEPS) -> Verdict:
    """Tell who waits for whom over a window of steps; steps with a flaw are left out.

    Args:
        kernel_share: Share of an ordinary step in which kernels run, from a sampled step; None where none was sampled.
    """
    marked = [step for step in steps if step.device_s is not None and not step.phases.keys().isdisjoint(COMPUTE_PHASES)]
    if len(marked) < min_steps:
        reason = f"{len(marked)} steps were measured on the device, and it takes {min_steps} to tell"
        return Verdict(bound="unknown", num_steps=len(marked), queued_share=None, reason=reason)
    total_s = fsum(step.device_s or 0.0 for step in marked)
    queued_share = fsum(map(_queued_s, marked)) / total_s if total_s > 0 else 0.0
    waiting_share = fmean(map(_waits, marked))
    in_steps = f"of {len(marked)} steps"
    bound: Literal["host", "device", "unknown"]
    if queued_share >= HALF:
        bound, reason = "device", f"the device had work queued for at least {percent(queued_share, 0)} {in_steps}"
    elif kernel_share is not None:
        bound = "device" if kernel_share >= HALF else "host"
        reason = f"kernels run for {percent(kernel_share, 0)} of a step, by the last sampled one"
    elif waiting_share >= MIN_WAITING_SHARE:
        share = percent(waiting_share, 0)
        bound, reason = "host", f"the device waited for the host to launch or synchronise in {share} {in_steps}"
    else:
        bound = "unknown"
        reason = (
            f"the device was behind the host in {percent(1 - waiting_share, 0)} {in_steps}, and had work queued for at "
            f"least {percent(queued_share, 0)} of the time: a sampled step would tell for how much more"
        )
    return Verdict(bound=bound, num_steps=len(marked), queued_share=queued_share, reason=reason)


def _queued_s(step: DeviceStep) -> float:
    """Seconds of the step in which work was queued for the device, at least."""
    return fsum(
        time.device_s if time.has_backlog else min(max(time.lag_at_least_s, 0.0), time.device_s)
        for time in step.phases.values()
    )


def _waits(step: DeviceStep) -> bool:
    """Whether the device began each phase of computing before the host left it, and ended it with the host."""
    tolerance_s = max(LAG_TOLERANCE_S, LAG_TOLERANCE_SHARE * (step.device_s or 0.0))
    times = [step.phases[phase] for phase in COMPUTE_PHASES if phase in step.phases]
    return all(not time.has_backlog and time.lag_at_least_s <= tolerance_s for time in times)
