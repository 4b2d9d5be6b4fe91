"""What does flopmeter show? A small model trained for half a minute on whatever device there is, faults included.

Torch is loaded by what trains, not by asking which faults there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopmeter.demo.plants import PLANTS, WORKLOADS, Plant, Planted, WorkloadName, find_plant
from flopmeter.errors import ConfigError

if TYPE_CHECKING:
    from flopmeter.demo.training import DemoResult

__all__ = [
    "MIN_STEPS",
    "PLANTS",
    "WORKLOADS",
    "Plant",
    "Planted",
    "WorkloadName",
    "find_plant",
    "run_demo",
]

MIN_STEPS = 10
"""A shorter run has hardly a step after warm-up and count: nothing to show, however slow the machine."""


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
    import torch

    from flopmeter.demo.ranks import train_on_ranks
    from flopmeter.demo.training import build, pick_device, train
    from flopmeter.demo.workloads import recipe_for

    for plant, _, _ in planted:
        if workload not in plant.workloads:
            raise ConfigError(f"{plant.name} cannot be planted in {workload}; it can in: {', '.join(plant.workloads)}")
    num_ranks = max((plant.num_ranks for plant, _, _ in planted), default=1)
    device = pick_device() if num_ranks == 1 else torch.device("cpu")
    recipe = recipe_for(workload, device, is_short=bool(planted))
    if num_ranks > 1:
        return train_on_ranks(num_ranks, recipe, planted, output_dir, seconds, config, min_steps)
    return train(build(recipe, planted, device), output_dir, seconds, config, device, min_steps)
