"""How are phases marked without user code? By hooks on what the loop calls: loader, model, backward pass, optimizer.

What happens in every ordinary step is done here, inside the hook, on the notes of the recorder: another
call of Python costs as much as all of it. Whatever is rare (a pause, an evaluation, another thread, a device, other
ranks) makes the recorder `special`, and its methods are called.

Every function here that torch calls is skipped by its compiler, so that a compiled model stays one graph; hooks do not
travel when the model is copied or saved; and all of it is taken away again on close.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from itertools import islice
from sys import exc_info, modules
from threading import get_ident
from time import perf_counter_ns
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from flopmeter.hook_hiding import OwnHook, hide_frame, hide_hooks, replace_attribute
from flopmeter.monitor.recorder import LOOK_EVERY, Recorder
from flopmeter.timing import BACKWARD, DATA_WAIT, FORWARD, MAX_MARKS, OPTIMIZER, OTHER
from flopmeter.torch_compat import LoaderIterator, graph_task_id, outside_compiler, skip_in_compiler, tracing_state

_is_grad_enabled = torch.is_grad_enabled
_is_compiling, _is_dynamo_compiling = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
_MAX_PARTS = 64
"""Of a wrapper's attributes or a pipeline's stages that are looked at: a list may hold a million samples."""
_num_forks = 0
"""Of this process and its ancestors: asking the system for the process on every batch costs more than all of a mark."""


def _note_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_note_fork)


class Hooks:
    """Attaches the recorder to a model, an optimizer, a loader and to backward passes; `remove` undoes it all.

    Args:
        patches: Whether functions of torch may be replaced; otherwise there are hooks on models and optimizers alone.
    """

    def __init__(self, recorder: Recorder, *, patches: bool = True) -> None:
        self._own, self._patches = recorder, patches
        self._undo: list[Callable[[], None]] = []
        self._models: tuple[nn.Module, ...] = ()
        self._detach_models: list[Callable[[], None]] = []

    def attach_models(self, *models: nn.Module) -> None:
        """Mark the forward passes of the modules that the loop calls, and the backward passes that follow.

        A second call moves the marks from the first modules to these.
        """
        if not self._models and self._patches:
            self._undo += [_patch_backward(self._own), *_patch_graphing(self), *_patch_saving(self._own)]
            self._undo.append(follow_roles(self._own.role))
        self._detach()
        self._models = models
        self._attach()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Take the marks off the models for a moment: `make_graphed_callables` refuses a model that has hooks."""
        self._own.discard_measurement()  # which has hooks of its own
        self._detach()
        try:
            yield
        finally:
            self._attach()

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Mark the optimizer's steps; of one that wraps another (Accelerate's, Fabric's), the inner one's."""
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        self._undo.append(follow_optimizer(optimizer, self._own))

    def attach_loader(self, loader: Any) -> None:
        """Time the wait for each batch of a DataLoader, however the loop iterates over it; or of one that it wraps."""
        feeds = [_Feeds(inner) for inner in _data_loaders_in(loader)] if self._patches else []
        if feeds:
            is_ours = lambda iterator: any(feed(iterator) for feed in feeds)  # noqa: E731
            self._undo.append(patch_loaders(self._own, is_ours, asks_once=True))

    def remove(self) -> None:
        """Take everything away again. Safe to call twice."""
        self._detach()
        self._models = ()
        while self._undo:
            self._undo.pop()()

    def _attach(self) -> None:
        self._detach_models = [attach_forward(model, self._own, patches=self._patches) for model in self._models]

    def _detach(self) -> None:
        while self._detach_models:
            self._detach_models.pop()()


def attach_forward(model: nn.Module, listener: Any, *, patches: bool = True) -> Callable[[], None]:
    """Mark the forward passes of one module; gives what takes the hooks away again.

    Args:
        listener: A `Recorder`, or whatever is `special` for good and has its methods for passes.
    """
    before = model.register_forward_pre_hook(_ForwardHook(listener), with_kwargs=True, prepend=True)
    after = model.register_forward_hook(_ForwardEndHook(listener), always_call=True)
    show = hide_hooks(model) if patches else lambda: None

    def undo() -> None:
        before.remove()
        after.remove()
        show()

    return undo


def follow_optimizer(
    optimizer: Optimizer, recorder: Recorder, on_end: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Mark one optimizer's steps; gives what takes the hooks away again.

    Args:
        on_end: Called when it has stepped, where that need not end a step.
    """
    before = optimizer.register_step_pre_hook(_OptimizerHook(recorder))
    after = optimizer.register_step_post_hook(_OptimizerEndHook(recorder, on_end))

    def undo() -> None:
        before.remove()
        after.remove()

    return undo


class _Hook(OwnHook):
    """Writes to the recorder (`own`) what is ordinary, and calls it for the rest."""

    __slots__ = ("own",)

    def __init__(self, own: Recorder) -> None:
        self.own = own


