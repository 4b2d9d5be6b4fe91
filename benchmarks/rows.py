"""Which training steps are counted, and what is the truth about each?

The config numbers that build a row's model are the ones its truth is computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace as Numbers
from typing import Any

import torch
from torch import nn

import cases
import truth
from cases import Case
from truth import Conv, Load, Truth


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    """What `--rows` takes."""
    build: Callable[[], Case]
    """A new, seeded case at each call, since some counters leave traces on what they count."""
    truth: Truth
    """From the hand formulas; the same for every implementation of the same mathematics."""
    executed_note: str = ""
    """Why the hardware executes something else than `truth.full`; empty where it does not."""
    is_forward_only: bool = False
    """True where there is no backward to run; its training count is then its forward."""

    @property
    def hardware_flop(self) -> int | None:
        """What is executed, or None where a fused kernel decides."""
        return None if self.executed_note else self.truth.hardware_flop


FUSED = "a fused kernel decides which masked blocks it skips, and runs QK^T once more in its backward"

DECODER = {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 320, "num_attention_heads": 4}
GROUPED = DECODER | {"num_key_value_heads": 2, "head_dim": 24}
LLAMA = Numbers(**GROUPED, intermediate_size=144)
MIXTRAL = Numbers(**GROUPED, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2)
QWEN3_MOE = Numbers(**vars(LLAMA), moe_intermediate_size=48, num_experts=16, num_experts_per_tok=3, mlp_only_layers=[0])
LATENT = {"q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK_V3 = Numbers(
    **DECODER | LATENT,
    first_k_dense_replace=1,
    intermediate_size=144,
    moe_intermediate_size=48,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
)
QWEN_TEXT = Numbers(**vars(LLAMA) | {"head_dim": 16})
QWEN_VISION = Numbers(
    depth=3,
    hidden_size=48,
    intermediate_size=112,
    num_heads=4,
    out_hidden_size=64,
    patch_size=14,
    temporal_patch_size=2,
    in_channels=3,
    spatial_merge_size=2,
    window_size=56,
    fullatt_block_indexes=[1],
)
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16}
DEEPSEEK_V32 = Numbers(**vars(DEEPSEEK_V3), **INDEXER)
QWEN3_NEXT = Numbers(
    **GROUPED | {"num_hidden_layers": 4},
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_conv_kernel_dim=4,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=80,
    num_experts=8,
    num_experts_per_tok=3,
)
DIT = Numbers(
    num_hidden_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    patch_size=4,
    num_channels=4,
    time_size=32,
    num_labels=10,
)
CLIP = Numbers(
    num_hidden_layers=3, hidden_size=48, intermediate_size=112, num_attention_heads=4, image_size=56, patch_size=14
)
QUANTIZED = {"num_blocks": 3, "width": 64, "inner": 96, "rank": 8}
ENCODER = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
BERT = Numbers(**ENCODER, num_labels=5)
VIT = Numbers(**ENCODER, num_labels=7, image_size=48, patch_size=8, num_channels=3)
GPT2 = Numbers(n_layer=3, n_embd=64, n_head=4, vocab_size=320)
LSTM = Numbers(num_layers=2, hidden_size=48, vocab_size=96)
LSTM_LENGTH = 256
"""Long enough for the count's one fault here, a gradient of the initial state that nobody wants, to stay below 0.1 %:
it is 1.9 % at 8 tokens, 0.9 % at 16, 0.23 % at 64 and 0.06 % at 256."""
CRITIC = (24, 64, 48, 1)

VOCAB, LENGTH = 320, 64
WHOLE, RAGGED, DOCUMENTS = [64, 64], [64, 37], [[20, 31, 13], [40, 24]]
GRIDS = [(1, 8, 12), (1, 4, 6)]

CAUSAL, PADDED = truth.causal(WHOLE, LENGTH), truth.causal(RAGGED, LENGTH)
whole_text, padded_text = (partial(cases.text, lengths, LENGTH, VOCAB) for lengths in (WHOLE, RAGGED))


def attention_row(name: str, expected: Truth, build: Callable[..., Case], attention: str, note: str = FUSED) -> Row:
    return Row(
        name=f"{name}_{attention}",
        build=partial(build, attention=attention),
        truth=expected,
        executed_note=note if attention == "sdpa" else "",
    )


def llama_row(name: str, load: Load = CAUSAL, make_batch: Any = whole_text, **kwargs: Any) -> Row:
    model_type, numbers = "llama", vars(LLAMA)
    if window := kwargs.pop("sliding_window", None):
        model_type, numbers = "mistral", numbers | {"sliding_window": window}
    is_fused = kwargs.get("attention") != "eager" and "within" not in kwargs
    checkpointing = kwargs.get("checkpointing")
    if checkpointing and kwargs.get("is_compiled"):
        checkpointing = "compiled"
    return Row(
        name=name,
        build=partial(cases.transformers_case, model_type, numbers, make_batch, **kwargs),
        truth=truth.llama(load, LLAMA, checkpointing),
        executed_note=FUSED if is_fused else "",
    )


def llama_rows() -> list[Row]:
    kinds = [(attention, kind) for attention in ("sdpa", "eager") for kind in (None, "reentrant", "non_reentrant")]
    windowed = truth.causal(WHOLE, LENGTH, window=16)
    packed = truth.packed(DOCUMENTS, LENGTH), partial(cases.packed_text, DOCUMENTS, LENGTH, VOCAB)
    return [
        *(
            llama_row("_".join(filter(None, ("llama", attention, kind))), attention=attention, checkpointing=kind)
            for attention, kind in kinds
        ),
        llama_row("llama_math", within=cases.math_attention),
        llama_row("llama_padded_sdpa", PADDED, padded_text),
        llama_row("llama_padded_eager", PADDED, padded_text, attention="eager"),
        llama_row("llama_packed_sdpa", *packed),
        llama_row("llama_packed_eager", *packed, attention="eager"),
        llama_row("mistral_window_sdpa", windowed, sliding_window=16),
        llama_row("mistral_window_eager", windowed, sliding_window=16, attention="eager"),
        llama_row("llama_compiled", is_compiled=True),
        llama_row("llama_compiled_non_reentrant", is_compiled=True, checkpointing="non_reentrant"),
    ]


def lora_rows() -> list[Row]:
    build = partial(cases.transformers_case, "llama", vars(LLAMA), whole_text, lora_rank=8)
    note = f"{FUSED}; in layer 0 it also computes a key gradient that nothing needs"
    expected = truth.lora_llama(CAUSAL, LLAMA, rank=8)
    return [attention_row("lora_llama", expected, build, attention, note) for attention in ("sdpa", "eager")]


def expert_rows() -> list[Row]:
    routing = {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
    families: list[tuple[str, dict[str, Any], Truth]] = [
        ("mixtral", vars(MIXTRAL), truth.mixtral(CAUSAL, MIXTRAL)),
        ("qwen3_moe", vars(QWEN3_MOE), truth.qwen3_moe(CAUSAL, QWEN3_MOE)),
        ("deepseek_v3", vars(DEEPSEEK_V3) | routing, truth.deepseek_v3(CAUSAL, DEEPSEEK_V3)),
    ]
    settings: list[tuple[str, dict[str, Any]]] = [
        ("default", {}),
        ("loop", {"experts_implementation": "eager"}),
        ("grouped_mm", {"experts_implementation": "grouped_mm"}),
        ("batched_mm", {"experts_implementation": "batched_mm"}),
        ("bf16", {"dtype": torch.bfloat16}),
    ]
    # DeepSeek's values are narrower than its keys; no fused CPU kernel takes that, so its attention runs unfused.
    return [
        Row(
            name=f"{family}_{setting}",
            build=partial(cases.transformers_case, family, numbers, whole_text, **kwargs),
            truth=expected,
            executed_note="" if family == "deepseek_v3" else FUSED,
        )
        for family, numbers, expected in families
        for setting, kwargs in settings
    ]


def vision_language_rows() -> list[Row]:
    numbers = {
        "text_config": vars(QWEN_TEXT) | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
        "vision_config": vars(QWEN_VISION),
        "image_token_id": 1,
    }
    patch_values = QWEN_VISION.in_channels * QWEN_VISION.temporal_patch_size * QWEN_VISION.patch_size**2
    batch = partial(cases.text_with_images, RAGGED, LENGTH, VOCAB, GRIDS, patch_values)
    build = partial(cases.transformers_case, "qwen2_5_vl", numbers, batch, head="ImageTextToText")
    expected = truth.qwen2_5_vl(PADDED, GRIDS, QWEN_TEXT, QWEN_VISION)
    return [attention_row("qwen2_5_vl", expected, build, attention) for attention in ("sdpa", "eager")]


def encoder_rows() -> list[Row]:
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    texts = partial(cases.labelled_text, RAGGED, LENGTH, VOCAB, BERT.num_labels)
    images = partial(cases.labelled_images, 2, VIT.image_size, VIT.num_labels)
    bert_numbers, vit_numbers = vars(BERT) | calm | {"vocab_size": VOCAB}, vars(VIT) | calm
    bert = partial(cases.transformers_case, "bert", bert_numbers, texts, head="SequenceClassification")
    vit = partial(cases.transformers_case, "vit", vit_numbers, images, head="ImageClassification")
    padded = truth.bert(truth.bidirectional(RAGGED, LENGTH), BERT)
    return [
        row
        for attention in ("sdpa", "eager")
        for row in (
            attention_row("bert_padded", padded, bert, attention),
            attention_row("vit", truth.vit(2, VIT), vit, attention),
        )
    ]


def gpt_rows() -> list[Row]:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt2 = partial(cases.transformers_case, "gpt2", vars(GPT2) | no_dropout, whole_text)
    expected = truth.gpt2(CAUSAL, GPT2)

    def plain(kind: str) -> Callable[[], Case]:
        return partial(cases.plain_case, partial(cases.Gpt, GPT2, LENGTH, kind), whole_text)

    return [
        attention_row("gpt2", expected, gpt2, "sdpa"),
        attention_row("gpt2", expected, gpt2, "eager"),
        Row(name="gpt_sdpa", build=plain("sdpa"), truth=expected, executed_note=FUSED),
        Row(name="gpt_einsum", build=plain("einsum"), truth=expected),
    ]


def conv_row(name: str, make_convs: Callable[[], Sequence[nn.Module]], convs: Sequence[Conv]) -> Row:
    model = partial(cases.ConvNet, make_convs, convs[-1].outputs, 10)
    build = partial(cases.plain_case, model, partial(cases.labelled_images, 2, 32, 10))
    return Row(name=name, build=build, truth=truth.conv_net(2, convs, 10))


def conv_rows() -> list[Row]:
    """Images are 32 x 32: a stride of 2 leaves 16 x 16 positions, then 8 x 8."""
    conv, transposed = nn.Conv2d, nn.ConvTranspose2d
    return [
        conv_row(
            "conv_net",
            lambda: [conv(3, 16, 3, 2, 1), conv(16, 24, 5, 1, 2), conv(24, 32, 3, 2, 1)],
            [Conv(3, 16, 9, 256), Conv(16, 24, 25, 256), Conv(24, 32, 9, 64)],
        ),
        conv_row(
            "conv_grouped",
            lambda: [conv(3, 24, 3, 2, 1), conv(24, 48, 3, 1, 1, groups=4), conv(48, 32, 3, 2, 1, groups=8)],
            [Conv(3, 24, 9, 256), Conv(24, 48, 9, 256, groups=4), Conv(48, 32, 9, 64, groups=8)],
        ),
        conv_row(
            "conv_depthwise",
            lambda: [conv(3, 24, 3, 2, 1), conv(24, 24, 5, 1, 2, groups=24), conv(24, 32, 1)],
            [Conv(3, 24, 9, 256), Conv(24, 24, 25, 256, groups=24), Conv(24, 32, 1, 256)],
        ),
        conv_row(
            "conv_transposed",
            lambda: [conv(3, 16, 4, 4), transposed(16, 24, 4, 2, 1, groups=2), conv(24, 32, 3, 1, 1)],
            [Conv(3, 16, 16, 64), Conv(16, 24, 16, 64, groups=2), Conv(24, 32, 9, 256)],
        ),
    ]


def sparse_rows() -> list[Row]:
    """Values are narrower than keys, and no fused CPU kernel takes that: all pairs are executed."""
    numbers = vars(DEEPSEEK_V32) | {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
    build = partial(cases.transformers_case, "deepseek_v32", numbers, whole_text)
    expected = truth.deepseek_v32(CAUSAL, LENGTH, DEEPSEEK_V32)
    return [
        Row(name=f"deepseek_v32_{attention}", build=partial(build, attention=attention), truth=expected)
        for attention in ("sdpa", "eager")
    ]


def new_rows() -> list[Row]:
    """What 2025's training is made of."""
    long_text = partial(cases.text, [128, 128], 128, VOCAB)
    pictures = partial(cases.text_with_pictures, RAGGED, LENGTH, VOCAB, CLIP.image_size, 16)
    llava = {"text_config": vars(LLAMA) | {"model_type": "llama"}, "vision_config": vars(CLIP), "image_token_index": 1}
    llava["vision_config"] = vars(CLIP) | {"model_type": "clip_vision_model"}
    return [
        attention_row(
            "qwen3_next",
            truth.qwen3_next(truth.causal([128, 128], 128), 128, QWEN3_NEXT),
            partial(cases.transformers_case, "qwen3_next", vars(QWEN3_NEXT), long_text),
            "sdpa",
        ),
        Row(
            name="mtp",
            build=partial(cases.plain_case, partial(cases.MtpGpt, GPT2, LENGTH), whole_text),
            truth=truth.mtp_gpt(WHOLE, LENGTH, GPT2),
            executed_note=FUSED,
        ),
        Row(
            name="dit",
            build=partial(cases.plain_case, partial(cases.Dit, DIT), partial(cases.noisy_images, 2, 32, DIT)),
            truth=truth.dit(2, 64, DIT),
            executed_note=FUSED,
        ),
        attention_row(
            "llava_padded",
            truth.llava(PADDED, LLAMA, CLIP),
            partial(cases.transformers_case, "llava", llava, pictures, head="ImageTextToText"),
            "sdpa",
        ),
        *(
            Row(
                name=f"quantized_{'reentrant' if is_reentrant else 'non_reentrant'}",
                build=partial(
                    cases.plain_case,
                    partial(cases.Quantized, **QUANTIZED, use_reentrant=is_reentrant),
                    lambda: {"x": torch.randn(2, LENGTH, QUANTIZED["width"], requires_grad=True)},
                ),
                truth=truth.quantized(2 * LENGTH, **QUANTIZED),
            )
            for is_reentrant in (True, False)
        ),
        Row(
            name="unpadding",
            build=partial(cases.plain_case, partial(cases.Unpadding, BERT, VOCAB), padded_text),
            truth=truth.unpadding(RAGGED, BERT),
            executed_note=FUSED,
        ),
    ]


def other_rows() -> list[Row]:
    lstm_text = partial(cases.text, [LSTM_LENGTH] * 2, LSTM_LENGTH, LSTM.vocab_size)
    return [
        Row(
            name="lstm",
            build=partial(cases.plain_case, partial(cases.LstmModel, LSTM), lstm_text),
            truth=truth.lstm(2, LSTM_LENGTH, LSTM),
            executed_note="a fused kernel also computes the gradient of the constant first state",
        ),
        Row(
            name="flex_attention",
            build=partial(cases.flex_case, 2, LENGTH, GPT2.n_embd, GPT2.n_head),
            truth=truth.attention_forward(CAUSAL, GPT2.n_embd, GPT2.n_head),
            is_forward_only=True,
        ),
        Row(
            name="gradient_penalty",
            build=partial(cases.gradient_penalty_case, 32, CRITIC),
            truth=truth.gradient_penalty(32, CRITIC),
        ),
    ]


ROWS: dict[str, Row] = {
    row.name: row
    for rows in (
        llama_rows(),
        gpt_rows(),
        expert_rows(),
        sparse_rows(),
        new_rows(),
        vision_language_rows(),
        lora_rows(),
        encoder_rows(),
        conv_rows(),
        other_rows(),
    )
    for row in rows
}
