"""What does a profiler trace say: where the time went, how many FLOPs were done, and what MFU that makes?

    from flopmeter.traces import load_trace

    trace = load_trace("trace.json.gz")             # a Kineto or Chrome trace; a list of them for several ranks
    trace.ranks[0].times[0].exposed_communication_s
    trace.as_run().waterfall()                      # as if it had been a monitored run

`load_any` takes a run folder, a run file or a trace, so that whatever reads runs reads traces too. Traces are read in
one pass, without holding their text; a damaged one gives what is left of it, and says what is missing. No torch.

    events      the events in the file's text, decompressed, bounded
    timeline    what is kept of them
    steps       what each kernel was for, what the device did at each instant of each step, FLOPs from recorded shapes
    rank, trace one file; all of them, and all of them as a run

Nesting, arguments and the splitting of time are shared with live profiles: `profiling/recorded.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flopmeter.columns import open_regular
from flopmeter.errors import RecordError, TraceError
from flopmeter.record import load_run
from flopmeter.record.reader import nearest_run
from flopmeter.schema import RUN_FILE
from flopmeter.traces.trace import Trace, load_trace

if TYPE_CHECKING:
    from flopmeter.record import Run

__all__ = ["Trace", "load_any", "load_trace"]

MAX_RUNS_NAMED = 5
_GZIP = b"\x1f\x8b"
_LIST = re.compile(rb"\s*\[\s*(\{|\]|$)")
"""A trace may be a bare list of events; other text that begins with a bracket is none."""


def load_any(path: str | Path) -> Run:
    """Read a run folder, a run file, or a profiler trace as a run.

    Raises:
        RecordError: it is a run that cannot be read, or neither of them.
        TraceError: it is a trace that cannot be read.
    """
    file = Path(path)
    kind = _kind(file)
    if kind == "run":
        return load_run(file)
    try:
        return load_trace(file).as_run()
    except TraceError as error:
        if kind == "trace":
            raise
        reason = str(error).removeprefix(f"{file} is not a profiler trace: ").replace(f"{file} ", "it ", 1)
        raise RecordError(f"{file} is neither a run file nor a profiler trace: {reason}") from None


def _kind(file: Path) -> Literal["run", "trace", "unknown"]:
    """Told by content: run files are lines of JSON that begin with a header, traces one document."""
    if file.is_dir():
        _look_for_its_runs(file)
        return "run"
    try:
        with open_regular(file) as opened:
            begin = opened.read(4096)
    except OSError as error:
        raise RecordError(f"cannot read {file}: {error.strerror or error}{nearest_run(file)}") from None
    is_marked = b'"traceEvents"' in begin or b'"schemaVersion"' in begin
    if is_marked or begin.startswith(_GZIP) or _LIST.match(begin):
        return "trace"
    return "run" if b'"kind"' in begin or file.suffix == ".jsonl" else "unknown"


def _look_for_its_runs(folder: Path) -> None:
    """Refuse a folder that holds runs and is none."""
    runs = [] if (folder / RUN_FILE).exists() else sorted(file.parent for file in folder.glob(f"*/{RUN_FILE}"))
    if runs:
        names = ", ".join(run.name for run in runs[:MAX_RUNS_NAMED])
        more = f" and {len(runs) - MAX_RUNS_NAMED} more" if len(runs) > MAX_RUNS_NAMED else ""
        raise RecordError(f"{folder} is no run but holds some ({names}{more}): name one, such as {runs[-1]}")
