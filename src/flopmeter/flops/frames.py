"""Whose work is this? Which module was running when an operator was called, forward or backward, and on which batch.

Hooks stand on the modules only while a step is observed. Modules inside a compiled region get none (late hooks there
are ignored at best), so all of its work belongs to the region's root.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from threading import get_ident
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from flopmeter.flops.token_rows import Axes, Text, TokenRows
from flopmeter.flops.workload import (
    LateWorkload,
    Needs,
    Workload,
    WorkloadReader,
    flatten,
    late_workload,
    needs_of,
    padding_mask,
    parameter_names,
    real_tokens,
)
from flopmeter.hook_hiding import OwnHook, hide_hooks
from flopmeter.torch_compat import (
    OBSERVES_COMPILED,
    DisableTorchFunction,
    autograd_node,
    graph_task_id,
    is_beside_cuda_graphs,
    sequence_nr,
    tracing_state,
)

logger = logging.getLogger("flopmeter")

Driver = Literal["token", "patch", "value", "sample"]
"""What the rows of a module's input are, judged by their number: it names what FLOPs grow with, and discounts none."""

_TEXT_INPUTS = ("input_ids", "inputs_embeds")
_FIRST_TENSOR_NAMES = (*_TEXT_INPUTS, "hidden_states", "decoder_input_ids", "pixel_values", "input_features", "x")


@dataclass(eq=False, slots=True)
class Batch:
    """What one call of an outermost module was given."""

    samples: int = 0
    """Size of the first dimension."""
    length: int | None = None
    """Tokens per sample, padding included; None for inputs that are no sequences."""
    patches: int | None = None
    """Rows of the vision tower: patches, or images where patches are made inside."""
    pixels: torch.Size | None = None
    """Shape of the images, beside text."""
    late: LateWorkload | None = None
    """All that the call was given, in numbers that may still be on the device."""
    decoder: Text | None = None
    """The text of an encoder-decoder's decoder."""
    is_evaluation: bool = False
    """The module was entered with gradients off."""
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
    """The call's arguments, kept only where a twin may have to be counted with them."""
    autocast: tuple[str, torch.dtype] | None = None
    """The autocast around the call, kept with its arguments: the loop has left it when the twin is counted."""

    def workload(self) -> Workload:
        """What the call was given. Reads from the device."""
        return self.late.resolve() if self.late is not None else Workload()


@dataclass(eq=False, slots=True)
class Frame:
    """One running module."""

    path: str
    batch: Batch
    driver: Driver
    """What its products grow with, attention and proven tokens apart."""
    needed_flop: int = 0
    """Forward FLOPs that its own weight matrix needs for the input it got: what a blind counter would miss."""
    num_gradients: int = 0
    """Of its input and its weight, how many want a gradient: each takes as many FLOPs again."""
    dtype: str = ""
    """Of its weight."""
    text: Text | None = None
    """The text that the rows of its input are proven to be."""
    slides: bool | None = None
    """Whether its attention has the window that the config names; None where nothing tells."""
    task: int = -1
    """The backward pass that it was started in."""


NO_FRAME = Frame("", Batch(), "value")


