"""Whose work is this? Which module was running when an operator was called, forward or backward, and on which batch.

Hooks stand on the modules only while a step is observed. Modules inside a compiled region get none (late hooks there
are ignored at best), so all of its work belongs to the region's root.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.utils.hooks import RemovableHandle


@dataclass(eq=False, slots=True)
class Batch:
    """What one call of the root module was given."""

    shape: tuple[int, ...] = ()
    """(samples, length) of the text part, when there is one."""
    token_is_real: torch.Tensor | None = None
    """Boolean (samples, length), False on padding; None when nothing is padded or nothing tells."""
    real_share: torch.Tensor | float = 1.0
    """Share of tokens that are not padding: a device scalar until the step is over."""
    is_evaluation: bool = False
    """The root was entered with gradients off."""


@dataclass(eq=False, slots=True)
class Frame:
    """One running module."""

    path: str
    batch: Batch
    is_token_wise: bool
    """Its input has one row per token, so that its work shrinks with the padding."""


NO_FRAME = Frame("", Batch(), False)


class FrameTracker:
    """Keeps the stack of running modules, and which one a later gradient belongs to."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        self._stack: list[Frame] = []
        self._handles: list[RemovableHandle] = []
        self._sequence: list[int] = []
        self._frames: list[Frame] = []

    @property
    def depth(self) -> int:
        """Modules running now."""
        return len(self._stack)

    def current(self) -> Frame:
        """The innermost running module."""
        return self._stack[-1] if self._stack else NO_FRAME

    def of_node(self, sequence_nr: int) -> Frame:
        """The module that ran when the autograd node with this sequence number was made."""
        index = bisect_right(self._sequence, sequence_nr) - 1
        return self._frames[index] if index >= 0 else NO_FRAME

    def install(self) -> None:
        """Put hooks on every module of the roots that is not inside a compiled region."""
        for root in self._roots:
            for path, module in _visible_modules(root):
                enter, leave = _Hook(self, path, module is root), _Leave(self)
                self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
                self._handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Take all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def enter(self, path: str, is_root: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module starts."""
        if is_root and not self._stack:
            batch = read_batch(args, kwargs)
            batch.is_evaluation = not torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        else:
            batch = self.current().batch
        self._push(Frame(path, batch, _is_token_wise(args, kwargs, batch)))

    def leave(self) -> None:
        """The innermost module is done, or was left by an exception."""
        if self._stack:
            self._stack.pop()
            self._mark(self.current())

    def _push(self, frame: Frame) -> None:
        self._stack.append(frame)
        self._mark(frame)

    def _mark(self, frame: Frame) -> None:
        # Nodes made from here on, until the next mark, belong to this frame.
        sequence_nr = _get_sequence_nr()
        if self._sequence and sequence_nr < self._sequence[-1]:
            return  # another autograd thread counts from its own zero
        self._sequence.append(sequence_nr)
        self._frames.append(frame)

    def __deepcopy__(self, memo: dict[int, Any]) -> FrameTracker:
        return FrameTracker(())  # a copied model must not report to us


class _Hook:
    def __init__(self, tracker: FrameTracker, path: str, is_root: bool) -> None:
        self._tracker, self._path, self._is_root = tracker, path, is_root

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._tracker.enter(self._path, self._is_root, args, kwargs)


class _Leave:
    def __init__(self, tracker: FrameTracker) -> None:
        self._tracker = tracker

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if not torch.compiler.is_compiling():
            self._tracker.leave()


def is_compiled(module: nn.Module) -> bool:
    """Whether calling this module runs compiled code (`torch.compile(m)` or `m.compile()`)."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _visible_modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    yield path, root
    if is_compiled(root):
        return
    for name, child in root.named_children():
        yield from _visible_modules(child, f"{path}.{name}" if path else name)


def read_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
    """Sizes and padding of what the root was called with, without reading a tensor."""
    first = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if _is_tensor(kwargs.get(name))), None)
    if first is None:
        first = next((value for value in (*args, *kwargs.values()) if _is_tensor(value)), None)
    if first is None or first.dim() < 2:
        return Batch()
    batch = Batch(shape=tuple(first.shape[:2]))
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and tuple(mask.shape) == batch.shape and not mask.dtype.is_floating_point:
        batch.token_is_real = mask.bool()
        batch.real_share = batch.token_is_real.sum(dtype=torch.float64) / mask.numel()
    return batch


def _is_token_wise(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Batch) -> bool:
    if batch.token_is_real is None:
        return False
    tensor = next((value for value in (*args, *kwargs.values()) if _is_tensor(value)), None)
    if tensor is None or tensor.dim() < 2:
        return False
    samples, length = batch.shape
    return tuple(tensor.shape[:2]) == batch.shape or tensor.shape[0] == samples * length


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
