"""Has the run become slower for good? Tells a fall of MFU that stays from a bad moment."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

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
