"""Scalars for TensorBoard: how do they get into an event file without TensorFlow or torch?

The library's record format and messages are used as they are; its own writer is not, because that one imports
TensorFlow where there is one and writes from one more thread.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from flopmeter.errors import MissingLibraryError
from flopmeter.sinks import SinkContext

FOLDER = "tensorboard"
"""Below the run's folder; `tensorboard --logdir` takes either."""


class Sink:
    """Writes each log as one event with a scalar per metric.

    Every log is flushed: what a run that hangs or is killed did last is what one wants to see. A restart adds a file,
    and TensorBoard shows both as one run.
    """

    def __init__(self, context: SinkContext) -> None:
        events, summaries, records = _load_library()
        self._make_event = events.Event
        self._make_summary = summaries.Summary
        folder = context.output_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._records = records.RecordWriter(_event_path(folder).open("xb"))
        self._write(file_version="brain.Event:2")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics at this step, in single precision, NaN and infinity included."""
        values = [self._make_summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._write(step=step, summary=self._make_summary(value=values))

    def close(self) -> None:
        """Close the file; everything is in it already."""
        self._records.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._make_event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()


def _event_path(folder: Path) -> Path:
    """A name that no other file has, and that sorts by age, which is the order TensorBoard reads in."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return folder / f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{nanoseconds:09d}"


def _load_library() -> tuple[Any, Any, Any]:
    try:
        return (
            import_module("tensorboard.compat.proto.event_pb2"),
            import_module("tensorboard.compat.proto.summary_pb2"),
            import_module("tensorboard.summary.writer.record_writer"),
        )
    except ImportError as error:
        raise MissingLibraryError("tensorboard", needed_for="the sink tensorboard", extra="tensorboard") from error
