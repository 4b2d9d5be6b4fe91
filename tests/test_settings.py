"""Does each setting that decides how FLOPs are measured do in a run what its description says?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter import TrainingMonitor, load_run
from flopmeter.counters import CounterUnavailableError
from flopmeter.monitor import measuring
from flopmeter.monitor.schedule import Schedule
from flopmeter.record import Run

WIDTH, BATCH, NUM_STEPS = 8, 4, 40
LAYER = 2 * BATCH * WIDTH * WIDTH
COUNTED = 3 * LAYER + 5 * LAYER
"""Three products forward; backward the gradient of the layer's weight, and two for each of the others."""
OF_THE_LAYERS = 2 * LAYER + 3 * LAYER
"""Each weight used once: two products, the gradients of both weights, and of the second one's input."""


class Net(nn.Module):
    """Uses a weight twice, which an estimate from the weights cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ self.second @ self.second


@pytest.fixture(autouse=True)
def every_measurement_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "_needed_s", lambda *_: 0.0)


def trained(folder: Path, phase: str | None = None, **performance: Any) -> Run:
    """A run of forty steps under these settings; `mode` among them."""
    own = {"sinks": [], "report": False, "profile_steps": False, "peak_flop_per_s": 1e12}
    own["mfu_calculation_mode"] = performance.pop("mode", "smart")
    config = {"monitoring": {**own, "performance_monitoring": performance}}
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainingMonitor(folder, config, model=model, optimizer=optimizer) as monitor:
        if phase is not None:
            monitor.set_training_phase(phase)
        for step in range(1, NUM_STEPS + 1):
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step)
    return load_run(folder)


def measured(run: Run) -> list[int]:
    return [place + 1 for place, marks in run.marks.items() if {"observed", "profiled"} & set(marks)]


def methods(run: Run) -> set[Any]:
    return {event.get("method") for event in run.named("count")}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        # A first look behind the first steps; the second one early, to test the first; then every so many.
        ({}, [4, 21]),
        ({"smart_mode": {"initial_profiling": False, "recalibration_frequency": 20}}, [24]),
        ({"smart_mode": {"recalibration_frequency": 10}}, [4, 14, 24, 34]),
        ({"measure_flops_frequency": 10}, [4, 14, 24, 34]),
        ({"mode": "profiler", "measure_flops_frequency": 10}, [4, 14, 24, 34]),
        ({"mode": "profiler", "measure_flops_frequency": 0}, [4]),
        ({"phase": "finetune", "phase_frequency": {"finetune": 7}}, [4, 11, 18, 25, 32, 39]),
        ({"phase": "main", "phase_frequency": {"finetune": 7, "main": 0}}, [4]),
        ({"mode": "estimate"}, []),
    ],
)
def test_how_often_a_step_is_measured(tmp_path: Path, settings: dict[str, Any], steps: list[int]) -> None:
    run = trained(tmp_path, **settings)
    assert measured(run) == steps
    assert set(run.column("perf/model_flop")) == {COUNTED}


@pytest.mark.parametrize(("is_calibrated", "flop"), [(True, COUNTED), (False, OF_THE_LAYERS)])
def test_without_calibration_the_estimate_stays_as_it_is(tmp_path: Path, is_calibrated: bool, flop: int) -> None:
    run = trained(tmp_path, smart_mode={"calibration_enabled": is_calibrated})
    assert set(run.column("perf/model_flop")) == {flop}
    assert run.last("count")["calibration"] == COUNTED / OF_THE_LAYERS  # published in either case


@pytest.mark.parametrize(
    ("settings", "method", "is_asked"),
    [
        ({}, "profiler", True),
        ({"fallback_to_profiler": False}, "observed", True),
        ({"hardware_counters_enabled": False}, "profiler", False),
        ({"hardware_counters_enabled": False, "fallback_to_profiler": False}, "observed", False),
    ],
)
def test_hybrid_mode_where_there_are_no_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool], method: str, is_asked: bool
) -> None:
    def no_counters(*_: Any, **__: Any) -> None:
        raise CounterUnavailableError("no counters here")

    monkeypatch.setattr(measuring, "open_counters", no_counters)
    run = trained(tmp_path, mode="hybrid", hybrid_mode=settings)
    assert methods(run) == {method}
    assert any("no counters here" in event["message"] for event in run.named("warning")) is is_asked
