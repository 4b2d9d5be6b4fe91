"""What did every operator of a stretch of code do? Watches one training step, and changes nothing in it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopmeter.devices.placement import devices_of
from flopmeter.flops import formulas
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.formulas import Formula, Spec, Work
from flopmeter.flops.frames import Batch, Frame, FrameTracker
from flopmeter.flops.pairs import SCORE_PRODUCTS, TRACKED, Pairs, PairTracker, explicit_mask, flex_pairs, unmasked_share
from flopmeter.flops.repeats import Repeats
from flopmeter.flops.tf32 import product_dtype, tf32_families
from flopmeter.hook_hiding import replace_attribute, surround_backward
from flopmeter.step_facts import StepFacts
from flopmeter.torch_compat import (
    OBSERVES_COMPILED,
    DisableTorchFunction,
    FakeTensor,
    OwnMode,
    autograd_node,
    before_compiled_calls,
    dispatch_mode,
    graph_task_id,
    has_function_mode,
    is_beside_cuda_graphs,
    is_cuda_graph_made,
    is_in_compiled_call,
    num_dispatch_modes,
    outside_compiler,
    sequence_nr,
)

logger = logging.getLogger("flopmeter")

WorkPhase = Literal["forward", "backward", "recompute", "optimizer", "evaluation"]

_OPAQUE = frozenset({"DTensor", "NestedTensor"})
"""Tensors that hold others: the operators on those arrive next, with the shapes that this rank computes."""
_WRAPPERS = {"higher_order::run_and_save_rng_state": 0, "higher_order::run_with_rng_state": 1}
"""Operators that call another one, and where among their arguments it stands."""
_BY_HEADS = "aten::_scaled_dot_product"
"""Fused operators whose last dimensions but one are the queries and keys of one sample's head."""
BESIDE_COMPILER = f"torch {torch.__version__} lets no step be observed that runs compiled code"
BESIDE_GRAPHS = f"torch {torch.__version__} lets no step be observed beside the CUDA graphs of torch.compile"
_ATTENTION_FAMILIES = frozenset({"attention", "flex_attention"})


class Call(NamedTuple):
    """One operator that did matrix work."""

    phase: WorkPhase
    frame: Frame
    op: str
    dtype: str
    is_attention: bool
    """A fused attention operator; attention made of plain products is told by `pairs`."""
    work: Work | Callable[[], Work]
    """A function where integers have to be read from the device first."""
    pairs: Pairs | None
    """Which share of the pairs counts, where a mask decides."""
    sizes: tuple[int, ...] = (0, 0, 0)
    """Samples, queries and keys of a fused attention operator; no samples where sequences lie end to end. Of another
    operator in a decoder all sizes of its matrices."""


