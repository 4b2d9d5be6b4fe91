"""What do others find of the hooks that we put into their model? Nothing.

A copy, a pickle and a TorchScript of a model are made without hooks of ours: a file that was saved in the middle of a
measured run loads where there is no flopmeter, and is the file that it would have been without.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

from torch import nn

from flopmeter.flops.patching import hide_frame, replace_attribute
from flopmeter.torch_compat import SCRIPTING

_inert = nullcontext().__exit__
"""Takes anything, does nothing, and is known wherever there is Python."""
# Where a module keeps its hooks, and beside them what it knows of each.
_BESIDE = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}


class OwnHook:
    """A hook of ours, for modules on which `hide_hooks` was called.

    Where somebody carries it elsewhere, as quantization does, a copy of it is inert.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _inert

    def __reduce__(self) -> Any:
        return _inert.__reduce__()


def hide_hooks(module: nn.Module) -> Callable[[], None]:
    """Leave hooks of ours out of whatever is made of this module; gives what ends that."""
    state_owner: Any = next((kind for kind in type(module).__mro__ if "__getstate__" in vars(kind)), object)
    script_owner, name = next(place for place in SCRIPTING if hasattr(*place))
    ends = [_shared(script_owner, name, _scripts_without_hooks)]
    if state_owner is not object:
        ends.append(_shared(state_owner, "__getstate__", _state_without_hooks))

    def undo() -> None:
        while ends:
            ends.pop()()

    return undo


_in_place: dict[tuple[Any, str], list[Any]] = {}
"""Replacements that stand: how many need each of them, and what takes it away."""


def _shared(owner: Any, name: str, replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Have a function replaced until the last who asked for it is gone."""
    key = (owner, name)
    if key not in _in_place:
        _in_place[key] = [0, replace_attribute(owner, name, replace(getattr(owner, name)))]
    _in_place[key][0] += 1

    def undo() -> None:
        _in_place[key][0] -= 1
        if not _in_place[key][0]:
            _in_place.pop(key)[1]()

    return undo


def _state_without_hooks(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def state_of(self: Any) -> Any:
        try:
            state = original(self)
        except BaseException as error:
            hide_frame(error)
            raise
        return {**state, **_hookless(state)} if type(state) is dict else state

    return state_of


def _scripts_without_hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def script(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("nn_module")
        try:
            with _lifted(model):
                return original(*args, **kwargs)
        except BaseException as error:
            hide_frame(error)
            raise

    return script


@contextmanager
def _lifted(model: Any) -> Iterator[None]:
    """Take the hooks off a model and all of its parts for a moment."""
    states = [vars(module) for module in model.modules()] if isinstance(model, nn.Module) else []
    changes = [(state, _hookless(state)) for state in states]
    before = [{place: state[place] for place in change} for state, change in changes]
    for state, change in changes:
        state.update(change)
    try:
        yield
    finally:
        for (state, _), own in zip(changes, before, strict=True):
            state.update(own)


def _hookless(state: dict[str, Any]) -> dict[str, Any]:
    """Those parts of a module's state that have hooks of ours, without them."""
    found: dict[str, Any] = {}
    for name, beside in _BESIDE.items():
        own = {key for key, hook in (state.get(name) or {}).items() if isinstance(hook, OwnHook)}
        for place in (name, *beside) if own else ():
            found[place] = OrderedDict((key, value) for key, value in state[place].items() if key not in own)
    return found
