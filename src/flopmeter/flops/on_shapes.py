"""Running a model without its weights: parameters and activations are shapes only, everything else is real.

Tensors on the meta device have no values, so models that look at token ids, positions, masks or image sizes fail there.
Here only what depends on parameters is without values. Whatever is computed from real inputs alone (masks, positions,
offsets) stays real and small, so that such models run, and masks can be counted.

What comes out of an operator on shapes depends on shapes alone, so it is worked out once for each kind of call: the
second of eighty equal layers costs a look-up per operator, a third of the time.

The model's own Python runs, so whatever it leaves behind is put back (`untouched`).
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from flopmeter.errors import CountError
from flopmeter.flops.long_masks import LongMasks, has_values, is_followed
from flopmeter.hook_hiding import replace_attribute
from flopmeter.torch_compat import (
    EnableTorchFunction,
    OpOverload,
    OwnMode,
    num_function_modes,
    pop_function_mode,
    push_function_mode,
    tree_iter,
    tree_map_only,
)

_META = torch.device("meta")
_torch_attention = F.scaled_dot_product_attention
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem")
"""Where torch has the operators that talk to other ranks."""
_PLAIN = (torch.Tensor, nn.Parameter)
_LOOK_UPS = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten.embedding.default})
_CONSTANTS = frozenset({torch.ops.aten.ones.default, torch.ops.aten.full.default})
_INTEGRAL_FACTORIES = frozenset({"aten::arange", "aten::scalar_tensor", "aten::tensor"})


class CollectiveError(CountError):
    """The model talks to other ranks. They do not count with this one, and would wait, or take it for their own."""


def shape_only_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters without values, and buffers with them: masks and positions live there."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise CountError("its parameters are sharded: observe a training step instead")
        empty = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")
        tensors[name] = empty.requires_grad_(parameter.requires_grad)
    for name, buffer in model.named_buffers():
        tensors[name] = buffer if buffer.is_meta else buffer.detach().to("cpu", copy=True)
    return tensors


def for_real(model: nn.Module, inputs: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Parameters that give the user's no gradients, copies of the buffers, and of the inputs where the model is."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def borrow(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    tensors = {name: p.detach().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    tensors |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return tensors, tree_map_only(torch.Tensor, borrow, inputs)


@contextmanager
def only_shapes() -> Iterator[None]:
    """Everything that runs inside keeps values where they can be had. Parameters must be on the meta device.

    SDPA without values has no kernel and would fall apart into products and a real mask of length x length, so it is
    replaced by a fused operator meanwhile. (A function mode would not reach what checkpointing runs again in backward.)
    A function that the user has put in its place is called as in training, and replaced only where it fails on shapes.

    Raises:
        CollectiveError: A collective was called. It has not reached its group.
    """
    theirs = F.scaled_dot_product_attention

    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not query.is_meta:
            return theirs(query, *args, **kwargs)
        if theirs is not _torch_attention:
            try:
                return theirs(query, *args, **kwargs)
            except CountError:
                raise
            except Exception:  # noqa: BLE001 - a kernel of the user's, which has nothing to read here
                return _fused_attention(query, *args, **kwargs)
        return _fused_attention(query, *args, **kwargs)

    own = torch.autocast.__init__

    def autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        """Rotary embeddings switch it off for the device of a tensor, "meta" here: torch has none for that."""
        own(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    mode = _ShapesMode()
    undo = (
        replace_attribute(F, "scaled_dot_product_attention", attention),
        replace_attribute(torch.autocast, "__init__", autocast),
    )
    try:
        with mode:
            yield
    finally:
        for put_back in undo:
            put_back()
        if mode.collective:  # also where the model has caught the error, or made another one of it
            raise CollectiveError(f"it calls {mode.collective}, and a count must not talk to other ranks")


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


class _ShapesMode(OwnMode):  # type: ignore[no-untyped-call]
    """Runs on values what has values, and on shapes what has not."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs a tenth of the time

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collective = ""
        """The last collective that was called, which it should not have been."""
        self._results: dict[Any, Any] = {}
        self._masks = LongMasks()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in _COLLECTIVES:
            self.collective = str(func)
            raise CollectiveError(f"{func} was called while a model was counted on shapes")
        if func in _LOOK_UPS:
            args = (args[0], _look_up(args[0], args[1]), *args[2:])
        tensors: list[torch.Tensor] = []
        call = (func, _describe(args, tensors), _describe(tuple(kwargs.items()), tensors))
        num_empty = sum([tensor.is_meta for tensor in tensors])
        is_followed_one, is_known = is_followed(func), all(map(has_values, tensors))
        is_large = (
            is_followed_one
            and not num_empty
            and (tensors or kwargs.get("device") != _META or _makes_known_values(func, args, kwargs))
            and self._masks.is_large(func, args, tensors)
        )
        if num_empty and is_known:
            if func is torch.ops.aten.sum.default and (num_true := self._masks.num_true(args[0])) is not None:
                return num_true.to(kwargs.get("dtype") or torch.int64)
            if not is_followed_one and (filled := self._masks.filled((args, kwargs))) is not None:
                return func(*filled[0], **filled[1])
        if num_empty or is_large:
            given, options = args, kwargs
            if num_empty < len(tensors):
                _check_writes(func, args)
                args, kwargs = tree_map_only(torch.Tensor, _emptied, (args, kwargs))
            if kwargs.get("device") is not None or not tensors:
                kwargs = kwargs | {"device": _META}  # what has no values cannot get any by moving
            # What the same call gave before is built again from its layout.
            is_repeatable = isinstance(func, OpOverload) and _makes_new(func) and all(map(_is_plain, tensors))
            known = self._results.get(call) if is_repeatable else None
            out = _rebuild(known) if known is not None else func(*args, **kwargs)
            if is_repeatable and known is None:
                self._results[call] = tree_map_only(torch.Tensor, _layout, out)
            if is_followed_one:
                self._masks.take(func, given, options, tensors, out, is_known)
            return out
        if kwargs.get("device") == _META and (tensors or _makes_known_values(func, args, kwargs)):
            kwargs = kwargs | {"device": torch.device("cpu")}
        return func(*args, **kwargs)


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
            least = -size if isinstance(where, (list, tuple)) else 0
            low, high = (int(index.min()), int(index.max())) if index.numel() else (least, least)
            if index.numel() and not (least <= low and high < size):
                raise IndexError(f"indices from {low} to {high} do not fit a table of {size} rows")
            found.append(index)
    return found if isinstance(where, (list, tuple)) else found[0]


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


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def _layout(tensor: torch.Tensor) -> _Layout:
    return _Layout(tensor.shape, tensor.stride(), tensor.dtype)


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else _layout(tensor).build()


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


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


