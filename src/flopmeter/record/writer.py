"""How does a run reach the disk, so that no kill, full disk or read-only folder can hurt it or the training?

And in other forms: as one ordinary JSON document, for scripts that expect a `training_log.json`, or as a table.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import StringIO
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, TextIO

import msgspec

from flopmeter.record.reader import LOOP, Run, look_at

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("flopmeter")

MAX_PENDING_BYTES = 8 << 20


def _text(value: Any) -> str:
    """What JSON does not know, as text."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a thing of the user's: whatever it raises, its line is kept
        return type(value).__name__


_encoder = msgspec.json.Encoder(enc_hook=_text)


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

RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables by which a launcher says how often it has started this job again."""


class RunWriter:
    """Appends lines to a run file; whatever the disk does, it never raises and its memory stays bounded.

    Lines are held until `flush`. When the disk refuses them, one warning is given, they are kept (up to
    `max_pending_bytes`) and tried again at the next flush, from the very byte where the disk stopped. A file that was
    deleted, replaced or cut meanwhile is begun anew, with the header. All calls belong on one thread, which may wait
    for the disk as long as that takes.
    """

    def __init__(self, path: Path, *, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self.path = path
        self.num_dropped = 0
        """Lines lost because the disk refused them for too long."""
        self.has_file = False
        """Whether there is an ordinary file, which can be read back. Not so for a pipe or a device."""
        self._pending = bytearray()
        self._header = b""
        self._max_pending_bytes = max_pending_bytes
        self._fd: int | None = None
        self._identity = (0, 0)
        self._num_bytes = 0
        """What the file has at least, unless somebody cuts it."""
        self._has_warned = False
        self.is_refused = False
        """Whether another process that is alive writes the file: then nothing is written here."""
        self._num_lost_files = 0
        self._aside: tuple[Path, int | None] | None = None
        """Where the run is now that was here and had ended, and its last step, until our first step is known."""
        self._first_step: Any = None

    def write(self, line: Mapping[str, Any]) -> None:
        """Queue one line for the next flush."""
        if self.is_refused:
            return
        kind = line.get("kind")
        data = encode(without_names(line) if kind == "step" else line)
        if kind == "header":
            self._header = data
        elif self._first_step is None and kind == "step":
            self._first_step = line.get("step")
        if len(self._pending) + len(data) > self._max_pending_bytes:
            self.num_dropped += 1
            return
        self._pending += data

    def flush(self) -> bool:
        """Hand all queued lines to the operating system; False when some must wait."""
        try:
            if self._fd is not None and (what := self._what_happened()):
                self._begin_anew(what)
            if self._fd is None and not self.is_refused:
                self._open()
            if self._aside is not None and self._first_step is not None:
                self._judge_first_step(*self._aside)
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
        self._let_go()

    def _let_go(self) -> None:
        if self._fd is not None:
            if _writers.get(self._identity) is self:
                del _writers[self._identity]
            os.close(self._fd)
            self._fd = None

    def _take(self) -> int:
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        status = os.fstat(self._fd)
        self._identity, self._num_bytes = (status.st_dev, status.st_ino), status.st_size
        self.has_file = stat.S_ISREG(status.st_mode)
        return self._fd

    def _lock(self, fd: int) -> bool:
        """Whether the file is this process's to write; not so while another one that is alive writes it.

        The lock goes with the process, however it ends. Where there are no locks, as on some network file systems,
        nobody is refused.
        """
        if fcntl is None or not self.has_file or self._identity in _writers:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        _writers[self._identity] = self
        return True

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            if not self._lock(fd := self._take()):
                self.is_refused, self.has_file = True, False
                self._pending.clear()
                logger.warning(
                    "%s is being written by another process: nothing is measured here; give each run an output_dir of "
                    "its own, and call init_process_group before the first forward pass", self.path,
                )  # fmt: skip
            elif (aside := make_way(self.path)) is None:
                break
            else:
                self._aside = aside
            self._let_go()
            if self.is_refused:
                return
        if self._num_bytes and os.pread(fd, 1, self._num_bytes - 1) != b"\n":
            # A killed run left half a line: close it, so that only that line is lost.
            self._pending[:0] = b"\n"

    def _judge_first_step(self, aside: Path, last_step: int | None) -> None:
        """A first step that goes on from the last one of the run that was here makes ours a restart of it."""
        self._aside = None
        if last_step is None or self._first_step != last_step + 1:
            return
        logger.info("%s goes on with step %s", self.path, self._first_step)
        self._pending[:0] = self.path.read_bytes()
        self._let_go()
        os.replace(aside, self.path)
        self._lock(self._take())

    def _what_happened(self) -> str:
        """What somebody did to the file since the last flush: nothing, as a rule."""
        assert self._fd is not None
        with suppress(OSError):  # closed under us, or a stale handle: it is not ours any more
            status = os.fstat(self._fd)
            if (status.st_dev, status.st_ino) == self._identity:
                if self.has_file and status.st_size < self._num_bytes:
                    return "cut"
                try:
                    there = os.stat(self.path)
                except FileNotFoundError:
                    return "deleted"
                return "" if (there.st_dev, there.st_ino) == self._identity else "replaced"
        self._fd = None  # the number may be another file's by now, which is not ours to close
        _writers.pop(self._identity, None)
        return "closed"

    def _begin_anew(self, what: str) -> None:
        self._let_go()
        message = f"the run file {self.path} was {what} while the run went on; it is written anew from here"
        if not self._num_lost_files:
            logger.warning("%s", message)
        self._num_lost_files += 1
        event = {"kind": "event", "event": "warning", "time": time.time(), "message": message}
        self._pending[:0] = self._header + encode(event)

    def _drain(self) -> None:
        while self._pending:
            assert self._fd is not None
            written = os.write(self._fd, self._pending)
            del self._pending[:written]
            self._num_bytes += written

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("cannot write the run file %s (%s); training goes on, will try again", self.path, error)


def make_way(path: Path) -> tuple[Path, int | None] | None:
    """Look at what is at the path of a run that begins: it may go on there, or the old file gets another name.

    The newest run is always at the known path. A run that was killed, that failed or that the launcher starts again
    goes on; one that has ended makes way, and so does a file that this version cannot read. Gives where the old file is
    now and the last step of the run in it.
    """
    found, started_at, last_step = look_at(path)
    is_restart = any(os.environ.get(name, "0") not in ("", "0") for name in RESTART_COUNTS)
    if found in ("", "running") or (found == "ended" and is_restart):
        return None
    start = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started_at))
    names = (f"{path.stem}.{start}{more}{path.suffix}" for more in ("", *(f"-{n}" for n in range(2, 1000))))
    aside = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    path.rename(aside)
    folder = path.parent
    with suppress(ValueError, OSError):  # it lies elsewhere, or the current folder is gone
        folder = folder.relative_to(Path.cwd())
    was = "a run that has ended" if found == "ended" else "no run file that can be continued"
    logger.warning("%s was %s: it is now %s", folder / path.name, was, aside.name)
    return aside, last_step


def replace_file(path: Path, write: Callable[[TextIO], Any]) -> None:
    """Replace a file by what `write` writes, all or nothing: no reader sees half of it, and no link is followed."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)  # of a killed process that had our number, or put there for us to write through
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(draft, flags, 0o666), "w", encoding="utf-8") as file:
            write(file)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def without_names(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """The line of a step as it is written: what the loop tells of nearly every step needs no names.

    Nor does a line with a row need to say that it is a step: of a run of a million steps that is 14 MB.
    """
    metrics, packed = line.get("metrics") or {}, {**line}
    if "row" in packed:
        del packed["kind"]
    if loop := [metrics[key] for key in takewhile(metrics.__contains__, LOOP)]:
        del packed["metrics"]
        packed["loop"] = loop
        if rest := {key: value for key, value in metrics.items() if key not in LOOP[: len(loop)]}:
            packed["metrics"] = rest
    return packed


def encode(line: Mapping[str, Any]) -> bytes:
    """One line of strict JSON; NaN and the infinities, which JSON lacks, become strings that the reader knows."""
    try:
        data = _encoder.encode(line)
    except (ValueError, TypeError, OverflowError, RecursionError):
        data = b"null"
    if b"null" in data:  # what the encoder makes of NaN, and of None: look closer
        data = json.dumps(_strict(line), allow_nan=False, separators=(",", ":"), default=_text).encode()
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


def write_training_log(run: Run, path: Path) -> None:
    """Write `step_logs`, `epoch_logs`, `evaluation_logs` and `total_training_time` (seconds), atomically."""
    replace_file(path, lambda file: json.dump(training_log(run), file, allow_nan=False, indent=1))


def steps_as_text(run: Run, format: str) -> Iterator[str]:
    """A line for every step with all that follows from it; as csv with a line of names in front, or as JSON objects."""
    if format == "csv":
        text = StringIO()
        csv.writer(text, lineterminator="").writerow(("step", "time", "marks", *run.columns))
        yield text.getvalue()
    for place in range(len(run)):
        if format == "csv":
            values = ("" if math.isnan(column[place]) else repr(column[place]) for column in run.columns.values())
            yield ",".join((str(run.step[place]), repr(run.time[place]), " ".join(run.marks.get(place, ())), *values))
        else:
            marks = {"marks": run.marks[place]} if place in run.marks else {}
            yield json.dumps({**_step_log(run, place), "time": run.time[place]} | marks)


def training_log(run: Run) -> dict[str, Any]:
    """The document itself: NaN and the infinities become null, since ordinary JSON has no word for them."""
    return {
        "run": {"run_id": run.header.run_id, "model": run.header.model, "device": run.header.device},
        "step_logs": [_step_log(run, position) for position in range(len(run))],
        "epoch_logs": _events(run, "epoch"),
        "evaluation_logs": _events(run, "evaluation"),
        "total_training_time": _total_s(run),
    }


def _step_log(run: Run, place: int) -> dict[str, Any]:
    known = {key: column[place] for key, column in run.columns.items() if math.isfinite(column[place])}
    return {"step": run.step[place], **known}


def _events(run: Run, name: str) -> list[dict[str, Any]]:
    return [{key: event[key] for key in event if key not in ("kind", "event")} for event in run.named(name)]


def _total_s(run: Run) -> float:
    """Time from each start to its last step; the time between a crash and the restart is not training."""
    total_s, starts = 0.0, [header.started_at for header in run.headers]
    for start, following in pairwise([*starts, math.inf]):
        ends = [time for time in run.time if start <= time < following]
        total_s += max(ends) - start if ends else 0.0
    return total_s
