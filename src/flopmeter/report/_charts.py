"""What is drawn? Facts in, plotly figures out, as plain dictionaries: no plotly is needed to make them.

Colours are written as tokens (`@blue`), which the page resolves for its light or dark theme; they follow Okabe and Ito,
whose colours stay apart for colour-blind readers. Nothing is told by colour alone: symbols, patterns, labels and the
table under each chart say the same.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from flopmeter.text import amount, percent, points, seconds, utilisation

Figure = dict[str, Any]

PART_COLOURS = {
    "ideal": "@green",
    "recompute": "@purple",
    "matmul_below_peak": "@blue",
    "non_matmul": "@sky",
    "optimizer": "@orange",
    "exposed_communication": "@purple",
    "launch_gaps": "@yellow",
    "data_wait": "@vermilion",
    "host_to_device": "@yellow",
    "pauses": "@grey",
    "unexplained": "@grey",
}
PHASE_LOOKS = {
    "data_wait": ("Data wait", "@vermilion", "/"),
    "host_to_device": ("Host to device", "@yellow", "x"),
    "forward": ("Forward", "@sky", ""),
    "backward": ("Backward", "@blue", ""),
    "optimizer": ("Optimizer", "@orange", ""),
    "other": ("Other", "@grey", ""),
}


def figures_of(facts: dict[str, Any]) -> dict[str, Figure]:
    """Every chart that the facts allow, by the name of its place in the page."""
    drawn = {
        "waterfall": waterfall_figure(facts["waterfall"]),
        "timeline": timeline_figure(facts["series"]),
        "phases": phases_figure(facts["phases"]),
        "modules": modules_figure(facts["work"]),
        "operators": operators_figure(facts["work"]),
        "ranks": ranks_figure(facts["ranks"]),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def waterfall_figure(fall: dict[str, Any]) -> Figure | None:
    """From 100 % down to the observed MFU; only the split of the time where MFU is unknown."""
    known = [part for part in fall["parts"] if part["share"] is not None]
    losses = [part for part in known if part["name"] != "ideal" and part["share"]]
    if not known:
        return None
    bars, level = [], 1.0
    if fall["mfu"] is not None:
        bars.append(_bar("Peak", 0.0, 1.0, "100 %", "@line", ""))
    for part in losses:
        share = part["share"]
        pattern = "/" if part["name"] in ("pauses", "unexplained") else ""
        bars.append(_bar(part["label"], level - share, share, points(-share), PART_COLOURS[part["name"]], pattern))
        level -= share
    if fall["mfu"] is not None:
        bars.append(_bar("Observed MFU", 0.0, fall["mfu"], utilisation(fall["mfu"]), "@green", ""))
    return _horizontal(bars, "Share of the wall time, in MFU points")


def _bar(label: str, start: float, length: float, text: str, colour: str, pattern: str) -> dict[str, Any]:
    return {"label": label, "start": start, "length": length, "text": text, "colour": colour, "pattern": pattern}


def _horizontal(bars: list[dict[str, Any]], title: str) -> Figure:
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


def _pattern(shape: str) -> dict[str, Any]:
    """Strokes in the paper's colour over the bar's own."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "@paper", "fgopacity": 0.8, "solidity": 0.25, "size": 7}


def timeline_figure(series: dict[str, Any]) -> Figure | None:
    """MFU above, step time below, on one axis of steps, with what happened marked."""
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


def phases_figure(phases: dict[str, Any] | None) -> Figure | None:
    """Bars on top of each other: mean milliseconds of a step by phase, over stretches of the run.

    Each begins where the one below ends, not where plotly would stack it: steps that a restart repeats do not add up.
    """
    if phases is None:
        return None
    steps = phases["step"]
    apart = min((after - last for (_, last), (after, _) in pairwise(steps) if after > last), default=1)
    base = [0.0] * len(steps)
    labels = [f"{first} to {last}" if first != last else str(first) for first, last in steps]
    data = []
    for phase, values in phases["seconds"].items():
        name, colour, pattern = PHASE_LOOKS[phase]
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


def modules_figure(work: dict[str, Any] | None) -> Figure | None:
    """A treemap of the model FLOPs."""
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


def operators_figure(work: dict[str, Any] | None) -> Figure | None:
    """Model FLOPs by operator, the largest first."""
    if work is None or not work["by_op"]:
        return None
    shares = [(row["name"].removeprefix("aten::"), row["flop"] / work["model_flop"]) for row in work["by_op"]]
    bars = [_bar(plain_text(name, 26), 0.0, share, percent(share), "@blue", "") for name, share in shares]
    return _horizontal(bars, "Share of the model FLOPs")


def ranks_figure(ranks: dict[str, Any] | None) -> Figure | None:
    """A heat map of the ranks' own work time, stragglers circled."""
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


def plain_text(text: str, limit: int = 60) -> str:
    """Plotly reads a few HTML tags in labels: a name of the run must not be able to use them."""
    half = (limit - 1) // 2
    cut = text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"  # what differs is often the end
    return cut.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
