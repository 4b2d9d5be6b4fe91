"""How long did the step take, and in which phase? Host time only so far; nothing here touches the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns


class StepClock:
    """Splits wall time into steps, phases within them, and pauses between them.

        clock = StepClock()
        clock.start()
        with clock.phase("data_wait"): ...
        step_s, phase_s = clock.end_step()

    Args:
        now_ns: The clock; tests pass a fake one.
    """

    def __init__(self, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._step_start_ns: int | None = None
        self._phase_ns: dict[str, int] = {}
        self._paused_ns = 0
        self._depth = 0

    def start(self) -> None:
        """Begin the first step; a second call does nothing."""
        if self._step_start_ns is None:
            self._step_start_ns = self._now_ns()

    def end_step(self) -> tuple[float, dict[str, float]]:
        """Close the step: its seconds without pauses, and the seconds of each phase."""
        now_ns = self._now_ns()
        start_ns = now_ns if self._step_start_ns is None else self._step_start_ns
        step_s = (now_ns - start_ns - self._paused_ns) / 1e9
        phase_s = {name: value / 1e9 for name, value in self._phase_ns.items()}
        self._step_start_ns, self._phase_ns, self._paused_ns = now_ns, {}, 0
        return step_s, phase_s

    def add(self, phase: str, duration_ns: int) -> None:
        """Credit time to a phase."""
        self._phase_ns[phase] = self._phase_ns.get(phase, 0) + duration_ns

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; an inner phase is taken out of the outer one by name only, so do not nest them."""
        start_ns = self._now_ns()
        try:
            yield
        finally:
            self.add(name, self._now_ns() - start_ns)

    @contextmanager
    def pause(self) -> Iterator[Callable[[], float]]:
        """Take time out of the step; yields a function that gives the seconds of the pause once it is over."""
        start_ns = self._now_ns()
        self._depth += 1
        lasted_ns = 0
        try:
            yield lambda: lasted_ns / 1e9
        finally:
            lasted_ns = self._now_ns() - start_ns
            self._depth -= 1
            if self._depth == 0:
                self._paused_ns += lasted_ns
