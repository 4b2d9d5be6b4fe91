"""Did the gain that the first run's diagnosis promised come true?

Only findings that are gone can have brought their gain. When several are gone at once, their gains are multiplied: a
little too low where the causes have nothing to do with each other, too high where they overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from flopmeter.compare import Change
    from flopmeter.diagnosis import Finding

Verdict = Literal["came true", "less than predicted", "more than predicted", "within noise of it", "unknown"]


class Prediction(Struct, frozen=True, kw_only=True):
    """What was promised, and what was measured; all gains are ratios minus one (0.12 = 12 % faster)."""

    rules: tuple[str, ...]
    """Findings of the baseline that the run no longer has, of those that promised a gain."""
    low: float
    """Least gain that was promised."""
    expected: float
    """Likeliest gain."""
    high: float
    """Largest gain that was promised."""
    measured: float | None
    """How much faster the run is; None where it cannot be told."""
    by: str
    """The figure that tells how much faster it is; empty when the runs differ in more than the cure."""
    verdict: Verdict
    """The two against each other."""


def check_prediction(
    before: Sequence[Finding], after: Sequence[Finding], by: str, measured: Change | None
) -> Prediction | None:
    """Compare the promised gain of the findings that are gone with the measured one; None when none is gone.

    Args:
        after: Of the other run, those that another finding explains included.
    """
    still = {finding.rule for finding in after}
    gone = {finding.rule: finding.gain for finding in before if finding.gain is not None and finding.rule not in still}
    if not gone:
        return None
    low, expected, high = (
        prod(1 + getattr(gain, bound) for gain in gone.values()) - 1 for bound in ("low", "expected", "high")
    )
    return Prediction(
        rules=tuple(gone),
        low=low,
        expected=expected,
        high=high,
        measured=measured.value if measured else None,
        by=by,
        verdict=_judge(low, high, measured),
    )


def _judge(low: float, high: float, measured: Change | None) -> Verdict:
    if measured is None:
        return "unknown"
    if low <= measured.value <= high:
        return "came true"
    if measured.low is not None and measured.high is not None and measured.low <= high and measured.high >= low:
        return "within noise of it"
    return "less than predicted" if measured.value < low else "more than predicted"
