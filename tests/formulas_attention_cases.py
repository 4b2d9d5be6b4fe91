"""One call or more of every attention operator that has a formula, with the FLOPs that counting pairs gives."""

from __future__ import annotations

from flopmeter.flops.formulas import Spec
from formulas_bruteforce import backward_work, band, causal, everything, forward_work, tuples, visible_pairs
from formulas_calls import Case, case

HEADS, DIM, DIM_V = 2 * 4, 8, 6
"""Batch of 2, 4 query heads (2 key heads), head dimensions of queries/keys and of values."""


def _qkv(num_queries: int, num_keys: int, tokens_first: bool = False) -> dict[str, tuple[int, ...]]:
    shapes = {"query": (2, 4, num_queries, DIM), "key": (2, 2, num_keys, DIM), "value": (2, 2, num_keys, DIM_V)}
    if tokens_first:
        shapes = {name: (b, s, h, d) for name, (b, h, s, d) in shapes.items()}
    return shapes


def _sdpa_cases() -> list[Case]:
    cases = []
    for op, make in (
        ("scaled_dot_product_attention", forward_work),
        ("_scaled_dot_product_flash_attention_for_cpu", forward_work),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", backward_work),
        ("_scaled_dot_product_efficient_attention", forward_work),
        ("_scaled_dot_product_efficient_attention_backward", backward_work),
        ("_scaled_dot_product_cudnn_attention", forward_work),
        ("_scaled_dot_product_cudnn_attention_backward", backward_work),
        ("_scaled_dot_product_fused_attention_overrideable", forward_work),
        ("_scaled_dot_product_fused_attention_overrideable_backward", backward_work),
    ):
        for sq, sk in ((5, 5), (3, 7), (7, 3)):
            exact = visible_pairs(sq, sk, causal)
            cases.append(case(f"aten::{op}", make(HEADS, sq * sk, exact, DIM, DIM_V), **_qkv(sq, sk), is_causal=True))
            cases.append(case(f"aten::{op}", make(HEADS, sq * sk, sq * sk, DIM, DIM_V), **_qkv(sq, sk)))
    for op in ("_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps"):
        masked = forward_work(HEADS, 21, visible_pairs(3, 7, causal), DIM, DIM_V)
        cases.append(case(f"aten::{op}", forward_work(HEADS, 21, 21, DIM, DIM_V), **_qkv(3, 7)))
        cases.append(case(f"aten::{op}", masked._replace(hardware=masked.full), **_qkv(3, 7), is_causal=True))
    flash = "aten::_scaled_dot_product_flash_attention"
    exact = visible_pairs(3, 7, band(3, 7, -1, 0))
    fused = forward_work(HEADS, 21, exact, DIM, DIM_V)
    return [
        *cases,
        case(flash, fused, **_qkv(3, 7), is_causal=True),
        case(flash, fused, "quantized", **_qkv(3, 7), is_causal=True),
        case(flash, forward_work(HEADS, 21, 21, DIM, DIM_V), **_qkv(3, 7)),
        case(f"{flash}_backward", backward_work(HEADS, 21, exact, DIM, DIM_V), **_qkv(3, 7), is_causal=True),
        *_fast_path_cases(),
    ]


def _fast_path_cases() -> list[Case]:
    """The fast paths of frozen nn.MultiheadAttention and nn.TransformerEncoderLayer: 2 x 5 tokens of 8, MLP of 24."""
    square = 2 * tuples(10, 8, 8)
    attention = 2 * 2 * tuples(2, 5, 5, 8)
    weights = {"qkv_weight": (24, 8), "proj_weight": (8, 8), "num_heads": 2}
    mlp = {"ffn_weight_1": (24, 8), "ffn_weight_2": (8, 24)}
    source = {"query": (2, 5, 8), "key": (2, 5, 8), "value": (2, 5, 8), "num_head": 2}
    return [
        case("aten::_native_multi_head_attention", 4 * square + attention, **source, proj_weight=(8, 8)),
        case("aten::_transformer_encoder_layer_fwd", 10 * square + attention, src=(2, 5, 8), **weights, **mlp),
    ]


