"""When may a step be measured? As often as asked, and never so often that it is felt."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from flopmeter.timing.sampling import NEVER

WARMUP_STEPS = 3
TYPICAL_STEPS = 20
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
        if self._fits(run_s, own_s):
            return True
        again = max(1, self.interval_steps // 10) if self.interval_steps else ASK_AGAIN
        self.next_step = num_steps + again  # asking at every step would cost, too
        steps_per_s = num_steps / run_s if run_s > 0 else 0.0
        until_s = self._needed_s(own_s) / self.budget - run_s
        self.refused_until = num_steps + max(1, math.ceil(min(until_s * steps_per_s, again)))
        return False

    def _fits(self, run_s: float, own_s: float) -> bool:
        assert self.budget is not None
        return self._needed_s(own_s) <= self.budget * run_s

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
