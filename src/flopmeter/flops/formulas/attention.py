"""How many FLOPs does attention need, whichever kernel runs it? One row for each order of arguments, as in the schema.

Forward: two products, of D (queries by keys) and Dv (probabilities by values) multiply-adds for each query-key pair.
Backward: the four products of the chain rule, two of D and two of Dv; fused kernels compute the scores once more, which
is hardware work only (FlashAttention-2, arXiv:2307.08691, sections 2.3 and 4.1). Fused kernels skip what a causal mask
or a window forbids, so their hardware count is the exact one. An explicit mask tensor is not looked into: exact is
full, and the caller, who can sum the mask, scales it by the share of pairs that it lets through.

Where sequences of unequal length lie end to end, the pairs of each are counted by itself, in the full count too: nobody
multiplies across documents. A causal mask is aligned with the first query and key, in FlashAttention's kernels on a GPU
with the last; there a window bound of -1 is none. Argument orders of other packages are those of flash-attn 2.7 and
later (`flash_attn::`) and of its Hopper package (`flash_attn_3::`).

flex_attention: full counts all pairs; exact and hardware count the blocks that the kernel visits, each whole: a block
that the mask keeps in part is computed in part for the mathematics and whole by the kernel, and the formula cannot see
inside it, so exact is an upper bound (a caller who evaluates `mask_mod` does better). Without the values of the block
counts, all pairs count. `score_mod` is left out.

The backward kernel runs over keys and over queries separately: it computes the scores twice more and their gradient
twice, seven products where four are the mathematics (torch's `flex_backwards` template).

Left out: softmax, scaling, bias and its gradient, dropout, the rounding of skipped regions to whole blocks, keys hidden
by `seqused_k`/`seqlen_k`, and the key-value caches of inference. Chunked attention is refused.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

from flopmeter.flops.formulas import Spec, Work, attention_work, formula, linear_flop

HEADS_FIRST = """
aten::scaled_dot_product_attention aten::_scaled_dot_product_attention_math
    aten::_scaled_dot_product_attention_math_for_mps query key value attn_mask dropout_p is_causal
aten::_scaled_dot_product_flash_attention_backward grad_out query key value out logsumexp starts_q starts_k max_q max_k
    dropout_p is_causal
aten::_scaled_dot_product_flash_attention_for_cpu query key value dropout_p is_causal
aten::_scaled_dot_product_flash_attention_for_cpu_backward grad_out query key value out logsumexp dropout_p is_causal
aten::_scaled_dot_product_efficient_attention aten::_scaled_dot_product_cudnn_attention
    query key value attn_bias compute_log_sumexp dropout_p is_causal
aten::_scaled_dot_product_efficient_attention_backward grad_out_ query key value attn_bias out logsumexp
    philox_seed philox_offset dropout_p grad_input_mask is_causal
aten::_scaled_dot_product_cudnn_attention_backward grad_out query key value out logsumexp philox_seed philox_offset
    attn_bias starts_q starts_k max_q max_k dropout_p is_causal
aten::_scaled_dot_product_fused_attention_overrideable query key value attn_bias dropout_p is_causal
aten::_scaled_dot_product_fused_attention_overrideable_backward grad_out query key value attn_bias grad_input_mask
    out logsumexp starts_q starts_k max_q max_k dropout_p is_causal
aten::_cudnn_attention_forward query key value attn_bias cum_seq_q cum_seq_k max_q max_k
    compute_log_sumexp dropout_p is_causal
aten::_cudnn_attention_backward grad_out query key value out logsumexp philox_seed philox_offset attn_bias
    cum_seq_q cum_seq_k max_q max_k dropout_p is_causal