_GLOBAL_HOOKS = tuple(name for name in vars(nn.modules.module) if name.startswith("_global_") and "hooks" in name)


@contextmanager
def untouched(model: nn.Module, lend: Callable[[torch.Tensor], torch.Tensor] = _borrowed) -> Iterator[None]:
    """Run the model's code, and leave no trace of that.

    Attributes of all modules are as before: the same names, the same objects. Lists, dicts, sets and deques in them
    hold what they held, however deep, and so do the attributes of other objects that a module holds. Tensors among all
    these are lent out as copies: nothing is written into them, no gradient reaches them. Random state is as before, no
    hook and no function mode of the user's is called, compiled modules run as they were written.

    Left out are objects in other objects (but for modules), what has slots or C code in place of attributes, attributes
    of classes, global variables, and whatever the code does to the world: files, clocks, sockets.
    """
    with ExitStack() as stack:
        devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        stack.enter_context(torch.random.fork_rng(devices))
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_without_function_modes())
        for name in _GLOBAL_HOOKS:
            hooks = getattr(nn.modules.module, name)
            stack.callback(replace_attribute(nn.modules.module, name, type(hooks)()))
        kept = _Kept(model, lend)
        stack.callback(kept.put_back)
        for module in model.modules():
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                hooks = getattr(module, name)
                needed = {key: hook for key, hook in hooks.items() if _is_part_of_model(hook)}
                if len(needed) < len(hooks):
                    setattr(module, name, type(hooks)(needed))
        yield


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Take the user's function modes away for a while, not torch's own (`torch.set_default_device` is one).

    Tensors that have a `__torch_function__` of their own keep it, wherever this is called from.
    """
    modes: list[Any] = []
    while num_function_modes():
        modes.append(pop_function_mode())
    own = [mode for mode in modes if type(mode).__module__.startswith("torch.")]
    for mode in reversed(own):
        push_function_mode(mode)
    try:
        with EnableTorchFunction():
            yield
    finally:
        for _ in own:
            pop_function_mode()
        for mode in reversed(modes):
            push_function_mode(mode)


class _Kept:
    """What a model's modules hold, to be put back; tensors among it are lent out as copies meanwhile.

    Args:
        lend: Makes the copy.
    """

    def __init__(self, model: nn.Module, lend: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._lend = lend
        self._own = set(map(id, model.modules()))
        self._places: list[tuple[Any, Any]] = []
        """Each container, and `vars` of each object, with what it held."""
        self._seen: set[int] = set()
        self._copies: dict[int, torch.Tensor] = {}
        try:
            for module in model.modules():
                self._keep_object(module)
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Everything is as it was. Only what has changed is touched: other threads may be reading."""
        for place, held in self._places:
            if isinstance(place, dict):
                _fill_dict(place, held)
            elif isinstance(place, set):
                set.intersection_update(place, held)
                set.update(place, held)
            elif not _is_same(place, held):
                if isinstance(place, list):
                    list.__setitem__(place, slice(None), held)
                else:
                    deque.clear(place)
                    deque.extend(place, held)

    def _keep_object(self, owner: Any) -> None:
        own = vars(owner)
        if id(owner) in self._own:  # whoever runs the model swaps its parameters and buffers
            for place in (own.get("_parameters"), own.get("_buffers")):
                if isinstance(place, dict):  # a scripted module's are something else
                    self._seen.add(id(place))
                    self._places.append((place, dict(place)))
        self._keep(own, may_hold_objects=isinstance(owner, nn.Module))

    def _keep(self, place: Any, *, may_hold_objects: bool = False) -> None:
        if id(place) in self._seen:
            return
        self._seen.add(id(place))
        held = dict(place) if isinstance(place, dict) else list(place)
        self._places.append((place, held))
        items: Iterable[tuple[Any, Any]] = held.items() if isinstance(held, dict) else enumerate(held)
        for key, value in items:
            if type(value) in _PLAIN:
                if id(value) not in self._copies:
                    self._copies[id(value)] = self._lend(value)
                _set(place, key, self._copies[id(value)])
            elif isinstance(value, (list, dict, deque, set)):
                self._keep(value)
            elif isinstance(value, tuple):  # it cannot change, but what it holds can
                inside = list(value)
                self._keep(inside)
                if not _is_same(inside, value):
                    _set(place, key, type(value)(*inside) if hasattr(value, "_fields") else tuple(inside))
            elif isinstance(value, nn.Module):
                if id(value) not in self._own:  # not registered, so nobody swaps its parameters
                    self._keep_object(value)
            elif may_hold_objects and _is_plain_object(value):
                self._keep_object(value)


