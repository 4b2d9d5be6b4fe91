"""One calm line in the terminal: rewritten in place on a TTY; in a log file a line now and then, ever more rarely."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TextIO

from flopmeter import text
from flopmeter.metrics import Means
from flopmeter.sinks import SinkContext

TERMINAL_INTERVAL_S = 0.5
LOG_FILE_INTERVAL_S = 10.0
LONGEST_INTERVAL_S = 600.0
RARER = 0.05
"""In a log file the next line waits for this share of the time so far: a run of three days leaves hundreds of lines."""

_RATES = ("perf/mfu", "perf/tokens_per_second", "perf/samples_per_second", "perf/data_wait_share")


class Sink:
    """Shows where the run stands. Performance is that of all steps since the last line, not of one lucky step."""

    takes_every_step = True

    def __init__(
        self, context: SinkContext, stream: TextIO | None = None, now_s: Callable[[], float] = monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._now_s = now_s
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._first_s: float | None = None
        self._last_s = 0.0
        self._is_line_open = False
        self._since = Means(*_RATES)
        self._unshown: tuple[int, Mapping[str, float]] | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in the step, and show it unless another line was written a moment ago."""
        now_s = self._now_s()
        self._since.add(metrics)
        self._unshown = step, metrics
        if self._first_s is None:
            self._first_s = now_s
        elif now_s - self._last_s < self._interval_s(now_s - self._first_s):
            return
        self._last_s = now_s
        self._show(step, metrics)

    def close(self) -> None:
        """Leave the last line standing, with the last step in it."""
        if self._is_line_open:
            if self._unshown is not None:
                self._show(*self._unshown)
            self._stream.write("\n")
            self._stream.flush()
            self._is_line_open = False

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        means, self._since, self._unshown = self._since.compute(), Means(*_RATES), None
        # On a terminal it must fit: a longer line could not be rewritten.
        width = shutil.get_terminal_size().columns - 1 if self._is_terminal else None
        line = format_line(step, {**metrics, **means}, width)
        self._stream.write(f"\r\x1b[2K{line}" if self._is_terminal else line + "\n")
        self._stream.flush()
        self._is_line_open = self._is_terminal

    def _interval_s(self, run_s: float) -> float:
        if self._is_terminal:
            return TERMINAL_INTERVAL_S
        return min(max(LOG_FILE_INTERVAL_S, RARER * run_s), LONGEST_INTERVAL_S)

    @staticmethod
    def say_last(line: str) -> None:
        """The run's closing line, below the last step."""
        print(line, file=sys.stderr, flush=True)


def format_line(step: int, metrics: Mapping[str, float], width: int | None = None) -> str:
    """The live line, in fewer words where it must fit; a number that is not known yet shows as a dash.

    A model that takes no tokens is told in samples.
    """
    has_samples_only = "perf/tokens_per_second" not in metrics and "perf/samples_per_second" in metrics
    rate, unit, short = ("samples", "samples/s", "smp/s") if has_samples_only else ("tokens", "tokens/s", "tok/s")

    def show(key: str, write: Callable[[float], str]) -> str:
        value = metrics.get(key)
        return "-" if value is None else write(value)

    loss, mfu = show("training/loss", "{:.4f}".format), show("perf/mfu", text.utilisation)
    data_wait, speed = show("perf/data_wait_share", text.percent), show(f"perf/{rate}_per_second", "{:,.0f}".format)
    step_ms = show("perf/step_time", lambda step_s: f"{1e3 * step_s:.1f} ms")
    begin = f"step {step:>5} | loss {loss}"
    line = f"{begin} | step time {step_ms} | MFU {mfu} | {speed} {unit} | data wait {data_wait}"
    if width is None or len(line) <= width:
        return line
    step_time = show("perf/step_time", text.seconds)
    speed = show(f"perf/{rate}_per_second", lambda value: text.amount(value, ""))
    return f"{begin} | {step_time} | MFU {mfu} | {speed.strip()} {short} | wait {data_wait}"[:width]
