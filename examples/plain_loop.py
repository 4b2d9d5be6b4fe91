"""A plain PyTorch loop with three lines of flopmeter: MFU, phases and the wait for data, in a run file.

python examples/plain_loop.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flopmeter import TrainingMonitor

FEATURES, HIDDEN, CLASSES = 64, 512, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output-dir", default="runs/plain_loop")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(arguments.steps * 128, FEATURES)
    labels = x[:, :CLASSES].argmax(1)
    loader = DataLoader(TensorDataset(x, labels), batch_size=128, shuffle=True)

    with TrainingMonitor(arguments.output_dir, model=model, optimizer=optimizer, loader=loader) as monitor:
        for step, (inputs, targets) in enumerate(loader, start=1):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step, epoch=0, loss=loss, grad_norm=grad_norm, learning_rate=1e-3)
        summary = monitor.finish_training()

    for name in ("perf/mfu", "step_time_median_s", "perf/data_wait_share"):
        print(f"{name:24} {summary[name]:.4f}")
    print(f"run file: {monitor.run_path}")


if __name__ == "__main__":
    main()
