"""Which matrix products are attention, and which share of their query-key pairs does the mask let through?

Eager and math attention dispatch plain matrix products. They are recognised by what happens to the result: scores that
reach a softmax over keys are attention, and so is the product of that softmax with the values. The masks that were
applied on the way say how many pairs count. Sums are taken on the device and read after the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import ref

import torch

_T = TypeVar("_T")

BLOCKED_BELOW = -9999.0
"""An additive mask at or below this blocks a pair: older models use -1e4, others the dtype's minimum or -inf."""

SCORE_PRODUCTS = frozenset({"aten::bmm", "aten::baddbmm"})
_SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax", "aten::softmax"})
_MASKED_FILL = frozenset({"aten::masked_fill", "aten::masked_fill_"})
_ADD = frozenset({"aten::add", "aten::add_"})
_KEEPS_SCORES = frozenset({
    "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_alias", "aten::expand", "aten::transpose",
    "aten::permute", "aten::squeeze", "aten::unsqueeze", "aten::slice", "aten::select", "aten::alias", "aten::detach",
    "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::to", "aten::mul", "aten::mul_", "aten::div",
    "aten::div_", "aten::sub", "aten::sub_", "aten::tanh", "aten::clamp", "aten::nan_to_num", "aten::native_dropout",
    "aten::dropout", "aten::cat",
})  # fmt: skip
_MASKS_NOTHING = frozenset({"aten::zeros", "aten::new_zeros", "aten::zeros_like", "aten::embedding"})
_KEEPS_SHAPE = frozenset({"aten::alias", "aten::detach", "aten::clone", "aten::contiguous", "aten::_to_copy"})
TRACKED = SCORE_PRODUCTS | _SOFTMAX | _MASKED_FILL | _ADD | _KEEPS_SCORES | _MASKS_NOTHING | {"aten::where"}
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
    """Boolean masks, True where a pair counts."""
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


