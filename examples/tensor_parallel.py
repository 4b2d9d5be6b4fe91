"""Tensor parallelism: every rank sees the whole batch and computes its slice, so tokens count once and FLOPs add up.

torchrun --nproc-per-node 2 examples/tensor_parallel.py     # plain `python examples/tensor_parallel.py` is a job of one
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flopmeter import TrainingMonitor

BATCH, LENGTH, WIDTH, HEADS, WORDS = 8, 64, 128, 4, 512
SIZE = WIDTH // HEADS
SPLIT = {
    "query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(), "out": RowwiseParallel(),
    "up": ColwiseParallel(), "down": RowwiseParallel(),
}  # fmt: skip


class Layer(nn.Module):
    """Attention and an MLP; how many heads there are is told by the slice that a rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](hidden)
        heads = [part(normed).unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norms[1](hidden))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output-dir", default="runs/tensor_parallel")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = LanguageModel()
    if world_size > 1:
        mesh = init_device_mesh(device, (world_size,), mesh_dim_names=("tp",))
        for layer in model.layers:
            parallelize_module(layer, mesh, SPLIT)
        # The whole batch runs through the head as well: left unsplit, its work would be done by every rank.
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    with TrainingMonitor(arguments.output_dir, model=model, optimizer=optimizer) as monitor:
        for step in range(1, arguments.steps + 1):
            torch.manual_seed(step)
            words = torch.randint(WORDS, (BATCH, LENGTH + 1))
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
