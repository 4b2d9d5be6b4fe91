"""Builds a call of an operator from named arguments, in the order of the operator's own schema.

Arguments that are not named get a stand-in, so that a formula that reads the wrong position fails. A tuple of ints
stands for a tensor of that shape.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch._inductor.kernel.mm_plus_mm
import torch.nn.attention.varlen

from flopmeter.flops.formulas import Spec, Work

# Argument order of operators that this machine's torch does not have, from the sources of flash-attn 2.8 and its
# Hopper package, of transformers 5, and of torch's higher-order operators.
FOREIGN: dict[str, str] = {
    "flash_attn::_flash_attn_forward": "q k v dropout_p softmax_scale causal window_size_left window_size_right "
    "softcap alibi_slopes return_softmax",
    "flash_attn::_flash_attn_backward": "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal "
    "window_size_left window_size_right softcap alibi_slopes deterministic rng_state",
    "flash_attn::_flash_attn_varlen_forward": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
    "softmax_scale causal window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None return_softmax=False "
    "block_table=None leftpad_k=None seqused_k=None zero_tensors=False",
    "flash_attn::_flash_attn_varlen_backward": "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k "
    "max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    "deterministic rng_state zero_tensors",
    "flash_attn_3::bwd": "dout q k v out softmax_lse dq=None dk=None dv=None cu_seqlens_q=None cu_seqlens_k=None "
    "seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None softmax_scale=None is_causal=False "
    "window_size_left=-1 window_size_right=-1 softcap=0.0 deterministic=False sm_margin=0",
    "flash_attn_3::_flash_attn_backward": "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None "
    "sequed_q=None sequed_k=None max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None softmax_scale=None "
    "is_causal=False window_size_left=-1 window_size_right=-1 softcap=0.0 deterministic=False sm_margin=0",
    "transformers::grouped_mm_fallback": "input weight offs",
    "higher_order::flex_attention": "query key value score_mod block_mask scale kernel_options score_mod_other_buffers "
    "mask_mod_other_buffers",
    "higher_order::flex_attention_backward": "query key value out logsumexp grad_out grad_logsumexp fw_graph "
    "joint_graph block_mask scale kernel_options score_mod_other_buffers mask_mod_other_buffers",
}
_HOPPER = (
    "q k v k_new=None v_new=None q_v=None out=None cu_seqlens_q=None cu_seqlens_k=None cu_seqlens_k_new=None "
    "seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None page_table=None kv_batch_idx=None "
    "leftpad_k=None rotary_cos=None rotary_sin=None seqlens_rotary=None q_descale=None k_descale=None v_descale=None "
    "softmax_scale=None is_causal=False window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 "
    "is_rotary_interleaved=False scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0"
)
FOREIGN |= {"flash_attn_3::fwd": _HOPPER, "flash_attn_3::_flash_attn_forward": _HOPPER}


class Argument(NamedTuple):
    name: str
    stand_in: Any
    """The default, or a value of the right kind."""
    has_default: bool
    is_keyword: bool


def known_arguments(op: str, overload: str) -> Iterator[Argument]:
    """Of an operator that torch knows."""
    stand_ins = {"Tensor": Spec((97,)), "List[Tensor]": [Spec((97,))], "int": 1, "float": 0.5, "bool": False, "str": ""}
    for argument in torch._C._get_schema(op, overload).arguments:
        kind = str(argument.type)
        if argument.has_default_value():
            value = argument.default_value
        elif kind.startswith("Optional"):
            value = None
        elif kind.startswith("List[") and "Tensor" not in kind:
            value = [1]
        else:
            value = stand_ins.get(kind, 1)
        yield Argument(argument.name, value, argument.has_default_value(), argument.kwarg_only)


def foreign_arguments(op: str) -> Iterator[Argument]:
    for text in FOREIGN[op].split():
        name, _, default = text.partition("=")
        yield Argument(name, literal_eval(default) if default else None, bool(default), False)


class Case(NamedTuple):
    op: str
    expected: Work
    args: list[Any]
    options: dict[str, Any]
    num_given: int
    """How many of `args` the dispatcher passes on: it drops defaults at the end, unless they were given."""


def case(op: str, expected: int | Work, overload: str = "", /, **named: Any) -> Case:
    values = {
        name: Spec(value) if type(value) is tuple and all(isinstance(size, int) for size in value) else value
        for name, value in named.items()
    }
    arguments = list(foreign_arguments(op) if op in FOREIGN else known_arguments(op, overload))
    unknown = set(values) - {argument.name for argument in arguments}
    assert not unknown, f"{op} has no argument {unknown}"
    ordered = [argument for argument in arguments if not argument.is_keyword]
    given = [index for index, argument in enumerate(ordered, 1) if argument.name in values or not argument.has_default]
    return Case(
        op,
        expected if isinstance(expected, Work) else Work(expected, expected, expected),
        [values.get(argument.name, argument.stand_in) for argument in ordered],
        {argument.name: values.get(argument.name, argument.stand_in) for argument in arguments if argument.is_keyword},
        max(given),
    )
