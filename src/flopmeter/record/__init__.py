"""The run file: what a training run leaves behind, written as it goes, read by everything else.

    from flopmeter import load_run

    run = load_run("runs/demo")
    run.column("perf/mfu")

One JSON object per line: a header, one line per optimizer step, events, and a closing summary. A restart appends a new
header to the same file.
"""

from __future__ import annotations

from flopmeter.record.reader import Header, Run, load_run
from flopmeter.record.writer import RunWriter, replace_file, steps_as_text, write_training_log

__all__ = ["Header", "Run", "RunWriter", "load_run", "replace_file", "steps_as_text", "write_training_log"]
