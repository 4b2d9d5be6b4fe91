"""How do a diagnosis and its numbers look on a terminal, and as JSON? For the commands that print one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flopmeter.text import plural, seconds, signed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flopmeter.diagnosis import Diagnosis, Finding
    from flopmeter.waterfall import Waterfall

BAR_WIDTH = 40
NUMBERS_WIDTH = 38
"""Columns that the names and figures beside a bar take."""


def plain(value: Any) -> Any:
    """The value as strict JSON has it, which knows no NaN and no infinity."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Headline, waterfall, findings in the order of their gain, and what was not checked."""
    from rich.table import Table

    from flopmeter.diagnosis import RULES

    console.print(clean(diagnosis.headline), style="bold")
    if not diagnosis.waterfall.parts:  # no step to judge: the headline has said why, and it is every rule's reason
        return
    console.print(_bars(diagnosis.waterfall, console))
    if diagnosis.waterfall.note:
        console.print(f"Note: {clean(diagnosis.waterfall.note)}.")
    for number, finding in enumerate(diagnosis.findings, start=1):
        _show_finding("" if RULES[finding.rule].is_last_resort else f"{number}. ", finding, console)
    if diagnosis.not_checked:
        table = Table.grid(padding=(0, 2))
        for name, reason in diagnosis.not_checked.items():
            table.add_row(f"  {name}", clean(reason))
        console.print("\nNot checked, because")
        console.print(table)


def clean(text: str) -> str:
    """Names in a record are other people's: no control characters."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _bars(waterfall: Waterfall, console: Console) -> Table:
    """The parts as bars of a common scale, in points of the wall time."""
    from rich.table import Table

    from flopmeter.waterfall import LABELS

    is_ascii, num_steps = console.options.ascii_only, plural(waterfall.num_steps, "step")
    bar_width = max(min(BAR_WIDTH, console.width - NUMBERS_WIDTH), 1)
    table = Table(
        title=f"Where {seconds(waterfall.wall_s)} of {num_steps} went, in points of wall time",
        title_justify="left",
        title_style="",
        box=None,
    )
    table.add_column("part", no_wrap=True)
    table.add_column("points", justify="right", no_wrap=True)
    table.add_column("+-" if is_ascii else "±", justify="right", no_wrap=True)
    table.add_column("")
    widest = max(abs(part.share) for part in waterfall.parts) or 1.0
    for part in waterfall.parts:
        length = round(bar_width * abs(part.share) / widest)
        bar = (("#" if is_ascii else "█") if part.share >= 0 else "-") * length
        doubt = part.uncertainty_s / waterfall.wall_s
        table.add_row(LABELS.get(part.name, part.name), f"{100 * part.share:.1f}", f"{100 * doubt:.1f}", bar)
    return table


def _show_finding(number: str, finding: Finding, console: Console) -> None:
    from rich.table import Table

    console.print(f"\n{number}{finding.rule}: {clean(finding.title)}", style="bold")
    table = Table.grid(padding=(0, 2))
    gain = finding.gain
    if gain is not None:
        likely = f"{signed(gain.expected, 1)} (from {signed(gain.low, 1).removesuffix(' %')} to {signed(gain.high, 1)})"
        table.add_row("   gain", f"{likely}, for {100 * finding.lost:.1f} points lost")
    for label, texts in (("because", finding.evidence), ("do", finding.advice)):
        for text in texts:
            table.add_row(f"   {label}", clean(text))
    console.print(table)
