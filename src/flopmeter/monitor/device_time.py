"""What did the device do meanwhile? Marks its timeline beside the host's clock, and sums it up now and then."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict
from itertools import count

from flopmeter.distributed import COMMUNICATION
from flopmeter.timing.bound import MIN_STEPS, judge
from flopmeter.timing.events import FIRST_STEPS, DeviceStep, DeviceTimeline, is_sampled
from flopmeter.timing.sharded import ShardedWaits

logger = logging.getLogger("flopmeter")

MAX_STEPS = 1000


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
        return number + 1 if self.is_marking else next(step for step in count(number + 1) if is_sampled(step + 1))

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
