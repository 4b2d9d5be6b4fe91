"""Which events does a trace file hold? Read piece by piece: nothing is held but the text at hand.

A Kineto or Chrome trace is `{..., "traceEvents": [{...}, {...}], ...}` or the bare list. Text is gathered up to the
last `}, {`, and what lies before it is handed to msgspec as one list. When that decodes, the cut was between two
events, whatever was in them: a JSON reader that has read whole values is at their level again. When it does not (the
cut was inside an event, or something is damaged), the standard library reads that stretch event by event, leaves out
what is damaged and counts it.

A file that decompresses to far more than profiler traces do is refused: they shrink to a twentieth, a gzip bomb to a
thousandth.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from flopmeter.columns import open_regular
from flopmeter.errors import TraceError
from flopmeter.schema import RUN_FILE

MAX_TEXT_BYTES = 32 << 30
"""Most text that a file may hold, unless the caller says otherwise."""
MAX_RATIO = 200
"""Most text for each byte of a compressed file; Kineto's have about 20."""
UNSUSPECTED_BYTES = 256 << 20
"""Up to here any ratio is let through: a small file may well be repetitive."""
PIECE_BYTES = 1 << 20

_READ_BYTES = 1 << 18
_GZIP = b"\x1f\x8b"


def trace_text(path: Path, problems: list[str], *, max_text_bytes: int | None = None) -> Iterator[bytes]:
    """The text of one file, piece by piece; why it ends early, if it does, is added to the problems."""
    num_bytes = 0
    try:
        if (path / RUN_FILE).exists():
            raise TraceError(f"{path} is a run, not a trace: flopmeter report {path}")
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            is_compressed = file.read(2) == _GZIP
            file.seek(0)
            usual = min(MAX_TEXT_BYTES, max(UNSUSPECTED_BYTES, MAX_RATIO * size)) if is_compressed else MAX_TEXT_BYTES
            limit = max_text_bytes or usual
            raw = iter(lambda: file.read(_READ_BYTES), b"")
            for piece in _inflate(raw, problems) if is_compressed else raw:
                num_bytes += len(piece)
                if num_bytes > limit:
                    raise TraceError(
                        f"{path} holds more than {as_size(limit)} of text in {as_size(size)}, the most that is read: "
                        f"if that is right, allow more with max_text_bytes of load_trace"
                    )
                yield piece
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from None


def _inflate(pieces: Iterable[bytes], problems: list[str]) -> Iterator[bytes]:
    """The text of a gzip file of one or several members; what follows the last of them is padding."""
    inflater, num_bytes = None, 0
    try:
        for raw in pieces:
            while raw:
                if inflater is None:
                    if not raw.startswith(_GZIP[:1]):
                        return
                    inflater = zlib.decompressobj(wbits=31)
                piece = inflater.decompress(raw, PIECE_BYTES)
                num_bytes += len(piece)
                yield piece
                raw = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
                inflater = None if inflater.eof else inflater
        while inflater is not None and (piece := inflater.decompress(b"", PIECE_BYTES)):
            num_bytes += len(piece)
            yield piece
    except zlib.error:
        problems.append(f"its compressed data is damaged after {as_size(num_bytes)} of text")
        return
    if inflater is not None:
        problems.append(f"its compressed data is cut off after {as_size(num_bytes)} of text")


def as_size(num_bytes: float) -> str:
    """A number of bytes for people: "34.8 MB"."""
    for size, unit in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"


MAX_EVENT_BYTES = 16 << 20
"""Most text of one event, and of what stands before the list of events."""

_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_LIST = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_BETWEEN_TEXT = re.compile(r"\}\s*,\s*(?=\{)")
_FILLING = re.compile(r"[\s,]*")
_SEARCH_BYTES = 1 << 14
_NEARLY_END = 16
"""An error this close to the end of the text at hand may be that end."""


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that we use."""

    correlation: int | float | str | None = None
    """Joins a kernel with the call that launched it."""
    device: int | float | str | None = None
    sequence: int | float | str | None = msgspec.field(default=None, name="Sequence number")
    """Of the autograd node that the operator makes, or that it is the gradient of."""
    forward_thread: int | float | str | None = msgspec.field(default=None, name="Fwd thread id")
    """0 for an operator that makes a node, another number for its gradient."""
    shapes: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    dtypes: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")
    values: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Concrete Inputs")


class TraceEvent(msgspec.Struct, gc=False):
    """One event; times are microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | float | str | None = None
    args: Args | None = None


class Head(msgspec.Struct):
    """What a trace says of itself beside its events; none of it is certain to be there or of the right type."""

    device_properties: Any = msgspec.field(default=None, name="deviceProperties")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    base_time_ns: Any = msgspec.field(default=None, name="baseTimeNanoseconds")


UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding may raise; a ValueError where text is no UTF-8."""
_batch_decoder = msgspec.json.Decoder(list[TraceEvent], strict=False)
_event_decoder = msgspec.json.Decoder(TraceEvent, strict=False)
_head_decoder = msgspec.json.Decoder(Head)
_scanner = json.JSONDecoder(strict=False)


class EventReader:
    """Batches of events from the text of a trace; iterate once, then read `head` and `problems`."""

    def __init__(self, text: Iterable[bytes], name: str) -> None:
        self.head = Head()
        self.problems: list[str] = []
        """What could not be read, in a few words each."""
        self.num_damaged = 0
        """Stretches of text that are no events and were left out."""
        self._name = name
        self._text = iter(text)
        self._buffer = b""
        self._is_over = False
        """Whether the text has no more pieces."""

    def __iter__(self) -> Iterator[list[TraceEvent]]:
        self._find_list()
        is_closed = False
        while not is_closed:
            batch = self._fast_batch()
            if batch is None:
                batch, is_closed = self._careful_batch()
                if not is_closed and not batch and self._is_over:
                    break
            yield batch
            if not is_closed:
                self._more()
        self._finish(is_closed)

    def _more(self) -> bool:
        """Add one piece to the buffer; False when there is none."""
        piece = next(self._text, None)
        self._is_over = piece is None
        self._buffer += piece or b""
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise TraceError(f"{self._name} has an event of more than {as_size(MAX_EVENT_BYTES)}: not a profiler trace")
        return not self._is_over

    def _find_list(self) -> None:
        while self._more():
            if match := _BARE_LIST.match(self._buffer):
                self._buffer = self._buffer[match.end() :]
                return
            if match := _LIST.search(self._buffer):
                try:
                    self.head = _head_decoder.decode(self._buffer[: match.start()] + b'"":0}')
                except UNREADABLE:
                    self.problems.append("what stands before its events is damaged, so its device and rank are unknown")
                self._buffer = self._buffer[match.end() :]
                return
        raise TraceError(
            f"{self._name} is not a profiler trace: it has no list of events (traceEvents); export one with "
            "torch.profiler's export_chrome_trace"
        )

    def _fast_batch(self) -> list[TraceEvent] | None:
        near_end = max(0, len(self._buffer) - _SEARCH_BYTES)  # where the last match nearly always is
        matches = (deque(_BETWEEN.finditer(self._buffer, start), maxlen=1) for start in (near_end, 0))
        cut = next((found[0] for found in matches if found), None)
        if cut is None:
            return None
        try:
            batch = _batch_decoder.decode(b"[" + self._buffer[: cut.start() + 1] + b"]")
        except UNREADABLE:
            return None
        self._buffer = self._buffer[cut.end() - 1 :]
        return batch

    def _careful_batch(self) -> tuple[list[TraceEvent], bool]:
        """Events one by one, and whether the list was closed; an event that may go on is left in the buffer."""
        # Latin-1 gives each byte a character, so positions in both are the same; JSON's own signs are ASCII.
        text, position, batch = self._buffer.decode("latin-1"), 0, []
        while (position := next(_FILLING.finditer(text, position)).end()) < len(text) and text[position] != "]":
            try:
                value, end = _scanner.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                if _may_go_on(error, text):
                    position = len(text) if self._is_over else position  # what is cut off at the end is lost
                    break
                self.num_damaged += 1
                following = _BETWEEN_TEXT.search(text, max(position + 1, getattr(error, "pos", 0)))
                position = following.end() if following else len(text)
                continue
            event = self._event(self._buffer[position:end], value)
            batch += [] if event is None else [event]
            position = end
        is_closed = position < len(text) and text[position] == "]"
        self._buffer = self._buffer[position + is_closed :]
        return batch, is_closed

    def _event(self, raw: bytes, value: Any) -> TraceEvent | None:
        """The bytes are tried first: `value` was read as Latin-1, so its names may be off where they are not ASCII."""
        try:
            return _event_decoder.decode(raw)
        except UNREADABLE:
            pass
        try:
            return msgspec.convert(value, TraceEvent, strict=False)
        except UNREADABLE:
            self.num_damaged += 1
            return None

    def _finish(self, is_closed: bool) -> None:
        if self.num_damaged:
            self.problems.append(f"{self.num_damaged} stretches of it are damaged and left out")
        if not is_closed:
            self.problems.append("its list of events is not closed: the file is cut off")
            return
        while len(self._buffer) < _SEARCH_BYTES and self._more():
            continue
        tail = self._buffer.strip()
        if not tail.startswith(b","):
            return
        try:
            found = _head_decoder.decode(b'{"":0' + tail)
        except UNREADABLE:
            self.problems.append("what follows its list of events cannot be read")
            return
        for field in Head.__struct_fields__:
            setattr(self.head, field, getattr(self.head, field) or getattr(found, field))


def _may_go_on(error: Exception, text: str) -> bool:
    """Whether what failed may only lack the text that comes next."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - _NEARLY_END
