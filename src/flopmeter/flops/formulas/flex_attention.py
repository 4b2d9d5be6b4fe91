"""How many FLOPs does flex_attention need, given the blocks that its mask keeps?

Full counts all pairs. Exact and hardware count the blocks that the kernel visits, each whole: a block that the mask
keeps in part is computed in part for the mathematics and whole by the kernel, and the formula cannot see inside it, so
exact is an upper bound (a caller who evaluates `mask_mod` does better). Without the values of the block counts, all
pairs count. What else is counted and left out: see `_attended`; `score_mod` is left out.

The backward kernel runs over keys and over queries separately: it computes the scores twice more and their gradient
twice, seven products where four are the mathematics (torch's `flex_backwards` template).
"""

from __future__ import annotations

from math import prod
from typing import Any

from flopmeter.flops.formulas import Spec, Work, formula
from flopmeter.flops.formulas._attended import Attention, Pairs, banded, heads_first

_PARTIAL, _WHOLE, _QUERY_BLOCK, _KEY_BLOCK = 2, 4, -3, -2
"""Where `BlockMask.as_tuple()` holds the counts of partly and wholly kept blocks, and the block's two sides."""


def _flex(query: Spec, key: Spec, value: Spec, block_mask: Any) -> Attention:
    attention = heads_first(query, key, value, banded)
    counts = [block_mask[index] for index in (_PARTIAL, _WHOLE) if block_mask[index] is not None]
    if any(count.values is None for count in counts):
        return attention
    # The mask has its own batch and heads, which may be 1 for all.
    visited = sum(sum(count.values) * attention.heads // prod(count.shape[:-1]) for count in counts)
    pairs = 2 * visited * block_mask[_QUERY_BLOCK] * block_mask[_KEY_BLOCK]
    # One head as wide as all of them: heads may keep different blocks. The last blocks may overhang.
    full = attention.pairs.full * attention.heads
    return attention._replace(pairs=Pairs(full=full, exact=min(pairs, full)), heads=1)


@formula("higher_order::flex_attention", values=("block_mask",))
def flex_attention(query: Spec, key: Spec, value: Spec, score_mod: Any, block_mask: Any, *rest: Any) -> Work:
    """Two products."""
    return _flex(query, key, value, block_mask).forward()


@formula("higher_order::flex_attention_backward", values=("block_mask",))
def flex_attention_backward(
    query: Spec,
    key: Spec,
    value: Spec,
    _out: Spec,
    logsumexp: Spec,
    grad_out: Spec | None,
    grad_logsumexp: Spec | None,
    fw_graph: Any,
    joint_graph: Any,
    block_mask: Any,
    *rest: Any,
) -> Work:
    """Four products, and three of them once more."""
    attention = _flex(query, key, value, block_mask)
    executed = attention.pairs.exact * attention.heads * (4 * attention.dim + 3 * attention.dim_v)
    return attention.backward()._replace(hardware=executed)
