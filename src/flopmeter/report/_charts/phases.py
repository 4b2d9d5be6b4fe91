"""Where a step goes: mean milliseconds of each phase, stacked, over stretches of the run."""

from __future__ import annotations

from typing import Any

from flopmeter.report._charts._shapes import Figure, Table, table_of
from flopmeter.text import percent, seconds

SECTION, ORDER = "phases", 10
CAPTION = "The phases of a step"

_LOOKS = {
    "data_wait": ("@vermilion", "/"),
    "host_to_device": ("@yellow", "x"),
    "forward": ("@sky", ""),
    "backward": ("@blue", ""),
    "optimizer": ("@orange", ""),
}


def figure(facts: dict[str, Any]) -> Figure | None:
    """Stacked bars; None where no phase is known."""
    phases = facts["phases"]
    if phases is None:
        return None
    labels = [f"{first} to {last}" if first != last else str(first) for first, last in phases["step"]]
    data = []
    for phase, values in phases["seconds"].items():
        name, (colour, pattern) = _name(phase), _LOOKS.get(phase, ("@grey", ""))
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": [first for first, _ in phases["step"]],
                "y": [None if value is None else 1e3 * value for value in values],
                "customdata": labels,
                "marker": {"color": colour, "pattern": _pattern(pattern)},
                "hovertemplate": f"{name}: %{{y:.3g}} ms<br>steps %{{customdata}}<extra></extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.08,
        "height": 360,
        "xaxis": {"title": {"text": "Step"}},
        "yaxis": {"title": {"text": "Mean step, ms"}},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    }
    return {"data": data, "layout": layout}


def _pattern(shape: str) -> dict[str, Any]:
    """Strokes in the paper's colour over the bar's own."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "@paper", "fgopacity": 0.8, "solidity": 0.25, "size": 7}


def table(facts: dict[str, Any]) -> Table:
    """Of the steady steps."""
    phases = facts["phases"]
    known = phases["steady_s"] if phases else {}
    total_s = sum(value for value in known.values() if value is not None)
    rows = [
        (_name(name), seconds(value), percent(value / total_s if value is not None and total_s else None))
        for name, value in known.items()
    ]
    return table_of(("Phase", "Mean of a steady step#", "Share#"), rows)


def _name(phase: str) -> str:
    return phase.replace("_", " ").capitalize()


def describe(facts: dict[str, Any]) -> str:
    """What is drawn."""
    return "Mean step time by phase over the run."
