"""What does flopmeter show? A small GPT trained for half a minute on whatever device there is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from flopmeter.demo.gpt import GPT, GPTConfig
from flopmeter.demo.text import SyntheticText
from flopmeter.monitor import TrainingMonitor

SEED = 0
LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """What the demo leaves behind."""

    run_path: Path
    """The run file."""
    summary: dict[str, float]
    """Its closing summary."""
    num_steps: int
    """Optimizer steps done."""
    final_loss: float
    """Loss of the last step."""


def pick_device() -> torch.device:
    """The accelerator that torch sees, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def sizes_for(device: torch.device) -> tuple[GPTConfig, int]:
    """Model sizes and batch size that give steps of a fraction of a second."""
    if device.type == "cpu":
        return GPTConfig(num_layers=4, hidden=256, num_heads=8, length=128), 8
    return GPTConfig(num_layers=12, hidden=768, num_heads=12, length=512), 16


def run_demo(output_dir: Path, seconds: float, config: Any = None) -> DemoResult:
    """Train until `seconds` of training have passed."""
    torch.manual_seed(SEED)
    device = pick_device()
    sizes, batch_size = sizes_for(device)
    model = GPT(sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(SyntheticText(sizes.length, SEED), batch_size=batch_size)
    with TrainingMonitor(output_dir, config, model=model) as monitor:
        step, loss = 0, torch.tensor(float("nan"))
        for step, batch in enumerate(_until(seconds, monitor.batches(loader)), start=1):
            with monitor.phase("host_to_device"):
                batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with monitor.phase("forward"), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(**batch)
            with monitor.phase("backward"):
                loss.backward()
            with monitor.phase("optimizer"):
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            monitor.log_step(step, epoch=0, loss=loss, grad_norm=grad_norm, learning_rate=LEARNING_RATE)
        summary = monitor.finish_training()
    return DemoResult(run_path=monitor.run_path, summary=summary, num_steps=step, final_loss=float(loss.detach()))


def _until(seconds: float, batches: Iterator[Any]) -> Iterator[Any]:
    start_s = time.monotonic()
    for batch in batches:
        yield batch
        if time.monotonic() - start_s >= seconds:
            return
