"""A small GPT, as people write it: the model that the demo trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


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
    has_eager_attention: bool = False
    """Spell attention out instead of calling SDPA: the same result, slower."""


class Attention(nn.Module):
    """Causal self-attention through SDPA, or spelled out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.is_eager = config.has_eager_attention
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, hidden = x.shape
        heads = self.qkv(x).view(samples, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if self.is_eager:
            y = _spelled_out(heads[0], heads[1], heads[2])
        else:
            y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        mixed: torch.Tensor = self.out(y.transpose(1, 2).reshape(samples, length, hidden))
        return mixed


def _spelled_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention with all its scores in memory, as textbooks have it."""
    length = query.shape[-2]
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    mixed: torch.Tensor = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
    return mixed


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
