"""What did every operator of a stretch of code do? Watches one training step, and changes nothing in it."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import get_ident, local
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopmeter.devices import NO_FLOP, devices_of, product_dtype, tf32_families
from flopmeter.flops import formulas
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.formulas import Formula, Spec, Work
from flopmeter.flops.frames import NO_FRAME, Frame, FrameTracker, counts_aside, has_sizes
from flopmeter.flops.long_masks import Known
from flopmeter.flops.pairs import SCORE_PRODUCTS, TRACKED, Pairs, PairTracker, explicit_mask, flex_pairs, unmasked_share
from flopmeter.flops.tally import Call, WorkPhase, tally
from flopmeter.flops.token_rows import Text, TokenRows
from flopmeter.hook_hiding import replace_attribute, surround_backward, surround_recomputation
from flopmeter.step_facts import StepFacts
from flopmeter.torch_compat import (
    OBSERVES_COMPILED,
    REENTRANT_CHECKPOINT,
    DisableTorchFunction,
    FakeTensor,
    OwnMode,
    autograd_node,
    before_compiled_calls,
    dispatch_mode,
    dispatch_modes,
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

_OPAQUE = frozenset({"DTensor", "NestedTensor"})
"""Tensors that hold others: the operators on those arrive next, with the shapes that this rank computes."""
_WRAPPERS = {"higher_order::run_and_save_rng_state": 0, "higher_order::run_with_rng_state": 1}
"""Operators that call another one, and where among their arguments it stands."""
_BLANK = frozenset(
    f"aten::{own}" for own in ("lift_fresh", "empty_strided", "empty", "empty_like", "new_empty", "zeros", "zeros_like",
                               "new_zeros", "zero_", "full", "full_like", "new_full", "fill_")
)  # fmt: skip
"""Operators whose result is for others to fill, or was made outside of torch."""
_BY_HEADS = "aten::_scaled_dot_product"
"""Fused operators whose last dimensions but one are the queries and keys of one sample's head."""
_IN_FUNCTIONS = {(name, torch.autograd.function.__file__) for name in ("apply", "apply_boxed")}
"""Where torch calls an autograd.Function, forward as a method of the class and backward as one of its node."""
GRADIENTS_PER_PRODUCT = 2
COMPILED = "CompiledFunctionBackward"
"""The compiler's own function, which holds a whole model: what it makes again is told by the uncompiled twin."""
INTEGERS = "Products of integers are no floating-point operations: {}."
BESIDE_COMPILER = f"torch {torch.__version__} lets no step be observed that runs compiled code"
BESIDE_GRAPHS = f"torch {torch.__version__} lets no step be observed beside the CUDA graphs of torch.compile"

NO_GRAD = "no_grad"
"""The role of a pass without gradients that nobody has named."""
roles: list[tuple[str, bool]] = []
"""Roles that are open now, each with whether its passes count as model work."""


def role(name: str, *, counts: bool = False) -> AbstractContextManager[None]:
    """What runs inside without gradients (a teacher, a reference, a rollout) is kept apart under this name.

    Args:
        counts: Takes it into model work.
    """
    return _pushed(roles, (name, counts))


