"""Is a step that nobody measured given the right FLOPs, or said not to be known? Models whose sizes vary at every step.

    python benchmarks/prediction.py [--steps 150] [--family NAME] [--quick] [--record FILE]

Each model is trained under the real monitor. The record is written at every step, because steps of milliseconds would
be over before the background has looked at the first. An observed step of so small a model takes several times as long
as another, where one of a large model takes a tenth longer: that tenth is what it is charged with, so that the budget
of 1 % allows in these `--steps` what it would allow there. `observed` says how many steps were. The truth of every step
is the count of the same batch on a twin.

A step is *marked* when it is neither counted nor proven to follow: the record doubts it, by whatever share.
The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import cases
from flopmeter import load_run, watch
from flopmeter.flops.observe import observe
from flopmeter.metrics import DOUBT
from flopmeter.monitor import effort
from flopmeter.monitor.schedule import Schedule
from outcome import add_record_option, finish

BENCHMARK_VERSION = 1
BUDGET, LONGER = 0.01, 0.1
WITHIN, TOTAL_WITHIN, MARKED_AT_MOST, MARKED_FROM = 0.01, 0.005, 0.1, 100
VOCAB = 96
QUICK = ("llama padded", "swin", "cnn odd sizes", "stochastic depth")

Batch = dict[str, Tensor]
Rng = random.Random


@dataclass(frozen=True)
class Family:
    """A model and how its batches vary."""

    build: Callable[[], nn.Module]
    batch: Callable[[Rng], Batch]


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
MAMBA = {
    "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "vocab_size": VOCAB, "expand": 2, "head_dim": 16,
    "num_heads": 4, "n_groups": 1, "chunk_size": 16, "time_step_rank": 4, "pad_token_id": 0,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "pad_token_id": 0, "decoder_start_token_id": 2, "max_position_embeddings": 128,
}  # fmt: skip
SPEECH = SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 64, "max_target_positions": 64}
VISION = ENCODER | {"image_size": 32, "patch_size": 8, "num_labels": 5}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
LINEAR = {
    "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "layer_types": ["linear_attention", "full_attention"], "decoder_sparse_step": 1,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
BAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_chunk_size": 16, "attn_layer_indices": [1], "head_dim": 16,
}  # fmt: skip
LLAVA = {
    "text_config": SMALL | {"model_type": "llama"}, "vision_config": ENCODER | {"model_type": "clip_vision_model",
    "image_size": 16, "patch_size": 8, "projection_dim": 16}, "image_token_id": 3, "image_seq_length": 4,
    "vision_feature_layer": -1,
}  # fmt: skip
QWEN_VL = {
    "text_config": SMALL | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}, "image_token_id": 3,
    "vision_start_token_id": 4, "video_token_id": 5,
}  # fmt: skip
SWIN = {
    "image_size": 64, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4,
    "num_labels": 5,
}  # fmt: skip
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [4, 2], "hidden_sizes": [8, 16], "patch_sizes": [7, 3],
    "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 5,
}  # fmt: skip
CLIP = {
    "text_config": ENCODER | {"vocab_size": VOCAB, "max_position_embeddings": 64, "eos_token_id": 2},
    "vision_config": ENCODER | {"image_size": 32, "patch_size": 8}, "projection_dim": 16,
}  # fmt: skip


def hugging_face(model_type: str, numbers: dict[str, Any], head: str = "CausalLM", **chosen: str) -> nn.Module:
    """A model of transformers from its config alone."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **numbers)
    config.get_text_config().use_cache = False
    auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    return auto.from_config(config, **chosen).train()


def padded(rng: Rng, *, left: bool = False, labels: int = 0, longest: int = 64) -> Batch:
    """Texts of any lengths, padded to the longest."""
    lengths = [rng.randint(5, longest) for _ in range(rng.randint(1, 5))]
    batch = cases.text(lengths, max(lengths), VOCAB)
    if left:
        batch = {name: value.flip(1) for name, value in batch.items()}
    if labels:
        batch["labels"] = torch.randint(0, labels, (len(lengths),))
    return batch


