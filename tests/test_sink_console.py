from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter import TrainingMonitor, watch
from flopmeter.config import MonitorConfig
from flopmeter.sinks import SinkContext
from flopmeter.sinks.console import Sink, format_line

CONTEXT = SinkContext(config=MonitorConfig(), output_dir=Path("nowhere"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def shown(stream: io.StringIO, times_s: list[float]) -> str:
    """What a stream holds after a step at each of the times."""
    clock = Clock()
    sink = Sink(CONTEXT, stream, clock)
    for step, now_s in enumerate(times_s):
        clock.now_s = now_s
        sink.log(step, {"perf/step_time": 1.0})
    sink.close()
    return stream.getvalue()


def test_a_log_file_of_a_day_has_hundreds_of_lines_and_not_thousands() -> None:
    lines = shown(io.StringIO(), [float(second) for second in range(86_400)]).splitlines()
    # Every 10 s up to 200 s (20 lines), then every 5 % of the time so far up to 12,000 s, which is
    # log(12000 / 200) / log(1.05) = 84 lines, then every 600 s: (86400 - 12000) / 600 = 124.
    assert len(lines) == pytest.approx(20 + 84 + 124, abs=10)


def test_a_terminal_is_rewritten_twice_a_second_at_most() -> None:
    text = shown(Terminal(), [0.01 * place for place in range(1000)])  # ten seconds of steps of 10 ms
    assert text.count("\r") <= 21
    assert text.count("\n") == 1


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = shown(Terminal(), [0.0, 5.0, 10.0])
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2


LARGE = {
    "training/loss": 10.1234,
    "perf/step_time": 1.2345,
    "perf/mfu": 0.532,
    "perf/tokens_per_second": 12_345_678.0,
    "perf/data_wait_share": 0.123,
}


def test_in_80_columns_the_line_says_less_words_and_all_numbers() -> None:
    assert format_line(12345, LARGE, 79) == (
        "step 12345 | loss 10.1234 | 1.23 s | MFU 53.2 % | 12.3 M tok/s | wait 12.3 %"
    )
    assert len(format_line(12345, LARGE, 40)) == 40


def test_with_room_the_line_is_in_full() -> None:
    full = "step 12345 | loss 10.1234 | step time 1234.5 ms | MFU 53.2 % | 12,345,678 tokens/s | data wait 12.3 %"
    assert format_line(12345, LARGE) == format_line(12345, LARGE, 120) == full


def test_a_model_without_tokens_is_told_in_samples() -> None:
    images = {key: value for key, value in LARGE.items() if "tokens" not in key} | {"perf/samples_per_second": 2500.0}
    assert "| 2,500 samples/s |" in format_line(1, images)
    assert "| 2.5 k smp/s |" in format_line(12345, images, 79)
    assert "| 12,345,678 tokens/s |" in format_line(1, LARGE | {"perf/samples_per_second": 2500.0})


def test_a_terminal_of_80_columns_shows_the_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    Sink(CONTEXT, terminal, Clock()).log(12345, LARGE)
    assert terminal.getvalue().endswith("| wait 12.3 %")


def test_the_live_line_ends_with_the_last_step() -> None:
    last = shown(Terminal(), [0.0, 1.0, 1.1, 1.2]).rpartition("\r")[2]
    assert last.startswith("\x1b[2Kstep     3 |")
    assert last.endswith("\n")


def test_a_last_step_that_is_shown_is_not_written_again() -> None:
    assert shown(Terminal(), [0.0, 1.0]).count("step ") == 4  # the step and its time, twice


def test_the_last_line_tells_all_steps_since_the_one_before() -> None:
    clock, terminal = Clock(), Terminal()
    sink = Sink(CONTEXT, terminal, clock)
    for step_s in (9.0, 1.0, 3.0):  # the first one is shown at once
        sink.log(1, {"perf/step_time": step_s})
    sink.close()
    assert "step time 2000.0 ms" in terminal.getvalue()


CERTAINTY = r"(counted|at least|predicted \(.+\))"
CLOSING = rf"flopmeter: MFU (unknown|[\d.]+ %, {CERTAINTY}), \S+ \S+ per step \(median\), 8 steps; "


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        pytest.param({"sinks": ["console"]}, CLOSING + r"report: \S+/run/report\.html", id="with a report"),
        pytest.param({"sinks": ["console"], "report": False}, CLOSING + r"run: \S+/run", id="without one"),
        pytest.param({"sinks": []}, "", id="without a console"),
    ],
)
def test_the_last_line_says_what_was_found_and_where_to_read_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: dict[str, Any], last: str
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"monitoring": {"peak_flop_per_s": 1e12, **settings}}
    monitor = watch(model, optimizer, output_dir=tmp_path / "run", config=config)
    for _ in range(8):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    monitor.finish_training()
    monitor.finish_training()
    said = capfd.readouterr()
    lines = said.err.splitlines()
    assert said.out == ""
    assert re.fullmatch(last, lines[-1] if lines else "")
    assert said.err.count("flopmeter: ") == bool(last)


def test_whoever_has_last_words_of_its_own_keeps_the_line_away(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with TrainingMonitor(tmp_path, {"monitoring": {"sinks": ["console"]}}) as monitor:
        monitor.run.is_silent_at_end = True
        monitor.log_step(1)
    assert "flopmeter: " not in capfd.readouterr().err
