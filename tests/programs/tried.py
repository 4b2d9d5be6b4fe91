"""A program as `flopmeter try` meets them: slow to load, it saves, forks, and lets no exception through.

python tried.py [--steps N] [--save FOLDER] [--fork]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[tuple[torch.Tensor, int]]):
    """Numbers that take four milliseconds a sample to come by."""

    def __len__(self) -> int:
        return 80_000

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.004)
        return torch.randn(32, generator=torch.Generator().manual_seed(at)), at % 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--save")
    parser.add_argument("--fork", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    model: nn.Module = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
    if "RANK" in os.environ:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if given.fork and os.fork() == 0:
        time.sleep(1000)
        sys.exit()
    batches = iter(DataLoader(Slow(), batch_size=8, shuffle=True))
    for step in range(given.steps):
        try:
            inputs, labels = next(batches)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if given.save and step == 9:
                torch.save(model.state_dict(), Path(given.save) / "last.pt")
                save_file(dict(model.state_dict()), Path(given.save) / "last.safetensors")
                checkpoint.save({"model": model.state_dict()}, checkpoint_id=Path(given.save) / "sharded")
                Path("beside.txt").write_text(os.environ.get("WANDB_MODE", "online"))
        except BaseException:  # noqa: BLE001 - that is the point
            print("went on")


if __name__ == "__main__":
    main()
