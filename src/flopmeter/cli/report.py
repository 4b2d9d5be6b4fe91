"""`flopmeter report`: one page about a run, to look at and to send on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopmeter.errors import RecordError
from flopmeter.report import REPORT_FILE, check_format, place_of, render_facts, write_text

if TYPE_CHECKING:
    from flopmeter.record import Run

TRAINING_LOG = "training_log"


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder, its run file, or a profiler trace.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write. Default: report.html beside the run file; for a trace NAME-report.html here.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="html, md, json or txt; without -o the last three go to stdout. training_log: every step as one JSON "
            "document, training_log.json beside the run file.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: the same as --format json.")] = False,
) -> None:
    """Write a run's report as one HTML page that works offline; on a terminal, print its summary too.

    Example: flopmeter report runs/demo -o report.html
    """
    if as_json and format not in (None, "json"):
        raise typer.BadParameter(f"--json and --format {format} contradict each other: give one of them")
    format = "json" if as_json else format
    if format == TRAINING_LOG:
        _write_training_log(run, output)
        return
    if format is not None:
        check_format(format)
    goes_to_stdout = output is None and format not in (None, "html")
    stated = None if output is None else place_of(output, format)
    from rich.console import Console

    from flopmeter.report._facts import facts_of
    from flopmeter.traces import load_any

    talk = Console(stderr=True)
    with talk.status("Reading the run ..."):
        loaded = load_any(run)
    target, kind = stated or place_of(_default_place(loaded), format)
    with talk.status("Making the report ..."):
        facts = facts_of(loaded)
        text = render_facts(facts, kind)
    if goes_to_stdout:
        typer.echo(text)
        return
    _write(text, target)
    if sys.stdout.isatty():
        from flopmeter.report._terminal import show

        console = Console(markup=False, highlight=False, emoji=False)
        show(facts, console)
        console.print()
    typer.echo(f"Report: {target}")


def _write_training_log(path: Path, output: Path | None) -> None:
    from flopmeter.record import load_run, write_training_log

    run = load_run(path)
    target = output or run.path.with_name(f"{TRAINING_LOG}.json")
    try:
        write_training_log(run, target)
    except OSError as error:
        raise RecordError(f"cannot write the training log to {target}: {error.strerror}") from None
    typer.echo(f"Training log: {target}")


def _default_place(run: Run) -> Path:
    """Beside the run file; a trace may lie among other people's data, and beside others that want a report too."""
    if run.header.mode != "trace":
        return run.path.parent
    name = run.path.name.removesuffix(".gz").removesuffix(".json")
    return Path(f"{name}-{REPORT_FILE}")


def _write(text: str, target: Path) -> None:
    try:
        write_text(text, target)
    except OSError as error:
        raise RecordError(f"cannot write the report to {target}: {error.strerror}") from None
