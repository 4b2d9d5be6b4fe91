"""How long did the steps of a window take, and what else does the record say about that stretch of time?"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from statistics import median
from typing import TYPE_CHECKING, Any, final

from flopmeter.columns import LATEST_S, LONGEST_S, at, known, number_or_nan, sound, stretches
from flopmeter.goodput import Pause, by_name, find_pauses, surplus_s

if TYPE_CHECKING:
    from flopmeter.record import Run


@final
class Amount:
    """Seconds that an ordinary step spends on something.

    What few ask for is worked out when they do, from seconds that are made anew: a million take time and memory.
    """

    def __init__(self, seconds: Sequence[float], again: Callable[[], Sequence[float]]) -> None:
        self._again = again
        self.num_steps = len(seconds)
        """Steps that know it."""
        self.mean_s = math.fsum(seconds) / len(seconds)

    @cached_property
    def median_s(self) -> float:
        """Of the steps that know it."""
        return median(self._again())

    @cached_property
    def deviation_s(self) -> float:
        """Usual distance of a step from the mean."""
        seconds = self._again()
        # Without a list of a million numbers, as `math.dist` would make two.
        return math.sqrt(sum((second_s - self.mean_s) ** 2 for second_s in seconds) / len(seconds))


class Window:
    """The steps from position `start` up to `stop`, and the events between the first and the last of them.

    Without a `start` the window begins at the first step that is not warm-up. Every step counts, those that a restart
    threw away included: they took their time. A marked step (observed, profiled, warm-up) has its own FLOPs; where its
    time went is taken to be what ordinary ones tell, and what it took beyond those of its work is kept apart as
    `surplus_s`.
    """

    def __init__(self, run: Run, start: int | None = None, stop: int | None = None) -> None:
        self.run = run
        self._amounts: dict[tuple[str, ...], Amount | None] = {}
        step_s = run.column("perf/step_time")
        if start is None:
            start = next((place for place in range(len(run)) if "warmup" not in run.marks.get(place, ())), 0)
        places = range(len(run))[start:stop]
        untimed = _untimed(step_s, places)
        self.num_untimed = len(untimed)
        self._num_timed = len(places) - len(untimed)
        self.timed = stretches(places, untimed)
        """Positions of the steps whose duration is known, as unbroken stretches."""
        unmarked = stretches(places, [*untimed, *run.marks])
        self.has_ordinary = bool(unmarked)
        """Whether there is a step that is neither warm-up nor measured: without one the run has no speed to tell."""
        self.ordinary = unmarked or self.timed
        """Positions of those that represent the run; all of them where none is without a mark."""
        self.num_ordinary = sum(map(len, self.ordinary))
        self._places = places
        left_out = set(untimed)
        marks = () if self.num_ordinary == self._num_timed else run.marks
        self.marked = [place for place in marks if place in places and place not in left_out]
        """Positions of the other steps whose duration is known."""
        self.steps_s = math.fsum(at(step_s, self.timed))
        """Time of all steps, pauses left out."""
        self.step_s = self.values("perf/step_time")
        """Time of each ordinary step."""
        self.step = self.amount()
        self.begin_s = self.end_s = math.nan
        if self.timed:
            first, last = self.timed[0][0], self.timed[-1][-1]
            self.begin_s, self.end_s = run.time[first] - step_s[first], run.time[last]
        self._is_open = stop is None or stop >= len(run)

    def __len__(self) -> int:
        return self._num_timed

    def count_from(self, step: float) -> int:
        """Steps of the window from this number on."""
        return sum(self.run.step[place] >= step for part in self.timed for place in part)

    @cached_property
    def surplus_s(self) -> float:
        """What the marked steps took beyond ordinary ones of the same work; below zero where they happened to be fast.

        Where no ordinary step did the same work, they are held against the mean of all.
        """
        if self.step is None:
            return 0.0
        step_s, usual_s = self.run.column("perf/step_time"), self.step.mean_s
        return math.fsum(surplus_s(self.run, step_s, place, self._places, usual_s) for place in self.marked)

    def marked_s(self, key: str) -> Sequence[float]:
        """Seconds of one `perf/..._share` (or utilisation) column in the marked steps that know it."""
        step_s, shares = self.run.column("perf/step_time"), self.run.column(key)
        return sound([step_s[place] * shares[place] for place in self.marked], LONGEST_S)

    def amount(self, *keys: str) -> Amount | None:
        """Seconds a step of one or several `perf/..._share` (or utilisation) columns; of the whole step without any."""
        if keys not in self._amounts:
            seconds = self._seconds(keys)
            self._amounts[keys] = Amount(seconds, partial(self._seconds, keys)) if seconds else None
        return self._amounts[keys]

    def values(self, key: str) -> array[float]:
        """One value of the metric `key` for each ordinary step."""
        return at(self.run.column(key), self.ordinary)

    def _seconds(self, keys: tuple[str, ...]) -> Sequence[float]:
        """Without a loop of ours: a run may have a million steps."""
        if not keys:
            return self.step_s
        if not self.run.columns.keys() >= set(keys):
            return ()
        shares: Iterable[float] = self.values(keys[0])
        for key in keys[1:]:
            shares = map(operator.add, shares, self.values(key))
        return sound(array("d", map(operator.mul, self.step_s, shares)), LONGEST_S)

    @cached_property
    def pauses_s(self) -> Mapping[str, float]:
        """Seconds by name of the pauses between the first and the last step, roles left out."""
        return by_name(pause for pause in self._pauses if not pause.is_role)

    @cached_property
    def roles_s(self) -> Mapping[str, float]:
        """Seconds by name of what the loop did meanwhile besides training."""
        return by_name(pause for pause in self._pauses if pause.is_role)

    @cached_property
    def _pauses(self) -> list[Pause]:
        return [pause for pause in find_pauses(self.run.events) if not self._is_beside(pause)]

    def _is_beside(self, pause: Pause) -> bool:
        # By its middle: the end may touch the window's first step. One that is not dated is in it.
        middle_s = pause.end_s - pause.own_s / 2
        return middle_s < self.begin_s or middle_s > self.end_s

    @cached_property
    def gc_s(self) -> float:
        """Seconds that collecting garbage took in the window."""
        return math.fsum(known(event.get("duration_s") for event in self.events("gc")))

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of that name in the window; an undated one is taken to be in it."""
        end_s = math.inf if self._is_open else self.end_s
        found = [(event, number_or_nan(event.get("time"), LATEST_S)) for event in self.run.named(name)]
        return [event for event, time_s in found if not (time_s < self.begin_s or time_s > end_s)]

    def latest(self, name: str) -> dict[str, Any]:
        """The last event of that name in the window, else the last one before it, else the first one after it."""
        if found := self.events(name):
            return found[-1]
        named = self.run.named(name)
        before = [event for event in named if number_or_nan(event.get("time"), LATEST_S) < self.begin_s]
        return (before or named[:1] or [{}])[-1]


def _untimed(step_s: array[float], places: range) -> list[int]:
    """Positions of the steps that have no duration, or none that can be one."""
    durations_s = step_s[places.start : places.stop]
    if sound(durations_s, LONGEST_S) is durations_s and 0.0 not in durations_s:
        return []
    return [place for place in places if not 0 < step_s[place] < LONGEST_S]