class FrameTracker:
    """Keeps the stack of running modules, and which one a later gradient belongs to."""

    def __init__(self, roots: Sequence[nn.Module], rows: TokenRows, *, is_aside: bool = False) -> None:
        self._roots = roots
        self._is_aside = is_aside
        self.rows = rows
        self.needs = needs_of(*roots)
        self._reader = WorkloadReader(self.needs, models=roots)
        self._stack: list[Frame] = []
        self._undo: list[Callable[[], None]] = []
        self._sequence: list[int] = []
        self._frames: list[Frame] = []
        self.batches: list[Batch] = []
        """One per call of a root outside of any other module."""
        self.needed: list[Frame] = []
        """Frames of modules whose weight matrix tells what they need."""
        self.has_told = False
        """Whether an input that cannot be read was told of."""
        self.on_batch: Callable[[], None] | None = None
        """Told of each such call before anything runs in it."""
        self.axes: dict[str, Axes] = {}
        """By module, which dimensions of its first tensor held a text in the forward pass."""

    @property
    def depth(self) -> int:
        """Modules running now."""
        return len(self._stack)

    @property
    def has_compiled(self) -> bool:
        """Whether any part of the roots runs compiled code."""
        return any(is_compiled(module) for root in self._roots for module in root.modules())

    @property
    def is_spread(self) -> bool:
        """Whether a root calls copies of its model on threads of their own, one for each device."""
        return any(is_spread(root) for root in self._roots)

    @property
    def runs_again(self) -> bool:
        """Whether a module was started in the backward pass that runs now."""
        return bool(self._stack) and self._stack[-1].task == graph_task_id() != -1

    def current(self) -> Frame:
        """The innermost running module."""
        return self._stack[-1] if self._stack else NO_FRAME

    def around(self) -> Frame:
        """The module around one that starts now: the one that checkpointing runs a part of again, in backward."""
        is_again = not self._stack and graph_task_id() != -1
        node = autograd_node() if is_again else None
        return self.of_node(node._sequence_nr()) if node is not None else self.current()

    def of_node(self, sequence_nr: int) -> Frame:
        """The module that ran when the autograd node with this sequence number was made."""
        index = bisect_right(self._sequence, sequence_nr) - 1
        return self._frames[index] if index >= 0 else NO_FRAME

    def install(self) -> None:
        """Put hooks on every module of the roots that is not inside a compiled region, or called on other threads."""
        may_give_way = not OBSERVES_COMPILED or is_beside_cuda_graphs()
        keeps_arguments = may_give_way or self.has_compiled or self.is_spread
        self._thread = get_ident()
        for root in self._roots:
            for path, module in _visible_modules(root):
                enter = _EnterHook(self, path, module is root, keeps_arguments)
                before = module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
                after = module.register_forward_hook(_LeaveHook(self), always_call=True)
                self._undo += [before.remove, after.remove, hide_hooks(module)]

    def remove(self) -> None:
        """Take all hooks off again."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def is_elsewhere(self) -> bool:
        """Whether a thread that does not train calls a module, for an evaluation or to act; or a count on shapes."""
        if counts_aside and not self._is_aside:
            return True
        return get_ident() != self._thread and not torch.is_grad_enabled() and graph_task_id() == -1

    def start_batch(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], keeps_arguments: bool, part: nn.Module | None = None
    ) -> Batch:
        """A root is called from outside, or a part of one: what with?"""
        if self.on_batch is not None:
            self.on_batch()
        if part is None:
            named = self._reader.in_order(self._reader.bind(args, kwargs))
        else:
            names = (*parameter_names(part), *map(str, range(len(args))))
            named = {**dict(zip(names, args, strict=False)), **kwargs}
        batch = read_batch(named, self.needs)
        batch.is_evaluation = not torch.is_grad_enabled() and graph_task_id() == -1
        self._begin_texts(batch)
        if part is not None:
            return batch
        if keeps_arguments:
            batch.arguments, batch.autocast = (args, kwargs), active_autocast()
        self.batches.append(batch)
        return batch

    def _begin_texts(self, batch: Batch) -> None:
        late = batch.late
        if late is None:
            return
        known, text = late.known, late.text
        samples = known.get("samples", 0)
        if late.decoder_text is not None and samples:
            length = known.get("decoder_tokens_processed", 0) // samples
            batch.decoder = Text(length, "decoder_", late.decoder_is_real)
            if late.decoder_text is not text:
                self.begin(late.decoder_text, batch.decoder, samples)
        is_new = late.is_real is not None or text is None or not self.rows.axes(text)  # else of a text from before
        if text is not None and batch.length is not None and is_new:
            self.begin(text, Text(batch.length, "", late.is_real), samples)
        batch.late = replace(late, text=None, decoder_text=None)

    def begin(self, tensor: torch.Tensor, text: Text, samples: int) -> None:
        """A text comes in as this tensor."""
        if tensor.dim() == 1:
            self.rows.begin(tensor, text, 0)
        elif tuple(tensor.shape[:2]) in ((samples, text.length), (text.length, samples)):
            self.rows.begin(tensor, text, 1 if tensor.shape[0] == samples and tensor.shape[1] == text.length else 0)

    def push(self, frame: Frame) -> None:
        """A module starts."""
        self._stack.append(frame)
        self._mark(frame)
        if frame.needed_flop and frame.task == -1:
            self.needed.append(frame)

    def pop(self) -> None:
        """The innermost module is done, or was left by an exception."""
        if self._stack:
            self._stack.pop()
            self._mark(self.current())

    def _mark(self, frame: Frame) -> None:
        # Nodes made from here on, until the next mark, belong to this frame.
        number = sequence_nr()
        if self._sequence and number < self._sequence[-1]:
            return  # another autograd thread counts from its own zero
        self._sequence.append(number)
        self._frames.append(frame)


counts_aside: list[object] = []
"""Counts on shapes that run now: what their model does is none of the observed step's."""


