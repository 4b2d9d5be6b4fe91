"""When may a step be profiled, and did the last profile leave the run slower?

The first sample waits until enough ordinary steps have gone by to know what is typical; after that one is taken at
long intervals, and one when the run became slower, as far as the overhead budget allows. On CUDA the tracer stays
attached after a sample and may slow the rest of the run, so the steps after each sample are held against those before
it: where they are slower, no other sample is taken. On a CPU nothing stays behind, and nothing is compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

TYPICAL_STEPS = 20
"""Ordinary steps whose median says what is typical, before and after a sample."""
FIRST_STEPS = 10
"""Ordinary steps before the first sample: a short run is to have one too."""
MAX_REPEATS, REPEAT_STEPS = 2, 3
"""Samples that are taken again, a few steps later, where the first was disturbed: the median of three counts."""
MAX_SLOWDOWN = 1.1
"""After-effects that were reported are 10-20 %; less is not told from noise by twenty steps."""
NEVER = 1 << 62


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
        if self._num_samples <= self._num_repeats:
            return True  # without one there is no split at all
        expected_s = self.spent_s / self._num_samples
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
