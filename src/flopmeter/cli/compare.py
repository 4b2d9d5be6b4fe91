"""`flopmeter compare`: is this run better than that one, and is it more than noise?"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopmeter.errors import ConfigError, FlopmeterError
from flopmeter.text import percent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flopmeter.compare import Comparison
    from flopmeter.compare.condition import Condition
    from flopmeter.record import Run

_STYLES = {"better": "green", "worse": "red", "gone": "green", "new": "red"}


def command(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs' folders, run files or profiler traces; the first is the baseline.")
    ],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Exit with 1 when this is true of a run: 'mfu < 0.95 * baseline'. May be repeated."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the comparison as a page.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Hold runs against the first: figures, noise, findings that came and went, settings that differ.

    Example: flopmeter compare runs/before runs/after --fail-if "mfu < 0.95 * baseline"

    --fail-if knows mfu, hfu, step_time, step_time_median, step_time_p95,
    steps_per_second, tokens_per_second, samples_per_second, goodput,
    model_flop, data_wait_share and the other shares; numbers, + - * / and
    one comparison. baseline is the same figure of the first run,
    baseline.hfu a named one of it.
    """
    from rich.console import Console

    conditions = _parse_conditions(fail_if or [])
    if len(runs) < 2:
        raise typer.BadParameter("give at least two runs: the first is the baseline")
    talk = Console(stderr=True)
    loaded = _load(runs, talk)
    with talk.status("Comparing ..."):
        from flopmeter.compare import compare

        comparison = compare(loaded)
    if json:
        typer.echo(json_format.dumps(comparison.as_dict(), allow_nan=False))
    else:
        _print(comparison)
    if output is not None:
        _write_page(output, comparison, loaded)
        talk.print(f"Page: {output}", soft_wrap=True, markup=False, highlight=False)
    _demand(conditions, comparison, loaded)


def _parse_conditions(texts: list[str]) -> list[Condition]:
    from flopmeter.compare.condition import parse_condition
    from flopmeter.compare.quantities import NAMES

    try:
        return [parse_condition(text, NAMES) for text in texts]
    except ConfigError as error:
        raise typer.BadParameter(f"--fail-if: {error}") from None


def _load(paths: list[Path], talk: Console) -> list[Run]:
    from flopmeter.traces import load_any

    loaded = []
    for path in paths:
        with talk.status(f"Reading {path.name} ..."):
            loaded.append(load_any(path))
    return loaded


def _print(comparison: Comparison) -> None:
    from rich.console import Console

    from flopmeter.report import _compare_words as words

    console = Console()
    for place in range(1, len(comparison.names)):
        console.print(words.headline(comparison, place), style="bold", markup=False, highlight=False)
        if told := words.prediction_text(comparison, place):
            console.print(told, markup=False, highlight=False)
    console.print(_figures_table(comparison))
    if comparison.parts:
        console.print(_parts_table(comparison))
    if comparison.symptoms:
        console.print(_symptoms_table(comparison))
    if comparison.settings:
        console.print(_settings_table(comparison))
    for note in comparison.notes:
        console.print(f"Note: {note}.", markup=False, highlight=False)


def _figures_table(comparison: Comparison) -> Table:
    from rich.text import Text

    from flopmeter.report import _compare_words as words

    has_room = len(comparison.names) == 2
    heading = f"Change ({percent(comparison.confidence, 0)} interval)" if has_room else "Change"
    table = _table("Figure", comparison.names, heading)
    for row in comparison.rows:
        cells: list[Any] = [row.quantity.label]
        for value, change in zip(row.values, row.changes, strict=True):
            cells.append(words.value_text(row.quantity, value))
            verdict, bounds = words.verdict_text(change), words.interval_text(row.quantity, change)
            texts = (words.change_text(row.quantity, change), f"({bounds})" if bounds and has_room else "", verdict)
            cells.append(Text(" ".join(filter(None, texts)), style=_STYLES.get(verdict, "")))
        table.add_row(cells[0], cells[1], *cells[3:])
    return table


def _parts_table(comparison: Comparison) -> Table:
    from flopmeter.text import percent, points
    from flopmeter.waterfall import LABELS

    table = _table("Where the time went", comparison.names, "Change")
    for name, shares in comparison.parts.items():
        cells = [LABELS.get(name, name), percent(shares[0])]
        for share in shares[1:]:
            cells += [percent(share), "" if share is None or shares[0] is None else points(share - shares[0])]
        if any(shares):
            table.add_row(*cells)
    return table


def _symptoms_table(comparison: Comparison) -> Table:
    from rich.text import Text

    from flopmeter.report import _compare_words as words
    from flopmeter.text import percent

    table = _table("Findings: time lost", comparison.names, "")
    for symptom in comparison.symptoms:
        cells: list[Any] = [Text(words.rule_text(symptom.rule)), _or_dash(symptom.lost[0], percent)]
        for lost in symptom.lost[1:]:
            fate = words.fate_text(symptom.lost[0], lost)
            cells += [_or_dash(lost, percent), Text(fate, style=_STYLES.get(fate, ""))]
        table.add_row(*cells)
    return table


def _settings_table(comparison: Comparison) -> Table:
    from rich.text import Text

    from flopmeter.text import clean

    table = _table("Settings that differ", comparison.names, None)
    for name, values in comparison.settings.items():
        table.add_row(Text(clean(name)), *(Text(_or_dash(value, clean)) for value in values))
    return table


def _or_dash(value: Any, write: Callable[[Any], str]) -> str:
    return "-" if value is None else write(value)


def _table(first: str, names: Sequence[str], change: str | None) -> Table:
    """A column for each run, and one for its change where there is something to say of it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from flopmeter.text import clean

    table = Table(box=box.SIMPLE)
    table.add_column(first)
    for place, name in enumerate(names):
        table.add_column(Text(clean(name, 60)), justify="right", overflow="fold")
        if place and change is not None:
            table.add_column(change, justify="left")
    return table


def _write_page(path: Path, comparison: Comparison, runs: Sequence[Run]) -> None:
    from flopmeter.report import write_text
    from flopmeter.report._compare_page import comparison_page
    from flopmeter.report._series import series_of

    try:
        write_text(comparison_page(comparison, [series_of(run) for run in runs]), path)
    except OSError as error:
        raise FlopmeterError(f"cannot write {path}: {error.strerror}") from None


def _demand(conditions: Sequence[Condition], comparison: Comparison, runs: Sequence[Run]) -> None:
    """One line for the first condition that a run meets, or that nobody can check; exit code 1 then."""
    from flopmeter.compare.condition import UnknownFigureError
    from flopmeter.compare.quantities import figures_of

    if not conditions:
        return
    baseline, *others = (figures_of(run) for run in runs)
    for condition in conditions:
        for name, figures in zip(comparison.names[1:], others, strict=True):
            try:
                left, right = condition.sides(figures, baseline)
            except UnknownFigureError as error:
                raise FlopmeterError(f"--fail-if {condition.text!r} cannot be checked for {name}: {error}") from None
            if condition.holds(left, right):
                raise FlopmeterError(f"{name} fails: {condition.text} ({left:.6g} against {right:.6g})")
