"""How do a million lines with metrics become columns, without looking at every value?

The steps of a run have much the same keys. A line that is as usual is decoded straight into numbers by key; whatever is
unusual is read with patience. Rows are dealt out to their columns many at a time.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from flopmeter.columns import tamed_column

MAX_WAITING = 1 << 17
"""Values that wait to be dealt out to their columns."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class StepLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The line of a step; a field that is not named here would make every line unusual."""

    kind: Literal["step"]
    step: Any  # the reader has its own idea of what a step number is
    time: float = math.nan
    metrics: dict[str, float | str | None]
    marks: Any = None


_decoder = msgspec.json.Decoder(StepLine)


def usual_step(raw: bytes) -> StepLine | None:
    """The line of a step; None for any other line, or one that wants a closer look."""
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class Rows:
    """Fills columns, row by row. All of them are equally long after `deal`."""

    def __init__(self, columns: dict[str, array[float]], max_columns: int) -> None:
        self._columns = columns
        self._max_columns = max_columns
        self._empty: dict[str, float] = {}  # the row of a step without metrics; its order is that of the columns
        self._waiting = array("d")
        self._num_rows = 0

    def add(self, metrics: Mapping[str, Any]) -> bool:
        """One more row with whatever keys; says whether there was a column for each of them."""
        row, is_all = {**self._empty, **metrics}, True
        if len(row) > len(self._empty):
            self.deal()
            for key in list(row)[len(self._empty) : self._max_columns]:
                self._empty[key] = math.nan
                self._columns[key] = array("d", [math.nan]) * self._num_rows
            is_all = len(row) == len(self._empty)
            row = {key: row[key] for key in self._empty}
        try:
            values = array("d", list(row.values()))
        except (TypeError, OverflowError):
            values = array("d", map(number, row.values()))
        self._num_rows += 1
        self._waiting.extend(values)
        if len(self._waiting) >= MAX_WAITING:
            self.deal()
        return is_all

    def deal(self) -> None:
        """Give each column its part of the rows that wait."""
        for place, key in enumerate(self._empty):
            self._columns[key].extend(tamed_column(self._waiting[place :: len(self._empty)]))
        self._waiting = array("d")


def number(value: Any) -> float:
    """The value as a float, NaN where it is none: a record may hold anything."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, math.nan)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.nan
    return math.nan
