"""How many FLOPs did this real step take? Watches every operator of one training step, and changes nothing in it.

    with observe(model) as observed:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    observed.result().model_flop

One Python call per operator makes the observed step slower (a few per cent when it is all large products, several times
when it is all tiny ones), so a monitor does this once in hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter.flops import formulas
from flopmeter.flops.attention import SCORE_PRODUCTS, Pairs, PairTracker, allowed_by, explicit_mask
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.formulas import Formula, Spec, Work
from flopmeter.flops.frames import Frame, FrameTracker

WorkPhase = Literal["forward", "backward", "recompute", "optimizer", "evaluation"]

_ENGINE = "_engine_run_backward"  # backward() and grad() both call the engine through this name of torch.autograd
_MATRIX_WORDS = ("mm", "conv", "attention", "linear", "lstm", "gru", "rnn", "fft", "matmul", "einsum")
_OWN_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional", "inductor")


class Call(NamedTuple):
    """One operator that did matrix work."""

    phase: WorkPhase
    frame: Frame
    op: str
    dtype: str
    is_attention: bool
    work: Work
    pairs: Pairs | None
    """Set for attention whose pairs the mask decides; its share is read after the step."""


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator to the observation after it ran."""

    supports_higher_order_operators = True

    def __init__(self, take: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None], count_fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._take = take
        self._count_fake = count_fake

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this, torch runs a compiled model eagerly from here on, for good.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # the local operators arrive next, with the shapes this rank computes
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # DTensor's sharding propagation tries operators on fake tensors: no work is done there.
        if self._count_fake or not any(issubclass(t, FakeTensor) for t in types):
            self._take(func, args, kwargs, out)
        return out


