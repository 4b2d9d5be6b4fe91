"""How does a run reach the disk, so that no kill, full disk or read-only folder can hurt it or the training?"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("flopmeter")

MAX_PENDING_BYTES = 8 << 20
_encoder = msgspec.json.Encoder(enc_hook=str)


_writers: dict[tuple[int, int], RunWriter] = {}
"""Who has locked which file in this process: a second one of the same process is not refused."""


def _leave_to_parent() -> None:
    """In a forked child: a worker that outlives its killed parent must not hold the lock when that is restarted."""
    for writer in _writers.values():
        if writer._fd is not None:
            os.close(writer._fd)
            writer._fd = None
    _writers.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class RunWriter:
    """Appends lines to a run file; whatever the disk does, it never raises and its memory stays bounded.

    Lines are held until `flush`. When the disk refuses them, one warning is given, they are kept (up to
    `max_pending_bytes`) and tried again at the next flush, from the very byte where the disk stopped.
    """

    def __init__(self, path: Path, *, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self.path = path
        self.num_dropped = 0
        """Lines lost because the disk refused them for too long."""
        self._pending = bytearray()
        self._max_pending_bytes = max_pending_bytes
        self._fd: int | None = None
        self._has_warned = False
        self._identity = (0, 0)

    def claim(self) -> bool:
        """Whether the file is this process's to write; not so while another one that is alive writes it.

        The lock goes with the process, however it ends. Where there are no locks, as on some network file systems, and
        where the file cannot be opened, nobody is refused.
        """
        try:
            if self._fd is None:
                self._open()
            assert self._fd is not None
            status = os.fstat(self._fd)
            self._identity = status.st_dev, status.st_ino
            if fcntl is None or not stat.S_ISREG(status.st_mode) or self._identity in _writers:
                return True
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)  # type: ignore[arg-type]
            self._fd = None
            return False
        except OSError:
            return True
        _writers[self._identity] = self
        return True

    def write(self, line: Mapping[str, Any]) -> None:
        """Queue one line for the next flush."""
        data = encode(line)
        if len(self._pending) + len(data) > self._max_pending_bytes:
            self.num_dropped += 1
            return
        self._pending += data

    def flush(self) -> bool:
        """Hand all queued lines to the operating system; False when some must wait."""
        try:
            if self._fd is None:
                self._open()
            self._drain()
        except OSError as error:
            self._warn(error)
            return False
        if self.num_dropped:
            logger.warning("the run file can be written again; %d lines were lost meanwhile", self.num_dropped)
            message = f"{self.num_dropped} lines lost: the disk refused them"
            self.num_dropped = 0
            self.write({"kind": "event", "event": "warning", "message": message})
        self._has_warned = False
        return True

    def close(self) -> None:
        """Flush and let go of the file. Safe to call twice."""
        self.flush()
        if self._fd is not None:
            if _writers.get(self._identity) is self:
                del _writers[self._identity]
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            # A killed run left half a line: close it, so that only that line is lost.
            self._pending[:0] = b"\n"

    def _drain(self) -> None:
        assert self._fd is not None
        while self._pending:
            written = os.write(self._fd, self._pending)
            del self._pending[:written]

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("cannot write the run file %s (%s); training goes on, will try again", self.path, error)


def encode(line: Mapping[str, Any]) -> bytes:
    """One line of strict JSON; NaN and the infinities, which JSON lacks, become strings that the reader knows."""
    try:
        data = _encoder.encode(line)
    except (ValueError, TypeError, OverflowError, RecursionError):
        data = b"null"
    if b"null" in data:  # what the encoder makes of NaN, and of None: look closer
        data = json.dumps(_strict(line), allow_nan=False, separators=(",", ":"), default=str).encode()
    return data + b"\n"


def _strict(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # NaN, Infinity or -Infinity
    if depth > 20:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): _strict(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item, depth + 1) for item in value]
    return value