def unpadded(rng: Rng, longest: int = 64) -> Batch:
    """Texts of one length, a multiple of 8."""
    rows, length = rng.randint(1, 4), 8 * rng.randint(1, longest // 8)
    return cases.text([length] * rows, length, VOCAB)


def packed(rng: Rng) -> Batch:
    """Documents end to end, in rows of one length."""
    length = 16 * rng.randint(2, 4)
    cuts = [sorted(rng.sample(range(4, length - 4), 2)) for _ in range(rng.randint(1, 3))]
    return cases.packed_text([[a, b - a, length - b] for a, b in cuts], length, VOCAB)


def translated(rng: Rng, *, has_masks: bool = True) -> Batch:
    """A text to read and one to write, each of its own lengths."""
    rows = rng.randint(1, 4)
    read, written = ([rng.randint(4, 48) for _ in range(rows)] for _ in range(2))
    batch = {k: v for k, v in cases.text(read, max(read), VOCAB).items() if k != "labels"}
    labels = cases.text(written, max(written), VOCAB)["labels"]
    if not has_masks:
        return {**batch, "labels": torch.randint(3, VOCAB, labels.shape)}
    mask = (labels != -100).long()
    return {**batch, "labels": labels, "decoder_attention_mask": mask}


def heard(rng: Rng) -> Batch:
    rows = rng.randint(1, 4)
    return {"input_features": torch.randn(rows, 8, 128), "labels": torch.randint(3, VOCAB, (rows, rng.randint(3, 40)))}


def pictures(rng: Rng, sides: Sequence[int], rows: int = 4, name: str = "pixel_values", **others: Any) -> Batch:
    """Images of one of these sides, in a batch of any size."""
    num = rng.randint(1, rows)
    batch = {name: torch.randn(num, 3, rng.choice(sides), rng.choice(sides))}
    return batch | {name: make(num) for name, make in others.items()}


def class_labels(num: int) -> Tensor:
    return torch.randint(0, 5, (num,))


def with_pictures(rng: Rng) -> Batch:
    """Text with one image in each sample, or none in all."""
    length, rows = rng.randint(12, 48), rng.randint(1, 4)
    batch = cases.text([length] * rows, length, VOCAB)
    batch["input_ids"].clamp_(min=6)
    if rng.random() < 0.3:
        return batch
    batch["input_ids"][:, 2:6] = 3
    return {**batch, "pixel_values": torch.randn(rows, 3, 16, 16)}


def with_grids(rng: Rng) -> Batch:
    """Text with one image of its own size in each sample."""
    length, rows = rng.randint(24, 48), rng.randint(1, 3)
    grids = [(1, 2 * rng.randint(1, 4), 2 * rng.randint(1, 4)) for _ in range(rows)]
    batch = cases.text([length] * rows, length, VOCAB)
    batch["input_ids"].clamp_(min=6)
    for row, (_, height, width) in enumerate(grids):
        batch["input_ids"][row, 1] = 4
        batch["input_ids"][row, 2 : 2 + height * width // 4] = 3
    patches = sum(h * w for _, h, w in grids)
    return {
        **batch,
        "mm_token_type_ids": (batch["input_ids"] == 3).int(),
        "pixel_values": torch.randn(patches, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor(grids),
    }


def text_and_pictures(rng: Rng) -> Batch:
    rows, length = rng.randint(2, 5), rng.randint(5, 30)
    ids = torch.randint(3, VOCAB, (rows, length))
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": torch.randn(rows, 3, 32, 32)}


class Loss(nn.Module):
    """The mean square of what a plain model gives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        out: Tensor = self.model(x, **others)
        return out.square().mean()


def cnn(strides: Sequence[int] = (2, 2)) -> nn.Module:
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        *(nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, stride=stride, padding=1)) for stride in strides),
    ]
    return Loss(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))


class Unet(nn.Module):
    """Down and up again, with attention over all positions at the bottom if asked, and to a text."""

    def __init__(self, *, attends: bool, width_of_text: int = 0) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True) if attends else None
        self.cross = (
            nn.MultiheadAttention(16, 2, kdim=width_of_text, vdim=width_of_text, batch_first=True)
            if width_of_text
            else None
        )
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ConvTranspose2d(8, 3, 2, stride=2)

    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        low = F.relu(self.bottom(F.relu(self.down(x))))
        rows = low.flatten(2).transpose(1, 2)
        if self.attention is not None:
            rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        if self.cross is not None and text is not None:
            rows = rows + self.cross(rows, text, text, need_weights=False)[0]
        low = rows.transpose(1, 2).unflatten(2, low.shape[2:])
        return self.out(F.relu(self.up(low)))


class Detr(nn.Module):
    """A convolutional body, attention over its positions, and queries that look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 2, stride=2))
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.queries, self.head = nn.Parameter(torch.randn(10, 16)), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.body(x).flatten(2).transpose(1, 2)
        out: Tensor = self.head(self.transformer(rows, self.queries.expand(len(x), -1, -1)))
        return out


class Gnn(nn.Module):
    """Messages along edges, each through a layer of its own, and an update of the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.out = nn.Linear(32, 24), nn.Linear(40, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for _ in range(2):
            source, target = edge_index
            message = F.relu(self.message(torch.cat([x[source], x[target]], 1)))
            gathered = x.new_zeros(len(x), 24).index_add(0, target, message)
            x = F.relu(self.update(torch.cat([x, gathered], 1)))
        out: Tensor = self.out(x)
        return out


def graphs(rng: Rng) -> Batch:
    """One of twelve graphs of a data set, each with its own numbers of nodes and edges."""
    place = rng.randrange(12)
    nodes, edges = 20 + 7 * place, 60 + (53 * place) % 240
    return {"x": torch.randn(nodes, 16), "edge_index": torch.randint(0, nodes, (2, edges))}


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Sequential(nn.Conv1d(3, 16, 1), nn.ReLU(), nn.Conv1d(16, 32, 1))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rows(x).amax(2))
        return out


class Dlrm(nn.Module):
    """Looked-up categories and dense numbers, and the products of all pairs of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(4))
        self.dense, self.top = nn.Linear(6, 8), nn.Linear(8 + 25, 1)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        low = F.relu(self.dense(dense))
        rows = torch.stack([low, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        out: Tensor = self.top(torch.cat([low, (rows @ rows.transpose(1, 2)).flatten(1)], 1))
        return out.square().mean()


class Patched(nn.Module):
    """A time series cut into patches, with attention over those (PatchTST)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unfold(2, 8, 8).flatten(0, 1)
        out: Tensor = self.head(self.layer(self.embed(rows)))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCAB, 16), nn.LSTM(16, 24, 2, batch_first=True)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(self.embed(input_ids))[0])
        return out.square().mean()


class Towers(nn.Module):
    """Queries and documents of their own lengths through one encoder each, and all pairs of their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.one, self.two = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))

    def forward(self, query_ids: Tensor, document_ids: Tensor) -> Tensor:
        one, two = self.one(self.embed(query_ids)).mean(1), self.two(self.embed(document_ids)).mean(1)
        return (one @ two.t()).square().mean()


