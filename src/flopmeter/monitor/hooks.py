"""How are phases marked without user code? By hooks on what the loop calls: loader, model, backward pass, optimizer.

Every function here that torch calls is skipped by its compiler, so that a compiled model stays one graph; hooks do not
travel when the model is copied or saved; and all of it is taken away again on close.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from flopmeter.hook_hiding import OwnHook, hide_frame, hide_hooks, replace_attribute
from flopmeter.torch_compat import LoaderIterator, graph_task_id, outside_compiler, skip_in_compiler, tracing_state

_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_MAX_PARTS = 64
"""Of a wrapper's attributes or a pipeline's stages that are looked at: a list may hold a million samples."""
_num_forks = 0
"""Of this process and its ancestors: asking the system for the process on every batch costs more than all of a mark."""


def _note_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_note_fork)


class ForwardListener(Protocol):
    """Whoever wants to know of forward passes. Methods must not raise."""

    def on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None: ...
    def on_forward_end(self, exception: int) -> None: ...
    def on_evaluation(self, *, is_training: bool) -> None: ...
    def on_evaluation_end(self) -> None: ...


class WaitListener(Protocol):
    """Whoever wants to know of waits for a batch. Methods must not raise."""

    def on_wait(self) -> None: ...
    def on_batch(self) -> None: ...
    def on_no_batch(self) -> None: ...


class Listener(ForwardListener, WaitListener, Protocol):
    """Whoever wants to know. Methods are called on the training thread and must not raise."""

    def on_backward(self, roots: Any) -> None: ...
    def on_backward_end(self, *, has_failed: bool) -> None: ...
    def on_optimizer(self) -> None: ...
    def on_optimizer_end(self) -> None: ...
    def on_optimizer_in_backward(self) -> None: ...


class Hooks:
    """Attaches a listener to a model, an optimizer, a loader and to backward passes; `remove` undoes it all.

    Args:
        patches: Whether functions of torch may be replaced; otherwise there are hooks on models and optimizers alone.
    """

    def __init__(self, listener: Listener, *, patches: bool = True) -> None:
        self._listener = listener
        self._patches = patches
        self._undo: list[Callable[[], None]] = []
        self._models: tuple[nn.Module, ...] = ()
        self._detach_models: list[Callable[[], None]] = []
        self.on_graphing: Callable[[], None] = lambda: None
        """Called before a graph is made of a model, which must have no hooks: a measurement has some of its own."""

    def attach_models(self, *models: nn.Module) -> None:
        """Mark the forward passes of the modules that the loop calls, and the backward passes that follow.

        A second call moves the marks from the first modules to these.
        """
        if not self._models and self._patches:
            self._undo += [_patch_backward(self._listener), *_patch_graphing(self)]
        self._detach()
        self._models = models
        self._attach()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Take the marks off the models for a moment: `make_graphed_callables` refuses a model that has hooks."""
        self.on_graphing()
        self._detach()
        try:
            yield
        finally:
            self._attach()

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Mark the optimizer's steps; of one that wraps another (Accelerate's, Fabric's), the inner one's."""
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        self._undo.append(follow_optimizer(optimizer, self._listener, self._listener.on_optimizer_end))

    def attach_loader(self, loader: Any) -> None:
        """Time the wait for each batch of a DataLoader, however the loop iterates over it; or of one that it wraps."""
        feeds = [_Feeds(inner) for inner in _data_loaders_in(loader)] if self._patches else []
        if feeds:
            self._undo.append(patch_loaders(self._listener, lambda iterator: any(feed(iterator) for feed in feeds)))

    def remove(self) -> None:
        """Take everything away again. Safe to call twice."""
        self._detach()
        self._models = ()
        while self._undo:
            self._undo.pop()()

    def _attach(self) -> None:
        self._detach_models = [attach_forward(model, self._listener, patches=self._patches) for model in self._models]

    def _detach(self) -> None:
        while self._detach_models:
            self._detach_models.pop()()


def attach_forward(model: nn.Module, listener: ForwardListener, *, patches: bool = True) -> Callable[[], None]:
    """Mark the forward passes of one module; gives what takes the hooks away again."""
    before = model.register_forward_pre_hook(_ForwardHook(listener), with_kwargs=True, prepend=True)
    after = model.register_forward_hook(_ForwardEndHook(listener), always_call=True)
    show = hide_hooks(model) if patches else lambda: None

    def undo() -> None:
        before.remove()
        after.remove()
        show()

    return undo


def follow_optimizer(optimizer: Optimizer, listener: Listener, on_end: Callable[[], None]) -> Callable[[], None]:
    """Mark one optimizer's steps; gives what takes the hooks away again."""
    before = optimizer.register_step_pre_hook(_OptimizerHook(listener.on_optimizer, lambda: None))
    after = optimizer.register_step_post_hook(_OptimizerHook(on_end, listener.on_optimizer_in_backward))

    def undo() -> None:
        before.remove()
        after.remove()

    return undo


def handled_exception() -> int:
    """Names the exception that is being handled, and does not keep it alive: its frames may hold the batch.

    A forward pass that ends with another one than it began with has failed.
    """
    return id(sys.exc_info()[1])