@contextmanager
def _pushed(stack: list[Any], item: Any) -> Iterator[None]:
    """The item is on the stack while what is inside runs."""
    stack.append(item)
    try:
        yield
    finally:
        stack.pop()


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
        self._integer_ops: set[str] = set()
        self.uncounted_flop = 0
        """What these take at the least in the forward pass, if each row meets each entry of the other operands once."""
        self.roots = roots
        device = devices_of(nn.ModuleList(roots))[0]
        self.device_type = device.type
        self._tf32_families = tf32_families(device)
        self.facts = StepFacts(self.device_type) if is_training_step else None
        self._rows = TokenRows()
        self._frames = FrameTracker(roots, self._rows, is_aside=not is_training_step)
        self.batches = self._frames.batches
        """What the roots were called with, one per call."""
        self._pairs = PairTracker(self._rows)
        self._functions: set[int] = set()
        """Autograd nodes of the program's own functions that ran backward."""
        self._written: Known[list[bool]] = Known()
        """Of what operators have made, whether something was written into it; a tensor and its views share the list."""
        self._reruns: list[int] = []
        """Backward passes in which a checkpoint runs a part again now."""
        self._products_once: Counter[tuple[int, float]] = Counter()
        """Products without gradients, by the number of the node that was made before them and their FLOPs."""
        self._products_again: dict[tuple[int, float], list[int]] = defaultdict(list)
        """Positions of those in a custom function's backward pass; it has the forward pass's sequence number."""
        self._mode = _Mode(self._take, not is_training_step, limit)
        self._builds_graph: list[bool] = []
        self._is_in_optimizer = False
        self.gave_way: str | None = None
        """Why nothing was observed from some point of the step on: beside compiled code this torch would take harm."""
        self._is_aside = not is_training_step
        self._thread = get_ident()
        self._undo: list[Callable[[], None]] = []

    @property
    def has_compiled(self) -> bool:
        """Whether any part of the roots runs compiled code."""
        return self._frames.has_compiled

    def start(self) -> None:
        """Begin to watch."""
        self._thread = get_ident()
        self._frames.install()
        self._undo = [self._frames.remove, *watch_optimizers(self._set_in_optimizer)]
        self._undo.append(surround_backward(partial(_pushed, self._builds_graph)))
        self._undo.append(surround_recomputation(lambda: _pushed(self._reruns, graph_task_id())))
        if self._is_aside:
            counts_aside.append(self)
            self._undo.append(partial(counts_aside.remove, self))
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
            _left_here().append(self._mode)
            logger.warning("the observed step ended inside another dispatch mode; it is counted as far as it was seen")
        for undo in self._undo:
            undo()
        self._undo = []
        self._mode.let_go()

    def result(self, convention: Convention = "exact") -> FlopCount:
        """The FLOPs of what was seen. Reads the mask sums from the device."""
        again = {
            position
            for key, positions in self._products_again.items()
            if (num_once := self._products_once[key])
            for position in positions[: max(0, len(positions) - GRADIENTS_PER_PRODUCT * num_once)]
        }
        calls = [call._replace(phase="recompute") if i in again else call for i, call in enumerate(self.calls)]
        calls = [call._replace(phase="forward") if call.function in self._functions else call for call in calls]
        count = tally(calls, self._frames, self.uncounted, convention, self.uncounted_flop)
        by_library = sorted({call.op for call in calls if (f := formulas.find(call.op)) and f.family == "library"})
        left_out = [INTEGERS.format(", ".join(sorted(self._integer_ops)))] if self._integer_ops else []
        method = ", ".join([count.method, *(f"{op} by its library's formula" for op in by_library)])
        return replace(count, method=method, left_out=(*count.left_out, *left_out))

    def _set_in_optimizer(self, is_in: bool) -> None:
        if get_ident() == self._thread:
            self._is_in_optimizer = is_in

    def _take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operator has run. Whatever it is, the training code that called it goes on."""
        schema = getattr(func, "_schema", None)
        is_named = schema is None and callable(getattr(func, "name", None))
        op = str(schema.name) if schema is not None else f"higher_order::{func.name() if is_named else func}"
        try:
            if op in _WRAPPERS:  # a compiled, checkpointed random operator comes wrapped with its random state
                position = _WRAPPERS[op]
                self._take(args[position], args[position + 1 :], kwargs, out[1] if position == 0 else out)
            else:
                self._count(op, func, args, kwargs, out)
        except Exception as error:  # noqa: BLE001 - a tensor of an unusual kind; the operator is listed, with the reason
            if op not in self.uncounted:
                logger.warning("%s could not be counted: %s: %s", op, type(error).__name__, error)
            self._note_uncounted(op, args)

    def _count(self, op: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self.facts is not None:
            self.facts.see(op, args, out, self._is_in_optimizer)
        formula = formulas.find(op)
        task = graph_task_id()
        node = autograd_node() if task != -1 else None
        if isinstance(node, BackwardCFunction):
            self._functions.add(node._sequence_nr())
        is_nested = any(isinstance(value, torch.Tensor) and value.is_nested for value in (*args, out))
        # In a gradient's own work the dimensions of many tensors meet: there a product has the text of its forward one.
        goes_forward = task == -1 or torch.is_grad_enabled() or self._frames.runs_again or task in self._reruns[-1:]
        if not (self._is_aside or is_nested):
            self._note_functions(op, args, out)
        if formula is None:
            if goes_forward and not is_nested:
                self._rows.follow(op, args, out)
            if op in TRACKED and not is_nested:
                self._pairs.follow(op, args, out)
            elif formulas.may_hide_flop(op):
                self._note_uncounted(op, args)
            return
        if not self._is_aside and any(isinstance(value, torch.Tensor) and value.is_meta for value in args):
            return  # a model on the meta device works on nothing
        dtype = product_dtype(_dtype_of(args), formula.family, self._tf32_families)
        if dtype in NO_FLOP:
            self._integer_ops.add(op)
            return
        is_outside = not self._frames.runs_again
        frame = self._frames.of_node(node._sequence_nr()) if node is not None and is_outside else self._frames.current()
        bound = bind(formula, func, args)
        phase, is_asked = self._phase(frame, node, args)
        node = node if phase == "backward" else None
        work = _work(formula, bound, _with_wanted(formula, kwargs, node))
        text = self._text_of(node, args)
        if goes_forward and not is_nested:
            self._rows.follow(op, args, out)
        self._note_repeats(phase, work, node)
        pairs = self._pairs_of(op, formula, {**bound, **kwargs}, out, node)
        is_loose = phase == "side" and not torch.is_grad_enabled()
        self.calls.append(
            Call(
                phase=phase,
                frame=frame,
                op=op,
                dtype=dtype,
                is_attention=formula.family == "attention",
                work=work,
                pairs=pairs,
                text=text,
                num_rows=_num_rows(args, out),
                sizes=_attention_sizes(op, bound) if formula.family == "attention" else (0, 0, 0),
                role=roles[-1][0] if roles else NO_GRAD,
                is_asked=is_asked,
                function=_function_node() if is_loose else -1,
            )
        )

    def _note_functions(self, op: str, args: tuple[Any, ...], out: Any) -> None:
        """What the program's own function gives was written by no operator: kernels that nobody sees have done that."""
        known, given = self._written, [value for value in args if isinstance(value, torch.Tensor)]
        for value in given if torch.is_grad_enabled() else ():
            node: Any = value.grad_fn
            name = type(node).__name__
            if isinstance(node, BackwardCFunction) and name != COMPILED and known.get(value) in (None, [False]):
                known.put(value, [True])
                label = f"autograd.Function {name.removesuffix('Backward')}"
                self.uncounted[label] = self.uncounted.get(label, 0) + 1
        if torch.is_grad_enabled():
            return  # a function's own forward pass runs without gradients
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(value, torch.Tensor):
                continue
            memory = _memory(value)
            base = next((own for own in given if own is value or (memory and _memory(own) == memory)), None)
            is_written = (known.get(base) if base is not None else None) or [op not in _BLANK]
            is_written[0] |= op not in _BLANK and (value is base or op.endswith("_") or op.startswith("c10d"))
            known.put(value, is_written)

    def _text_of(self, node: Any, args: tuple[Any, ...]) -> Text | None:
        """The text that the rows of a product are proven to be; of a gradient, that of the product it belongs to."""
        text, known = self._rows.of_product(args), self._rows.by_sequence
        if node is not None:
            return known.get(node._sequence_nr()) or text
        if text is not None:
            known.setdefault(sequence_nr() - 1, text)
        return text

    def _phase(self, frame: Frame, node: Any, args: tuple[Any, ...]) -> tuple[WorkPhase, bool]:
        """What this is a part of, and whether torch's checkpointing asked for it."""
        task = graph_task_id()
        if task != -1:
            is_asked = task in self._reruns[-1:] or type(node).__name__ == REENTRANT_CHECKPOINT
            if self._frames.runs_again or is_asked or (isinstance(node, BackwardCFunction) and _goes_forward_again()):
                return "recompute", is_asked
            builds_graph = bool(self._builds_graph) and self._builds_graph[-1]
            return ("recompute" if torch.is_grad_enabled() and not builds_graph else "backward"), False
        has_gradients = torch.is_grad_enabled()
        if self._is_in_optimizer and not (has_gradients and (frame is not NO_FRAME or _requires_grad(args))):
            return "optimizer", True  # with gradients it is the closure of the step
        is_training = not self.roots or (has_gradients and _requires_grad(args))
        if frame is not NO_FRAME:
            is_training = not frame.batch.is_evaluation
        if is_training or self._is_aside or (roles and roles[-1][1]):
            return "forward", True
        return "side", True

    def _note_repeats(self, phase: WorkPhase, work: Work | Callable[[], Work], node: Any) -> None:
        """For products that a custom autograd function computes a second time in its backward pass.

        Chunked losses (TRL, Liger) and fused layers throw their products away and make them again, with gradients
        switched off: to the dispatcher that looks like gradient work. But a product of the forward pass has at most two
        gradients, each of which takes as many FLOPs as the product itself. What is beyond that is recomputation. Not
        seen: a repeat that takes the place of a gradient which nobody wants (a frozen weight), and one that is cut into
        chunks of another size than the forward pass was.
        """
        if not isinstance(work, Work) or torch.is_grad_enabled():
            return
        if phase in ("forward", "side", "recompute"):  # a reentrant checkpoint's second run makes the function's node
            self._products_once[sequence_nr() - 1, work.full] += 1
        elif isinstance(node, BackwardCFunction) and type(node).__name__ != COMPILED:  # in a backward pass
            self._products_again[node._sequence_nr(), work.full].append(len(self.calls))

    def _pairs_of(self, op: str, formula: Formula, bound: Mapping[str, Any], out: Any, node: Any) -> Pairs | None:
        if op.startswith("higher_order::flex"):
            return flex_pairs(bound)
        known = self._pairs.by_sequence.get(node._sequence_nr()) if node is not None else None
        if formula.family == "attention":
            pairs = self._fused_pairs(op, bound, known, node)
        elif op not in SCORE_PRODUCTS or known is not None:
            return known if op in SCORE_PRODUCTS else None
        else:
            pairs = self._pairs.product(op, bound, out)
        if pairs is not None and torch.is_grad_enabled():
            self._pairs.by_sequence.setdefault(sequence_nr() - 1, pairs)
        return pairs

    def _fused_pairs(self, op: str, bound: Mapping[str, Any], known: Pairs | None, node: Any) -> Pairs | None:
        query, key, value = (bound.get(name) for name in ("query", "key", "value"))
        if not (has_sizes(query) and has_sizes(key) and has_sizes(value)):
            return None
        queries, keys = (self._rows.of_product((own,)) for own in (query, key))
        if known is not None:
            queries, keys = known.queries, known.keys
        needed = _needed_gradients(node, query.shape[-1], value.shape[-1])
        pairs = Pairs(is_attention=True, needed=needed, queries=queries, keys=keys)
        mask, shape = explicit_mask(bound), (query.shape[-2], key.shape[-2])
        is_real = queries.is_real if queries is not None else None
        if mask is not None:
            pairs.share = self._pairs.share([mask], torch.Size(shape), queries)
        elif is_real is not None and is_real.shape[1] == shape[0] and op.startswith(_BY_HEADS):
            pairs.share = unmasked_share(is_real, *shape, is_causal=bool(bound.get("is_causal")))
        else:
            pairs.is_attention = False  # the formula's own pairs count
        return pairs

    def _note_uncounted(self, op: str, args: tuple[Any, ...]) -> None:
        self.uncounted[op] = self.uncounted.get(op, 0) + 1
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if formulas.is_matrix_work(op) and graph_task_id() == -1 and tensors:
            rows = tensors[0].numel() // max(tensors[0].size(-1), 1)
            self.uncounted_flop += 2 * rows * sum(value.numel() for value in tensors[1:] if value.dim() > 1)


