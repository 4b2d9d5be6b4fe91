"""`flopmeter report`: where did a run's time go, what is to be fixed first, and what would it bring?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopmeter.cli._options import Convention, Dtype, Json, Peaks, mended, written
from flopmeter.errors import RecordError
from flopmeter.schema import RUN_FILE

if TYPE_CHECKING:
    from flopmeter.record import Run

TRACES = ("*.json", "*.json.gz")
FORMATS = ("html", "md", "json", "csv", "jsonl", "training_log")


def command(
    run: Annotated[
        list[Path] | None,
        typer.Argument(help="A run's folder or file; a profiler trace, one for each rank, or their folder."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write. Default: report.html beside the run file; for a trace NAME-report.html here.",
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    window: Annotated[
        str | None, typer.Option(help="Only the steps numbered A up to B, as A:B; either may be left out.")
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(help="Say what a finding means and how it is known, such as data_stall; all lists them."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="html, md or json; csv, jsonl: a line for every step; training_log: every step in one JSON document. "
            "Without -o all but html and training_log go to stdout.",
        ),
    ] = None,
    as_json: Json = False,
    peak_flop_per_s: Peaks = None,
    convention: Convention = None,
    dtype: Dtype = None,
) -> None:
    """What the MFU of a run is, what to fix first and what it would bring; also as a page that works offline.

    Example: flopmeter report runs/demo --open

    Of a trace: flopmeter report rank0.json.gz rank1.json.gz
    """
    if as_json and format not in (None, "json"):
        raise typer.BadParameter(f"--json and --format {format} contradict each other: give one of them")
    if explain is not None:
        _explain(explain, as_json)
        return
    if not run:
        raise typer.BadParameter("name a run or a trace, such as runs/demo")
    from flopmeter.report import place_of, render, report_of

    format = "json" if as_json else format
    stated = None if output is None or format in FORMATS[3:] else place_of(output, format)
    if format is not None and format not in FORMATS:
        raise typer.BadParameter(f"there is no report format {format!r}; there are: {', '.join(FORMATS)}")
    from rich.console import Console

    from flopmeter.report._terminal import make_console, show

    talk = Console(stderr=True)
    with talk.status("Reading the run ..."):
        loaded = mended(_load(run), peak_flop_per_s, convention, dtype)
        start, stop = _positions(loaded, window)
    if format in FORMATS[3:]:
        _write_steps(loaded, format, output)
        return
    with talk.status("Making the report ..."):
        report = report_of(loaded, start, stop)
        target, kind = stated or place_of(_default_place(loaded, report.about.window), format)
        text = render(report, kind)
    if output is None and kind != "html":
        typer.echo(text)
        return
    if kind == "html":  # also where the page cannot be written
        show(report, make_console())
        typer.echo("")
    written("the report", text, target)
    typer.echo(f"Report: {target}")
    if open_page:
        typer.launch(target.absolute().as_uri())


def _explain(name: str, as_json: bool) -> None:
    from flopmeter.diagnosis import RULES, explain

    texts = {each: explain(each) for each in (RULES if name == "all" else [name])}
    lines = [f"{each:22} {text.partition(chr(10))[0]}" for each, text in texts.items()]
    typer.echo(json.dumps(texts) if as_json else "\n".join(lines) if name == "all" else f"{name}\n\n{texts[name]}")


def _load(paths: list[Path]) -> Run:
    from flopmeter.traces import load_any, load_trace

    first = paths[0]
    if len(paths) == 1 and first.is_dir() and not first.joinpath(RUN_FILE).exists():
        files = sorted(file for pattern in TRACES for file in first.glob(pattern))
        return load_trace(files).as_run() if files else load_any(first)
    return load_any(first) if len(paths) == 1 else load_trace(paths).as_run()


def _positions(run: Run, window: str | None) -> tuple[int | None, int | None]:
    """From step numbers to positions; numbers that a restart repeated are all in it."""
    if window is None:
        return None, None
    first, colon, stop = (text.strip() for text in window.partition(":"))
    try:
        low = int(first) if first else -math.inf
        high = int(stop) if stop else math.inf
    except ValueError:
        colon = ""
    if not colon:
        raise typer.BadParameter(f"--window: {window!r} is not of the form A:B, such as 100:500")
    inside = [place for place, number in enumerate(run.step) if low <= number < high]
    if not inside:
        here = f"{min(run.step)} to {max(run.step)}" if len(run) else "none"
        raise typer.BadParameter(f"--window: the run has no steps in {window}; it has {here}")
    return inside[0], inside[-1] + 1


def _write_steps(run: Run, format: str, output: Path | None) -> None:
    from flopmeter.record import steps_as_text, write_training_log

    if format == "training_log":
        target = output or run.path.with_name("training_log.json")
        try:
            write_training_log(run, target)
        except OSError as error:
            raise RecordError(f"cannot write the training log to {target}: {error.strerror}") from None
        typer.echo(f"Training log: {target}")
    elif output is not None:
        written("the steps", "".join(f"{line}\n" for line in steps_as_text(run, format)), output)
    else:
        for line in steps_as_text(run, format):
            typer.echo(line)


def _default_place(run: Run, window: tuple[int, int] | None) -> Path:
    """Beside the run file; a trace may lie among other people's data, and beside others that want a report too."""
    part = f"-{window[0]}-{window[1]}" if window else ""
    if run.header.mode != "trace":
        return run.path.with_name(f"report{part}.html")
    name = run.path.name.removesuffix(".gz").removesuffix(".json")
    return Path(f"{name}-report{part}.html")
