"""What do planted faults spoil? Three small workloads, described by a recipe that a fault may change."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from flopmeter.demo import GPT, LEARNING_RATE, GPTConfig, SyntheticText
from flopmeter.errors import MissingLibraryError
from naive_adam import NaiveAdam
from plants import WorkloadName

if TYPE_CHECKING:
    from flopmeter.monitor import TrainingMonitor

SEED = 0
NUM_CLASSES = 10

Batch = dict[str, torch.Tensor]


@dataclass(kw_only=True, slots=True)
class Recipe:
    """A training run before it is built. The defaults are the healthy run; a plant changes some of them."""

    workload: WorkloadName
    """Which model."""
    num_layers: int
    """Transformer blocks, or residual blocks."""
    hidden: int
    """Width of the residual stream, or channels of the first stage."""
    length: int
    """Tokens of a sample, or pixels along the side of an image."""
    batch_size: int
    """Samples of a step."""
    step_s: float = 0.0
    """What an ordinary step takes here; measured where a plant is sized by it."""
    num_workers: int = 0
    """Processes of the data loader."""
    read_s: float = 0.0
    """Time that loading a batch waits without computing."""
    compute_s: float = 0.0
    """CPU time that preparing a batch takes."""
    padding: float = 0.0
    """Share of the tokens that are padding."""
    has_eager_attention: bool = False
    """Attention as product, softmax, product."""
    checkpointed: float = 0.0
    """Share of the blocks whose activations are computed again in backward."""
    dtype: torch.dtype = torch.float32
    """Of the weights."""
    num_optimizer_slices: int = 0
    """Pieces in which a hand-written optimizer updates each parameter; 0 is torch's fused one."""
    forward_delay_s: float = 0.0
    """What the second rank sleeps in each forward pass."""
    network_delay_s: float = 0.0
    """What every reduction of gradients takes longer."""
    after_forward: tuple[Callable[[torch.Tensor], None], ...] = ()
    """Called with the loss."""
    after_step: tuple[Callable[[TrainingMonitor, nn.Module], None], ...] = ()
    """Called between steps."""

    def model(self) -> nn.Module:
        """Build it, with the same weights every time."""
        torch.manual_seed(SEED)
        made = {"gpt": self._gpt, "conv": self._conv, "hf": self._hf}[self.workload]()
        blocks = _blocks(made)
        for block in blocks[: round(self.checkpointed * len(blocks))]:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return made.to(self.dtype)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """What updates the model."""
        if self.num_optimizer_slices:
            return NaiveAdam(model.parameters(), lr=LEARNING_RATE, num_slices=self.num_optimizer_slices)
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def loader(self) -> DataLoader[Any]:
        """Endless batches."""
        samples: IterableDataset[Batch] = (
            SyntheticImages(self.length, SEED, self.dtype)
            if self.workload == "conv"
            else SyntheticText(self.length, SEED, self.padding)
        )
        read_s, compute_s = self.read_s / self.batch_size, self.compute_s / self.batch_size
        slowed = SlowSamples(samples, read_s, compute_s) if read_s or compute_s else samples
        return DataLoader(slowed, batch_size=self.batch_size, num_workers=self.num_workers)

    def _gpt(self) -> nn.Module:
        made = GPT(GPTConfig(num_layers=self.num_layers, hidden=self.hidden, num_heads=8, length=self.length))
        for module in made.modules() if self.has_eager_attention else ():
            if hasattr(module, "attend"):
                module.attend = spelled_out
        return made

    def _conv(self) -> nn.Module:
        return ConvNet(self.num_layers, self.hidden)

    def _hf(self) -> nn.Module:
        try:
            from transformers import AutoModelForCausalLM, LlamaConfig
        except ImportError as error:
            raise MissingLibraryError("transformers", needed_for="the workload hf", extra="transformers") from error
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.num_layers,
            num_attention_heads=8,
            max_position_embeddings=self.length,
            use_cache=False,
        )
        attention = "eager" if self.has_eager_attention else "sdpa"
        make: Any = AutoModelForCausalLM.from_config
        made: nn.Module = make(config, attn_implementation=attention)
        return made


_SIZES: dict[str, dict[WorkloadName, tuple[int, int, int, int]]] = {
    "large": {"gpt": (12, 768, 512, 16), "conv": (16, 128, 64, 64), "hf": (12, 768, 512, 16)},
    "medium": {"gpt": (4, 256, 128, 8), "conv": (6, 32, 32, 16), "hf": (4, 256, 128, 8)},
    "small": {"gpt": (3, 192, 128, 4), "conv": (6, 16, 32, 16), "hf": (3, 192, 128, 4)},
}
"""Layers, width, length and batch size by workload."""


def recipe_for(workload: WorkloadName, device: torch.device, *, is_short: bool = False) -> Recipe:
    """The healthy run: sizes that give steps of a fraction of a second.

    Args:
        is_short: On a CPU, smaller still: a short run is to have enough steps to tell them apart.
    """
    size = "large" if device.type != "cpu" else "small" if is_short else "medium"
    num_layers, hidden, length, batch_size = _SIZES[size][workload]
    return Recipe(workload=workload, num_layers=num_layers, hidden=hidden, length=length, batch_size=batch_size)


def spelled_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention with all its scores in memory, as textbooks have it."""
    length = query.shape[-2]
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    mixed: torch.Tensor = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
    return mixed


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a model that returns it, by itself or among other things."""
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


class ConvNet(nn.Module):
    """A small residual network; called with labels it returns the loss."""

    def __init__(self, num_blocks: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        widths = [channels * 2 ** (3 * index // num_blocks) for index in range(num_blocks)]
        pairs = zip([channels, *widths[:-1]], widths, strict=True)
        self.blocks = nn.Sequential(*(ResidualBlock(inputs, outputs) for inputs, outputs in pairs))
        self.head = nn.Linear(widths[-1], NUM_CLASSES)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pooled = self.blocks(self.stem(pixel_values)).mean((2, 3))
        return F.cross_entropy(self.head(pooled), labels)


class ResidualBlock(nn.Module):
    """Two convolutions; where the width grows, the image shrinks."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.shortcut(x) + self.second_norm(self.second(y)))


class SyntheticImages(IterableDataset[Batch]):
    """Noise with a tint that tells its class."""

    def __init__(self, side: int, seed: int, dtype: torch.dtype) -> None:
        self._side, self._seed, self._dtype = side, seed, dtype

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            label = torch.randint(NUM_CLASSES, (), generator=generator)
            pixels = torch.rand(3, self._side, self._side, generator=generator, dtype=self._dtype) + label / NUM_CLASSES
            yield {"pixel_values": pixels, "labels": label}


class SlowSamples(IterableDataset[Batch]):
    """The same samples, each after a wait (as for a slow disk) and some computing (as of a decoder)."""

    def __init__(self, samples: IterableDataset[Batch], read_s: float, compute_s: float) -> None:
        self._samples, self._read_s, self._compute_s = samples, read_s, compute_s

    def __iter__(self) -> Iterator[Batch]:
        for sample in self._samples:
            if self._read_s:
                time.sleep(self._read_s)
            if self._compute_s:
                burn(self._compute_s)
            yield sample


def burn(cpu_s: float) -> None:
    """Use so much CPU time, whatever else runs on the machine."""
    until_s = time.thread_time() + cpu_s
    block = os.urandom(1 << 14)
    while time.thread_time() < until_s:
        block = hashlib.sha256(block).digest() * 512


def _blocks(model: nn.Module) -> list[nn.Module]:
    blocks: Any = model.blocks if hasattr(model, "blocks") else model.get_submodule("model.layers")
    return list(blocks)
