"""How is the program run again and again without harm? Each time in a copy of its folder, in a session of its own.

Under torchrun each rank's command is one of us: rank 0 decides (`Launcher`), the others do the same (`follow`). They
meet in a folder that all ranks of a launch know, and each run of the program has a port of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from flopmeter.errors import ConfigError, FlopmeterError
from flopmeter.schema import RUN_FILE
from flopmeter.trials import NOTHING_SEEN, write_whole

MAX_COPIED_BYTES, MAX_COPIED_FILES, MAX_LINKED = 200e6, 20_000, 500
NOT_COPIED = (".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache")
STARTUP = Path(__file__).resolve().parents[1] / "integrations" / "_startup"
SETTINGS = "FLOPMETER_TRIAL"
LOGGERS_OFF = {
    "WANDB_MODE": "disabled", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug", "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled", "HF_HUB_DISABLE_TELEMETRY": "1",
}  # fmt: skip
LOGGERS_HERE = {"MLFLOW_TRACKING_URI": "mlruns", "TRACKIO_DIR": "trackio", "TENSORBOARD_LOGGING_DIR": "tensorboard"}
"""Where loggers of other makers write, below the trial's folder."""
END_S = 3.0
"""A process that is told to end has so long before it is ended."""


class Ended(NamedTuple):
    """What a run of the program left."""

    ranks: list[dict[str, Any]]
    """What `inside.py` saw in each that wrote it."""
    exit_code: int | None
    """None when it was ended for taking too long."""
    reason: str
    """What it said last, where it failed."""
    seconds: float

    @property
    def seen(self) -> dict[str, Any]:
        """Of rank 0; with the first error of any rank."""
        found = NOTHING_SEEN | (self.ranks[0] if self.ranks else {})
        return found | {"error": next((rank["error"] for rank in self.ranks if rank.get("error")), "")}


