"""Does the run meet the condition that CI sets?  `mfu < 0.95 * baseline`

A condition that is true of the measured value fails the run where it is true of all of the change's interval as well:
what the noise of the steps may have made fails nobody. Without an interval (few steps, a median) the value decides.

The grammar: names of figures, numbers, + - * /, one comparison. `baseline` is the same figure of the first run,
`baseline.mfu` a named one of it. The expression is parsed, never executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from flopmeter.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from flopmeter.compare import Comparison

MAX_LENGTH = 300

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne
}  # fmt: skip

Figures = Mapping[str, "float | None"]


class UnknownFigureError(ConfigError):
    """A figure that the condition needs is unknown in one of the runs, so that nobody can say whether it holds."""


class Verdict(Struct, frozen=True, kw_only=True):
    """What a condition says of a run."""

    condition: str
    """As the user wrote it."""
    run: str
    """The run's name in the comparison."""
    left: float
    """What stands before the comparison, as measured."""
    right: float
    """What stands behind it."""
    verdict: Literal["fails", "passes", "within noise"]
    """Within noise: true of the measured value, and not of all of its interval."""


class Condition(Struct, frozen=True, kw_only=True):
    """A comparison that a run either fulfils or not."""

    text: str
    """As the user wrote it."""
    left: ast.expr
    """What stands before the comparison."""
    right: ast.expr
    """What stands behind it."""
    holds: Callable[[float, float], bool]
    """The comparison."""
    figure: str
    """What a bare `baseline` means; empty when the expression names no figure, or several."""
    compared: tuple[str, ...] = ()
    """The run's figures that are compared with the baseline: those whose change has an interval."""

    def judge(self, comparison: Comparison, place: int) -> Verdict:
        """What it says of the run at this place.

        Raises:
            UnknownFigureError: A figure is unknown, or something is divided by zero.
        """
        run, baseline = comparison.figures(place), comparison.figures(0)
        left, right = self.sides(run, baseline)
        is_met = self.holds(left, right)
        ends: dict[str, tuple[float, float]] = {}
        for name in self.compared:
            row = comparison.row(name)
            change, before = row.changes[place], row.values[0]
            if is_met and before is not None and change is not None and None not in (change.low, change.high):
                low, high = float(change.low or 0.0), float(change.high or 0.0)
                is_part = row.quantity.is_part
                ends[name] = (before + low, before + high) if is_part else (before * (1 + low), before * (1 + high))
        corners = [dict(zip(ends, corner, strict=True)) for corner in product(*ends.values())]
        is_sure = all(self.holds(*self.sides({**run, **corner}, baseline)) for corner in corners)
        verdict: Literal["fails", "within noise"] = "fails" if is_sure else "within noise"
        name = comparison.names[place]
        return Verdict(condition=self.text, run=name, left=left, right=right, verdict=verdict if is_met else "passes")

    def sides(self, run: Figures, baseline: Figures) -> tuple[float, float]:
        """The two numbers that are compared.

        Raises:
            UnknownFigureError: A figure is unknown, or something is divided by zero.
        """
        return self._value(self.left, run, baseline), self._value(self.right, run, baseline)

    def _value(self, node: ast.expr, run: Figures, baseline: Figures) -> float:
        match node:
            case ast.Constant(value=number) if type(number) in (int, float):
                return float(str(number))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
                value = self._value(inner, run, baseline)
                return -value if isinstance(sign, ast.USub) else value
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
                values = self._value(left, run, baseline), self._value(right, run, baseline)
                if isinstance(sign, ast.Div) and values[1] == 0:
                    raise UnknownFigureError("something is divided by zero")
                return _ARITHMETIC[type(sign)](*values)
            case ast.Attribute(value=ast.Name(id="baseline"), attr=name):
                return _figure(baseline, name, "the baseline")
            case ast.Name(id="baseline"):
                return _figure(baseline, self.figure, "the baseline")
            case ast.Name(id=name):
                return _figure(run, name, "the run")
        raise ConfigError(f"{self.text!r}: only figures, numbers, + - * / and one comparison are understood")


def parse_condition(text: str, names: tuple[str, ...]) -> Condition:
    """Read a condition over the figures `names`.

    Raises:
        ConfigError: It is not of the grammar, or names a figure that does not exist.
    """
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"the condition is longer than {MAX_LENGTH} characters")
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ConfigError(f"{text!r} is not an expression such as 'mfu < 0.95 * baseline'") from None
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or type(node.ops[0]) not in _COMPARISONS:
        raise ConfigError(f"{text!r} needs one comparison, such as 'mfu < 0.95 * baseline'")
    inner = {id(each.value) for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and id(each) not in inner}
    figures = sorted(used - {"baseline"})
    condition = Condition(
        text=text.strip(),
        left=node.left,
        right=node.comparators[0],
        holds=_COMPARISONS[type(node.ops[0])],
        figure=figures[0] if len(figures) == 1 else "",
        compared=tuple(figures) if len(used) > len(figures) or inner else (),
    )
    anything = _AnyNumber(names)
    for side in (condition.left, condition.right):
        with suppress(UnknownFigureError):  # a division by zero, perhaps of these numbers only
            condition._value(side, anything, anything)
    if "baseline" in used and len(figures) != 1:
        raise ConfigError(f"{text!r}: which figure of the baseline is meant? Write baseline.mfu or the like")
    return condition


class _AnyNumber(dict[str, "float | None"]):
    """A run in which each figure that exists is some number."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def get(self, name: str, default: object = None) -> float:
        if name and name not in self.names:
            raise ConfigError(f"there is no figure {name!r}: {did_you_mean(name, self.names)}")
        return 1.5


def _figure(figures: Figures, name: str, whose: str) -> float:
    value = figures.get(name)
    if value is None:
        raise UnknownFigureError(f"{name} of {whose} is unknown")
    return value
