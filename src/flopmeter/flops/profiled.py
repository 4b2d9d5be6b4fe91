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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from flopmeter.devices import product_dtype, tf32_families
from flopmeter.errors import CountError
from flopmeter.flops import formulas
from flopmeter.flops.count import call_arguments, loss_of, unwrap
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.formulas import Work
from flopmeter.flops.observation import watch_optimizers
from flopmeter.flops.on_shapes import for_real, untouched
from flopmeter.hook_hiding import replace_attribute, surround_backward
from flopmeter.profiling.profiler_guard import Recording, range_of
from flopmeter.profiling.recorded import (
    OPTIMIZER_MARK,
    UNSEEN_MASKS,
    Cover,
    FlopSums,
    Range,
    choose,
    find_phases,
    nest,
    recorded_flop,
    uncounted,
)
from flopmeter.torch_compat import (
    STOP_RECOMPUTATION,
    checkpoint,
    input_shapes,
    reparametrize_module,
    schemas_of,
    unrecorded_operators,
)

COMPILED = "Of compiled code, kernels that the compiler wrote are not seen, and what it recomputes is backward work."

_BUILDS_GRAPH = "flopmeter: this backward pass builds a graph"
_ABORTED = "flopmeter: recomputation stops here"
"""A mark inside the operator that checkpointing left early."""
_MATH_ATTENTION = "aten::_scaled_dot_product_attention_math"
_BATCHED_PRODUCTS = ("aten::bmm", "aten::baddbmm")


class ProfiledStep:
    """One step under torch's profiler: `start` and `stop` on the same thread, never in the first steps of a run.

    Args:
        device: Where the model trains, which decides what float32 runs in.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._recording = Recording()
        self._device = device
        self._record: _StepRecord | None = None
        self._optimizer: record_function | None = None

    def start(self) -> None:
        """Begin to record.

        Raises:
            CountError: Another profiler is at work; ask `profiler_guard.blocker` first.
        """
        self._recording.start()
        self._recording.undo += [
            surround_backward(lambda builds: record_function(_BUILDS_GRAPH) if builds else nullcontext()),
            _mark_aborted_recomputation(),
            *watch_optimizers(self._mark_optimizer),
            # For a step that ends in the optimizer's own hook.
            lambda: self._mark_optimizer(is_in=False) if self._recording.is_on_its_thread else None,
        ]

    def stop(self) -> None:
        """End the recording, read it, and give its memory back. Does nothing the second time."""
        events = self._recording.stop()
        if events:
            self._record = _StepRecord(events, tf32_families(self._device))

    def discard(self) -> None:
        """End the recording and throw it away. After a call on another thread its own has to call as well."""
        self._recording.discard()

    def _mark_optimizer(self, is_in: bool) -> None:
        """Torch before 2.12 does not record its own range around an optimizer's step while that is open."""
        mark, self._optimizer = self._optimizer, None
        if mark is not None:
            mark.__exit__(None, None, None)
        if is_in:
            self._optimizer = record_function(OPTIMIZER_MARK)
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

    def _read(self) -> _StepRecord:
        if self._record is not None:
            return self._record
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
    tensors, (args, kwargs) = for_real(model, call_arguments(model, batch))
    with untouched(model), torch.enable_grad(), reparametrize_module(model, tensors, tie_weights=True):
        with ProfiledStep(device) as profiled:
            loss = loss_of(model(*args, **kwargs))
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
        return profiled.result()


