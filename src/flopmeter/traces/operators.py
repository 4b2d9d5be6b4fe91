"""How many FLOPs did the recorded operators need, going by the shapes in the trace?

The profiler records a range for everything that passes the dispatcher, so the same product appears several times, one
range inside the other (`aten::linear` around `aten::addmm`). Of such a nest one range is counted: the innermost where
all of them are products, the outermost where an attention surrounds the products that it is made of.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec

from flopmeter.flops.formulas import RECORDED_DTYPES, Formula, Spec, find, is_closer
from flopmeter.flops.formulas import Work as Flop
from flopmeter.traces.events import Args

_MAX_RECORD_BYTES = 1 << 16
"""Arguments longer than this are lists of thousands of tensors; no operator with a formula has them."""


class Operator:
    """One recorded call of an operator that has a formula."""

    __slots__ = ("dtype", "end_us", "flop", "formula", "is_counted", "is_told", "start_us", "thread")

    def __init__(self, formula: Formula, thread: int, start_us: float, end_us: float, args: Args | None) -> None:
        self.formula = formula
        self.thread = thread
        self.start_us = start_us
        self.end_us = end_us
        self.flop, self.dtype = _recorded(formula, args)
        self.is_counted = False
        """Whether its FLOPs are to be added up; of a nest of operators one is."""
        self.is_told = False
        """Whether an operator within it was counted."""

    @property
    def is_lost(self) -> bool:
        """Whether its FLOPs are told nowhere."""
        return self.flop is None and not self.is_told and not self.formula.composite


def choose(operators: Iterable[Operator]) -> None:
    """Mark the operators to be counted, so that no work counts twice."""
    stack: list[Operator] = []
    for operator in sorted(operators, key=lambda op: (op.thread, op.start_us, -op.end_us)):
        while stack and (stack[-1].thread != operator.thread or stack[-1].end_us <= operator.start_us):
            stack.pop()
        around = next((outer for outer in reversed(stack) if outer.flop is not None), None)
        if around is not None and not (operator.flop is not None and is_closer(operator.formula, around.formula)):
            continue
        if operator.flop is not None:
            operator.is_counted = True
            for outer in stack:
                outer.is_told, outer.is_counted = True, False
        stack.append(operator)


def uncounted(operators: Iterable[Operator]) -> dict[str, int]:
    """Operators whose shapes do not tell their FLOPs, with their number of calls."""
    result: dict[str, int] = {}
    for operator in operators:
        if operator.is_lost:
            result[operator.formula.op] = result.get(operator.formula.op, 0) + 1
    return result


def _recorded(formula: Formula, args: Args | None) -> tuple[Flop | None, str]:
    if args is None:
        return None, ""
    shapes, dtypes, values = bytes(args.shapes), bytes(args.dtypes), bytes(args.values)
    if not shapes or len(shapes) + len(dtypes) + len(values) > _MAX_RECORD_BYTES:
        return None, ""
    return _evaluate(formula.op, shapes, dtypes, values)


@lru_cache(maxsize=16384)
def _evaluate(op: str, shapes: bytes, dtypes: bytes, values: bytes) -> tuple[Flop | None, str]:
    """FLOPs and dtype of a call; None when its record does not tell. A step repeats the same few calls."""
    formula = find(op)
    assert formula is not None
    try:
        arguments = _arguments(shapes, dtypes, values)
        dtype = next((argument.dtype for argument in arguments if isinstance(argument, Spec)), "")
        flop = formula.of_record(arguments)
        return (flop if _is_sound(flop) else None), dtype
    except (ValueError, IndexError, TypeError, AttributeError, ZeroDivisionError, msgspec.MsgspecError):
        return None, ""


def _is_sound(flop: Flop) -> bool:
    return all(isinstance(count, int) and 0 <= count < 10**30 for count in flop)


def _arguments(shapes: bytes, dtypes: bytes, values: bytes) -> list[Any]:
    """What the operator was called with, each tensor as its Spec; what the record has lost is None."""
    dims = msgspec.json.decode(shapes, type=list[Any])
    kinds = msgspec.json.decode(dtypes or b"[]", type=list[str])
    concrete = msgspec.json.decode(values or b"[]", type=list[Any])
    concrete += [""] * (len(dims) - len(concrete))
    return [_argument(*parts) for parts in zip(dims, kinds, concrete, strict=False)]


def _argument(shape: Any, dtype: str, value: Any) -> Any:
    if dtype == "TensorList":
        return [Spec(tuple(map(int, member))) for member in shape]
    if dtype in ("", "Scalar", "ScalarList", "GenericList"):
        return _literal(value) if isinstance(value, str) else value
    return Spec(tuple(map(int, shape)), RECORDED_DTYPES.get(dtype, dtype.removeprefix("c10::").lower()))


def _literal(text: str) -> Any:
    """A value as the profiler prints it: "[2, 2]", "True", "0."; None for what it leaves out."""
    try:
        return ast.literal_eval(text) if 0 < len(text) < 1000 else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
