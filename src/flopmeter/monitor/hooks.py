"""Marks without user code: what the loop calls tells when data is waited for, and forward, backward and optimizer run.

Every function here that torch calls is skipped by its compiler, so that a compiled model stays one graph; hook objects
turn inert when the model is copied or saved; and all of it is taken away again on close.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import dataloader


class Listener(Protocol):
    """Whoever wants to know. Methods are called on the training thread and must not raise."""

    def on_wait(self) -> None: ...
    def on_batch(self) -> None: ...
    def on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None: ...
    def on_forward_end(self) -> None: ...
    def on_evaluation(self) -> None: ...
    def on_backward(self) -> None: ...
    def on_backward_end(self) -> None: ...
    def on_optimizer(self) -> None: ...
    def on_optimizer_end(self) -> None: ...
    def on_optimizer_in_backward(self) -> None: ...


class Hooks:
    """Attaches a listener to a model, an optimizer, a loader and to backward passes; `remove` undoes it all."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._undo: list[Callable[[], None]] = []

    def attach_model(self, model: nn.Module) -> None:
        """Mark the forward pass of the module that the loop calls, and the backward passes that follow."""
        before = model.register_forward_pre_hook(_ForwardHook(self._listener), with_kwargs=True, prepend=True)
        after = model.register_forward_hook(_ForwardEndHook(self._listener))
        self._undo += [before.remove, after.remove, _patch_backward(self._listener)]

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Mark the optimizer's steps."""
        listener = self._listener
        before = optimizer.register_step_pre_hook(_OptimizerHook(listener.on_optimizer, lambda: None))
        in_backward = listener.on_optimizer_in_backward
        after = optimizer.register_step_post_hook(_OptimizerHook(listener.on_optimizer_end, in_backward))
        self._undo += [before.remove, after.remove]

    def attach_loader(self, loader: Any) -> None:
        """Time the wait for each batch of a DataLoader, however the loop iterates over it."""
        self._undo.append(_patch_loader(self._listener, loader))

    def remove(self) -> None:
        """Take everything away again. Safe to call twice."""
        while self._undo:
            self._undo.pop()()


class _Inert:
    """What a hook becomes in a copied or loaded model."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


class _Hook:
    """A hook that does not travel: a deep copy, a pickle or an EMA of the model gets an inert one."""

    __slots__ = ("_listener",)

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()


class _ForwardHook(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Checkpointing calls the model again from inside the backward pass: that is no new batch.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        if torch.is_grad_enabled():
            self._listener.on_forward(args, kwargs)
        else:
            self._listener.on_evaluation()


class _ForwardEndHook(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1 and torch.is_grad_enabled():
            self._listener.on_forward_end()


class _OptimizerHook:
    __slots__ = ("_call", "_call_in_backward")

    def __init__(self, call: Callable[[], None], call_in_backward: Callable[[], None]) -> None:
        self._call = call
        self._call_in_backward = call_in_backward

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._call()
        else:  # stepped parameter by parameter: the step ends when the backward pass returns
            self._call_in_backward()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()


def _patch_backward(listener: Listener) -> Callable[[], None]:
    """`loss.backward()` looks this name up at each call, so that one patch sees every backward pass."""
    original = torch.autograd.backward
    thread = threading.get_ident()

    def backward(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1 or threading.get_ident() != thread:
            return original(*args, **kwargs)
        listener.on_backward()
        try:
            return original(*args, **kwargs)
        finally:
            listener.on_backward_end()

    _skip_in_compiler(backward.__code__, and_callees=False)
    torch.autograd.backward = backward

    def undo() -> None:
        if torch.autograd.backward is backward:
            torch.autograd.backward = original

    return undo


def _patch_loader(listener: Listener, loader: Any) -> Callable[[], None]:
    """Every DataLoader iterator fetches through this method; only those over our loader's data set are timed."""
    owner = dataloader._BaseDataLoaderIter
    original = owner.__next__
    dataset = getattr(loader, "dataset", None)
    thread, pid = threading.get_ident(), os.getpid()

    def fetch(iterator: Any) -> Any:
        if iterator._dataset is not dataset or threading.get_ident() != thread or os.getpid() != pid:
            return original(iterator)
        listener.on_wait()
        try:
            return original(iterator)
        finally:
            listener.on_batch()

    owner.__next__ = fetch  # type: ignore[method-assign, assignment]

    def undo() -> None:
        if owner.__next__ is fetch:
            owner.__next__ = original  # type: ignore[method-assign]

    return undo


def _skip_in_compiler(code: CodeType, *, and_callees: bool) -> None:
    """Tell torch's compiler to run this code as it is. The name is private: without it, hooks fall back to a guard."""
    frames = getattr(torch._C._dynamo, "eval_frame", None)
    strategy, action = getattr(frames, "_FrameExecStrategy", None), getattr(frames, "_FrameAction", None)
    if frames is not None and strategy is not None and action is not None:
        callees = action.SKIP if and_callees else action.DEFAULT
        frames.set_code_exec_strategy(code, strategy(action.SKIP, callees))


for _hook in (_ForwardHook, _ForwardEndHook, _OptimizerHook):
    _skip_in_compiler(_hook.__call__.__code__, and_callees=True)