@dataclass(eq=False, slots=True)
class _EnterHook(OwnHook):
    tracker: FrameTracker
    path: str
    is_root: bool
    keeps_arguments: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or tracing_state() is not None:
            return
        tracker = self.tracker
        if tracker.is_elsewhere():
            return
        outer = tracker.around()
        try:
            with DisableTorchFunction():  # the user's function modes and tensor classes are not for us
                frame = self._frame(module, args, kwargs, outer)
        except Exception as error:  # noqa: BLE001 - an input of an unusual kind must not stop the forward pass
            if not tracker.has_told:
                tracker.has_told = True
                where = self.path or "the model"
                logger.warning("what %s is called with cannot be read: %s: %s", where, type(error).__name__, error)
            frame = Frame(self.path, outer.batch, outer.driver, task=graph_task_id())
        tracker.push(frame)

    def _frame(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Frame) -> Frame:
        tracker, tensor, task = self.tracker, _first_tensor(args, kwargs), graph_task_id()
        if outer is NO_FRAME:
            batch = tracker.start_batch(args, kwargs, self.keeps_arguments, None if self.is_root else module)
        else:
            batch = outer.batch
        self._begin_inside(kwargs, tensor, batch)
        if tensor is not None:
            if task == -1:
                tracker.axes[self.path] = tracker.rows.axes(tensor)
            elif (
                not tracker.rows.axes(tensor) and max(axes := tracker.axes.get(self.path, {}), default=9) < tensor.dim()
            ):
                tracker.rows.put(tensor, axes)  # a checkpointed part gets its input in a tensor of its own
        driver = _driver(tensor, batch, outer.driver if outer is not NO_FRAME else "value")
        slides = _slides(module, self.path, tracker.needs, outer)
        frame = Frame(self.path, batch, driver, _needed_flop(module, tensor), slides=slides, task=task)
        if frame.needed_flop and tensor is not None and (weight := module._parameters.get("weight")) is not None:
            frame.num_gradients = tensor.requires_grad + weight.requires_grad
            frame.dtype = str(weight.dtype).removeprefix("torch.")
            frame.text = tracker.rows.of_product((tensor,))
        return frame

    def _begin_inside(self, kwargs: dict[str, Any], tensor: torch.Tensor | None, batch: Batch) -> None:
        """A text that comes in where a wrapper or an encoder-decoder calls its model."""
        texts = [(kwargs.get("encoder_hidden_states"), padding_mask(kwargs, "encoder_"), "memory_")]
        for name, own in kwargs.items():  # a second text, for a tower of its own
            stem = name.removesuffix("input_ids")
            mask = kwargs.get(f"{stem}attention_mask") if stem and stem != name and has_sizes(own) else None
            if mask is not None and mask.shape == own.shape:
                texts.append((own, mask, "decoder_" if stem == "decoder_" else "memory_"))
        ids = next((own for name in _TEXT_INPUTS if has_sizes(own := kwargs.get(name))), None)
        ids = tensor if ids is None and tensor is not None and not tensor.is_floating_point() else ids
        decoder, rows = batch.decoder, self.tracker.rows
        if ids is not None and ids.dim() > 1 and not rows.axes(ids):
            decoder = decoder if decoder and tuple(ids.shape[:2]) == (batch.samples, decoder.length) else None
            texts.append((ids, padding_mask(kwargs), "decoder_" if decoder else ""))
        for own, mask, prefix in texts:
            if not has_sizes(own) or rows.axes(own):
                continue
            if mask is not None and mask.shape == own.shape[:2] and not mask.is_meta:
                self.tracker.begin(own, Text(mask.shape[1], prefix, real_tokens(mask)), mask.shape[0])
            elif own is ids and decoder:
                self.tracker.begin(own, decoder, own.shape[0])


@dataclass(eq=False, slots=True)
class _LeaveHook(OwnHook):
    tracker: FrameTracker

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if torch.compiler.is_compiling() or tracing_state() is not None:
            return
        if not self.tracker.is_elsewhere():
            self.tracker.pop()


