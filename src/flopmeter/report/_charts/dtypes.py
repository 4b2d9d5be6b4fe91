"""In which dtypes are the model FLOPs done? A table alone."""

from __future__ import annotations

from typing import Any

from flopmeter.report._charts._shapes import Table, flop_table

SECTION, ORDER = "work", 30
CAPTION = "FLOPs by dtype"


def table(facts: dict[str, Any]) -> Table:
    """The largest first."""
    return flop_table("Dtype", "by_dtype", facts["work"])
