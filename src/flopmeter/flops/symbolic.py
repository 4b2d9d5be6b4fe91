"""What are a model's FLOPs as a formula of batch size B and length S?

    >>> formula(model).expression
    '12288*B*S*(S + 1477)'

The model is counted on shapes at a few small points and the polynomial through them is taken. That is exact, not a fit:
the FLOPs of an operator are a product of sizes, and sizes are linear in B and in S; tokens enter a product once,
query-key pairs once, so that no power above B^2 (contrastive losses) or S^2 (attention) occurs. A polynomial of degree
n is settled by n + 1 points, the counts are whole numbers, and the arithmetic is in fractions. Whatever is no such
polynomial (a sliding window, expert capacities, strided convolutions) misses the further points at which every formula
is checked, very short ones and one longer than the windows that the config names; there is then no formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import gcd, isclose
from typing import Any

from torch import nn

from flopmeter.errors import CountError
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.side_count import count_flops

Point = tuple[int, int]
"""Batch size and length."""

_SHORTEST = (16, 1024)
"""Where the points begin: at the second for models whose images alone take more than the first."""
_FAR, _FARTHEST = 1024, 16384
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window", "local_attention", "window_size")
_POSITIONS = ("max_position_embeddings", "max_target_positions", "n_positions")
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """A polynomial in batch size and length."""

    coefficients: Mapping[Point, Fraction]
    """FLOPs by the powers of B and S that they are multiplied with."""
    lengths: tuple[int, int]
    """The shortest and the longest at which it equals the count; beyond them a window may begin."""

    def evaluate(self, batch_size: int, length: int) -> float:
        """FLOPs of a batch; an int where the polynomial gives whole numbers, as it does for whole sizes."""
        total = sum(c * batch_size**b * length**s for (b, s), c in self.coefficients.items())
        return int(total) if total == int(total) else float(total)

    @property
    def expression(self) -> str:
        """The polynomial with what is common to all terms in front."""
        powers = [power for power, c in self.coefficients.items() if c]
        if not powers:
            return "0"
        low_b, low_s = min(b for b, _ in powers), min(s for _, s in powers)
        factor = _common_factor(self.coefficients.values())
        rest = {(b - low_b, s - low_s): self.coefficients[b, s] / factor for b, s in powers}
        by_length = sorted(rest, key=lambda power: (power[1], power[0]), reverse=True)
        inner = " + ".join(_term(rest[power], power) for power in by_length).replace("+ -", "- ")
        front = _term(factor, (low_b, low_s))
        return front if inner == "1" else f"{front}*({inner})" if front != "1" else inner


def formula(
    model: nn.Module, training: bool = True, convention: Convention = "exact", check_at: Iterable[Point] = ()
) -> Formula | None:
    """The model's FLOPs, forward and backward (or forward alone), in B and S; None where they are no polynomial.

    Args:
        check_at: Further points that the formula must meet: give the ones it will be used for.
    """

    @cache
    def count(point: Point) -> float:
        return _on_shapes(count_flops(model, point, training=training, convention=convention)).model_flop

    try:
        start = _start(count)
        short = (1, 3) if start == _SHORTEST[0] else (1, start + 5)
        checks = (short, (3, start + 21), (2, _far_length(model, start)), *check_at)
        return next((found for degree in (1, 2) if (found := _try(count, start, degree, checks))), None)
    except CountError:
        return None


def _on_shapes(count: FlopCount) -> FlopCount:
    if not count.method.startswith("meta"):
        raise CountError(f"a formula needs counts on shapes, not {count.method}")
    return count


def _start(count: Callable[[Point], float]) -> int:
    try:
        count((1, _SHORTEST[0]))
    except CountError:
        return _SHORTEST[1]
    return _SHORTEST[0]


def _far_length(model: nn.Module, start: int) -> int:
    """Beyond every window that the config names, and within the positions that the model has."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    windows = [size for name in _WINDOWS if isinstance(size := getattr(text, name, None), int)]
    limits = [size for name in _POSITIONS if isinstance(size := getattr(text, name, None), int)]
    wanted = min(max([_FAR + start, *(2 * window for window in windows)]), _FARTHEST)
    return min([wanted, *(limit // 2 + 1 for limit in limits)])


def _try(count: Callable[[Point], float], start: int, degree: int, checks: Sequence[Point]) -> Formula | None:
    batch_sizes, lengths = range(1, degree + 2), range(start, start + 48, 16)
    by_batch_size = [_interpolate(lengths, [round(count((b, s))) for s in lengths]) for b in batch_sizes]
    by_length = [_interpolate(batch_sizes, values) for values in zip(*by_batch_size, strict=True)]
    coefficients = {(b, s): value for s, values in enumerate(by_length) for b, value in enumerate(values)}
    counted = [*lengths, *(length for _, length in checks)]
    found = Formula(coefficients=coefficients, lengths=(min(counted), max(counted)))
    # Counts above 2^53 are rounded, since they are floats.
    fits = all(isclose(found.evaluate(*point), count(point), rel_tol=_ROUNDING) for point in checks)
    return found if fits else None


def _interpolate(xs: Sequence[int], ys: Sequence[int | Fraction]) -> list[Fraction]:
    """Coefficients, lowest power first, of the polynomial through the points (Lagrange)."""
    result = [Fraction(0)] * len(xs)
    for x, y in zip(xs, ys, strict=True):
        basis = [Fraction(y)]
        for other in xs:
            if other != x:  # times (X - other) / (x - other)
                shifted = [Fraction(0), *basis]
                basis = [
                    (up - other * low) / (x - other) for up, low in zip(shifted, [*basis, Fraction(0)], strict=True)
                ]
        result = [total + part for total, part in zip(result, basis, strict=True)]
    return result


def _common_factor(values: Iterable[Fraction]) -> Fraction:
    wanted = [value for value in values if value]
    denominator = 1
    for value in wanted:
        denominator = denominator * value.denominator // gcd(denominator, value.denominator)
    return Fraction(gcd(*(int(value * denominator) for value in wanted)), denominator)


def _term(factor: Fraction, power: Point) -> str:
    letters = [name if n == 1 else f"{name}^{n}" for name, n in zip("BS", power, strict=True) if n]
    return "*".join([str(factor)] * (factor != 1 or not letters) + letters)
