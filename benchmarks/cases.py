"""How is a model for a benchmark row built and stepped? From numbers alone: random weights, nothing downloaded.

Each library is imported only by the cases that need it, so that the plain torch rows run without transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Batch = dict[str, Tensor]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model ready to be counted."""

    model: nn.Module
    """In training mode; for a compiled case, what `torch.compile` returned."""
    batch: Batch
    """Keyword arguments of the model's forward."""
    forward: Callable[[], Any]
    """The model called with the batch."""
    step: Callable[[], Any]
    """Forward and backward of one training step, or the forward alone where a row cannot train."""


def text(lengths: Sequence[int], padded_to: int, vocab_size: int) -> Batch:
    """Random tokens, right-padded; a mask is passed only where there is padding."""
    ids = torch.randint(3, vocab_size, (len(lengths), padded_to))
    mask = torch.arange(padded_to) < torch.tensor(lengths)[:, None]
    batch = {"input_ids": ids * mask, "labels": ids.masked_fill(~mask, -100)}
    return batch if mask.all() else {**batch, "attention_mask": mask.long()}


def packed_text(documents: Sequence[Sequence[int]], padded_to: int, vocab_size: int) -> Batch:
    """Documents end to end; positions that start anew tell transformers where."""
    positions = [torch.cat([torch.arange(n) for n in row]) for row in documents]
    whole = text([padded_to] * len(documents), padded_to, vocab_size)
    return {**whole, "position_ids": torch.stack(positions)}


def labelled_text(lengths: Sequence[int], padded_to: int, vocab_size: int, num_labels: int) -> Batch:
    return {**text(lengths, padded_to, vocab_size), "labels": torch.randint(0, num_labels, (len(lengths),))}


def labelled_images(num_images: int, size: int, num_labels: int) -> Batch:
    return {
        "pixel_values": torch.randn(num_images, 3, size, size),
        "labels": torch.randint(0, num_labels, (num_images,)),
    }


def text_with_images(
    lengths: Sequence[int], padded_to: int, vocab_size: int, grids: Sequence[tuple[int, int, int]], patch_values: int
) -> Batch:
    """One image of its own size in each sample; token 1 stands for the four patches that are merged into one."""
    batch = text(lengths, padded_to, vocab_size)
    for row, (frames, height, width) in enumerate(grids):
        batch["input_ids"][row, 2 : 2 + frames * height * width // 4] = 1
    num_patches = sum(frames * height * width for frames, height, width in grids)
    return {
        **batch,
        "mm_token_type_ids": (batch["input_ids"] == 1).int(),
        "pixel_values": torch.randn(num_patches, patch_values),
        "image_grid_thw": torch.tensor(grids),
    }


def training_case(model: nn.Module, batch: Batch, *, within: Context = nullcontext, is_compiled: bool = False) -> Case:
    """A step that calls the model, `within` a context, and walks back from its loss; compiled ones come warm."""
    called: Any = torch.compile(model) if is_compiled else model

    def forward() -> Tensor:
        with within():
            output = called(**batch)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        return loss

    def step() -> None:
        model.zero_grad()
        torch.autograd.backward(forward())

    for _ in range(2 if is_compiled else 0):
        step()
    return Case(model=called, batch=batch, forward=forward, step=step)


def plain_case(make_model: Callable[[], nn.Module], make_batch: Callable[[], Batch]) -> Case:
    torch.manual_seed(0)
    return training_case(make_model(), make_batch())


def transformers_case(
    model_type: str,
    numbers: dict[str, Any],
    make_batch: Callable[[], Batch],
    *,
    head: str = "CausalLM",
    attention: str = "sdpa",
    checkpointing: str | None = None,
    lora_rank: int | None = None,
    within: Context = nullcontext,
    is_compiled: bool = False,
    **kwargs: Any,
) -> Case:
    """A transformers model by its type and its config's numbers.

    Args:
        head: What follows `AutoModelFor` in the class that builds it.
        checkpointing: None, "reentrant" or "non_reentrant".
        lora_rank: Adapters of this rank on q_proj and v_proj, all else frozen.
        kwargs: Handed to `from_config` (dtype, experts_implementation).
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **numbers)
    config.get_text_config().use_cache = False  # a key-value cache hides packed documents from the mask
    factory = getattr(transformers, f"AutoModelFor{head}")
    model = factory.from_config(config, attn_implementation=attention, **kwargs).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    if lora_rank:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=lora_rank, target_modules=["q_proj", "v_proj"]))
    return training_case(model, make_batch(), within=within, is_compiled=is_compiled)


def math_attention() -> AbstractContextManager[Any]:
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


class Attention(nn.Module):
    """Self-attention: causal by "sdpa", by "einsum" or by "flex", or of "all" by all."""

    def __init__(self, hidden: int, num_heads: int, kind: str) -> None:
        super().__init__()
        self.num_heads, self.attend = num_heads, _KINDS[kind]
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return attended


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    result = flex_attention(q, k, v, block_mask=_past_mask(q.shape[-2]))
    assert isinstance(result, Tensor)
    return result


def _all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


_KINDS = {"sdpa": _sdpa, "einsum": _einsum, "flex": _flex, "all": _all}


@cache
def _past_mask(length: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def is_past(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(is_past, None, None, length, length, device="cpu", BLOCK_SIZE=16)


class Gpt(nn.Module):
    """GPT-2's shape in plain torch, with its loss."""

    def __init__(self, c: Any, length: int, kind: str) -> None:
        super().__init__()
        width = c.n_embd
        self.tokens, self.positions = nn.Embedding(c.vocab_size, width), nn.Embedding(length, width)
        self.attentions = nn.ModuleList(Attention(width, c.n_head, kind) for _ in range(c.n_layer))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(c.n_layer)
        )
        self.lm_head = nn.Linear(width, c.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions.weight
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())


