"""Which values of a column count? Answered for a million of them without a loop of ours, as long as all of them do."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence


def stretches(places: range, left_out: Iterable[int]) -> list[range]:
    """The positions as unbroken stretches between those that are left out."""
    cuts = sorted({place for place in left_out if place in places})
    begins, ends = [places.start, *(cut + 1 for cut in cuts)], [*cuts, places.stop]
    return [range(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def at(column: array[float], parts: Iterable[range]) -> array[float]:
    """The values at these stretches of positions, end to end."""
    values = array("d")
    for part in parts:
        values += column[part.start : part.stop]
    return values


def sound(values: Sequence[float], limit: float) -> Sequence[float]:
    """Those from 0 up to the limit; the very same sequence where all are."""
    total = sum(values)  # not finite as soon as one value is not
    if values and math.isfinite(total) and min(values) >= 0 and (total < limit or max(values) < limit):
        return values
    return [value for value in values if 0 <= value < limit]


def finite(values: Sequence[float]) -> Sequence[float]:
    """Those that are finite; the very same sequence where all are."""
    return values if math.isfinite(sum(values)) else [value for value in values if math.isfinite(value)]
