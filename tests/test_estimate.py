"""The closed-form estimate: against hand formulas over config numbers, and against counting, at sizes never seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter.demo.gpt import GPT, GPTConfig
from flopmeter.errors import CountError
from flopmeter.flops.estimate import EstimatePlan, estimate_flops, plan_of
from flopmeter.flops.side_count import count_flops
from flopmeter.flops.workload import Workload, workload_of

TOLERANCE = 0.005
"""The goal is 3 %; on the models below the estimate has no reason to be off at all."""

L, H, FFN, V, HEADS, KV_HEADS, HEAD_DIM = 3, 64, 144, 320, 4, 2, 24
QUERY, KEY = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
ENCODER = {"num_hidden_layers": L, "hidden_size": H, "intermediate_size": FFN, "num_attention_heads": HEADS}
DECODER = ENCODER | {"num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": V}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def transformers_model(model_type: str, head: str = "CausalLM", **numbers: Any) -> nn.Module:
    """A model on the meta device: no weight is ever allocated."""
    transformers = pytest.importorskip("transformers", reason="builds its models with transformers")
    config = transformers.AutoConfig.for_model(model_type, **TOKENS | numbers)
    mapping = getattr(transformers, f"AutoModelFor{head}")._model_mapping
    with torch.device("meta"):
        model: nn.Module = mapping[type(config)](config)
    return model.train()


LATENT = {"q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}
llama = partial(transformers_model, "llama", **DECODER)
gpt2 = partial(transformers_model, "gpt2", n_layer=L, n_embd=H, n_head=HEADS, vocab_size=V)
mixtral = partial(transformers_model, "mixtral", **DECODER, num_local_experts=8, num_experts_per_tok=2)
qwen3_moe = partial(transformers_model, "qwen3_moe", **DECODER, **EXPERTS, num_experts=16, mlp_only_layers=[0])
deepseek_v3 = partial(
    transformers_model, "deepseek_v3", **DECODER | LATENT | EXPERTS | {"head_dim": 8, "num_key_value_heads": HEADS},
    n_routed_experts=8, n_shared_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
bert = partial(transformers_model, "bert", "SequenceClassification", **ENCODER, vocab_size=V, num_labels=5)
vit = partial(transformers_model, "vit", "ImageClassification", **ENCODER, num_labels=7, image_size=48, patch_size=8)
t5 = partial(
    transformers_model, "t5", "Seq2SeqLM", d_model=H, d_kv=HEAD_DIM, num_heads=HEADS, d_ff=FFN, num_layers=2,
    num_decoder_layers=L, vocab_size=V, decoder_start_token_id=0,
)  # fmt: skip


def qwen2_5_vl() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 3, "hidden_size": 48, "intermediate_size": 112, "num_heads": 4, "out_hidden_size": H}
    vision |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    text = DECODER | TOKENS | {"head_dim": None, "rope_parameters": rope}
    special = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    return transformers_model("qwen2_5_vl", "ImageTextToText", text_config=text, vision_config=vision, **special)


def lora_llama(rank: int = 8) -> nn.Module:
    peft = pytest.importorskip("peft", reason="adapters come from peft")
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"])
    model: nn.Module = peft.get_peft_model(llama(), config, low_cpu_mem_usage=True)
    return model


def gpt() -> GPT:
    """Written by hand, with SDPA: nothing in it says that it is causal."""
    return GPT(GPTConfig(num_layers=L, hidden=H, num_heads=HEADS, length=128, vocabulary=V))


def text(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.ones(rows, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def padded_text(lengths: list[int], length: int) -> dict[str, torch.Tensor]:
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    return {"input_ids": torch.ones(mask.shape, dtype=torch.long), "attention_mask": mask.long()}


def images(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(rows, 3, 48, 48)}


def text_with_images(rows: int, length: int) -> dict[str, torch.Tensor]:
    """An image of 8 x 12 patches in each sample: 24 tokens stand for it."""
    ids = torch.full((rows, length), 9)
    ids[:, 2:26] = 5
    grids = torch.tensor([[1, 8, 12]] * rows)
    pixels = torch.zeros(rows * 96, 3 * 2 * 14 * 14)
    kinds = {"mm_token_type_ids": (ids == 5).int()}
    return {"input_ids": ids, "labels": ids, "pixel_values": pixels, "image_grid_thw": grids, **kinds}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], dict[str, torch.Tensor]]]] = {
    "llama": (llama, text),
    "llama padded": (llama, lambda rows, length: padded_text([length] * (rows - 1) + [length // 3], length)),
    "gpt2": (gpt2, text),
    "mixtral": (mixtral, text),
    "qwen3_moe": (qwen3_moe, text),
    "deepseek_v3": (deepseek_v3, text),
    "qwen2_5_vl": (qwen2_5_vl, text_with_images),
    "lora_llama": (lora_llama, text),
    "bert padded": (bert, lambda rows, length: padded_text([length] * (rows - 1) + [length // 2], length)),
    "vit": (vit, images),
    "gpt": (gpt, text),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_the_count_at_any_size(name: str) -> None:
    make_model, make_batch = MODELS[name]
    model = make_model()
    for convention, rows, length in (("exact", 2, 40), ("exact", 3, 97), ("full", 3, 97)):
        batch = make_batch(rows, length)
        counted, estimated = (f(model, batch, convention=convention) for f in (count_flops, estimate_flops))
        assert estimated.forward_flop == pytest.approx(counted.forward_flop, rel=TOLERANCE)
        assert estimated.model_flop == pytest.approx(counted.model_flop, rel=TOLERANCE)
        assert estimated.method == "estimate"


ATTENTION = 2 * QUERY * H + 2 * KEY * H
"""Weights of the four projections of one Llama layer."""


@pytest.mark.parametrize(("rows", "length"), [(1, 16), (4, 333)])
def test_a_llama_by_hand(rows: int, length: int) -> None:
    weights = L * (ATTENTION + 3 * H * FFN) + H * V
    tokens = rows * length
    for convention, pairs in (("exact", rows * length * (length + 1) // 2), ("full", rows * length**2)):
        found = estimate_flops(llama(), (rows, length), convention=convention)
        forward = 2 * tokens * weights + L * 4 * pairs * QUERY
        assert (found.forward_flop, found.backward_flop) == (forward, 2 * forward)


def test_a_mixtral_by_hand() -> None:
    """A token passes the router and 2 of 8 experts."""
    tokens, pairs = 2 * 50, 2 * 50 * 51 // 2
    weights = L * (ATTENTION + 8 * H + 2 * 3 * H * FFN) + H * V
    assert estimate_flops(mixtral(), (2, 50)).model_flop == 3 * (2 * tokens * weights + L * 4 * pairs * QUERY)


def test_a_padded_bert_by_hand() -> None:
    """Pooler and classifier see one token a sample; every token sees all others of its sample."""
    lengths = [40, 17]
    tokens, pairs = sum(lengths), sum(n * n for n in lengths)
    layers = L * (2 * tokens * (4 * H * H + 2 * H * FFN) + 4 * pairs * H)
    heads = 2 * len(lengths) * (H * H + 5 * H)
    found = estimate_flops(bert(), padded_text(lengths, 40))
    assert found.model_flop == 3 * (layers + heads)
    layers_full = L * (2 * 80 * (4 * H * H + 2 * H * FFN) + 4 * 2 * 40**2 * H)
    assert estimate_flops(bert(), padded_text(lengths, 40), convention="full").model_flop == 3 * (layers_full + heads)


def test_a_lora_llama_by_hand() -> None:
    """Adapters on q and v, all else frozen: weights owe no gradient, and nothing below the first adapter does either.

    So layer 0 owes none for its projections and only the queries' side of its scores; lora_A has its weight's gradient,
    and its input's from layer 1 on; lora_B has both.
    """
    rank, tokens, pairs = 8, 3 * 30, 3 * 30 * 31 // 2
    projections, output, mlp = H * (QUERY + 2 * KEY), QUERY * H, 3 * H * FFN
    lora_a, lora_b = 2 * H * rank, rank * (QUERY + KEY)
    forward = 2 * tokens * (L * (projections + output + mlp + lora_a + lora_b) + H * V) + L * 4 * pairs * QUERY
    weights = L * (output + mlp) + (L - 1) * projections + L * 2 * lora_b + L * lora_a + (L - 1) * lora_a + H * V
    backward = 2 * tokens * weights + (L * 8 - 2) * pairs * QUERY
    found = estimate_flops(lora_llama(rank), (3, 30))
    assert (found.forward_flop, found.backward_flop) == (forward, backward)


def test_a_vit_by_hand() -> None:
    """36 patches and a class token; pixels need no gradient, and the classifier sees the class token alone."""
    tokens, pairs = 2 * 37, 2 * 37**2
    embedding = 2 * 2 * 36 * 3 * 8 * 8 * H
    rest = L * (2 * tokens * (4 * H * H + 2 * H * FFN) + 4 * pairs * H) + 2 * 2 * H * 7
    assert estimate_flops(vit(), images(2, 0)).model_flop == 2 * embedding + 3 * rest


def test_an_encoder_decoder_by_hand() -> None:
    """Cross-attention projects keys and values of encoder tokens, queries of decoder tokens."""
    ids, labels = torch.ones(2, 30, dtype=torch.long), torch.ones(2, 12, dtype=torch.long)
    mask = (torch.arange(30) < torch.tensor([30, 20])[:, None]).long()
    read, written, inner = 50, 24, HEADS * HEAD_DIM
    encoder = 2 * (2 * read * (4 * H * inner + 2 * H * FFN) + 4 * (30**2 + 20**2) * inner)
    own = 2 * written * (4 * H * inner + 2 * H * FFN) + 4 * (2 * 12 * 13 // 2) * inner
    cross = 2 * written * 2 * H * inner + 2 * read * 2 * H * inner + 4 * (30 * 12 + 20 * 12) * inner
    found = estimate_flops(t5(), {"input_ids": ids, "attention_mask": mask, "labels": labels})
    assert found.forward_flop == encoder + L * (own + cross) + 2 * written * H * V


def test_windows_slide_only_in_the_layers_that_say_so() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = DECODER | {"head_dim": H // HEADS}
    model = transformers_model("qwen2", **sizes, use_sliding_window=True, sliding_window=8, layer_types=kinds)
    seen = sum(min(i + 1, 8) for i in range(40))
    (growth,) = estimate_flops(model, (1, 40)).growth.values()
    assert (growth["other_pair"], growth["causal_pair"]) == (3 * 4 * H * 2 * seen, 3 * 4 * H * 40 * 41 // 2)


def test_a_window_that_nobody_counted_is_exact_for_sequences_of_one_length() -> None:
    model = transformers_model("mistral", **DECODER, sliding_window=8)
    plan = plan_of(model)
    uninformed, informed = Workload.of_lengths([40] * 3), Workload.of_lengths([40] * 3, needs=plan.needs)
    assert uninformed.pairs_window == 0
    assert plan.evaluate(uninformed).model_flop == pytest.approx(plan.evaluate(informed).model_flop)


@pytest.mark.parametrize(("use_reentrant", "is_last_repeated"), [(True, True), (False, False)])
def test_checkpointing_repeats_the_layers(use_reentrant: bool, is_last_repeated: bool) -> None:
    """The non-reentrant kind stops before the last product of a layer, which nothing needs."""
    model: Any = llama()
    before = estimate_flops(model, (2, 20))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    after = estimate_flops(model, (2, 20))
    tokens, pairs = 40, 2 * 20 * 21 // 2
    weights = ATTENTION + 3 * H * FFN - (0 if is_last_repeated else H * FFN)
    assert before.recompute_flop == 0
    assert after.recompute_flop == L * (2 * tokens * weights + 4 * pairs * QUERY)
    assert after.model_flop == before.model_flop
    assert after.hardware_flop > before.hardware_flop


def test_gradients_stop_where_nothing_before_is_trained() -> None:
    """Behind frozen linears a trained one owes a gradient to its weight, behind trained ones to its input as well."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
    first, middle, last = 2 * 5 * 16 * 32, 2 * 5 * 32 * 32, 2 * 5 * 32 * 4
    batch = {"x": torch.zeros(5, 16)}
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    assert estimate_flops(model, batch).backward_flop == last
    model[0].requires_grad_(True)
    assert estimate_flops(model, batch).backward_flop == first + middle + 2 * last
    model.requires_grad_(False)
    assert estimate_flops(model, batch).backward_flop == 0


