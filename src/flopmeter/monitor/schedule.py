"""When may a step be measured, or profiled? As often as asked, and never so often that it is felt.

The first profile waits until enough ordinary steps have gone by to know what is typical; after that one is taken at
long intervals, and one when the run became slower, as far as the overhead budget allows. On CUDA the tracer stays
attached after a sample and may slow the rest of the run, so the steps after each sample are compared with those before
it: where they are slower, no other sample is taken. On a CPU nothing stays behind, and nothing is compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

WARMUP_STEPS = 3
NEVER = 1 << 62
TYPICAL_STEPS = 20
"""Ordinary steps whose median says what is typical, before and after a sample as well."""
SECOND_LOOK = 16
"""Steps from the first measured step to the second at most: whether steps of one shape differ shows only then."""
ASK_AGAIN = 100
"""Steps until a budget that said no is asked again, where no interval says."""


class Schedule:
    """Decides which steps are measured, from the interval that was asked for and the cost of those before.

    Measuring a step makes it longer. The excess over a typical step is added to what the monitor has spent, and the
    next measurement waits until the run is long enough for all of it to stay within the budget.

    Args:
        interval_steps: Steps from one measurement to the next; 0 = only the first.
        budget: Share of the run's time that may be spent; None where somebody asked for this very interval.
        measures_first: Whether to measure once right after the warm-up.
    """

    def __init__(self, interval_steps: int, budget: float | None, *, measures_first: bool = True) -> None:
        self.interval_steps = interval_steps
        self.budget = budget
        self._num_measured = 0
        self._last_measured = 0
        self._measured_s = 0.0
        self._reading_s = 0.0
        self._may_skip = not measures_first
        self._ordinary_step = WARMUP_STEPS if measures_first else self._after(WARMUP_STEPS)
        self.next_step = self._ordinary_step
        """No step before this one is due: a plain number, because the training loop looks at it on every step."""
        self.refused_until = 0
        """Before this one it is of no use to ask for a step because of its shape: the budget said no."""
        self._typical_s: deque[float] = deque(maxlen=TYPICAL_STEPS)

    @property
    def measuring_s(self) -> float:
        """Extra time of all measured steps so far, over what a typical step takes by now."""
        typical = list(self._typical_s)  # a copy: the background appends to it
        longer_s = self._measured_s - self._num_measured * median(typical) if typical else 0.0
        return max(0.0, longer_s) + self._reading_s

    def inherit(self, other: Schedule) -> None:
        """Go on from the schedule of another phase of the same run: what it spent is spent."""
        self._num_measured, self._measured_s, self._reading_s = other._num_measured, other._measured_s, other._reading_s
        self._typical_s = other._typical_s
        if other._num_measured:
            self._may_skip, self._last_measured = True, other._last_measured
            self._ordinary_step = self.next_step = self._after(self._last_measured)

    def hasten(self, num_steps: int) -> None:
        """Measure soon, within the budget: what was measured so far does not tell of the steps that there are."""
        self.next_step = min(self.next_step, max(num_steps, WARMUP_STEPS))

    def is_early(self, num_steps: int) -> bool:
        """Whether a step is measured only because of its shape."""
        return num_steps < self._ordinary_step

    def put_off(self) -> None:
        """The step has no shape that was asked for."""
        self.next_step = self._ordinary_step

    def _after(self, step: int) -> int:
        return step + self.interval_steps if self.interval_steps else NEVER

    def is_due(self, num_steps: int, run_s: float, own_s: float) -> bool:
        """Whether the next step should be measured.

        Args:
            num_steps: Steps done so far.
            run_s: Age of the run.
            own_s: What the monitor spent apart from measuring.
        """
        if num_steps < self.next_step:
            return False
        if not self._may_skip or self.budget is None:
            return True  # without a first measurement there is no number at all
        if self._needed_s(own_s) <= self.budget * run_s:
            return True
        again = max(1, self.interval_steps // 10) if self.interval_steps else ASK_AGAIN
        self.next_step = num_steps + again  # asking at every step would cost, too
        steps_per_s = num_steps / run_s if run_s > 0 else 0.0
        until_s = self._needed_s(own_s) / self.budget - run_s
        self.refused_until = num_steps + max(1, math.ceil(min(until_s * steps_per_s, again)))
        return False

    def _needed_s(self, own_s: float) -> float:
        """What all of ours takes with one measured step more, which is expected to cost the mean of those before."""
        measuring_s = self.measuring_s
        return own_s + measuring_s + measuring_s / max(1, self._num_measured)

    def note_steps(self, steps: Sequence[tuple[int, float]]) -> None:
        """Ordinary steps went by: their indices and seconds. Called from the background."""
        self._typical_s.extend([step_s for _, step_s in steps[-TYPICAL_STEPS:]])

    def note_measured(self, num_steps: int, step_s: float, reading_s: float) -> None:
        """A measured step is done. `reading_s` is what it took to read the measurement afterwards."""
        self._measured_s += step_s
        self._reading_s += reading_s
        self._num_measured += 1
        self._may_skip = True
        self._last_measured = num_steps - 1  # steps before it: the next one is that many after it, and not one more
        second = num_steps + SECOND_LOOK if self.interval_steps and self._num_measured == 1 else NEVER
        self._ordinary_step = self.next_step = min(self._after(self._last_measured), second)


FIRST_STEPS = 10
"""Ordinary steps before the first sample: a short run is to have one too."""
MAX_REPEATS, REPEAT_STEPS = 2, 3
"""Samples that are taken again, a few steps later, where the first was disturbed: the median of three counts."""
REPEATS_SHARE = 0.1
"""Share of the run so far that all samples may have taken for one to be taken again: a step of 30,000 operators takes
seconds to sample, and is then sampled again when the run is long enough for it."""
MAX_SLOWDOWN = 1.1
"""After-effects that were reported are 10-20 %; less is not told from noise by twenty steps."""


class AfterEffect(NamedTuple):
    """A sample left the run slower."""

    before_s: float
    after_s: float


class SamplingPlan:
    """Decides which steps are sampled.

    `note_step` is called in the background, some steps late; `next_step`, `is_due` and `note_sampled` on the training
    thread. So it is by its number that a step lies before or after a sample.

    Args:
        interval_steps: Steps from one sample to the next; 0 = only the first.
        budget: Share of the run's time that may be spent.
    """

    def __init__(self, interval_steps: int, budget: float) -> None:
        self.next_step = NEVER
        """No step before this one is due: what the training loop asks at every step, in no time."""
        self.spent_s = 0.0
        """Extra time of all samples so far."""
        self.typical_s: float | None = None
        """Median of the ordinary steps before the last sample."""
        self._interval_steps = interval_steps
        self._budget = budget
        self._recent: deque[float] = deque(maxlen=TYPICAL_STEPS)
        self._before: tuple[float, ...] = ()
        self._sampled: tuple[int, bool] | None = None
        """The last sample: the step after it, and whether the tracer may have stayed. Replaced as a whole."""
        self._split_at: tuple[int, bool] | None = None
        """The sample that `_recent` begins after."""
        self._num_samples = self._num_repeats = 0
        self._is_stopped = False

    def note_step(self, index: int, step_s: float) -> AfterEffect | None:
        """An ordinary step went by; tells once, when enough have, whether they are slower than before the sample.

        Args:
            index: Steps before it.
        """
        sampled = self._sampled
        if sampled is not self._split_at and sampled is not None and index >= sampled[0]:
            self._split_at = sampled
            self._before = tuple(self._recent) if sampled[1] else ()
            self._recent.clear()
        self._recent.append(step_s)
        if self._is_stopped:
            return None
        if not self._num_samples and self.next_step == NEVER and len(self._recent) >= FIRST_STEPS:
            self.next_step = 0
        if not self._before or len(self._recent) < TYPICAL_STEPS:
            return None
        before, self._before = self._before, ()
        if not is_slower(before, self._recent):
            return None
        self.stop()
        return AfterEffect(median(before), median(self._recent))

    def ask(self) -> None:
        """Something has changed: sample as soon as the budget allows."""
        if not self._is_stopped and self._num_samples:
            self.next_step = 0

    def stop(self) -> None:
        """No more samples in this run."""
        self._is_stopped = True
        self.next_step = NEVER

    def is_due(self, num_steps: int, run_s: float, spent_s: float) -> bool:
        """Whether the next step should be sampled.

        Args:
            num_steps: Steps done so far.
            run_s: Age of the run.
            spent_s: What the monitor has used for everything, samples included.
        """
        if self._is_stopped or num_steps < self.next_step:
            return False
        if not self._num_samples:
            return True  # without one there is no split at all
        expected_s = self.spent_s / self._num_samples
        if self._num_samples <= self._num_repeats and self.spent_s + expected_s <= REPEATS_SHARE * run_s:
            return True
        if spent_s + expected_s <= self._budget * run_s:
            return True
        self.postpone(num_steps)
        return False

    def postpone(self, num_steps: int) -> None:
        """It cannot be now: ask again some steps later."""
        self.next_step = num_steps + TYPICAL_STEPS

    def note_sampled(
        self,
        num_steps: int,
        step_s: float,
        reading_s: float,
        *,
        may_linger: bool = True,
        is_disturbed: bool = False,
    ) -> None:
        """A sampled step is done.

        Args:
            num_steps: Steps done so far, with this one.
            reading_s: What starting, stopping and reducing took.
            may_linger: Whether the tracer stays attached, so that the steps to come have to be watched.
            is_disturbed: Whether the thread was kept from its core meanwhile: its operators are not what took the time.
        """
        recent = list(self._recent)  # a copy: the background appends to it
        self.typical_s = median(recent) if recent else None
        self._sampled = num_steps, may_linger
        self.spent_s += max(0.0, step_s - (self.typical_s or step_s)) + reading_s
        self._num_samples += 1
        has_next = self._interval_steps and not self._is_stopped
        self.next_step = num_steps + self._interval_steps if has_next else NEVER
        if is_disturbed and self._num_samples <= MAX_REPEATS and not self._is_stopped:
            self._num_repeats, self.next_step = self._num_samples, num_steps + REPEAT_STEPS


def is_slower(before_s: Sequence[float], after_s: Sequence[float]) -> bool:
    """Whether steps got slower by more than their own scatter explains."""
    typical_s = median(before_s)
    scatter_s = median(abs(step_s - typical_s) for step_s in before_s)
    excess_s = median(after_s) - typical_s
    return excess_s > (MAX_SLOWDOWN - 1) * typical_s and excess_s > 2 * scatter_s
