"""Which matrix products are attention, and which share of their query-key pairs does the mask let through?

Eager and math attention dispatch plain matrix products. They are recognised by what happens to the result: scores that
reach a softmax over keys are attention, and so is the product of that softmax with the values. Masked scores that reach
a top-k over keys (an indexer's, which chooses the keys of sparse attention) count their open pairs likewise. The masks
that were applied on the way say how many pairs count. Sums are taken on the device and read after the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flopmeter.flops.long_masks import BLOCKED_BELOW, Known, has_values
from flopmeter.flops.token_rows import Text, TokenRows, tensors_in

VANISHES_BELOW, STAYS_ABOVE = -50.0, -20.0
"""So does a mask of which every value is at or below the first, where exp() makes nothing of it, or at or above the
second. A bias that falls off step by step (ALiBi) is none."""

SCORE_PRODUCTS = frozenset({"aten::bmm", "aten::baddbmm", "aten::mm"})
_SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax", "aten::softmax", "aten::_log_softmax"})
_ACTIVATES = frozenset({"aten::exp", "aten::exp_", "aten::sigmoid", "aten::sigmoid_"})
"""What some put in the place of a softmax."""
_MULTIPLY = frozenset({"aten::mul", "aten::mul_"})
_MASKED_FILL = frozenset({"aten::masked_fill", "aten::masked_fill_"})
_INDEX_PUT = frozenset({"aten::index_put", "aten::index_put_"})
_ADD = frozenset({"aten::add", "aten::add_"})
_SUBTRACT = frozenset({"aten::sub", "aten::sub_"})
_TRIANGLES = {"aten::tril": torch.tril, "aten::tril_": torch.tril, "aten::triu": torch.triu, "aten::triu_": torch.triu}
_KEEPS_SCORES = frozenset({
    "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_alias", "aten::expand", "aten::transpose",
    "aten::permute", "aten::squeeze", "aten::unsqueeze", "aten::slice", "aten::select", "aten::alias", "aten::detach",
    "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::to", "aten::mul", "aten::mul_", "aten::div",
    "aten::div_", "aten::sub", "aten::sub_", "aten::tanh", "aten::clamp", "aten::nan_to_num", "aten::native_dropout",
    "aten::dropout", "aten::cat", "aten::relu", "aten::sum", "aten::maximum", "aten::minimum", "aten::clamp_min",
    "aten::clamp_max", "aten::index_select", "aten::pow", "aten::square", "aten::abs", "aten::silu", "aten::gelu",
    "aten::softplus", "aten::elu", "aten::leaky_relu",
}) | _ACTIVATES  # fmt: skip
_MASKS_NOTHING = frozenset({"aten::zeros", "aten::new_zeros", "aten::zeros_like", "aten::embedding"})
_KEEPS_SHAPE = frozenset({"aten::alias", "aten::detach", "aten::clone", "aten::contiguous", "aten::_to_copy"})
TRACKED = SCORE_PRODUCTS | _SOFTMAX | _MASKED_FILL | _ADD | _KEEPS_SCORES | _MASKS_NOTHING | _INDEX_PUT | {
    "aten::where", "aten::topk", "aten::fill_", "aten::copy_", "aten::zero_", "aten::masked_scatter_", "aten::scatter_",
    "aten::index_fill_", "aten::index_copy_", "aten::index_add_",
} | _TRIANGLES.keys()  # fmt: skip
MAX_PAIRS = 1 << 26
"""Most pairs that a mask given as a function is asked about, evenly spread: more would take the device's time."""
BAND_PAIRS = 1 << 22
"""Of them at once: more would take the device's memory."""


