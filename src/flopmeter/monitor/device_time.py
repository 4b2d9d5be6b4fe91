"""What did the device do meanwhile, and who waits for whom? Marks its timeline beside the host's clock, and sums it up.

Marks at the borders of phases prove when the device had work queued. When the host has left a phase and the device has
not even begun it, all of the phase is queued, and nothing that the host does holds it up. When the device is behind
only at the end of a phase, work was queued for at least as long as it is behind. Together that is the least share of
its time with work queued. Where it is never behind, it waits for the host to launch or to synchronise.

In between, marks cannot tell: one long kernel at the end of a phase of tiny ones looks like a phase of long ones. A
sampled step can, because it times every kernel. Without one the verdict is "unknown" there.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import fsum
from statistics import fmean
from typing import Literal

from flopmeter.distributed import COMMUNICATION
from flopmeter.text import percent
from flopmeter.timing.cuda import ShardedWaits
from flopmeter.timing.events import FIRST_STEPS, DeviceStep, DeviceTimeline, is_sampled, next_sampled

logger = logging.getLogger("flopmeter")

MAX_STEPS = 1000
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


class DeviceTime:
    """Collects finished device steps and writes an event about them: seconds by phase, and who waited for whom.

    Args:
        event: Writes an event to the run file.
        every: Steps between two events.
        kernel_share: Gives the share of a step in which kernels run, by the last sampled one; None before.
    """

    def __init__(
        self,
        timeline: DeviceTimeline,
        event: Callable[..., None],
        every: int,
        kernel_share: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.mark = timeline.mark
        self.mark_inside_backward = timeline.mark_inside_backward
        self.is_capturing = timeline.is_capturing
        self.is_marking = True
        """Whether the running step is marked: timed events cost the host more than all else."""
        self.on_step: Callable[[dict[str, float]], None] | None = None
        """Told the device's seconds by phase of every typical step that it has finished."""
        self.waits: ShardedWaits | None = None
        """Tells which of these seconds were waiting for collectives; then only such steps are told."""
        self._timeline = timeline
        self._event = event
        self._every = every
        self._kernel_share = kernel_share
        self._steps: list[DeviceStep] = []
        self._before: deque[DeviceStep] = deque(maxlen=MIN_STEPS)
        """The last ones that were reported: a run ends with a few steps, which tell nothing by themselves."""
        self._waited: list[dict[str, float]] = []
        """What `waits` told since the last event."""
        self._left_out: deque[int] = deque(maxlen=MAX_STEPS)

    def end_step(self, number: int) -> None:
        """The host has ended a step: mark its end on the device if it was marked, and the next one if that is to be."""
        was_marking, self.is_marking = self.is_marking, number < FIRST_STEPS or is_sampled(number + 1)
        if was_marking:
            self._timeline.end_step(number)
        elif self.is_marking:
            self._timeline.begin()
        if self.waits is not None:
            self.waits.end_step(number, begins=is_sampled(number + 1))

    def next_border(self, number: int) -> int:
        """After how many steps a step that is marked ends, or the next one begins."""
        return number + 1 if self.is_marking else next_sampled(number + 2) - 1

    def take_finished(self, number: int, *, is_typical: bool = True) -> None:
        """Take what the device has finished.

        Args:
            number: The step that has just ended on the host.
            is_typical: Whether it represents the run. One that was measured or warmed up is in no mean.
        """
        if not is_typical:
            self._left_out.append(number)
        finished = [step for step in self._timeline.poll() if step.flaw is None and self._represents_run(step.step)]
        self._steps += finished[: MAX_STEPS - len(self._steps)]
        for step in finished:
            self._tell(step)
        if number and number % self._every == 0:
            self.report()

    def _represents_run(self, number: int) -> bool:
        left_out = self._left_out
        while left_out and left_out[0] < number:
            left_out.popleft()
        return not left_out or left_out[0] != number

    def _tell(self, step: DeviceStep) -> None:
        phase_s = {phase: time.device_s for phase, time in step.phases.items()}
        if self.waits is not None:
            waited_s = self.waits.take(step.step)
            if waited_s is None:
                return
            self._waited.append(waited_s)
            phase_s = {phase: seconds - waited_s.get(phase, 0.0) for phase, seconds in phase_s.items()}
            phase_s[COMMUNICATION] = sum(waited_s.values())
        if self.on_step is not None:
            self.on_step(phase_s)

    def report(self) -> None:
        """Write what has come together: mean seconds of a step by phase, with the verdict on who waits."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        judged = steps if len(steps) >= MIN_STEPS else [*self._before, *steps]
        verdict = judge(judged, kernel_share=self._kernel_share())
        self._before.extend(steps)
        device_s: dict[str, float] = defaultdict(float)
        for step in steps:
            for phase, time in step.phases.items():
                device_s[phase] += time.device_s / len(steps)
        waited, self._waited = self._waited, []
        for phase in {phase for waited_s in waited for phase in waited_s}:
            mean_s = sum(waited_s.get(phase, 0.0) for waited_s in waited) / len(waited)
            moved_s = min(mean_s, device_s[phase])  # of a few steps of these: a phase of all of them may be shorter
            device_s[phase] -= moved_s
            device_s[COMMUNICATION] += moved_s
        metrics = {}
        if COMMUNICATION in device_s and sum(device_s.values()) > 0:  # the host only hands collectives over
            metrics["perf/exposed_communication_share"] = device_s[COMMUNICATION] / sum(device_s.values())
        self._event(
            "device_time",
            metrics=metrics or None,
            num_steps=len(steps),
            device_s=dict(device_s),
            verdict=asdict(verdict),
        )

    def close(self) -> None:
        """The run is over."""
        self.take_finished(0)
        self.report()
        if self.waits is not None:
            self.waits.detach()
        self._timeline.close()


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
