"""What a rule says when it has found something, and when it cannot look."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SAVED = 0.95
"""No fix is promised to save more of the wall time than this: a gain of twenty times is past believing anyway."""


class NotCheckedError(Exception):
    """A rule's inputs are missing; the text says which, and completes "not checked, because"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Predicted speed-up of the run, as a ratio minus one: 0.12 is 12 % more steps a second, and MFU times 1.12."""

    low: float
    """What to expect at least."""
    expected: float
    """The likeliest."""
    high: float
    """What to expect at most."""

    @classmethod
    def of_saving(cls, wall_s: float, low_s: float, expected_s: float, high_s: float) -> Gain:
        """From seconds saved of the wall time T: T / (T - saved) - 1."""
        shares = sorted(min(max(seconds / wall_s, 0.0), MAX_SAVED) for seconds in (low_s, expected_s, high_s))
        low, expected, high = (1 / (1 - share) - 1 for share in shares)
        return cls(low=low, expected=expected, high=high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One cause of lost time."""

    rule: str
    """The rule's name, as `flopmeter explain` takes it."""
    title: str
    """What is wrong, as half a sentence that the headline can end with."""
    lost: float
    """Share of the wall time that it costs, which is MFU points as a fraction. From 1 on, no figure can be trusted."""
    evidence: tuple[str, ...]
    """What was measured, one sentence each."""
    advice: tuple[str, ...]
    """What to change, the likeliest cure first."""
    gain: Gain | None
    """What the cure brings; None where the record does not tell."""
