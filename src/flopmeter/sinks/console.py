"""One calm line in the terminal: rewritten in place on a TTY, a line every few seconds in a log file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TextIO

from flopmeter.sinks import SinkContext

TAKES_EVERY_STEP = True
LOG_FILE_INTERVAL_S = 10.0
TERMINAL_INTERVAL_S = 0.1


class Sink:
    """Writes the latest numbers to the terminal."""

    def __init__(
        self, context: SinkContext, stream: TextIO | None = None, now_s: Callable[[], float] = monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._now_s = now_s
        self._is_terminal = self._stream.isatty()
        self._last_s: float | None = None
        self._is_line_open = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step, unless another was shown a moment ago."""
        now_s = self._now_s()
        interval_s = TERMINAL_INTERVAL_S if self._is_terminal else LOG_FILE_INTERVAL_S
        if self._last_s is not None and now_s - self._last_s < interval_s:
            return
        self._last_s = now_s
        line = format_line(step, metrics)
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[2K{line[:width]}")
            self._is_line_open = True
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the last line standing."""
        if self._is_line_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_line_open = False


def format_line(step: int, metrics: Mapping[str, float]) -> str:
    """The live line; a number that is not known yet shows as a dash."""

    def show(key: str, pattern: str, scale: float = 1.0) -> str:
        value = metrics.get(key)
        return "-" if value is None else pattern.format(value * scale)

    parts = (
        f"step {step:>5}",
        f"loss {show('training/loss', '{:.4f}')}",
        f"step time {show('perf/step_time', '{:.1f} ms', 1e3)}",
        f"MFU {show('perf/mfu', '{:.1f} %', 100)}",
        f"{show('perf/tokens_per_second', '{:,.0f}')} tokens/s",
        f"data wait {show('perf/data_wait_share', '{:.1f} %', 100)}",
    )
    return " | ".join(parts)
