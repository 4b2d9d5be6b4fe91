"""Which ranks held the others up, since when? A table alone."""

from __future__ import annotations

from typing import Any

from flopmeter.report._charts._shapes import Table, table_of
from flopmeter.text import plain, seconds

SECTION, ORDER = "ranks", 20
CAPTION = "Stragglers"


def table(facts: dict[str, Any]) -> Table:
    """In the order in which they were named."""
    ranks = facts["ranks"]
    rows = (
        (plain(row["rank"]), row["host"], plain(row["since_step"]), seconds(row["extra_s"]), row["phase"], row["cause"])
        for row in (ranks["stragglers"] if ranks else ())
    )
    return table_of(("Rank#", "Host", "Since step#", "Extra a step#", "Phase", "Cause"), rows)
