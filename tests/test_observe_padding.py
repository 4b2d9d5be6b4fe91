"""Padding in an observed step: of an encoder and of a decoder apart, and in masks of every kind that models take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopmeter.flops.count import count_flops
from flopmeter.flops.estimate import estimate_flops
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.observe import observe

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, FFN, LAYERS, VOCABULARY = 16, 2, 24, 2, 20
FULL = [8, 8, 8]


def mask(lengths: Sequence[int], padded_to: int) -> torch.Tensor:
    return (torch.arange(padded_to) < torch.tensor(lengths)[:, None]).long()


def ids(samples: int, length: int) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (samples, length))


def t5(attention: str) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=FFN, num_layers=LAYERS, num_heads=HEADS,
        decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def bart(attention: str) -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=FFN,
        decoder_ffn_dim=FFN, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, max_position_embeddings=16,
        pad_token_id=1, decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    model: nn.Module = transformers.BartForConditionalGeneration(config)
    return model


def needed(read: Sequence[int], written: Sequence[int]) -> int:
    """Forward FLOPs, sample by sample: n tokens are read and d written."""
    layers = head = 0
    for n, d in zip(read, written, strict=True):
        encoder = n * (4 * WIDTH * WIDTH + 2 * WIDTH * FFN) + 2 * WIDTH * n * n
        own = d * (4 * WIDTH * WIDTH + 2 * WIDTH * FFN) + 2 * WIDTH * d * (d + 1) // 2
        # Queries and the output are the decoder's, keys and values are made of what the encoder read.
        cross = d * 2 * WIDTH * WIDTH + n * 2 * WIDTH * WIDTH + 2 * WIDTH * d * n
        layers += encoder + own + cross
        head += d * WIDTH * VOCABULARY
    return 2 * (LAYERS * layers + head)


def batch(read: Sequence[int], written: Sequence[int], longest: int) -> dict[str, torch.Tensor]:
    """Masks are given only where there is padding, as a tokenizer's users do."""
    inputs = {"input_ids": ids(len(read), max(FULL)), "labels": ids(len(written), longest)}
    if set(read) != {max(FULL)}:
        inputs["attention_mask"] = mask(read, max(FULL))
    if set(written) != {longest}:
        inputs["decoder_attention_mask"] = mask(written, longest)
    return inputs


def trained(model: nn.Module, **inputs: Any) -> FlopCount:
    with observe(model) as step:
        model(**inputs).loss.backward()
    return step.result()


LOADS = {
    "no padding": (FULL, FULL, 8),
    "the encoder's": ([8, 4, 1], FULL, 8),
    "the decoder's": (FULL, [8, 5, 2], 8),
    "both": ([8, 4, 1], [3, 8, 5], 8),
    "another length": ([8, 4, 1], [3, 6, 5], 6),
}


@pytest.mark.parametrize("build", [t5, bart])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("load", LOADS)
def test_encoder_and_decoder_have_a_padding_of_their_own(build: Any, attention: str, load: str) -> None:
    read, written, longest = LOADS[load]
    model, inputs = build(attention), batch(read, written, longest)
    forward = needed(read, written)
    count = trained(model, **inputs)
    assert count.forward_flop == pytest.approx(forward)
    assert count.backward_flop == pytest.approx(2 * forward)
    assert estimate_flops(model, inputs).model_flop == pytest.approx(3 * forward)


@pytest.mark.parametrize("build", [t5, bart])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("load", LOADS)
def test_a_mask_is_known_where_it_is_added_to_a_bias_without_values(build: Any, attention: str, load: str) -> None:
    read, written, longest = LOADS[load]
    count = count_flops(build(attention), batch(read, written, longest))
    assert count.model_flop == pytest.approx(3 * needed(read, written))
    assert count.left_out == ()


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
def test_a_checkpointed_layer_keeps_its_padding_when_it_runs_again(kind: str) -> None:
    read, written, longest = LOADS["both"]
    model = t5("sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    count = trained(model.train(), use_cache=False, **batch(read, written, longest))
    assert count.model_flop == pytest.approx(3 * needed(read, written))
    # All but the head is run again: the dropout at the end of a layer needs everything before it.
    head = 2 * sum(written) * WIDTH * VOCABULARY
    assert count.recompute_flop == pytest.approx(needed(read, written) - head)


def test_a_projection_of_the_memory_may_have_parts() -> None:
    model = t5("sdpa")
    for block in model.decoder.block:
        attention = block.layer[1].EncDecAttention
        attention.k, attention.v = nn.Sequential(attention.k), nn.Sequential(attention.v)
    read, written, longest = LOADS["both"]
    assert trained(model, **batch(read, written, longest)).model_flop == pytest.approx(3 * needed(read, written))


def test_a_decoder_alone_is_told_its_own_padding_and_the_memorys() -> None:
    model = t5("sdpa").decoder
    read, written, longest = LOADS["both"]
    states = torch.randn(len(read), max(FULL), WIDTH)
    inputs = {"encoder_hidden_states": states, "encoder_attention_mask": mask(read, max(FULL))}
    with observe(model) as step:
        with torch.no_grad():
            model(input_ids=ids(len(written), longest), **inputs)
        out = model(input_ids=ids(len(written), longest), attention_mask=mask(written, longest), **inputs)
        out.last_hidden_state.sum().backward()
    # Without the head and the encoder: with nothing read, an encoder-decoder does the decoder's own part alone.
    own = needed([0] * len(read), written) - 2 * sum(written) * WIDTH * VOCABULARY
    keys_and_values = 2 * LAYERS * sum(read) * 2 * WIDTH * WIDTH
    cross = 2 * LAYERS * 2 * WIDTH * sum(n * d for n, d in zip(read, written, strict=True))
    assert step.result().forward_flop == pytest.approx(own + keys_and_values + cross)


def test_evaluation_with_a_decoder_is_no_training() -> None:
    model, inputs = t5("sdpa"), batch(*LOADS["both"])
    with observe(model) as step:
        with torch.no_grad():
            model(**inputs)
        model(**inputs).loss.backward()
    assert step.result().model_flop == pytest.approx(3 * needed(*LOADS["both"][:2]))


class Tagger(nn.Module):
    """A layer on every token, and attention that the mask is no part of."""

    def __init__(self, attention: str = "none") -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.attention = attention

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embedding(input_ids))
        if self.attention in ("full", "causal"):
            heads = x[:, None]
            return F.scaled_dot_product_attention(heads, heads, heads, is_causal=self.attention == "causal").sum()
        if self.attention == "products":
            return (x.bmm(x.transpose(1, 2)).softmax(-1).bmm(x)).sum()
        return x.sum()


