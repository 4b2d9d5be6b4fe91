"""How is the difference between two runs put into words?  The terminal and the page say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flopmeter.compare import SMALLEST
from flopmeter.text import amount, clean, percent, plain, points, seconds, utilisation

if TYPE_CHECKING:
    from flopmeter.compare import Change, Comparison
    from flopmeter.compare.quantities import Quantity


def value_text(quantity: Quantity, value: float | None) -> str:
    """A figure in its unit."""
    if quantity.unit == "share":
        return percent(value) if quantity.is_part else utilisation(value)
    if quantity.unit == "s":
        return seconds(value)
    return amount(value, "FLOP") if quantity.unit == "FLOP" else plain(value)


def change_text(quantity: Quantity, change: Change | None) -> str:
    """How far the figure moved."""
    if change is None:
        return ""
    return points(change.value) if quantity.is_part else _ratio(change.value)


def interval_text(quantity: Quantity, change: Change | None) -> str:
    """Within which bounds that is known."""
    if change is None or change.low is None or change.high is None:
        return ""
    ends = (
        points(end).removesuffix(" pts") if quantity.is_part else _ratio(end, "") for end in (change.low, change.high)
    )
    return " to ".join(ends)


def verdict_text(change: Change | None) -> str:
    """What the change amounts to, in a word or two; nothing where that cannot be told."""
    if change is None or change.is_beyond_noise is None:
        return ""
    if abs(change.value) < SMALLEST:
        return "same"
    if not change.is_beyond_noise:
        return "within noise"
    if change.is_better is None:
        return "more" if change.value > 0 else "less"
    return "better" if change.is_better else "worse"


def fate_text(before: float | None, after: float | None) -> str:
    """What became of a finding: it came, it went, it stayed, or neither run has it."""
    if (before is None) == (after is None):
        return "stayed" if before is not None else ""
    return "gone" if after is None else "new"


def rule_text(rule: str) -> str:
    """The name of a rule as people read it."""
    return clean(rule[:1].upper() + rule[1:].replace("_", " "), 60)


def headline(comparison: Comparison, place: int) -> str:
    """One sentence on a run: is it better than the baseline, by how much, and is that sure?"""
    rows = {row.quantity.name: row for row in comparison.rows}
    names = ("mfu", "tokens_per_second", "steps_per_second")
    row = next((row for name in names if (row := rows.get(name)) and row.changes[place]), None)
    run, baseline = clean(comparison.names[place], 80), clean(comparison.names[0], 80)
    if row is None or (change := row.changes[place]) is None:
        return f"{run} and {baseline} have no figure in common that tells which is faster."
    before, after = (value_text(row.quantity, row.values[i]) for i in (0, place))
    figures = f"{row.quantity.label if row.quantity.name == 'mfu' else row.quantity.label.lower()} {before} to {after}"
    if change.is_beyond_noise is None:
        return f"{run} against {baseline}: {figures}, {_ratio(change.value)}. Too few steps to tell that from noise."
    bounds = f"{percent(comparison.confidence, 0)} interval {interval_text(row.quantity, change)} %"
    if not change.is_beyond_noise:
        return f"{run} is no different from {baseline} beyond noise: {figures}, {_ratio(change.value)} ({bounds})."
    word = "better" if change.is_better else "worse"
    return f"{run} is {word} than {baseline}, beyond noise: {figures}, {_ratio(change.value)} ({bounds})."


def prediction_text(comparison: Comparison, place: int) -> str:
    """One or two sentences on what the baseline's diagnosis had predicted for this run; empty where it had nothing."""
    prediction = comparison.predictions[place]
    if prediction is None:
        return ""
    what = " and ".join(clean(rule, 60).replace("_", " ") for rule in prediction.rules)
    bounds = f"between {_ratio(prediction.low)} and {_ratio(prediction.high)}"
    run, verb = clean(comparison.names[place], 80), "is" if len(prediction.rules) == 1 else "are"
    promise = f"{rule_text(what)} {verb} gone in {run}: predicted was {_ratio(prediction.expected)} ({bounds})"
    if prediction.measured is None:
        why = "no figure tells how much faster it is" if prediction.by else "the runs differ in model, device or size"
        return f"{promise}, which cannot be checked: {why}."
    return f"{promise}; measured by {prediction.by}: {_ratio(prediction.measured)}. {_OUTCOMES[prediction.verdict]}"


_OUTCOMES = {
    "came true": "The prediction came true.",
    "less than predicted": "It brought less than predicted.",
    "more than predicted": "It brought more than predicted.",
    "within noise of it": "That is not what was predicted, but within noise of it.",
    "unknown": "",
}


def _ratio(value: float, unit: str = " %") -> str:
    text = f"{100 * value:+,.1f}"
    return ("0.0" if float(text.replace(",", "")) == 0 else text.replace("-", "−")) + unit
