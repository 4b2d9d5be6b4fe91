"""Which steps are looked into, and what comes of it: a sampled profile, collections of garbage, falls of MFU.

Everything but the sampled step itself happens in the background, from the numbers of the digested steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import perf_counter_ns

from torch import nn

from flopmeter.config import MonitorConfig
from flopmeter.metrics import Means
from flopmeter.monitor.header import device_of
from flopmeter.profiling.sampled import SampledStep, why_not
from flopmeter.timing.garbage import GarbageWatch
from flopmeter.timing.regime import RegimeDetector
from flopmeter.timing.sampling import SamplingPlan

logger = logging.getLogger("flopmeter")

INTERVALS_APART = 10
"""Measuring intervals from one sampled step to the next: a profile costs more than an observed step."""


class Sampling:
    """Takes a profile now and then, and tells what the steps in between have in common.

    `note_step` is called in the background; everything else on the training thread.

    Args:
        interval_steps: The measuring interval.
        event: Writes an event to the run file.
    """

    def __init__(self, config: MonitorConfig, interval_steps: int, event: Callable[..., None]) -> None:
        settings = config.monitoring
        self.plan = SamplingPlan(INTERVALS_APART * interval_steps, settings.overhead_budget)
        self.running: SampledStep | None = None
        """The sample that the running step is in."""
        self.kernel_share: float | None = None
        """Share of an ordinary step in which kernels run on the device, by the last sample; None where unknown."""
        self._event = event
        self._every = config.details_every
        self._garbage = GarbageWatch()
        self._regime = RegimeDetector()
        self._interval = Means("perf/mfu")
        self._interval_start = 0
        self._last_reason: str | None = None
        self._is_listening = False
        self._may_listen = settings.patches
        self._is_asked_for = settings.profile_steps and "profile_steps" in settings.model_fields_set
        # Estimate mode promises to measure nothing.
        self.is_on = settings.profile_steps and settings.mfu_calculation_mode != "estimate"
        if not self.is_on:
            self.plan.stop()

    def start_run(self) -> None:
        """The run begins."""
        self._is_listening = self._may_listen

    def note_step(self, index: int, metrics: Mapping[str, float]) -> None:
        """An ordinary step was digested; `index` is how many were before it."""
        self._garbage.add_up()
        step_s = metrics["perf/step_time"]
        slower = self.plan.note_step(index, step_s)
        if slower is not None:
            self._warn(
                f"no more steps are profiled: after the last profile a step took {slower.after_s * 1e3:.1f} ms, before "
                f"it {slower.before_s * 1e3:.1f} ms"
            )
        if not self._interval.num_steps:
            self._interval_start = int(metrics["global_step"])
        self._interval.add(metrics)
        if self._interval.num_steps >= self._every:
            self._end_interval()

    def listen(self, *, is_ordinary: bool) -> None:
        """A step begins. Collections in the warm-up and in measured steps are not the loop's."""
        if is_ordinary and self._is_listening:
            self._garbage.start()
        else:
            self._garbage.close()

    def start(self, model: nn.Module, num_steps: int, obstacle: str | None) -> None:
        """Profile the step that begins now, unless something is in the way or somebody else's profiler is at work."""
        device_type = device_of(model).type
        reason = obstacle or why_not(device_type, is_asked_for=self._is_asked_for)
        if reason is not None:
            self.plan.postpone(num_steps)
            if reason != self._last_reason:
                self._warn(f"steps are not profiled now: {reason}")
            self._last_reason = reason
            return
        running = SampledStep(model, device_type)
        try:
            running.start()
        except Exception as error:  # noqa: BLE001 - the run comes first; this part is switched off and says so
            self._switch_off(error)
            return
        self.running = running

    def finish(self, num_steps: int, step_s: float) -> None:
        """The sampled step is over: read it."""
        start_ns = perf_counter_ns()
        sampled, self.running = self.running, None
        assert sampled is not None
        try:
            sampled.stop()
        except Exception as error:  # noqa: BLE001
            self._switch_off(error)
        reading_s = (perf_counter_ns() - start_ns) / 1e9
        self.plan.note_sampled(num_steps, step_s, reading_s, may_linger=sampled.is_cuda)
        if sampled.profile is None:
            self._warn("a profiled step showed no work, or was cut short by another profiler: its split is not known")
        else:
            typical = {} if self.plan.typical_s is None else {"typical_step_s": self.plan.typical_s}
            self._event("profile", step_s=step_s, **typical, **sampled.profile.fields())
            if sampled.is_cuda and typical:  # tracing makes the host slower, not the kernels
                self.kernel_share = sampled.profile.kernels_s / typical["typical_step_s"]

    def discard(self, num_steps: int, *, is_over: bool) -> None:
        """The sampled step turned out to be none to learn from: another one is sampled some steps later.

        Args:
            is_over: Whether the calling thread can end the sample. If not, it is kept for the one that can.
        """
        running = self.running
        if running is None:
            return
        if is_over:
            self.running = None
        self.plan.postpone(num_steps)
        try:
            running.discard()
        except Exception as error:  # noqa: BLE001
            self._switch_off(error)

    def close(self) -> None:
        """The run is over."""
        self.plan.stop()
        self._garbage.close()
        self._tell_garbage()

    def _switch_off(self, error: Exception) -> None:
        self.plan.stop()
        self._warn(f"no more steps are profiled, because profiling failed: {type(error).__name__}: {error}")

    def _end_interval(self) -> None:
        mfu = self._interval.compute().get("perf/mfu")
        self._interval = Means("perf/mfu")
        self._tell_garbage()
        if mfu is None:
            return
        fall = self._regime.update(self._interval_start, mfu)
        if fall is not None:
            self._event("regime", **fall._asdict())
            self.plan.ask()

    def _tell_garbage(self) -> None:
        taken = self._garbage.take()
        if taken is not None:
            self._event("gc", **taken._asdict())

    def _warn(self, message: str) -> None:
        logger.warning("%s", message)
        self._event("warning", message=message)