@dataclass(eq=False, slots=True)
class Pairs:
    """The query-key pairs of one attention call, shared by all of its matrix products."""

    is_attention: bool = False
    """True once a softmax over keys was seen."""
    allowed: list[torch.Tensor] = field(default_factory=list)
    """Boolean masks, True where a pair counts, or masks that are added to scores."""
    parts: list[Pairs] = field(default_factory=list)
    """Other scores that were added to these before the softmax, as those of relative positions: one attention."""
    is_overwritten: bool = False
    """Something was written into the scores, and nobody knows what it blocks."""
    factors: list[torch.Tensor] = field(default_factory=list)
    """Masks that scores were multiplied by: 0 blocks, where no softmax comes after."""
    is_activated: bool = False
    """An exp() or a sigmoid was seen, which may stand for a softmax."""
    queries: Text | None = None
    """The text whose tokens are the queries, where that is proven."""
    keys: Text | None = None
    """The text whose tokens are the keys."""
    is_dense: bool = False
    """Every token meets every token here, whether or not a softmax is found."""
    share: torch.Tensor | float | None = 1.0
    """Share of all pairs that count: a device scalar until the step is over, None when the mask has no values."""
    num_keys: int = 0
    """Length of the softmax."""
    num_queries: int = 0
    """Softmaxes of one head and sample."""
    num_groups: int = 0
    """Samples that attend each within itself, or windows of them; 0 where they lie in one dimension with the heads."""
    is_spelled_out: bool = False
    """The model's own code called the softmax; torch's attention, where it falls back on products, calls another."""
    needed: float = 1.0
    """Share of a fused backward's products whose results anyone wants (frozen keys need no gradient)."""


