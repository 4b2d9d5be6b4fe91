"""What does a profiler trace say: where the time went, how many FLOPs were done, and what MFU that makes?

    from flopmeter.traces import load_trace

    trace = load_trace("trace.json.gz")             # a Kineto or Chrome trace; a list of them for several ranks
    trace.ranks[0].times[0].exposed_communication_s
    trace.as_run().waterfall()                      # as if it had been a monitored run

`load_any` takes a run folder, a run file or a trace, so that whatever reads runs reads traces too. Traces are read in
one pass, without holding their text; a damaged one gives what is left of it, and says what is missing. No torch.

    text        the file's bytes, decompressed, bounded
    events      the events in the text
    timeline    what is kept of them
    host        which phase of which step the host was in
    placement   what each kernel was for
    sweep       what the device did at each instant
    steps       the same for each step
    operators, counting     FLOPs from recorded shapes
    rank, trace, run        one file, all of them, and all of them as a run
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flopmeter.errors import RecordError
from flopmeter.record import load_run
from flopmeter.traces.trace import Trace, load_trace

if TYPE_CHECKING:
    from flopmeter.record import Run

__all__ = ["Trace", "load_any", "load_trace"]

_GZIP = b"\x1f\x8b"


def load_any(path: str | Path) -> Run:
    """Read a run folder, a run file, or a profiler trace as a run.

    Raises:
        RecordError: it is a run that cannot be read.
        TraceError: it is a trace that cannot be read.
    """
    file = Path(path)
    return load_trace(file).as_run() if _is_trace(file) else load_run(file)


def _is_trace(file: Path) -> bool:
    """Told by content: run files are lines of JSON that begin with a header, traces one document."""
    if file.is_dir():
        return False
    try:
        with file.open("rb") as opened:
            begin = opened.read(4096)
    except OSError as error:
        raise RecordError(f"cannot read {file}: {error.strerror or error}") from None
    if begin.startswith(_GZIP) or begin.lstrip()[:1] == b"[":
        return True
    is_marked = b'"traceEvents"' in begin or b'"schemaVersion"' in begin
    return is_marked or (b'"kind"' not in begin and file.suffix != ".jsonl")