def test_a_frozen_embedding_spares_the_first_product_its_input_gradient() -> None:
    model = gpt()
    whole = estimate_flops(model, (2, 10)).backward_flop
    block = model.blocks[0]
    for part in (model.token_embedding, model.position_embedding, block.attention_norm, block.mlp_norm):
        part.requires_grad_(False)
    assert whole - estimate_flops(model, (2, 10)).backward_flop == 2 * 20 * H * 3 * H


def test_tied_weights_are_work_each_time_but_a_second_name_is_not() -> None:
    model = gpt()
    before = estimate_flops(model, (2, 10)).model_flop
    model.head.weight = model.token_embedding.weight
    model.layers = model.blocks
    assert estimate_flops(model, (2, 10)).model_flop == before


class SparseMlp(nn.Module):
    """Experts as a list of modules, beside one that all tokens share."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, FFN), nn.Linear(FFN, H)) for _ in range(6))
        self.shared_experts = nn.ModuleList(nn.Linear(H, H) for _ in range(2))


def test_of_a_list_of_experts_a_token_passes_the_top_k() -> None:
    layer = SparseMlp()
    layer.num_experts_per_tok = 2
    model = nn.ModuleDict({"embedding": nn.Embedding(V, H), "mlp": layer})
    weights = 6 * H + 2 * (2 * H * FFN) + 2 * H * H
    found = estimate_flops(model, (1, 7))
    assert found.forward_flop == 2 * 7 * weights
    del layer.num_experts_per_tok
    unknown = estimate_flops(nn.ModuleDict({"embedding": nn.Embedding(V, H), "mlp": layer}), (1, 7))
    assert unknown.forward_flop == 2 * 7 * (weights - 2 * H * FFN)
    assert any("how many experts" in sentence for sentence in unknown.left_out)


def test_multihead_attention_by_hand() -> None:
    """Four projections of H x H; no module says whether it is causal, and the result says what was assumed."""
    layer = nn.TransformerEncoderLayer(H, HEADS, FFN, batch_first=True)
    model = nn.Sequential(nn.Embedding(V, H), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    found = estimate_flops(model, (3, 20), training=False)
    assert found.forward_flop == 2 * (2 * 60 * (4 * H * H + 2 * H * FFN) + 4 * 3 * 20**2 * H)
    assert any("causal" in sentence for sentence in found.left_out)


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers_by_hand(kind: type[nn.RNNBase], gates: int) -> None:
    model = nn.Sequential(nn.Embedding(V, H), kind(H, 32, num_layers=2, batch_first=True))
    weights = gates * 32 * (H + 32) + gates * 32 * (32 + 32)
    assert estimate_flops(model, (3, 20)).forward_flop == 2 * 60 * weights


def test_convolutions_and_bilinear_layers_by_hand() -> None:
    """16 x 16 pixels: a stride of 2 leaves 8 x 8 positions; the transposed one works at those and makes 16 x 16."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1, groups=4), nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 2, 1)
    )
    first, *others = 27 * 8 * 64, 9 * 2 * 8 * 64, 4 * 8 * 4 * 64, 4 * 2 * 256
    found = estimate_flops(model, {"x": torch.zeros(5, 3, 16, 16)})
    assert found.forward_flop == 2 * 5 * (first + sum(others))
    assert found.backward_flop == 2 * 5 * (first + 2 * sum(others))
    assert estimate_flops(nn.Bilinear(8, 6, 5), {"x": torch.zeros(3, 8)}).forward_flop == 2 * 3 * 8 * 6 * 5


