"""How is a number or a name of the run written, when it may be missing, absurd or hostile?"""

from __future__ import annotations

import math
from typing import Any

MAX_TEXT = 200
"""Characters of a name or sentence that are shown; no honest one is longer."""

UNKNOWN = "unknown"
MAX_DECIMALS = 4
"""Of a percentage: a smaller one is shown as 0.0."""

_SCALES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: Any) -> float | None:
    """The value if it is a finite number, else None: NaN and the infinities are never shown as figures."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value) if math.isfinite(value) else None
        except OverflowError:
            return None
    return None


def rounded(value: float | None) -> float | None:
    """Six significant digits: more than a chart can show, at half the bytes."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def clean(value: Any, limit: int = MAX_TEXT) -> str:
    """Text on one line without control characters, cut to a sane length."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def sentence(text: str) -> str:
    """A remark as a sentence: a capital first, unless it begins with code, and a full stop last."""
    is_code = any(sign in text.partition(" ")[0] for sign in "._(")
    return text and (text[0] if is_code else text[0].upper()) + text[1:] + ("" if text[-1] in ".!?…" else ".")


def plural(number: int, noun: str) -> str:
    """How many there are of it."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(share: float | None, digits: int = 1) -> str:
    """A share of 0 to 1 as a percentage."""
    return UNKNOWN if share is None else f"{_plain_zero(100 * share, digits):,.{digits}f} %"


def utilisation(share: float | None) -> str:
    """MFU and its kin: as a percentage, with two significant digits where one decimal would leave none or one."""
    size = 0.0 if share is None else abs(100 * share)
    if not 10.0**-MAX_DECIMALS <= size < 0.995:
        return percent(share)
    return percent(share, 1 - math.floor(math.log10(size)))


def signed(share: float | None, digits: int = 0) -> str:
    """A relative change as a percentage with its sign."""
    return UNKNOWN if share is None else f"{_plain_zero(100 * share, digits):+.{digits}f} %"


def points(share: float | None) -> str:
    """A difference of two shares, with its sign."""
    if share is None:
        return UNKNOWN
    return "0.0 pts" if round(100 * share, 1) == 0 else f"{100 * share:+.1f} pts".replace("-", "−")


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it."""
    if value is None:
        return UNKNOWN
    size = abs(value)
    if size < 1e-3:
        return "0 s" if size < 1e-9 else f"{value * 1e6:.3g} µs"
    if size < 1:
        return f"{value * 1e3:.3g} ms"
    if size < 120:
        return f"{value:.3g} s"
    minutes = round(size / 60)
    sign = "-" if value < 0 else ""
    return f"{sign}{minutes} min" if minutes < 120 else f"{sign}{minutes // 60:,} h {minutes % 60} min"


def amount(value: float | None, unit: str, digits: int = 3, largest: str = "E") -> str:
    """A count or a rate with a metric prefix, up to the `largest` one."""
    if value is None:
        return UNKNOWN
    start = next(place for place, (_, prefix) in enumerate(_SCALES) if prefix == largest)
    for scale, prefix in _SCALES[start:]:
        if abs(value) >= scale:
            return f"{_significant(value / scale, digits)} {prefix}{unit}"
    return f"{_significant(value, digits)} {unit}"


def rate(flop_per_s: float | None, digits: int = 4) -> str:
    """FLOP/s as data sheets state them: in TFLOP/s, however many, and less only below one."""
    return amount(flop_per_s, "FLOP/s", digits, largest="T")


def plain(value: float | None) -> str:
    """A number as people write it: thousands marked, small ones with four digits."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _significant(value: float, digits: int) -> str:
    """So many digits, and never a power of ten."""
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def _plain_zero(value: float, digits: int) -> float:
    """Without the sign of a zero that rounding made."""
    return 0.0 if round(value, digits) == 0 else value
