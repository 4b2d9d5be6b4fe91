"""Where a step goes: mean milliseconds of each phase, on top of each other, over stretches of the run."""

from __future__ import annotations

from itertools import pairwise
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
    """Bars on top of each other; None where no phase is known.

    Each begins where the one below ends, not where plotly would stack it: steps that a restart repeats do not add up.
    """
    phases = facts["phases"]
    if phases is None:
        return None
    steps = phases["step"]
    apart = min((after - last for (_, last), (after, _) in pairwise(steps) if after > last), default=1)
    base = [0.0] * len(steps)
    labels = [f"{first} to {last}" if first != last else str(first) for first, last in steps]
    data = []
    for phase, values in phases["seconds"].items():
        name, (colour, pattern) = _name(phase), _LOOKS.get(phase, ("@grey", ""))
        height = [None if value is None else 1e3 * value for value in values]
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": [(first + last) / 2 for first, last in steps],
                "width": [0.92 * (abs(last - first) + apart) for first, last in steps],
                "y": height,
                "base": base,
                "customdata": [[label, value] for label, value in zip(labels, height, strict=True)],
                "marker": {"color": colour, "pattern": _pattern(pattern)},
                "hovertemplate": f"{name}: %{{customdata[1]:.3g}} ms<br>steps %{{customdata[0]}}<extra></extra>",
            }
        )
        base = [below + (part or 0.0) for below, part in zip(base, height, strict=True)]
    layout = {
        "barmode": "overlay",
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
