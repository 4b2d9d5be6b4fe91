"""What can be said of a run from the first and the last few lines of its file?  Enough for a list of many runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Literal

from flopmeter.columns import open_regular
from flopmeter.errors import RecordError
from flopmeter.metrics import summarise
from flopmeter.record import Run
from flopmeter.record.reader import MAX_LINE_BYTES, RunReader
from flopmeter.text import clean, number

HEAD_BYTES = 16 << 10
TAIL_BYTES = 96 << 10
SILENT_S = 60.0
"""A run that wrote nothing for so long, and for ten of its steps, is taken for stopped."""
MAX_POINTS = 60

State = Literal["running", "finished", "stopped", "unreadable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Glance:
    """One row of the list of runs."""

    name: str
    """Under which the run is served."""
    title: str
    """Its folder below the served one."""
    state: State
    """Finished: it wrote its summary. Stopped: it did not, and is silent."""
    updated_at: float
    """Unix time of the last write."""
    model: str = ""
    """Class of the model."""
    device: str = ""
    """Device name."""
    world_size: int = 1
    """Ranks."""
    last_step: int | None = None
    """Number of the last step."""
    mfu: float | None = None
    """Of the steady steps; of the last few of them while there is no summary."""
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


def glance_at(path: Path, root: Path, name: str, title: str, now_s: float) -> Glance:
    """A look at both ends of a run file; whatever it holds, there is an answer."""
    updated_at = 0.0
    try:
        with open_regular(path, inside=root) as file:
            descriptor = file.fileno()
            status = os.fstat(descriptor)
            updated_at = status.st_mtime
            run = _ends(path, descriptor, status.st_size)
    except (OSError, RecordError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).replace(str(path), "it")
        return Glance(
            name=name, title=clean(title), state="unreadable", updated_at=updated_at, problem=clean(str(reason))
        )
    return _glance(run, name, title, status, now_s)


def _ends(path: Path, descriptor: int, size: int) -> Run:
    """The first lines but for steps, and the last lines, read as a run of its own."""
    last = os.pread(descriptor, TAIL_BYTES, max(size - TAIL_BYTES, 0))
    first: list[bytes] = []
    if size > TAIL_BYTES:
        head = os.pread(descriptor, HEAD_BYTES, 0)
        if b"\n" not in head:
            head = os.pread(descriptor, MAX_LINE_BYTES + 1, 0)
        lines = head.splitlines(keepends=True)
        first = [line for line in lines if line.endswith(b"\n") and b'"kind":"step"' not in line[:20]]
        last = last.partition(b"\n")[2]
    whole = last.rpartition(b"\n")[0] + b"\n"
    return RunReader(path).read(BytesIO(b"".join(first) + whole))


def _glance(run: Run, name: str, title: str, status: os.stat_result, now_s: float) -> Glance:
    header = run.header
    means = summarise(run.columns, run.steady())
    if run.summary and isinstance(run.summary.get("metrics"), dict):
        means |= {key: value for key, value in run.summary["metrics"].items() if number(value) is not None}
    step_s = number(means.get("step_time_median_s"))
    is_silent = now_s - status.st_mtime > max(SILENT_S, 10 * (step_s or 0.0))
    return Glance(
        name=name,
        title=clean(title),
        state="stopped" if run.failure or (is_silent and not run.summary) else "finished" if run.summary else "running",
        updated_at=status.st_mtime,
        model=clean(header.model, 80),
        device=clean(_device(run), 80),
        world_size=header.world_size,
        last_step=run.step[-1] if len(run) else None,
        mfu=number(means.get("perf/mfu")),
        step_s=step_s,
        tokens_per_s=number(means.get("perf/tokens_per_second")),
        loss=number(run.column("training/loss")[-1]) if len(run) else None,
        recent_mfu=tuple(number(value) for value in run.column("perf/mfu")[-MAX_POINTS:]),
    )


def _device(run: Run) -> str:
    """The name that the peak was looked up by says more than `cpu`."""
    names = [str(peak["device"]) for peak in run.peaks.values() if peak.get("device")]
    return names[-1] if names else run.header.device
