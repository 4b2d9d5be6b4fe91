"""Which files and values can be read, when they may hold anything? What a reader lets in is checked here, once.

Long columns are checked without a Python loop.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_S = 1e9
"""No step or pause lasts 30 years: a duration beyond it is damage, and counts as unknown."""
LATEST_S = 1e11
"""No run is dated after the year 5000."""
LARGEST = 1e100
"""No training has a larger number, and the square of one that is let in is still a number. Beyond it a value counts as
unknown, below its inverse as 0."""
MAX_NESTING = 32
"""Levels of a value in a file; what lies deeper is left out."""
BUFFER_BYTES = 1 << 17
"""A hundred lines of a run file at a time: the usual buffer holds nine."""


def open_regular(path: Path, *, inside: Path | None = None) -> BinaryIO:
    """Open an ordinary file for reading. A pipe would make us wait for ever, a device give no end of bytes.

    Args:
        inside: A folder above the file. Every part of the path below it is opened by itself and must not be a link,
            so that nobody can swap one in between a check and its use.

    Raises:
        OSError: It cannot be opened, or is no ordinary file; its `strerror` says so.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    if inside is None:
        _refuse_irregular(os.stat(path), path)  # before it is opened: to open a device may do something to it
        descriptor = os.open(path, flags)
    else:
        *folders, name = path.relative_to(inside).parts
        descriptor = os.open(inside, flags | os.O_DIRECTORY)
        for part in (*folders, name):
            above = descriptor
            try:
                kind = os.O_DIRECTORY if part is not name else 0
                descriptor = os.open(part, flags | kind | os.O_NOFOLLOW, dir_fd=above)
            finally:
                os.close(above)
    try:
        _refuse_irregular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb", buffering=BUFFER_BYTES)
    except OSError:
        os.close(descriptor)
        raise


def read_toml(path: Path) -> dict[str, Any]:
    """A data file of ours. Its fractions are `Decimal`, so that 181.05 times 1e12 is exactly 181.05e12."""
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table: dict[str, Any] = toml.loads(path.read_text("utf-8"), parse_float=Decimal)
    return table


def _refuse_irregular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))


def tamed(value: Any, depth: int = MAX_NESTING) -> Any:
    """A value of a file with every number in it within reason, None in place of one that is not."""
    kind = type(value)
    if kind is float or kind is int:
        if abs(value) < LARGEST:
            return value if kind is int or abs(value) > 1 / LARGEST or value == 0 else 0.0
        return value if kind is float and not math.isfinite(value) else None
    if kind is dict:
        return {key: tamed(item, depth - 1) for key, item in value.items()} if depth else None
    if kind is list:
        return [tamed(item, depth - 1) for item in value] if depth else None
    return value


def stretches(places: range, left_out: Iterable[int]) -> list[range]:
    """The positions as unbroken stretches between those that are left out."""
    cuts = sorted({place for place in left_out if place in places})
    begins, ends = [places.start, *(cut + 1 for cut in cuts)], [*cuts, places.stop]
    return [range(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def at(column: array[float], parts: Iterable[range]) -> array[float]:
    """The values at these stretches of positions, end to end; the very same column where that is all of it."""
    parts = list(parts)
    if parts == [range(len(column))] and isinstance(column, array):
        return column
    values = array("d")
    for part in parts:
        values.extend(column[part.start : part.stop])
    return values


def tamed_column(values: array[float]) -> array[float]:
    """The column with NaN in place of every number beyond reason; the very same one where there is none."""
    if sum(map(abs, values)) < LARGEST:  # not so if there is a NaN
        return values
    if not any(LARGEST <= abs(value) < math.inf for value in values):
        return values
    return array("d", [math.nan if LARGEST <= abs(value) < math.inf else value for value in values])


def sound(values: Sequence[float], limit: float) -> Sequence[float]:
    """Those from 0 up to the limit; the very same sequence where all are."""
    total = sum(values)  # not finite as soon as one value is not
    if values and math.isfinite(total) and min(values) >= 0 and (total < limit or max(values) < limit):
        return values
    return [value for value in values if 0 <= value < limit]


def finite(values: Sequence[float]) -> Sequence[float]:
    """Those that are finite; the very same sequence where all are."""
    return values if math.isfinite(sum(values)) else [value for value in values if math.isfinite(value)]


def number_or_nan(value: Any, limit: float = LONGEST_S) -> float:
    """The value if it is a number from 0 up to the limit, else NaN."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < limit else math.nan


def known(values: Iterable[Any], limit: float = LONGEST_S) -> list[float]:
    """Those of the values that are numbers from 0 up to the limit."""
    return [value for value in (number_or_nan(value, limit) for value in values) if not math.isnan(value)]


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}
