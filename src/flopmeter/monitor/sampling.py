"""Which steps are looked into, and what comes of it: a sampled profile, collections of garbage, falls of MFU.

Everything but the sampled step itself happens in the background, from the numbers of the digested steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import get_native_id
from time import perf_counter_ns
from typing import NamedTuple

from torch import nn

from flopmeter.config import MonitorConfig
from flopmeter.monitor.header import device_of
from flopmeter.monitor.schedule import SamplingPlan
from flopmeter.profiling.frames import FrameWatch
from flopmeter.profiling.profiler_guard import SampledStep, why_not
from flopmeter.profiling.recorded import PARTS
from flopmeter.resources import waited_s
from flopmeter.schema import TRACE_FILE
from flopmeter.timing.garbage import GarbageWatch

logger = logging.getLogger("flopmeter")

MAX_WAITED = 0.1
"""Share of a sampled step for which the thread may have waited for a core; one that waited longer is disturbed."""
INTERVALS_APART = 10
"""Measuring intervals from one sampled step to the next: a profile costs more than an observed step."""


class Sampling:
    """Takes a profile now and then, and tells what the steps in between have in common.

    `note_step` and `end_interval` are called in the background; everything else on the training thread.

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
        self._garbage = GarbageWatch()
        self._frames = FrameWatch(event, settings.overhead_budget)
        self._regime = RegimeDetector()
        self._last_reason: str | None = None
        self._waited_s: float | None = None
        self._is_listening = False
        self._may_listen = settings.patches
        self._keeps_trace = settings.keep_trace
        self._keep_at: Path | None = None
        self.has_trace = False
        """Whether a trace of a sampled step was kept."""
        self._is_asked_for = settings.profile_steps and config.is_written("monitoring.profile_steps")
        # Estimate mode promises to measure nothing.
        self.is_on = settings.profile_steps and settings.mfu_calculation_mode != "estimate"
        if not self.is_on:
            self.plan.stop()

    def start_run(self, folder: Path) -> None:
        """The run begins, with its record in this folder."""
        self._keep_at = folder / TRACE_FILE if self._keeps_trace else None
        self._is_listening = self._may_listen
        if self.is_on:
            self._frames.start_run()

    def note_steps(self, steps: Sequence[tuple[int, float]]) -> None:
        """Ordinary steps were digested: how many were before each, and its seconds."""
        self._garbage.add_up()
        self._frames.note_step(steps[-1][0])
        for index, step_s in steps:
            slower = self.plan.note_step(index, step_s)
            if slower is not None:
                self._warn(
                    f"no more steps are profiled: after the last profile a step took {slower.after_s * 1e3:.1f} ms, "
                    f"before it {slower.before_s * 1e3:.1f} ms"
                )

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
        running = SampledStep(model, device_type, self._keep_at)
        try:
            running.start()
        except Exception as error:  # noqa: BLE001 - the run comes first; this part is switched off and says so
            self._switch_off(error)
            return
        self.running, self._waited_s = running, _waited_s()

    def finish(self, num_steps: int, step_s: float) -> None:
        """The sampled step is over: read it."""
        start_ns, until_s = perf_counter_ns(), _waited_s()
        sampled, self.running = self.running, None
        assert sampled is not None
        try:
            sampled.stop()
        except Exception as error:  # noqa: BLE001
            self._switch_off(error)
        reading_s = (perf_counter_ns() - start_ns) / 1e9
        waited_s = None if until_s is None or self._waited_s is None else until_s - self._waited_s
        is_disturbed = (waited_s or 0.0) > MAX_WAITED * step_s
        self.plan.note_sampled(
            num_steps, step_s, reading_s, may_linger=sampled.is_cuda, is_disturbed=is_disturbed and not sampled.is_cuda
        )
        if sampled.profile is None:
            self._warn("a profiled step showed no work, or was cut short by another profiler: its split is not known")
        else:
            self.has_trace = self._keep_at is not None
            typical = {} if self.plan.typical_s is None else {"typical_step_s": self.plan.typical_s}
            waited = {} if waited_s is None else {"waited_s": waited_s}
            self._event("profile", step_s=step_s, **typical, **waited, **sampled.profile)
            if sampled.is_cuda and typical:  # tracing makes the host slower, not the kernels
                kernels_s = sum(sampled.profile[f"{part}_s"] for part in PARTS if part not in ("copy", "gap"))
                self.kernel_share = kernels_s / typical["typical_step_s"]

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
        self._frames.close()
        self._garbage.close()
        self._tell_garbage()

    def _switch_off(self, error: Exception) -> None:
        self.plan.stop()
        self._warn(f"no more steps are profiled, because profiling failed: {type(error).__name__}: {error}")

    def end_interval(self, first_step: int, mfu: float | None) -> None:
        """An interval of ordinary steps was digested, with this MFU."""
        self._tell_garbage()
        if mfu is None:
            return
        fall = self._regime.update(first_step, mfu)
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


def _waited_s() -> float | None:
    """For how long this thread had to wait for a core so far; None where that is not known."""
    with suppress(OSError, ValueError, IndexError):
        return waited_s(get_native_id())
    return None


MIN_FALL = 0.15
"""Relative fall that counts; day-to-day noise of a shared machine stays below it."""
PATIENCE = 3
"""Intervals in a row that must be low."""
MEMORY = 8
"""Intervals that say what is normal."""


class Regime(NamedTuple):
    """MFU fell and stayed down."""

    from_mfu: float
    to_mfu: float
    since_step: int


class RegimeDetector:
    """Compares each interval's MFU with what was normal before; after a fall, the new level is the normal one.

    A slow sag that takes hours moves the normal with it and is not seen here: it is a matter for the whole record.
    """

    def __init__(self, *, min_fall: float = MIN_FALL, patience: int = PATIENCE) -> None:
        self._min_fall = min_fall
        self._patience = patience
        self._normal: deque[float] = deque(maxlen=MEMORY)
        self._low: list[tuple[int, float]] = []

    def update(self, step: int, mfu: float) -> Regime | None:
        """An interval ended.

        Args:
            step: The first step of the interval.
            mfu: Its MFU.
        """
        if len(self._normal) < self._patience:
            self._normal.append(mfu)
            return None
        normal = median(self._normal)
        if mfu >= normal * (1 - self._min_fall):
            self._low.clear()
            self._normal.append(mfu)
            return None
        self._low.append((step, mfu))
        if len(self._low) < self._patience:
            return None
        low = [value for _, value in self._low]
        since_step = self._low[0][0]
        self._low.clear()
        self._normal.clear()
        self._normal.extend(low)
        return Regime(normal, median(low), since_step)
