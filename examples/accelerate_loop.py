"""A loop written with Accelerate, with one line of flopmeter: accumulation, and MFU in the trackers.

    python examples/accelerate_loop.py

Needs accelerate and tensorboard.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from flopmeter import watch

FEATURES, HIDDEN = 64, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output-dir", default="runs/accelerate_loop")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, log_with="tensorboard", project_dir=arguments.output_dir)
    accelerator.init_trackers("events")
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(list(torch.randn(2 * arguments.steps * 64, FEATURES)), batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    monitor = watch(model, optimizer, loader, output_dir=arguments.output_dir, accelerator=accelerator)
    for index, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if index % 20 == 0:
            accelerator.log({"loss": loss.item()}, step=index // 2)
    accelerator.end_training()

    print(f"perf/mfu {monitor.summary()['perf/mfu']:.4f}")
    print(f"run file: {monitor.run_path}")


if __name__ == "__main__":
    main()
