"""How long did Python's garbage collector hold up the training?

Its collections lie inside steps, where no hook of ours sees them; the collector itself tells when it works.

watch = GarbageWatch()
watch.start()
...
watch.take()        # Collections(num=3, duration_s=0.12, longest_s=0.05), and begins anew
watch.close()
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, NamedTuple


class Collections(NamedTuple):
    """Garbage collections of a stretch of time."""

    num: int
    duration_s: float
    longest_s: float


class GarbageWatch:
    """Adds up collections, on whichever thread they run: all threads stand still meanwhile.

    Args:
        now_ns: The clock; tests pass a fake one.
    """

    def __init__(self, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._start_ns: int | None = None
        self._sums: deque[tuple[int, int, int]] = deque()
        """How many, nanoseconds in all, of the longest: one or none. It belongs to whoever takes it out, for a
        collection may start anywhere and on any thread."""

    def start(self) -> None:
        """Begin to listen."""
        if self.on_collection not in gc.callbacks:
            gc.callbacks.append(self.on_collection)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        if self.on_collection in gc.callbacks:
            gc.callbacks.remove(self.on_collection)

    def on_collection(self, phase: str, info: Mapping[str, Any]) -> None:
        """What the collector calls before and after its work."""
        if phase == "start":
            self._start_ns = self._now_ns()
        elif self._start_ns is not None:
            lasted_ns = self._now_ns() - self._start_ns
            self._start_ns = None
            num, total_ns, longest_ns = self._take_sums()
            self._sums.append((num + 1, total_ns + lasted_ns, max(longest_ns, lasted_ns)))

    def take(self) -> Collections | None:
        """What came together since the last time; None when nothing was collected."""
        num, total_ns, longest_ns = self._take_sums()
        return Collections(num, total_ns / 1e9, longest_ns / 1e9) if num else None

    def _take_sums(self) -> tuple[int, int, int]:
        try:
            return self._sums.popleft()
        except IndexError:
            return 0, 0, 0