_OF_OTHERS = frozenset({
    "builtins", "functools", "flopmeter", "torch", "_thread", "threading", "queue", "_queue", "multiprocessing",
    "asyncio", "_asyncio", "concurrent", "subprocess", "socket", "_socket", "logging", "io", "_io", "weakref",
})  # fmt: skip
_SHARED = _OF_OTHERS - {"builtins", "functools", "torch"}


def _is_plain_object(value: Any) -> bool:
    """Whether an object's attributes are the model's own: not where it is code, or where another thread may use it."""
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or type(value).__module__.partition(".")[0] in _OF_OTHERS:
        return False
    kinds = {kind for item in (value, *own.values()) for kind in type(item).__mro__}
    return not any(kind.__module__.partition(".")[0] in _SHARED for kind in kinds)


def _is_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(item is other for item, other in zip(now, before, strict=True))


def _set(place: Any, key: Any, value: Any) -> None:
    """By the container's own kind: a subclass may do something else on top, or refuse. A set keeps its tensors."""
    kinds: tuple[Any, ...] = (OrderedDict, dict, list, deque)
    kind = next((kind for kind in kinds if isinstance(place, kind)), None)
    if kind is not None:
        kind.__setitem__(place, key, value)


def _fill_dict(place: dict[Any, Any], held: dict[Any, Any]) -> None:
    kind = OrderedDict if isinstance(place, OrderedDict) else dict
    for key in [key for key in place if key not in held]:
        kind.__delitem__(place, key)
    if not _is_same(list(place), list(held)):  # some are gone, or have another order
        kind.clear(place)
    for key, value in held.items():
        if key not in place or place[key] is not value:
            kind.__setitem__(place, key, value)


def _is_part_of_model(hook: Any) -> bool:
    """Weight norm makes the weights in a hook, transformers gathers hidden states: the model needs them."""
    home = str(getattr(hook, "__module__", type(hook).__module__))
    return home.startswith(("torch.nn.utils", "transformers."))
