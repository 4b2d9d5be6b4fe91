"""The monitor on a simulated device: a plain CPU loop whose marks also go to a device of our making."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter import load_run, watch
from simulated_device import MS, US, SimulatedDevice, timeline_on

CONFIG = {"monitoring": {"peak_flop_per_s": 1e12, "sinks": [], "detail_every": 20}}


class Simulated(nn.Module):
    """Launches kernels on the simulated device as it computes."""

    def __init__(self, device: SimulatedDevice, num_kernels: int, kernel_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.device, self.num_kernels, self.kernel_s = device, num_kernels, kernel_s

    def launch(self, *_: Any) -> None:
        for _ in range(self.num_kernels):
            self.device.stream.launch(self.kernel_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.launch()
        y = self.layer(x)
        y.register_hook(self.launch)  # and as many in the backward pass
        return y


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_s: float, **device: Any) -> dict[str, Any]:
    simulated = SimulatedDevice(**device)
    monkeypatch.setattr("flopmeter.monitor.timeline_of", lambda _: timeline_on(simulated, num_events=256))
    model = Simulated(simulated, num_kernels=100, kernel_s=kernel_s)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config=CONFIG)
    optimizer.register_step_pre_hook(model.launch)
    for _ in range(24):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        simulated.stream.synchronize()
    monitor.finish_training()
    events = [event for event in load_run(tmp_path).events if event["event"] == "device_time"]
    assert monitor._num_failures == 0
    return events[0]


def test_the_record_has_device_seconds_by_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = run(tmp_path, monkeypatch, kernel_s=50 * US)
    # 100 kernels of 50 us, launched by a host that is far ahead.
    assert event["device_s"]["forward"] == pytest.approx(5 * MS, rel=0.02)
    assert event["verdict"]["bound"] == "device"


def test_a_host_that_launches_too_slowly_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, monkeypatch, kernel_s=1 * US)["verdict"]["bound"] == "host"


def test_no_call_is_made_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedDevice()
    simulated.is_capturing = True  # from here on every record or query raises RuleBroken
    monkeypatch.setattr("flopmeter.monitor.timeline_of", lambda _: timeline_on(simulated))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config=CONFIG)
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    monitor.finish_training()
    assert len(load_run(tmp_path)) == 5
