"""What does flopmeter show? A small GPT that trains for half a minute on whatever device there is, healthy or faulty.

    train(Path("runs/demo"), seconds=30, fault="slow_disk")

More models, and faults of every kind and size, are in `benchmarks/`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from flopmeter.monitor import TrainingMonitor

MIN_STEPS = 10
"""A shorter run has hardly a step after warm-up and count: nothing to show, however slow the machine."""
LEARNING_RATE = 1e-3
IGNORED = -100
READ_S = 0.008
"""What a sample takes to read from the slow disk."""
PADDING = 0.5
_WHO = ("the engineer", "a small model", "the cluster", "one slow rank", "the loader", "a large batch", "the compiler")
_DOES = ("waits for", "feeds", "measures", "speeds up", "forgets", "compiles", "counts")
_WHAT = ("the optimizer", "every kernel", "a gradient", "the next step", "its own shadow", "all tokens", "the peak")
_WHEN = ("at night", "in silence", "twice", "before breakfast", "under load", "for an hour", "without a sound")


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Sizes of the model."""

    num_layers: int
    """Transformer blocks."""
    hidden: int
    """Width of the residual stream."""
    num_heads: int
    """Attention heads; must divide `hidden`."""
    length: int
    """Tokens per sample."""
    vocabulary: int = 256
    """Bytes."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv, self.out = nn.Linear(config.hidden, 3 * config.hidden), nn.Linear(config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, hidden = x.shape
        heads = self.qkv(x).view(samples, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed: torch.Tensor = self.out(self.attend(*heads).transpose(1, 2).reshape(samples, length, hidden))
        return mixed

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What each token takes from those before it."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(config.hidden, 4 * config.hidden), nn.GELU(), nn.Linear(4 * config.hidden, config.hidden)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        added: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return added


class GPT(nn.Module):
    """Byte-level language model; called with targets it returns the loss.

    Padding stands on the right, so that causal attention keeps it from the other tokens: it only has to be left out of
    the loss, which the label -100 does.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.position_embedding = nn.Embedding(config.length, config.hidden)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.num_layers)))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class SyntheticText(IterableDataset[dict[str, torch.Tensor]]):
    """An endless stream of samples, made on the spot: bytes and the bytes that follow them.

    Args:
        padding: Share of each sample that is padding, on the right.
        read_s: What each sample takes longer.
    """

    def __init__(self, length: int, seed: int, padding: float = 0.0, read_s: float = 0.0) -> None:
        self._length, self._seed, self._read_s = length, seed, read_s
        self._num_real = length - round(padding * length)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        choice = random.Random(self._seed).choice  # our own generator: the global one is the user's
        while True:
            text = bytearray()
            while len(text) <= self._length:
                text += f"{choice(_WHO)} {choice(_DOES)} {choice(_WHAT)} {choice(_WHEN)}. ".encode()
            tokens = torch.frombuffer(text[: self._length + 1], dtype=torch.uint8).long()
            sample = {"input_ids": tokens[:-1], "labels": tokens[1:]}
            if self._num_real < self._length:
                mask = (torch.arange(self._length) < self._num_real).long()
                labels = sample["labels"].masked_fill(mask == 0, IGNORED)
                sample = {"input_ids": sample["input_ids"] * mask, "labels": labels, "attention_mask": mask}
            if self._read_s:
                time.sleep(self._read_s)
            yield sample


def pick_device() -> torch.device:
    """The accelerator that torch sees, with its number, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def has_bfloat16() -> bool:
    """Whether this GPU multiplies bfloat16 itself: a T4 or a V100 does not."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def train(folder: Path, seconds: float, fault: str = "none", config: Any = None, min_steps: int = MIN_STEPS) -> Path:
    """Train until `seconds` have passed and `min_steps` are done; returns the run file.

    Args:
        fault: What is wrong with the run: none, slow_disk, tiny_batch or padding.
    """
    device, batch_size = pick_device(), 8
    sizes = GPTConfig(num_layers=4, hidden=256, num_heads=8, length=128)
    if device.type != "cpu":
        sizes, batch_size = GPTConfig(num_layers=12, hidden=768, num_heads=8, length=512), 16
    if fault == "tiny_batch":
        sizes, batch_size = GPTConfig(num_layers=8, hidden=64, num_heads=8, length=32), 1
    padding, read_s = PADDING if fault == "padding" else 0.0, READ_S if fault == "slow_disk" else 0.0
    torch.manual_seed(0)
    model = GPT(sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    loader = DataLoader(SyntheticText(sizes.length, 0, padding, read_s), batch_size=batch_size)
    # In half precision the gradients would need a scaler; where bf16 is only emulated, float32 is faster.
    is_mixed = device.type == "cuda" and has_bfloat16()
    with TrainingMonitor(folder, config, model=model) as monitor:
        monitor.run.is_silent_at_end = True  # the command shows the summary
        start_s = time.monotonic()
        for step, batch in enumerate(monitor.batches(loader), start=1):
            with monitor.phase("host_to_device"):
                batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with monitor.phase("forward"), torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
                loss = model(**batch)
            with monitor.phase("backward"):
                loss.backward()
            with monitor.phase("optimizer"):
                grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            monitor.log_step(step, epoch=0, loss=loss, grad_norm=grad_norm, learning_rate=LEARNING_RATE)
            if step >= min_steps and time.monotonic() - start_s >= seconds:
                break
    return monitor.run_path