"""
"""Operators on (..., heads, length, dim), torch's layout. `starts_q`, `starts_k`: offsets that are no use here."""
TOKENS_FIRST = """
aten::_flash_attention_forward query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal
aten::_flash_attention_backward grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k
    dropout_p is_causal
aten::_efficient_attention_forward query key value bias cu_seqlens_q cu_seqlens_k max_q max_k
    dropout_p custom_mask_type
aten::_efficient_attention_backward grad_out_ query key value bias out cu_seqlens_q cu_seqlens_k max_q max_k
    logsumexp dropout_p philox_seed philox_offset custom_mask_type
torch_attn::_varlen_attn query key value cu_seq_q cu_seq_k max_q max_k is_causal scale window_size
torch_attn::_varlen_attn_out out query key value cu_seq_q cu_seq_k max_q max_k is_causal scale window_size
torch_attn::_varlen_attn_backward grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k
    is_causal rng_state scale window_size
flash_attn::_flash_attn_forward query key value dropout_p softmax_scale is_causal window_size_left window_size_right
flash_attn::_flash_attn_backward dout query key value out softmax_lse dq dk dv
    dropout_p softmax_scale is_causal window_size_left window_size_right
flash_attn::_flash_attn_varlen_forward query key value cu_seqlens_q cu_seqlens_k max_q max_k
    dropout_p softmax_scale is_causal window_size_left window_size_right
flash_attn::_flash_attn_varlen_backward dout query key value out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k
    max_q max_k dropout_p softmax_scale is_causal window_size_left window_size_right
flash_attn_3::fwd flash_attn_3::_flash_attn_forward query key value k_new v_new q_v out
    cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k
    max_q max_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale
    softmax_scale is_causal window_size_left window_size_right attention_chunk
flash_attn_3::bwd dout query key value out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k seqused_q seqused_k
    max_q max_k softmax_scale is_causal window_size_left window_size_right
flash_attn_3::_flash_attn_backward dout query key value out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k
    max_q max_k dq dk dv softmax_scale is_causal window_size_left window_size_right
"""
"""Operators on (batch, length, heads, dim), or on (tokens, heads, dim) with the offsets of the sequences."""
_OFFSETS = [f"{name}_{side}" for name in ("cum_seq", "cu_seq", "cu_seqlens") for side in "qk"]
_COMPOSITE = ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math")


def visible_pairs(queries: int, keys: int, left: int | None, right: int | None, is_last_aligned: bool) -> int:
    """Pairs where query i may see keys i - left to i + right; a missing or negative bound is none.

    Args:
        is_last_aligned: The last query is aligned with the last key, instead of the first with the first.
    """
    shift = keys - queries if is_last_aligned else 0

    def clipped_sum(last: int) -> int:
        """The sum of min(n, keys) over n = 1 .. last."""
        rising = min(max(last, 0), keys)
        return rising * (rising + 1) // 2 + (max(last, 0) - rising) * keys

    def up_to(diagonal: int) -> int:
        """Pairs with key <= query + diagonal."""
        return clipped_sum(queries + diagonal) - clipped_sum(diagonal)

    seen = queries * keys if right is None or right < 0 else up_to(shift + right)
    return seen - up_to(shift - left - 1) if left is not None and left >= 0 else seen


def _attention(
    op: str,
    is_heads_first: bool,
    /,
    query: Spec,
    key: Spec,
    value: Spec,
    is_causal: bool = False,
    custom_mask_type: int = 0,
    window_size: Any = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    attention_chunk: int = 0,
    **others: Any,
) -> Work:
    """Args: custom_mask_type: 0 is no mask, 1 causal from the first key, 2 causal to the last."""
    if attention_chunk:
        raise ValueError("chunked attention has no formula")
    left, right = window_size_left, window_size_right
    if window_size:  # one number of memory-efficient attention, which holds the query's own key
        left, right = (window_size - 1, None) if isinstance(window_size, int) else window_size
    if is_causal or custom_mask_type:
        right = 0
    is_flash = ("flash" in op and "_for_cpu" not in op) or op.startswith("torch_attn")
    offsets = {name[-1]: ends for name, ends in others.items() if name in _OFFSETS and ends is not None}
    if offsets:
        heads, lengths = query.shape[-2], _packed_lengths(query, key, offsets, max_q, max_k)
    elif is_heads_first:
        heads, lengths = prod(query.shape[:-2]), [(query.shape[-2], key.shape[-2])]
    else:
        batch, queries, heads, _ = query.shape
        heads, lengths = batch * heads, [(queries, key.shape[1])]
    full = heads * sum(queries * keys for queries, keys in lengths)
    is_last_aligned = is_flash or custom_mask_type == 2
    exact = heads * sum(visible_pairs(*pair, left, right, is_last_aligned) for pair in lengths)
    work = attention_work(full, exact, query.shape[-1], value.shape[-1], "backward" in op or "bwd" in op)
    return work._replace(hardware=work.full) if "_math" in op else work  # computed in full before the mask is applied


