"""Does the run meet the condition that CI sets?  `mfu < 0.95 * baseline`

The grammar: names of figures, numbers, + - * /, one comparison. `baseline` is the same figure of the first run,
`baseline.mfu` a named one of it. The expression is parsed, never executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flopmeter.errors import ConfigError, did_you_mean

MAX_LENGTH = 300

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}

Figures = Mapping[str, "float | None"]


class UnknownFigureError(ConfigError):
    """A figure that the condition needs is unknown in one of the runs, so that nobody can say whether it holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A comparison that a run either fulfils or not."""

    text: str
    """As the user wrote it."""
    left: ast.expr
    """What stands before the comparison."""
    right: ast.expr
    """What stands behind it."""
    holds: Callable[[float, float], bool]
    """The comparison."""
    figure: str | None
    """What a bare `baseline` means; None when the expression names no figure, or several."""

    def sides(self, run: Figures, baseline: Figures) -> tuple[float, float]:
        """The two numbers that are compared.

        Raises:
            UnknownFigureError: A figure is unknown, or something is divided by zero.
        """
        return self._value(self.left, run, baseline), self._value(self.right, run, baseline)

    def _value(self, node: ast.expr, run: Figures, baseline: Figures) -> float:
        if isinstance(node, ast.Constant):
            return float(str(node.value))
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, run, baseline)
            return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left, run, baseline), self._value(node.right, run, baseline)
            if isinstance(node.op, ast.Div) and right == 0:
                raise UnknownFigureError("something is divided by zero")
            return _ARITHMETIC[type(node.op)](left, right)
        if isinstance(node, ast.Attribute):
            return _known(baseline, node.attr, "the baseline")
        assert isinstance(node, ast.Name)
        if node.id == "baseline":
            return _known(baseline, str(self.figure), "the baseline")
        return _known(run, node.id, "the run")


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
    left, right = node.left, node.comparators[0]
    for side in (left, right):
        _check(side, text, names)
    names_used = _bare_names(left) | _bare_names(right)
    figures = sorted(names_used - {"baseline"})
    if "baseline" in names_used and len(figures) != 1:
        raise ConfigError(f"{text!r}: which figure of the baseline is meant? Write baseline.mfu or the like")
    return Condition(
        text=text.strip(),
        left=left,
        right=right,
        holds=_COMPARISONS[type(node.ops[0])],
        figure=figures[0] if len(figures) == 1 else None,
    )


def _check(node: ast.expr, text: str, names: tuple[str, ...]) -> None:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return
    if isinstance(node, ast.Name):
        _check_name(node.id, ("baseline", *names))
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "baseline":
        _check_name(node.attr, names)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        _check(node.operand, text, names)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        _check(node.left, text, names)
        _check(node.right, text, names)
    else:
        raise ConfigError(f"{text!r}: only figures, numbers, + - * / and one comparison are understood")


def _check_name(name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise ConfigError(f"there is no figure {name!r}: {did_you_mean(name, names)}")


def _bare_names(node: ast.AST) -> set[str]:
    """The names that stand alone, not as the beginning of `baseline.mfu`."""
    if isinstance(node, ast.Attribute):
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    return set().union(*map(_bare_names, ast.iter_child_nodes(node)))


def _known(figures: Figures, name: str, whose: str) -> float:
    value = figures.get(name)
    if value is None:
        raise UnknownFigureError(f"{name} of {whose} is unknown")
    return value