def is_compiled(module: nn.Module) -> bool:
    """Whether calling this module runs compiled code (`torch.compile(m)` or `m.compile()`)."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def is_spread(module: nn.Module) -> bool:
    """Whether it is nn.DataParallel over several devices: operators on its threads are not seen."""
    return isinstance(module, nn.DataParallel) and len(module.device_ids) > 1


def _visible_modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    if isinstance(root, torch.jit.ScriptModule):
        return  # it takes no hooks, and calls no Python: its work belongs to the module around it
    yield path, root
    if is_compiled(root) or is_spread(root):
        return
    for name, child in root.named_children():
        yield from _visible_modules(child, f"{path}.{name}" if path else name)


def read_batch(named: Mapping[str, Any], needs: Needs) -> Batch:
    """Sizes and padding of what a module was called with, without reading a tensor."""
    named = {name: value for name, value in flatten(named).items() if not _is_empty(name, value)}
    late = late_workload(named, needs)
    samples, processed = late.known.get("samples", 0), late.known.get("tokens_processed", 0)
    batch = Batch(samples=samples, length=processed // samples if samples and processed else None, late=late)
    pixels, grid = named.get("pixel_values"), named.get("image_grid_thw")
    if batch.length is not None:
        if isinstance(pixels, torch.Tensor):
            batch.patches, batch.pixels = pixels.shape[0], pixels.shape
        elif isinstance(grid, torch.Tensor):
            batch.patches = grid.shape[0]
    return batch


def _is_empty(name: str, value: Any) -> bool:
    """Whether it should tell by its values, and has none."""
    tells = ("mask", "position_ids", "cu_seq", "grid_thw")
    return isinstance(value, torch.Tensor) and value.is_meta and any(word in name for word in tells)


def active_autocast() -> tuple[str, torch.dtype] | None:
    """The kind of device whose products are cast now, and what to."""
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return kind, torch.get_autocast_dtype(kind)
    return None


def _first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor that a module works on: the first positional one, else the first of the usual names."""
    for value in args:
        if has_sizes(value):
            return value
    for name in _FIRST_TENSOR_NAMES:
        if has_sizes(value := kwargs.get(name)):
            return value
    return next((value for value in kwargs.values() if has_sizes(value)), None)


def has_sizes(value: Any) -> TypeGuard[torch.Tensor]:
    """A tensor, and none of sequences of different lengths."""
    return isinstance(value, torch.Tensor) and not value.is_nested


def _driver(tensor: torch.Tensor | None, batch: Batch, inherited: Driver) -> Driver:
    """What the rows of a module's input are. Where sizes leave a choice, what holds for the module around it."""
    if tensor is None or tensor.dim() < 2:
        return inherited
    if batch.pixels is not None and tensor.shape == batch.pixels:
        return "patch"
    if batch.length is None:
        return "sample" if tensor.dim() == 2 and tensor.shape[0] == batch.samples else "value"
    rows, patches = tensor.shape[0], batch.patches
    fitting: list[Driver] = []
    if _is_text(tensor, batch):
        fitting.append("token")
    if patches and rows and (rows == patches or (patches % rows == 0 and patches // rows in (4, 9, 16))):
        fitting.append("patch")
    if rows == batch.samples and tensor.dim() == 2:
        fitting.append("sample")
    return inherited if inherited in fitting or not fitting else fitting[0]


def _is_text(tensor: torch.Tensor, batch: Batch) -> bool:
    """Whether a tensor has as many rows as this text has tokens, sample by sample or in one long row."""
    rows, samples, length = tensor.shape[0], batch.samples, batch.length
    if length is None:
        return False
    is_grid = tensor.dim() > 2 or not tensor.is_floating_point()
    is_flat = rows == samples * length or (rows == 1 and tensor.shape[1] == samples * length)
    return is_flat or (is_grid and tuple(tensor.shape[:2]) in ((samples, length), (length, samples)))


def _slides(module: nn.Module, path: str, needs: Needs, outer: Frame) -> bool | None:
    """Whether attention in this module has the window of the config: the module says so, or its place among layers."""
    own = vars(module)
    stem, _, place = path.rpartition(".")
    if needs.patch_window is not None and stem.endswith("blocks") and place.isdigit():
        return int(place) not in needs.whole_blocks
    if "sliding_window" in own:
        return isinstance(own["sliding_window"], int)
    kinds, layer = getattr(own.get("config"), "layer_types", None), own.get("layer_idx")
    if isinstance(kinds, (list, tuple)) and isinstance(layer, int) and layer < len(kinds):
        return "sliding" in str(kinds[layer])
    return outer.slides


def _needed_flop(module: nn.Module, tensor: torch.Tensor | None) -> int:
    weight = module._parameters.get("weight")
    if weight is None or tensor is None or weight.dim() != 2 or not tensor.is_floating_point() or not tensor.dim():
        return 0
    return 2 * prod(tensor.shape[:-1]) * weight.numel() if tensor.shape[-1] in weight.shape else 0
