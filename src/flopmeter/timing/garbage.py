"""How long did Python's garbage collector hold up the training?

Its collections lie inside steps, where no hook of ours sees them; the collector itself tells when it works.

watch = GarbageWatch()
watch.start()
...
watch.take()        # Collections(num=3, duration_s=0.12, longest_s=0.05), and begins anew
watch.close()

What the collector calls is made of parts that are not written in Python. Python runs a signal's handler at the first
line of Python code after the signal; after one that came during a collection that would be a line of the callback,
and the collector throws away what a callback raises: a Ctrl-C would be lost.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import filterfalse
from time import perf_counter_ns
from typing import NamedTuple

MOST_WAITING = 65_536
"""Collections whose times wait to be added up; of more the first are forgotten."""


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
        self._starts: deque[int] = deque(maxlen=MOST_WAITING)
        self._stops: deque[int] = deque(maxlen=MOST_WAITING)
        self._sums = (0, 0, 0)
        """How many, nanoseconds in all, of the longest."""

        class Phases:
            """Reading `start` or `stop` notes the time."""

            start = _noting(now_ns, self._starts)
            stop = _noting(now_ns, self._stops)

        self.on_collection = partial(getattr, Phases())
        """What the collector calls before and after its work, with the phase's name and some figures."""

    def start(self) -> None:
        """Begin to listen."""
        if self.on_collection not in gc.callbacks:
            gc.callbacks.append(self.on_collection)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        if self.on_collection in gc.callbacks:
            gc.callbacks.remove(self.on_collection)

    def add_up(self) -> None:
        """Look at the collections that have ended. Like `take`, for one thread only."""
        while self._stops:
            stop_ns, start_ns = self._stops.popleft(), None
            while self._starts and self._starts[0] <= stop_ns:
                start_ns = self._starts.popleft()
            if start_ns is not None:
                num, total_ns, longest_ns = self._sums
                lasted_ns = stop_ns - start_ns
                self._sums = (num + 1, total_ns + lasted_ns, max(longest_ns, lasted_ns))

    def take(self) -> Collections | None:
        """What came together since the last time; None when nothing was collected."""
        self.add_up()
        (num, total_ns, longest_ns), self._sums = self._sums, (0, 0, 0)
        return Collections(num, total_ns / 1e9, longest_ns / 1e9) if num else None


def _noting(now_ns: Callable[[], int], times: deque[int]) -> property:
    """A property that appends the time whenever it is read; `append` returns None, so nothing is left out."""
    return property(partial(next, filterfalse(times.append, iter(now_ns, None))))
