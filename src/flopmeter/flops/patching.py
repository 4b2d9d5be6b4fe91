"""How does code of ours take the place of a function of torch's for a while, and above all of the backward engine?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from flopmeter.torch_compat import BACKWARD_ENGINE

_covered: dict[int, tuple[Any, Any]] = {}
"""Replacements that were to go while another one of ours stood on them, by id; each with what was below it."""


def replace_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Gives what puts the original back, unless somebody else has replaced ours meanwhile.

    Where that somebody are we ourselves, the last to go puts back what was there before all of them.
    """
    original = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> None:
        if getattr(owner, name) is not value:
            _covered[id(value)] = (value, original)
            return
        below = original
        while id(below) in _covered:
            below = _covered.pop(id(below))[1]
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
