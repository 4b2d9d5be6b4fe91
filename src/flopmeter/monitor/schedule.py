"""When may a step be measured? As often as asked, and never so often that it is felt."""

from __future__ import annotations

from collections import deque
from statistics import median

WARMUP_STEPS = 3
TYPICAL_STEPS = 20


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
        self.measuring_s = 0.0
        """Extra time of all measured steps so far."""
        self._last_step: int | None = None if measures_first else WARMUP_STEPS
        self._num_measured = 0
        self._not_before = 0
        self._typical_s: deque[float] = deque(maxlen=TYPICAL_STEPS)

    @property
    def next_step(self) -> int:
        """No step before this one is due: what the training loop asks at every step, in no time."""
        if self._last_step is None:
            return WARMUP_STEPS
        return max(self._last_step + self.interval_steps, self._not_before) if self.interval_steps else 1 << 62

    def is_warmup(self, num_steps: int) -> bool:
        """Whether a run that has done so many steps is still warming up."""
        return num_steps < WARMUP_STEPS

    def is_due(self, num_steps: int, run_s: float, own_s: float) -> bool:
        """Whether the next step should be measured.

        Args:
            num_steps: Steps done so far.
            run_s: Age of the run.
            own_s: What the monitor spent apart from measuring.
        """
        if num_steps < self.next_step:
            return False
        if self._last_step is None or self.budget is None:
            return True  # without a first measurement there is no number at all
        if self._fits(run_s, own_s):
            return True
        self._not_before = num_steps + max(1, self.interval_steps // 10)  # asking at every step would cost, too
        return False

    def _fits(self, run_s: float, own_s: float) -> bool:
        assert self.budget is not None
        expected_s = self.measuring_s / max(1, self._num_measured)
        return own_s + self.measuring_s + expected_s <= self.budget * run_s

    def note_step(self, step_s: float) -> None:
        """An ordinary step went by."""
        self._typical_s.append(step_s)

    def note_measured(self, num_steps: int, step_s: float, reading_s: float) -> None:
        """A measured step is done. `reading_s` is what it took to read the measurement afterwards."""
        typical_s = median(self._typical_s) if self._typical_s else step_s
        self.measuring_s += max(0.0, step_s - typical_s) + reading_s
        self._num_measured += 1
        self._last_step = num_steps
