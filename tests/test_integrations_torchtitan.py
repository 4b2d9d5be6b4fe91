"""torchtitan's metrics processor with a monitor in it, driven as torchtitan's trainer drives one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter import ConfigError, load_run

metrics = pytest.importorskip("torchtitan.components.metrics", reason="torchtitan is not installed")

WIDTH, BATCH, NUM_STEPS = 8, 4, 20


class Logger:
    """Takes what torchtitan would send to TensorBoard."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, Any]] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.logged.setdefault(step, {}).update(metrics)

    def close(self) -> None:
        return


def train(monkeypatch: pytest.MonkeyPatch, folder: Path, **config: Any) -> tuple[Any, Logger]:
    """The steps of `torchtitan.trainer.Trainer.train_step`, in its order, on a device that torchtitan does not know."""
    from flopmeter.integrations.torchtitan import FlopmeterProcessor

    memory = metrics.DeviceMemStats(*[0.0] * 6)
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: memory, reset_peak_stats=lambda: None)
    monkeypatch.setattr(metrics, "build_device_memory_monitor", lambda: monitor)
    layout = SimpleNamespace(non_data_parallel_size=1, world_size=1)
    settings = FlopmeterProcessor.Config(log_freq=5, **config)
    processor = settings.build(parallel_dims=layout, dump_folder=str(folder), pp_schedule="1F1B")
    processor.logger = logger = Logger()
    processor.num_flops_per_token = 1
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    processor.optimizers, processor.model_parts = SimpleNamespace(optimizers=optimizers), parts
    for step in range(1, NUM_STEPS + 1):
        is_logged = processor.should_log(step)
        processor.data_loading_times.append(0.0)
        loss = parts[1](parts[0](torch.randn(BATCH, WIDTH))).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if is_logged:
            processor.log(step, loss.item(), loss.item(), 1.0, extra_metrics={"lr": 0.1, "n_tokens_seen": 7})
    processor.close()
    return processor, logger


PLAIN = {"sinks": [], "report": False, "peak_flop_per_s": 1e12}


def test_the_run_is_recorded_and_its_metrics_join_torchtitans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processor, logger = train(monkeypatch, tmp_path, monitoring=PLAIN)
    run = load_run(tmp_path)
    assert len(run) == NUM_STEPS
    # Two layers forward, two weights and one input backward.
    assert set(run.column("perf/model_flop")) == {5 * 2 * BATCH * WIDTH * WIDTH}
    assert run.header.num_parameters == 2 * WIDTH * WIDTH
    assert list(logger.logged) == [1, 5, 10, 15, 20]
    with_loss = [step for step, loss in enumerate(run.column("training/loss"), start=1) if loss == loss]
    assert with_loss == [1, 5, 10, 15, 20]
    assert logger.logged[20]["n_tokens_seen"] == 7
    assert logger.logged[20]["perf/step_time"] > 0  # at the end it is waited for
    assert processor.monitor.num_steps == NUM_STEPS


def test_what_fails_in_the_monitor_costs_the_metrics_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flopmeter.integrations.torchtitan.TrainingMonitor", lambda *_, **__: 1 / 0)
    _, logger = train(monkeypatch, tmp_path, monitoring=PLAIN)
    assert list(logger.logged) == [1, 5, 10, 15, 20]
    assert sum("monitoring is now off" in line for line in caplog.messages) == 1


def test_a_wrong_setting_shows_when_the_processor_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean monitoring\.detail_every"):
        train(monkeypatch, tmp_path, monitoring={"detail_evry": 3})
