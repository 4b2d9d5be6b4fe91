"""Which numbers stand behind each chart? The same facts as rows of text, for screen readers, copying and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flopmeter.report._charts import PHASE_LOOKS
from flopmeter.report._thin import evenly
from flopmeter.text import amount, percent, plain, points, seconds, utilisation

MAX_ROWS = 60
NUM_STRETCHES = 12

Table = dict[str, Any]


def tables_of(facts: dict[str, Any]) -> dict[str, Table]:
    """Every table, by the name of its chart; one without data has no rows."""
    work = facts["work"]
    return {
        "waterfall": waterfall_table(facts["waterfall"]),
        "timeline": _timeline(facts["series"]),
        "phases": _phases(facts["phases"]),
        "modules": _modules(work),
        "operators": _flops("Operator", work["by_op"] if work else (), work),
        "dtypes": _flops("Dtype", work["by_dtype"] if work else (), work),
        "ranks": _ranks(facts["ranks"]),
        "stragglers": _stragglers(facts["ranks"]),
    }


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A title that ends in `#` heads a column of numbers."""
    columns = [{"title": title.rstrip("#"), "is_number": title.endswith("#")} for title in titles]
    return {"columns": columns, "rows": [list(row) for row in rows]}


def waterfall_table(fall: dict[str, Any]) -> Table:
    """Every part, those that are zero or not known as well."""
    titles = ("Part", "Share of wall time#", "Time#", "Uncertainty#", "How it was found")
    return _table(titles, (_part(part) for part in fall["parts"]))


def _part(part: dict[str, Any]) -> tuple[str, ...]:
    spread = "" if part["uncertainty_s"] is None else f"± {seconds(part['uncertainty_s'])}"
    return part["label"], percent(part["share"], 2), seconds(part["seconds"]), spread, part["how"]


def _timeline(series: dict[str, Any]) -> Table:
    """Medians over a dozen stretches of the run."""
    lines = [series["mfu"], series["step_s"]]
    known = next((line for line in lines if line is not None), None)
    if known is None:
        return _table(("Step#", "MFU#", "Step time#"), ())
    rows = []
    for place in evenly(range(len(known["typical"])), NUM_STRETCHES):
        mfu, step_s = (line["typical"][place] if line and place < len(line["typical"]) else None for line in lines)
        rows.append((plain(known["typical_step"][place]), utilisation(mfu), seconds(step_s)))
    return _table(("Around step#", "MFU, median#", "Step time, median#"), rows)


def _phases(phases: dict[str, Any] | None) -> Table:
    known = phases["steady_s"] if phases else {}
    total_s = sum(value for value in known.values() if value is not None)
    rows = [
        (PHASE_LOOKS[name][0], seconds(value), percent(value / total_s if value is not None and total_s else None))
        for name, value in known.items()
    ]
    return _table(("Phase", "Mean of a steady step#", "Share#"), rows)


def _modules(work: dict[str, Any] | None) -> Table:
    nodes = work["by_module"][:MAX_ROWS] if work else []
    rows = ((node["id"], amount(node["flop"], "FLOP"), percent(node["flop"] / nodes[0]["flop"])) for node in nodes)
    return _table(("Module", "Model FLOPs of a step#", "Share#"), rows)


def _flops(title: str, rows: Iterable[dict[str, Any]], work: dict[str, Any] | None) -> Table:
    total = work["model_flop"] if work else 1.0
    texts = ((row["name"], amount(row["flop"], "FLOP"), percent(row["flop"] / total)) for row in rows)
    return _table((title, "Model FLOPs of a step#", "Share#"), texts)


def _ranks(ranks: dict[str, Any] | None) -> Table:
    rows = []
    for row in ranks["stats"] if ranks else ():
        show = (lambda value: amount(value, "B")) if row["quantity"] == "memory_bytes" else seconds
        name = row["quantity"].removesuffix("_s").removesuffix("_bytes").replace("_", " ")
        rows.append((name, *(show(row[field]) for field in ("min", "mean", "max")), plain(row["argmax"])))
    return _table(("Last interval", "Least#", "Mean#", "Most#", "At rank#"), rows)


def _stragglers(ranks: dict[str, Any] | None) -> Table:
    rows = (
        (plain(row["rank"]), row["host"], plain(row["since_step"]), seconds(row["extra_s"]), row["phase"], row["cause"])
        for row in (ranks["stragglers"] if ranks else ())
    )
    return _table(("Rank#", "Host", "Since step#", "Extra a step#", "Phase", "Cause"), rows)


def loss_points(part: dict[str, Any]) -> str:
    """What a part takes from 100 %."""
    return points(None if part["share"] is None else -part["share"])
