"""What is new in a run file since we last looked, and what was last made of the run?

Only the new bytes are read, whatever happens to the file. A file that was replaced, cut short or rewritten is
read from its beginning; a last line without an end is kept until its end arrives.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flopmeter.columns import open_regular
from flopmeter.errors import FlopmeterError, RecordError
from flopmeter.record import Run
from flopmeter.record.reader import MAX_LINE_BYTES, RunReader

CHUNK_BYTES = 1 << 20
SEAM_BYTES = 256
"""So many bytes before the place where we stopped are compared: a file that was rewritten in place differs there."""
LONG_BYTES = 32 << 20
"""A file with so much unread takes seconds: the browser is told how far the reading has come."""
PATIENCE_S = 0.5


class Tail:
    """One run file that grows, and the run as read so far.

    Args:
        root: The served folder: links below it are not followed. None: the file's own.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        self._root = root or path.parent
        self._lock = threading.Lock()
        self._made: tuple[str, Any] = ("", None)
        self._first_look: threading.Thread | None = None
        self._start_over()

    def _start_over(self) -> None:
        self._reader = RunReader(self.path)
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self._rest = self._seam = b""

    def progress(self) -> tuple[int, int]:
        """Bytes read, and bytes there are to read; does not wait for a reader that is busy."""
        with suppress(OSError):
            return self._offset, self.path.stat(follow_symlinks=False).st_size
        return self._offset, self._offset

    @contextmanager
    def run(self) -> Iterator[tuple[Run, str]]:
        """The run up to now, and a text that changes when it does; nobody else may change it meanwhile.

        Raises:
            RecordError: The file is gone, is no run file, or has no header yet.
        """
        with self._lock:
            try:
                self._catch_up()
            except OSError as error:
                raise RecordError(f"cannot read the run file: {error.strerror}") from None
            except RecordError:
                self._start_over()
                raise
            if not self._reader.run.headers:
                raise RecordError("the run file has no header line yet")
            yield self._reader.run, f"{self._file_id[1] if self._file_id else 0:x}-{self._offset:x}"

    def is_busy(self, look: Callable[[], object]) -> bool:
        """Whether a long file is still being read for the first time; begins with it, by `look`, when that is due."""

        def first_look() -> None:
            with suppress(FlopmeterError):  # what is wrong with the run is told to the next one who asks for it
                look()

        if self._first_look is None:
            read, size = self.progress()
            if size - read <= LONG_BYTES:
                return False
            self._first_look = threading.Thread(target=first_look, daemon=True)
            self._first_look.start()
        self._first_look.join(PATIENCE_S)
        return self._first_look.is_alive()

    def made(self, make: Callable[[Run], Any], mark: str = "") -> tuple[str, Any]:
        """Which state of the run this is, and what `make` makes of it; made anew only when run or mark have changed.

        Raises:
            RecordError: The file cannot be read as a run.
        """
        with self.run() as (run, revision):
            if self._made[0] != f"{revision}-{mark}":
                self._made = (f"{revision}-{mark}", make(run))
            return self._made

    def _catch_up(self) -> None:
        with open_regular(self.path, inside=self._root) as file:
            descriptor = file.fileno()
            status = os.fstat(descriptor)
            file_id, seam_at = (status.st_dev, status.st_ino), self._offset - len(self._seam)
            # Is it the file of last time, and is what we have read of it still there?
            is_same = self._file_id == file_id and status.st_size >= self._offset
            if not is_same or os.pread(descriptor, len(self._seam), seam_at) != self._seam:
                self._start_over()
                self._file_id = file_id
            if self._offset < status.st_size:
                while chunk := os.pread(descriptor, CHUNK_BYTES, self._offset):
                    self._offset += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    for line in lines:
                        if not self._reader.take(line + b"\n") and self._reader.is_hopeless:
                            raise RecordError("it is not a flopmeter run file: it has no header line")
                    # Of an overlong line the beginning is enough for the reader to refuse it.
                    self._rest = self._rest[: MAX_LINE_BYTES + 1]
                self._seam = os.pread(descriptor, SEAM_BYTES, max(self._offset - SEAM_BYTES, 0))
                self._reader.settle()
