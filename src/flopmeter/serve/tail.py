"""What is new in a run file since we last looked?  Only the new bytes are read, whatever happens to the file.

A file that was replaced, cut short or rewritten is read from its beginning; a last line without an end is kept until
its end arrives.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flopmeter.columns import open_regular
from flopmeter.errors import RecordError
from flopmeter.record import Run
from flopmeter.record.reader import MAX_LINE_BYTES, RunReader

CHUNK_BYTES = 1 << 20
SEAM_BYTES = 256
"""So many bytes before the place where we stopped are compared: a file that was rewritten in place differs there."""


class Tail:
    """One run file that grows, and the run as read so far.

    Args:
        root: The served folder: links below it are not followed. None: the file's own.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        self._root = root or path.parent
        self.num_bytes_read = 0
        """In all, to show that nothing is read twice."""
        self._lock = threading.Lock()
        self._start_over()

    def _start_over(self) -> None:
        self._reader = RunReader(self.path)
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self._rest = self._seam = b""

    def progress(self) -> tuple[int, int]:
        """Bytes read, and bytes there are to read; does not wait for a reader that is busy."""
        try:
            return self._offset, self.path.stat(follow_symlinks=False).st_size
        except OSError:
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

    def _catch_up(self) -> None:
        with open_regular(self.path, inside=self._root) as file:
            descriptor = file.fileno()
            status = os.fstat(descriptor)
            if not self._continues(descriptor, status):
                self._start_over()
                self._file_id = (status.st_dev, status.st_ino)
            if self._offset < status.st_size:
                while chunk := os.pread(descriptor, CHUNK_BYTES, self._offset):
                    self._take(chunk)
                self._seam = os.pread(descriptor, SEAM_BYTES, max(self._offset - SEAM_BYTES, 0))
                self._reader.settle()

    def _continues(self, descriptor: int, status: os.stat_result) -> bool:
        """Whether the file is the one of last time, and what we have read of it is still there."""
        if self._file_id != (status.st_dev, status.st_ino) or status.st_size < self._offset:
            return False
        return os.pread(descriptor, len(self._seam), self._offset - len(self._seam)) == self._seam

    def _take(self, chunk: bytes) -> None:
        self._offset += len(chunk)
        self.num_bytes_read += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if not self._reader.take(line + b"\n") and self._reader.is_hopeless:
                raise RecordError("it is not a flopmeter run file: it has no header line")
        # Of an overlong line the beginning is enough for the reader to refuse it.
        self._rest = self._rest[: MAX_LINE_BYTES + 1]
