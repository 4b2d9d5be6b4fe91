"""What can a check find?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Standing = Literal["works", "falls back", "missing", "not checked", "broken"]
"""falls back: something else serves instead. missing: not here, and what it gives is left out. broken: a defect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one check found."""

    standing: Standing
    says: str
    """Why, in plain words: what serves instead, or what to do."""
    figures: Mapping[str, float | str] = field(default_factory=dict)
    """The numbers behind it; names carry their units."""
    name: str = ""
    """The check; filled in by `examine`."""
    elapsed_s: float = 0.0
    """How long it took; filled in by `examine`."""
