"""How many FLOPs does torch's own profiler see in this real step, once our formulas read the shapes it recorded?

    with ProfiledStep() as profiled:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    profiled.result().model_flop

`torch.profiler(with_flops=True)` gives numbers to a handful of operators: none to convolution backward, 1-D and 3-D
convolution, CPU attention, grouped products or recurrent layers, but one to every element-wise `add` and `mul`, and one
to products that were never finished. So its records are used and its numbers are not: each operator gets its formula,
and `profiler_flop` holds the profiler's own sum for comparison. It sees shapes only: no mask, no padding, no module, no
Python thread but the one that starts it; and a fused kernel's gradients count whether or not they were wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.profiler import record_function

from flopmeter.errors import CountError
from flopmeter.flops import formulas
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.formulas import Spec, Work
from flopmeter.flops.observation import watch_optimizers
from flopmeter.flops.patching import replace_attribute, surround_backward
from flopmeter.flops.profiler_events import (
    ABORTED,
    Event,
    is_told_better_inside,
    looks_like_matrix_work,
    math_attention_shares,
    tree,
    was_aborted,
)
from flopmeter.flops.profiler_guard import Recording
from flopmeter.flops.shadow import untouched
from flopmeter.flops.side_count import call_arguments, loss_of, unwrap
from flopmeter.flops.tf32 import product_dtype, tf32_families
from flopmeter.torch_compat import (
    STOP_RECOMPUTATION,
    checkpoint,
    reparametrize_module,
    tree_map_only,
    unrecorded_operators,
)

UNSEEN_MASKS = (
    "The profiler records shapes, not values: padding, masks given as tensors, and attention made of plain products "
    "count in full."
)
COMPILED = "Of compiled code, kernels that the compiler wrote are not seen, and what it recomputes is backward work."

_Phase = Literal["forward", "backward", "recompute", "optimizer"]

_OPTIMIZER = "flopmeter: the optimizer steps"
_BUILDS_GRAPH = "flopmeter: this backward pass builds a graph"
_NODE = "autograd::engine::evaluate_function"
_BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION


class ProfiledStep:
    """One step under torch's profiler: `start` and `stop` on the same thread, never in the first steps of a run.

    Args:
        device: Where the model trains, which decides what float32 runs in.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._recording = Recording()
        self._device = device
        self._undo: list[Callable[[], None]] = []
        self._reading: _Reading | None = None
        self._optimizer: record_function | None = None

    def start(self) -> None:
        """Begin to record.

        Raises:
            CountError: Another profiler is at work; `profiler_guard.blocker` tells beforehand.
        """
        self._recording.start()
        self._undo = [surround_backward(_mark_if_it_builds_a_graph), _mark_aborted_recomputation()]
        self._undo += watch_optimizers(self._mark_optimizer)

    def stop(self) -> None:
        """End the recording, read it, and give its memory back. Does nothing the second time."""
        self._take_away()
        events = self._recording.stop()
        if events:
            self._reading = _read_events(events, tf32_families(self._device))

    def discard(self) -> None:
        """End the recording and throw it away. After a call on another thread its own has to call as well."""
        self._take_away()
        self._recording.give_way()

    def _take_away(self) -> None:
        if self._recording.is_on_its_thread:
            self._mark_optimizer(is_in=False)  # a step that ends in the optimizer's own hook
        while self._undo:
            self._undo.pop()()

    def _mark_optimizer(self, is_in: bool) -> None:
        """Torch has a range of its own around an optimizer's step; one that is still open is told since 2.12 only."""
        mark, self._optimizer = self._optimizer, None
        if mark is not None:
            mark.__exit__(None, None, None)
        if is_in:
            self._optimizer = record_function(_OPTIMIZER)
            self._optimizer.__enter__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> ProfiledStep:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def profiler_flop(self) -> float:
        """The sum of the profiler's own FLOP numbers."""
        return self._read().profiler_flop

    def result(self, convention: Convention = "exact") -> FlopCount:
        """The FLOPs of the step.

        Raises:
            CountError: There is nothing to read: not stopped yet, or cut short by the user's own profiler.
        """
        return self._read().flop_count(convention)

    def _read(self) -> _Reading:
        if self._reading is not None:
            return self._reading
        if self._recording.was_cut_short:
            raise CountError("the profiled step was cut short because another profiler started: profile a later one")
        raise CountError("nothing was profiled: call start, run a step, call stop")