class _StepRecord:
    """What the events of one step amount to."""

    def __init__(self, raw_events: Iterable[Any], in_tf32: frozenset[str]) -> None:
        self.profiler_flop = 0.0
        ranges: list[Range] = []
        for raw in raw_events:
            range_ = range_of(raw)
            if formula := formulas.find(range_.name):
                range_.formula = formula
                record = input_shapes(raw), raw.dtypes(), raw.concrete_inputs()
                range_.flop, range_.dtype = recorded_flop(formula, *record)
            ranges.append(range_)
            self.profiler_flop += 0 if raw.is_async() else raw.flops()
        nested = nest(ranges)
        find_phases(nested, Cover((range_.start, range_.end) for range_ in nested if range_.name == _BUILDS_GRAPH))
        for range_ in _aborted(nested):
            range_.flop = Work(0, 0, 0)
        shares = _math_attention_shares(nested)
        self.ops: list[tuple[Range, Work]] = []
        for range_ in choose(nested):
            flop, formula = range_.flop, range_.formula
            assert flop is not None
            assert formula is not None
            node = next((outer for outer in range_.around() if outer.is_node), None)
            key = (node.forward_thread, node.sequence_nr) if node is not None and range_.phase == "backward" else None
            if key in shares:
                flop = flop._replace(exact=round(flop.full * shares[key]))
            range_.dtype = product_dtype(range_.dtype or "unknown", formula.family, in_tf32)
            if flop.hardware:
                self.ops.append((range_, flop))
        self.uncounted = Counter(range_.name for range_ in uncounted(nested, _looks_like_matrix_work))
        self.is_compiled = any(range_.name.startswith("CompiledFunction") for range_ in nested)

    def flop_count(self, convention: Convention) -> FlopCount:
        """Add up under a convention."""
        sums = FlopSums()
        for op, work in self.ops:
            sums.add(op.name, op.phase, op.dtype, work.full if convention == "full" else work.exact, work.hardware)
        return FlopCount(
            **sums.fields(),
            coverage=None,
            uncounted=dict(self.uncounted),
            method="profiler",
            convention=convention,
            left_out=tuple(self._left_out(convention)),
        )

    def _left_out(self, convention: Convention) -> Iterator[str]:
        if convention == "exact":
            yield UNSEEN_MASKS
        forward = [(op, work.full) for op, work in self.ops if op.phase in ("forward", "loading")]
        silent = sum(flop for op, flop in forward if all(r.sequence_nr < 0 for r in (op, *op.around())))
        if silent:
            yield f"{silent:.4g} FLOP ran forward with gradients off: evaluation inside the step would be among them."
        if self.is_compiled:
            yield COMPILED
        if names := unrecorded_operators():
            yield f"Calls of {', '.join(names)} through their own objects are not recorded by this torch's profiler."
        yield f"torch.profiler's own sum for this step is {self.profiler_flop:.4g} FLOP."


def _aborted(nested: Iterable[Range]) -> list[Range]:
    """The operators that checkpointing, having all it needed, left before their kernels ran.

    It leaves from the hook that saves a tensor. When that is a result, not an operand, the kernel has run by then.
    """
    left = {id(range_.outer): range_.outer for range_ in nested if range_.name == _ABORTED and range_.outer}
    for range_ in nested:
        if range_.name != _ABORTED and not range_.name.endswith("detach"):
            left.pop(id(range_.outer), None)
    return [range_ for range_ in left.values() if range_.formula is not None]


def _math_attention_shares(nested: Iterable[Range]) -> dict[tuple[int, int] | None, float]:
    """The share of pairs that counts in the products of attention's math kernel, for their gradients' sake.

    Keys are the thread and the sequence number by which an autograd node names the forward operator it belongs to.
    """
    shares: dict[tuple[int, int] | None, float] = {}
    for range_ in nested:
        if range_.name in _BATCHED_PRODUCTS:
            flop = next((outer.flop for outer in range_.around() if outer.name == _MATH_ATTENTION), None)
            if flop is not None and flop.full:
                shares[range_.thread, range_.sequence_nr] = flop.exact / flop.full
    return shares


@lru_cache(maxsize=4096)
def _looks_like_matrix_work(name: str) -> bool:
    """Whether a range without a formula probably has FLOPs; a range that is no operator has none."""
    return formulas.may_hide_flop(name) and (name.startswith("aten::") or bool(schemas_of(name)))


def _mark_aborted_recomputation() -> Callable[[], None]:
    """Checkpointing ends a recomputation by an exception; its making becomes a mark inside the operator it ends."""
    original: type[Exception] | None = getattr(checkpoint, STOP_RECOMPUTATION, None)
    if original is None:
        return lambda: None  # then a product that was left early counts as done

    class Marked(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            with record_function(_ABORTED):
                pass

    return replace_attribute(checkpoint, STOP_RECOMPUTATION, Marked)