class _ForwardHook(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # First of all the compiler, which takes its own answer for a constant and cannot trace the other questions.
        if _is_compiling() or graph_task_id() != -1 or tracing_state() is not None:
            return  # checkpointing calls the model again from inside the backward pass: that is no new batch
        own = self.own
        if not _is_grad_enabled():
            own.on_evaluation(is_training=module.training)
        elif (
            own.special
            or own.is_stepping
            or get_ident() != own.thread
            or len(own.marks) > MAX_MARKS
            or exc_info()[1] is not None
        ):
            own.on_forward(args, kwargs)
        else:
            own.forward_ns = now_ns = perf_counter_ns()
            own.note((now_ns, FORWARD))
            if len(own.marks) > MAX_MARKS:  # very many micro-batches
                own.clock.bound()
            own.passes.append(len(own.seen))
            own.has_forward = True
            try:
                own.see(args, kwargs)
            except Exception as error:  # noqa: BLE001 - an odd batch must not stop the forward pass
                own.on_failure("reading the batch", error)


class _ForwardEndHook(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if _is_dynamo_compiling():
            return
        own, exception = self.own, exc_info()[1]
        if not own.special and own.passes and exception is None and get_ident() == own.thread:
            own.passes.pop()  # of a pass that was noted: nothing else runs inside it but what is special
            own.note((perf_counter_ns(), OTHER))
        elif _is_compiling() or graph_task_id() != -1 or tracing_state() is not None:
            return
        elif not _is_grad_enabled():
            own.on_evaluation_end()
        else:
            own.on_forward_end(exception)


class _OptimizerHook(_Hook):
    __slots__ = ()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        own = self.own
        if not own.special and own.marks[-1] != BACKWARD and get_ident() == own.thread:
            own.note((perf_counter_ns(), OPTIMIZER))
            own.is_stepping = True
        elif (
            graph_task_id() == -1
        ):  # else it steps parameter by parameter: the step ends when the backward pass returns
            own.on_optimizer()


class _OptimizerEndHook(_Hook):
    __slots__ = ("_on_end",)

    def __init__(self, own: Recorder, on_end: Callable[[], None] | None) -> None:
        self.own, self._on_end = own, on_end

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        own, on_end = self.own, self._on_end
        if on_end is None and own.is_stepping and not own.special and own.has_forward and get_ident() == own.thread:
            now_ns = perf_counter_ns()
            own.note((now_ns, OTHER))
            own.is_stepping = False
            own.end(now_ns)
        elif graph_task_id() != -1:
            own.on_optimizer_in_backward()
        elif on_end is not None:
            on_end()
        else:
            own.on_optimizer_end()


def _patch_backward(own: Recorder) -> Callable[[], None]:
    """`loss.backward()` looks this name up at each call, so that one patch sees every backward pass."""
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        is_plain = not own.special and own.marks[-1] != BACKWARD and get_ident() == own.thread
        if not is_plain and graph_task_id() != -1:
            return original(*args, **kwargs)
        if not is_plain:
            own.on_backward(args[0] if args else kwargs.get("tensors"))
        else:
            own.has_backward = True
            own.backward_ns = now_ns = perf_counter_ns()
            own.note((now_ns, BACKWARD))
        has_failed = True
        try:
            result = original(*args, **kwargs)
            has_failed = False
            return result
        except BaseException as error:
            hide_frame(error)
            raise
        finally:
            if own.special or has_failed or own.has_stepped_in_backward or get_ident() != own.thread:
                own.on_backward_end(has_failed=has_failed)
            else:
                own.num_backward = len(own.seen)
                own.note((perf_counter_ns(), OTHER))

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


SAVES = (
    ("torch", "save"),
    ("torch.serialization", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint.state_dict_saver", "save"),
    ("torch.distributed.checkpoint", "async_save"),
    ("torch.distributed.checkpoint.state_dict_saver", "async_save"),
    ("safetensors.torch", "save_file"),
    # What these call, for a program that has taken them by `from ... import`.
    ("torch.serialization", "_save"),
    ("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict"),
    ("safetensors.torch", "serialize_file"),
    ("transformers.modeling_utils.PreTrainedModel", "save_pretrained"),
)
"""What writes checkpoints, under all of its names; only of what the program has imported when a run begins."""


def _patch_saving(own: Recorder) -> list[Callable[[], None]]:
    """A checkpoint between two steps is a pause, said or not. Of functions that call each other the first counts."""
    depth = 0

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if get_ident() != own.thread:
                return original(*args, **kwargs)
            start_ns, depth = perf_counter_ns(), depth + 1
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                hide_frame(error)
                raise
            finally:
                depth -= 1
                if not depth:
                    own.on_saved(start_ns)

        return save

    undo, made = [], dict[Any, Callable[..., Any]]()
    for home, name in SAVES:
        module, _, kind = home.partition(".PreTrained")
        owner = modules.get(module)
        owner = getattr(owner, f"PreTrained{kind}", None) if kind else owner
        original = getattr(owner, name, None)
        if original is not None:
            made.setdefault(original, timed(original))
            undo.append(replace_attribute(owner, name, made[original]))
    return undo


def patch_loaders(own: Recorder, is_ours: Callable[[Any], bool], *, asks_once: bool = False) -> Callable[[], None]:
    """Every DataLoader iterator fetches through one method: mark the waits for those that are ours.

    Args:
        own: The recorder, or whatever is `special` for good and has its methods for waits.
        asks_once: Whether an iterator that is ours always is.
    """
    original, num_forks = LoaderIterator.__next__, _num_forks
    known: Callable[[], Any] = lambda: None  # noqa: E731

    def fetch(iterator: Any) -> Any:
        nonlocal known
        if _num_forks != num_forks:
            return original(iterator)
        if not asks_once or iterator is not known():
            if not is_ours(iterator):
                return original(iterator)
            known = ref(iterator)
        if own.special or get_ident() != own.thread or own.num_waits % LOOK_EVERY == LOOK_EVERY - 1:
            own.on_wait()
        else:
            own.num_waits += 1
            own.note((perf_counter_ns(), DATA_WAIT))
        try:
            batch = original(iterator)
        except BaseException as error:
            own.on_no_batch()
            hide_frame(error)
            raise
        if own.special or own.waiting_since is not None or get_ident() != own.thread:
            own.on_batch()
        else:
            own.note((perf_counter_ns(), own.after_fetch))
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


# What does a loop do besides training? Roles that nobody has to name: generation, and what TRL's trainers do.
# A trainer is looked at when its first step begins: then its reference model, teacher and reward model are known. What
# is not imported when a run begins is not followed.

Role = Callable[[str], AbstractContextManager[Any]]

METHODS = {
    **dict.fromkeys(("_generate", "_generate_single_turn", "_generate_vllm"), "generation"),
    **dict.fromkeys(("_calculate_rewards", "_calculate_rewards_from_functions"), "reward"),
    **dict.fromkeys(("_get_per_token_logps_and_entropies", "_compute_kl_logps"), "log_probs"),
    "compute_ref_log_probs": "reference",
}
"""Of TRL's trainers; a call with gradients is training all the same."""
PARTS = {"ref_model": "reference", "teacher_model": "teacher", "reward_model": "reward"}
"""Models that a trainer keeps beside the one that it trains."""


def follow_roles(role: Role) -> Callable[[], None]:
    """Name what transformers and TRL do besides training; gives what ends that."""
    undo: list[Callable[[], None]] = []
    utils, trainer = modules.get("transformers.generation.utils"), modules.get("transformers.trainer")
    if utils is not None:
        mixin = utils.GenerationMixin
        undo.append(replace_attribute(mixin, "generate", _within(role, "generation", mixin.generate)))
    if trainer is not None and "trl" in modules:
        original, known = trainer.Trainer.training_step, set[int]()

        @wraps(original)
        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self) not in known:
                known.add(id(self))
                undo.extend(_follow_trainer(self, role))
            try:
                return original(self, *args, **kwargs)
            except BaseException as error:
                hide_frame(error)
                raise

        undo.append(replace_attribute(trainer.Trainer, "training_step", training_step))

    def take_away() -> None:
        while undo:
            undo.pop()()

    return take_away


def _follow_trainer(trainer: Any, role: Role) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    for kind in type(trainer).__mro__:
        for name in METHODS.keys() & vars(kind).keys() if kind.__module__.startswith("trl.") else ():
            undo.append(replace_attribute(kind, name, _within(role, METHODS[name], vars(kind)[name])))
    for name, own in PARTS.items():
        model = getattr(trainer, name, None)
        if isinstance(model, nn.Module) and model is not trainer.model:
            hook = _RoleHook(partial(role, own))
            undo += [
                model.register_forward_pre_hook(hook, prepend=True).remove,
                model.register_forward_hook(hook, always_call=True).remove,
                hide_hooks(model),
            ]
    return undo


def _within(role: Role, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with role(name):
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                hide_frame(error)
                raise

    return call


class _RoleHook(OwnHook):
    """Put before and after a model's forward pass: it is of a role meanwhile."""

    __slots__ = ("_open", "_role")

    def __init__(self, role: Callable[[], AbstractContextManager[Any]]) -> None:
        self._role, self._open = role, ExitStack()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *out: Any) -> None:
        if out:
            self._open.close()
        else:
            self._open.enter_context(self._role())


for _hook in (_ForwardHook, _ForwardEndHook, _RoleHook):
    skip_in_compiler(_hook.__call__.__code__, and_callees=True)
for _kind in (_OptimizerHook, _OptimizerEndHook):
    _call: Any = outside_compiler(_kind.__call__)
    _call._torchdynamo_disable = True
    _kind.__call__ = _call  # type: ignore[method-assign]