@torch.inference_mode(False)
def profile_flops(model: nn.Module, batch: Mapping[str, Any] | Sequence[Any] | torch.Tensor) -> FlopCount:
    """Run the model once under the profiler, forward and backward, and leave it as it was.

    Args:
        batch: As for `count_flops`; two whole numbers (batch size, length) stand for inputs that are built.

    Raises:
        CountError: Another profiler is at work, or the model has no weights in memory.
    """
    model = unwrap(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise CountError("a model on the meta device cannot be profiled, because it cannot run: count it instead")
    own = {name: p.detach().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    own |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    args, kwargs = tree_map_only(torch.Tensor, partial(_on_loan, device=device), call_arguments(model, batch))
    with untouched(model), torch.enable_grad(), reparametrize_module(model, own, tie_weights=True):
        with ProfiledStep(device) as profiled:
            loss = loss_of(model(*args, **kwargs))
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
        return profiled.result()


def _on_loan(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


class _Op(NamedTuple):
    """One operator that did matrix work."""

    phase: _Phase
    name: str
    dtype: str
    work: Work
    has_gradients_off: bool


class _Place(NamedTuple):
    """Where in the step an event lies."""

    phase: _Phase = "forward"
    node: tuple[int, int] | None = None
    """Thread and sequence number of the forward operator whose gradient is being computed."""
    has_gradients_off: bool = True


class _Reading(NamedTuple):
    """What the events of one step amount to."""

    ops: Sequence[_Op]
    uncounted: dict[str, int]
    profiler_flop: float
    is_compiled: bool

    def flop_count(self, convention: Convention) -> FlopCount:
        """Add up under a convention."""
        phases: dict[str, float] = defaultdict(float)
        by_dtype: dict[str, float] = defaultdict(float)
        hardware_by_dtype: dict[str, float] = defaultdict(float)
        by_op: dict[str, float] = defaultdict(float)
        for op in self.ops:
            flop = op.work.full if convention == "full" else op.work.exact
            phases[op.phase] += flop
            hardware_by_dtype[op.dtype] += op.work.hardware
            if op.phase in ("forward", "backward"):
                by_dtype[op.dtype] += flop
                by_op[op.name] += flop
        return FlopCount(
            forward_flop=phases["forward"],
            backward_flop=phases["backward"],
            recompute_flop=phases["recompute"],
            optimizer_flop=phases["optimizer"],
            hardware_flop=sum(hardware_by_dtype.values()),
            by_dtype=dict(by_dtype),
            hardware_by_dtype=dict(hardware_by_dtype),
            by_op=dict(by_op),
            coverage=None,
            uncounted=dict(self.uncounted),
            method="profiler",
            convention=convention,
            left_out=tuple(self._left_out(convention)),
        )

    def _left_out(self, convention: Convention) -> Iterator[str]:
        if convention == "exact":
            yield UNSEEN_MASKS
        silent = sum(op.work.full for op in self.ops if op.has_gradients_off and op.phase == "forward")
        if silent:
            yield f"{silent:.4g} FLOP ran forward with gradients off: evaluation inside the step would be among them."
        if self.is_compiled:
            yield COMPILED
        if names := unrecorded_operators():
            yield f"Calls of {', '.join(names)} through their own objects are not recorded by this torch's profiler."
        yield f"torch.profiler's own sum for this step is {self.profiler_flop:.4g} FLOP."


def _read_events(raw_events: Iterable[Any], in_tf32: frozenset[str]) -> _Reading:
    events = [Event(raw) for raw in raw_events if not raw.is_async()]
    counter = _Counter(events, in_tf32)
    return _Reading(
        ops=counter.ops,
        uncounted=dict(counter.uncounted),
        profiler_flop=float(sum(event.raw.flops() for event in events)),
        is_compiled=any(event.name.startswith("CompiledFunction") for event in events),
    )


class _Counter:
    """Walks the tree of events, knowing at each which part of the step it belongs to."""

    def __init__(self, events: Sequence[Event], in_tf32: frozenset[str]) -> None:
        self.ops: list[_Op] = []
        self._in_tf32 = in_tf32
        self.uncounted: dict[str, int] = defaultdict(int)
        roots = tree(events)
        self._graph_building = [(event.start_ns, event.end_ns) for event in events if event.name == _BUILDS_GRAPH]
        self._shares = math_attention_shares(events)
        for event in roots:
            self._count(event, _Place())

    def _count(self, event: Event, place: _Place) -> bool:
        """Count what an event holds; True when anything in it was counted, or noted as uncounted."""
        place = self._enter(event, place)
        formula = formulas.find(event.name)
        if formula is not None and not is_told_better_inside(event, formula):
            if was_aborted(event):
                return True
            work = event.work(formula)
            if work is not None:
                self._take(event, place, work, formula.family)
                return True
        found = [self._count(child, place) for child in event.children]
        if any(found) or (formula is None and not looks_like_matrix_work(event.name)):
            return any(found)
        self.uncounted[event.name] += 1
        return True

    def _enter(self, event: Event, place: _Place) -> _Place:
        if event.raw.scope() == _BACKWARD_SCOPE or event.name.startswith(_NODE):
            return _Place("backward", (event.raw.fwd_thread_id(), event.sequence_nr))
        if event.name.startswith(("Optimizer.step#", _OPTIMIZER)) and place.phase == "forward":
            return place._replace(phase="optimizer")
        if event.sequence_nr < 0:
            return place
        # Gradients are on. Inside a backward pass that is forward work done again, unless the pass builds a graph.
        is_again = place.phase == "backward" and not self._builds_graph(event)
        return place._replace(phase="recompute" if is_again else place.phase, has_gradients_off=False)

    def _builds_graph(self, event: Event) -> bool:
        return any(start_ns <= event.start_ns < end_ns for start_ns, end_ns in self._graph_building)

    def _take(self, event: Event, place: _Place, work: Work, family: str) -> None:
        share = self._shares.get(place.node) if place.node is not None and place.phase == "backward" else None
        if share is not None:
            work = work._replace(exact=round(work.full * share))
        dtype = next((argument.dtype for argument in event.arguments() if isinstance(argument, Spec)), "unknown")
        dtype = product_dtype(dtype, family, self._in_tf32)
        self.ops.append(_Op(place.phase, event.name, dtype, work, place.has_gradients_off))


def _mark_if_it_builds_a_graph(builds_graph: bool) -> AbstractContextManager[Any]:
    return record_function(_BUILDS_GRAPH) if builds_graph else nullcontext()


def _mark_aborted_recomputation() -> Callable[[], None]:
    """Checkpointing ends a recomputation by an exception; its making becomes a mark inside the operator it ends."""
    original: type[Exception] | None = getattr(checkpoint, STOP_RECOMPUTATION, None)
    if original is None:
        return lambda: None  # then a product that was left early counts as done

    class Marked(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            with record_function(ABORTED):
                pass

    return replace_attribute(checkpoint, STOP_RECOMPUTATION, Marked)