ENDS_Q, ENDS_K = (0, 2, 5, 6), (0, 4, 7, 9)
"""Three packed sequences: 2, 3 and 1 queries over 4, 3 and 2 keys."""


def _packed_pairs(left: int, right: int, is_top_left: bool = False) -> tuple[int, int]:
    full = exact = 0
    for num_queries, num_keys in ((2, 4), (3, 3), (1, 2)):
        mask = causal if is_top_left else band(num_queries, num_keys, left, right)
        full += visible_pairs(num_queries, num_keys, everything)
        exact += visible_pairs(num_queries, num_keys, mask)
    return full, exact


def _packed(rank: int = 3, names: str = "query key value") -> dict[str, tuple[int, ...]]:
    shapes = ((6, 4, DIM), (9, 2, DIM), (9, 2, DIM_V))
    return {name: (1,) * (rank - 3) + shape for name, shape in zip(names.split(), shapes, strict=True)}


def _packed_cases() -> list[Case]:
    ends_q, ends_k = (Spec((4,), "int32", values=ends) for ends in (ENDS_Q, ENDS_K))
    cum = {"cum_seq_q": ends_q, "cum_seq_k": ends_k, "max_q": 3, "max_k": 4}
    cu = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "max_seqlen_q": 3, "max_seqlen_k": 4}
    varlen = {"cu_seq_q": ends_q, "cu_seq_k": ends_k, "max_q": 3, "max_k": 4}
    equal = {"cum_seq_q": Spec((4,)), "cum_seq_k": Spec((4,)), "max_q": 2, "max_k": 3}
    last, window = _packed_pairs(-1, 0), _packed_pairs(1, 0)
    first = _packed_pairs(-1, 0, is_top_left=True)
    dense = (15, visible_pairs(3, 5, band(3, 5, 1, 1)))
    flash, efficient, cudnn = "aten::_flash_attention_", "aten::_efficient_attention_", "aten::_cudnn_attention_"
    sliding = {"window_size_left": 1, "window_size_right": 1}
    cases = []
    for part, make in (("forward", forward_work), ("backward", backward_work)):
        cases += [
            case(flash + part, make(4, *last, DIM, DIM_V), **_packed(), **cum, is_causal=True),
            case(flash + part, make(4, *window, DIM, DIM_V), **_packed(), **cum, is_causal=True, window_size_left=1),
            case(flash + part, make(4, 18, 18, DIM, DIM_V), **_packed(), **equal),
            case(
                flash + part,
                make(HEADS, *dense, DIM, DIM_V),
                **_qkv(3, 5, True),
                **sliding,
                cum_seq_q=None,
                cum_seq_k=None,
            ),
            case(efficient + part, make(4, *first, DIM, DIM_V), **_packed(4), **cu, custom_mask_type=1),
            case(efficient + part, make(4, *last, DIM, DIM_V), **_packed(4), **cu, custom_mask_type=2),
            case(efficient + part, make(4, *window, DIM, DIM_V), **_packed(4), **cu, custom_mask_type=2, window_size=2),
            case(efficient + part, make(HEADS, 15, 15, DIM, DIM_V), **_qkv(3, 5, True), custom_mask_type=0),
            case(cudnn + part, make(4, *first, DIM, DIM_V), **_packed(), **cum, is_causal=True),
            case(cudnn + part, make(HEADS, 15, 15, DIM, DIM_V), **_qkv(3, 5), cum_seq_q=None, cum_seq_k=None),
        ]
    banded = {"window_size": [1, 0], "is_causal": True}
    attn = "torch_attn::_varlen_attn"
    return [
        *cases,
        case(attn, forward_work(4, *window, DIM, DIM_V), **_packed(), **varlen, **banded),
        case(attn, forward_work(4, *_packed_pairs(-1, -1), DIM, DIM_V), **_packed(), **varlen),
        case(f"{attn}_out", forward_work(4, *last, DIM, DIM_V), **_packed(), **varlen, is_causal=True),
        case(f"{attn}_backward", backward_work(4, *window, DIM, DIM_V), **_packed(), **varlen, **banded),
    ]


