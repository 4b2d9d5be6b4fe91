"""Which pairs does a mask of length x length let through, when nobody wants to fill so much memory?

While a model runs on shapes, masks and positions have values. One of more than `MAX_VALUES` has none: it is kept as the
operators that made it out of small tensors (a `Recipe`), and its pairs are counted when they are asked for, tile by
tile. Most tiles lie wholly on one side of a diagonal: the smallest and the largest value of each operand show that, so
only the tiles in between are filled. The count is exact, whatever the mask is made of.

What a top-k over scores has chosen depends on weights, but not how much: of the keys that the scores' mask left open, k
or all. So a mask that scatters the chosen positions, combined with the mask that the scores had, has a count too
(DeepSeek sparse attention). Where the two masks differ, nobody knows, and the tensor counts as one without values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product, zip_longest
from math import isqrt, prod
from typing import Any, Generic, TypeVar
from weakref import ref

import torch

from flopmeter.torch_compat import OpOverload, tree_iter, tree_map_only

MAX_VALUES = 1 << 22
"""Elements up to which a mask or a position has values; also those of one tile."""
MAX_FILLED_BYTES = 1 << 29
"""Of a larger one, which is filled only where an operator insists on its values."""
BLOCKED_BELOW = -9999.0
"""A score at or below this is blocked: older models use -1e4, others the dtype's minimum or -inf."""

_T = TypeVar("_T")
_META = torch.device("meta")
_FACTORIES = frozenset({"full", "ones", "zeros"})
_CONSTANTS = _FACTORIES | {"new_full", "new_ones", "new_zeros", "full_like", "ones_like", "zeros_like"}
_VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "expand", "select", "slice",
    "transpose", "permute", "t", "alias", "detach", "lift_fresh",
})  # fmt: skip
_MASKING = frozenset({"add", "masked_fill", "where"})
_COPIES = frozenset({"_to_copy", "clone", "alias", "detach"})
_MONOTONE = frozenset({
    "le", "lt", "ge", "gt", "add", "sub", "rsub", "mul", "neg", "where", "masked_fill", "_to_copy", "clone",
    "minimum", "maximum",
})  # fmt: skip
"""Of numbers; what is made of booleans alone is at its extremes at the ends anyway."""
_TRIANGLES = frozenset({"triu", "tril", "triu_", "tril_"})
_HANDLED = _CONSTANTS | _VIEWS | _TRIANGLES | {"scatter", "scatter_", "topk"}
_ABSENT = -(1 << 20)
"""The place of a dimension that a tensor does not have: it is the same all along it."""


@dataclass(eq=False, slots=True)
class Recipe:
    """A tensor as the operator and the recipes that it is made from; equal calls are one recipe."""

    shape: torch.Size
    dtype: torch.dtype
    func: Any = None
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    value: torch.Tensor | None = None
    """Of one that is not made of others."""
    version: int = 0
    """Of the value, when it was taken: a later write makes it another tensor."""
    dims: tuple[int | None, ...] = ()
    """Of a view: which dimension of the viewed tensor each one is."""
    picks: tuple[tuple[int, int], ...] = ()
    """Of a view: the dimensions that it leaves out, and the position that it takes there."""
    choice: Recipe | None = None
    """The top-k choice that it depends on: its `args` are the recipe of what was open to it, and k."""


class _UnknownError(Exception):
    """The values depend on weights, or on a write that was not seen."""


class _NotMonotoneError(Exception):
    """The range of the result does not follow from the ranges of the operands."""


class Known(Generic[_T]):
    """What is known of a tensor, for as long as it lives.

    Kept beside the tensor and not on it: a tensor that the user keeps, copies or saves has nothing of ours.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[ref[torch.Tensor], _T]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

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


_recipes: Known[tuple[Recipe, int, int]] = Known()
"""Of each tensor without values whose recipe is known: the recipe, its version then, and the top-k call in it or 0."""
_open: Known[tuple[Recipe | None]] = Known()
"""Of scores with unknown values that a mask was put on: the recipe of what it left open, None where that is lost."""


def has_values(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor are known, in memory or as a recipe."""
    return not tensor.is_meta or _find(tensor) is not None


