"""What is the text of a trace file, read piece by piece, and how much of it may there be?

Nothing is held but the piece at hand. A file that decompresses to far more than profiler traces do is refused: they
shrink to a twentieth, a gzip bomb to a thousandth.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

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

Progress = Callable[[int, int], None]
"""Called with the bytes of the file read so far and its size."""


class TraceText:
    """The text of one file, to be iterated once; afterwards `problem` says what is missing of it."""

    def __init__(self, path: Path, *, max_text_bytes: int | None = None, on_progress: Progress | None = None) -> None:
        self.path = path
        self.problem = ""
        """Why the text ends early, in a few words; empty when it does not."""
        self.num_text_bytes = 0
        self._stated_bytes = max_text_bytes
        self._on_progress = on_progress

    def __iter__(self) -> Iterator[bytes]:
        try:
            if (self.path / RUN_FILE).exists():
                raise TraceError(f"{self.path} is a run, not a trace: flopmeter diagnose {self.path}")
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                is_compressed = file.read(2) == _GZIP
                file.seek(0)
                limit = self._stated_bytes or _limit(size, is_compressed)
                raw = self._read(file, size)
                for piece in self._inflate(raw) if is_compressed else raw:
                    self.num_text_bytes += len(piece)
                    if self.num_text_bytes > limit:
                        raise TraceError(self._refusal(limit, size))
                    yield piece
        except OSError as error:
            raise TraceError(f"cannot read the trace {self.path}: {error.strerror or error}") from None

    def _read(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        done = 0
        while piece := file.read(_READ_BYTES):
            done += len(piece)
            if self._on_progress:
                self._on_progress(done, size)
            yield piece

    def _inflate(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The text of a gzip file of one or several members; what follows the last of them is padding."""
        inflater = None
        try:
            for raw in pieces:
                while raw:
                    if inflater is None:
                        if not raw.startswith(_GZIP[:1]):
                            return
                        inflater = zlib.decompressobj(wbits=31)
                    yield inflater.decompress(raw, PIECE_BYTES)
                    raw = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
                    inflater = None if inflater.eof else inflater
            while inflater is not None and (piece := inflater.decompress(b"", PIECE_BYTES)):
                yield piece
        except zlib.error:
            self.problem = f"its compressed data is damaged after {as_size(self.num_text_bytes)} of text"
            return
        if inflater is not None:
            self.problem = f"its compressed data is cut off after {as_size(self.num_text_bytes)} of text"

    def _refusal(self, limit: int, size: int) -> str:
        return (
            f"{self.path} holds more than {as_size(limit)} of text in {as_size(size)}, the most that is read: if that "
            f"is right, allow more with --max-gb (max_text_bytes in Python)"
        )


def _limit(size: int, is_compressed: bool) -> int:
    return min(MAX_TEXT_BYTES, max(UNSUSPECTED_BYTES, MAX_RATIO * size)) if is_compressed else MAX_TEXT_BYTES


def as_size(num_bytes: float) -> str:
    """A number of bytes for people: "34.8 MB"."""
    for size, unit in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"
