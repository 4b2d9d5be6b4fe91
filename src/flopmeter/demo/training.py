"""How does the demo train? One loop for every workload, with or without planted faults, on one rank or two."""

from __future__ import annotations

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
from torch.nn.parallel import DistributedDataParallel

from flopmeter.demo.plants import Planted
from flopmeter.demo.workloads import LEARNING_RATE, Batch, Recipe, loss_of
from flopmeter.monitor import TrainingMonitor

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


def pick_device() -> torch.device:
    """The accelerator that torch sees, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


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
        monitor.is_silent_at_end = True  # the command shows a table
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


def has_bfloat16() -> bool:
    """Whether this GPU multiplies bfloat16 itself: a T4 or a V100 does not."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


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
