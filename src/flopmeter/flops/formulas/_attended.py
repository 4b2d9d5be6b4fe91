"""How many query-key pairs does an attention look at, and how many FLOPs is that?

Forward: two products, of D (queries by keys) and Dv (probabilities by values) multiply-adds for each pair. Backward:
the four products of the chain rule, two of D and two of Dv; fused kernels compute the scores a second time, which is
hardware work only (FlashAttention-2, arXiv:2307.08691, sections 2.3 and 4.1). Left out everywhere: softmax, scaling,
bias, dropout, and the rounding of skipped regions to whole blocks in what the hardware executes.

Pairs are counted twice over, because a multiply-add is 2 FLOP and because halving S(S + 1) only at the end, or never,
keeps symbolic sizes polynomial.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import NamedTuple

from flopmeter.flops.formulas import Spec, Work


class Pairs(NamedTuple):
    """Twice the query-key pairs of one head."""

    full: int
    """As if nothing were masked."""
    exact: int
    """Those that the mask lets through."""


PairCount = Callable[[int, int], Pairs]
"""From the number of queries and of keys to the pairs."""


class Attention(NamedTuple):
    """One call, reduced to what its FLOPs depend on."""

    pairs: Pairs
    heads: int
    """Query heads, times the batch where all sequences have one length; key heads may be fewer (GQA)."""
    dim: int
    """Head dimension of queries and keys."""
    dim_v: int
    """Head dimension of values."""

    def forward(self) -> Work:
        return self._work(self.dim + self.dim_v, self.dim + self.dim_v)

    def backward(self) -> Work:
        """All gradients, wanted or not: a fused kernel computes them together."""
        return self._work(2 * self.dim + 2 * self.dim_v, 3 * self.dim + 2 * self.dim_v)

    def _work(self, model: int, hardware: int) -> Work:
        full, exact = (pairs * self.heads for pairs in self.pairs)
        return Work(full=full * model, exact=exact * model, hardware=exact * hardware)


def banded(
    num_queries: int,
    num_keys: int,
    left: int | None = None,
    right: int | None = None,
    is_bottom_right: bool = False,
) -> Pairs:
    """Pairs where query i may see keys i - left to i + right; a missing or negative bound is none.

    Args:
        is_bottom_right: The last query is aligned with the last key, instead of the first with the first.
    """
    full = 2 * num_queries * num_keys
    shift = num_keys - num_queries if is_bottom_right else 0

    def up_to(diagonal: int) -> int:
        """Twice the pairs with key <= query + diagonal."""
        return _clipped_sum(num_queries + diagonal, num_keys) - _clipped_sum(diagonal, num_keys)

    exact = full if right is None or right < 0 else up_to(shift + right)
    if left is not None and left >= 0:
        exact -= up_to(shift - left - 1)
    return Pairs(full=full, exact=exact)


def _clipped_sum(last: int, cap: int) -> int:
    """Twice the sum of min(n, cap) over n = 1 .. last."""
    last = max(last, 0)
    rising = min(last, cap)
    return rising * (rising + 1) + 2 * (last - rising) * cap


def heads_first(query: Spec, key: Spec, value: Spec, count: PairCount) -> Attention:
    """For (..., heads, length, dim), torch's layout."""
    *batch, num_queries, dim = query.shape
    return Attention(count(num_queries, key.shape[-2]), prod(batch), dim, value.shape[-1])


def tokens_first(query: Spec, key: Spec, value: Spec, count: PairCount) -> Attention:
    """For (batch, length, heads, dim), FlashAttention's layout."""
    batch, num_queries, heads, dim = query.shape
    return Attention(count(num_queries, key.shape[1]), batch * heads, dim, value.shape[-1])


class Offsets(NamedTuple):
    """Where the sequences of a packed batch begin and end."""

    ends: Spec | None
    """Cumulative lengths, starting with 0; None when the batch is not packed."""
    longest: int | None


def packed(query: Spec, key: Spec, value: Spec, queries: Offsets, keys: Offsets, count: PairCount) -> Attention:
    """For sequences laid end to end: (tokens, heads, dim), or the same with a leading 1."""
    *_, num_queries, heads, dim = query.shape
    pairs = _packed_pairs(num_queries, key.shape[-3], queries, keys, count)
    return Attention(pairs, heads, dim, value.shape[-1])


def _packed_pairs(num_queries: int, num_keys: int, queries: Offsets, keys: Offsets, count: PairCount) -> Pairs:
    """Sequence by sequence if the offsets are known, or if the longest length proves that all are equal."""
    if queries.ends is None or keys.ends is None:
        raise ValueError("packed attention needs the offsets of both queries and keys")
    if queries.ends.values is not None and keys.ends.values is not None:
        lengths = zip(_lengths(queries.ends.values), _lengths(keys.ends.values), strict=True)
        parts = [count(*pair) for pair in lengths]
        return Pairs(full=sum(part.full for part in parts), exact=sum(part.exact for part in parts))
    sequences = queries.ends.shape[0] - 1
    if queries.longest is None or keys.longest is None:
        raise ValueError("packed attention with unknown offsets needs the longest lengths")
    if sequences * queries.longest != num_queries or sequences * keys.longest != num_keys:
        raise ValueError("the lengths of packed sequences are unknown, and not all equal")
    one = count(queries.longest, keys.longest)
    return Pairs(full=one.full * sequences, exact=one.exact * sequences)


def _lengths(ends: tuple[int, ...]) -> list[int]:
    return [end - start for start, end in pairwise(ends)]
