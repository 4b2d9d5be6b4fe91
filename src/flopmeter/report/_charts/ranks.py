"""How much do the ranks' own work times differ? A heat map, stragglers circled."""

from __future__ import annotations

from typing import Any

from flopmeter.report._charts._shapes import Figure, Table, table_of
from flopmeter.text import amount, plain, seconds

SECTION, ORDER = "ranks", 10
CAPTION = "Spread over the ranks"


def figure(facts: dict[str, Any]) -> Figure | None:
    """Ranks down, steps across; None in a job of one."""
    ranks = facts["ranks"]
    if ranks is None or not ranks["own_s"]:
        return None
    rows = [[None if value is None else 1e3 * value for value in row] for row in zip(*ranks["own_s"], strict=True)]
    heat = {
        "type": "heatmap",
        "x": ranks["step"],
        "z": rows,
        "colorscale": "Cividis",
        "colorbar": {"title": {"text": "ms"}, "thickness": 12},
        "hovertemplate": "rank %{y}, up to step %{x}<br>own work %{z:.3g} ms<extra></extra>",
    }
    slow = [row for row in ranks["stragglers"] if row["rank"] is not None and row["since_step"] is not None]
    circles = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [row["since_step"] for row in slow],
        "y": [row["rank"] for row in slow],
        "text": [f"rank {row['rank']:.0f}" for row in slow],
        "textposition": "top right",
        "textfont": {"color": "white"},
        "marker": {"symbol": "circle-open", "size": 16, "color": "@vermilion", "line": {"width": 2.5}},
        "hovertemplate": "straggler: rank %{y} since step %{x}<extra></extra>",
    }
    layout = {
        "height": min(220 + 14 * ranks["num_rows"], 560),
        "xaxis": {"title": {"text": "Step"}},
        "yaxis": {"title": {"text": "Rank"}, "autorange": "reversed"},
        "showlegend": False,
    }
    return {"data": [heat, circles] if slow else [heat], "layout": layout}


def table(facts: dict[str, Any]) -> Table:
    """Least, mean and most of the last interval."""
    ranks = facts["ranks"]
    rows = []
    for row in ranks["stats"] if ranks else ():
        show = (lambda value: amount(value, "B")) if row["quantity"] == "memory_bytes" else seconds
        name = row["quantity"].removesuffix("_s").removesuffix("_bytes").replace("_", " ")
        rows.append((name, *(show(row[field]) for field in ("min", "mean", "max")), plain(row["argmax"])))
    return table_of(("Last interval", "Least#", "Mean#", "Most#", "At rank#"), rows)


def describe(facts: dict[str, Any]) -> str:
    """What is drawn."""
    return "Own work time of each rank over the run."
