"""How do several runs look side by side? The same sections for the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from flopmeter.compare import SMALLEST, Change, Comparison
from flopmeter.report._model import Timeline
from flopmeter.report._page import body, document
from flopmeter.report._texts import SMALLEST_SHARE
from flopmeter.report.md import markdown
from flopmeter.text import amount, clean, percent, plain, points, seconds, utilisation
from flopmeter.waterfall import LABELS

if TYPE_CHECKING:
    from flopmeter.compare.condition import Verdict
    from flopmeter.compare.quantities import Quantity

MAX_LINES = 8
"""Runs that the chart shows; the tables show all."""
MAX_SETTINGS = 100
MAIN = ("mfu", "goodput", "step_time_median", "step_time_p95", "tokens_per_second", "model_flop", "data_wait_share")
"""Metrics that are always shown; of the others those that changed."""
GOOD, BAD = ("better", "gone"), ("worse", "new")
_OUTCOMES = {"fails": "❌ fails", "within noise": "⚠️ within noise: not failed", "passes": "✅ passes"}


class Cell(Struct, frozen=True, kw_only=True):
    """What a table says of one run."""

    value: str
    change: str = ""
    interval: str = ""
    verdict: str = ""

    @property
    def told(self) -> str:
        """The change, its interval and what it amounts to."""
        return " ".join(filter(None, (self.change, self.interval and f"({self.interval})", self.verdict)))


Row = tuple[str, str, tuple[Cell, ...]]
"""Label, a remark to it, cells."""


class Section(Struct, frozen=True, kw_only=True):
    """A table with a column for each run: rows that matter, and the rest."""

    title: str
    lead: str = ""
    rows: tuple[Row, ...]
    more: tuple[Row, ...] = ()


def comparison_page(
    comparison: Comparison, timelines: Sequence[Timeline], links: Sequence[str] = (), swaps: Sequence[str] = ()
) -> tuple[str, str, dict[str, Any]]:
    """Title, sections as HTML with every text of the runs escaped, and what the script draws.

    Args:
        links: The page of each run, where there are such pages.
        swaps: For each run the comparison that takes it as the baseline.
    """
    names = [clean(name, 60) for name in comparison.names]
    title = f"{names[1]} compared with {names[0]}" if len(names) == 2 else f"{len(names) - 1} runs and {names[0]}"
    shares = {name: values for name, values in comparison.parts.items() if any(values)}
    bars = [
        [(name, LABELS.get(name, clean(name)), share) for name, values in shares.items()
         if (share := values[place] or 0.0) >= SMALLEST_SHARE]
        for place in range(len(names))
    ]  # fmt: skip
    values = {"title": title, "names": names, "links": links, "swaps": swaps, "bars": bars, "good": GOOD, "bad": BAD}
    values |= {"sentences": sentences(comparison), "notes": [clean(note, 300) for note in comparison.notes]}
    html = body("compare.html", **values, sections=sections(comparison), lines=MAX_LINES)
    return title, html, _data(names, timelines)


def comparison_document(comparison: Comparison, timelines: Sequence[Timeline]) -> str:
    """One self-contained page."""
    return document(*comparison_page(comparison, timelines))


def comparison_markdown(comparison: Comparison, verdicts: Sequence[Verdict]) -> str:
    """What a pull request's comment shows: the verdicts on conditions, then every metric with its change."""
    headlines = [headline(comparison, place) for place in range(1, len(comparison.names))]
    metrics = next(section for section in sections(comparison) if section.title == "Metrics")
    values = {"headlines": headlines, "names": comparison.names, "metrics": metrics, "notes": comparison.notes}
    return markdown("compare.md", **values, verdicts=verdicts, outcomes=_OUTCOMES)


def _data(names: Sequence[str], timelines: Sequence[Timeline]) -> dict[str, Any]:
    """MFU, step time and loss over the steps: a panel each, a line for each run."""
    axes, lines = [], []
    for run, timeline in enumerate(timelines[:MAX_LINES]):
        for line in timeline.lines:
            if line.name in ("MFU", "Step time", "Loss"):
                told = msgspec.to_builtins(line) | {"name": names[run], "panel": line.name, "run": run}
                axes += [] if told["step"] in axes else [told["step"]]
                lines.append(told | {"step": axes.index(told["step"])})
    order = ["MFU", "Step time", "Loss"]
    return {"axes": axes, "lines": sorted(lines, key=lambda line: order.index(line["panel"])), "names": names}


def sections(comparison: Comparison) -> list[Section]:
    """Metrics, parts of the time, findings and settings; a section without a row is left out."""
    lead = (
        f"Of the steady steps. In brackets: {percent(comparison.confidence, 0)} confidence interval (blocks of steps, "
        "bootstrapped). It covers noise within a run, not between runs."
    )
    rows: list[Row] = []
    more: list[Row] = []
    for row in comparison.rows:
        cells = tuple(
            Cell(
                value=value_text(row.quantity, value),
                change=change_text(row.quantity, change),
                interval=interval_text(row.quantity, change),
                verdict=verdict_text(change),
            )
            for value, change in zip(row.values, row.changes, strict=True)
        )
        is_main = row.quantity.name in MAIN or any(cell.verdict in (*GOOD, *BAD) for cell in cells)
        (rows if is_main else more).append((row.quantity.label, "", cells))
    parts = [
        (LABELS.get(name, clean(name)), "", _parts(shares))
        for name, shares in comparison.parts.items()
        if any(abs(share or 0.0) >= SMALLEST_SHARE for share in shares)
    ]
    findings = [
        (rule_text(symptom.rule), clean(symptom.title, 300), _findings(symptom.lost)) for symptom in comparison.symptoms
    ]
    settings = [
        (clean(name, 60), "", tuple(Cell(value=clean(value or "", 120) or "not given") for value in values))
        for name, values in list(comparison.settings.items())[:MAX_SETTINGS]
    ]
    made = [
        Section(title="Metrics", lead=lead, rows=tuple(rows), more=tuple(more)),
        Section(title="Parts of the time", rows=tuple(parts)),
        Section(title="Findings: time lost", rows=tuple(findings)),
        Section(title="Settings that differ", rows=tuple(settings)),
    ]
    return [section for section in made if section.rows or section.more]