MASKS = {
    "integers": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    "booleans": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool(),
    "floats": torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]]),
    "half": torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bfloat16),
    "packed sequences": torch.tensor([[1, 1, 2, 2], [1, 2, 0, 0]]),
    "packed sequences in floats": torch.tensor([[1.0, 1, 2, 2], [1, 2, 0, 0]]),
    "added to scores": torch.tensor([[0.0, 0, 0, 0], [0, 0, -torch.inf, -torch.inf]]),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_says_what_is_padding_in_any_dtype(kind: str) -> None:
    model = Tagger()
    with observe(model) as step:
        model(torch.zeros(2, 4, dtype=torch.long), attention_mask=MASKS[kind]).backward()
    six_tokens = 6 * 2 * WIDTH * WIDTH
    assert step.result("exact").forward_flop == pytest.approx(six_tokens)
    assert step.result("exact").backward_flop == pytest.approx(2 * six_tokens)
    assert step.result("full").forward_flop == 8 * 2 * WIDTH * WIDTH


def test_a_mask_without_values_tells_nothing() -> None:
    ids, mask = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, device="meta")
    count = count_flops(Tagger(), {"input_ids": ids, "attention_mask": mask})
    assert count.forward_flop == 8 * 2 * WIDTH * WIDTH


@pytest.mark.parametrize("attention", ["full", "causal", "products"])
def test_a_query_that_is_padding_has_no_pairs_where_attention_got_no_mask(attention: str) -> None:
    model = Tagger(attention)
    with observe(model) as step:
        model(torch.zeros(2, 4, dtype=torch.long), attention_mask=MASKS["integers"]).backward()
    pairs = (1 + 2 + 3 + 4) + (1 + 2) if attention == "causal" else 4 * 4 + 2 * 4
    assert step.result().forward_flop == pytest.approx(6 * 2 * WIDTH * WIDTH + 4 * WIDTH * pairs)


class Parts(nn.Module):
    """A body and a head that training code calls one after the other, and never the two as one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(self.embed(input_ids)).chunk(3, -1)
        is_open = attention_mask.bool()[:, None, :] & torch.ones(input_ids.shape[1], input_ids.shape[1]).tril().bool()
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_open[:, None])[:, 0]


class FusedLoss(torch.autograd.Function):
    """Makes the gradients with the loss, a few rows at a time, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gradient, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), 5):
            logits = hidden[start : start + 5] @ weight.t()
            gradient[start : start + 5] = logits @ weight
            of_weight += logits.t() @ hidden[start : start + 5]
        ctx.save_for_backward(gradient, of_weight)
        return hidden.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradient, of_weight = ctx.saved_tensors
        return grad * gradient, grad * of_weight


def in_checkpoints(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    parts = [
        checkpoint(lambda part: head(part).square().sum(), part, use_reentrant=False) for part in hidden.split(3, 1)
    ]
    return torch.stack(parts).sum()


LOSSES: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "in one": lambda head, hidden: head(hidden).sum(),
    "rows of all samples": lambda head, hidden: head(hidden.flatten(0, 1)).sum(),
    "in parts": lambda head, hidden: torch.stack([head(part).sum() for part in hidden.split(3, 1)]).sum(),
    "in parts that are run again": in_checkpoints,
    "fused": lambda head, hidden: FusedLoss.apply(hidden.flatten(0, 1), head.weight),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("is_left", [False, True])
def test_parts_of_a_model_called_apart_have_the_padding_of_the_text(name: str, is_left: bool) -> None:
    model, lengths = Parts(), [8, 5, 2]
    own = mask(lengths, 8).flip(1) if is_left else mask(lengths, 8)
    with observe(model) as step:
        LOSSES[name](model.head, model.body(ids(3, 8), own)).backward()
    tokens, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    forward = 2 * tokens * (3 * WIDTH * WIDTH + WIDTH * VOCABULARY) + 2 * 2 * WIDTH * pairs
    assert step.result().model_flop == pytest.approx(3 * forward)
    assert step.result().left_out == ()
