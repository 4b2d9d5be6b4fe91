"""`flopmeter compare`: is this run better than that one, and is it more than noise?"""

from __future__ import annotations

import json as json_format
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from msgspec import structs

from flopmeter.cli._options import Convention, Json, Peaks, mended, written
from flopmeter.errors import ConfigError, FlopmeterError

if TYPE_CHECKING:
    from flopmeter.compare import Comparison


def command(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs' folders, run files or profiler traces; the first is the baseline.")
    ],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Exit with 1 when this is true of a run: 'mfu < 0.95 * baseline'. May be repeated."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the comparison as a page.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also the metrics that did not change.")] = False,
    json: Json = False,
    format: Annotated[
        Literal["text", "md"], typer.Option("--format", help="md: a Markdown table, for a pull request's comment.")
    ] = "text",
    peak_flop_per_s: Peaks = None,
    convention: Convention = None,
) -> None:
    """Compare runs with a baseline: metrics with confidence intervals, findings, settings.

    Example: flopmeter compare runs/before runs/after --fail-if "mfu < 0.95 * baseline"

    --fail-if knows mfu, hfu, step_time, step_time_median, step_time_p95,
    steps_per_second, tokens_per_second, samples_per_second, goodput,
    model_flop, data_wait_share and the other shares; numbers, + - * / and
    one comparison. baseline is the same metric of the first run,
    baseline.hfu a named one of it. What the noise of the steps may have made
    fails no run: the condition must hold for the change's whole interval.
    """
    from rich.console import Console

    from flopmeter.compare.condition import UnknownFigureError, parse_condition
    from flopmeter.compare.quantities import NAMES

    try:
        conditions = [parse_condition(text, NAMES) for text in fail_if or []]
    except ConfigError as error:
        raise typer.BadParameter(f"--fail-if: {error}") from None
    if len(runs) < 2:
        raise typer.BadParameter("give at least two runs: the first is the baseline")
    talk = Console(stderr=True)
    with talk.status("Reading the runs ..."):
        from flopmeter.compare import compare
        from flopmeter.traces import load_any

        loaded = [mended(load_any(run), peak_flop_per_s, convention) for run in runs]
        comparison = compare(loaded)
    verdicts, unknown = [], None
    for condition, place in product(conditions, range(1, len(loaded))):
        try:
            verdicts.append(condition.judge(comparison, place))
        except UnknownFigureError as error:
            said = f"--fail-if {condition.text!r} cannot be checked for {comparison.names[place]}: {error}"
            unknown = unknown or FlopmeterError(said)
    if json:
        gate = [structs.asdict(verdict) for verdict in verdicts]
        typer.echo(json_format.dumps(comparison.as_dict() | {"conditions": gate}, allow_nan=False))
    elif format == "md":
        from flopmeter.report._compare import comparison_markdown

        typer.echo(comparison_markdown(comparison, verdicts))
    else:
        _print(comparison, everything)
    if output is not None:
        from flopmeter.report._compare import comparison_document
        from flopmeter.report._model import timeline_of

        written("the page", comparison_document(comparison, [timeline_of(run) for run in loaded]), output)
        talk.print(f"Page: {output}", soft_wrap=True, markup=False, highlight=False)
    if unknown is not None:
        raise unknown
    failed = [verdict for verdict in verdicts if verdict.verdict == "fails"]
    for verdict in failed or verdicts:
        said = f"{verdict.condition} ({verdict.left:.6g} against {verdict.right:.6g})"
        if verdict.verdict == "fails":
            raise FlopmeterError(f"{verdict.run} fails: {said}")
        if verdict.verdict == "within noise":
            talk.print(f"{verdict.run}: {said}, within noise: not failed", soft_wrap=True, markup=False)


def _print(comparison: Comparison, everything: bool) -> None:
    from rich.text import Text

    from flopmeter.report._compare import BAD, GOOD, Cell, sections, sentences
    from flopmeter.report._terminal import grid_of, make_console
    from flopmeter.text import clean

    def told(cell: Cell) -> Text:
        style = "green" if cell.verdict in GOOD else "red" if cell.verdict in BAD else "dim"
        return Text.assemble(cell.value, (f"  {cell.told}".rstrip(), style))

    console = make_console()
    for text in sentences(comparison):
        console.print(Text(text, style="bold"))
    for section in sections(comparison):
        columns = (section.title, *(f"{clean(name, 60)}#" for name in comparison.names))
        rows = section.rows + (section.more if everything else ())
        console.print()
        console.print(grid_of(columns, ((label, *map(told, cells)) for label, _, cells in rows)))
        if section.more and not everything:
            console.print(Text(f"  {len(section.more)} more metrics with --all", style="dim"))
    for note in comparison.notes:
        console.print(Text(f"Note: {clean(note, 300)}."))
