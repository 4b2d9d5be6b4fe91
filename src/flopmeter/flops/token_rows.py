"""Which rows of a tensor are the tokens of a text, and which of them are padding?

A product is discounted for padding only where this is proven: from the text's own tensor (ids or embeddings, and the
mask that came with them) it is followed through every operator which dimensions hold the text's positions. Equal sizes
prove nothing. Rows that a program picks by a mask or by ids (unpadding, `x[labels != -100]`) are its own choice and
count in full; rows that hidden states send somewhere (experts) are tokens like any other.

Left out: positions that are written one by one into a tensor of another origin, and windows laid over one by strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch

from flopmeter.flops.long_masks import Known


@dataclass(eq=False, slots=True)
class Text:
    """The positions of one text, or of a part of it."""

    length: int
    prefix: str = ""
    """"decoder_" for what an encoder-decoder's decoder reads, whose fields of `Workload` begin so; "memory_" for what
    a decoder is given that is called alone."""
    is_real: torch.Tensor | None = None
    """Boolean (samples, length), False on padding; None where no mask tells."""
    steps: list[int] | None = None
    """Where this is one position, those that were taken from the same tensor: a loop over time takes them all."""
    loop: int = 0
    """How many there are."""
    whole: Text | None = None
    """The text that the position is of."""
    is_loose: bool = False
    """Rows of an unknown kind are among them, or several tokens became one: what of them is padding is a guess."""
    share: float | None = field(default=None, repr=False)

    @property
    def is_pooled(self) -> bool:
        """Whether it is one position (the first, the last): a row for each sample, unless a loop takes all."""
        return self.steps is not None and len(set(self.steps)) < self.loop

    def real_share(self) -> float:
        """Share of the rows that are no padding. Reads from the device, once."""
        if self.is_real is None or self.is_real.is_meta or not self.is_real.numel() or self.is_pooled:
            return 1.0
        if self.share is None:
            self.share = int(self.is_real.sum()) / self.is_real.numel()
        return self.share


class Span(NamedTuple):
    """A dimension that holds a text's positions, or a part of a dimension."""

    text: Text
    low: int = 1
    """By how many entries two neighbouring positions are apart: 1, or more where something else varies faster."""
    high: int = 1 << 62
    """Where positions begin anew: the length, where samples lie end to end in one dimension."""


Axes = dict[int, Span]
"""Dimensions of a tensor that hold a text's positions."""


class _Tag(NamedTuple):
    axes: Axes
    is_ids: bool
    """Ids, or made of ids alone: what they pick is the program's choice."""
    steps: dict[int, list[int]]
    """By dimension, the single positions that were taken from the tensor."""


_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten"})
_MAY_RESIZE = frozenset({
    "slice", "split", "split_with_sizes", "constant_pad_nd", "cat", "convolution", "unfold", "avg_pool1d", "avg_pool2d",
    "max_pool2d_with_indices",
})  # fmt: skip
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addmm_": 1, "baddbmm_": 1, "_addmm_activation": 1}
"""Where the left operand stands."""
_FORGETS = frozenset({"as_strided", "diagonal", "bincount", "histc", "unique_dim", "_unique2"})


