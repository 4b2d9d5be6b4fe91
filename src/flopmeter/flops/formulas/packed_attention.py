"""How many FLOPs does attention need where sequences of unequal length lie end to end?

These are the operators beneath torch's `varlen_attn`, nested tensors and SDPA; without offsets they take a plain batch.
The pairs of each sequence are counted by itself, in the full count too: nobody multiplies across documents. Left out
besides what `_attended` says: keys hidden by `seqused_k`/`seqlen_k`, and paged caches (inference).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from flopmeter.flops.formulas import Spec, Work, formula
from flopmeter.flops.formulas._attended import (
    Attention,
    Offsets,
    PairCount,
    banded,
    heads_first,
    packed,
    tokens_first,
)


def _flash_mask(is_causal: bool, left: int | None, right: int | None) -> PairCount:
    """FlashAttention's rule: aligned with the last key, and causal means that nothing to the right is seen."""
    return partial(banded, left=left, right=0 if is_causal else right, is_bottom_right=True)


def _either(query: Spec, key: Spec, value: Spec, queries: Offsets, keys: Offsets, count: PairCount) -> Attention:
    if queries.ends is None:
        return tokens_first(query, key, value, count)
    return packed(query, key, value, queries, keys, count)


@formula("aten::_flash_attention_forward", values=("cum_seq_q", "cum_seq_k"))
def flash_forward(
    query: Spec,
    key: Spec,
    value: Spec,
    cum_seq_q: Spec | None,
    cum_seq_k: Spec | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *rest: Any,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **options: Any,
) -> Work:
    """Two products."""
    count = _flash_mask(is_causal, window_size_left, window_size_right)
    return _either(query, key, value, Offsets(cum_seq_q, max_q), Offsets(cum_seq_k, max_k), count).forward()


@formula("aten::_flash_attention_forward_no_dropout_inplace", values=("cum_seq_q", "cum_seq_k"))
def flash_forward_in_place(_out: Spec, *arguments: Any, **options: Any) -> Work:
    """Two products."""
    return flash_forward(*arguments, **options)


@formula("aten::_flash_attention_backward", values=("cum_seq_q", "cum_seq_k"))
def flash_backward(
    grad_out: Spec,
    query: Spec,
    key: Spec,
    value: Spec,
    _out: Spec,
    logsumexp: Spec,
    cum_seq_q: Spec | None,
    cum_seq_k: Spec | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *rest: Any,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **options: Any,
) -> Work:
    """Four products, and the scores once more."""
    count = _flash_mask(is_causal, window_size_left, window_size_right)
    return _either(query, key, value, Offsets(cum_seq_q, max_q), Offsets(cum_seq_k, max_k), count).backward()


def _efficient_mask(custom_mask_type: int, window_size: int | None) -> PairCount:
    """0 is no mask, 1 causal from the first key, 2 causal to the last; a window holds the query's own key."""
    right = 0 if custom_mask_type else None
    left = window_size - 1 if window_size else None
    return partial(banded, left=left, right=right, is_bottom_right=custom_mask_type == 2)


@formula("aten::_efficient_attention_forward", values=("cu_seqlens_q", "cu_seqlens_k"))
def efficient_forward(
    query: Spec,
    key: Spec,
    value: Spec,
    bias: Spec | None,
    cu_seqlens_q: Spec | None,
    cu_seqlens_k: Spec | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    *rest: Any,
    window_size: int | None = None,
    **options: Any,
) -> Work:
    """Two products."""
    queries, keys = Offsets(cu_seqlens_q, max_seqlen_q), Offsets(cu_seqlens_k, max_seqlen_k)
    return _either(query, key, value, queries, keys, _efficient_mask(custom_mask_type, window_size)).forward()


@formula("aten::_efficient_attention_backward", values=("cu_seqlens_q", "cu_seqlens_k"))
def efficient_backward(
    grad_out_: Spec,
    query: Spec,
    key: Spec,
    value: Spec,
    bias: Spec | None,
    _out: Spec,
    cu_seqlens_q: Spec | None,
    cu_seqlens_k: Spec | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Spec,
    dropout_p: float,
    philox_seed: Spec,
    philox_offset: Spec,
    custom_mask_type: int,
    *rest: Any,
    window_size: int | None = None,
    **options: Any,
) -> Work:
    """Four products, and the scores once more; leaves out the bias's gradient."""
    queries, keys = Offsets(cu_seqlens_q, max_seqlen_q), Offsets(cu_seqlens_k, max_seqlen_k)
    return _either(query, key, value, queries, keys, _efficient_mask(custom_mask_type, window_size)).backward()


def _cudnn(query: Spec, key: Spec, value: Spec, queries: Offsets, keys: Offsets, is_causal: bool) -> Attention:
    """Heads come first in a plain batch, tokens in a packed one; causal from the first key."""
    count = partial(banded, right=0 if is_causal else None)
    if queries.ends is None:
        return heads_first(query, key, value, count)
    return packed(query, key, value, queries, keys, count)


@formula("aten::_cudnn_attention_forward", values=("cum_seq_q", "cum_seq_k"))
def cudnn_forward(
    query: Spec,
    key: Spec,
    value: Spec,
    attn_bias: Spec | None,
    cum_seq_q: Spec | None,
    cum_seq_k: Spec | None,
    max_q: int,
    max_k: int,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *rest: Any,
    **options: Any,
) -> Work:
    """Two products."""
    return _cudnn(query, key, value, Offsets(cum_seq_q, max_q), Offsets(cum_seq_k, max_k), is_causal).forward()


@formula("aten::_cudnn_attention_backward", values=("cum_seq_q", "cum_seq_k"))
def cudnn_backward(
    grad_out: Spec,
    query: Spec,
    key: Spec,
    value: Spec,
    _out: Spec,
    logsumexp: Spec,
    philox_seed: Spec,
    philox_offset: Spec,
    attn_bias: Spec | None,
    cum_seq_q: Spec | None,
    cum_seq_k: Spec | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> Work:
    """Four products, and the scores once more."""
    return _cudnn(query, key, value, Offsets(cum_seq_q, max_q), Offsets(cum_seq_k, max_k), is_causal).backward()


@formula("torch_attn::_varlen_attn", values=("cu_seq_q", "cu_seq_k"))
def varlen_attn(
    query: Spec,
    key: Spec,
    value: Spec,
    cu_seq_q: Spec,
    cu_seq_k: Spec | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    *rest: Any,
    **options: Any,
) -> Work:
    """Two products."""
    count = _flash_mask(is_causal, *(window_size or (None, None)))
    return packed(query, key, value, Offsets(cu_seq_q, max_q), Offsets(cu_seq_k, max_k), count).forward()


@formula("torch_attn::_varlen_attn_out", values=("cu_seq_q", "cu_seq_k"))
def varlen_attn_out(_out: Spec, *arguments: Any, **options: Any) -> Work:
    """Two products."""
    return varlen_attn(*arguments, **options)


@formula("torch_attn::_varlen_attn_backward", values=("cu_seq_q", "cu_seq_k"))
def varlen_attn_backward(
    grad_out: Spec,
    query: Spec,
    key: Spec,
    value: Spec,
    _out: Spec,
    lse: Spec,
    cu_seq_q: Spec,
    cu_seq_k: Spec,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Spec,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
) -> Work:
    """Four products, and the scores once more."""
    count = _flash_mask(is_causal, *(window_size or (None, None)))
    return packed(query, key, value, Offsets(cu_seq_q, max_q), Offsets(cu_seq_k, max_k), count).backward()
