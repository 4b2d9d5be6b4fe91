"""Which runs are kept in memory, and what has already been worked out about them?"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flopmeter.errors import FlopmeterError
from flopmeter.serve.folder import Folder
from flopmeter.serve.glance import Glance, State, glance_at
from flopmeter.serve.tail import Tail

if TYPE_CHECKING:
    from pathlib import Path

    from flopmeter.record import Run

MAX_OPEN_RUNS = 8
"""A run of a million steps takes some hundred megabytes: the one that was looked at longest ago goes first."""


LONG_BYTES = 32 << 20
"""A file with so much unread takes seconds: the browser is told how far the reading has come."""
PATIENCE_S = 0.5


class Shelf:
    """The runs of a folder: all of them at a glance, a few of them in full."""

    def __init__(self, folder: Folder, max_open_runs: int = MAX_OPEN_RUNS) -> None:
        self.folder = folder
        self._max_open_runs = max_open_runs
        self._lock = threading.Lock()
        self._tails: OrderedDict[str, _OpenRun] = OrderedDict()
        self._glances: dict[str, tuple[tuple[int, int, int], Glance]] = {}

    def glances(self) -> list[Glance]:
        """Every run, the last written first; a file that did not change is not looked at again."""
        now_s, runs = time.time(), self.folder.runs()
        found = {name: self._glance(name, path, now_s) for name, path in runs.items()}
        with self._lock:
            self._glances = found
        return sorted((glance for _, glance in found.values()), key=lambda glance: -glance.updated_at)

    def _glance(self, name: str, path: Path, now_s: float) -> tuple[tuple[int, int, int], Glance]:
        try:
            status = path.stat(follow_symlinks=False)
            key = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError:
            key = (0, 0, 0)
        known = self._glances.get(name)
        # A run that goes on is looked at again even so: silence is news.
        if known and known[0] == key and known[1].state != "running":
            return known
        relative = path.parent.relative_to(self.folder.root)
        title = str(relative) if relative.parts else self.folder.root.name
        return key, glance_at(path, self.folder.root, name, title, now_s)

    def state_of(self, name: str) -> State:
        """Whether the run goes on.

        Raises:
            RecordError: There is no such run.
        """
        return self._glance(name, self.folder.find(name), time.time())[1].state

    def open(self, name: str) -> _OpenRun:
        """A run to be read in full.

        Raises:
            RecordError: There is no such run.
        """
        path = self.folder.find(name)
        with self._lock:
            if name not in self._tails:
                self._tails[name] = _OpenRun(path, self.folder.root)
            self._tails.move_to_end(name)
            while len(self._tails) > self._max_open_runs:
                self._tails.popitem(last=False)
            return self._tails[name]


class _OpenRun:
    """A run that is read on, with what was last made of it."""

    def __init__(self, path: Path, root: Path) -> None:
        self.tail = Tail(path, root)
        self._made: dict[str, tuple[str, Any]] = {}
        self._first_look: threading.Thread | None = None

    def is_busy(self, look: Callable[[], object]) -> bool:
        """Whether a long file is still being read for the first time; begins with it, by `look`, when that is due."""
        read, size = self.tail.progress()
        if self._first_look is None and size - read > LONG_BYTES:
            self._first_look = threading.Thread(target=_quietly, args=(look,), daemon=True)
            self._first_look.start()
        if self._first_look is not None:
            self._first_look.join(PATIENCE_S)
        return self._first_look is not None and self._first_look.is_alive()

    def made(self, what: str, make: Callable[[Run], Any]) -> tuple[str, Any]:
        """What `make` makes of the run, and of which state of it; made anew only when the run has changed.

        Raises:
            RecordError: The file cannot be read as a run.
        """
        with self.tail.run() as (run, revision):
            if what not in self._made or self._made[what][0] != revision:
                self._made[what] = (revision, make(run))
            return self._made[what]


def _quietly(look: Callable[[], object]) -> None:
    """What is wrong with the run is told to whoever asks for it next."""
    with suppress(FlopmeterError):
        look()