class PairTracker:
    """Follows scores from the product that made them to the product that uses them."""

    def __init__(self, rows: TokenRows) -> None:
        self._rows = rows
        self._pairs: Known[Pairs] = Known()
        self._masks: Known[tuple[int, list[torch.Tensor]]] = Known()
        """What went into a bias without values, with the bias's version at that time."""
        self._shares: dict[tuple[Any, ...], tuple[list[torch.Tensor], torch.Tensor | None]] = {}
        self.by_sequence: dict[int, Pairs] = {}
        """Autograd sequence number of a forward attention product to its pairs: its gradients belong to it too."""

    def follow(self, op: str, args: tuple[Any, ...], out: Any) -> None:
        """Carry the pairs of the scores through one operator that is not itself a matrix product."""
        pairs = self._find(args)
        out = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(out, torch.Tensor):
            return
        if pairs is None:
            if not has_values(out) and (masks := self._masks_after(op, args)) is not None:
                self._masks.put(out, (out._version, masks))
        elif op in _SOFTMAX or op == "aten::topk":
            is_choice, last = op == "aten::topk", args[0].dim() - 1
            dim = ((*args, -1)[2] if is_choice else args[1]) % max(last + 1, 1)
            is_turned = dim == last - 1 and not is_choice
            if (dim == last or is_turned) and last and not pairs.is_attention and (pairs.allowed or not is_choice):
                self._settle(pairs, args[0], is_turned=is_turned)
                pairs.num_groups = int(args[0].shape[0]) if is_choice else pairs.num_groups
                pairs.is_spelled_out = op != "aten::_safe_softmax"
            if not is_choice:
                self._pairs.put(out, pairs)
        elif op in _ADD and not isinstance(args[1], torch.Tensor):
            self._pairs.put(out, pairs)
        elif op in _ADD and len(both := [own for value in args[:2] if (own := self._pairs.get(value)) is not None]) > 1:
            pairs, other = both if both[1].is_attention else both[::-1]
            if other is not pairs and not other.is_attention:
                pairs.parts.append(other)
                pairs.allowed += other.allowed
            self._pairs.put(out, pairs)
        elif op in _TRIANGLES:
            ones = torch.ones(out.shape[-2:], dtype=torch.bool, device=out.device if has_values(out) else None)
            self._cut(pairs, _TRIANGLES[op](ones, *args[1:2]), out)
            self._pairs.put(out, pairs)
        elif op in _MASKED_FILL and not isinstance(args[2], torch.Tensor) and args[2] == 0:
            self._cut(pairs, ~args[1], out)
            self._pairs.put(out, pairs)
        elif op == "aten::where" and pairs.is_attention and (mask := self._mask_of(op, args)) is not None:
            if any(not isinstance(value, torch.Tensor) or value.numel() == 1 for value in args[1:]):
                self._cut(pairs, mask, out)
            self._pairs.put(out, pairs)
        elif op in _KEEPS_SCORES and (op != "aten::sum" or out.shape[-1:] == args[0].shape[-1:]):
            pairs.is_activated |= op in _ACTIVATES
            if op in _MULTIPLY and (factor := _factor_of(args)) is not None:
                self._cut(pairs, factor, out)
            if op in _SUBTRACT and not pairs.is_attention and (mask := _factor_of(args)) is args[1]:
                pairs.allowed.append(-mask)
            self._pairs.put(out, pairs)  # a sum over heads keeps the keys
        elif not pairs.is_attention and (mask := self._mask_of(op, args)) is not None:
            pairs.allowed.append(mask)
            self._pairs.put(out, pairs)
        elif op.endswith("_") and self._pairs.get(args[0]) is pairs:
            pairs.is_overwritten = True

    def product(self, op: str, bound: Mapping[str, Any], out: torch.Tensor) -> Pairs | None:
        """The pairs of a batched product: those of the softmax it consumes, or new ones that may become attention.

        A plain product of two matrices may only where both its sides are proven to be tokens.
        """
        operands = [value for value in bound.values() if isinstance(value, torch.Tensor)]
        scores = next((tensor for tensor in operands if self._pairs.get(tensor) is not None), None)
        pairs = self._pairs.get(scores) if scores is not None else None
        if pairs is not None and scores is not None and not pairs.is_attention:
            pairs.allowed += [factor != 0 for factor in pairs.factors]
            if pairs.factors or (pairs.is_activated and pairs.allowed):
                self._settle(pairs, scores)
        if pairs is not None and pairs.is_attention:
            return pairs
        sides = self._rows.axes(out)
        meets = {out.dim() - 2, out.dim() - 1}
        if op == "aten::mm" and not meets <= sides.keys() and pairs is None:
            return None
        # One row of weights on the left adds the scores of all heads up: the result are scores of the same pairs.
        of_heads = self._pairs.get(bound["mat2"]) if op == "aten::bmm" and out.shape[-2] == 1 else None
        if of_heads is not None:
            pairs = of_heads
        else:
            consumed = self._rows.axes(operands[-2])
            pairs = Pairs(is_dense=meets <= sides.keys() or meets <= consumed.keys())
        if op == "aten::baddbmm" and bound.get("beta", 1) != 0:  # with 0 it is memory that nobody filled
            pairs.allowed.append(bound["self"])
        self._pairs.put(out, pairs)
        return pairs

    def _cut(self, pairs: Pairs, mask: torch.Tensor, out: torch.Tensor) -> None:
        """Scores become 0 where the mask has it, or probabilities. One with a value for each may be dropout's."""
        pairs.factors.append(mask)
        if pairs.is_attention and mask.dim() > 1 and mask.numel() < out.numel() and mask.shape[-1] == out.shape[-1]:
            pairs.allowed.append(mask != 0)
            self._settle(pairs, out)

    def _settle(self, pairs: Pairs, scores: torch.Tensor, *, is_turned: bool = False) -> None:
        """These scores are attention: how many there are, and which share of them counts."""
        queries, keys = (scores.dim() - 1, scores.dim() - 2) if is_turned else (scores.dim() - 2, scores.dim() - 1)
        axes, shape = self._rows.axes(scores), scores.shape
        pairs.is_attention, pairs.is_spelled_out = True, True
        pairs.num_keys, pairs.num_queries = int(shape[keys]), int(shape[queries])
        pairs.num_groups = int(shape[0]) if len(shape) == 4 else 0
        pairs.queries, pairs.keys = (axes[dim].text if dim in axes else None for dim in (queries, keys))
        masks = [mask.mT if is_turned and mask.dim() > 1 else mask for mask in pairs.allowed]
        sizes = (*shape[:-2], pairs.num_queries, pairs.num_keys)
        pairs.share = None if pairs.is_overwritten else self.share(masks, torch.Size(sizes), pairs.queries)
        for part in pairs.parts:
            for name in ("is_attention", "num_keys", "num_queries", "num_groups", "queries", "keys", "share"):
                setattr(part, name, getattr(pairs, name))

    def share(
        self, allowed: list[torch.Tensor], scores_shape: torch.Size, queries: Text | None
    ) -> torch.Tensor | float | None:
        """Share of the pairs that all masks let through and whose query is no padding, as a device scalar."""
        query_is_real = queries.is_real if queries is not None else None
        allowed = [part for mask in allowed for part in self._masks_in(mask)]
        if not allowed:
            return unmasked_share(query_is_real, *scores_shape[-2:])
        if not all(map(has_values, allowed)):
            return None
        same = [(t.data_ptr() or id(t), t.dtype, t._version, *t.shape, *t.stride()) for t in allowed]
        key = (*same, id(query_is_real), *scores_shape[-2:])
        if key not in self._shares:  # the masks are kept, so that no other tensor can take their place in memory
            share = _share(allowed, scores_shape, query_is_real)
            self._shares[key] = (allowed, None if share.is_meta else share)
        return self._shares[key][1]

    def _mask_of(self, op: str, args: tuple[Any, ...]) -> torch.Tensor | None:
        """The mask that an operator puts on scores, or None when it does no masking that we know."""
        if op in _ADD and isinstance(args[1], torch.Tensor):
            mask: torch.Tensor = args[1] if self._pairs.get(args[0]) is not None else args[0]
            return mask
        if op in _MASKED_FILL:
            blocked: torch.Tensor = args[1]
            return ~blocked if isinstance(args[2], torch.Tensor) or args[2] <= VANISHES_BELOW else None
        if op in _INDEX_PUT:
            *whole, index = args[1]  # a[..., mask] has None for each dimension before the mask's
            if any(own is not None for own in whole) or index.dtype != torch.bool or args[2].numel() != 1:
                return None
            kept: torch.Tensor = ~index | (args[2] > VANISHES_BELOW)
            return kept
        if op == "aten::where" and len(args) == 3:
            condition: torch.Tensor = args[0]
            return condition if self._pairs.get(args[1]) is not None else ~condition
        return None

    def _masks_after(self, op: str, args: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """The masks in a bias without values (T5's positions), whose sum has lost them; None: nobody knows."""
        tensors = [value for value in args if isinstance(value, torch.Tensor) and value.dim() > 0]
        if op in _MASKS_NOTHING:
            return []
        if op in _ADD:
            masks = [mask for part in tensors for mask in self._masks_in(part)]
        elif op in _MASKED_FILL:
            masks = [*self._masks_in(args[0]), ~args[1]]
        elif op == "aten::where" and len(args) == 3:
            is_kept = args[1].is_meta and args[1].dim() > 0
            masks = [args[0] if is_kept else ~args[0], *self._masks_in(args[1] if is_kept else args[2])]
        else:
            masks = self._masks_in(tensors[0]) if len(tensors) == 1 else []
            if len(tensors) != 1 or (masks and op not in _KEEPS_SHAPE):
                return None
        return masks if all(map(has_values, masks)) else None

    def _masks_in(self, mask: torch.Tensor) -> list[torch.Tensor]:
        """What masks a tensor holds: those that went into it where it has no values of its own, else itself."""
        known = self._masks.get(mask)
        return known[1] if known is not None and known[0] == mask._version else [mask]

    def _find(self, args: tuple[Any, ...]) -> Pairs | None:
        return next((pairs for tensor in tensors_in(args) if (pairs := self._pairs.get(tensor)) is not None), None)


def unmasked_share(
    query_is_real: torch.Tensor | None, num_queries: int, num_keys: int, is_causal: bool = False
) -> torch.Tensor | float:
    """Share of the pairs whose query is no padding, where no mask tells, as a device scalar; 1 without padding."""
    if query_is_real is None or query_is_real.shape[1] != num_queries:
        return 1.0
    seen = torch.full((num_queries,), num_keys, device=query_is_real.device)
    if is_causal:
        seen = torch.arange(1, num_queries + 1, device=query_is_real.device).clamp(max=num_keys)
    return (query_is_real * seen).sum(dtype=sum_dtype(seen.device)) / max(query_is_real.numel() * num_keys, 1)


def flex_pairs(bound: Mapping[str, Any]) -> Pairs | None:
    """flex_attention says by a function which pairs count: ask it for every pair, a band of queries at a time."""
    block_mask, query, key = (bound.get(name) for name in ("block_mask", "query", "key"))
    if not (isinstance(block_mask, tuple) and callable(block_mask[-1])):
        return None
    assert isinstance(query, torch.Tensor)
    assert isinstance(key, torch.Tensor)
    num_blocks = next(item for item in block_mask if isinstance(item, torch.Tensor))
    num_batches, num_heads, num_queries, num_keys = (*num_blocks.shape[:2], query.shape[-2], key.shape[-2])
    pairs_a_row = max(num_batches * num_heads * num_keys, 1)
    stride = max(1, num_queries * pairs_a_row // MAX_PAIRS)
    num_rows = max(1, BAND_PAIRS // pairs_a_row)
    rows = torch.arange(stride // 2, num_queries, stride, device=query.device)
    batch, head, keys = (torch.arange(size, device=query.device) for size in (num_batches, num_heads, num_keys))
    shares = [
        # Each index has a dimension of its own: the function is written for single pairs, and torch spreads it.
        _allowed_share(block_mask[-1](batch[:, None, None, None], head[:, None, None], band[:, None], keys)) * len(band)
        for band in (rows[first : first + num_rows] for first in range(0, len(rows), num_rows))
    ]
    return Pairs(is_attention=True, share=torch.stack(shares).sum() / max(len(rows), 1))


def _allowed_share(allowed: torch.Tensor) -> torch.Tensor:
    return allowed.sum(dtype=sum_dtype(allowed.device)) / max(allowed.numel(), 1)


def allowed_by(mask: torch.Tensor) -> torch.Tensor:
    """True where a mask lets a pair through: True in a boolean mask, not hugely negative in an additive one."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.numel():
        return mask.bool()
    if mask.is_meta:
        return mask > BLOCKED_BELOW
    vanishes = mask <= VANISHES_BELOW
    return (mask > BLOCKED_BELOW) & ~(vanishes & (vanishes | (mask >= STAYS_ABOVE)).all())


def _factor_of(args: tuple[Any, ...]) -> torch.Tensor | None:
    """A mask of queries and keys that scores are multiplied by. What has a value for each score may be dropout."""
    one, other = args[:2]
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    scores, mask = (one, other) if one.numel() >= other.numel() else (other, one)
    is_mask = mask.dim() > 1 and mask.shape[-1] == scores.shape[-1] and mask.shape[-2] in (1, scores.shape[-2])
    is_mask = is_mask and mask.numel() < scores.numel()
    return mask if is_mask and not mask.requires_grad else None


def explicit_mask(bound: Mapping[str, Any]) -> torch.Tensor | None:
    """The mask tensor that was passed to a fused attention operator."""
    masks = (bound.get(name) for name in ("attn_mask", "attn_bias", "bias"))
    return next((mask for mask in masks if isinstance(mask, torch.Tensor)), None)


def _share(allowed: list[torch.Tensor], shape: torch.Size, query_is_real: torch.Tensor | None) -> torch.Tensor:
    kept = allowed_by(allowed[0])
    for mask in allowed[1:]:
        kept = kept & allowed_by(mask)
    if kept.dim() == 3 and query_is_real is not None and kept.shape[0] % query_is_real.shape[0] == 0:
        kept = kept.view(query_is_real.shape[0], -1, *kept.shape[1:])  # samples and heads in one dimension
    if kept.dim() > 4:  # several streams or chunks of a sample
        kept = kept.flatten(1, kept.dim() - 3)
    while kept.dim() < 4:
        kept = kept.unsqueeze(0)
    # Scores may have got more columns since they were masked (attention sinks): the mask's own are the keys.
    num_queries, num_keys = (own if own != 1 else of for own, of in zip(kept.shape[-2:], shape[-2:], strict=True))
    is_same = query_is_real is not None and kept.shape[0] in (1, query_is_real.shape[0])
    if query_is_real is not None and is_same and query_is_real.shape[1] == num_queries:
        kept = kept & query_is_real.to(kept.device)[:, None, :, None]
    kept = kept.expand(*kept.shape[:-2], num_queries, num_keys)
    return kept.sum(dtype=sum_dtype(kept.device)) / max(kept.numel(), 1)


def sum_dtype(device: torch.device) -> torch.dtype:
    """What pairs are added up in: as many digits as the device has."""
    return torch.float32 if device.type == "mps" else torch.float64
