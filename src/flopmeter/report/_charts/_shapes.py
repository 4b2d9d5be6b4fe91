"""What do charts and their tables share? Bars, labels that run nothing, and the columns of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flopmeter.text import amount, percent

Figure = dict[str, Any]
Table = dict[str, Any]


def bar(label: str, start: float, length: float, text: str, colour: str, pattern: str) -> dict[str, Any]:
    return {"label": label, "start": start, "length": length, "text": text, "colour": colour, "pattern": pattern}


def horizontal(bars: list[dict[str, Any]], title: str) -> Figure:
    """One bar a row from top to bottom, each labelled at its end."""
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(bars))),
        "base": [100 * bar["start"] for bar in bars],
        "x": [100 * bar["length"] for bar in bars],
        "text": [bar["text"] for bar in bars],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {
            "color": [bar["colour"] for bar in bars],
            "pattern": {"shape": [bar["pattern"] for bar in bars], "solidity": 0.4},
        },
        "customdata": [bar["label"] for bar in bars],
        "hovertemplate": "%{customdata}: %{text}<extra></extra>",
    }
    layout = {
        "height": 90 + 34 * len(bars),
        # Room for the words behind the longest bar, in pixels: they are as long on a narrow page as on a wide one.
        "margin": {"r": 72},
        "xaxis": {"title": {"text": title}, "range": [0, 101], "ticksuffix": " %", "fixedrange": True},
        # Places and not names: two names may be cut to the same text.
        "yaxis": {
            "tickvals": list(range(len(bars))),
            "ticktext": [bar["label"] for bar in bars],
            "autorange": "reversed",
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
        },
        "bargap": 0.3,
        "showlegend": False,
    }
    return {"data": [trace], "layout": layout}


def table_of(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A title that ends in `#` heads a column of numbers."""
    columns = [{"title": title.rstrip("#"), "is_number": title.endswith("#")} for title in titles]
    return {"columns": columns, "rows": [list(row) for row in rows]}


def flop_table(title: str, rows: str, work: dict[str, Any] | None) -> Table:
    """What each of these rows of the work takes of the model FLOPs."""
    found, total = (work[rows], work["model_flop"]) if work else ((), 1.0)
    texts = ((row["name"], amount(row["flop"], "FLOP"), percent(row["flop"] / total)) for row in found)
    return table_of((title, "Model FLOPs of a step#", "Share#"), texts)


def plain_text(text: str, limit: int = 60) -> str:
    """Plotly reads a few HTML tags in labels: a name of the run must not be able to use them."""
    half = (limit - 1) // 2
    cut = text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"  # what differs is often the end
    return cut.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
