"""Which values of a record are sound, when it may hold anything? Long columns are checked without a Python loop."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LONGEST_S = 1e9
"""No step or pause lasts 30 years: a duration beyond it is damage, and counts as unknown."""
LATEST_S = 1e11
"""No run is dated after the year 5000."""


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


def number(value: Any, limit: float = LONGEST_S) -> float:
    """The value if it is a number from 0 up to the limit, else NaN."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < limit else math.nan


def known(values: Iterable[Any], limit: float = LONGEST_S) -> list[float]:
    """Those of the values that are numbers from 0 up to the limit."""
    return [value for value in (number(value, limit) for value in values) if not math.isnan(value)]


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}
