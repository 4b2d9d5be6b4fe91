"""How does code of ours take the place of a function of torch's for a while, and above all of the backward engine?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch

_ENGINE = "_engine_run_backward"  # backward() and grad() both call the engine through this name of torch.autograd


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


def skip_in_compiler(code: CodeType, *, and_callees: bool) -> None:
    """Tell torch's compiler to run this code as it is. The name is private: without it, hooks fall back to a guard."""
    frames = getattr(torch._C._dynamo, "eval_frame", None)
    strategy, action = getattr(frames, "_FrameExecStrategy", None), getattr(frames, "_FrameAction", None)
    if frames is not None and strategy is not None and action is not None:
        callees = action.SKIP if and_callees else action.DEFAULT
        frames.set_code_exec_strategy(code, strategy(action.SKIP, callees))


def is_in_compiled_call() -> bool:
    """Whether a function that torch.compile has wrapped is running, an optimizer's step with our hooks say.

    When it returns, torch puts dispatch back as it was at its start: a mode that was entered inside sees nothing from
    there on, and one that was left inside makes the next operators fail.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    frame = sys._getframe() if frames is not None else None
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == frames.__file__:
            return True
        frame = frame.f_back
    return False


def surround_backward(surround: Callable[[bool], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Run every backward pass inside a context of ours; gives what ends that.

    Args:
        surround: Makes the context of one pass, from whether the pass builds a graph (`create_graph`): gradients are on
            there, which otherwise means recomputation.
    """
    original = getattr(torch.autograd, _ENGINE)

    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with surround(bool(args[2] if len(args) > 2 else kwargs.get("create_graph", False))):
            return original(outputs, *args, **kwargs)

    return replace_attribute(torch.autograd, _ENGINE, run_backward)