class Dropping(nn.Module):
    """Layers that are skipped at random (stochastic depth): by the step's number, so that a twin skips the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        dice = Rng(self.calls)
        kept = dice.sample(range(6), dice.randint(1, 5))
        for place in [0, *kept]:
            x = F.relu(self.layers[place](x))
        return x.square().mean()


class Mixer(nn.Module):
    """All pairs of positions are mixed by a fixed matrix, of which a shorter text takes a corner (MLP-Mixer, FNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCAB, 16), nn.Parameter(torch.randn(64, 64))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        rows = self.embed(input_ids)
        rows = rows + self.mix[:length, :length] @ rows
        out: Tensor = self.head(rows)
        return out.square().mean()


class Blocked(nn.Module):
    """Attention within blocks of 16, to which the text is filled up (Longformer, BigBird)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = F.pad(self.embed(input_ids), (0, 0, 0, -input_ids.shape[1] % 16))
        blocks = self.layer(rows.unflatten(1, (-1, 16)).flatten(0, 1))
        out: Tensor = self.head(blocks.unflatten(0, (len(input_ids), -1)).flatten(1, 2)[:, : input_ids.shape[1]])
        return out.square().mean()


class Pixels(nn.Module):
    """A ViT whose positions are interpolated to the size of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.positions = nn.Conv2d(3, 16, 8, stride=8), nn.Parameter(torch.randn(1, 16, 4, 4))
        self.layer, self.head = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        low = self.cut(x)
        rows = (low + F.interpolate(self.positions, low.shape[2:])).flatten(2).transpose(1, 2)
        out: Tensor = self.head(self.layer(rows).mean(1))
        return out


