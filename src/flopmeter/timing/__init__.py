"""How long did the step take, and in which phase? Host time; what the device did is in `events`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import NamedTuple

from flopmeter.schema import PHASES

DATA_WAIT, HOST_TO_DEVICE, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(len(PHASES))
PAUSE = len(PHASES)
"""Time between steps, taken out of them."""


class StepTime(NamedTuple):
    """One closed step."""

    step_ns: int
    """Wall time without pauses."""
    phase_ns: tuple[int, ...]
    """Time by phase, in the order of `schema.PHASES`; they add up to `step_ns`."""
    end_ns: int
    """The clock at its end."""


class PhaseClock:
    """Splits wall time into phases and steps: every moment belongs to exactly one phase.

    Args:
        now_ns: The clock; tests pass a fake one.
    """

    __slots__ = ("_is_started", "_mark_ns", "_now_ns", "_phase", "_totals_ns")

    def __init__(self, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._totals_ns = [0] * (PAUSE + 1)
        self._phase = OTHER
        self._mark_ns = now_ns()
        self._is_started = False

    def start(self) -> None:
        """Begin the first step; a second call does nothing."""
        if not self._is_started:
            self._is_started = True
            self._mark_ns = self._now_ns()

    def switch(self, phase: int) -> int:
        """Let another phase begin; returns the one that ended. The hot path: no allocation but the clock's number."""
        now_ns = self._now_ns()
        ended = self._phase
        self._totals_ns[ended] += now_ns - self._mark_ns
        self._mark_ns = now_ns
        self._phase = phase
        return ended

    def end_step(self) -> StepTime:
        """Close the step; the phase that runs goes on into the next one."""
        self.switch(self._phase)
        phase_ns = tuple(self._totals_ns[:PAUSE])
        self._totals_ns = [0] * (PAUSE + 1)
        return StepTime(sum(phase_ns), phase_ns, self._mark_ns)

    @contextmanager
    def phase(self, phase: int) -> Iterator[None]:
        """Time a part of the code as a phase; what is inside another phase is taken out of that one."""
        outer = self.switch(phase)
        try:
            yield
        finally:
            self.switch(outer)

    @contextmanager
    def pause(self) -> Iterator[Callable[[], float]]:
        """Take time out of the step; yields a function that gives the seconds of the pause once it is over."""
        outer = self.switch(PAUSE)
        start_ns = self._mark_ns
        end_ns = start_ns
        try:
            yield lambda: (end_ns - start_ns) / 1e9
        finally:
            self.switch(outer)
            end_ns = self._mark_ns
