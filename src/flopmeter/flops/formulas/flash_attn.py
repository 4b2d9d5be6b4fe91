"""How many FLOPs do the operators of the flash-attn packages need?

Argument orders are those of flash-attn 2.7 and later (`flash_attn::`) and of its Hopper package (`flash_attn_3::`).
Masks are aligned with the last key; a window bound of -1 is none; causal means that nothing to the right is seen.
What is counted and left out: see `_attended`; besides, key-value caches (pages, new keys, `q_v`), which only inference
uses, and chunked attention, which is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flopmeter.flops.formulas import Spec, Work, formula
from flopmeter.flops.formulas._attended import Attention, Offsets, PairCount, banded, packed, tokens_first


def _mask(causal: bool, left: int, right: int) -> PairCount:
    return partial(banded, left=left, right=0 if causal else right, is_bottom_right=True)


@formula("flash_attn::_flash_attn_forward")
def forward(
    q: Spec,
    k: Spec,
    v: Spec,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    *rest: Any,
    **options: Any,
) -> Work:
    """Two products."""
    return tokens_first(q, k, v, _mask(causal, window_size_left, window_size_right)).forward()


@formula("flash_attn::_flash_attn_backward")
def backward(
    dout: Spec,
    q: Spec,
    k: Spec,
    v: Spec,
    _out: Spec,
    softmax_lse: Spec,
    dq: Spec | None,
    dk: Spec | None,
    dv: Spec | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    *rest: Any,
    **options: Any,
) -> Work:
    """Four products, and the scores once more."""
    return tokens_first(q, k, v, _mask(causal, window_size_left, window_size_right)).backward()


@formula("flash_attn::_flash_attn_varlen_forward", values=("cu_seqlens_q", "cu_seqlens_k"))
def varlen_forward(
    q: Spec,
    k: Spec,
    v: Spec,
    cu_seqlens_q: Spec,
    cu_seqlens_k: Spec,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    *rest: Any,
    **options: Any,
) -> Work:
    """Two products."""
    queries, keys = Offsets(cu_seqlens_q, max_seqlen_q), Offsets(cu_seqlens_k, max_seqlen_k)
    return packed(q, k, v, queries, keys, _mask(causal, window_size_left, window_size_right)).forward()


@formula("flash_attn::_flash_attn_varlen_backward", values=("cu_seqlens_q", "cu_seqlens_k"))
def varlen_backward(
    dout: Spec,
    q: Spec,
    k: Spec,
    v: Spec,
    _out: Spec,
    softmax_lse: Spec,
    dq: Spec | None,
    dk: Spec | None,
    dv: Spec | None,
    cu_seqlens_q: Spec,
    cu_seqlens_k: Spec,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    *rest: Any,
    **options: Any,
) -> Work:
    """Four products, and the scores once more."""
    queries, keys = Offsets(cu_seqlens_q, max_seqlen_q), Offsets(cu_seqlens_k, max_seqlen_k)
    return packed(q, k, v, queries, keys, _mask(causal, window_size_left, window_size_right)).backward()


def _hopper(q: Spec, k: Spec, v: Spec, queries: Offsets, keys: Offsets, count: PairCount) -> Attention:
    if queries.ends is None and keys.ends is None:
        return tokens_first(q, k, v, count)
    return packed(q, k, v, queries, keys, count)


@formula("flash_attn_3::fwd", "flash_attn_3::_flash_attn_forward", values=("cu_seqlens_q", "cu_seqlens_k"))
def hopper_forward(
    q: Spec,
    k: Spec,
    v: Spec,
    k_new: Spec | None = None,
    v_new: Spec | None = None,
    q_v: Spec | None = None,
    _out: Spec | None = None,
    cu_seqlens_q: Spec | None = None,
    cu_seqlens_k: Spec | None = None,
    cu_seqlens_k_new: Spec | None = None,
    seqused_q: Spec | None = None,
    seqused_k: Spec | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Spec | None = None,
    kv_batch_idx: Spec | None = None,
    leftpad_k: Spec | None = None,
    rotary_cos: Spec | None = None,
    rotary_sin: Spec | None = None,
    seqlens_rotary: Spec | None = None,
    q_descale: Spec | None = None,
    k_descale: Spec | None = None,
    v_descale: Spec | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    *rest: Any,
    **options: Any,
) -> Work:
    """Two products."""
    if attention_chunk:
        raise ValueError("chunked attention has no formula")
    queries, keys = Offsets(cu_seqlens_q, max_seqlen_q), Offsets(cu_seqlens_k, max_seqlen_k)
    return _hopper(q, k, v, queries, keys, _mask(is_causal, window_size_left, window_size_right)).forward()


@formula("flash_attn_3::bwd", values=("cu_seqlens_q", "cu_seqlens_k"))
def hopper_backward(
    dout: Spec,
    q: Spec,
    k: Spec,
    v: Spec,
    _out: Spec,
    softmax_lse: Spec,
    dq: Spec | None = None,
    dk: Spec | None = None,
    dv: Spec | None = None,
    cu_seqlens_q: Spec | None = None,
    cu_seqlens_k: Spec | None = None,
    seqused_q: Spec | None = None,
    seqused_k: Spec | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    *rest: Any,
    **options: Any,
) -> Work:
    """Four products, and the scores once more."""
    queries, keys = Offsets(cu_seqlens_q, max_seqlen_q), Offsets(cu_seqlens_k, max_seqlen_k)
    return _hopper(q, k, v, queries, keys, _mask(is_causal, window_size_left, window_size_right)).backward()


@formula("flash_attn_3::_flash_attn_backward", values=("cu_seqlens_q", "cu_seqlens_k"))
def hopper_wrapper_backward(
    dout: Spec,
    q: Spec,
    k: Spec,
    v: Spec,
    _out: Spec,
    softmax_lse: Spec,
    cu_seqlens_q: Spec | None = None,
    cu_seqlens_k: Spec | None = None,
    sequed_q: Spec | None = None,
    sequed_k: Spec | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Spec | None = None,
    dk: Spec | None = None,
    dv: Spec | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    *rest: Any,
    **options: Any,
) -> Work:
    """Four products, and the scores once more."""
    queries, keys = Offsets(cu_seqlens_q, max_seqlen_q), Offsets(cu_seqlens_k, max_seqlen_k)
    return _hopper(q, k, v, queries, keys, _mask(is_causal, window_size_left, window_size_right)).backward()
