"""How is code of ours put into torch and into the user's model, and taken out again, so that nobody finds it?

`replace_attribute` puts a function of ours in the place of one of torch's for a while, `surround_backward` does so with
the backward engine. `hide_hooks` leaves hooks of ours out of a copy, a pickle and a TorchScript of a model: a file that
was saved in the middle of a measured run loads where there is no flopmeter, byte for byte as without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

from torch import nn

from flopmeter.torch_compat import BACKWARD_ENGINE, RECOMPUTATION, SCRIPTING

_covered: dict[tuple[int, str, int], tuple[Any, Any, Any]] = {}
"""Replacements that were to go while another one of ours stood on them, by place and id; each with what was below."""


def replace_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Gives what puts the original back, unless somebody else has replaced ours meanwhile.

    Where several replacements are ours, the last to go puts back what was there before all of them.
    """
    original = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> None:
        if getattr(owner, name) is not value:
            _covered[id(owner), name, id(value)] = (owner, value, original)
            return
        below = original
        while (key := (id(owner), name, id(below))) in _covered:
            below = _covered.pop(key)[2]
        setattr(owner, name, below)

    return undo


def hide_frame(error: BaseException) -> None:
    """Called where a patched function of the user's lets an error through: its traceback shows no frame of ours.

    A bare `raise` must follow. Python 3.10 keeps the frame.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def surround_backward(surround: Callable[[bool], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Run every backward pass inside a context of ours; gives what ends that.

    Args:
        surround: Makes the context of one pass, from whether the pass builds a graph (`create_graph`): gradients are on
            there, which otherwise means recomputation.
    """
    original = getattr(*BACKWARD_ENGINE)

    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with surround(bool(args[2] if len(args) > 2 else kwargs.get("create_graph", False))):
            return original(outputs, *args, **kwargs)

    return replace_attribute(*BACKWARD_ENGINE, run_backward)


def surround_recomputation(surround: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Run what a checkpoint does a second time inside a context of ours; gives what ends that."""
    original = getattr(*RECOMPUTATION, None)
    if original is None:
        return lambda: None

    @contextmanager
    def recompute(*args: Any) -> Iterator[None]:
        with surround(), original(*args):
            yield

    return replace_attribute(*RECOMPUTATION, recompute)


_inert = nullcontext().__exit__
"""Takes anything, does nothing, and is known wherever there is Python."""
_BESIDE = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
"""Where a module keeps its hooks, and beside them what it knows of each."""
_in_place: dict[tuple[Any, str], list[Any]] = {}
"""Replacements for hidden hooks: how many models need each of them, and what takes it away."""


class OwnHook:
    """A hook of ours, for modules on which `hide_hooks` was called.

    Where somebody carries it elsewhere, as quantization does, a copy of it does nothing.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _inert

    def __reduce__(self) -> Any:
        return _inert.__reduce__()


def hide_hooks(module: nn.Module) -> Callable[[], None]:
    """Leave hooks of ours out of whatever is made of this module; gives what ends that."""
    state_owner: Any = next((kind for kind in type(module).__mro__ if "__getstate__" in vars(kind)), object)
    needed = [(next(place for place in SCRIPTING if hasattr(*place)), _scripts_without_hooks)]
    if state_owner is not object:
        needed.append(((state_owner, "__getstate__"), _state_without_hooks))
    for place, wrapped in needed:
        if place not in _in_place:
            _in_place[place] = [0, replace_attribute(*place, wrapped(getattr(*place)))]
        _in_place[place][0] += 1

    def undo() -> None:
        while needed:
            place, _ = needed.pop()
            _in_place[place][0] -= 1
            if not _in_place[place][0]:
                _in_place.pop(place)[1]()

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
    """TorchScript reads the hooks of the model itself: they are off all of its parts while it does."""

    @wraps(original)
    def script(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("nn_module")
        states = [vars(module) for module in model.modules()] if isinstance(model, nn.Module) else []
        changes = [(state, _hookless(state)) for state in states]
        before = [(state, {place: state[place] for place in change}) for state, change in changes]
        try:
            for state, change in changes:
                state.update(change)
            return original(*args, **kwargs)
        except BaseException as error:
            hide_frame(error)
            raise
        finally:
            for state, own in before:
                state.update(own)

    return script


def _hookless(state: dict[str, Any]) -> dict[str, Any]:
    """Those parts of a module's state that have hooks of ours, without them."""
    found: dict[str, Any] = {}
    for name, beside in _BESIDE.items():
        own = {key for key, hook in (state.get(name) or {}).items() if isinstance(hook, OwnHook)}
        for place in (name, *beside) if own else ():
            found[place] = OrderedDict((key, value) for key, value in state[place].items() if key not in own)
    return found