class Observation:
    """Everything that was seen between `start` and `stop`.

    Args:
        roots: The modules that the code calls: they name the work, and tell training from evaluation.
        is_training_step: False counts operators on fake tensors too, and a root that is called with gradients off.
        limit: Called after each operator; what it raises ends the code that is watched.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        *,
        is_training_step: bool = True,
        limit: Callable[[], None] | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.uncounted: dict[str, int] = {}
        self.roots = roots
        device = devices_of(nn.ModuleList(roots))[0]
        self.device_type = device.type
        self._tf32_families = tf32_families(device)
        self.facts = StepFacts(self.device_type) if is_training_step else None
        self._frames = FrameTracker(roots)
        self._pairs = PairTracker()
        self._repeats = Repeats()
        self._mode = _Mode(self._take, not is_training_step, limit)
        self._builds_graph: list[bool] = []
        self._is_in_optimizer = False
        self.gave_way: str | None = None
        """Why nothing was observed from some point of the step on: beside compiled code this torch would take harm."""
        self._is_aside = not is_training_step
        self._thread = get_ident()
        self._undo: list[Callable[[], None]] = []

    @property
    def batches(self) -> list[Batch]:
        """What the roots were called with, one per call."""
        return self._frames.batches

    @property
    def has_compiled(self) -> bool:
        """Whether any part of the roots runs compiled code."""
        return self._frames.has_compiled

    def start(self) -> None:
        """Begin to watch."""
        self._thread = get_ident()
        self._frames.install()
        self._undo = [self._frames.remove, *watch_optimizers(self._set_in_optimizer)]
        self._undo.append(surround_backward(self._inside_backward))
        if not self._is_aside and is_beside_cuda_graphs():
            self.gave_way = BESIDE_GRAPHS
            self._mode.is_quiet = True
            return
        if not self._is_aside and not OBSERVES_COMPILED:
            self._undo.append(replace_attribute(*before_compiled_calls(self._give_way)))
        if self._mode.outlasts_call():
            self._frames.on_batch = self._enter_late
        else:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _give_way(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compiled code is about to run, or a model to be exported: before the compiler looks, nothing of ours is left.

        A root that was compiled in place is called without its hooks, so that its batch is noted here.
        """
        if get_ident() != self._thread or self.gave_way is not None:
            return
        self.gave_way = BESIDE_COMPILER
        try:
            if dispatch_mode() is self._mode:
                self._mode.__exit__(None, None, None)
            self.stop()
            if getattr(function, "__self__", None) in self.roots and not self._frames.depth:
                with DisableTorchFunction():
                    self._frames.start_batch(args, kwargs, keeps_arguments=True)
        except Exception as error:  # noqa: BLE001 - from here it would end the user's call
            logger.warning("the observed step did not end cleanly: %s: %s", type(error).__name__, error)

    def _enter_late(self) -> None:
        """A root is called, after a start within a compiled optimizer step: from here on the mode sees what runs."""
        if not self._mode.outlasts_call() and not num_dispatch_modes():
            self._frames.on_batch = None
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop watching and take everything away again.

        A mode of the user's that was entered meanwhile and is still open stays where it is: ours goes quiet beneath it.
        On another thread than the one that watches, ours goes quiet as well, and is left there by a second call.
        """
        is_first, self._mode.is_quiet = not self._mode.is_quiet, True
        if self.gave_way is None and not self._is_aside and is_beside_cuda_graphs():
            self.gave_way = BESIDE_GRAPHS  # since some operator of this step
        is_whole = self._frames.on_batch is None and self.gave_way is None
        if dispatch_mode() is self._mode:
            self._mode.leave()
        elif is_first and is_whole and get_ident() == self._thread:
            logger.warning("the observed step ended inside another dispatch mode; it is counted as far as it was seen")
        for undo in self._undo:
            undo()
        self._undo = []
        self._mode.let_go()

    def result(self, convention: Convention = "exact") -> FlopCount:
        """The FLOPs of what was seen. Reads the mask sums from the device."""
        from flopmeter.flops.tally import tally

        again = self._repeats.find()
        calls = [call._replace(phase="recompute") if i in again else call for i, call in enumerate(self.calls)]
        return tally(calls, self._frames, self.uncounted, convention)

    def _set_in_optimizer(self, is_in: bool) -> None:
        if get_ident() == self._thread:
            self._is_in_optimizer = is_in

    @contextmanager
    def _inside_backward(self, builds_graph: bool) -> Iterator[None]:
        self._builds_graph.append(builds_graph)
        try:
            yield
        finally:
            self._builds_graph.pop()

    def _take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operator has run. Whatever it is, the training code that called it goes on."""
        op = _name_of(func)
        try:
            if op in _WRAPPERS:  # a compiled, checkpointed random operator comes wrapped with its random state
                position = _WRAPPERS[op]
                self._take(args[position], args[position + 1 :], kwargs, out[1] if position == 0 else out)
            else:
                self._count(op, func, args, kwargs, out)
        except Exception as error:  # noqa: BLE001 - a tensor of an unusual kind; the operator is listed, with the reason
            if op not in self.uncounted:
                logger.warning("%s could not be counted: %s: %s", op, type(error).__name__, error)
            self.uncounted[op] = self.uncounted.get(op, 0) + 1

    def _count(self, op: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self.facts is not None:
            self.facts.see(op, args, out, self._is_in_optimizer)
        formula = formulas.find(op)
        if formula is None:
            if op in TRACKED:
                self._pairs.follow(op, args, out, self._frames.current().batch.token_is_real)
            else:
                self._note_uncounted(op)
            return
        node = _gradient_node() if not self._frames.depth else None
        frame = self._frames.of_node(node._sequence_nr()) if node is not None else self._frames.current()
        bound = bind(formula, func, args)
        phase, work = self._phase(frame), _work(formula, bound, _with_wanted(formula, kwargs, node))
        self._note_repeats(phase, work, node)
        self.calls.append(
            Call(
                phase=phase,
                frame=frame,
                op=op,
                dtype=product_dtype(_dtype_of(args), formula.family, self._tf32_families),
                is_attention=formula.family in _ATTENTION_FAMILIES,
                work=work,
                pairs=self._pairs_of(op, formula, {**bound, **kwargs}, out, frame, node),
                sizes=self._sizes(op, formula, bound, frame),
            )
        )

    def _sizes(self, op: str, formula: Formula, bound: Mapping[str, Any], frame: Frame) -> tuple[int, ...]:
        if formula.family not in _ATTENTION_FAMILIES:
            has_memory = frame.batch.memory is not None
            return (
                tuple(n for v in bound.values() if isinstance(v, torch.Tensor) for n in v.shape) if has_memory else ()
            )
        query, key = bound.get("query"), bound.get("key")
        if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor):
            return 0, 0, 0
        if query.dim() < 4 or any("seq" in name and isinstance(value, torch.Tensor) for name, value in bound.items()):
            return 0, query.shape[0], key.shape[0]
        place = 2 if op.startswith((_BY_HEADS, "aten::_cudnn", "higher_order::flex")) else 1
        return query.shape[0], query.shape[place], key.shape[place]

    def _phase(self, frame: Frame) -> WorkPhase:
        if graph_task_id() == -1:
            if self._is_in_optimizer and not torch.is_grad_enabled():  # with gradients it is the closure of the step
                return "optimizer"
            return "evaluation" if frame.batch.is_evaluation and not self._is_aside else "forward"
        if not torch.is_grad_enabled():
            return "backward"
        builds_graph = bool(self._builds_graph) and self._builds_graph[-1]
        return "backward" if builds_graph and not self._frames.depth else "recompute"

    def _note_repeats(self, phase: WorkPhase, work: Work | Callable[[], Work], node: Any) -> None:
        if not isinstance(work, Work) or torch.is_grad_enabled():
            return
        if phase == "forward":
            self._repeats.see_forward(sequence_nr() - 1, work.full)
        elif phase == "backward":
            self._repeats.see_backward(node, work.full, len(self.calls))

    def _pairs_of(
        self,
        op: str,
        formula: Formula,
        bound: Mapping[str, Any],
        out: Any,
        frame: Frame,
        node: Any,
    ) -> Pairs | None:
        if formula.family == "flex_attention":
            return flex_pairs(bound)
        if formula.family in _ATTENTION_FAMILIES:
            return self._fused_pairs(op, bound, frame, node)
        if op not in SCORE_PRODUCTS:
            return None
        known = self._pairs.by_sequence.get(node._sequence_nr()) if node is not None else None
        if known is not None:
            return known
        pairs = self._pairs.product(op, bound, out)
        if torch.is_grad_enabled():
            self._pairs.by_sequence[sequence_nr() - 1] = pairs
        return pairs

    def _fused_pairs(self, op: str, bound: Mapping[str, Any], frame: Frame, node: Any) -> Pairs | None:
        query, key, value = (bound.get(name) for name in ("query", "key", "value"))
        if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)):
            return None
        pairs = Pairs(is_attention=True, needed=_needed_gradients(node, query.shape[-1], value.shape[-1]))
        mask, is_real, shape = explicit_mask(bound), frame.batch.token_is_real, (query.shape[-2], key.shape[-2])
        if mask is not None:
            pairs.share = self._pairs.share([mask], torch.Size(shape), is_real)
        elif is_real is not None and is_real.shape[1] == shape[0] and op.startswith(_BY_HEADS):
            pairs.share = unmasked_share(is_real, *shape, is_causal=bool(bound.get("is_causal")))
        elif pairs.needed == 1:
            return None
        else:
            pairs.is_attention = False  # the formula's own pairs count
        return pairs

    def _note_uncounted(self, op: str) -> None:
        if formulas.may_hide_flop(op):
            self.uncounted[op] = self.uncounted.get(op, 0) + 1