class Reduced(nn.Module):
    """Attention to keys of which a strided convolution has made fewer (PVT)."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.fewer = nn.Conv2d(3, 16, 4, stride=4), nn.Conv2d(16, 16, 4, stride=4)
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        low = self.cut(x)
        rows, keys = low.flatten(2).transpose(1, 2), self.fewer(low).flatten(2).transpose(1, 2)
        out: Tensor = self.head((rows + self.attention(rows, keys, keys, need_weights=False)[0]).mean(1))
        return out


class Residual(nn.Module):
    """Two stages of a ResNet, or of a ConvNext with depthwise convolutions."""

    def __init__(self, *, depthwise: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4) if depthwise else nn.Conv2d(3, 8, 7, stride=2, padding=3)
        kernel = 7 if depthwise else 3
        self.one = nn.Conv2d(8, 8, kernel, padding=kernel // 2, groups=8 if depthwise else 1)
        self.down = nn.Conv2d(8, 16, 2, stride=2) if depthwise else nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.two = nn.Conv2d(16, 16, kernel, padding=kernel // 2, groups=16 if depthwise else 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = self.down(x + F.relu(self.one(x)))
        out: Tensor = self.head((x + F.relu(self.two(x))).mean((2, 3)))
        return out


class Waves(nn.Module):
    """A recording through strided convolutions, then attention over what is left of it (wav2vec 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 8, 10, stride=5), nn.GELU(), nn.Conv1d(8, 16, 4, stride=2))
        self.layer, self.head = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.body(x).transpose(1, 2)))
        return out


def square_sides(*sides: int) -> Callable[[Rng], Batch]:
    def batch(rng: Rng) -> Batch:
        side = rng.choice(sides)
        return {"x": torch.randn(rng.randint(1, 4), 3, side, side)}

    return batch