class Known(Generic[_T]):
    """What is known of a tensor, for as long as it lives.

    Kept beside the tensor and not on it: a tensor that the user keeps, copies or saves has nothing of ours.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[ref[torch.Tensor], _T]] = {}

    def get(self, tensor: torch.Tensor) -> _T | None:
        """None where nothing is known."""
        found = self._by_id.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None  # another one may have had its id

    def put(self, tensor: torch.Tensor, value: _T) -> None:
        """Replaces what was known."""
        key, by_id = id(tensor), self._by_id

        def forget(dead: ref[torch.Tensor]) -> None:
            if (found := by_id.get(key)) is not None and found[0] is dead:
                del by_id[key]

        by_id[key] = ref(tensor, forget), value


class PairTracker:
    """Follows scores from the product that made them to the product that uses them."""

    def __init__(self) -> None:
        self._pairs: Known[Pairs] = Known()
        self._masks: Known[tuple[int, list[torch.Tensor]]] = Known()
        """What went into a bias without values, with the bias's version at that time."""
        self._shares: dict[tuple[Any, ...], tuple[list[torch.Tensor], torch.Tensor | None]] = {}
        self.by_sequence: dict[int, Pairs] = {}
        """Autograd sequence number of a forward attention product to its pairs: its gradients belong to it too."""

    def follow(self, op: str, args: tuple[Any, ...], out: Any, query_is_real: torch.Tensor | None) -> None:
        """Carry the pairs of the scores through one operator that is not itself a matrix product."""
        pairs = self._find(args)
        if not isinstance(out := _first_of(out), torch.Tensor):
            return
        if pairs is None:
            if out.is_meta and (masks := self._masks_after(op, args)) is not None:
                self._masks.put(out, (out._version, masks))
        elif op in _SOFTMAX:
            if args[1] in (-1, args[0].dim() - 1) and not pairs.is_attention:
                pairs.is_attention = True
                shape = args[0].shape
                pairs.num_keys, pairs.num_queries = int(shape[-1]), int(shape[-2]) if len(shape) > 1 else 1
                pairs.num_groups = int(shape[0]) if len(shape) == 4 else 0
                pairs.is_spelled_out = op != "aten::_safe_softmax"
                pairs.share = self.share(pairs.allowed, args[0].shape, query_is_real)
            self._pairs.put(out, pairs)
        elif op in _KEEPS_SCORES:
            self._pairs.put(out, pairs)
        elif not pairs.is_attention and (mask := self._mask_of(op, args)) is not None:
            pairs.allowed.append(mask)
            self._pairs.put(out, pairs)

    def product(self, op: str, bound: Mapping[str, Any], out: Any) -> Pairs:
        """The pairs of a batched product: those of the softmax it consumes, or new ones that may become attention."""
        pairs = self._find(tuple(bound.values()))
        if pairs is not None and pairs.is_attention:
            return pairs
        pairs = Pairs()
        if op == "aten::baddbmm" and bound.get("beta", 1) != 0:  # with 0 it is memory that nobody filled
            pairs.allowed.append(bound["self"])
        self._pairs.put(out, pairs)
        return pairs

    def share(
        self, allowed: list[torch.Tensor], scores_shape: torch.Size, query_is_real: torch.Tensor | None
    ) -> torch.Tensor | float | None:
        """Share of the pairs that all masks let through and whose query is no padding, as a device scalar."""
        allowed = [part for mask in allowed for part in self._masks_in(mask)]
        if not allowed:
            return unmasked_share(query_is_real, *scores_shape[-2:])
        if any(mask.is_meta for mask in allowed):
            return None
        key = (*map(_identity, allowed), id(query_is_real), *scores_shape[-2:])
        if key not in self._shares:  # the masks are kept, so that no other tensor can take their place in memory
            self._shares[key] = (allowed, _share(allowed, scores_shape, query_is_real))
        return self._shares[key][1]

    def _mask_of(self, op: str, args: tuple[Any, ...]) -> torch.Tensor | None:
        """The mask that an operator puts on scores, or None when it does no masking that we know."""
        if op in _ADD and isinstance(args[1], torch.Tensor):
            mask: torch.Tensor = args[1] if self._pairs.get(args[0]) is not None else args[0]
            return mask
        if op in _MASKED_FILL:
            blocked: torch.Tensor = args[1]
            return ~blocked
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
        return None if any(mask.is_meta for mask in masks) else masks

    def _masks_in(self, mask: torch.Tensor) -> list[torch.Tensor]:
        """What masks a tensor holds: those that went into it where it has no values of its own, else itself."""
        known = self._masks.get(mask)
        return known[1] if known is not None and known[0] == mask._version else [mask]

    def _find(self, args: tuple[Any, ...]) -> Pairs | None:
        for value in args:
            if isinstance(value, torch.Tensor):
                pairs = self._pairs.get(value)
            else:
                pairs = self._find(tuple(value)) if isinstance(value, list) else None
            if pairs is not None:
                return pairs
        return None


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
    return mask if mask.dtype == torch.bool else mask > BLOCKED_BELOW


def explicit_mask(bound: Mapping[str, Any]) -> torch.Tensor | None:
    """The mask tensor that was passed to a fused attention operator."""
    for name in ("attn_mask", "attn_bias", "bias"):
        mask = bound.get(name)
        if isinstance(mask, torch.Tensor):
            return mask
    return None


def _share(allowed: list[torch.Tensor], shape: torch.Size, query_is_real: torch.Tensor | None) -> torch.Tensor:
    kept = allowed_by(allowed[0])
    for mask in allowed[1:]:
        kept = kept & allowed_by(mask)
    if kept.dim() == 3 and query_is_real is not None and kept.shape[0] % query_is_real.shape[0] == 0:
        kept = kept.view(query_is_real.shape[0], -1, *kept.shape[1:])  # samples and heads in one dimension
    while kept.dim() < 4:
        kept = kept.unsqueeze(0)
    # Scores may have got more columns since they were masked (attention sinks): the mask's own are the keys.
    num_queries, num_keys = (own if own != 1 else of for own, of in zip(kept.shape[-2:], shape[-2:], strict=True))
    if query_is_real is not None and query_is_real.shape[1] == num_queries:
        kept = kept & query_is_real.to(kept.device)[:, None, :, None]
    kept = kept.expand(*kept.shape[:-2], num_queries, num_keys)
    return kept.sum(dtype=sum_dtype(kept.device)) / max(kept.numel(), 1)


def sum_dtype(device: torch.device) -> torch.dtype:
    """What pairs are added up in: as many digits as the device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor._version, *tensor.shape, *tensor.stride()


def _first_of(out: Any) -> Any:
    return out[0] if isinstance(out, (tuple, list)) and out else out
