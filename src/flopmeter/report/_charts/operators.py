"""Which operators do the model FLOPs? The largest first."""

from __future__ import annotations

from typing import Any

from flopmeter.report._charts._shapes import Figure, Table, bar, flop_table, horizontal, plain_text
from flopmeter.text import percent

SECTION, ORDER = "work", 20
HEADING = "By operator and dtype"
CAPTION = "FLOPs by operator"


def figure(facts: dict[str, Any]) -> Figure | None:
    """A bar for each; None where no step was counted."""
    work = facts["work"]
    if work is None or not work["by_op"]:
        return None
    shares = [(row["name"].removeprefix("aten::"), row["flop"] / work["model_flop"]) for row in work["by_op"]]
    bars = [bar(plain_text(name, 26), 0.0, share, percent(share), "@blue", "") for name, share in shares]
    return horizontal(bars, "Share of the model FLOPs")


def table(facts: dict[str, Any]) -> Table:
    """The same in figures."""
    return flop_table("Operator", "by_op", facts["work"])


def describe(facts: dict[str, Any]) -> str:
    """What is drawn."""
    return "Model FLOPs by operator."