class _Mode(OwnMode):  # type: ignore[no-untyped-call]
    """Hands every operator to the observation after it ran."""

    def __init__(
        self,
        take: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None],
        count_fake: bool,
        limit: Callable[[], None] | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = limit
        self.is_quiet = False
        self._take = take
        self._count_fake = count_fake
        self._pid = os.getpid()

    def outlasts_call(self) -> bool:
        """Whether a compiled function runs that a step does not begin and end in: a count on shapes does."""
        return not self._count_fake and is_in_compiled_call()

    def leave(self) -> None:
        """Off the stack: at once, or in the next backward pass where a compiled function would put its key back."""
        if not self.outlasts_call():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            return

        def leave_first(_: bool) -> AbstractContextManager[Any]:
            if dispatch_mode() is self and not self.outlasts_call():
                undo()
                self.leave()
            return nullcontext()

        undo = surround_backward(leave_first)

    def let_go(self) -> None:
        """Nothing comes after this: the two would hold each other, and the step's tensors, until a collection."""
        self._take = lambda *_: None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this, torch runs a compiled model eagerly from here on, for good.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and any(t.__name__ in _OPAQUE for t in types):
            return NotImplemented
        if has_function_mode():  # where C++ calls the operator: the mode would see it from here
            with DisableTorchFunction():
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        # Not in a data loader's worker, forked during the step. Nor while torch.compile makes a CUDA graph: it counts
        # what is alive in the graph's memory, and ends the user's step with an error over a mask that we kept; and a
        # sum of ours would be recorded: each replay would write it to where something else may be by then.
        if self.is_quiet or os.getpid() != self._pid or (not self._count_fake and is_cuda_graph_made()):
            return out
        # DTensor's sharding propagation tries operators on fake tensors: no work is done there.
        if self._count_fake or not any(issubclass(t, FakeTensor) for t in types):
            with DisableTorchFunction():  # the user's function modes and tensor classes are not for us
                self._take(func, args, kwargs, out)
        if self._limit is not None:
            self._limit()
        return out


