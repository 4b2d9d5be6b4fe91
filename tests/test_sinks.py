from __future__ import annotations

import inspect
import io
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

from flopmeter.config import MonitorConfig
from flopmeter.errors import ConfigError
from flopmeter.sinks import SinkContext, available_sinks, open_sink
from flopmeter.sinks.console import Sink, format_line

METRICS: Mapping[str, float] = {
    "training/loss": 2.34567,
    "perf/step_time": 0.1234,
    "perf/mfu": 0.4567,
    "perf/tokens_per_second": 12345.6,
    "perf/data_wait_share": 0.02,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


CONTEXT = SinkContext(config=MonitorConfig(), output_dir=Path("nowhere"))


def test_every_sink_has_what_the_contract_says() -> None:
    assert "console" in available_sinks()
    for name in available_sinks():
        sink = import_module(f"flopmeter.sinks.{name}").Sink
        assert next(iter(inspect.signature(sink).parameters)) == "context"
        assert callable(sink.log)
        assert callable(sink.close)


def test_an_unknown_sink_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"monitoring.sinks: there is no sink 'graphite'; there are: .*console"):
        open_sink("graphite", CONTEXT)


def test_the_line_has_every_number_in_its_unit() -> None:
    line = format_line(12, METRICS)
    assert line == ("step    12 | loss 2.3457 | step time 123.4 ms | MFU 45.7 % | 12,346 tokens/s | data wait 2.0 %")


def test_an_unknown_number_is_a_dash_and_not_a_zero() -> None:
    assert "MFU - |" in format_line(1, {})


def test_a_terminal_shows_one_line_that_is_rewritten() -> None:
    terminal, clock = Terminal(), Clock()
    sink = Sink(CONTEXT, terminal, clock)
    for step in range(3):
        clock.now_s = float(step)
        sink.log(step, METRICS)
    sink.close()
    shown = terminal.getvalue()
    assert shown.count("\n") == 1
    assert shown.count("\r") == 3


def test_a_log_file_gets_a_line_now_and_then_and_no_control_characters() -> None:
    file, clock = io.StringIO(), Clock()
    sink = Sink(CONTEXT, file, clock)
    for step in range(1000):
        clock.now_s = step * 0.05  # 50 s
        sink.log(step, METRICS)
    sink.close()
    lines = file.getvalue().splitlines()
    assert len(lines) == 5  # at 0, 10, 20, 30, 40 s
    assert "\r" not in file.getvalue()
    assert "\x1b" not in file.getvalue()
