"""Scalars for TensorBoard: how do they get into an event file without TensorFlow or torch?

The library's record format and messages are used as they are; its own writer is not, because that one imports
TensorFlow where there is one and writes from one more thread.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from flopmeter.sinks import SinkContext, load_libraries

FOLDER = "tensorboard"
"""Below the run's folder; `tensorboard --logdir` takes either."""


class Sink:
    """Writes each log as one event with a scalar per metric.

    Every log is flushed: what a run that hangs or is killed did last is what one wants to see. A restart adds a file,
    and TensorBoard shows both as one run.
    """

    def __init__(self, context: SinkContext) -> None:
        proto = "tensorboard.compat.proto"
        events, summaries, records = load_libraries(
            "tensorboard", f"{proto}.event_pb2", f"{proto}.summary_pb2", "tensorboard.summary.writer.record_writer"
        )
        self._make_event = events.Event
        self._make_summary = summaries.Summary
        folder = context.output_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        # A name that no other file has, and that sorts by age, which is the order TensorBoard reads in.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{nanoseconds:09d}"
        self._records = records.RecordWriter((folder / name).open("xb"))
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
