from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from flopmeter.counters import READING
from flopmeter.devices import peak_flops
from flopmeter.errors import ConfigError
from flopmeter.monitor import TrainingMonitor, measuring, watch, worker
from flopmeter.monitor.header import make_sampler
from flopmeter.monitor.schedule import WARMUP_STEPS
from flopmeter.record import load_run

PEAK = {"monitoring": {"peak_flop_per_s": 1e12, "sinks": []}}
FEATURES, HIDDEN, BATCH = 6, 10, 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Dropout(0.5), nn.ReLU(), nn.Linear(HIDDEN, 1))


def train(monitor: TrainingMonitor | None, num_steps: int = 8, model: nn.Module | None = None) -> list[float]:
    """A plain loop; returns every loss, so that two runs can be compared bit for bit."""
    model = model or make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    data: DataLoader[Any] = DataLoader(list(torch.randn(num_steps * BATCH, FEATURES)), batch_size=BATCH)
    losses = []
    if monitor is not None:
        monitor.set_model_ref(model)
    for step, batch in enumerate(monitor.batches(data) if monitor else data, start=1):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if monitor is not None:
            monitor.log_step(step, epoch=0, loss=loss, grad_norm=None, learning_rate=0.1)
    return losses


def test_every_step_is_in_the_record_with_its_loss(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, PEAK) as monitor:
        losses = train(monitor)
    run = load_run(tmp_path)
    assert list(run.step) == list(range(1, 9))
    assert list(run.column("training/loss")) == losses
    assert run.summary is not None
    assert run.skipped == []


def test_the_losses_are_bit_for_bit_those_of_a_run_without_us(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, PEAK, flops_profile_freq=2) as monitor:
        assert train(monitor) == train(None)


def test_mfu_is_the_counted_flop_over_time_and_peak(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, PEAK) as monitor:
        train(monitor)
    run = load_run(tmp_path)
    # Forward of both layers, both weight gradients, and the input gradient of the second layer only.
    first, second = 2 * BATCH * FEATURES * HIDDEN, 2 * BATCH * HIDDEN * 1
    model_flop = 2 * first + 3 * second
    assert run.column("perf/model_flop")[-1] == model_flop
    assert run.column("perf/mfu")[-1] == pytest.approx(model_flop / run.column("perf/step_time")[-1] / 1e12)


def test_warm_up_and_observed_steps_are_marked_and_left_out(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, PEAK) as monitor:
        train(monitor)
    run = load_run(tmp_path)
    assert [run.marks.get(i) for i in range(5)] == [("warmup",)] * WARMUP_STEPS + [("observed",), None]
    assert run.steady() == [4, 5, 6, 7]


def test_waiting_for_data_is_part_of_the_step_and_told(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, PEAK) as monitor:
        train(monitor)
    assert all(0 < share < 1 for share in load_run(tmp_path).column("perf/data_wait_share"))


def test_no_hook_is_left_on_the_model(tmp_path: Path) -> None:
    model = make_model()
    with TrainingMonitor(tmp_path, PEAK) as monitor:
        train(monitor, model=model)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_a_read_only_folder_costs_one_warning_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in_the_way").write_text("")
    with caplog.at_level(logging.WARNING), TrainingMonitor(tmp_path / "in_the_way", PEAK) as monitor:
        assert train(monitor) == train(None)
    assert sum("cannot write the run file" in record.message for record in caplog.records) == 1


def test_a_part_that_fails_is_switched_off_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("flopmeter.monitor.recorder.StepRecord", broken)
    with caplog.at_level(logging.WARNING), TrainingMonitor(tmp_path, PEAK) as monitor:
        assert train(monitor) == train(None)
    failures = [record.message for record in caplog.records if "planted" in record.message]
    assert len(failures) == 3
    assert failures[-1].endswith("monitoring is now off")


def test_an_unknown_peak_leaves_mfu_out_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flopmeter.monitor.measuring.peak_flops", lambda *_, **__: peak_flops("NVIDIA X999", "fp32"))
    with caplog.at_level(logging.WARNING), TrainingMonitor(tmp_path, {"monitoring": {"sinks": []}}) as monitor:
        train(monitor)
    run = load_run(tmp_path)
    assert "perf/mfu" not in run.columns
    assert "perf/model_flop" in run.columns
    assert sum("MFU stays unknown" in record.message for record in caplog.records) == 1


def test_an_exception_of_the_users_code_reaches_the_user_and_closes_the_record(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), TrainingMonitor(tmp_path, PEAK) as monitor:
        train(monitor)
        raise KeyError("mine")
    assert load_run(tmp_path).summary is not None


def test_a_pause_is_an_event_and_no_step_time(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, PEAK) as monitor, monitor.pause("eval"):
        pass
    pauses = [event for event in load_run(tmp_path).events if event["event"] == "pause"]
    assert [event["name"] for event in pauses] == ["eval"]
    assert pauses[0]["duration_s"] >= 0