def _gradient_node() -> Any:
    """The autograd node that runs now, or None outside of a backward pass."""
    return autograd_node() if graph_task_id() != -1 else None


def _with_wanted(formula: Formula, kwargs: dict[str, Any], node: Any) -> dict[str, Any]:
    """The arguments, and which gradients the operator's own node passes on, for a formula that asks."""
    if not formula.takes_wanted or node is None:
        return kwargs
    own_name = formula.op.rpartition("::")[2].replace("_", "")
    if node.name().lower().rstrip("0123456789") != own_name:
        return kwargs  # a compiled graph's node, whose inputs are other tensors
    return {**kwargs, "wanted": tuple(function is not None for function, _ in node.next_functions)}


def _needed_gradients(node: Any, key_dim: int, value_dim: int) -> float:
    """Share of a fused attention backward that somebody wants.

    Of its four products the gradients of queries and keys take one each over the head's width, that of the values one
    over the values' width, and both of the former need the gradient of the probabilities, over the values' width again.
    """
    if node is None or "Att" not in node.name() or len(node.next_functions) < 3:
        return 1.0  # not the attention's own node: a compiled graph's, whose inputs are other tensors
    query, key, value = (function is not None for function, _ in node.next_functions[:3])
    wanted = (query + key) * key_dim + value * value_dim + (query or key) * value_dim
    return wanted / (2 * key_dim + 2 * value_dim)


def bind(formula: Formula, func: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by the names of the operator's schema, or of the formula where it has none."""
    schema = getattr(func, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else formula.parameters
    return dict(zip(names, args, strict=False))


def _work(formula: Formula, bound: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Work | Callable[[], Work]:
    named = {name: value for name, value in kwargs.items() if name != "out"}  # mm(a, b, out=c) needs what mm(a, b) does
    if not formula.values:
        return formula(*map(_spec, bound.values()), **{name: _spec(value) for name, value in named.items()})
    # Offsets are copied now and read after the step: reading here would wait for the device.
    copies = {name: _copied(value) if name in formula.values else _spec(value) for name, value in bound.items()}
    named = {name: _copied(value) if name in formula.values else _spec(value) for name, value in named.items()}
    return lambda: formula(*map(_read, copies.values()), **{name: _read(value) for name, value in named.items()})


def _spec(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        nnz = value._nnz() if value.layout not in (torch.strided, torch.jagged) else None
        return Spec(tuple(value.shape), str(value.dtype).removeprefix("torch."), None, nnz)
    if isinstance(value, (list, tuple)):
        return type(value)(_spec(item) for item in value)
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return tuple(_copied(item) for item in value) if isinstance(value, (list, tuple)) else value


def _read(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        readable = not (value.is_meta or value.is_floating_point())
        integers = tuple(value.flatten().tolist()) if readable else None
        return _spec(value)._replace(values=integers)
    return tuple(_read(item) for item in value) if type(value) in (list, tuple) else value


def _name_of(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return str(schema.name)
    return f"higher_order::{func.name() if callable(getattr(func, 'name', None)) else func}"


def _dtype_of(args: Iterable[Any]) -> str:
    for value in args:
        if isinstance(value, torch.Tensor):
            return str(value.dtype).removeprefix("torch.")
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return _dtype_of(value)
    return "unknown"


def watch_optimizers(set_inside: Callable[[bool], None]) -> list[Callable[[], None]]:
    """Tell when an optimizer of torch's begins and ends its step; gives what ends that."""

    def enter(*_: Any) -> None:
        set_inside(True)

    def leave(*_: Any) -> None:
        set_inside(False)

    before = register_optimizer_step_pre_hook(outside_compiler(enter))
    after = register_optimizer_step_post_hook(outside_compiler(leave))
    return [before.remove, after.remove]