class Unreadable(nn.Module):
    """Multiplies with parameters of its own: nothing in the tree says how."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(16, 32)), nn.Parameter(torch.zeros(32, 4))


@pytest.mark.parametrize(("config", "coefficient"), [(None, 2.0), (SimpleNamespace(vision_config={}), 2.5)])
def test_a_model_that_cannot_be_read_gets_the_rule_of_thumb_and_says_so(config: Any, coefficient: float) -> None:
    model = Unreadable()
    model.config = config
    found = estimate_flops(model, Workload.of_lengths([10, 6]))
    assert found.forward_flop == coefficient * 640 * 16
    assert found.model_flop == 3 * found.forward_flop
    assert found.method == "estimate (rule of thumb, low confidence)"
    assert any("no structure that we can read" in sentence for sentence in found.left_out)
    assert estimate_flops(model, {"x": torch.zeros(9, 16)}).forward_flop == coefficient * 640 * 9


def test_a_model_that_raises_when_looked_at_gets_the_rule_of_thumb_and_the_reason() -> None:
    moody = type("Moody", (nn.MultiheadAttention,), {"is_causal": property(lambda self: 1 / 0)})
    found = estimate_flops(nn.Sequential(nn.Embedding(V, H), moody(H, HEADS)), Workload.of_lengths([10]))
    assert found.forward_flop == 2 * 10 * (V * H + 4 * (H * H + H))
    assert any("ZeroDivisionError" in sentence for sentence in found.left_out)


def test_what_is_not_read_is_named() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(V, H), "readable": nn.Linear(H, FFN), "other": Unreadable()})
    sentences = " ".join(estimate_flops(model, (1, 8)).left_out)
    assert "Unreadable does with its own first" in sentences
    assert "No attention was recognised" in sentences


def test_a_model_without_parameters_is_an_error() -> None:
    with pytest.raises(CountError, match="no parameters"):
        estimate_flops(nn.ReLU(), (1, 8))


def test_the_model_is_not_called_and_may_be_wrapped() -> None:
    bare = estimate_flops(gpt(), (2, 10))
    inner = gpt()
    inner.forward = lambda *_: pytest.fail("the estimate called the model")
    for model in (inner, nn.DataParallel(inner), torch.compile(inner, backend="eager")):
        wrapped = estimate_flops(model, (2, 10))
        assert wrapped.model_flop == bare.model_flop
        assert wrapped.by_module == bare.by_module


def test_a_plan_is_kept_until_something_is_frozen_and_outlives_its_model() -> None:
    model: Any = gpt()
    plan, expected = plan_of(model), estimate_flops(model, (2, 10)).model_flop
    assert plan_of(model) is plan
    model.head.requires_grad_(False)
    assert plan_of(model) is not plan
    del model
    assert plan.evaluate(Workload.of_lengths([10, 10])).model_flop == expected


def test_the_work_of_micro_batches_adds_up() -> None:
    plan: EstimatePlan = plan_of(gpt())
    first, second = Workload.of_lengths([30, 7]), Workload.of_lengths([12])
    parts = plan.evaluate(first).model_flop + plan.evaluate(second).model_flop
    assert plan.evaluate(first + second).model_flop == parts


def test_the_parts_sum_to_the_whole() -> None:
    model = qwen2_5_vl()
    found = estimate_flops(model, text_with_images(2, 40))
    assert sum(found.by_module.values()) == pytest.approx(found.model_flop)
    assert sum(found.by_dtype.values()) == pytest.approx(found.model_flop)
    drivers = {driver for parts in found.growth.values() for driver in parts}
    assert drivers == {"token", "causal_pair", "patch", "patch_pair"}


def test_work_is_in_the_dtype_of_the_weights_or_of_autocast() -> None:
    model = gpt().to(torch.float16)
    assert set(estimate_flops(model, (2, 10)).by_dtype) == {"float16"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert set(estimate_flops(gpt(), (2, 10)).by_dtype) == {"bfloat16"}


def test_packed_documents_cost_less_than_one_long_text() -> None:
    """Two documents of 20 in a row of 40: 2 x 210 pairs instead of 820."""
    model = llama()
    whole, packed = text(1, 40), {**text(1, 40), "position_ids": torch.arange(20).repeat(2)[None]}
    saved = estimate_flops(model, whole).model_flop - estimate_flops(model, packed).model_flop
    assert saved == 3 * L * 4 * QUERY * (820 - 420)


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.transpose(0, 1))[0]
        return out


class Passing(Turning):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)[0]
        return out


@pytest.mark.parametrize(
    ("make", "reads", "is_sequence_first"),
    [
        (lambda: nn.LSTM(4, 4), "sequence", True),
        (lambda: nn.GRU(4, 4, batch_first=True), "sequence", False),
        (lambda: nn.TransformerEncoderLayer(4, 2, 4), "sequence", True),
        (lambda: nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), "sequence", False),
        (lambda: nn.MultiheadAttention(4, 2), "sequence", True),
        (Passing, "sequence", True),
        (Turning, "sequence", False),
        (lambda: nn.Sequential(nn.Embedding(9, 4), Passing()), "text", True),
        (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), Passing()), "values", False),
        (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Conv1d(4, 4, 3)), "ids", False),  # over words
        (lambda: nn.Sequential(nn.Embedding(9, 8), nn.Conv1d(4, 4, 3)), "values", False),  # a label's table
        (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), "ids", False),
        (lambda: nn.Linear(4, 4), "values", False),
    ],
)
def test_a_model_says_what_it_reads(make: Callable[[], nn.Module], reads: str, is_sequence_first: bool) -> None:
    needs = plan_of(make()).needs
    assert (needs.reads, needs.is_sequence_first) == (reads, is_sequence_first)


def test_an_encoder_layer_that_norms_last_owes_its_input_nothing() -> None:
    width, inner, rows = 8, 16, 2 * 5
    forward = 2 * rows * (4 * width**2 + 2 * width * inner) + 4 * width * 2 * 5**2
    for norm_first, spared in ((False, 3 * 2 * rows * width**2), (True, 0)):
        layer = nn.TransformerEncoderLayer(width, 2, inner, batch_first=True, norm_first=norm_first)
        stack = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        batch = workload_of(torch.zeros(2, 5, width), plan_of(stack).needs)
        assert estimate_flops(stack, batch).model_flop == 3 * forward - spared
