"""How do a million lines with metrics become columns, without looking at every value?

The steps of a run have much the same keys. Once no new ones come, a parser is made for just those: it turns a line
straight into a row of numbers and refuses whatever is unusual, which is then read with patience. Rows are made columns
many at a time.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Collection, Mapping
from typing import Any, Generic, Literal, TypeVar

import msgspec

from flopmeter.columns import tamed_column

MAX_WAITING = 1 << 17
"""Values that wait to be made columns."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Metrics = TypeVar("Metrics", bound=msgspec.Struct)


class StepLine(msgspec.Struct, Generic[Metrics], kw_only=True, forbid_unknown_fields=True, gc=False):
    """A line of a step like those before it; a field that is not named here would make every line unusual."""

    kind: Literal["step"]
    step: Any  # the reader has its own idea of what a step number is
    time: float = math.nan
    metrics: Metrics
    marks: Any = None


class Rows:
    """Takes rows, one by one, and gives them back as columns."""

    def __init__(self, max_columns: int) -> None:
        self._max_columns = max_columns
        self._empty: dict[str, float] = {}  # the row of a step without metrics; its order is that of the columns
        self._pack = struct.Struct("").pack
        self._waiting: list[bytes] = []
        self._parser: msgspec.json.Decoder[StepLine[Any]] | None = None
        self._num_since_new_key = 0

    @property
    def is_full(self) -> bool:
        """Whether so many rows wait that they should be taken."""
        return len(self._waiting) * len(self._empty) >= MAX_WAITING

    def parse(self, raw: bytes) -> StepLine[Any] | None:
        """A line of a step whose keys are known; None for any other line, or one that wants a closer look."""
        if self._parser is None:
            return None
        try:
            return self._parser.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def add(self, values: Collection[Any]) -> None:
        """One more row, in the order of the columns."""
        try:
            row = self._pack(*values)
        except (struct.error, OverflowError):
            row = self._pack(*map(number, values))
        self._waiting.append(row)

    def add_metrics(self, metrics: Mapping[str, Any]) -> bool:
        """One more row with whatever keys and values; says whether there was a column for each of them."""
        new = [key for key in metrics if key not in self._empty]
        self._learn(new[: self._max_columns - len(self._empty)])
        is_all = not new or new[-1] in self._empty
        known = metrics if is_all else {key: metrics[key] for key in self._empty.keys() & metrics.keys()}
        values = {**self._empty, **known}.values()
        self.add(list(map(number, values)) if bool in map(type, values) else values)
        return is_all

    def _learn(self, new: list[str]) -> None:
        """Make room for new keys; a parser once as many lines as there are keys brought no new one.

        Not sooner: the more keys there are, the longer it takes to make.
        """
        self._num_since_new_key += 1
        if new:
            gap = array("d", [math.nan] * len(new)).tobytes()
            self._waiting = [row + gap for row in self._waiting]
            self._empty |= dict.fromkeys(new, math.nan)
            self._pack = struct.Struct(f"{len(self._empty)}d").pack
            self._parser, self._num_since_new_key = None, 0
        elif self._num_since_new_key == len(self._empty) + 1:
            self._parser = _parser_for(list(self._empty))

    def take(self) -> dict[str, array[float]]:
        """The rows that wait, as columns that are equally long."""
        flat, width = array("d", b"".join(self._waiting)), len(self._empty)
        self._waiting.clear()
        return {key: tamed_column(flat[place::width]) for place, key in enumerate(self._empty)}


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


def _parser_for(keys: list[str]) -> msgspec.json.Decoder[StepLine[Any]] | None:
    """Makes rows with all of these keys, NaN for those that a line lacks; None where a key cannot be a field."""
    names = {f"key_{place}": key for place, key in enumerate(keys)}
    fields = [(name, float | str | None, math.nan) for name in names]
    try:
        row = msgspec.defstruct("Row", fields, rename=names, forbid_unknown_fields=True, gc=False)
    except ValueError:  # a quotation mark, a backslash, a control character, half a surrogate pair
        return None
    return msgspec.json.Decoder(StepLine[row])  # type: ignore[valid-type]
