"""Which runs lie under the served folder, and what is known of each? All at a glance, a few of them in full.

A run is only ever reached by a name that was found here, not by a path.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Literal

from msgspec import Struct

from flopmeter.columns import mapping, open_regular
from flopmeter.errors import RecordError
from flopmeter.metrics import summarise
from flopmeter.record import Run
from flopmeter.record.reader import MAX_LINE_BYTES, RunReader
from flopmeter.schema import RUN_FILE
from flopmeter.serve.tail import Tail
from flopmeter.text import clean, number

MAX_DEPTH = 6
MAX_RUNS = 1000
MAX_FOLDERS = 20_000
FRESH_S, SEARCH_SHARE = 2.0, 10
"""A listing is this long good for, and ten times as long as the search took: many readers must not make the disk work
for each of them, nor a slow network disk all the time."""
MAX_OPEN_RUNS = 8
"""A run of a million steps takes some hundred megabytes: the one that was looked at longest ago goes first."""
HEAD_BYTES, TAIL_BYTES = 16 << 10, 96 << 10
SILENT_S = 60.0
"""A run that wrote nothing for so long, and for ten of its steps, is called silent."""
MAX_POINTS = 60

State = Literal["running", "finished", "failed", "silent", "unreadable"]
STATES = {
    "running": "Live",
    "finished": "Finished",
    "failed": "Ended by a failure",
    "silent": "No update for 60 s",
    "unreadable": "Cannot be read",
}
"""In words."""


class Glance(Struct, frozen=True, kw_only=True):
    """One row of the list of runs."""

    name: str
    """Under which the run is served."""
    title: str
    """Its folder below the served one."""
    state: State
    """Finished: it wrote its summary. Silent: it did not, and writes no more."""
    updated_at: float = 0.0
    """Unix time of the last write."""
    what: str = ""
    """Model, device and number of ranks."""
    last_step: int | None = None
    """Number of the last step."""
    mfu: float | None = None
    """Of the steady steps; of the last of them (`is_recent`) while there is no summary of a long run."""
    is_recent: bool = False
    step_s: float | None = None
    """Median step time."""
    tokens_per_s: float | None = None
    """Of the whole job."""
    loss: float | None = None
    """The last one."""
    recent_mfu: tuple[float | None, ...] = ()
    """Of the last steps, for a small chart."""
    problem: str = ""
    """Why it cannot be read."""


class Runs:
    """The runs of a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.is_cut = False
        """Whether there is more below than was looked at."""
        self._lock = threading.Lock()
        self._paths: dict[str, Path] = {}
        self._good_until = 0.0
        self._glances: dict[str, tuple[tuple[int, int, int], Glance]] = {}
        self._open: OrderedDict[str, Tail] = OrderedDict()

    def paths(self) -> dict[str, Path]:
        """Run files by the name under which they are served."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._good_until:
                self._paths = {name_of(path, self.root): path for path in self._search()}
                self._good_until = time.monotonic() + max(FRESH_S, SEARCH_SHARE * (time.monotonic() - now_s))
            return self._paths

    def find(self, name: str) -> Path:
        """The run file of that name.

        Raises:
            RecordError: There is none.
        """
        if (path := self.paths().get(name)) is None:
            raise RecordError("there is no such run")
        return path

    def _search(self) -> Iterator[Path]:
        """Nearest first; links are not followed, so nothing outside is found and no circle is walked."""
        waiting, num_runs, num_folders = deque([(self.root, 0)]), 0, 0
        self.is_cut = False
        while waiting:
            folder, depth = waiting.popleft()
            num_folders += 1
            if num_runs >= MAX_RUNS or num_folders > MAX_FOLDERS:
                self.is_cut = True
                return
            found: list[os.DirEntry[str]] = []
            with suppress(OSError), os.scandir(folder) as entries:
                found = list(entries)
            if any(entry.name == RUN_FILE and entry.is_file(follow_symlinks=False) for entry in found):
                num_runs += 1
                yield folder / RUN_FILE
            below = [entry for entry in found if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)]
            if depth < MAX_DEPTH:
                waiting.extend((path, depth + 1) for path in sorted(Path(entry.path) for entry in below))
            elif below:
                self.is_cut = True

    def glances(self) -> list[Glance]:
        """Every run, those that go on first, then the last written; a file that did not change is not read again."""
        now_s = time.time()
        found = {name: self._glance(name, path, now_s) for name, path in self.paths().items()}
        with self._lock:
            self._glances = found
        # Runs that go on stay in one order, however they take turns to write.
        shown = (glance for _, glance in found.values())
        return sorted(shown, key=lambda of: (-math.inf if of.state == "running" else -of.updated_at, of.title))

    def _glance(self, name: str, path: Path, now_s: float) -> tuple[tuple[int, int, int], Glance]:
        key = (0, 0, 0)
        with suppress(OSError):
            status = path.stat(follow_symlinks=False)
            key = (status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._glances.get(name)
        # A run that goes on is looked at again even so: silence is news.
        if known and known[0] == key and known[1].state != "running":
            return known
        relative = path.parent.relative_to(self.root)
        title = str(relative) if relative.parts else self.root.name
        return key, glance_at(path, self.root, name, title, now_s)

    def state_of(self, name: str) -> State:
        """Whether the run goes on.

        Raises:
            RecordError: There is no such run.
        """
        return self._glance(name, self.find(name), time.time())[1].state

    def open(self, name: str) -> Tail:
        """A run to be read in full.

        Raises:
            RecordError: There is no such run.
        """
        path = self.find(name)
        with self._lock:
            if name not in self._open:
                self._open[name] = Tail(path, self.root)
            self._open.move_to_end(name)
            while len(self._open) > MAX_OPEN_RUNS:
                self._open.popitem(last=False)
            return self._open[name]


def name_of(path: Path, root: Path) -> str:
    """A short name without any path in it, the same at every start."""
    return blake2b(os.fsencode(path.relative_to(root)), digest_size=8).hexdigest()


def glance_at(path: Path, root: Path, name: str, title: str, now_s: float) -> Glance:
    """A look at both ends of a run file; whatever it holds, there is an answer."""
    title, updated_at = clean(title), 0.0
    try:
        with open_regular(path, inside=root) as file:
            status = os.fstat(file.fileno())
            updated_at = status.st_mtime
            run = _ends(path, file.fileno(), status.st_size)
    except (OSError, RecordError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).replace(str(path), "it")
        return Glance(name=name, title=title, state="unreadable", updated_at=updated_at, problem=clean(str(reason)))
    header, means = run.header, summarise(run.columns, run.steady_stretches())
    summary = mapping(mapping(run.summary).get("metrics"))
    means |= {key: value for key, value in summary.items() if number(value) is not None}
    step_s = number(means.get("step_time_median_s"))
    is_silent = now_s - updated_at > max(SILENT_S, 10 * (step_s or 0.0))
    # The name that the peak was looked up by says more than `cpu`.
    device = [header.device, *(str(peak["device"]) for peak in run.peaks.values() if peak.get("device"))][-1]
    parts = clean(header.model, 80), clean(device, 80), f"{header.world_size:,} ranks" * (header.world_size > 1)
    return Glance(
        name=name,
        title=title,
        state="failed" if run.failure else "finished" if run.summary else "silent" if is_silent else "running",
        updated_at=updated_at,
        what=" · ".join(filter(None, parts)),
        last_step=run.step[-1] if len(run) else None,
        mfu=number(means.get("perf/mfu")),
        is_recent="perf/mfu" not in summary and status.st_size > TAIL_BYTES,
        step_s=step_s,
        tokens_per_s=number(means.get("perf/tokens_per_second")),
        loss=number(run.column("training/loss")[-1]) if len(run) else None,
        recent_mfu=tuple(number(value) for value in run.column("perf/mfu")[-MAX_POINTS:]),
    )


def _ends(path: Path, descriptor: int, size: int) -> Run:
    """The first lines but for steps, and the last lines, read as a run of its own."""
    last = os.pread(descriptor, TAIL_BYTES, max(size - TAIL_BYTES, 0))
    first: list[bytes] = []
    if size > TAIL_BYTES:
        head = os.pread(descriptor, HEAD_BYTES, 0)
        if b"\n" not in head:
            head = os.pread(descriptor, MAX_LINE_BYTES + 1, 0)
        lines = head.splitlines(keepends=True)
        first = [line for line in lines if line.endswith(b"\n") and b'"step":' not in line[:30]]
        last = last.partition(b"\n")[2]
    return RunReader(path).read(BytesIO(b"".join([*first, last.rpartition(b"\n")[0], b"\n"])))
