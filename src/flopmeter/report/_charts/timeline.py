"""MFU above, step time below, on one axis of steps, with what happened marked."""

from __future__ import annotations

from typing import Any

from flopmeter.report._charts._shapes import Figure, Table, plain_text, table_of
from flopmeter.report._thin import evenly
from flopmeter.text import plain, seconds, utilisation

SECTION, ORDER = "timeline", 10
CAPTION = "MFU and step time"
NUM_STRETCHES = 12
"""Rows of the table."""


def figure(facts: dict[str, Any]) -> Figure | None:
    """Two charts on one axis of steps; None where neither is known."""
    series = facts["series"]
    data = [
        *_line(series["mfu"], "MFU", 100, "y", "@green"),
        *_line(series["step_s"], "Step time", 1e3, "y2", "@blue"),
    ]
    if not data:
        return None
    marks = series["marks"]
    layout = {
        "height": 460,
        "xaxis": {"title": {"text": "Step"}, "anchor": "y2", "rangeslider": {"visible": False}},
        "yaxis": {"title": {"text": "MFU, %"}, "domain": [0.56, 1.0], "rangemode": "tozero"},
        "yaxis2": {"title": {"text": "Step time, ms"}, "domain": [0.0, 0.44], **_scale_of(series["step_s"])},
        "shapes": [_band(first, last) for first, last in marks["warmup"]],
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "dragmode": "zoom",
        "hovermode": "x",
    }
    return {"data": [*data, *_symbols(marks)], "layout": layout}


def _line(line: dict[str, Any] | None, name: str, scale: float, axis: str, colour: str) -> list[dict[str, Any]]:
    """All points thin, the medians strong where there are enough steps to need them."""
    if line is None:
        return []
    shared = {"type": "scatter", "mode": "lines", "yaxis": axis, "xaxis": "x", "connectgaps": False}
    raw = {
        **shared,
        "name": f"{name}, every step" if line["num_values"] == len(line["value"]) else f"{name}, extremes kept",
        "x": line["step"],
        "y": [None if value is None else scale * value for value in line["value"]],
        "line": {"width": 1, "color": colour},
        "opacity": 0.45,
    }
    if len(line["typical"]) < 3:
        return [{**raw, "mode": "lines+markers", "opacity": 1}]
    typical = [None if value is None else scale * value for value in line["typical"]]
    strong = {
        "name": f"{name}, median",
        "x": line["typical_step"],
        "y": typical,
        "line": {"width": 2.5, "color": colour},
    }
    return [raw, {**shared, **strong}] if line["num_values"] > 2 * len(typical) else [{**raw, "opacity": 1}]


def _scale_of(line: dict[str, Any] | None) -> dict[str, Any]:
    """A logarithmic axis where a few slow steps would flatten all others."""
    values = sorted(value for value in line["value"] if value) if line else []
    is_wide = bool(values) and values[0] > 0 and values[-1] > 20 * values[len(values) // 2]
    return {"type": "log"} if is_wide else {"rangemode": "tozero"}


def _band(first: int, last: int) -> dict[str, Any]:
    edges = {"x0": first - 0.5, "x1": last + 0.5, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    return {"type": "rect", "fillcolor": "@band", "line": {"width": 0}, "layer": "below", **edges}


def _symbols(marks: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of symbols between the two charts: pauses, measured steps, falls of MFU."""
    pauses = [(row["step"], f"{plain_text(row['name'])}, {seconds(row['duration_s'])}") for row in marks["pauses"]]
    drops = [(row["step"], f"{utilisation(row['from_mfu'])} to {utilisation(row['to_mfu'])}") for row in marks["drops"]]
    rows = (
        ("Pause", "triangle-down", "@vermilion", [pause for pause in pauses if pause[0] is not None]),
        ("Measured step", "diamond", "@purple", [(step, "") for step in marks["measured"]]),
        ("MFU fell", "x", "@orange", [drop for drop in drops if drop[0] is not None]),
    )
    band = [("Warm-up", "square", "@band", [(None, "")])] if marks["warmup"] else []
    return [_symbol(*row) for row in (*rows, *band) if row[3]]


def _symbol(name: str, symbol: str, colour: str, found: list[tuple[int | None, str]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [step for step, _ in found],
        "y": [0.0 if step is not None else None for step, _ in found],
        "yaxis": "y",
        "text": [text for _, text in found],
        "marker": {"symbol": symbol, "size": 9, "color": colour, "line": {"width": 1, "color": "@paper"}},
        "hovertemplate": f"{name} at step %{{x}}<br>%{{text}}<extra></extra>",
        "cliponaxis": False,
    }


def table(facts: dict[str, Any]) -> Table:
    """Medians over a dozen stretches of the run."""
    lines = [facts["series"]["mfu"], facts["series"]["step_s"]]
    known = next((line for line in lines if line is not None), None)
    if known is None:
        return table_of(("Step#", "MFU#", "Step time#"), ())
    rows = []
    for place in evenly(range(len(known["typical"])), NUM_STRETCHES):
        mfu, step_s = (line["typical"][place] if line and place < len(line["typical"]) else None for line in lines)
        rows.append((plain(known["typical_step"][place]), utilisation(mfu), seconds(step_s)))
    return table_of(("Around step#", "MFU, median#", "Step time, median#"), rows)


def describe(facts: dict[str, Any]) -> str:
    """What is drawn."""
    return "MFU and step time over the steps of the run."
