"""A training on the GPU, watched or not, whose size decides who waits for whom."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter import Run, TrainingMonitor, load_run, watch

IS_SIMULATED = "SIMCUDA_DEVICES" in os.environ
"""Whether this is the device of tests/simcuda, which computes nothing."""
PEAK = {"peak_flop_per_s": 1e15, "sinks": [], "report": False}


@contextmanager
def waits_allowed() -> Iterator[None]:
    """Building a model and finishing a run may wait for the device; a step may not."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Loop:
    """Linears of one width: many narrow ones keep the host busy, few wide ones the device."""

    def __init__(self, width: int = 256, num_layers: int = 4, rows: int = 64) -> None:
        with waits_allowed():
            torch.manual_seed(0)
            self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers))).cuda()
            self.batch = torch.randn(rows, width, device="cuda")
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
            self.flop = 2 * rows * width**2 * (3 * num_layers - 1)  # the first layer's input needs no gradient

    def step(self) -> torch.Tensor:
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def losses(self, num_steps: int, monitor: TrainingMonitor | None = None) -> list[torch.Tensor]:
        """Train; the losses stay on the device."""
        losses = []
        for number in range(1, num_steps + 1):
            loss = self.step()
            losses.append(loss.detach().clone())
            if monitor is not None:
                monitor.log_step(number, 0, loss, None, 1e-4)
        return losses


class Text(nn.Module):
    """A few wide products: each step keeps the device busy long after the host has gone on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4096)
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (self.layers(self.embedding(input_ids)).mean(-1) * attention_mask).sum()


@contextmanager
def watched(loop: Loop, folder: Path, model: nn.Module | None = None, **settings: Any) -> Iterator[TrainingMonitor]:
    """A monitor whose smallest complaint fails the test: a failure of ours is caught and logged, never raised."""
    complaints: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flopmeter").addHandler(handler)
    config = {"monitoring": {**PEAK, **settings}}
    monitor = watch(model or loop.model, loop.optimizer, output_dir=folder, config=config)
    try:
        yield monitor
    finally:
        with waits_allowed():
            torch.cuda.synchronize()
            monitor.finish_training()
        logging.getLogger("flopmeter").removeHandler(handler)
    # Steps that get slower after a profile may do so because the machine is busy: that one is no failure.
    if complaints := [each for each in complaints if "after the last profile a step took" not in each]:
        pytest.fail("; ".join(complaints))


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    run: Run = load_run(folder)
    return [event for event in run.events if event["event"] == name]
