"""Which modules need the model FLOPs? A treemap."""

from __future__ import annotations

from typing import Any

from flopmeter.report._charts._shapes import Figure, Table, plain_text, table_of
from flopmeter.text import amount, percent

SECTION, ORDER = "work", 10
HEADING = "By module"
CAPTION = "FLOPs by module"
MAX_ROWS = 60


def figure(facts: dict[str, Any]) -> Figure | None:
    """Areas in areas; None where no step was counted by module."""
    work = facts["work"]
    if work is None or len(work["by_module"]) < 2:
        return None
    nodes = work["by_module"]
    trace = {
        "type": "treemap",
        "ids": [node["id"] for node in nodes],
        "parents": [node["parent"] for node in nodes],
        "labels": [plain_text(node["label"]) for node in nodes],
        "values": [node["flop"] for node in nodes],
        "text": [f"{amount(node['flop'], 'FLOP')}, {percent(node['flop'] / nodes[0]['flop'])}" for node in nodes],
        "branchvalues": "total",
        "maxdepth": 4,
        "textinfo": "label+text",
        "hovertext": [plain_text(node["id"], 120) for node in nodes],
        "hovertemplate": "%{hovertext}<br>%{text}<extra></extra>",
        "marker": {"colors": [_depth_colour(node["id"]) for node in nodes], "line": {"width": 1.5, "color": "@paper"}},
        "pathbar": {"visible": True},
        "tiling": {"pad": 2},
    }
    layout = {
        "height": 440,
        "margin": {"t": 30, "l": 4, "r": 4, "b": 4},
        "uniformtext": {"minsize": 10, "mode": "hide"},  # text too small to read would only look like dirt
    }
    return {"data": [trace], "layout": layout}


def _depth_colour(node_id: str) -> str:
    return ("@shade0", "@shade1", "@shade2", "@shade3")[min(node_id.count("/"), 3)]


def table(facts: dict[str, Any]) -> Table:
    """The modules in the order of the tree."""
    work = facts["work"]
    nodes = work["by_module"][:MAX_ROWS] if work else []
    rows = ((node["id"], amount(node["flop"], "FLOP"), percent(node["flop"] / nodes[0]["flop"])) for node in nodes)
    return table_of(("Module", "Model FLOPs of a step#", "Share#"), rows)


def describe(facts: dict[str, Any]) -> str:
    """What is drawn."""
    return "Model FLOPs by module, as areas."
