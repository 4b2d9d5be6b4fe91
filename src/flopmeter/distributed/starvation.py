"""How long was a thread ready to run without getting a core? Linux counts it; elsewhere nobody knows."""

from __future__ import annotations

import math
from pathlib import Path
from threading import get_native_id
from time import perf_counter


class Starvation:
    """Follows the thread that creates it; may be asked from any other."""

    def __init__(self) -> None:
        self._path = Path(f"/proc/self/task/{get_native_id()}/schedstat")
        self._at_s, self._waited_s = perf_counter(), self._read()

    def take(self) -> float:
        """Share of the time since the last call in which the thread waited for a core; NaN where it is not counted."""
        now_s, waited_s = perf_counter(), self._read()
        share = (waited_s - self._waited_s) / (now_s - self._at_s) if now_s > self._at_s else math.nan
        self._at_s, self._waited_s = now_s, waited_s
        return share

    def _read(self) -> float:
        try:
            return int(self._path.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return math.nan