class TokenRows:
    """Follows the positions of texts from operator to operator."""

    def __init__(self) -> None:
        self._tags: Known[_Tag] = Known()
        self._parts: dict[tuple[Any, ...], Text] = {}
        self._is_used = False
        self.by_sequence: dict[int, Text] = {}
        """Autograd sequence number of a forward product to its text: its gradients belong to it too."""

    def begin(self, tensor: torch.Tensor, text: Text, dim: int) -> None:
        """Here a text comes in."""
        self._is_used = True
        self._tags.put(tensor, _Tag({dim: Span(text)}, not tensor.is_floating_point(), {}))

    def axes(self, tensor: Any) -> Axes:
        """Dimensions that hold a text's positions; empty where nothing is proven."""
        tag = self._tags.get(tensor) if self._is_used and isinstance(tensor, torch.Tensor) else None
        return tag.axes if tag is not None else {}

    def put(self, tensor: torch.Tensor, axes: Axes) -> None:
        """As it was when a checkpointed part ran for the first time."""
        self._tags.put(tensor, _Tag(axes, not tensor.is_floating_point(), {}))

    def of_product(self, args: Sequence[Any]) -> Text | None:
        """The text whose positions are among the rows, columns or summed entries of a product."""
        return next((span.text for tensor in tensors_in(args) for span in self.axes(tensor).values()), None)

    def follow(self, op: str, args: Sequence[Any], out: Any) -> None:
        """An operator has made `out` of `args`."""
        if not self._is_used:
            return
        tags = [(tensor, tag) for tensor in tensors_in(args) if (tag := self._tags.get(tensor)) is not None]
        name = op.rpartition("::")[2]
        if not tags or name in _FORGETS:
            return
        is_ids = all(tag.is_ids for _, tag in tags) and name != "embedding"
        for made in tensors_in(out if isinstance(out, (tuple, list)) else (out,)):
            if name in _PRODUCTS:
                axes = self._of_operands(args[_PRODUCTS[name]], args[_PRODUCTS[name] + 1])
            elif name == "index" and isinstance(args[1], (tuple, list)):
                axes = self._indexed(args[0], args[1])
            elif "scaled_dot_product" in name:
                axes = dict(self.axes(args[0]))
            else:
                axes = {}
                for tensor, tag in tags:
                    axes = self._moved(name, tensor, tag, args, made) | axes
            if axes:
                own = self._tags.get(made)
                if own is None or not own.axes or own.axes != axes:
                    self._tags.put(made, _Tag(axes, is_ids, own.steps if own is not None else {}))

    def _of_operands(self, left: torch.Tensor, right: torch.Tensor) -> Axes:
        last = left.dim() - 1
        rows = {dim: span for dim, span in self.axes(left).items() if dim != last}
        return {dim: span for dim, span in self.axes(right).items() if dim != last - 1} | rows

    def _indexed(self, source: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Axes:
        """Rows that were picked: tokens where hidden states have picked them, else the program's own choice."""
        used, places, size, picked = 0, [], 0, Axes()
        kept: list[int] = []
        for index in indices:
            if index is None:
                kept.append(used)
                used += 1
                continue
            is_mask = index.dtype in (torch.bool, torch.uint8)
            places.append(len(kept))
            size = max(size, 1 if is_mask else index.dim())
            tag = self._tags.get(index)
            if tag is not None and not tag.is_ids:
                own = {0: _whole(tag.axes)} if is_mask else {dim - index.dim(): span for dim, span in tag.axes.items()}
                picked |= own
            used += index.dim() if is_mask else 1
        kept += range(used, source.dim())
        start = places[0] if len(set(places)) == 1 else 0
        found = {start + (dim + size if dim < 0 else dim): span for dim, span in picked.items()}
        for dim, span in self.axes(source).items():
            if dim in kept:
                place = kept.index(dim)
                found[place if place < start else place + size] = span
        return found

    def _moved(self, name: str, tensor: torch.Tensor, tag: _Tag, args: Sequence[Any], out: torch.Tensor) -> Axes:
        """Where the dimensions of one argument are in the result."""
        before, after, axes = tensor.dim(), out.dim(), tag.axes
        if name == "nonzero":
            return {} if tag.is_ids else {0: _whole(axes)}
        if name == "embedding":
            return dict(axes) if tensor is args[1] else {}
        if name in ("transpose", "t", "permute", "transpose_"):
            order = list(range(before))
            if name == "permute":
                order = [dim % before for dim in args[1]]
            elif before > 1:
                one, other = (args[1], args[2]) if name.startswith("transpose") else (0, 1)
                order[one], order[other] = order[other], order[one]
            return {order.index(dim): span for dim, span in axes.items()}
        if name in _VIEWS and out.numel() == tensor.numel():
            return _viewed(tensor.shape, axes, out.shape)
        if name in ("index_select", "index_add", "index_add_", "index_copy", "index_copy_"):
            dim = args[1] % out.dim()
            if tensor is args[2]:
                return {dim: _whole(axes)} if name == "index_select" and not tag.is_ids else {}
            return {own: span for own, span in axes.items() if own != dim or not name.endswith("select")}
        if name in ("index_put", "index_put_") and tensor is not args[0]:
            return {0: axes[0]} if tensor is args[2] and 0 in axes else {}
        if name == "stack":
            dim = (args[1] if len(args) > 1 else 0) % after
            wholes = [span.text.whole for span in axes.values() if span.text.loop == len(args[0])]
            if wholes and wholes[0] is not None:
                return {dim: Span(wholes[0])}
            return {own + (own >= dim): span for own, span in axes.items()}
        if after < before:
            return self._dropped(name, tensor, tag, args)
        found: Axes = {}
        for dim, span in axes.items():
            place = dim + after - before
            if out.shape[place] == tensor.shape[dim] and name != "cat":
                found[place] = span
            elif name in _MAY_RESIZE:
                part = self._part(name, span.text, tensor, dim, args, out)
                found[dim] = span if part is span.text and out.shape[dim] == tensor.shape[dim] else Span(part)
                if name == "unfold" and dim == args[1] % before:
                    found[after - 1] = span
        return found

    def _dropped(self, name: str, tensor: torch.Tensor, tag: _Tag, args: Sequence[Any]) -> Axes:
        """After a reduction, or after one position was taken."""
        if name.startswith("new_"):
            return {}
        own = args[2] if "norm" in name and len(args) > 2 else args[1] if len(args) > 1 else None
        if name == "unbind":
            own = 0 if own is None else own
        dims = [own] if isinstance(own, int) else own
        if not isinstance(dims, (list, tuple)) or not dims or not all(isinstance(dim, int) for dim in dims):
            return {}
        gone = {dim % tensor.dim() for dim in dims}
        kept = [dim for dim in range(tensor.dim()) if dim not in gone]
        found = {kept.index(dim): span for dim, span in tag.axes.items() if dim in kept}
        if name == "select" and (span := tag.axes.get(dim := args[1] % tensor.dim())) is not None:
            text = span.text
            steps = tag.steps.setdefault(dim, [])
            steps.append(args[2] % tensor.shape[dim])
            is_whole = text.is_real is not None and text.is_real.shape[1] == tensor.shape[dim]
            real = text.is_real[:, args[2]].unsqueeze(1) if is_whole and text.is_real is not None else text.is_real
            found.setdefault(max(dim - 1, 0), Span(Text(1, text.prefix, real, steps, tensor.shape[dim], text)))
        return found

    def _part(
        self, name: str, text: Text, tensor: torch.Tensor, dim: int, args: Sequence[Any], out: torch.Tensor
    ) -> Text:
        """The text after positions were taken away or put before or behind: which of the new ones are real?"""
        is_real, is_loose = text.is_real, text.is_loose
        if is_real is None or is_real.shape[1] != tensor.shape[dim]:
            return text
        if name == "slice" or (name.startswith("split") and tensor.stride(dim)):
            start, end, step = [*args[2:5], None, None, None][:3]
            if name != "slice":
                start = (out.storage_offset() - tensor.storage_offset()) // tensor.stride(dim)
                end, step = start + out.shape[dim], 1
            elif args[1] % tensor.dim() != dim:
                return text
            key: tuple[Any, ...] = (id(text), "slice", start, end, step)
            make = lambda: is_real[:, slice(start, end, step)]  # noqa: E731
        elif name == "constant_pad_nd":
            left, right = args[1][2 * (tensor.dim() - 1 - dim) : 2 * (tensor.dim() - dim)]
            key = (id(text), name, left, right)
            make = lambda: torch.constant_pad_nd(is_real, (left, right), False)  # noqa: E731
        elif name == "convolution" and out.shape[dim] >= tensor.shape[dim]:  # each place and some more at the end
            key = (id(text), name, out.shape[dim])
            make = lambda: torch.constant_pad_nd(is_real, (0, out.shape[dim] - is_real.shape[1]), False)  # noqa: E731
        elif name == "cat" and (args[1] if len(args) > 1 else 0) % tensor.dim() == dim:
            spans = [(own.shape[dim], self.axes(own).get(dim)) for own in args[0] if own.dim() == tensor.dim()]
            parts = [(size, span.text if span is not None else None) for size, span in spans]
            key = (name, *((size, id(part)) for size, part in parts))
            is_loose |= any(part is None and size >= is_real.shape[1] for size, part in parts)

            def make() -> torch.Tensor:
                return torch.cat([
                    part.is_real if part is not None and part.is_real is not None and part.is_real.shape[1] == size
                    else is_real.new_ones(is_real.shape[0], size) for size, part in parts
                ], 1)  # fmt: skip
        else:
            key, is_loose, make = (id(text), "resized"), True, lambda: is_real
        if key not in self._parts:
            self._parts[key] = Text(out.shape[dim], text.prefix, make(), is_loose=is_loose)  # type: ignore[no-untyped-call]
            self._parts[(*key, "whole")] = text  # kept, so that no other takes its id
        return self._parts[key]


def tensors_in(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Those among an operator's arguments, and in lists among them."""
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def _whole(axes: Axes) -> Span:
    return Span(next(iter(axes.values())).text)


def _viewed(before: Sequence[int], axes: Axes, after: Sequence[int]) -> Axes:
    """A view keeps the order of the entries: a dimension is where its steps through memory are."""
    old, new = ([*accumulate(reversed(shape), mul, initial=1)][::-1] for shape in (before, after))
    found: Axes = {}
    for dim, span in axes.items():
        low, high = old[dim + 1] * span.low, min(old[dim], old[dim + 1] * span.high)
        for place in range(len(after)):
            inner, outer = new[place + 1], new[place]
            if max(low, inner) < min(high, outer):
                found[place] = Span(span.text, max(low // inner, 1), min(high, outer) // inner)
    return found
