"""Running a model without its weights: parameters and activations are shapes only, everything else is real.

Tensors on the meta device have no values, so models that look at token ids, positions, masks or image sizes fail there.
Here only what depends on parameters is without values. Whatever is computed from real inputs alone (masks, positions,
offsets) stays real and small, so that such models run, and masks can be counted.

What comes out of an operator on shapes depends on shapes alone, so it is worked out once for each kind of call: the
second of eighty equal layers costs a look-up per operator, a third of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from flopmeter.flops.patching import replace_attribute
from flopmeter.torch_compat import OpOverload, OwnMode, tree_iter, tree_map_only

_META = torch.device("meta")
_real_attention = F.scaled_dot_product_attention
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LOOK_UPS = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten.embedding.default})
_CONSTANTS = frozenset({torch.ops.aten.ones.default, torch.ops.aten.full.default})
_INTEGRAL_FACTORIES = frozenset({"aten::arange", "aten::scalar_tensor", "aten::tensor"})


@contextmanager
def shadow() -> Iterator[None]:
    """Everything that runs inside keeps values where they can be had. Parameters must be on the meta device.

    SDPA without values has no kernel and would fall apart into products and a real mask of length x length, so it is
    replaced by a fused operator meanwhile. (A function mode would not reach what checkpointing runs again in backward.)
    """
    F.scaled_dot_product_attention = _fused_attention
    try:
        with _ShadowMode(), _autocast_of_shapes():
            yield
    finally:
        F.scaled_dot_product_attention = _real_attention


@contextmanager
def _autocast_of_shapes() -> Iterator[None]:
    """Rotary embeddings switch autocast off for the device of a tensor, "meta" here: torch has none for that."""
    own = torch.autocast.__init__

    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        own(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    undo = replace_attribute(torch.autocast, "__init__", __init__)
    try:
        yield
    finally:
        undo()


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if not query.is_meta:
        return _real_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out: torch.Tensor = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    return out


class _Layout(NamedTuple):
    """All that there is to a plain tensor without values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def build(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=_META)


class _ShadowMode(OwnMode):  # type: ignore[no-untyped-call]
    """Runs on values what has values, and on shapes what has not."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs a tenth of the time

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results: dict[Any, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOK_UPS:
            args = (args[0], _look_up(args[0], args[1]), *args[2:])
        tensors: list[torch.Tensor] = []
        call = (func, _describe(args, tensors), _describe(tuple(kwargs.items()), tensors))
        num_shadows = sum([tensor.is_meta for tensor in tensors])
        if num_shadows:
            if num_shadows < len(tensors):
                _check_writes(func, args)
                args, kwargs = tree_map_only(torch.Tensor, _shadow, (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs = kwargs | {"device": _META}  # what has no values cannot get any by moving
            return self._on_shapes(func, args, kwargs, call if _is_repeatable(func, tensors) else None)
        if kwargs.get("device") == _META and (tensors or _makes_known_values(func, args, kwargs)):
            kwargs = kwargs | {"device": torch.device("cpu")}
        return func(*args, **kwargs)

    def _on_shapes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any) -> Any:
        """Run the operator, or rebuild what the same call gave before."""
        if call is not None and (known := self._results.get(call)) is not None:
            return _rebuild(known)
        out = func(*args, **kwargs)
        if call is not None:
            self._results[call] = tree_map_only(torch.Tensor, _layout, out)
        return out


def _look_up(table: torch.Tensor, where: Any) -> Any:
    """The rows to take, where they are known: an index that does not fit must fail here too, a mask has its size."""
    indices = where if isinstance(where, (list, tuple)) else [where]
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.is_meta:
            found.append(index)
        elif index.dtype == torch.bool:
            found.extend(index.nonzero(as_tuple=True))
        else:
            size = table.shape[len(found)]
            _check_range(index, -size if isinstance(where, (list, tuple)) else 0, size)
            found.append(index)
    return found if isinstance(where, (list, tuple)) else found[0]


def _check_range(index: torch.Tensor, lowest: int, size: int) -> None:
    if index.numel() and not lowest <= int(index.min()) <= int(index.max()) < size:
        raise IndexError(f"indices from {int(index.min())} to {int(index.max())} do not fit a table of {size} rows")


def _check_writes(func: Any, args: tuple[Any, ...]) -> None:
    """Counts and masks that a result without values is written into would stay as they were, and be believed."""
    for position in _written(func) if isinstance(func, OpOverload) else ():
        target = args[position] if position < len(args) else None
        if isinstance(target, torch.Tensor) and not (target.is_meta or target.is_floating_point()):
            raise RuntimeError(f"{func} writes what depends on weights into integers that the model may look at")


@cache
def _written(func: OpOverload) -> tuple[int, ...]:
    """Which arguments an operator writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write)


def _rebuild(result: Any) -> Any:
    if isinstance(result, _Layout):
        return result.build()
    return type(result)(map(_rebuild, result)) if isinstance(result, (tuple, list)) else result


def _describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A key that is equal for calls with equal results on shapes; gathers the tensors on the way."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _layout(value) if _is_plain(value) else None
    if isinstance(value, (tuple, list)):
        return tuple([_describe(item, tensors) for item in value])
    return type(value), value  # 1, 1.0 and True are equal, but do not mean the same


@cache
def _makes_new(func: OpOverload) -> bool:
    """Whether all results are tensors of their own, neither views of the arguments nor the arguments themselves."""
    arguments, returns = func._schema.arguments, func._schema.returns
    return bool(returns) and all(value.alias_info is None for value in (*arguments, *returns))


def _is_repeatable(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether the result can be built again from its layout."""
    return isinstance(func, OpOverload) and _makes_new(func) and all(map(_is_plain, tensors))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def _layout(tensor: torch.Tensor) -> _Layout:
    return _Layout(tensor.shape, tensor.stride(), tensor.dtype)


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return _layout(tensor).build()


def _makes_known_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a factory makes positions or masks, whose values models look at: integers, booleans, ones, constants.

    Other numbers stay without values: results are gathered in zeros, and weights begin as anything.
    """
    dtype = kwargs.get("dtype")
    if func in _CONSTANTS:
        return True
    if dtype is not None and not dtype.is_floating_point and not dtype.is_complex:
        return True
    numbers = [value for value in tree_iter(args) if isinstance(value, (int, float))]
    return dtype is None and func._schema.name in _INTEGRAL_FACTORIES and all(isinstance(n, int) for n in numbers)