class ConvNet(nn.Module):
    """Convolutions with ReLU between, a mean over positions, a linear head, with its loss."""

    def __init__(self, make_convs: Callable[[], Sequence[nn.Module]], width: int, num_labels: int) -> None:
        super().__init__()
        self.convs, self.head = nn.ModuleList(make_convs()), nn.Linear(width, num_labels)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = pixel_values
        for conv in self.convs:
            x = conv(x).relu()
        return F.cross_entropy(self.head(x.flatten(2).mean(-1)), labels)


class LstmModel(nn.Module):
    """A language model on nn.LSTM, with its loss."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.lstm = nn.LSTM(c.hidden_size, c.hidden_size, c.num_layers, batch_first=True)
        self.head = nn.Linear(c.hidden_size, c.vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, _ = self.lstm(self.tokens(input_ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class MtpGpt(Gpt):
    """With one module for the token after next (DeepSeek-V3, arXiv:2412.19437 section 2.2): a layer over the trunk's
    state and the embedding of the next token, joined by a projection, and the trunk's own head."""

    def __init__(self, c: Any, length: int) -> None:
        super().__init__(c, length, "sdpa")
        width = c.n_embd
        self.join, self.attention = nn.Linear(2 * width, width, bias=False), Attention(width, c.n_head, "sdpa")
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions.weight
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        ahead = self.join(torch.cat([x[:, :-1], self.tokens(input_ids[:, 1:])], -1))
        ahead = ahead + self.attention(ahead)
        ahead = ahead + self.mlp(ahead)
        losses = [
            F.cross_entropy(self.lm_head(state).flatten(0, 1), ids.flatten())
            for state, ids in ((x, labels), (ahead, labels[:, 1:]))
        ]
        return torch.stack(losses).sum()


class Dit(nn.Module):
    """A diffusion transformer (arXiv:2212.09748) whose blocks are scaled and shifted by what is known of the image."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        width = c.hidden_size
        self.patches = nn.Conv2d(c.num_channels, width, c.patch_size, c.patch_size)
        self.time = nn.Sequential(nn.Linear(c.time_size, width), nn.SiLU(), nn.Linear(width, width))
        self.kind = nn.Embedding(c.num_labels, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "modulation": nn.Linear(width, 6 * width),
                    "attention": Attention(width, c.num_attention_heads, "all"),
                    "mlp": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                }
            )
            for _ in range(c.num_hidden_layers)
        )
        self.modulation = nn.Linear(width, 2 * width)
        self.noise = nn.Linear(width, c.num_channels * c.patch_size**2)

    def forward(self, pixel_values: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        known = F.silu(self.time(time) + self.kind(labels))
        for block in self.blocks:
            shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = block["modulation"](known)[:, None].chunk(6, -1)  # type: ignore[index]
            x = x + gate * block["attention"](x * (1 + scale) + shift)  # type: ignore[index]
            x = x + mlp_gate * block["mlp"](x * (1 + mlp_scale) + mlp_shift)  # type: ignore[index]
        shift, scale = self.modulation(known)[:, None].chunk(2, -1)
        return self.noise(x * (1 + scale) + shift).square().mean()


class _FrozenProduct(torch.autograd.Function):
    """As the 4-bit layers of bitsandbytes: the weight is made when it is needed, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight, None