_LEFT = local()
"""Of each thread: quiet modes of ours that the program had entered one of its own above when their step was over."""


def _left_here() -> list[_Mode]:
    _LEFT.modes = modes = getattr(_LEFT, "modes", [])
    return modes


def take_off_left() -> bool:
    """Take them off this thread's stack where nothing is above them any more; gives whether none is left."""
    modes = _left_here()
    if modes and dispatch_mode() is modes[-1]:
        modes.pop().leave()
    modes[:] = [mode for mode in modes if mode in dispatch_modes()]
    return not modes


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


def _function_node() -> int:
    """The autograd node of the outermost function in Python whose forward pass runs (a checkpoint, say), or -1."""
    frame: FrameType | None = sys._getframe(1)
    below: FrameType | None = None
    found = -1
    while frame is not None:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename == torch.autograd.function.__file__ and below is not None:
            first = next(iter(below.f_locals.values()), None)
            found = first._sequence_nr() if isinstance(first, BackwardCFunction) else sequence_nr() - 1
        frame, below = frame.f_back, frame
    return found


def _goes_forward_again() -> bool:
    """Whether a function in Python runs its forward pass inside of another one's backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        place = frame.f_code.co_name, frame.f_code.co_filename
        if place in _IN_FUNCTIONS:
            return frame.f_code.co_varnames[0] == "cls"  # a backward pass is a method of its node
        frame = frame.f_back if place != ("_engine_run_backward", torch.autograd.graph.__file__) else None
    return False


def _memory(value: Any) -> int:
    """Where a tensor's values are; 0 for what is none, or of an unusual kind."""
    if not has_sizes(value) or value.layout is not torch.strided or value.is_meta:
        return 0
    try:
        return value.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _requires_grad(args: Iterable[Any]) -> bool:
    """Whether the result takes part in gradients, where these are on."""
    return any(
        value.requires_grad if isinstance(value, torch.Tensor) else type(value) is list and _requires_grad(value)
        for value in args
    )


