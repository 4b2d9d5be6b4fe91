"""Which steps are measured, and what has measuring cost? Observed steps, sampled ones, and our own time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import enumerate as living_threads
from threading import get_ident

from torch import nn

from flopmeter.config import MonitorConfig
from flopmeter.flops.observation import take_off_left
from flopmeter.flops.workload import Seen
from flopmeter.monitor.measuring import FlopSource
from flopmeter.monitor.sampling import Sampling
from flopmeter.monitor.schedule import Schedule
from flopmeter.monitor.step_record import StepRecord
from flopmeter.profiling import profiler_guard
from flopmeter.timing import PhaseClock, split

logger = logging.getLogger("flopmeter")

COPIES_S = 10.0
"""How long a measured step waits for the lengths of its sequences at most: a device may be far behind its host, and
without them nothing can be learnt from the step."""
MAX_IN_VAIN = 3
"""Measurements in a row that give way to a pause: a loop that has one in every step is measured with it."""
LOOK_AGAIN = 8
"""Steps until a measurement that was due and did not begin is tried again; in estimate mode none ever does."""
MAX_TRIES = 8
"""Steps in a row that are begun with for their shape: a loop may go through its shapes in turn."""
WATCH_SHARE = 0.04
"""Of the overhead budget, for looking at the model: 0.2 ms once a second for 500 modules. Larger ones are looked at
more seldom, smaller ones more often."""


class Effort:
    """Starts and closes measurements, within the budget; keeps the account of what they and the rest of us take.

    `note_steps` is called in the background; everything else on the training thread.

    Args:
        flops_profile_freq: The interval that the loop asked for, if it did.
        event: Writes an event to the run file.
        threads_s: CPU time of all threads of ours so far.
    """

    def __init__(
        self,
        config: MonitorConfig,
        flops_profile_freq: int | None,
        clock: PhaseClock,
        event: Callable[..., None],
        threads_s: Callable[[], float],
    ) -> None:
        self.own_ns = 0
        """Time of our calls on the training thread, measurements apart."""
        self.next_look = 0
        """Before so many steps have ended nothing but a record is due. Set to 0, from any thread, when something may be
        due at once; where the training thread has just looked, that waits for its next look."""
        self.is_measuring = False
        """Whether something may be running through this step, for `end_step` to close."""
        self.asks = False
        """Whether a step is wanted because of its shape: said in the background, before it would be thought of."""
        self.leftover_thread = 0
        """The thread that has to discard a measurement, because no other one can; 0 for none."""
        self._is_left = False
        """Whether a mode of ours stands quiet below one of the program's, to be taken off when that is closed."""
        self.profiles_from = 0
        """After so many steps the profiler may run again: by then all ranges that were open when it last ended, such as
        the optimizer's step or one around the whole step, are closed. Torch writes the end of such a range into memory
        that it has freed when another session runs by then."""
        self._thread = get_ident()
        self._source: FlopSource | None = None
        """What the running measurement is for, and where it was begun."""
        self._is_closed = False
        self._unwatch: Callable[[], None] = lambda: None
        self._config = config
        self._argument = flops_profile_freq
        self._clock = clock
        self._event = event
        self._threads_s = threads_s
        self._started_s = 0.0
        self._num_in_vain = 0
        self._num_tries = 0
        """Steps that were to be measured for their shape and had another."""
        self._phase: str | None = None
        self._watched = -math.inf, 0
        """When the model was last looked at, by the clock and in steps."""
        self._watch_s = 0.0
        """From then to the next look."""
        self.schedule = self._make_schedule(phase=None)
        self.sampling = Sampling(config, self.schedule.interval_steps, event)

    def start_run(self, folder: Path, *, is_sampled: bool, on_profiler: Callable[[], None]) -> None:
        """The run begins; one rank is sampled for all.

        Args:
            folder: Where its record is.
            on_profiler: Called when a profiler of the user's is about to start, on whatever thread.
        """
        self._started_s = time.monotonic()
        settings = self._config.monitoring
        if settings.patches and settings.mfu_calculation_mode != "estimate":  # which measures nothing
            # Here, where a search for profilers under way costs no step.
            self._unwatch = profiler_guard.watch(on_profiler)
        if is_sampled:
            self.sampling.start_run(folder)
        else:
            self.sampling.plan.stop()

    def begin_phase(self, phase: str) -> None:
        """Another phase of the training begins, with a frequency of its own. The same one again changes nothing."""
        if phase == self._phase:
            return
        before, self.schedule = self.schedule, self._make_schedule(phase)
        self._phase = phase
        self.schedule.inherit(before)
        self.next_look = 0
        self._event("training_phase", phase=phase, interval_steps=self.schedule.interval_steps)

    def note_steps(self, steps: Sequence[tuple[int, float]]) -> None:
        """Ordinary steps were digested: how many were before each, and its seconds."""
        source, schedule, index = self._source, self.schedule, steps[-1][0]
        schedule.note_steps(steps)
        wants_shape = source is not None and source.lacks_proof and schedule.interval_steps > 0
        if (wants_shape and index + 1 >= schedule.refused_until) or (source is not None and source.lacks_kind):
            schedule.hasten(index + 1)
            self.asks, self.next_look = True, 0
        before = self.sampling.plan.next_step
        self.sampling.note_steps(steps)
        if self.sampling.plan.next_step < before:
            self.next_look = 0

    def watch_model(self, source: FlopSource, num_steps: int) -> int:
        """Notice a model that is trained otherwise than before, and have it measured anew.

        Before a measurement is read it is looked at in any case: whose count would that be? Gives the number of steps
        after which the next look is due.
        """
        now_s = time.monotonic()
        since_s, before = self._watched
        if now_s - since_s >= self._watch_s or source.is_measuring:
            is_changed = source.is_changed()
            self._watched = now_s, num_steps
            share = WATCH_SHARE * self._config.monitoring.overhead_budget
            self._watch_s = (time.monotonic() - now_s) / share
            if is_changed:
                self._take_change(source, num_steps)
        step_s = (now_s - max(since_s, self._started_s)) / max(1, num_steps - before)
        left_s = self._watched[0] + self._watch_s - now_s
        return num_steps + max(1, math.floor(left_s / step_s) if step_s > 0 else 1)

    def _take_change(self, source: FlopSource, num_steps: int) -> None:
        with self._clock.pause() as lasted_s:
            asks = source.take_change(num_steps - 1)
        self._event("pause", name="flopmeter", duration_s=lasted_s())
        if asks and not source.is_measuring:
            self.schedule.hasten(num_steps)

    def end_step(self, source: FlopSource | None, record: StepRecord, num_steps: int) -> None:
        """Close what ran through this step, and learn from it. Reading it is our time, not the next step's."""
        if get_ident() != self._thread or self.leftover_thread or self._is_left:
            self.discard(num_steps)
            return
        is_counted = source is not None and source.is_measuring
        self.is_measuring, self.profiles_from = False, num_steps + 1
        if not is_counted and self.sampling.running is None:
            return
        step_s = split(record.clock).step_ns / 1e9
        with self._clock.pause() as lasted_s:
            if source is not None and is_counted:
                record.marks = (*record.marks, source.kind)
                try:
                    source.finish(partial(_seen_in, record))
                except Exception as error:  # noqa: BLE001 - a model that cannot be counted is timed all the same
                    source.give_up(error)
            else:
                record.marks = (*record.marks, "profiled")
                self.sampling.finish(num_steps, step_s)
        self._is_left = self.is_measuring = not take_off_left()  # inside a mode of the program's: until it is closed
        if is_counted:
            self.schedule.note_measured(num_steps, step_s, lasted_s())
        self.own_ns -= round(lasted_s() * 1e9)  # counted with the measurement
        self._num_in_vain = self._num_tries = 0
        self._event("pause", name="flopmeter", duration_s=lasted_s())

    def discard(self, num_steps: int) -> None:
        """Stop what runs through this step and throw it away: a later one is measured instead. Never raises.

        Hooks go at once. A dispatch mode or a profiler belongs to the thread that has begun it, which has to come here
        as well, unless it has ended and taken them with it.
        """
        if not self.is_measuring:
            return
        start_ns = time.perf_counter_ns()
        if self.schedule.is_early(num_steps) and not self._is_left:
            self._num_tries += 1
            self.asks, self.next_look = self._num_tries < MAX_TRIES, 0
            if not self.asks:
                self._num_tries = 0
                self.schedule.put_off()
        self.profiles_from = num_steps + 3  # odd: a program that profiles every second step leaves the others to us
        is_here = get_ident() == self._thread
        is_over = is_here or all(thread.ident != self._thread for thread in living_threads())
        if self._source is not None:
            try:
                self._source.stop(is_over=is_over)
            except Exception as error:  # noqa: BLE001 - as above
                self._source.give_up(error)
        self.sampling.discard(num_steps, is_over=is_over)
        self._is_left = is_here and not take_off_left()
        self.is_measuring, self.leftover_thread = not is_over or self._is_left, 0 if is_over else self._thread
        if is_here:
            self.own_ns += time.perf_counter_ns() - start_ns

    def close(self, num_steps: int) -> None:
        """The run is over, perhaps in the middle of a measured step, and perhaps on another thread."""
        self._is_closed = True
        self._unwatch()
        self.discard(num_steps)
        self.sampling.close()

    def give_way(self, num_steps: int) -> None:
        """A pause begins within the measured step: all of an evaluation would be recorded with it."""
        if self.is_measuring and self._num_in_vain < MAX_IN_VAIN:
            self._num_in_vain += 1
            self.discard(num_steps)

    def next_due(self, num_steps: int) -> int:
        """After how many steps something is to be measured. What was due and did not begin is tried again."""
        due = min(self.schedule.next_step, self.sampling.plan.next_step)
        return due if due > num_steps else num_steps + LOOK_AGAIN

    def begin_step(
        self,
        source: FlopSource | None,
        model: nn.Module | None,
        num_steps: int,
        obstacle: Callable[..., str | None],
    ) -> None:
        """Measure the step that begins now, if it is time and the budget allows it.

        Args:
            obstacle: Why it must not be measured, `to_profiler` or at all.
        """
        is_due = num_steps >= min(self.schedule.next_step, self.sampling.plan.next_step)
        if not is_due or source is None or model is None or self.is_measuring:
            return
        self.asks = False
        self._source = source
        run_s = time.monotonic() - self._started_s
        may_profile = num_steps >= self.profiles_from
        may_measure = source.measures and (may_profile or source.mode != "profiler")
        if may_measure and self.schedule.is_due(num_steps, run_s, self.own_ns / 1e9 + self._threads_s()):
            self._thread, self.is_measuring = get_ident(), True
            try:
                source.start(obstacle(to_profiler=source.mode == "profiler"), self.schedule.is_early(num_steps))
            except Exception as error:  # noqa: BLE001 - as above
                source.give_up(error)
            self.is_measuring = source.is_measuring
        if not self.is_measuring and may_profile and self.sampling.plan.is_due(num_steps, run_s, self.share() * run_s):
            self._thread, self.is_measuring = get_ident(), True
            self.sampling.start(model, num_steps, obstacle(to_profiler=True))
        if self._is_closed:  # by another thread, which may have come too early to see it
            self.discard(num_steps)

    def share(self) -> float:
        """Share of the wall time since the start that all of us took."""
        run_s = time.monotonic() - self._started_s
        measuring_s = self.schedule.measuring_s + self.sampling.plan.spent_s
        return (self.own_ns / 1e9 + self._threads_s() + measuring_s) / run_s if run_s > 0 else 0.0

    def _make_schedule(self, phase: str | None) -> Schedule:
        interval = self._config.measuring_interval(argument=self._argument, phase=phase)
        settings = self._config.monitoring
        is_profiler = settings.mfu_calculation_mode == "profiler"
        if is_profiler and interval.is_explicit and interval.steps:
            logger.warning("measuring every %d steps as %s says, whatever it costs", interval.steps, interval.setting)
        budget = None if is_profiler and interval.is_explicit else settings.overhead_budget
        first = settings.performance_monitoring.smart_mode.initial_profiling or is_profiler
        return Schedule(interval.steps, budget, measures_first=first)


def _seen_in(record: StepRecord) -> Sequence[Seen]:
    """What the step was given, once that has come from the device; unknown when it does not."""
    has_come = record.arrival is None or record.arrival.comes_within(COPIES_S)
    return record.seen if has_come else (None,)
