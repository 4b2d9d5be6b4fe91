"""How does the demo run on two ranks? Both on this machine, over gloo, in processes of their own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from flopmeter.demo.plants import Planted, find_plant
from flopmeter.demo.training import DemoResult, build, train
from flopmeter.demo.workloads import Recipe


def train_on_ranks(
    num_ranks: int,
    recipe: Recipe,
    planted: Sequence[Planted],
    output_dir: Path,
    seconds: float,
    config: Any,
    min_steps: int,
) -> DemoResult:
    """Train on so many ranks; the result is that of rank 0."""
    names = [(plant.name, size, is_on) for plant, size, is_on in planted]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, folder, recipe, names, output_dir, seconds, config, min_steps)
        spawn(_run_rank, arguments, nprocs=num_ranks)  # type: ignore[no-untyped-call]
        result: DemoResult = torch.load(Path(folder) / "result", weights_only=False)
    return result


def _run_rank(
    rank: int,
    num_ranks: int,
    folder: str,
    recipe: Recipe,
    names: Sequence[tuple[str, float, bool]],
    output_dir: Path,
    seconds: float,
    config: Any,
    min_steps: int,
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    device = torch.device("cpu")
    planted = [Planted(find_plant(name), size, is_on) for name, size, is_on in names]
    recipe = build(recipe, planted, device)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    try:
        result = train(recipe, output_dir, seconds, config, device, min_steps)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        torch.save(result, Path(folder) / "result")