def _num_rows(args: tuple[Any, ...], out: Any) -> int:
    """Entries of the result without its last dimension."""
    out = out[0] if isinstance(out, (tuple, list)) and out else out
    return out.numel() // max(out.shape[-1], 1) if has_sizes(out) and out.dim() else 0


def _attention_sizes(op: str, bound: Mapping[str, Any]) -> tuple[int, int, int]:
    query, key = bound.get("query"), bound.get("key")
    if not (has_sizes(query) and has_sizes(key)):
        return 0, 0, 0
    if query.dim() < 4 or any("seq" in name and isinstance(value, torch.Tensor) for name, value in bound.items()):
        return 0, query.shape[0], key.shape[0]
    place = 2 if op.startswith((_BY_HEADS, "aten::_cudnn", "higher_order::flex")) else 1
    return query.shape[0], query.shape[place], key.shape[place]


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
    nested = {n: value.unbind() for n, value in bound.items() if isinstance(value, torch.Tensor) and value.is_nested}
    if nested:  # each sequence by itself
        works = [
            formula(*map(_spec, {**bound, **dict(zip(nested, parts, strict=True))}.values()))
            for parts in zip(*nested.values(), strict=True)
        ]
        return Work(*map(sum, zip(*works, strict=True)))
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


def _dtype_of(args: Iterable[Any]) -> str:
    """Of the first tensor of numbers; indices may stand before it."""
    found = "unknown"
    for value in args:
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, torch.Tensor):
            found = str(first.dtype).removeprefix("torch.")
            if found not in NO_FLOP:
                break
    return found


def watch_optimizers(set_inside: Callable[[bool], None]) -> list[Callable[[], None]]:
    """Tell when an optimizer of torch's begins and ends its step; gives what ends that."""

    before = register_optimizer_step_pre_hook(outside_compiler(lambda *_: set_inside(True)))
    after = register_optimizer_step_post_hook(outside_compiler(lambda *_: set_inside(False)))
    return [before.remove, after.remove]
