from __future__ import annotations

import inspect
import io
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from flopmeter import TrainingMonitor, load_run, watch
from flopmeter.config import MonitorConfig
from flopmeter.errors import ConfigError
from flopmeter.schema import METRICS_BY_KEY
from flopmeter.sinks import SinkContext, available_sinks, check_sinks, choice_of, open_sink
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


EVERY_KEY = dict.fromkeys(METRICS_BY_KEY, 1.0)


def test_wandb_gets_the_keys_of_the_contract_and_three_more_unless_more_is_asked_for() -> None:
    own = {"mine/speed": 1.0, "dataset/web/loss": 2.0}
    contract = (
        "training/loss training/lr training/epoch training/grad_norm global_step perf/mfu perf/mfu_percent "
        "perf/step_time perf/steps_per_second perf/tokens_per_second perf/samples_per_second"
    )
    ours = "perf/hfu perf/goodput perf/data_wait_share"
    chosen = choice_of("wandb", MonitorConfig())({**EVERY_KEY, **own})
    assert chosen.keys() == {*contract.split(), *ours.split(), *own}
    assert choice_of("wandb", MonitorConfig.load({"wandb": {"metrics": "all"}}))(EVERY_KEY) == EVERY_KEY
    assert choice_of("tensorboard", MonitorConfig())(EVERY_KEY) == EVERY_KEY


def test_each_sink_has_a_choice_of_its_own() -> None:
    config = MonitorConfig.load({"tensorboard": {"metrics": ["perf/mfu", "rank/own_*"]}})
    chosen = choice_of("tensorboard", config)({**EVERY_KEY, "mine": 1.0})
    assert chosen.keys() == {"perf/mfu", "rank/own_time_min", "rank/own_time_mean", "rank/own_time_max", "mine"}
    with pytest.raises(ConfigError, match=r"tensorboard.metrics\[1\]: 'perf/mfuu' is not allowed"):
        MonitorConfig.load({"tensorboard": {"metrics": ["usual", "perf/mfuu"]}})


TAKEN: list[tuple[dict[str, float], int]] = []


class Taker:
    """Something with a function in it, as libraries' runs are."""

    @staticmethod
    def take(metrics: dict[str, float], step: int) -> None:
        TAKEN.append((metrics, step))


def test_a_function_of_the_users_is_a_sink_by_its_name() -> None:
    sink = open_sink(f"{__name__}:Taker.take", CONTEXT)
    sink.log(3, METRICS)
    sink.close()
    assert TAKEN == [(METRICS, 3)]
    assert TAKEN[0][0] is not METRICS  # it may change what it is given


def test_a_function_that_is_not_there_is_refused_where_the_program_is() -> None:
    for name, said in (("nowhere:fn", "ModuleNotFoundError"), ("math:nothing", "AttributeError"), ("math:pi", "float")):
        check_sinks((name,), imports=False)
        with pytest.raises(ConfigError, match=f"monitoring.sinks: {name} .*{said}"):
            check_sinks((name,))


def trained(folder: Path, log: Any, num_steps: int = 20, **settings: Any) -> TrainingMonitor:
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"monitoring": {"sinks": [], "detail_every": 5, "report": False, "peak_flop_per_s": 1e12, **settings}}
    monitor = watch(model, optimizer, output_dir=folder, config=config, log=log)
    for step in range(1, num_steps + 1):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        monitor.log_step(step, epoch=0, loss=loss, grad_norm=None, learning_rate=0.1)
    monitor.finish_training()
    return monitor


def test_a_function_given_to_watch_is_called_with_metrics_and_their_step_on_a_thread_of_its_own(tmp_path: Path) -> None:
    taken: list[tuple[int, dict[str, float], str]] = []
    trained(tmp_path, lambda metrics, step: taken.append((step, metrics, threading.current_thread().name)))
    by_step = {step: metrics for step, metrics, _ in taken if "training/loss" in metrics}
    assert list(by_step) == list(range(1, 21))
    assert {"perf/mfu", "perf/step_time"} <= by_step[20].keys()
    assert "perf/mfu" not in by_step[19]
    assert {thread for _, _, thread in taken} == {"flopmeter-log"}


def test_a_function_that_raises_is_switched_off_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def raising(metrics: dict[str, float], step: int) -> None:
        calls.append(step)
        raise RuntimeError("no server")

    monitor = trained(tmp_path, raising)
    assert monitor.num_steps == len(load_run(tmp_path)) == 20
    assert calls == [1]
    assert sum("the sink log is switched off: RuntimeError: no server" in line for line in caplog.messages) == 1


def test_a_function_that_hangs_holds_up_neither_the_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flopmeter.monitor.worker.CLOSE_TIMEOUT_S", 0.5)
    is_over = threading.Event()
    monitor = trained(tmp_path, lambda metrics, step: is_over.wait())
    is_over.set()
    assert monitor.num_steps == 20
    assert load_run(tmp_path).summary is not None
    assert any("the sink log does not answer and is left behind" in line for line in caplog.messages)


def test_what_is_no_function_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log: a function of metrics and a step, not str"):
        trained(tmp_path, "mlflow")