def _flash_attn_cases() -> list[Case]:
    ends_q, ends_k = (Spec((4,), "int32", values=ends) for ends in (ENDS_Q, ENDS_K))
    cu = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "max_seqlen_q": 3, "max_seqlen_k": 4}
    dense = dict(zip("qkv", _qkv(3, 5, True).values(), strict=True))
    unbound = {"window_size_left": -1, "window_size_right": -1}
    sliding = {"window_size_left": 1, "window_size_right": 0}
    seen, window = visible_pairs(3, 5, band(3, 5, -1, 0)), visible_pairs(3, 5, band(3, 5, 1, 0))
    packed = _packed(names="q k v")
    cases = []
    for part, make in (("forward", forward_work), ("backward", backward_work)):
        for causal_name, prefix in (
            ("causal", "flash_attn::_flash_attn_"),
            ("is_causal", "flash_attn_3::_flash_attn_"),
        ):
            on, off = {causal_name: True}, {causal_name: False}
            cases += [
                case(prefix + part, make(HEADS, 15, seen, DIM, DIM_V), **dense, **unbound, **on),
                case(prefix + part, make(HEADS, 15, window, DIM, DIM_V), **dense, **sliding, **off),
            ]
        on = {"causal": True}
        work = make(4, *_packed_pairs(1, 0), DIM, DIM_V)
        cases.append(case(f"flash_attn::_flash_attn_varlen_{part}", work, **packed, **cu, **sliding, **on))
        work = make(4, *_packed_pairs(-1, 0), DIM, DIM_V)
        hopper = {"forward": "fwd", "backward": "bwd"}[part]
        cases.append(case(f"flash_attn_3::{hopper}", work, **packed, **cu, is_causal=True))
        cases.append(case(f"flash_attn_3::{hopper}", make(HEADS, 15, 15, DIM, DIM_V), **dense))
        cases.append(case(f"flash_attn_3::_flash_attn_{part}", make(HEADS, 15, 15, DIM, DIM_V), **dense))
    work = forward_work(4, *_packed_pairs(-1, 0), DIM, DIM_V)
    cases.append(case("flash_attn::_flash_attn_varlen_forward", work, **packed, **cu, causal=True))
    return cases


def _flex_cases() -> list[Case]:
    """Query blocks of 4, key blocks of 2; one head keeps 3 blocks in part and 1 whole, the other 2 and 2."""
    partial = Spec((1, 2, 2), "int32", values=(1, 2, 1, 1))
    whole = Spec((1, 2, 2), "int32", values=(1, 0, 1, 1))
    query, key = (2, 2, 8, DIM), (2, 1, 6, DIM)
    shapes = {"query": query, "key": key, "value": (2, 1, 6, DIM_V)}
    pairs = 2 * (4 + 4) * tuples(4, 2)  # twice for the batch
    mask = (8, 6, partial, None, whole, *[None] * 9, 4, 2, None)
    blind = (8, 6, Spec((1, 2, 2)), None, None, *[None] * 9, 4, 2, None)
    huge = (8, 6, Spec((1, 1, 1), values=(1,)), None, None, *[None] * 9, 1 << 30, 1 << 30, None)
    full = 4 * tuples(8, 6)
    back = backward_work(1, full, pairs, DIM, DIM_V)
    # The kernel computes the scores and their gradient a second time, when it runs over the queries.
    back = back._replace(hardware=back.hardware + pairs * 2 * (DIM + DIM_V))
    blind_back = backward_work(1, full, full, DIM, DIM_V)
    blind_back = blind_back._replace(hardware=blind_back.hardware + full * 2 * (DIM + DIM_V))
    flex = "higher_order::flex_attention"
    return [
        case(flex, forward_work(1, full, pairs, DIM, DIM_V), **shapes, block_mask=mask),
        case(flex, forward_work(1, full, full, DIM, DIM_V), **shapes, block_mask=blind),
        case(flex, forward_work(1, full, full, DIM, DIM_V), **shapes, block_mask=huge),
        case(f"{flex}_backward", back, **shapes, block_mask=mask),
        case(f"{flex}_backward", blind_back, **shapes, block_mask=blind),
    ]


def attention_cases() -> list[Case]:
    return [*_sdpa_cases(), *_packed_cases(), *_flash_attn_cases(), *_flex_cases()]
