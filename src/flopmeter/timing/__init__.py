"""How long did the step take, and in which phase? Host time; what the device did is in `events`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import NamedTuple

from flopmeter.schema import PHASES

DATA_WAIT, HOST_TO_DEVICE, FORWARD, BACKWARD, OPTIMIZER, NO_GRAD, OTHER = range(len(PHASES))
PAUSE = len(PHASES)
"""Time between steps, taken out of them."""
MAX_MARKS = 4096
"""Numbers that a step may note before they are added up on the spot."""


class StepTime(NamedTuple):
    """One closed step."""

    step_ns: int
    """Wall time without pauses."""
    phase_ns: tuple[int, ...]
    """Time by phase, in the order of `schema.PHASES`; they add up to `step_ns`."""


class PhaseClock:
    """Splits wall time into phases and steps: every moment belongs to exactly one phase.

    A change of phase is noted as two numbers, the clock and the phase that begins; `split` does the sums elsewhere.

    Args:
        now_ns: The clock; tests pass a fake one.
    """

    __slots__ = ("_now_ns", "marks", "note")

    def __init__(self, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._now_ns = now_ns
        self.marks = [now_ns(), OTHER]  # one list for good: `note` is bound to it
        self.note: Callable[[tuple[int, int]], None] = self.marks.extend
        """`switch` without a call in between: takes the clock and the phase that begins. `bound` goes with it."""

    @property
    def current(self) -> int:
        """The phase that runs now."""
        return self.marks[-1]

    def start(self) -> None:
        """Let the step begin only now: what went before belongs to none."""
        self.marks[:] = self._now_ns(), self.marks[-1]

    def switch(self, phase: int) -> None:
        """Let another phase begin."""
        self.note((self._now_ns(), phase))
        self.bound()

    def bound(self) -> None:
        """Add marks up when there are too many: a loop that never steps must not fill the memory."""
        if len(self.marks) > MAX_MARKS:
            self.marks[:] = _shortened(self.marks)

    def take(self, now_ns: int | None = None) -> tuple[int, ...]:
        """Close the step and give its marks, for `split`; the phase that runs goes on into the next one."""
        marks = self.marks
        if now_ns is None:
            now_ns = self._now_ns()
        taken = (*marks, now_ns)
        marks[:] = now_ns, marks[-1]
        return taken

    @contextmanager
    def phase(self, phase: int) -> Iterator[None]:
        """Time a part of the code as a phase; what is inside another phase is taken out of that one."""
        outer = self.marks[-1]
        self.switch(phase)
        try:
            yield
        finally:
            # Whoever names phases says when the batch is on the device: the copy does not go on after another phase.
            self.switch(OTHER if outer == HOST_TO_DEVICE else outer)

    @contextmanager
    def pause(self) -> Iterator[Callable[[], float]]:
        """Take time out of the step; yields a function that gives the seconds of the pause once it is over."""
        outer = self.marks[-1]
        self.switch(PAUSE)
        start_ns = end_ns = self.marks[-2]
        try:
            yield lambda: (end_ns - start_ns) / 1e9
        finally:
            self.switch(outer)
            end_ns = self.marks[-2]


def split(marks: Sequence[int]) -> StepTime:
    """Time by phase, from the marks of one step: clock, phase, clock, phase, ..., clock."""
    phase_ns = tuple(_totals_ns(marks)[:PAUSE])
    return StepTime(sum(phase_ns), phase_ns)


def _totals_ns(marks: Sequence[int]) -> list[int]:
    """Time by phase, pauses last; a phase that still runs at the last mark has none from there on."""
    totals_ns = [0] * (PAUSE + 1)
    for begin_ns, phase, end_ns in zip(marks[::2], marks[1::2], marks[2::2], strict=False):
        totals_ns[phase] += end_ns - begin_ns
    return totals_ns


def _shortened(marks: list[int]) -> list[int]:
    """The same step in a few marks, as if each phase had run once."""
    result: list[int] = []
    now_ns = marks[0]
    for phase, total_ns in enumerate(_totals_ns(marks)):
        result += (now_ns, phase)
        now_ns += total_ns
    return [*result, *marks[-2:]]
