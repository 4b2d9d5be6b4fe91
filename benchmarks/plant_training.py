"""How do runs with planted faults train? One loop for every workload, with or without faults, on one rank or two.

python benchmarks/plant_training.py slow_disk=0.5 --workload gpt --seconds 15 -o runs/slow
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from flopmeter.demo import LEARNING_RATE, MIN_STEPS, has_bfloat16, pick_device
from flopmeter.errors import ConfigError
from flopmeter.monitor import TrainingMonitor
from plants import WORKLOADS, Planted, WorkloadName, find_plant
from workloads import Batch, Recipe, loss_of, recipe_for

WARMUP_STEPS, TIMED_STEPS = 3, 5
ASK_EVERY = 10
"""Steps between two questions to rank 0 whether the time is over: asked at every step, it would be a fault itself."""


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
    if num_ranks == 1:
        return train(build(recipe, planted, device), output_dir, seconds, config, device, min_steps)
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


def build(recipe: Recipe, planted: Sequence[Planted], device: torch.device) -> Recipe:
    """The recipe with its faults; the setting that a fault needs is there without it, too."""
    recipe = copy(recipe)
    for plant, size, _ in planted:
        plant.prepare(recipe, size)
    if any(plant.is_sized_by_step for plant, _, _ in planted):
        recipe.step_s = ordinary_step_s(recipe, device)
    for plant, size, is_on in planted:
        if is_on:
            plant.spoil(recipe, size)
    return recipe


def ordinary_step_s(recipe: Recipe, device: torch.device) -> float:
    """What a step of the healthy run takes on this machine."""
    model = recipe.model().to(device)
    optimizer = recipe.optimizer(model)
    batch = next(iter(recipe.loader()))
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    times: list[float] = []
    for _ in range(WARMUP_STEPS + TIMED_STEPS):
        start_s = time.perf_counter()
        loss = loss_of(model(**batch))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # a device works on while the host's clock stands here
        times.append(time.perf_counter() - start_s)
    return median(times[WARMUP_STEPS:])


def train(
    recipe: Recipe, output_dir: Path, seconds: float, config: Any, device: torch.device, min_steps: int = 1
) -> DemoResult:
    """Train until `seconds` have passed and `min_steps` are done, and leave a run file."""
    model = recipe.model().to(device)
    called = _across_ranks(model, recipe) if dist.is_initialized() else model
    optimizer = recipe.optimizer(model)
    # In half precision the gradients would need a scaler; where bf16 is only emulated, float32 is faster.
    is_mixed = device.type == "cuda" and recipe.dtype == torch.float32 and has_bfloat16()
    with TrainingMonitor(output_dir, config, model=called) as monitor:
        monitor.run.is_silent_at_end = True  # the command shows a table
        step, loss = 0, torch.tensor(float("nan"))
        for step, batch in enumerate(_until(seconds, min_steps, monitor.batches(recipe.loader())), start=1):
            with monitor.phase("host_to_device"):
                batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with monitor.phase("forward"), torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
                loss = loss_of(called(**batch))
            for use in recipe.after_forward:
                use(loss)
            with monitor.phase("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            with monitor.phase("optimizer"):
                grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            monitor.log_step(step, epoch=0, loss=loss, grad_norm=grad_norm, learning_rate=LEARNING_RATE)
            for do in recipe.after_step:
                do(monitor, model)
        summary = monitor.finish_training()
    return DemoResult(run_path=monitor.run_path, summary=summary, num_steps=step, final_loss=float(loss.detach()))


def _until(seconds: float, min_steps: int, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Batches until the time is over, on all ranks at once: one that stopped earlier would leave the others waiting."""
    start_s = time.monotonic()
    for number, batch in enumerate(batches, start=1):
        yield batch
        is_over = number >= min_steps and time.monotonic() - start_s >= seconds
        if dist.is_initialized():
            is_over = number % ASK_EVERY == 0 and _says_rank_0(is_over)
        if is_over:
            return


def _says_rank_0(is_over: bool) -> bool:
    answer = torch.tensor(is_over)
    dist.broadcast(answer, 0)
    return bool(answer)


def _across_ranks(model: nn.Module, recipe: Recipe) -> nn.Module:
    parallel = DistributedDataParallel(model)
    if recipe.forward_delay_s and dist.get_rank() == 1:
        model.register_forward_pre_hook(lambda *_: time.sleep(recipe.forward_delay_s))
    if recipe.network_delay_s:
        parallel.register_comm_hook(None, _slow_reduction(recipe.network_delay_s))
    return parallel


def _slow_reduction(delay_s: float) -> Callable[..., Any]:
    """The mean over all ranks, as without a hook; the last bucket arrives late."""

    def reduce(state, bucket):  # type: ignore[no-untyped-def]  # torch takes no other annotation than its own
        mean = bucket.buffer().div_(dist.get_world_size())

        def arrive(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            if bucket.is_last():
                time.sleep(delay_s)
            return reduced.value()[0]

        work: Any = dist.all_reduce(mean, async_op=True)
        return work.get_future().then(arrive)

    return reduce


def main() -> None:
    """One run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", nargs="*", help="NAME=SIZE; without a size, one in the middle of its range")
    parser.add_argument("--workload", choices=WORKLOADS, default="gpt")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("-o", "--output-dir", type=Path, default=Path("runs/planted"))
    arguments = parser.parse_args()
    planted = []
    for name, _, size in (fault.partition("=") for fault in arguments.fault):
        plant = find_plant(name)
        planted.append(Planted(plant, float(size) if size else sum(plant.sizes) / 2))
    run_demo(arguments.output_dir, arguments.seconds, workload=arguments.workload, planted=planted)


if __name__ == "__main__":
    main()