class _ForwardHook(OwnHook):
    __slots__ = ("_on_evaluation", "_on_forward")

    def __init__(self, listener: ForwardListener) -> None:
        self._on_forward = listener.on_forward
        self._on_evaluation = listener.on_evaluation

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # First of all the compiler, which takes its own answer for a constant and cannot trace the other questions.
        if _is_compiling() or graph_task_id() != -1 or tracing_state() is not None:
            return  # checkpointing calls the model again from inside the backward pass: that is no new batch
        if _is_grad_enabled():
            self._on_forward(args, kwargs)
        else:
            self._on_evaluation(is_training=module.training)


class _ForwardEndHook(OwnHook):
    __slots__ = ("_on_evaluation_end", "_on_forward_end")

    def __init__(self, listener: ForwardListener) -> None:
        self._on_forward_end = listener.on_forward_end
        self._on_evaluation_end = listener.on_evaluation_end

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if _is_compiling() or graph_task_id() != -1 or tracing_state() is not None:
            return
        if _is_grad_enabled():
            self._on_forward_end(handled_exception())
        else:
            self._on_evaluation_end()


class _OptimizerHook(OwnHook):
    __slots__ = ("_call", "_call_in_backward")

    def __init__(self, call: Callable[[], None], call_in_backward: Callable[[], None]) -> None:
        self._call = call
        self._call_in_backward = call_in_backward

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if graph_task_id() == -1:
            self._call()
        else:  # stepped parameter by parameter: the step ends when the backward pass returns
            self._call_in_backward()


def _patch_backward(listener: Listener) -> Callable[[], None]:
    """`loss.backward()` looks this name up at each call, so that one patch sees every backward pass."""
    original = torch.autograd.backward
    on_backward, on_backward_end = listener.on_backward, listener.on_backward_end

    def backward(*args: Any, **kwargs: Any) -> Any:
        if graph_task_id() != -1:
            return original(*args, **kwargs)
        on_backward(args[0] if args else kwargs.get("tensors"))
        has_failed = True
        try:
            result = original(*args, **kwargs)
            has_failed = False
            return result
        except BaseException as error:
            hide_frame(error)
            raise
        finally:
            on_backward_end(has_failed=has_failed)

    skip_in_compiler(backward.__code__, and_callees=False)
    return replace_attribute(torch.autograd, "backward", backward)


def _patch_graphing(hooks: Hooks) -> list[Callable[[], None]]:
    """Torch makes no CUDA graph of a model that has hooks; ours are put back when it is made."""
    original = torch.cuda.make_graphed_callables

    def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
        with hooks.lifted():
            return original(*args, **kwargs)

    homes = (torch.cuda, torch.cuda.graphs)  # one function under two names
    return [replace_attribute(home, "make_graphed_callables", make_graphed_callables) for home in homes]


def patch_loaders(listener: WaitListener, is_ours: Callable[[Any], bool]) -> Callable[[], None]:
    """Every DataLoader iterator fetches through one method: mark the waits for those that are ours."""
    original = LoaderIterator.__next__
    num_forks = _num_forks
    on_wait, on_batch, on_no_batch = listener.on_wait, listener.on_batch, listener.on_no_batch

    def fetch(iterator: Any) -> Any:
        if _num_forks != num_forks or not is_ours(iterator):
            return original(iterator)
        on_wait()
        try:
            batch = original(iterator)
        except BaseException as error:
            on_no_batch()
            hide_frame(error)
            raise
        on_batch()
        return batch

    return replace_attribute(LoaderIterator, "__next__", fetch)


def _data_loaders_in(loader: Any, depth: int = 3) -> Iterator[Any]:
    """The DataLoader that this is, or those that it keeps in attributes and lists, as wrappers and pipelines do."""
    if isinstance(loader, DataLoader):
        yield loader
    elif depth and not isinstance(loader, (nn.Module, torch.Tensor)):
        if type(loader) in (list, tuple):
            parts = loader
        else:
            parts = (loader if type(loader) is dict else getattr(loader, "__dict__", {})).values()
        for part in islice(parts, _MAX_PARTS):
            yield from _data_loaders_in(part, depth - 1)


class _Feeds:
    """Tells whether an iterator is one of a loader's.

    It keeps the loader's own index sampler. Another loader over the same dataset has another one: an evaluation on the
    training data. As long as none with the loader's sampler was seen, the dataset must do: what the loop iterates over
    may be a copy that a framework has made for this rank.
    """

    def __init__(self, loader: Any) -> None:
        self._dataset = getattr(loader, "dataset", None)
        sampler = getattr(loader, "batch_sampler", None)
        self._sampler = sampler if sampler is not None else getattr(loader, "sampler", None)
        self._was_seen = False

    def __call__(self, iterator: Any) -> bool:
        if iterator._index_sampler is self._sampler:
            self._was_seen = True
            return True
        return not self._was_seen and iterator._dataset is self._dataset


for _hook in (_ForwardHook, _ForwardEndHook):
    skip_in_compiler(_hook.__call__.__code__, and_callees=True)
_OptimizerHook.__call__ = outside_compiler(_OptimizerHook.__call__)  # type: ignore[method-assign]
_OptimizerHook.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]
