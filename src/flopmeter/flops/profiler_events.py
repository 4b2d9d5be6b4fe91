"""What does torch's profiler tell of one operator: its arguments, what surrounds it, and whether its kernel ran?

The profiler records a range for everything that passes the dispatcher, so the same work appears several times, one
range inside the other (`aten::linear` around `aten::addmm`, a sharded product around its local part). Here are the
ranges as a tree, and the rules that say which of them to count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from flopmeter.flops import formulas
from flopmeter.flops.formulas import RECORDED_DTYPES, Formula, Spec, Work
from flopmeter.torch_compat import input_shapes, schemas_of

ABORTED = "flopmeter: recomputation stops here"
"""A mark inside the operator that checkpointing left early."""

_MATH_ATTENTION = "aten::_scaled_dot_product_attention_math"
_BATCHED_PRODUCTS = ("aten::bmm", "aten::baddbmm")


class Event:
    """A recorded range, with the ranges inside it."""

    __slots__ = ("children", "end_ns", "name", "raw", "sequence_nr", "start_ns", "thread")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.name: str = raw.name()
        self.start_ns: int = raw.start_ns()
        self.end_ns: int = self.start_ns + raw.duration_ns()
        self.thread: int = raw.start_thread_id()
        self.sequence_nr: int = raw.sequence_nr()
        """Of the autograd node that the operator makes; negative when gradients are off."""
        self.children: list[Event] = []

    def inside(self) -> Iterator[Event]:
        """Every range within this one, outer before inner."""
        for child in self.children:
            yield child
            yield from child.inside()

    def arguments(self) -> list[Any]:
        """What the operator was called with, each tensor as its `Spec`; what the record has lost is None."""
        raw = self.raw
        parts = zip(input_shapes(raw), raw.dtypes(), raw.concrete_inputs(), strict=True)
        return [_argument(shape, dtype, value) for shape, dtype, value in parts]

    def work(self, formula: Formula) -> Work | None:
        """The FLOPs of the call, or None when its record does not tell."""
        try:
            return formula.of_record(self.arguments())
        except (ValueError, IndexError, TypeError):
            return None


def tree(events: Iterable[Event]) -> list[Event]:
    """Put each event into the one that surrounds it on its thread; the outermost are returned."""
    roots: list[Event] = []
    stack: list[Event] = []
    for event in sorted(events, key=lambda event: (event.thread, event.start_ns, -event.end_ns)):
        while stack and (stack[-1].thread != event.thread or stack[-1].end_ns <= event.start_ns):
            stack.pop()
        (stack[-1].children if stack else roots).append(event)
        stack.append(event)
    return roots


def is_told_better_inside(event: Event, formula: Formula) -> bool:
    """Whether the work appears again inside, closer to what ran."""
    inner = (formulas.find(inner.name) for inner in event.inside())
    return any(other is not None and formulas.is_closer(other, formula) for other in inner)


def was_aborted(event: Event) -> bool:
    """Whether checkpointing, having all it needed, left the operator before its kernel ran.

    It leaves from the hook that saves a tensor. When that is a result, not an operand, the kernel has run by then.
    """
    names = [child.name for child in event.children]
    return ABORTED in names and all(name == ABORTED or name.endswith("detach") for name in names)


def math_attention_shares(events: Iterable[Event]) -> dict[tuple[int, int], float]:
    """The share of pairs that counts in the products of attention's math kernel, for their gradients' sake.

    Keys are the thread and the sequence number by which an autograd node names the forward operator it belongs to.
    """
    shares: dict[tuple[int, int], float] = {}
    formula = formulas.find(_MATH_ATTENTION)
    for event in events:
        work = event.work(formula) if formula is not None and event.name == _MATH_ATTENTION else None
        if work is None or not work.full:
            continue
        for inner in event.inside():
            if inner.name in _BATCHED_PRODUCTS:
                shares[inner.thread, inner.sequence_nr] = work.exact / work.full
    return shares


@lru_cache(maxsize=4096)
def looks_like_matrix_work(name: str) -> bool:
    """Whether a range without a formula probably has FLOPs; a range that is no operator has none."""
    is_aten = name.startswith("aten::")
    return formulas.may_hide_flop(name) and (is_aten or bool(schemas_of(name)))


def _argument(shape: list[Any], dtype: str, value: Any) -> Any:
    if dtype == "TensorList":
        return [Spec(tuple(member)) for member in shape]
    if dtype in ("", "Scalar", "ScalarList"):
        return value
    return Spec(tuple(shape), RECORDED_DTYPES.get(dtype, dtype.removeprefix("c10::").lower()))
