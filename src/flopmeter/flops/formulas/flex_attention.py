"""How many FLOPs does flex_attention need, given the blocks that its mask keeps?

Full counts all pairs. Exact and hardware count the blocks that the kernel visits, each whole: a block that the mask
keeps in part is computed in part for the mathematics and whole by the kernel, and the formula cannot see inside it, so
exact is an upper bound (a caller who evaluates `mask_mod` does better). Without the values of the block counts, all
pairs count. What else is counted and left out: see `attention`; `score_mod` is left out.

The backward kernel runs over keys and over queries separately: it computes the scores twice more and their gradient
twice, seven products where four are the mathematics (torch's `flex_backwards` template).
"""

from __future__ import annotations

from math import prod
from typing import Any

from flopmeter.flops.formulas import Spec, Work, formula
from flopmeter.flops.formulas._product import attention_work

_PARTIAL, _WHOLE, _QUERY_BLOCK, _KEY_BLOCK = 2, 4, -3, -2
"""Where `BlockMask.as_tuple()` holds the counts of partly and wholly kept blocks, and the block's two sides."""


def _pairs(query: Spec, key: Spec, block_mask: Any) -> tuple[int, int]:
    """Of all heads: every pair, and those of the visited blocks."""
    heads = prod(query.shape[:-2])
    full = heads * query.shape[-2] * key.shape[-2]
    counts = [block_mask[index] for index in (_PARTIAL, _WHOLE) if block_mask[index] is not None]
    if any(count.values is None for count in counts):
        return full, full
    # The mask has its own batch and heads, which may be 1 for all. The last blocks may overhang.
    visited = sum(sum(count.values) * heads // prod(count.shape[:-1]) for count in counts)
    return full, min(visited * block_mask[_QUERY_BLOCK] * block_mask[_KEY_BLOCK], full)


@formula("higher_order::flex_attention query key value score_mod block_mask", values=("block_mask",))
def flex_attention(query: Spec, key: Spec, value: Spec, block_mask: Any, **_: Any) -> Work:
    """Two products."""
    return attention_work(*_pairs(query, key, block_mask), query.shape[-1], value.shape[-1], is_backward=False)


@formula(
    "higher_order::flex_attention_backward query key value out logsumexp grad_out grad_logsumexp "
    "fw_graph joint_graph block_mask",
    values=("block_mask",),
)
def flex_attention_backward(query: Spec, key: Spec, value: Spec, block_mask: Any, **_: Any) -> Work:
    """Four products, and three of them once more."""
    full, exact = _pairs(query, key, block_mask)
    dim, dim_v = query.shape[-1], value.shape[-1]
    work = attention_work(full, exact, dim, dim_v, is_backward=True)
    return work._replace(hardware=2 * exact * (4 * dim + 3 * dim_v))
