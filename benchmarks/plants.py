"""Which faults can be planted in a small run, how large, and what should a diagnosis call them?

    plant = find_plant("slow_disk")
    plant.prepare(recipe, 0.5)      # the setting in which the fault matters: done with and without it
    plant.spoil(recipe, 0.5)        # the fault itself

So the run without the fault differs from the one with it by the fault alone, and the time that it costs can be measured
as a ratio of the two. Sizes that are times count in ordinary steps: 0.5 costs half as much again as a healthy step.
"""

from __future__ import annotations

import gc
import io
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Literal, NamedTuple

from flopmeter.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn

    from flopmeter.monitor import TrainingMonitor
    from workloads import Recipe

WorkloadName = Literal["gpt", "conv", "hf"]
WORKLOADS: tuple[WorkloadName, ...] = ("gpt", "conv", "hf")
TEXT: tuple[WorkloadName, ...] = ("gpt", "hf")
CHECKPOINT_EVERY = 10
_NUM_CYCLES = 2000


def _nothing(recipe: Recipe, size: float) -> None:
    """Nothing to prepare, or nothing to spoil."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """One fault of known size."""

    name: str
    """As users type it."""
    rule: str
    """What the diagnosis should find first."""
    what: str
    """The fault, in one sentence."""
    size: str
    """What the size means."""
    sizes: tuple[float, float]
    """Smallest and largest size that is worth planting."""
    spoil: Callable[[Recipe, float], None]
    """Puts the fault into a recipe."""
    prepare: Callable[[Recipe, float], None] = _nothing
    """Makes the setting in which the fault matters, without the fault."""
    workloads: tuple[WorkloadName, ...] = WORKLOADS
    """Where it can happen."""
    num_ranks: int = 1
    """Processes that it takes."""
    is_sized_by_step: bool = False
    """Whether `Recipe.step_s` has to be measured first."""


class Planted(NamedTuple):
    """A fault, how large it is, and whether it is there."""

    plant: Plant
    size: float
    is_on: bool = True


def _load_in_a_worker(recipe: Recipe, size: float) -> None:
    recipe.num_workers = 1


def _slow_disk(recipe: Recipe, size: float) -> None:
    recipe.read_s = (1 + size) * recipe.step_s  # one worker loads while the step runs: only the rest is waited for


def _heavy_preprocessing(recipe: Recipe, size: float) -> None:
    recipe.compute_s = (1 + size) * recipe.step_s


def _small_model(recipe: Recipe, size: float) -> None:
    recipe.num_layers, recipe.batch_size = 8, 64
    recipe.hidden, recipe.length = (16, 8) if recipe.workload == "conv" else (64, 32)


def _tiny_batch(recipe: Recipe, size: float) -> None:
    recipe.batch_size = round(size)


def _long_samples(recipe: Recipe, size: float) -> None:
    recipe.length, recipe.batch_size = 128 * round(size / 128), 2


def _eager_attention(recipe: Recipe, size: float) -> None:
    recipe.has_eager_attention = True


def _padding(recipe: Recipe, size: float) -> None:
    recipe.length = round(recipe.length / (1 - size))
    recipe.padding = size


def _needless_checkpointing(recipe: Recipe, size: float) -> None:
    recipe.checkpointed = size


def _naive_optimizer(recipe: Recipe, size: float) -> None:
    recipe.num_optimizer_slices = round(size)


def _double_precision(recipe: Recipe, size: float) -> None:
    import torch

    recipe.dtype = torch.float64


def _slow_rank(recipe: Recipe, size: float) -> None:
    recipe.forward_delay_s = size * recipe.step_s


def _slow_network(recipe: Recipe, size: float) -> None:
    recipe.network_delay_s = size * recipe.step_s


def _gc_storm(recipe: Recipe, size: float) -> None:
    debt = _Debt(size * recipe.step_s)

    def collect(monitor: TrainingMonitor, model: nn.Module) -> None:
        if debt.add_step():
            debt.pay(_collect_cycles)

    recipe.after_step += (collect,)


def _collect_cycles() -> None:
    """Make objects that refer to each other, which only the collector frees, and have it look at everything."""
    for _ in range(_NUM_CYCLES):
        cycle: list[object] = []
        cycle.append(cycle)
    gc.collect()


def _checkpoint_pause(recipe: Recipe, size: float) -> None:
    debt = _Debt(size * recipe.step_s, every=CHECKPOINT_EVERY)

    def save(monitor: TrainingMonitor, model: nn.Module) -> None:
        if debt.add_step():
            with monitor.pause("checkpoint"), tempfile.TemporaryFile() as file:
                debt.pay(lambda: _write(model, file))

    recipe.after_step += (save,)


def _write(model: nn.Module, file: IO[bytes]) -> None:
    import torch

    file.seek(0)
    torch.save(model.state_dict(), file)
    file.flush()
    os.fsync(file.fileno())


def _host_sync(recipe: Recipe, size: float) -> None:
    debt, log = _Debt(size * recipe.step_s), io.StringIO()

    def print_loss(loss: torch.Tensor) -> None:
        log.seek(0)
        if debt.add_step():
            debt.pay(lambda: print(loss, loss.item(), file=log))

    recipe.after_forward += (print_loss,)


class _Debt:
    """Time that a fault has to cost: each step adds to it, and what the fault really took is taken off."""

    def __init__(self, step_s: float, every: int = 1) -> None:
        self._step_s = step_s
        self._every = every
        self._num_steps = 0
        self._owed_s = 0.0

    def add_step(self) -> bool:
        """A step has gone by; whether it is time to pay."""
        self._num_steps += 1
        self._owed_s += self._step_s
        return self._num_steps % self._every == 0 and self._owed_s > 0

    def pay(self, work: Callable[[], object]) -> None:
        """Do the work until it has taken as long as is owed; what is too much counts for the next time."""
        while self._owed_s > 0:
            start_s = time.perf_counter()
            work()
            self._owed_s -= time.perf_counter() - start_s


_STEPS = "times an ordinary step"

PLANTS: tuple[Plant, ...] = (
    Plant(
        name="none",
        rule="healthy",
        what="nothing is wrong",
        size="has no meaning",
        sizes=(1, 1),
        spoil=_nothing,
    ),
    Plant(
        name="slow_disk",
        rule="data_stall",
        what="the loader's worker waits for its samples, as on a slow disk",
        size=_STEPS,
        sizes=(0.3, 1.5),
        prepare=_load_in_a_worker,
        spoil=_slow_disk,
        is_sized_by_step=True,
    ),
    Plant(
        name="heavy_preprocessing",
        rule="cpu_preprocessing",
        what="the loader's worker computes for longer than a step",
        size=_STEPS,
        sizes=(0.3, 1.5),
        prepare=_load_in_a_worker,
        spoil=_heavy_preprocessing,
        is_sized_by_step=True,
    ),
    Plant(
        name="tiny_batch",
        rule="kernel_launch",
        what="the batch is so small that calling the operators takes longer than their work",
        size="samples in a batch",
        sizes=(1, 3),
        prepare=_small_model,
        spoil=_tiny_batch,
    ),
    Plant(
        name="eager_attention",
        rule="eager_attention",
        what="attention is spelled out, with all its scores in memory",
        size="tokens of a sample",
        sizes=(384, 896),
        prepare=_long_samples,
        spoil=_eager_attention,
        workloads=TEXT,
    ),
    Plant(
        name="padding",
        rule="padding_waste",
        what="every sample is padded to a length that none has",
        size="share of the tokens that are padding",
        sizes=(0.25, 0.6),
        spoil=_padding,
        workloads=TEXT,
    ),
    Plant(
        name="checkpointing",
        rule="recompute",
        what="activations are computed again although memory would hold them",
        size="share of the blocks",
        sizes=(0.5, 1.0),
        spoil=_needless_checkpointing,
    ),
    Plant(
        name="naive_optimizer",
        rule="optimizer_heavy",
        what="a hand-written optimizer loops over the parameters piece by piece",
        size="pieces of each parameter",
        sizes=(8, 32),
        spoil=_naive_optimizer,
    ),
    Plant(
        name="gc_storm",
        rule="gc_pause",
        what="the loop makes cyclic garbage and has all of the memory searched for it",
        size=_STEPS,
        sizes=(0.3, 1.0),
        spoil=_gc_storm,
        is_sized_by_step=True,
    ),
    Plant(
        name="checkpoint_pause",
        rule="checkpoint_pause",
        what=f"every {CHECKPOINT_EVERY} steps the loop waits until the weights are on disk",
        size=_STEPS,
        sizes=(0.3, 1.0),
        spoil=_checkpoint_pause,
        is_sized_by_step=True,
    ),
    Plant(
        name="host_sync",
        rule="own_code",
        what="the loop prints tensors and reads values all the time",
        size=_STEPS,
        sizes=(0.3, 1.0),
        spoil=_host_sync,
        is_sized_by_step=True,
    ),
    Plant(
        name="slow_rank",
        rule="straggler",
        what="the second rank sleeps in every forward pass",
        size=_STEPS,
        sizes=(0.4, 1.0),
        spoil=_slow_rank,
        num_ranks=2,
        is_sized_by_step=True,
    ),
    Plant(
        name="slow_network",
        rule="exposed_communication",
        what="every reduction of gradients takes longer, on all ranks",
        size=_STEPS,
        sizes=(0.4, 1.0),
        spoil=_slow_network,
        num_ranks=2,
        is_sized_by_step=True,
    ),
    Plant(
        name="fp64",
        rule="fp32_matmul",
        what="weights and data are in double precision by mistake",
        size="has no meaning",
        sizes=(1, 1),
        spoil=_double_precision,
    ),
)


def find_plant(name: str) -> Plant:
    """The plant of that name.

    Raises:
        ConfigError: There is none.
    """
    plants = {plant.name: plant for plant in PLANTS}
    if name in plants:
        return plants[name]
    raise ConfigError(f"there is no plant {name!r}; {did_you_mean(name, plants)}")
