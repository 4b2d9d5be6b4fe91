"""Ray Train: the monitor inside a TorchTrainer's loop is the same two lines as anywhere else.

pip install ray; python examples/ray_train.py --workers 2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from flopmeter import TrainingMonitor

FEATURES, HIDDEN, ROWS = 64, 256, 32


def train(settings: dict[str, Any]) -> None:
    """Runs on every worker: Ray has set up torch.distributed, `prepare_model` wraps the model in DDP."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(ray.train.get_context().get_world_rank())

    with TrainingMonitor(settings["output_dir"], model=model, optimizer=optimizer) as monitor:
        for step in range(1, settings["steps"] + 1):
            inputs = torch.randn(ROWS, FEATURES)
            loss = nn.functional.mse_loss(model(inputs), inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step, loss=loss, learning_rate=1e-3)
        summary = monitor.finish_training()  # empty on all workers but the first
    ray.train.report({"mfu": summary.get("perf/mfu"), "loss": loss.item()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output-dir", default="runs/ray_train")
    arguments = parser.parse_args()

    folder = Path(arguments.output_dir).resolve()  # workers have working directories of their own
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": arguments.steps, "output_dir": str(folder)},
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name="flopmeter", storage_path=str(folder / "ray")),
    )
    trainer.fit()
    print(f"run file: {folder / 'run.jsonl'}")


if __name__ == "__main__":
    main()
