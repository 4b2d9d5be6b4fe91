"""What fits on one screen? A run in a few lines: its number, what to fix first, where the time went, evidence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flopmeter.report import _texts
from flopmeter.report._model import Line, Report, evenly
from flopmeter.text import clean, percent, seconds, sentence, signed, utilisation

BAR_WIDTH, LINE_WIDTH, MAX_LABEL = 40, 60, 30
MAX_FINDINGS, MAX_EVIDENCE, MAX_OPERATORS = 6, 3, 6
_LEVELS = "▁▂▃▄▅▆▇█"


def make_console(**settings: Any) -> Console:
    """A console that takes no text of a run for markup; as wide as a log where it is no terminal."""
    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, **settings}
    console = Console(**plain)
    return console if console.is_terminal or "width" in settings else Console(width=110, **plain)


def show(report: Report, console: Console) -> None:
    """Print the summary. Texts of the run are never read as markup."""
    number = report.number
    console.print(Text(report.about.name, style="bold"))
    console.print(Text(_texts.run_line(report.about), style="dim"))
    sure = f" ({number.certainty}; {number.standing})" if number.certainty else ""
    console.print(
        Text.assemble(
            "\n",
            (f"MFU {utilisation(number.mfu)}", "bold"),
            f"{' ' if number.mfu is not None else ': '}{_texts.peak_text(report)}{sure}",
        )
    )
    line = next((line for line in report.timeline.lines if line.name == "MFU"), None)
    names = _texts.names_text(number)
    rows = [_texts.product_text(report), f"elsewhere: {names}" if names else ""]
    rows += [" · ".join(f"{name} {value}" for name, value in _texts.metrics(report))]
    for text in filter(None, rows):
        console.print(Text(f"  {text}"))
    if line and not console.options.ascii_only and (spark := spark_line(line)):
        console.print(Text.assemble("  by step ", (spark, "green")))
    _show_fix(report, console)
    _show_parts(report, console)
    others = () if report.is_early else report.findings[1:]
    if others:
        console.print(Text("\nThen", style="bold"))
    for place, finding in enumerate(others[:MAX_FINDINGS], start=2):
        gain = f"  {signed(finding.gain.expected)}" if finding.gain else ""
        title = f"  {f'{place}. ' if finding.is_cause else ''}{finding.title[:1].upper()}{finding.title[1:]}"
        console.print(Text.assemble(title, (gain, "green"), (f"  ({finding.rule})", "dim")))
    left = [f"{len(others) - MAX_FINDINGS} more findings"] if len(others) > MAX_FINDINGS else []
    left += [f"{len(report.not_checked)} skipped checks"] if report.not_checked and report.waterfall.parts else []
    if left:
        console.print(Text(f"  {' and '.join(left)}: in the page, and with --json", style="dim"))
    sampled = f", of a sampled step of {seconds(report.operators.step_s)}" if report.operators else ""
    tables, totals = _texts.tables(report), _texts.totals_rows(report)
    for name, of in (("operators", sampled), ("roles", "")):
        if (table := tables.get(name)) is not None:
            console.print(Text(f"\n{table.title}{of}", style="bold"))
            console.print(grid_of(table.columns, table.rows[:MAX_OPERATORS]))
    if totals:
        console.print(Text("\nThe whole run", style="bold"))
        console.print(Text("  " + " · ".join(f"{name} {value}" for name, value in totals)))


def spark_line(line: Line, width: int = LINE_WIDTH) -> str:
    """A line over the steps as one row of bars, from zero to the largest."""
    values = evenly(line.mean, width)
    top = max((value for value in values if value is not None), default=0.0)
    if top <= 0:
        return ""
    return "".join(_LEVELS[min(max(int(8 * (value or 0.0) / top), 0), 7)] for value in values)


def _show_fix(report: Report, console: Console) -> None:
    start = "Fix this first: " if report.fix else ""
    console.print(Text(f"\n{start}{_texts.fix_text(report)}", style="bold"))
    first = report.findings[0] if report.findings and not report.is_early else None
    if first is None:
        return
    rows = [("worth", _texts.gain_text(first)), *(("do", sentence(text)) for text in first.advice[:1])]
    rows += [("copy", report.code.get(first.rule, ""))]
    rows += [("because", sentence(text)) for text in first.evidence[:MAX_EVIDENCE]]
    if report.tried:
        rows.append(("tried", clean(report.tried.headline, 400)))
    if report.larger:
        larger = f"{percent(report.larger.share)} of the time went elsewhere ({report.larger.label.lower()})"
        rows.append(("but", f"{larger}, where no fix is known."))
    rows += [("more", f"flopmeter report --explain {first.rule}")]
    grid = Table.grid(padding=(0, 2))
    for name, text in rows:
        if text:
            grid.add_row(Text(f"  {name}", style="dim"), Text(text, style="green" if name == "worth" else ""))
    console.print(grid)


def _show_parts(report: Report, console: Console) -> None:
    fall = report.waterfall
    if not fall.parts:
        return
    title, note = _texts.where_text(report)
    console.print(Text(f"\n{title}", style="bold"))
    block = "#" if console.options.ascii_only else "█"
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    for part in fall.parts:
        if abs(part.share) < _texts.SMALLEST_SHARE:
            continue
        doubt = part.uncertainty_s / fall.wall_s
        bar = (block if part.share > 0 else "-") * max(round(BAR_WIDTH * min(abs(part.share), 1.0)), 1)
        style = "green" if part.name == "ideal" else "yellow"
        about = f"+- {percent(doubt)}" if doubt >= _texts.SMALLEST_SHARE else ""
        grid.add_row(f"  {part.label}", percent(part.share), Text(about, style="dim"), Text(bar, style=style))
    console.print(grid)
    for text in filter(None, (note, fall.note and sentence(fall.note))):
        console.print(Text(f"  {text}", style="dim"))


def grid_of(columns: tuple[str, ...], rows: Iterable[Iterable[Any]], label_width: int = MAX_LABEL) -> Table:
    """Rows under their headings; one that ends in `#` is of numbers. Labels up to that width are not broken."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    told = [[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows]
    width = min(max((len(row[0]) + 2 for row in told), default=0), label_width)
    for place, column in enumerate(columns):
        is_number, title = column.endswith("#"), Text(f"  {column}" if place == 0 else column.removesuffix("#"))
        justify: Literal["left", "right"] = "right" if is_number else "left"
        grid.add_column(title, justify=justify, overflow="fold", min_width=0 if place else width)
    for first, *cells in told:
        grid.add_row(Text("  ") + first, *cells)
    return grid
