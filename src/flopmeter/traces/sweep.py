"""Given what ran on a device and when, what was it doing at each instant, and how long did it do nothing?

Where several things ran at once, the instant is charged to one of them, the first in the order of `Work`: compute hides
communication, and both hide copies. So the parts are exclusive and add up to the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from flopmeter.traces.kernels import Work


class Segment(NamedTuple):
    """A stretch in which nothing changed."""

    start_us: float
    end_us: float
    work: int
    """What it is charged to; `Work.IDLE` when nothing ran."""
    owner: int
    """Position of an event: of one that runs and is charged, or of the one that ends an idle stretch; -1 for none."""
    is_communicating: bool
    """Whether communication ran, charged or not."""


def segments(
    starts: Sequence[float], ends: Sequence[float], works: Sequence[int], cuts: Iterable[float]
) -> Iterator[Segment]:
    """The time from the first cut to the last, in order, cut at every change and at every cut."""
    marks = sorted(set(cuts))
    if len(marks) < 2:
        return
    changes = _changes(starts, ends, marks)
    active: list[set[int]] = [set() for _ in Work]
    running = _IDLE_BIT  # a bit for each kind of work, so that the lowest one says what to charge
    now = marks[0]
    for index, (instant, kind, position) in enumerate(changes):
        if instant > now:
            work = (running & -running).bit_length() - 1
            owner = next(iter(active[work])) if work != _IDLE else _next_start(changes, index)
            yield Segment(now, instant, work, owner, bool(running & _COMMUNICATION_BIT))
            now = instant
        if kind == _START:
            work = works[position]
            active[work].add(position)
            running |= 1 << work
        elif kind == _END:
            work = works[position]
            active[work].discard(position)
            if not active[work]:
                running &= ~(1 << work)


_IDLE = int(Work.IDLE)
_IDLE_BIT, _COMMUNICATION_BIT = 1 << _IDLE, 1 << int(Work.COMMUNICATION)
_END, _CUT, _START = 0, 1, 2


def _next_start(changes: list[tuple[float, int, int]], index: int) -> int:
    while index < len(changes) and changes[index][1] != _START:
        index += 1
    return changes[index][2] if index < len(changes) else -1


def _changes(starts: Sequence[float], ends: Sequence[float], marks: list[float]) -> list[tuple[float, int, int]]:
    """Starts, ends and cuts between the first and the last cut, in order; at one instant ends come first."""
    first, last = marks[0], marks[-1]
    changes = [(mark, _CUT, -1) for mark in marks]
    for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end > first and start < last and end > start:
            changes.append((max(start, first), _START, position))
            changes.append((min(end, last), _END, position))
    changes.sort()
    return changes