def _packed_lengths(
    query: Spec, key: Spec, offsets: dict[str, Spec], max_q: int | None, max_k: int | None
) -> list[tuple[int, int]]:
    """Queries and keys of each sequence: by the offsets, or where the longest length proves that all are equal."""
    if len(offsets) < 2:
        raise ValueError("packed attention needs the offsets of both queries and keys")
    of_queries, of_keys = offsets["q"], offsets["k"]
    if of_queries.values is not None and of_keys.values is not None:
        starts = zip(pairwise(of_queries.values), pairwise(of_keys.values), strict=True)
        return [(q[1] - q[0], k[1] - k[0]) for q, k in starts]
    if max_q is None or max_k is None:
        raise ValueError("packed attention with unknown offsets needs the longest lengths")
    sequences = of_queries.shape[0] - 1
    if (sequences * max_q, sequences * max_k) != (query.shape[-3], key.shape[-3]):
        raise ValueError("the lengths of packed sequences are unknown, and not all equal")
    return [(max_q, max_k)] * sequences


for _table in (HEADS_FIRST, TOKENS_FIRST):
    for _row in _table.replace("\n    ", " ").split("\n")[1:-1]:
        _names = [word for word in _row.split() if "::" not in word]
        for _op in _row.split()[: -len(_names)]:
            formula(
                " ".join((_op, *_names)),
                values=[name for name in _names if name in _OFFSETS],
                composite=_op in _COMPOSITE,
            )(partial(_attention, _op, _table is HEADS_FIRST))


@formula("aten::_scaled_dot_product_flash_attention")
def flash(query: Spec, key: Spec, value: Spec, *settings: Any, **options: Any) -> Work:
    """In both overloads (one has descaling tensors before `dropout_p`) the first flag is `is_causal`."""
    is_causal = options.get("is_causal", next((flag for flag in settings if isinstance(flag, bool)), False))
    return _attention("aten::_scaled_dot_product_flash_attention", True, query, key, value, is_causal)


@formula("aten::_native_multi_head_attention query key value embed_dim num_head qkv_weight qkv_bias proj_weight")
def native_multi_head_attention(query: Spec, key: Spec, value: Spec, proj_weight: Spec, **_: Any) -> int:
    """A frozen layer's fast path: four projections, each as the output's is, and attention in full, as of one head."""
    projections = sum(linear_flop(tokens, proj_weight) for tokens in (query, key, value, query))
    return projections + _attention("", True, query, key, value).full


@formula("""aten::_transformer_encoder_layer_fwd src embed_dim num_heads qkv_weight qkv_bias proj_weight proj_bias
    use_gelu norm_first eps norm_weight_1 norm_bias_1 norm_weight_2 norm_bias_2 ffn_weight_1 ffn_bias_1 ffn_weight_2""")
def transformer_encoder_layer(
    src: Spec, qkv_weight: Spec, proj_weight: Spec, ffn_weight_1: Spec, ffn_weight_2: Spec, **_: Any
) -> int:
    """A frozen layer's fast path: all linear layers, and attention in full, as of one head."""
    linears = linear_flop(src, qkv_weight, proj_weight, ffn_weight_1, ffn_weight_2)
    return linears + _attention("", True, src, src, src).full


_PARTIAL, _WHOLE, _QUERY_BLOCK, _KEY_BLOCK = 2, 4, -3, -2
"""Where `BlockMask.as_tuple()` holds the counts of partly and wholly kept blocks, and the block's two sides."""


@formula(
    "higher_order::flex_attention query key value score_mod block_mask",
    """higher_order::flex_attention_backward query key value out logsumexp grad_out grad_logsumexp
    fw_graph joint_graph block_mask""",
    values=("block_mask",),
)
def flex_attention(query: Spec, key: Spec, value: Spec, block_mask: Any, **others: Any) -> Work:
    """Two products; backward four, and three of them once more."""
    heads, dim, dim_v = prod(query.shape[:-2]), query.shape[-1], value.shape[-1]
    exact = full = heads * query.shape[-2] * key.shape[-2]
    counts = [block_mask[index] for index in (_PARTIAL, _WHOLE) if block_mask[index] is not None]
    if all(count.values is not None for count in counts):
        # The mask has its own batch and heads, which may be 1 for all. The last blocks may overhang.
        visited = sum(sum(count.values) * heads // prod(count.shape[:-1]) for count in counts)
        exact = min(visited * block_mask[_QUERY_BLOCK] * block_mask[_KEY_BLOCK], full)
    is_backward = "grad_out" in others
    work = attention_work(full, exact, dim, dim_v, is_backward)
    return work._replace(hardware=2 * exact * (4 * dim + 3 * dim_v)) if is_backward else work