class LongMasks:
    """Keeps the recipes of one run on shapes."""

    def __init__(self) -> None:
        self._same: dict[Any, Recipe] = {}
        self._rows: dict[tuple[Recipe, str], torch.Tensor] = {}
        self._triangles: dict[Any, tuple[torch.Tensor, ...]] = {}
        self._num_choices = 0

    def is_large(self, func: Any, args: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether an operator on values would fill more memory than values may take."""
        if not tensors:
            return _name(func) in _FACTORIES and prod(args[0]) > MAX_VALUES
        if prod(tensor.numel() for tensor in tensors) <= MAX_VALUES:
            return False
        if not is_followed(func) or not _is_by_element(func) or _name(func).endswith("_"):
            return False
        return prod(map(max, zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1))) > MAX_VALUES

    def take(
        self,
        func: Any,
        args: tuple[Any, ...],
        options: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        out: Any,
        is_known: bool,
    ) -> None:
        """An operator that is followed has run on shapes: note what is known of the values of its result.

        Args:
            tensors: All among its arguments.
            is_known: Whether all of these have values.
        """
        name = _name(func)
        if name == "topk":
            self._choose(args, out[1])
        if not isinstance(out, torch.Tensor):
            return
        if not is_known and name not in _CONSTANTS:
            if name in _MASKING or (len(_open) and any(_open.get(tensor) for tensor in tensors)):
                self._keep_open(name, args, out, tensors)
            return
        calls = {found[2] for tensor in tensors if tensor.is_meta and (found := _recipes.get(tensor))} - {0}
        # After this, torch counts a write as one, and a view and what it views as one.
        version = _version(args[0] if name in _VIEWS else out) + (name.endswith("_") and out is args[0])
        recipe = None
        if name in _CONSTANTS:
            recipe = self._constant(func, args, options, out)
        elif name in _VIEWS:
            recipe = self._view(func, args, out)
        elif name in _TRIANGLES:
            recipe = self._triangle(name, *args)
        elif name in ("scatter", "scatter_"):
            recipe = self._scattered(func, args, out)
        else:
            recipe = self._made(func, args, options, out.shape, out.dtype)
        if recipe is not None and len(calls) < 2:
            _recipes.put(out, (recipe, version, max(calls, default=0)))

    def filled(self, args: Any) -> Any | None:
        """The arguments with the values of the masks and positions among them; None where that takes too much."""
        recipes = {id(t): _find(t) for t in tree_iter(args) if isinstance(t, torch.Tensor) and t.is_meta}
        for recipe in recipes.values():
            if recipe is None or recipe.choice or recipe.dtype.is_floating_point:
                return None  # gradients begin as ones, and products of them would be computed for real
            if recipe.shape.numel() * recipe.dtype.itemsize > MAX_FILLED_BYTES:
                return None

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            recipe = recipes.get(id(tensor))
            if recipe is None:
                return tensor
            return _evaluate(recipe, (), lambda whole, _: [whole], "", {})[0].expand(recipe.shape).clone()

        try:
            return tree_map_only(torch.Tensor, fill, args)
        except _UnknownError:
            return None

    def num_true(self, mask: torch.Tensor) -> torch.Tensor | None:
        """How many elements of a boolean mask are True; None where nobody knows."""
        recipe = _find(mask)
        if recipe is None or recipe.dtype != torch.bool or mask.dim() < 2:
            return None
        try:
            return self._count(recipe).sum()
        except _UnknownError:
            return None

    def _count(self, recipe: Recipe) -> torch.Tensor:
        """True elements of each row."""
        every = self._row_sums(recipe, "all")
        if recipe.choice is None:
            return every
        allowed, num_chosen = recipe.choice.args
        if self._row_sums(recipe, "none").any() or not torch.equal(every, self._row_sums(recipe, "open")):
            raise _UnknownError  # it holds pairs that were not chosen, or that were blocked before the choice
        num_open = self._row_sums(allowed, "all")
        if [size for size in num_open.shape if size > 1] != [size for size in every.shape if size > 1]:
            raise _UnknownError
        num_open = num_open.reshape(every.shape)
        if not ((every == num_open) | (num_open <= num_chosen) | (every == 0)).all():
            raise _UnknownError  # it leaves out some that were open, and nobody knows whether they were chosen
        return every.clamp(max=num_chosen)

    def _row_sums(self, recipe: Recipe, chosen: str) -> torch.Tensor:
        """True elements of each row, if top-k had chosen all, none, or all that was open to it."""
        if (known := self._rows.get((recipe, chosen))) is not None:
            return known
        *leading, num_rows, num_keys = recipe.shape
        side = min(isqrt(MAX_VALUES // max(prod(leading), 1)), max(isqrt(max(num_rows, num_keys)), 64)) or 1
        heights, widths = (
            torch.tensor([side] * (n // side) + [n % side] * (n % side > 0)) for n in (num_rows, num_keys)
        )
        try:
            ends = _evaluate(recipe, (-2, -1), _blocks(side), chosen, {})
            grids = (
                [end.expand(*leading, len(heights), len(widths)).flatten(0, -3) for end in ends] if leading else ends
            )
            is_full, is_touched = (grids[0].all(0), grids[-1].any(0)) if leading else (grids[0], grids[-1])
            is_full, is_touched = (grid.expand(len(heights), len(widths)) for grid in (is_full, is_touched))
        except _NotMonotoneError:
            is_full = torch.zeros(len(heights), len(widths), dtype=torch.bool)
            is_touched = ~is_full
        sums = (is_full * widths).sum(-1).repeat_interleave(heights).expand(*leading, num_rows).clone()
        for i, j in (is_touched & ~is_full).nonzero().tolist():
            top, left, height, width = i * side, j * side, int(heights[i]), int(widths[j])
            tile = _evaluate(recipe, (-2, -1), _tile((top, height), (left, width)), chosen, {})[0]
            # Floats are added up fifteen times as fast as booleans, and hold such small numbers exactly.
            sums[..., top : top + height] += tile.expand(*leading, height, width).float().sum(-1).long()
        self._rows[recipe, chosen] = sums
        return sums

    def _recipe_of(self, value: Any) -> Any:
        """A tensor's recipe; anything else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        if (recipe := _find(value)) is not None:
            return recipe
        version = _version(value)
        key = (value.data_ptr(), version, value.shape, value.stride(), value.dtype)
        return self._same.setdefault(key, Recipe(value.shape, value.dtype, value=value.detach(), version=version))

    def _constant(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], out: torch.Tensor) -> Recipe:
        """One number, spread over the shape without taking memory."""

        def to_one(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return torch.empty((), dtype=value.dtype)
            return () if isinstance(value, (list, tuple)) else value

        value = func(*map(to_one, args), **_on_values(options))
        recipe = Recipe(out.shape, value.dtype, value=value.expand(out.shape))
        return self._same.setdefault((value.item(), value.dtype, out.shape), recipe)

    def _made(
        self, func: Any, args: Iterable[Any], options: dict[str, Any], shape: torch.Size, dtype: torch.dtype
    ) -> Recipe:
        """What an operator makes of other recipes, or of tensors with values."""
        func, parts, options = _functional(func), tuple(map(self._recipe_of, args)), _on_values(options)
        choice = next((part.choice for part in parts if isinstance(part, Recipe) and part.choice), None)
        recipe = Recipe(shape, dtype, func, parts, options, choice=choice)
        key = (
            func,
            shape,
            *((type(p), tuple(p) if isinstance(p, list) else p) for p in parts),
            *sorted(options.items()),
        )
        return self._same.setdefault(key, recipe)

    def _view(self, func: Any, args: tuple[Any, ...], out: torch.Tensor) -> Recipe | None:
        """Where a dimension goes shows in the strides of what has a stride of its own for each."""
        before = torch.empty(args[0].shape, device=_META)
        after, dims = func(before, *args[1:]), list[int | None]()
        for size, stride in zip(after.shape, after.stride(), strict=True):
            same = [d for d in range(before.dim()) if size > 1 and (before.size(d), before.stride(d)) == (size, stride)]
            if not same and size > 1 and stride > 0:
                return None  # dimensions were joined or split, or a part of one was taken
            dims.append(same[0] if same else None)
        left_out = [d for d in range(before.dim()) if d not in dims and before.size(d) > 0]
        recipe = self._made(func, args, {}, out.shape, out.dtype)
        recipe.dims = tuple(dims)
        recipe.picks = tuple((d, after.storage_offset() // before.stride(d) % before.size(d)) for d in left_out)
        return recipe

    def _triangle(self, name: str, whole: torch.Tensor, diagonal: int = 0) -> Recipe:
        """Zeros on one side of a diagonal."""
        num_rows, num_keys = whole.shape[-2:]
        parts = self._triangles.setdefault(
            (num_rows, num_keys, diagonal, whole.dtype),
            (torch.arange(num_keys), torch.arange(num_rows)[:, None] + diagonal, torch.zeros((), dtype=whole.dtype)),
        )
        side = torch.ops.aten.ge.Tensor if name.startswith("triu") else torch.ops.aten.le.Tensor
        kept = self._made(side, parts[:2], {}, whole.shape[-2:], torch.bool)
        return self._made(torch.ops.aten.where.self, (kept, whole, parts[2]), {}, whole.shape, whole.dtype)

    def _keep_open(self, name: str, args: tuple[Any, ...], out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Scores got a mask, or something was done to those that have one."""
        unknown = [tensor for tensor in tensors if not has_values(tensor)]
        if len(unknown) == len(tensors) and not len(_open):
            return
        mask: tuple[Any, ...] | None = None
        if len(unknown) == 1 and len(tensors) == 2 and name == "add":
            other = tensors[0] if unknown[0] is tensors[1] else tensors[1]
            mask = (torch.ops.aten.gt.Scalar, other, BLOCKED_BELOW) if other.dim() > 1 else None
        elif len(unknown) == 1 and name == "masked_fill" and unknown[0] is args[0] and not torch.is_tensor(args[2]):
            mask = (torch.ops.aten.logical_not.default, args[1]) if args[2] <= BLOCKED_BELOW else None
        elif len(unknown) == 1 and name == "where" and unknown[0] is not args[0]:
            fill = args[2] if unknown[0] is args[1] else args[1]
            is_blocking = not fill.is_meta and fill.numel() == 1 and fill.item() <= BLOCKED_BELOW
            kept = torch.ops.aten.clone.default if fill is args[2] else torch.ops.aten.logical_not.default
            mask = (kept, args[0]) if is_blocking else None
        before = [found[0] for tensor in unknown if (found := _open.get(tensor)) is not None]
        if mask is not None and None not in before:
            left = self._made(mask[0], mask[1:], {}, out.shape, torch.bool)
            for other_mask in before:
                left = self._made(torch.ops.aten.logical_and.default, (left, other_mask), {}, out.shape, torch.bool)
            _open.put(out, (left,))
        elif before:
            _open.put(out, (before[0] if name in _COPIES else None,))

    def _choose(self, args: tuple[Any, ...], positions: torch.Tensor) -> None:
        """Top-k over the keys of scores whose values depend on weights."""
        scores, num_chosen, *more = args
        dim = more[0] if more else -1
        if dim not in (-1, scores.dim() - 1) or False in more[1:2] or has_values(scores):
            return
        every = torch.empty(scores.shape, device=_META)
        before = _open.get(scores)
        allowed = before[0] if before else self._constant(torch.ops.aten.full.default, ((), True), {}, every)
        if allowed is not None:
            self._num_choices += 1
            key = ("topk", allowed, num_chosen)
            recipe = Recipe(positions.shape, positions.dtype, torch.ops.aten.topk.default, (allowed, num_chosen))
            recipe.choice = recipe
            known = self._same.setdefault(key, recipe)
            _recipes.put(positions, (known, _version(positions), self._num_choices))

    def _scattered(self, func: Any, args: tuple[Any, ...], out: torch.Tensor) -> Recipe | None:
        """One number is put where top-k has chosen."""
        base, dim, positions, value = map(self._recipe_of, args[:4])
        while isinstance(positions, Recipe) and positions.func is not None and _name(positions.func) in _COPIES:
            positions = positions.args[0]
        if not isinstance(positions, Recipe) or positions is not positions.choice or isinstance(value, Recipe):
            return None
        if dim not in (-1, len(base.shape) - 1) or positions.args[0].shape != base.shape or base.choice:
            return None
        return self._made(func, (base, positions, value), {}, out.shape, out.dtype)


_Cut = Callable[[torch.Tensor, tuple[int, ...]], list[torch.Tensor]]
"""From the whole of a tensor with values to a part of it, or to the smallest and largest of each block."""


def _evaluate(
    recipe: Recipe, dims: tuple[int, ...], cut: _Cut, chosen: str, known: dict[Any, list[torch.Tensor]]
) -> list[torch.Tensor]:
    """Values, or the two ends of their range, of the part that `cut` gives. They may have 1 for a dimension of equals.

    Args:
        dims: Where the tensor has the rows and keys of what was asked for, counted from its last dimension.
        chosen: What top-k is taken to have chosen: "all", "none" or "open".
    """
    if (found := known.get((recipe, dims))) is not None:
        return found
    if recipe.value is not None:
        if recipe.value._version != recipe.version:
            raise _UnknownError
        return cut(recipe.value, dims)
    name = _name(recipe.func)
    if name in _VIEWS:
        viewed = recipe.args[0]
        before = len(viewed.shape)
        places = [recipe.dims[d] if -d <= len(recipe.dims) else None for d in dims]
        inner = tuple(_ABSENT - i if d is None else d - before for i, d in enumerate(places))
        found = [_viewed(recipe, part) for part in _evaluate(viewed, inner, cut, chosen, known)]
    else:
        func, args = recipe.func, recipe.args
        if name == "scatter":
            if dims != (-2, -1):
                raise _UnknownError
            base, choice, value = args
            func, args = torch.where, ({"all": _TRUE, "none": _FALSE}.get(chosen, choice.args[0]), value, base)
        elif name == "topk":
            raise _UnknownError
        choices = [_evaluate(arg, dims, cut, chosen, known) if isinstance(arg, Recipe) else [arg] for arg in args]
        results = [func(*values, **recipe.options) for values in product(*choices)]
        if len(results) > 1:
            is_boolean = all(arg.dtype == torch.bool for arg in args if isinstance(arg, Recipe))
            if name not in _MONOTONE and not is_boolean:
                raise _NotMonotoneError
            shape = torch.broadcast_shapes(*(result.shape for result in results))  # type: ignore[no-untyped-call]
            ends = torch.stack([result.expand(shape) for result in results])
            results = [ends.amin(0), ends.amax(0)]
        found = [result.to(recipe.dtype) for result in results]
    known[recipe, dims] = found
    return found


_TRUE, _FALSE = torch.tensor(True), torch.tensor(False)


def _viewed(recipe: Recipe, part: torch.Tensor) -> torch.Tensor:
    """The same view of a part of a tensor."""
    num_dims = len(recipe.args[0].shape)
    part = part[(None,) * (num_dims - part.dim())]
    picks = dict(recipe.picks)
    order = [d for d in recipe.dims if d is not None]
    for d in sorted(set(range(num_dims)) - set(order)):
        part = part.narrow(d, picks.get(d, 0) if part.size(d) > 1 else 0, 1)
    part = part.permute((*order, *(d for d in range(num_dims) if d not in order)))
    left: tuple[Any, ...] = (..., *(0,) * (num_dims - len(order)))
    new: tuple[Any, ...] = tuple(None if d is None else slice(None) for d in recipe.dims)
    return part[left][new]


def _tile(rows: tuple[int, int], keys: tuple[int, int]) -> _Cut:
    """A part by the first row (key) and how many."""

    def cut(whole: torch.Tensor, dims: tuple[int, ...]) -> list[torch.Tensor]:
        for dim, (start, length) in zip(dims, (rows, keys), strict=True):
            if -dim <= whole.dim() and whole.size(dim) > 1:
                whole = whole.narrow(dim, start, length)
        return [whole]

    return cut


def _blocks(side: int) -> _Cut:
    """The smallest and the largest value of each block of `side` rows and keys."""

    def cut(whole: torch.Tensor, dims: tuple[int, ...]) -> list[torch.Tensor]:
        low = high = whole
        for dim in dims:
            if -dim > whole.dim() or whole.size(dim) == 1:
                continue
            if whole.stride(dim) == 0:
                low, high = low.narrow(dim, 0, 1), high.narrow(dim, 0, 1)
                continue
            at = dim % whole.dim()
            low = torch.stack([block.amin(at) for block in torch.split(low, side, at)], at)
            high = torch.stack([block.amax(at) for block in torch.split(high, side, at)], at)
        return [low] if low is high else [low, high]

    return cut


def _find(tensor: torch.Tensor) -> Recipe | None:
    found = _recipes.get(tensor)
    return found[0] if found is not None and found[1] == _version(tensor) else None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


@cache
def is_followed(func: Any) -> bool:
    """Whether the values of a result are known where those of the arguments are."""
    return isinstance(func, OpOverload) and (_name(func) in _HANDLED or _is_by_element(func))


@cache
def _is_by_element(func: Any) -> bool:
    tags = _functional(func).tags
    is_tagged = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return func.namespace == "aten" and (is_tagged or _name(func) in ("_to_copy", "floor_divide"))


@cache
def _functional(func: Any) -> Any:
    """The operator that gives what this one writes into its first argument."""
    plain = getattr(torch.ops.aten, _name(func)[:-1], None) if _name(func).endswith("_") else None
    return getattr(plain, func._overloadname, func)


def _on_values(options: dict[str, Any]) -> dict[str, Any]:
    left_out = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
    return {name: value for name, value in options.items() if name not in left_out}
