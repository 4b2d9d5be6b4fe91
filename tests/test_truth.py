"""Is the truth true? Every family once more by another route, and once against what torch dispatches.

The formulas multiply totals; here single tokens, pairs, taps and steps are added up on a tape, and what backward costs
follows from which operand needs a gradient, not from a number written down.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace as Numbers
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
truth = importlib.import_module("truth")


class Tape:
    """Adds up products and the gradients that they owe; a value is no more than whether it needs a gradient."""

    def __init__(self) -> None:
        self.forward = self.backward = 0

    def product(self, left: bool, right: bool, *sizes: int) -> bool:
        """One product of the given sizes (rows, inner, columns); returns whether its result needs a gradient."""
        flop = 2
        for size in sizes:
            flop *= size
        self.forward += flop
        self.backward += flop * (left + right)
        return left or right

    def mlp(self, x: bool, *widths: int, trained: bool = True) -> bool:
        for inputs, outputs in pairwise(widths):
            x = self.product(x, trained, 1, inputs, outputs)
        return x

    def gated_mlp(self, x: bool, hidden: int, inner: int, trained: bool = True) -> bool:
        gate, up = (self.mlp(x, hidden, inner, trained=trained) for _ in range(2))
        return self.mlp(gate or up, inner, hidden, trained=trained)

    def attend(self, q: bool, k: bool, v: bool, num_heads: int, qk_dim: int, v_dim: int) -> bool:
        """One query-key pair in every head."""
        weights = False
        for _ in range(num_heads):
            weights = self.product(q, k, 1, qk_dim, 1)
            self.product(weights, v, 1, 1, v_dim)
        return weights or v

    @property
    def both(self) -> tuple[int, int]:
        return self.forward, self.backward


def causal_pairs(lengths: Iterable[int], window: int = 10**9) -> list[tuple[int, int]]:
    return [(q, k) for n in lengths for q in range(n) for k in range(n) if q - window < k <= q]


def square_pairs(lengths: Iterable[int]) -> list[tuple[int, int]]:
    return [(q, k) for n in lengths for q in range(n) for k in range(n)]


def both(count: Any) -> tuple[int, int]:
    return count.forward_flop, count.backward_flop


LENGTHS, PADDED_TO = [5, 3], 5
EXACT = list(range(sum(LENGTHS))), causal_pairs(LENGTHS)
FULL = list(range(len(LENGTHS) * PADDED_TO)), square_pairs([PADDED_TO] * len(LENGTHS))
DECODER = {
    "num_hidden_layers": 2,
    "hidden_size": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 11,
}
LLAMA = Numbers(**DECODER, intermediate_size=7)


def decoder(load: tuple[list[int], list[tuple[int, int]]], c: Any, mlp: Callable[[Tape, int], Any]) -> Tape:
    """A grouped-query decoder; `mlp` is what one token does after attention in layer i."""
    tape, (tokens, pairs) = Tape(), load
    query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    for layer in range(c.num_hidden_layers):
        for _ in tokens:
            for size in (query, key, key):
                tape.mlp(True, c.hidden_size, size)
            tape.mlp(True, query, c.hidden_size)
            mlp(tape, layer)
        for _ in pairs:
            tape.attend(True, True, True, c.num_attention_heads, c.head_dim, c.head_dim)
    for _ in tokens:
        tape.mlp(True, c.hidden_size, c.vocab_size)
    return tape


def llama_mlp(tape: Tape, layer: int) -> None:
    tape.gated_mlp(True, LLAMA.hidden_size, LLAMA.intermediate_size)


def test_the_truth_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse((BENCHMARKS / "truth.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


def test_a_padded_llama_adds_up_token_by_token_and_pair_by_pair() -> None:
    found = truth.llama(truth.causal(LENGTHS, PADDED_TO), LLAMA)
    assert both(found.full) == decoder(FULL, LLAMA, llama_mlp).both
    assert both(found.exact) == decoder(EXACT, LLAMA, llama_mlp).both
    assert found.full.recompute_flop == 0


def test_a_sliding_window_lets_a_token_see_itself_and_its_last_neighbours() -> None:
    found = truth.llama(truth.causal(LENGTHS, PADDED_TO, window=2), LLAMA)
    windowed = EXACT[0], causal_pairs(LENGTHS, window=2)
    assert both(found.exact) == decoder(windowed, LLAMA, llama_mlp).both
    assert both(found.full) == decoder(FULL, LLAMA, llama_mlp).both


def test_packed_documents_do_not_see_each_other() -> None:
    found = truth.llama(truth.packed([[2, 3], [4, 1]], 5), LLAMA)
    apart = list(range(10)), causal_pairs([2, 3, 4, 1])
    assert both(found.exact) == decoder(apart, LLAMA, llama_mlp).both
    assert both(found.full) == decoder(FULL, LLAMA, llama_mlp).both


@pytest.mark.parametrize(("checkpointing", "num_skipped"), [("reentrant", 0), ("non_reentrant", 2), ("compiled", 1)])
def test_recomputation_repeats_the_layers_less_the_down_projections_that_backward_can_do_without(
    checkpointing: str, num_skipped: int
) -> None:
    found = truth.llama(truth.causal(LENGTHS, PADDED_TO), LLAMA, checkpointing).exact
    lm_head = 2 * 8 * 6 * 11
    down_proj = 2 * 8 * 7 * 6
    assert found.recompute_flop == found.forward_flop - lm_head - num_skipped * down_proj
    assert both(found) == decoder(EXACT, LLAMA, llama_mlp).both


def test_mixtral_sends_each_token_through_its_top_experts_only() -> None:
    c = Numbers(**DECODER, intermediate_size=7, num_local_experts=5, num_experts_per_tok=2)

    def mlp(tape: Tape, layer: int) -> None:
        tape.mlp(True, 6, 5)
        for _ in range(2):
            tape.gated_mlp(True, 6, 7)

    assert both(truth.mixtral(truth.causal(LENGTHS, PADDED_TO), c).exact) == decoder(EXACT, c, mlp).both


def test_qwen3_moe_keeps_the_named_layers_dense() -> None:
    c = Numbers(
        **DECODER,
        intermediate_size=7,
        moe_intermediate_size=3,
        num_experts=9,
        num_experts_per_tok=4,
        mlp_only_layers=[0],
    )

    def mlp(tape: Tape, layer: int) -> None:
        if layer == 0:
            tape.gated_mlp(True, 6, 7)
            return
        tape.mlp(True, 6, 9)
        for _ in range(4):
            tape.gated_mlp(True, 6, 3)

    assert both(truth.qwen3_moe(truth.causal(LENGTHS, PADDED_TO), c).full) == decoder(FULL, c, mlp).both


def test_deepseek_v3_adds_latents_shared_experts_and_a_dense_first_layer() -> None:
    c = Numbers(num_hidden_layers=3, hidden_size=6, vocab_size=11, num_attention_heads=2, first_k_dense_replace=1)
    vars(c).update(q_lora_rank=5, kv_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=7)
    vars(c).update(intermediate_size=8, moe_intermediate_size=3, n_routed_experts=10, n_shared_experts=2)
    c.num_experts_per_tok = 4
    tape, (tokens, pairs) = Tape(), EXACT
    for layer in range(3):
        for _ in tokens:
            tape.mlp(True, 6, 5, 2 * (3 + 2))
            tape.mlp(True, 6, 4 + 2)
            tape.mlp(True, 4, 2 * (3 + 7))
            tape.mlp(True, 2 * 7, 6)
            if layer == 0:
                tape.gated_mlp(True, 6, 8)
                continue
            tape.mlp(True, 6, 10)
            tape.gated_mlp(True, 6, 2 * 3)
            for _ in range(4):
                tape.gated_mlp(True, 6, 3)
        for _ in pairs:
            tape.attend(True, True, True, 2, 3 + 2, 7)
    for _ in tokens:
        tape.mlp(True, 6, 11)
    assert both(truth.deepseek_v3(truth.causal(LENGTHS, PADDED_TO), c).exact) == tape.both


def test_lora_owes_no_gradient_below_its_first_adapter() -> None:
    tape, (tokens, pairs) = Tape(), EXACT
    x, rank = False, 3
    for _ in range(2):
        for _ in tokens:
            k, *adapted = (tape.mlp(x, 6, size, trained=False) for size in (4, 8, 4))
            adapters = [tape.mlp(x, 6, rank, size) for size in (8, 4)]
            q, v = (any(pair) for pair in zip(adapted, adapters, strict=True))
            tape.mlp(True, 8, 6, trained=False)
            tape.gated_mlp(True, 6, 7, trained=False)
        for _ in pairs:
            tape.attend(q, k, v, 4, 2, 2)
        x = True
    for _ in tokens:
        tape.mlp(x, 6, 11, trained=False)
    assert both(truth.lora_llama(truth.causal(LENGTHS, PADDED_TO), LLAMA, rank=rank).exact) == tape.both


def plain_layers(tape: Tape, num_tokens: int, pairs: list[Any], hidden: int, num_heads: int, inner: int) -> None:
    for _ in range(num_tokens):
        for _ in range(4):
            tape.mlp(True, hidden, hidden)
        tape.mlp(True, hidden, inner, hidden)
    for _ in pairs:
        tape.attend(True, True, True, num_heads, hidden // num_heads, hidden // num_heads)


def test_gpt2_adds_up() -> None:
    tape = Tape()
    for _ in range(3):
        plain_layers(tape, 8, causal_pairs(LENGTHS), 6, 2, 24)
    for _ in range(8):
        tape.mlp(True, 6, 11)
    c = Numbers(n_layer=3, n_embd=6, n_head=2, vocab_size=11)
    assert both(truth.gpt2(truth.causal(LENGTHS, PADDED_TO), c).exact) == tape.both


def test_bert_pools_once_per_sample_however_long_it_is() -> None:
    c = Numbers(num_hidden_layers=1, hidden_size=6, intermediate_size=9, num_attention_heads=3, num_labels=4)
    found = truth.bert(truth.bidirectional(LENGTHS, PADDED_TO), c)
    for count, lengths in ((found.exact, LENGTHS), (found.full, [5, 5])):
        tape = Tape()
        plain_layers(tape, sum(lengths), square_pairs(lengths), 6, 3, 9)
        for _ in lengths:
            tape.mlp(True, 6, 6, 4)
        assert both(count) == tape.both


def test_vit_needs_no_gradient_for_pixels() -> None:
    c = Numbers(num_hidden_layers=2, hidden_size=6, intermediate_size=9, num_attention_heads=3, num_labels=4)
    vars(c).update(image_size=6, patch_size=2, num_channels=3)
    tape = Tape()
    for _ in range(2 * 9):
        tape.mlp(False, 3 * 2 * 2, 6)
    for _ in range(2):
        plain_layers(tape, 2 * 10, square_pairs([10, 10]), 6, 3, 9)
    for _ in range(2):
        tape.mlp(True, 6, 4)
    assert both(truth.vit(2, c).full) == tape.both
    assert truth.vit(2, c).exact == truth.vit(2, c).full


VISION = Numbers(depth=2, hidden_size=4, intermediate_size=5, num_heads=2, out_hidden_size=6, fullatt_block_indexes=[1])
vars(VISION).update(patch_size=3, temporal_patch_size=2, in_channels=1, spatial_merge_size=2, window_size=12)


def test_vision_windows_pair_the_patches_that_share_one() -> None:
    """Windows are 12 pixels wide, 4 patches; an image of 6 x 10 patches in 2 frames cuts the last ones short."""
    grid = (2, 6, 10)
    windows = [(t, row // 4, column // 4) for t in range(2) for row in range(6) for column in range(10)]
    together = sum(a == b for a in windows for b in windows)
    assert sum(n * n for n in truth.window_lengths(grid, 2, 2)) == together


def test_qwen2_5_vl_adds_windows_frames_merger_and_decoder() -> None:
    grids, c = [(2, 6, 10), (1, 4, 4)], VISION
    patches = [
        (i, t, r, k) for i, (ts, rs, ks) in enumerate(grids) for t in range(ts) for r in range(rs) for k in range(ks)
    ]
    frames, windows = [p[:2] for p in patches], [(i, t, r // 4, k // 4) for i, t, r, k in patches]
    tape = decoder(EXACT, LLAMA, llama_mlp)
    for block in range(2):
        segments: list[Any] = frames if block == 1 else windows
        for _ in range(sum(a == b for a in segments for b in segments)):
            tape.attend(True, True, True, 2, 2, 2)
        for _ in patches:
            tape.mlp(True, 4, 12)
            tape.mlp(True, 4, 4)
            tape.gated_mlp(True, 4, 5)
    for _ in patches:
        tape.mlp(False, 1 * 2 * 3 * 3, 4)
    for _ in range(len(patches) // 4):
        tape.mlp(True, 16, 16, 6)
    assert both(truth.qwen2_5_vl(truth.causal(LENGTHS, PADDED_TO), grids, LLAMA, c).exact) == tape.both


def test_a_grouped_convolution_connects_channels_of_one_group_only() -> None:
    tape = Tape()
    for _ in range(3 * 16):
        for _ in range(6):
            tape.product(False, True, 1, 3 * 9, 1)
    for _ in range(3 * 4):
        for output in range(8):
            connected = [channel for channel in range(6) if channel // 3 == output // 4]
            tape.product(True, True, 1, len(connected) * 4, 1)
    for _ in range(3):
        tape.mlp(True, 8, 5)
    convs = [truth.Conv(3, 6, 9, 16), truth.Conv(6, 8, 4, 4, groups=2)]
    assert both(truth.conv_net(3, convs, 5).full) == tape.both


def test_an_lstm_owes_no_gradient_to_its_constant_first_state() -> None:
    tape = Tape()
    for _ in range(3 * 2):
        state = False
        for _ in range(5):
            tape.mlp(True, 4, 16)
            state = tape.mlp(state, 4, 16)
    for _ in range(3 * 5):
        tape.mlp(True, 4, 7)
    c = Numbers(num_layers=2, hidden_size=4, vocab_size=7)
    assert both(truth.lstm(3, 5, c).full) == tape.both


def test_attention_without_training_has_no_backward() -> None:
    tape = Tape()
    for _ in range(8):
        for _ in range(4):
            tape.mlp(False, 6, 6, trained=False)
    for _ in causal_pairs(LENGTHS):
        tape.attend(False, False, False, 2, 3, 3)
    assert both(truth.attention_forward(truth.causal(LENGTHS, PADDED_TO), 6, 2).exact) == tape.both


def test_a_gradient_penalty_differentiates_its_own_backward_pass() -> None:
    """Forward products and those of the first backward pass are both on the tape that the second pass walks."""
    widths = [3, 5, 4, 1]
    forward, first = Tape(), Tape()
    for _ in range(2):
        forward.mlp(True, *widths)
        slope = False  # the first backward pass starts from a constant
        for outputs, inputs in ((1, 4), (4, 5), (5, 3)):
            slope = first.product(slope, True, 1, outputs, inputs)
    expected = forward.forward, first.forward + first.backward + forward.backward
    assert both(truth.gradient_penalty(2, widths).full) == expected


PLAIN_ROWS = ["conv_net", "gpt_einsum"]
TRANSFORMERS_ROWS = ["gpt2_eager", "llama_eager_non_reentrant", "deepseek_v3_loop", "bert_padded_eager", "vit_eager"]


def dispatched_flop(name: str) -> tuple[int, int]:
    """The row's step as torch's own counter sees it, and the truth about what is executed."""
    from torch.utils.flop_counter import FlopCounterMode

    row = importlib.import_module("rows").ROWS[name]
    case = row.build()
    with FlopCounterMode(display=False) as counter:
        case.step()
    return counter.get_total_flops(), row.hardware_flop


@pytest.mark.parametrize("name", PLAIN_ROWS)
def test_the_truth_is_what_torch_dispatches_to_the_last_flop(name: str) -> None:
    pytest.importorskip("torch")
    counted, expected = dispatched_flop(name)
    assert counted == expected


@pytest.mark.filterwarnings("ignore")  # other libraries' warnings are not ours to fail on
@pytest.mark.parametrize("name", [*TRANSFORMERS_ROWS, "qwen2_5_vl_eager", "lora_llama_eager"])
def test_the_truth_is_what_a_transformers_model_dispatches_to_the_last_flop(name: str) -> None:
    pytest.importorskip("transformers")
    if "lora" in name:
        pytest.importorskip("peft")
    counted, expected = dispatched_flop(name)
    assert counted == expected