def ids_of(longest: int = 64) -> Callable[[Rng], Batch]:
    """Texts of one length, a multiple of 8, as where a loader pads to such."""
    return lambda rng: {"input_ids": torch.randint(3, VOCAB, (rng.randint(1, 4), 8 * rng.randint(1, longest // 8)))}


def floats(*sizes: Any) -> Callable[[Rng], Batch]:
    """Numbers of these sizes; a pair is a range, of multiples of 8 or 100 where it begins with one."""

    def size(rng: Rng, least: int, most: int) -> int:
        step = next((step for step in (100, 8) if least % step == 0), 1)
        return rng.randrange(least, most + 1, step)

    return lambda rng: {"x": torch.randn(*(size(rng, *n) if isinstance(n, tuple) else n for n in sizes))}


def two_texts(rng: Rng) -> Batch:
    rows = rng.randint(2, 5)
    return {name: torch.randint(3, VOCAB, (rows, 8 * rng.randint(1, 3))) for name in ("query_ids", "document_ids")}


def drawn_after_text(rng: Rng, lengths: Sequence[int]) -> Batch:
    rows, side = rng.randint(1, 3), rng.choice((16, 24, 32))
    return {"x": torch.randn(rows, 3, side, side), "text": torch.randn(rows, rng.choice(lengths), 12)}


def categories(rng: Rng) -> Batch:
    rows = rng.randint(4, 64)
    return {"dense": torch.randn(rows, 6), "categories": torch.randint(0, 50, (rows, 4))}


IMAGES = {"labels": class_labels}
FAMILIES: dict[str, Family] = {
    "llama padded": Family(partial(hugging_face, "llama", SMALL), padded),
    "llama left padded": Family(partial(hugging_face, "llama", SMALL), partial(padded, left=True)),
    "llama eager": Family(partial(hugging_face, "llama", SMALL, attn_implementation="eager"), padded),
    "llama packed": Family(partial(hugging_face, "llama", SMALL), packed),
    "gemma3": Family(partial(hugging_face, "gemma3_text", SMALL | {"sliding_window": 16, "head_dim": 16}), padded),
    "mistral": Family(partial(hugging_face, "mistral", SMALL | {"sliding_window": 16}), padded),
    "bert": Family(
        partial(hugging_face, "bert", ENCODER | {"vocab_size": VOCAB}, "SequenceClassification"),
        partial(padded, labels=2),
    ),
    "modernbert": Family(partial(hugging_face, "modernbert", SMALL | {"local_attention": 16}, "MaskedLM"), padded),
    "qwen3-moe": Family(partial(hugging_face, "qwen3_moe", SMALL | MOE), padded),
    "deepseek-v3": Family(partial(hugging_face, "deepseek_v3", SMALL | DEEPSEEK), padded),
    "t5": Family(partial(hugging_face, "t5", SEQ2SEQ, "Seq2SeqLM"), translated),
    "bart": Family(partial(hugging_face, "bart", SEQ2SEQ, "Seq2SeqLM"), partial(translated, has_masks=False)),
    "whisper": Family(partial(hugging_face, "whisper", SPEECH, "SpeechSeq2Seq"), heard),
    "llava, some text only": Family(partial(hugging_face, "llava", LLAVA, "ImageTextToText"), with_pictures),
    "qwen2-vl": Family(partial(hugging_face, "qwen2_vl", QWEN_VL, "ImageTextToText"), with_grids),
    "mamba": Family(partial(hugging_face, "mamba", MAMBA), partial(unpadded, longest=24)),
    "mamba2": Family(partial(hugging_face, "mamba2", MAMBA), unpadded),
    "bamba": Family(partial(hugging_face, "bamba", SMALL | BAMBA), unpadded),
    "qwen3-next": Family(partial(hugging_face, "qwen3_next", SMALL | LINEAR), unpadded),
    "cnn odd sizes": Family(cnn, square_sides(17, 19, 22, 25, 27, 32)),
    "resnet": Family(lambda: Loss(Residual()), square_sides(*range(32, 65, 4))),
    "convnext": Family(lambda: Loss(Residual(depthwise=True)), square_sides(*range(32, 65, 4))),
    "vit interpolated": Family(lambda: Loss(Pixels()), square_sides(*range(32, 97, 8))),
    "u-net": Family(lambda: Loss(Unet(attends=False)), square_sides(16, 24, 32, 48)),
    "u-net with attention": Family(lambda: Loss(Unet(attends=True)), square_sides(16, 24, 32, 48)),
    "pointnet": Family(lambda: Loss(PointNet()), floats((1, 6), 3, (50, 200))),
    "dlrm": Family(Dlrm, categories),
    "patchtst": Family(lambda: Loss(Patched()), floats((1, 6), 3, (40, 88))),
    "clip": Family(
        lambda: Contrasting(hugging_face("clip", CLIP, "")),
        text_and_pictures,
    ),
    "swin": Family(
        partial(hugging_face, "swin", SWIN, "ImageClassification"),
        partial(pictures, sides=(32, 40, 48), rows=2, **IMAGES),
    ),
    "segformer": Family(
        partial(hugging_face, "segformer", SEGFORMER, "ImageClassification"),
        partial(pictures, sides=(32, 48, 64), rows=2, **IMAGES),
    ),
    "pvt": Family(lambda: Loss(Reduced()), square_sides(32, 48, 64)),
    "detr": Family(lambda: Loss(Detr()), partial(pictures, sides=(32, 40, 48), rows=3, name="x")),
    "diffusion u-net, cross attention": Family(
        lambda: Loss(Unet(attends=True, width_of_text=12)), partial(drawn_after_text, lengths=(7, 12))
    ),
    "gnn": Family(lambda: Loss(Gnn()), graphs),
    "gpt2": Family(
        partial(hugging_face, "gpt2", {"n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": VOCAB}), padded
    ),
    "lstm": Family(Recurrent, ids_of()),
    "dual encoder": Family(Towers, two_texts),
    "stochastic depth": Family(Dropping, floats((2, 9), 32)),
    "mixer": Family(Mixer, ids_of()),
    "attention in blocks": Family(Blocked, ids_of()),
    "wav2vec": Family(lambda: Loss(Waves()), floats((1, 4), 1, (400, 900))),
    "llama, accumulated": Family(partial(hugging_face, "llama", SMALL), padded),
    "mlp": Family(lambda: Loss(nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 3))), floats((1, 64), 24)),
    "conv1d with a transposed one": Family(
        lambda: Loss(nn.Sequential(nn.Conv1d(4, 8, 4, stride=2), nn.ReLU(), nn.ConvTranspose1d(8, 4, 4, stride=2))),
        floats((1, 5), 4, (40, 90)),
    ),
}
ACCUMULATED = {"llama, accumulated": 2}
"""Micro-batches of a step."""


class Charged(Schedule):
    """Charges an observed step as one of a large model."""

    def _needed_s(self, own_s: float) -> float:
        return LONGER * (self._num_measured + 1) * statistics.median(self._typical_s or [0.0])


class Contrasting(nn.Module):
    """CLIP with its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True).loss
        return loss


def backward(model: nn.Module, batches: Sequence[Batch]) -> None:
    """One step's passes."""
    for batch in batches:
        output = model(**batch)
        (output if isinstance(output, Tensor) else output.loss).backward()


def judge(name: str, num_steps: int, folder: Path) -> dict[str, Any]:
    """Train one family under the monitor, and compare every step with its twin's."""
    torch.manual_seed(0)
    family, rng = FAMILIES[name], Rng(name)
    model = family.build()
    twin = deepcopy(model)
    steps = [[family.batch(rng) for _ in range(ACCUMULATED.get(name, 1))] for _ in range(num_steps)]
    own = {
        "sinks": [], "report": False, "profile_steps": False, "overhead_budget": BUDGET, "flush_every": 1,
        "peak_flop_per_s": 1e12,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = watch(model, optimizer, output_dir=folder, config={"monitoring": own})
    for batches in steps:
        backward(model, batches)
        optimizer.step()
        optimizer.zero_grad()
    monitor.finish_training()
    run = load_run(folder)
    found = run.column("perf/model_flop")
    doubts = [0.0 if doubt != doubt else doubt for doubt in run.work.get(DOUBT, [math.nan] * len(found))]
    truth = []
    for batches in steps:
        with observe(twin) as step:
            backward(twin, batches)
        truth.append(step.result().model_flop)
    errors = [own / true - 1 for own, true in zip(found, truth, strict=True)]
    is_marked = [doubt > 0 or error != error for doubt, error in zip(doubts, errors, strict=True)]
    known = [place for place, marked in enumerate(is_marked) if not marked]
    late = is_marked[min(MARKED_FROM, num_steps // 2) :]
    total = sum(truth[place] for place in known)
    return {
        "largest error of known steps": max((abs(errors[place]) for place in known), default=None),
        "total of known steps": sum(found[place] for place in known) / total - 1 if total else None,
        "marked": sum(is_marked),
        "marked late": sum(late) / len(late),
        "counted": sum(doubt == 0 for doubt in doubts),
        "largest error of marked steps": max(
            (abs(e) for e, m in zip(errors, is_marked, strict=True) if m), default=None
        ),
        "observed": sum("observed" in marks for marks in run.marks.values()),
        "told": [event["message"] for event in run.named("warning")],
        "num_shapes": len({tuple(sorted((n, *t.shape) for n, t in b.items())) for step in steps for b in step}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    parser.add_argument("--quick", action="store_true", help="a few families and steps, for CI")
    add_record_option(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    effort.Schedule = Charged  # type: ignore[misc]
    names = options.family or (QUICK if options.quick else list(FAMILIES))
    num_steps = min(options.steps, 60) if options.quick else options.steps
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = row = judge(name, num_steps, Path(folder))
        known, late = _percent(row["largest error of known steps"]), _percent(row["marked late"], 0)
        print(f"{name}: known steps within {known}, {late} marked", file=sys.stderr, flush=True)
    console, table = Console(width=140), Table(title=f"{num_steps} steps of sizes that vary")
    for heading in ("family", "shapes", "observed", "largest error", "total", "marked", "of the late", "their error"):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for name, row in found.items():
        table.add_row(
            name, str(row["num_shapes"]), str(row["observed"]), _percent(row["largest error of known steps"]),
            _percent(row["total of known steps"]), str(row["marked"]), _percent(row["marked late"], 0),
            _percent(row["largest error of marked steps"], 0),
        )  # fmt: skip
    console.print(table)
    errors = [abs(row["largest error of known steps"] or 0) for row in found.values()]
    totals = [abs(row["total of known steps"] or 0) for row in found.values()]
    marked_late = sum(row["marked late"] for row in found.values()) / len(found)
    summary = {
        "families": len(found),
        "largest_error_of_known_steps": max(errors),
        "largest_error_of_known_totals": max(totals),
        "marked_late": marked_late,
        "passes": max(errors) <= WITHIN and max(totals) <= TOTAL_WITHIN and marked_late <= MARKED_AT_MOST,
    }
    finish("prediction", BENCHMARK_VERSION, {"steps": num_steps, **summary, "rows": found}, options.record)


def _percent(share: float | None, digits: int = 2) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


if __name__ == "__main__":
    main()