class Observation:
    """Everything that was seen of one step; made by `observe`."""

    def __init__(self, roots: Sequence[nn.Module], *, count_fake: bool = False) -> None:
        self.calls: list[Call] = []
        self.uncounted: dict[str, int] = {}
        self._frames = FrameTracker(roots)
        self._pairs = PairTracker()
        self._mode = _Mode(self._take, count_fake)
        self._creates_graph: list[bool] = []
        self._is_in_optimizer = False
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to watch."""
        self._frames.install()
        self._undo = [self._frames.remove, *_watch_optimizers(self._set_in_optimizer), self._watch_backward()]
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop watching and take everything away again."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for undo in self._undo:
            undo()
        self._undo = []

    def result(self, convention: Convention = "exact") -> FlopCount:
        """The FLOPs of what was seen. Reads the mask sums from the device."""
        from flopmeter.flops.tally import tally

        return tally(self.calls, self.uncounted, convention)

    def _set_in_optimizer(self, is_in: bool) -> None:
        self._is_in_optimizer = is_in

    def _watch_backward(self) -> Callable[[], None]:
        """Note whether a backward pass builds a graph: its gradient work then looks like recomputation."""
        original = getattr(torch.autograd, _ENGINE)

        def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._creates_graph.append(bool(args[2] if len(args) > 2 else kwargs.get("create_graph", False)))
            try:
                return original(outputs, *args, **kwargs)
            finally:
                self._creates_graph.pop()

        setattr(torch.autograd, _ENGINE, run_backward)

        def undo() -> None:
            if getattr(torch.autograd, _ENGINE) is run_backward:
                setattr(torch.autograd, _ENGINE, original)

        return undo

    def _phase(self, frame: Frame) -> WorkPhase:
        if torch._C._current_graph_task_id() == -1:
            if self._is_in_optimizer:
                return "optimizer"
            return "evaluation" if frame.batch.is_evaluation else "forward"
        if not torch.is_grad_enabled():
            return "backward"
        builds_graph = bool(self._creates_graph) and self._creates_graph[-1]
        return "backward" if builds_graph and not self._frames.depth else "recompute"

    def _take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        op = _name_of(func)
        formula = formulas.find(op)
        frame = self._frame()
        if formula is None:
            if not op.startswith("aten::_softmax_backward"):
                self._pairs.follow(op, args, out, frame.batch.token_is_real)
            self._note_uncounted(op)
            return
        bound = bind(func, args, kwargs)
        work = _work(formula, bound, kwargs, out)
        pairs = self._pairs_of(op, formula, args, bound, out, frame)
        dtype = _dtype_of(args)
        self.calls.append(Call(self._phase(frame), frame, op, dtype, formula.family == "attention", work, pairs))

    def _frame(self) -> Frame:
        if torch._C._current_graph_task_id() != -1 and not self._frames.depth:
            node = torch._C._current_autograd_node()
            if node is not None:
                return self._frames.of_node(node._sequence_nr())
        return self._frames.current()

    def _pairs_of(
        self, op: str, formula: Formula, args: tuple[Any, ...], bound: Mapping[str, Any], out: Any, frame: Frame
    ) -> Pairs | None:
        if formula.family == "attention":
            mask = explicit_mask(bound)
            query = bound.get("query")
            if mask is None or not isinstance(query, torch.Tensor):
                return None
            key = bound["key"]
            shape = torch.Size((query.shape[-2], key.shape[-2]))
            share = self._pairs.share([self._allowed(mask)], shape, frame.batch.token_is_real)
            return Pairs(is_attention=True, share=share)
        if op not in SCORE_PRODUCTS:
            return None
        if torch._C._current_graph_task_id() != -1 and not self._frames.depth:
            node = torch._C._current_autograd_node()
            known = self._pairs.by_sequence.get(node._sequence_nr()) if node is not None else None
            if known is not None:
                return known
        pairs = self._pairs.product(args, out)
        if torch.is_grad_enabled():
            self._pairs.by_sequence[_get_sequence_nr() - 1] = pairs
        return pairs

    def _allowed(self, mask: torch.Tensor) -> torch.Tensor:
        cached: torch.Tensor | None = getattr(mask, "_flopmeter_allowed", None)
        if cached is None:
            cached = allowed_by(mask)
            mask._flopmeter_allowed = cached  # type: ignore[attr-defined]
        return cached

    def _note_uncounted(self, op: str) -> None:
        namespace, _, name = op.partition("::")
        is_matrix_like = namespace == "aten" and any(word in name for word in _MATRIX_WORDS)
        if is_matrix_like or namespace not in _OWN_NAMESPACES:
            self.uncounted[op] = self.uncounted.get(op, 0) + 1


@contextmanager
def observe(*models: nn.Module, count_fake: bool = False) -> Iterator[Observation]:
    """Watch the operators of all that runs inside; `models` name the modules and tell training from evaluation."""
    observation = Observation(models, count_fake=count_fake)
    observation.start()
    try:
        yield observation
    finally:
        observation.stop()


def bind(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments by the names of its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return {**{f"arg{i}": value for i, value in enumerate(args)}, **kwargs}
    return {**{argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}, **kwargs}


def _work(formula: Formula, bound: Mapping[str, Any], kwargs: Mapping[str, Any], out: Any) -> Work:
    specs = {name: _spec(value, name in formula.values) for name, value in bound.items()}
    positional = [spec for name, spec in specs.items() if name not in kwargs]
    named = {name: specs[name] for name in kwargs if name != "out"}  # mm(a, b, out=c) needs what mm(a, b) needs
    return formula(*positional, **named, **({"out": _spec(out, False)} if formula.wants_out else {}))


def _spec(value: Any, wants_values: bool) -> Any:
    if isinstance(value, torch.Tensor):
        read = tuple(value.tolist()) if wants_values else None
        return Spec(tuple(value.shape), str(value.dtype).removeprefix("torch."), read)
    if isinstance(value, (list, tuple)):
        return type(value)(_spec(item, wants_values) for item in value)
    return value


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


def _watch_optimizers(set_inside: Callable[[bool], None]) -> list[Callable[[], None]]:
    def enter(*_: Any) -> None:
        set_inside(True)

    def leave(*_: Any) -> None:
        set_inside(False)

    before = register_optimizer_step_pre_hook(enter)
    after = register_optimizer_step_post_hook(leave)
    return [before.remove, after.remove]