def test_a_restart_appends_to_the_same_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        with TrainingMonitor(tmp_path, PEAK) as monitor:
            train(monitor, num_steps=2)
    run = load_run(tmp_path)
    assert len(run.headers) == 2
    assert list(run.step) == [1, 2, 1, 2]


def test_wrong_settings_are_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no sink 'graphite'"):
        TrainingMonitor(tmp_path, {"monitoring": {"sinks": ["graphite"]}})
    with pytest.raises(ConfigError, match="flops_profile_freq"):
        TrainingMonitor(tmp_path, flops_profile_freq=-5)


def test_finishing_twice_writes_one_summary(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, PEAK) as monitor:
        train(monitor)
        assert monitor.finish_training() == monitor.finish_training()
    assert (tmp_path / "run.jsonl").read_text().count('"kind":"summary"') == 1


def test_the_training_log_is_written_at_the_end(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, PEAK, "my_log.json") as monitor:
        train(monitor)
        monitor.log_epoch(0, avg_loss=1.0, elapsed_time=2.0)
    assert '"step_logs"' in (tmp_path / "my_log.json").read_text()


def test_a_step_logged_before_the_start_starts_the_run(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, PEAK)
    monitor.log_step(1, epoch=0, loss=1.0, grad_norm=2.0, learning_rate=None)
    monitor.finish_training()
    assert list(load_run(tmp_path).column("training/grad_norm")) == [2.0]


class SlowCounters:
    """A source of counters that answers when it is told to, or raises then."""

    name = "slow"

    def __init__(self, error: Exception | None = None) -> None:
        self.is_asked, self.may_answer, self.has_answered, self.is_closed = (threading.Event() for _ in range(4))
        self.asked_by: list[threading.Thread] = []
        self._error = error

    def read(self) -> dict[str, Any]:
        self.asked_by.append(threading.current_thread())
        self.is_asked.set()
        assert self.may_answer.wait(10)
        if self._error is not None:
            raise self._error
        self.has_answered.set()
        return {**READING, "tensor_active": 0.4}

    def close(self) -> None:
        self.is_closed.set()


Hybrid = Callable[[SlowCounters, nn.Module], TrainingMonitor]


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hybrid:
    """Gives a running monitor in hybrid mode with these counters, whose first sample is due soon."""
    monkeypatch.setattr(worker, "FIRST_SAMPLE_S", 0.1)
    settings = {"monitoring": {**PEAK["monitoring"], "mfu_calculation_mode": "hybrid"}}

    def start(counters: SlowCounters, model: nn.Module) -> TrainingMonitor:
        monkeypatch.setattr(measuring, "open_counters", lambda *_, **__: counters)
        return watch(model, output_dir=tmp_path, config=settings)

    return start


def test_counters_are_read_in_the_background_while_training_goes_on(tmp_path: Path, hybrid: Hybrid) -> None:
    counters, model = SlowCounters(), make_model()
    with hybrid(counters, model) as monitor:
        monitor.run.start_now()
        assert counters.is_asked.wait(10)
        train(monitor, model=model)
        assert not counters.has_answered.is_set()
        counters.may_answer.set()
        assert counters.has_answered.wait(10)
    assert threading.current_thread() not in counters.asked_by
    assert counters.is_closed.is_set()
    run = load_run(tmp_path)
    assert len(run) == 8
    assert {(event["reader"], event["tensor_active"]) for event in run.named("counters")} == {("slow", 0.4)}
    assert "slow: tensor pipes busy 40.0" in (tmp_path / "report.html").read_text()


def test_counters_that_raise_are_switched_off_with_one_warning(
    tmp_path: Path, hybrid: Hybrid, caplog: pytest.LogCaptureFixture
) -> None:
    counters, model = SlowCounters(OSError("the driver is gone")), make_model()
    with hybrid(counters, model) as monitor:
        monitor.run.start_now()
        assert counters.is_asked.wait(10)
        counters.may_answer.set()
        monitor.latest(wait_s=10.0)  # the output thread is through with them
        train(monitor, model=model)
        assert monitor.recorder.source is not None
        monitor.recorder.source.read_counters()
    message = "slow: no more hardware counters: OSError: the driver is gone"
    assert [record.getMessage() for record in caplog.records].count(message) == 1
    assert len(counters.asked_by) == 1
    run = load_run(tmp_path)
    assert len(run) == 8
    assert [event["message"] for event in run.named("warning")].count(message) == 1
    assert run.named("counters") == []


def test_what_samples_the_machine_is_loaded_when_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    # Later it would be on a thread of ours, perhaps while the program ends by Ctrl-C, which Python then forgets.
    monkeypatch.delitem(sys.modules, "psutil", raising=False)
    make_sampler(None).close()
    assert "psutil" in sys.modules
