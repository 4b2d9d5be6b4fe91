"""Which of a million points must a chart keep, so that no peak and no dip is lost?"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from statistics import median

from flopmeter.columns import finite


def buckets(length: int, num: int) -> Iterator[range]:
    """The positions 0 to length, cut into at most `num` stretches of nearly equal length."""
    num = min(num, length)
    for index in range(num):
        yield range(index * length // num, (index + 1) * length // num)


def extremes(values: array[float], max_points: int) -> list[int]:
    """Positions to draw: the smallest and the largest value of each stretch, in order; all while they fit.

    A stretch without a finite value keeps its first position, so that the line breaks there instead of bridging it.
    """
    if len(values) <= max_points:
        return list(range(len(values)))
    kept: list[int] = []
    for stretch in buckets(len(values), max_points // 2):
        part = values[stretch.start : stretch.stop]
        known = finite(part)
        places = {part.index(min(known)), part.index(max(known))} if known else {0}
        kept += [stretch.start + place for place in sorted(places)]
    return kept


def medians(values: Sequence[float], num: int) -> list[tuple[int, float]]:
    """The middle position of each stretch and the median of its finite values; stretches without one are left out."""
    result: list[tuple[int, float]] = []
    for stretch in buckets(len(values), num):
        known = finite(values[stretch.start : stretch.stop])
        if known:
            result.append(((stretch.start + stretch.stop - 1) // 2, median(known)))
    return result


def evenly(items: Sequence[int], num: int) -> list[int]:
    """At most `num` of the items, the first and the last among them."""
    if len(items) <= num:
        return list(items)
    return [items[round(index * (len(items) - 1) / (num - 1))] for index in range(num)]