def files_of(folder: Path, besides: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file, so that changes can be told; what is not copied has no part in it."""
    found: dict[str, tuple[int, int]] = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_left_out(Path(place) / name, besides)]
        for path in (Path(place) / name for name in names):
            with suppress(OSError):
                found[str(path.relative_to(folder))] = (path.stat().st_size, path.stat().st_mtime_ns)
        if len(found) >= MAX_COPIED_FILES:  # looked at no further than that
            break
    return found


def may_copy(files: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a folder with these files is small enough."""
    return len(files) < MAX_COPIED_FILES and sum(size for size, _ in files.values()) <= MAX_COPIED_BYTES


def _is_left_out(path: Path, besides: Path) -> bool:
    return path == besides or path.name in NOT_COPIED or (path / "pyvenv.cfg").exists()


class Launcher:
    """Runs the program, on all ranks of the launch.

    Args:
        program: What python would be given.
        output_dir: Where trials have their folders.
        candidates: A user's file of changes, or "".
    """

    def __init__(self, program: Sequence[str], output_dir: Path, candidates: str) -> None:
        self.program, self.output_dir, self.candidates = list(program), output_dir.resolve(), candidates
        self.folder = Path.cwd().resolve()
        """Where the program was started, and is started again."""
        self._before = files_of(self.folder, self.output_dir)
        self.is_copied = may_copy(self._before)
        self.num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.saved: dict[str, str] = {}
        """What the program wanted to save outside of its copy."""
        self._num = 0
        self._meeting = _meeting_place()
        if self.num_ranks > 1:
            shutil.rmtree(self._meeting, ignore_errors=True)
            self._meeting.mkdir(parents=True)

    def run(self, name: str, timeout_s: float, plan: dict[str, Any], *, is_measured: bool = False) -> Ended:
        """Run the program once.

        Args:
            plan: Arguments of `inside.Trial` that say what to do.
            is_measured: Under `flopmeter run`, whose record goes to the output folder.
        """
        self._num += 1
        place = self.output_dir / "trials" / f"{self._num:02}-{name}"
        place.mkdir(parents=True)
        copy = place / "program"
        home = _copy(self.folder, copy, self.output_dir) if self.is_copied else self.folder
        job = {
            "place": str(place), "home": str(home), "timeout_s": timeout_s, "command": self._command(home, is_measured),
            "is_measured": is_measured,
            "settings": {"place": str(place), "free": str(home) if self.is_copied else "", "whole": [],
                         "candidates": self.candidates, "until": None, "finds_models": True, **plan},
            "port": _free_port() if self.num_ranks > 1 else None,
        }  # fmt: skip
        if self.num_ranks > 1:
            write_whole(self._meeting / f"{self._num}.json", json.dumps(job))
        start_s, start_wall_s = time.monotonic(), time.time()
        try:
            exit_code = _run(job)
            if self.num_ranks > 1:
                self._wait_for_others(timeout_s)
        finally:
            if is_measured and not (self.output_dir / RUN_FILE).exists():
                # A program that uses flopmeter itself has no other record than its own.
                own = [path for path in home.rglob(RUN_FILE) if path.stat().st_mtime >= start_wall_s]
                for path in own[:1]:
                    shutil.copy(path, self.output_dir / RUN_FILE)
            shutil.rmtree(copy, ignore_errors=True)
        found = (place / f"rank{rank}.json" for rank in range(self.num_ranks))
        ranks = [json.loads(path.read_text("utf-8")) for path in found if path.exists()]
        for rank in ranks:
            self.saved |= rank["saved"]
        if not may_copy(files_of(place / "saved", copy)):
            shutil.rmtree(place / "saved")
        reason = "" if exit_code == 0 else _last_words(place)
        return Ended(ranks, exit_code, reason, time.monotonic() - start_s)

    def changed_files(self) -> list[str]:
        """Files of the program's folder that are not as they were before the first run."""
        now = files_of(self.folder, self.output_dir)
        return sorted(name for name in {**self._before, **now} if self._before.get(name) != now.get(name))

    def end(self) -> None:
        """Let the other ranks go."""
        if self.num_ranks > 1:
            write_whole(self._meeting / f"{self._num + 1}.json", "{}")

    def _command(self, home: Path, is_measured: bool) -> list[str]:
        """The program as it stands in its copy; words that name a file of the folder in full name the copy's."""
        words = list(self.program)
        if words[0] != "-m":
            words[0] = str(Path(words[0]).resolve())
        own = str(self.folder) + os.sep
        words = [str(home / word[len(own) :]) if word.startswith(own) else word for word in words]
        if not is_measured:
            return [sys.executable, *words]
        return [sys.executable, "-m", "flopmeter", "run", "--quiet", "-o", str(self.output_dir), *words]

    def _wait_for_others(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s + END_S
        left = {self._meeting / f"{self._num}.done{rank}" for rank in range(1, self.num_ranks)}
        while left and time.monotonic() < until_s:
            left = {path for path in left if not path.exists()}
            time.sleep(0.02)


def follow() -> None:
    """Do what rank 0 does, on another rank of the launch, until it lets us go or is gone."""
    meeting, num, rank = _meeting_place(), 1, os.environ["RANK"]
    while True:
        path = meeting / f"{num}.json"
        while not path.exists():
            if os.getppid() == 1:
                raise FlopmeterError("the launcher is gone")
            time.sleep(0.02)
        job = json.loads(path.read_text("utf-8"))
        if not job:
            return
        _run(job)
        (meeting / f"{num}.done{rank}").touch()
        num += 1


def _meeting_place() -> Path:
    """Known to all ranks of one launch on this machine: they have one parent."""
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE")) != os.environ.get("WORLD_SIZE"):
        raise ConfigError("flopmeter try works on the ranks of one machine: launch the job on one, with fewer ranks")
    return Path(tempfile.gettempdir()) / f"flopmeter-try-{os.getuid() if hasattr(os, 'getuid') else 0}-{os.getppid()}"


def _copy(folder: Path, place: Path, besides: Path) -> Path:
    """Where the copy is. What lies beside the folder, and beside its parent, is linked, so that ../data is found."""
    copy = place / folder.parent.name / folder.name
    copy.parent.mkdir(parents=True)
    for original in (folder, folder.parent):
        mirror = copy.parent if original is folder else place
        with suppress(OSError):  # a folder that may not be listed, or is full of files: those are not there, then
            for path in list(islice(original.parent.iterdir(), MAX_LINKED)):
                if path != original:
                    (mirror / path.name).symlink_to(path)

    def left_out(place: str, names: list[str]) -> list[str]:
        return [name for name in names if _is_left_out(Path(place) / name, besides)]

    shutil.copytree(folder, copy, symlinks=True, ignore=left_out, ignore_dangling_symlinks=True)
    return copy


def _run(job: dict[str, Any]) -> int | None:
    """Run the job's program to its end, and whatever it started with it."""
    rank, place = os.environ.get("RANK", "0"), Path(job["place"])
    settings = job["settings"] | {"began_s": time.time(), "parent": os.getpid()}
    others = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ, **LOGGERS_OFF, **{name: str(place / folder) for name, folder in LOGGERS_HERE.items()},
        SETTINGS: json.dumps(settings),
    }  # fmt: skip
    if not job["is_measured"]:  # `flopmeter run` puts its folder in front by itself
        environment["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *([others] if others else [])])
    if job["port"] is not None:
        environment |= {"MASTER_PORT": str(job["port"]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    with (place / f"output{rank}.txt").open("wb") as output:
        process = subprocess.Popen(
            job["command"], cwd=job["home"], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(job["timeout_s"])
        except subprocess.TimeoutExpired:
            return None
        except BaseException:  # Ctrl-C, or a launcher that ends: with a moment for the program to tidy up
            _signal(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            raise
        finally:
            _signal(process.pid, signal.SIGKILL)  # workers, and children that were forked
            process.wait()


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_words(place: Path) -> str:
    """The line that tells of the error: the last one of an output that names one."""
    lines: list[str] = []
    for path in sorted(place.glob("output*.txt")):
        lines += path.read_text("utf-8", "replace").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    errors = [line for line in said if "Error" in line.partition(":")[0] or "Killed" in line]
    return (errors or said or [""])[-1][:300]
