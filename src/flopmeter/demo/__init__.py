"""What does flopmeter show? A small model trained for half a minute on whatever device there is, faults included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flopmeter.demo.plants import PLANTS, Plant, find_plant
from flopmeter.demo.ranks import train_on_ranks
from flopmeter.demo.training import MIN_STEPS, DemoResult, Planted, build, train
from flopmeter.demo.workloads import WORKLOADS, WorkloadName, recipe_for
from flopmeter.errors import ConfigError

__all__ = [
    "MIN_STEPS",
    "PLANTS",
    "WORKLOADS",
    "DemoResult",
    "Plant",
    "Planted",
    "WorkloadName",
    "find_plant",
    "pick_device",
    "run_demo",
]


def pick_device() -> torch.device:
    """The accelerator that torch sees, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def run_demo(
    output_dir: Path,
    seconds: float,
    config: Any = None,
    *,
    workload: WorkloadName = "gpt",
    planted: Sequence[Planted] = (),
    min_steps: int = MIN_STEPS,
) -> DemoResult:
    """Train until `seconds` of training have passed.

    Args:
        min_steps: Go on for longer where a busy machine has not done so many steps by then.
        planted: Faults. One that is off leaves the setting that it needs, so that its cost can be measured.
    """
    for plant, _, _ in planted:
        if workload not in plant.workloads:
            raise ConfigError(f"{plant.name} cannot be planted in {workload}; it can in: {', '.join(plant.workloads)}")
    num_ranks = max((plant.num_ranks for plant, _, _ in planted), default=1)
    device = pick_device() if num_ranks == 1 else torch.device("cpu")
    recipe = recipe_for(workload, device, is_short=bool(planted))
    if num_ranks > 1:
        return train_on_ranks(num_ranks, recipe, planted, output_dir, seconds, config, min_steps)
    return train(build(recipe, planted, device), output_dir, seconds, config, device, min_steps)
