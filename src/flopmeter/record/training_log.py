"""The run as one ordinary JSON document, for scripts that expect a `training_log.json`, or as a table of its steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from flopmeter.record.reader import Run
from flopmeter.record.writer import replace_file


def write_training_log(run: Run, path: Path) -> None:
    """Write `step_logs`, `epoch_logs`, `evaluation_logs` and `total_training_time` (seconds), atomically."""
    replace_file(path, lambda file: json.dump(training_log(run), file, allow_nan=False, indent=1))


def steps_as_text(run: Run, format: str) -> Iterator[str]:
    """A line for every step with all that follows from it; as csv with a line of names in front, or as JSON objects."""
    if format == "csv":
        yield ",".join(_quoted(name) for name in ("step", "time", "marks", *run.columns))
    for place in range(len(run)):
        if format == "csv":
            values = ("" if math.isnan(column[place]) else repr(column[place]) for column in run.columns.values())
            yield ",".join((str(run.step[place]), repr(run.time[place]), " ".join(run.marks.get(place, ())), *values))
        else:
            marks = {"marks": run.marks[place]} if place in run.marks else {}
            yield json.dumps({**_step_log(run, place), "time": run.time[place]} | marks)


def _quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""')) if any(sign in name for sign in ',"\r\n') else name


def training_log(run: Run) -> dict[str, Any]:
    """The document itself: NaN and the infinities become null, since ordinary JSON has no word for them."""
    return {
        "run": {"run_id": run.header.run_id, "model": run.header.model, "device": run.header.device},
        "step_logs": [_step_log(run, position) for position in range(len(run))],
        "epoch_logs": _events(run, "epoch"),
        "evaluation_logs": _events(run, "evaluation"),
        "total_training_time": _total_s(run),
    }


def _step_log(run: Run, position: int) -> dict[str, Any]:
    values = {key: column[position] for key, column in run.columns.items()}
    log: dict[str, Any] = {"step": run.step[position]}
    log |= {key: value for key, value in values.items() if math.isfinite(value)}
    return log


def _events(run: Run, name: str) -> list[dict[str, Any]]:
    dull = ("kind", "event")
    return [{k: v for k, v in event.items() if k not in dull} for event in run.named(name)]


def _total_s(run: Run) -> float:
    """Time from each start to its last step; the time between a crash and the restart is not training."""
    total_s, starts = 0.0, [header.started_at for header in run.headers]
    for start, following in pairwise([*starts, math.inf]):
        ends = [time for time in run.time if start <= time < following]
        total_s += max(ends) - start if ends else 0.0
    return total_s
