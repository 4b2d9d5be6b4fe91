"""How do several runs look side by side, as one page?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flopmeter import __version__
from flopmeter.report import _compare_words as words
from flopmeter.report._charts import Figure, plain_text
from flopmeter.report._page import page, template
from flopmeter.text import clean, number, percent, points
from flopmeter.waterfall import LABELS

if TYPE_CHECKING:
    from flopmeter.compare import Comparison

_LOOKS = (("@blue", "solid", ""), ("@orange", "solid", "/"), ("@green", "dot", "."), ("@purple", "dash", "x"))
MAX_LINES = 8
"""Runs that a chart shows; the tables show all."""
MAX_SETTINGS = 100


def comparison_page(comparison: Comparison, series: Sequence[Mapping[str, Any]]) -> str:
    """One self-contained page; `series` is what `series_of` says of each run."""
    figures = comparison_figures(comparison, series)
    return page(comparison_title(comparison), comparison_body(comparison, figures), figures)


def comparison_title(comparison: Comparison) -> str:
    """What the page is called."""
    names = [clean(name, 60) for name in comparison.names]
    return f"{names[1]} against {names[0]}" if len(names) == 2 else f"{len(names) - 1} runs against {names[0]}"


def comparison_body(
    comparison: Comparison, figures: Mapping[str, Figure], links: Sequence[str] = (), swaps: Sequence[str] = ()
) -> str:
    """The sections as HTML, every text of the runs escaped.

    Args:
        links: The page of each run, where there are such pages.
        swaps: For each run the comparison that takes it as the baseline.
    """
    places = range(1, len(comparison.names))
    values = {
        "title": comparison_title(comparison),
        "version": __version__,
        "names": [clean(name, 80) for name in comparison.names],
        "links": links,
        "swaps": swaps,
        "headlines": [words.headline(comparison, place) for place in places],
        "predictions": list(filter(None, (words.prediction_text(comparison, place) for place in places))),
        "notes": [clean(note, 300) for note in comparison.notes],
        "confidence": percent(comparison.confidence, 0),
        "rows": [_row(row) for row in comparison.rows],
        "parts": [_part(name, shares) for name, shares in comparison.parts.items()],
        "symptoms": [_symptom(symptom) for symptom in comparison.symptoms],
        "settings": [_setting(name, of_runs) for name, of_runs in list(comparison.settings.items())[:MAX_SETTINGS]],
        "figures": figures,
    }
    return str(template("compare.html").render(values)).replace(" %", "&nbsp;%")


def comparison_figures(comparison: Comparison, series: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """MFU (or step time) over the steps, one line a run, and the parts of the time side by side."""
    drawn = {"lines": _lines_figure(comparison.names, series), "parts": _parts_figure(comparison)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _setting(name: str, of_runs: Sequence[str | None]) -> list[str]:
    return [clean(name, 60), *(clean(value or "", 120) for value in of_runs)]


def _row(row: Any) -> dict[str, Any]:
    quantity = row.quantity
    return {
        "label": quantity.label,
        "cells": [
            {
                "value": words.value_text(quantity, value),
                "change": words.change_text(quantity, change),
                "interval": words.interval_text(quantity, change),
                "verdict": words.verdict_text(change),
            }
            for value, change in zip(row.values, row.changes, strict=True)
        ],
    }


def _part(name: str, shares: Sequence[float | None]) -> dict[str, Any]:
    first = shares[0]
    changes = ["", *("" if first is None or share is None else points(share - first) for share in shares[1:])]
    cells = [(percent(share), change) for share, change in zip(shares, changes, strict=True)]
    return {"label": LABELS.get(name, clean(name)), "cells": cells}


def _symptom(symptom: Any) -> dict[str, Any]:
    return {
        "rule": words.rule_text(symptom.rule),
        "title": clean(symptom.title, 300),
        "cells": ["not found" if lost is None else f"{percent(lost)} of the time" for lost in symptom.lost],
        "fates": [words.fate_text(symptom.lost[0], lost) for lost in symptom.lost],
    }


def _lines_figure(names: Sequence[str], series: Sequence[Mapping[str, Any]]) -> Figure | None:
    is_mfu = any(of_run["mfu"] for of_run in series)
    key, scale, title = ("mfu", 100, "MFU, %") if is_mfu else ("step_s", 1e3, "Step time, ms")
    data = []
    for name, of_run, (colour, dash, _) in zip(names, series, _LOOKS * 2, strict=False):
        line = of_run[key]
        if line:
            is_long = len(line["typical"]) >= 3 and line["num_values"] > 2 * len(line["typical"])
            steps, values = ("typical_step", "typical") if is_long else ("step", "value")
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines" if len(line[values]) > 2 else "lines+markers",
                    "name": plain_text(clean(name), 40),
                    "x": line[steps],
                    "y": [None if value is None else number(scale * value) for value in line[values]],
                    "line": {"color": colour, "dash": dash, "width": 2},
                }
            )
    layout = {
        "height": 380,
        "xaxis": {"title": {"text": "Step"}},
        "yaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "x",
        "showlegend": True,
    }
    return {"data": data, "layout": layout} if data else None


def _parts_figure(comparison: Comparison) -> Figure | None:
    """Horizontal bars, the runs beside each other; a part that no run has is left out."""
    parts = {name: shares for name, shares in comparison.parts.items() if any(shares)}
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain_text(clean(comparison.names[place]), 40),
            "y": [LABELS.get(name, plain_text(name)) for name in parts],
            "x": [None if (share := shares[place]) is None else number(100 * share) for shares in parts.values()],
            "marker": {"color": colour, "pattern": {"shape": pattern, "bgcolor": colour, "fgcolor": "@paper"}},
            "hovertemplate": "%{y}: %{x:.1f} %<extra></extra>",
        }
        for place, (colour, _, pattern) in zip(range(min(len(comparison.names), MAX_LINES)), _LOOKS * 2, strict=False)
    ]
    layout = {
        "barmode": "group",
        "height": 120 + len(parts) * (16 + 12 * len(data)),
        "xaxis": {"title": {"text": "Share of the wall time"}, "ticksuffix": " %"},
        "yaxis": {"autorange": "reversed", "showgrid": False},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "showlegend": True,
    }
    return {"data": data, "layout": layout} if parts else None
