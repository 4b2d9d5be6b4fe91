"""How many FLOPs does torch's scaled dot-product attention need, whichever kernel it picks?

The pairs, the products and what is left out are described in `_attended`. A causal mask is aligned with the first query
and key, except in CUDA's flash kernel, which aligns the last (torch gives it unequal lengths only where that is meant).
Fused kernels skip what a causal mask forbids, so their hardware count is the exact one. An explicit mask tensor is not
looked into: exact is full, and the caller, who can sum the mask, scales it by the share of pairs let through.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flopmeter.flops.formulas import Spec, Work, formula
from flopmeter.flops.formulas._attended import Attention, banded, heads_first
from flopmeter.flops.formulas._product import linear_flop


def _sdpa(query: Spec, key: Spec, value: Spec, is_causal: bool, is_bottom_right: bool = False) -> Attention:
    right = 0 if is_causal else None
    return heads_first(query, key, value, partial(banded, right=right, is_bottom_right=is_bottom_right))


@formula("aten::scaled_dot_product_attention", composite=True)
def scaled_dot_product_attention(
    query: Spec,
    key: Spec,
    value: Spec,
    attn_mask: Spec | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Work:
    """Two products; hardware as if a fused kernel ran it."""
    return _sdpa(query, key, value, is_causal).forward()


@formula("aten::_scaled_dot_product_attention_math", composite=True)
@formula("aten::_scaled_dot_product_attention_math_for_mps")
def math(
    query: Spec,
    key: Spec,
    value: Spec,
    attn_mask: Spec | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *rest: Any,
    **options: Any,
) -> Work:
    """Two products, executed in full before the mask is applied."""
    work = _sdpa(query, key, value, is_causal).forward()
    return work._replace(hardware=work.full)


@formula("aten::_scaled_dot_product_flash_attention")
def flash(query: Spec, key: Spec, value: Spec, *settings: Any, **options: Any) -> Work:
    """Two products; in both overloads (one has descaling tensors before `dropout_p`) the first flag is `is_causal`."""
    is_causal = options.get("is_causal", next((flag for flag in settings if isinstance(flag, bool)), False))
    return _sdpa(query, key, value, is_causal, is_bottom_right=True).forward()


@formula("aten::_scaled_dot_product_flash_attention_backward")
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
    **options: Any,
) -> Work:
    """Four products, and the scores once more."""
    return _sdpa(query, key, value, is_causal, is_bottom_right=True).backward()


@formula("aten::_scaled_dot_product_flash_attention_for_cpu")
def flash_for_cpu(
    query: Spec, key: Spec, value: Spec, dropout_p: float = 0.0, is_causal: bool = False, **options: Any
) -> Work:
    """Two products."""
    return _sdpa(query, key, value, is_causal).forward()


@formula("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_for_cpu_backward(
    grad_out: Spec,
    query: Spec,
    key: Spec,
    value: Spec,
    _out: Spec,
    logsumexp: Spec,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> Work:
    """Four products, and the scores once more."""
    return _sdpa(query, key, value, is_causal).backward()


@formula("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention")
def efficient(
    query: Spec,
    key: Spec,
    value: Spec,
    attn_bias: Spec | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *rest: Any,
    **options: Any,
) -> Work:
    """Two products."""
    return _sdpa(query, key, value, is_causal).forward()


@formula("aten::_scaled_dot_product_efficient_attention_backward")
def efficient_backward(
    grad_out_: Spec,
    query: Spec,
    key: Spec,
    value: Spec,
    attn_bias: Spec | None,
    _out: Spec,
    logsumexp: Spec,
    philox_seed: Spec,
    philox_offset: Spec,
    dropout_p: float,
    grad_input_mask: Any,
    is_causal: bool = False,
    **options: Any,
) -> Work:
    """Four products, and the scores once more; leaves out the bias's gradient."""
    return _sdpa(query, key, value, is_causal).backward()


@formula("aten::_scaled_dot_product_cudnn_attention_backward")
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
    return _sdpa(query, key, value, is_causal).backward()


@formula("aten::_scaled_dot_product_fused_attention_overrideable")
def overrideable(
    query: Spec,
    key: Spec,
    value: Spec,
    attn_bias: Spec | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *rest: Any,
    **options: Any,
) -> Work:
    """Two products."""
    return _sdpa(query, key, value, is_causal).forward()


@formula("aten::_scaled_dot_product_fused_attention_overrideable_backward")
def overrideable_backward(
    grad_out: Spec,
    query: Spec,
    key: Spec,
    value: Spec,
    attn_bias: Spec | None,
    grad_input_mask: Any,
    _out: Spec,
    logsumexp: Spec,
    cum_seq_q: Spec | None,
    cum_seq_k: Spec | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *rest: Any,
    **options: Any,
) -> Work:
    """Four products, and the scores once more; leaves out the bias's gradient."""
    return _sdpa(query, key, value, is_causal).backward()


@formula("aten::_native_multi_head_attention")
def native_multi_head_attention(
    query: Spec,
    key: Spec,
    value: Spec,
    embed_dim: int,
    num_head: int,
    qkv_weight: Spec,
    qkv_bias: Spec,
    proj_weight: Spec,
    *rest: Any,
    **options: Any,
) -> int:
    """Projections in and out, each a square product as the output's is, and attention in full; leaves out biases."""
    projections = sum(linear_flop(tokens, proj_weight) for tokens in (query, key, value, query))
    # One head as wide as all of them does the same work.
    return projections + heads_first(query, key, value, banded).forward().full


@formula("aten::_transformer_encoder_layer_fwd")
def transformer_encoder_layer(
    src: Spec,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Spec,
    qkv_bias: Spec,
    proj_weight: Spec,
    proj_bias: Spec,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Spec,
    norm_bias_1: Spec,
    norm_weight_2: Spec,
    norm_bias_2: Spec,
    ffn_weight_1: Spec,
    ffn_bias_1: Spec,
    ffn_weight_2: Spec,
    *rest: Any,
    **options: Any,
) -> int:
    """All linear layers and attention in full (inference only); leaves out biases, norms and activation."""
    linears = linear_flop(src, qkv_weight, proj_weight, ffn_weight_1, ffn_weight_2)
    return linears + heads_first(src, src, src, banded).forward().full
