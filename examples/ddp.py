"""Data parallelism with DDP: each rank trains on its part of the batch, rank 0's run file has the job's numbers.

torchrun --nproc-per-node 2 examples/ddp.py        # plain `python examples/ddp.py` is a job of one, on the same batch
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopmeter import TrainingMonitor

BATCH, LENGTH, WIDTH, HEADS, WORDS = 8, 64, 128, 4, 512


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output-dir", default="runs/ddp")
    arguments = parser.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model: nn.Module = LanguageModel()
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = BATCH // world_size

    with TrainingMonitor(arguments.output_dir, model=model, optimizer=optimizer) as monitor:
        for step in range(1, arguments.steps + 1):
            torch.manual_seed(step)
            words = torch.randint(WORDS, (BATCH, LENGTH + 1))[rank * rows : (rank + 1) * rows]
            logits = model(input_ids=words[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step, loss=loss, learning_rate=1e-3)
        summary = monitor.finish_training()  # empty on all ranks but the first

    if rank == 0:
        for name in ("perf/mfu", "perf/tokens_per_second", "step_time_median_s"):
            print(f"{name:24} {summary[name]:.4f}")
        print(f"run file: {monitor.run_path}")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