class Quantized(nn.Module):
    """Blocks of two frozen layers with adapters, each block checkpointed (QLoRA, arXiv:2305.14314)."""

    def __init__(self, num_blocks: int, width: int, inner: int, rank: int, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        shapes = [(width, inner), (inner, width)] * num_blocks
        self.frozen = nn.ParameterList(nn.Parameter(torch.randn(o, i) / i**0.5, requires_grad=False) for i, o in shapes)
        self.down = nn.ModuleList(nn.Linear(i, rank, bias=False) for i, _ in shapes)
        self.up = nn.ModuleList(nn.Linear(rank, o, bias=False) for _, o in shapes)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        def block(x: Tensor, first: int) -> Tensor:
            for i in (first, first + 1):
                x = F.gelu(_FrozenProduct.apply(x, self.frozen[i]) + self.up[i](self.down[i](x)))  # type: ignore[no-untyped-call]
            return x

        for first in range(0, len(self.frozen), 2):
            x = x + checkpoint(block, x, first, use_reentrant=self.use_reentrant)
        return x.square().mean()


class Unpadding(nn.Module):
    """An encoder that drops padding before its layers; samples attend within themselves (ModernBERT)."""

    def __init__(self, c: Any, vocab_size: int) -> None:
        super().__init__()
        width = c.hidden_size
        self.num_heads, self.tokens = c.num_attention_heads, nn.Embedding(vocab_size, width)
        self.qkvs = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(c.num_hidden_layers))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(c.num_hidden_layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, c.intermediate_size), nn.GELU(), nn.Linear(c.intermediate_size, width))
            for _ in range(c.num_hidden_layers)
        )
        self.head = nn.Linear(width, c.num_labels)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
        is_real = attention_mask.bool()
        sample = torch.arange(len(input_ids))[:, None].expand_as(input_ids)[is_real]
        mask = sample[:, None] == sample
        x = self.tokens(input_ids)[is_real]
        for qkv, out, mlp in zip(self.qkvs, self.outs, self.mlps, strict=True):
            query, key, value = qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)[:, None]
            x = x + out(F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0].transpose(0, 1).flatten(1))
            x = x + mlp(x)
        return F.cross_entropy(self.head(x), labels[is_real] % self.head.out_features)


def text_with_pictures(lengths: Sequence[int], padded_to: int, vocab_size: int, image_size: int, tokens: int) -> Batch:
    """One image in each sample; token 1 stands for a patch of it."""
    batch = text(lengths, padded_to, vocab_size)
    batch["input_ids"][:, 2 : 2 + tokens] = 1
    return {**batch, "pixel_values": torch.randn(len(lengths), 3, image_size, image_size)}


def noisy_images(num_images: int, size: int, c: Any) -> Batch:
    return {
        "pixel_values": torch.randn(num_images, c.num_channels, size, size),
        "time": torch.randn(num_images, c.time_size),
        "labels": torch.randint(0, c.num_labels, (num_images,)),
    }


def flex_case(num_samples: int, length: int, hidden: int, num_heads: int) -> Case:
    """flex_attention has no backward on a CPU: nothing is trained, a step is a forward, and it comes warm."""
    torch.manual_seed(0)
    model = Attention(hidden, num_heads, "flex").requires_grad_(False)
    batch = {"x": torch.randn(num_samples, length, hidden)}
    model(**batch)
    return Case(model=model, batch=batch, forward=lambda: model(**batch), step=lambda: model(**batch))


def gradient_penalty_case(num_samples: int, widths: Sequence[int]) -> Case:
    """A critic whose loss pulls the norm of its input gradient towards 1 (WGAN-GP)."""
    torch.manual_seed(0)
    layers = [layer for shape in pairwise(widths) for layer in (nn.Linear(*shape), nn.Softplus())]
    model, x = nn.Sequential(*layers[:-1]), torch.randn(num_samples, widths[0], requires_grad=True)

    def step() -> None:
        model.zero_grad()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        (score.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()

    return Case(model=model, batch={"input": x}, forward=lambda: model(x), step=step)