def _parts(shares: Sequence[float | None]) -> tuple[Cell, ...]:
    first = shares[0]
    changes = ["", *("" if first is None or share is None else points(share - first) for share in shares[1:])]
    return tuple(Cell(value=percent(share), change=change) for share, change in zip(shares, changes, strict=True))


def _findings(lost: Sequence[float | None]) -> tuple[Cell, ...]:
    first = lost[0]
    fates = [("" if first is None else "gone") if x is None else "new" if first is None else "stayed" for x in lost[1:]]
    cells = zip(lost, ["", *fates], strict=True)
    return tuple(Cell(value="not found" if x is None else percent(x), verdict=fate) for x, fate in cells)


def value_text(quantity: Quantity, value: float | None) -> str:
    """A metric in its unit."""
    if quantity.unit == "share":
        return percent(value) if quantity.is_part else utilisation(value)
    if quantity.unit == "s":
        return seconds(value)
    return amount(value, "FLOP") if quantity.unit == "FLOP" else plain(value)


def change_text(quantity: Quantity, change: Change | None) -> str:
    """How far the metric moved."""
    if change is None:
        return ""
    return points(change.value) if quantity.is_part else _ratio(change.value)


def interval_text(quantity: Quantity, change: Change | None) -> str:
    """Within which bounds that is known."""
    if change is None or change.low is None or change.high is None:
        return ""
    ends = (change.low, change.high)
    return " to ".join(points(end).removesuffix(" pts") if quantity.is_part else _ratio(end, "") for end in ends)


def verdict_text(change: Change | None) -> str:
    """What the change amounts to, in a word or two; nothing where that cannot be told, or is nothing to act on."""
    if change is None or change.is_beyond_noise is None or abs(change.value) < SMALLEST:
        return ""
    if not change.is_beyond_noise:
        return "within noise"
    return "" if change.is_better is None else "better" if change.is_better else "worse"


def rule_text(rule: str) -> str:
    """The name of a rule as people read it."""
    return clean(rule[:1].upper() + rule[1:].replace("_", " "), 60)


def sentences(comparison: Comparison) -> list[str]:
    """For each run whether it is better than the baseline, and whether what the diagnosis predicted came true."""
    told = []
    for place in range(1, len(comparison.names)):
        told += [headline(comparison, place), prediction_text(comparison, place)]
    return [text for text in told if text]


def headline(comparison: Comparison, place: int) -> str:
    """One sentence on a run: is it better than the baseline, by how much, and is that sure?"""
    rows = {row.quantity.name: row for row in comparison.rows}
    names = ("mfu", "tokens_per_second", "steps_per_second")
    row = next((row for name in names if (row := rows.get(name)) and row.changes[place]), None)
    run, baseline = clean(comparison.names[place], 80), clean(comparison.names[0], 80)
    if row is None or (change := row.changes[place]) is None:
        return f"{run} and {baseline} have no metric in common that tells which is faster."
    before, after = (value_text(row.quantity, row.values[i]) for i in (0, place))
    told = f"{row.quantity.label if row.quantity.name == 'mfu' else row.quantity.label.lower()} {before} to {after}"
    if change.is_beyond_noise is None:
        return f"{run} and {baseline}: {told}, {_ratio(change.value)}. Too few steps to tell that from noise."
    bounds = f"{percent(comparison.confidence, 0)} interval {interval_text(row.quantity, change)} %"
    if not change.is_beyond_noise:
        return f"{run} is no different from {baseline} beyond noise: {told}, {_ratio(change.value)} ({bounds})."
    word = "better" if change.is_better else "worse"
    return f"{run} is {word} than {baseline}, beyond noise: {told}, {_ratio(change.value)} ({bounds})."


def prediction_text(comparison: Comparison, place: int) -> str:
    """What the baseline's diagnosis had predicted for this run, and what was measured; empty where it had nothing."""
    prediction = comparison.predictions[place]
    if prediction is None:
        return ""
    what = " and ".join(clean(rule, 60).replace("_", " ") for rule in prediction.rules)
    bounds = f"{_ratio(prediction.low, '')} to {_ratio(prediction.high)}"
    told = f"Fixed in {clean(comparison.names[place], 80)}: {what}. Predicted {_ratio(prediction.expected)} ({bounds})"
    if prediction.measured is None:
        why = "no metric tells how much faster it is" if prediction.by else "the runs differ in model, device or size"
        return f"{told}, which cannot be checked: {why}."
    verdict = "" if prediction.verdict == "unknown" else f": {prediction.verdict}"
    return f"{told}, measured {_ratio(prediction.measured)} by {prediction.by}{verdict}."


def _ratio(value: float, unit: str = " %") -> str:
    text = f"{100 * value:+,.1f}"
    return ("0.0" if float(text.replace(",", "")) == 0 else text.replace("-", "−")) + unit
