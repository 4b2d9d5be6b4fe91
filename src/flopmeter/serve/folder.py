"""Which runs lie under the served folder?  A run is only ever reached by a name that was found here, not by a path."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from flopmeter.errors import RecordError
from flopmeter.schema import RUN_FILE

MAX_DEPTH = 6
MAX_RUNS = 1000
MAX_FOLDERS = 20_000
FRESH_S = 2.0
"""A listing is this long good for: many readers must not make the disk work for each of them."""


class Folder:
    """The folder that is served, and the runs in it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.is_cut = False
        """Whether there is more below than was looked at."""
        self._lock = threading.Lock()
        self._runs: dict[str, Path] = {}
        self._looked_at = -FRESH_S

    def runs(self) -> dict[str, Path]:
        """Run files by the name under which they are served."""
        with self._lock:
            if time.monotonic() - self._looked_at >= FRESH_S:
                self._runs = {name_of(path, self.root): path for path in self._search()}
                self._looked_at = time.monotonic()
            return self._runs

    def find(self, name: str) -> Path:
        """The run file of that name.

        Raises:
            RecordError: There is none.
        """
        path = self.runs().get(name)
        if path is None:
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
            has_run, below = _look_into(folder)
            if has_run:
                num_runs += 1
                yield folder / RUN_FILE
            if depth < MAX_DEPTH:
                waiting.extend((path, depth + 1) for path in below)
            elif below:
                self.is_cut = True


def name_of(path: Path, root: Path) -> str:
    """A short name without any path in it, the same at every start."""
    relative = os.fsencode(path.relative_to(root))
    return blake2b(relative, digest_size=8).hexdigest()


def _look_into(folder: Path) -> tuple[bool, list[Path]]:
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except OSError:
        return False, []
    has_run = any(entry.name == RUN_FILE and entry.is_file(follow_symlinks=False) for entry in found)
    below = [entry for entry in found if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)]
    return has_run, sorted(Path(entry.path) for entry in below)
