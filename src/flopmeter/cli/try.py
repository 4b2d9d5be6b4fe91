"""`flopmeter try`: which changes make this program faster, measured before anyone edits a line."""  # noqa: N999

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from flopmeter.errors import ConfigError, MissingLibraryError, RecordError, refuse_old_torch

if TYPE_CHECKING:
    from rich.console import Console

    from flopmeter.trials import Tried

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""Whatever follows the program's name, or -m, belongs to the program."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def command(
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT|-m MODULE [ARGS]...", help="What python would be given."),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Folder for the record and the result; default runs/try-NAME-TIME."),
    ] = None,
    budget: Annotated[str, typer.Option(help="How long all of it may take, such as 90s, 10m or 1h.")] = "10m",
    only: Annotated[str | None, typer.Option(help="Try just these, such as bf16,compile.")] = None,
    takes_all: Annotated[bool, typer.Option("--all", help="Try whatever fits, not just the likeliest three.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often they take turns at most; 1 for a quick look.")] = 6,
    candidates: Annotated[
        Path | None, typer.Option(help="A file of your own: each public function in it is a change to try.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show what can be tried, and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try changes on a training script without an edit: what each brings, whether the loss stays, the line to write.

    Example: flopmeter try --budget 5m train.py --lr 3e-4

    Under torchrun, on one machine: torchrun ... -m flopmeter try train.py

    The program runs again and again, for a few steps each time: in a copy of this folder (up to 200 MB, else in place),
    with W&B and other loggers off, and torch.save, safetensors, save_pretrained and torch.distributed.checkpoint
    writing into the trial's folder. Whether it is safe to repeat otherwise (it deletes, uploads, or talks to a
    service) is yours to judge.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from flopmeter.record import load_run
    from flopmeter.report import REPORT_FILE, leave_report
    from flopmeter.text import seconds
    from flopmeter.trials import TRIED_FILE
    from flopmeter.trials.candidates import load_candidates
    from flopmeter.trials.processes import Launcher, follow
    from flopmeter.trials.rounds import SAFETY, Trials

    file = str(candidates.absolute()) if candidates is not None else ""
    if show_list:
        _show_list(load_candidates(file).values(), as_json)
        return
    words = program or []
    if not words or words == ["-m"] or words[0] == "-":
        raise typer.BadParameter("there is nothing to try: give a script, or -m and a module's name")
    if words[0].startswith("-") and words[0] != "-m":
        raise typer.BadParameter(f"No such option: {words[0]}")
    if words[0] != "-m" and not Path(words[0]).exists():
        raise ConfigError(f"there is no file {words[0]}")
    budget_s = _seconds(budget)
    _need_torch()
    signal.signal(signal.SIGTERM, _interrupt)  # from a launcher: ends what runs, and leaves a result
    if os.environ.get("RANK", "0") != "0":
        follow()
        return
    name = words[1].rpartition(".")[2] if words[0] == "-m" else Path(words[0]).stem
    folder = output_dir or Path("runs") / f"try-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    talk = Console(stderr=True, highlight=False, markup=False)
    talk.print(SAFETY, soft_wrap=True)
    ahead = TextColumn(f"of at most {seconds(budget_s)}:")
    columns = (BarColumn(20), TimeElapsedColumn(), ahead, TextColumn("{task.description}", markup=False))
    is_stopped = False
    with Progress(*columns, console=talk, transient=True) as progress:
        bar = progress.add_task("", total=1.0)
        trials = Trials(
            Launcher(words, folder, file),
            budget_s,
            [name.strip() for name in (only or "").split(",") if name.strip()],
            takes_all,
            rounds,
            say=lambda what, done: progress.update(bar, description=what, completed=done),
            announce=lambda line: progress.console.print(line, soft_wrap=True),
        )
        try:
            trials.run()
        except KeyboardInterrupt:
            is_stopped = True
            if trials.tried.step_s is None:
                talk.print("flopmeter: stopped before the unchanged program was measured: nothing was tried")
                raise typer.Exit(130) from None
    with suppress(RecordError):  # a program that left no record
        leave_report(load_run(folder))
    if as_json:
        typer.echo(msgspec.json.encode(trials.tried))
    else:
        show(trials.tried, Console(highlight=False, markup=False, emoji=False))
        typer.echo(f"Result: {folder / TRIED_FILE}; report: {folder / REPORT_FILE}")
    if is_stopped:
        raise typer.Exit(130)


LOSSES = {"same": "bit for bit", "rounding": "within rounding", "not comparable": "another batch"}
"""How the table says what became of the losses, where in other words than the result's."""


def show(tried: Tried, console: Console) -> None:
    """Table, headline, what to write, and what to know."""
    from rich.table import Table

    from flopmeter.text import amount, seconds, sentence, signed
    from flopmeter.trials.rounds import gain_text

    memory = amount(tried.memory_bytes, "B") if tried.memory_bytes else "unknown"
    console.print(
        f"Unchanged: {seconds(tried.step_s)} a step, {seconds(tried.startup_s)} to the first ones, memory {memory}"
    )
    table = Table(box=None, pad_edge=False)
    headings = ("Change", "Predicted", "Measured", "Losses", "Memory", *(("Start-up",) if console.width > 100 else ()))
    for heading in headings:
        table.add_column(heading, no_wrap=heading not in ("Change", "Memory") or len(headings) > 5)
    rows = [*tried.rows, *([tried.together] if tried.together else [])]
    for row in rows:
        name, measured = " + ".join(row.names), gain_text(row.gain) if row.gain else row.outcome
        losses = LOSSES.get(row.losses, row.losses) if row.gain else ""
        startup = seconds(row.startup_s) if row.startup_s else ""
        predicted = signed(row.predicted.expected) if row.predicted else "-"
        table.add_row(*(name, predicted, measured, losses, row.memory_text, startup)[: len(headings)])
    console.print(table)
    console.print(sentence(f"tried: {tried.headline}"), style="bold")
    for row in rows:
        name = " + ".join(row.names)
        if row.reason:
            console.print(f"{name} {row.outcome}: {row.reason}", soft_wrap=True)
        if row.losses == "different":
            console.print(f"{name}: other results than the unchanged program's: {row.losses_text}", soft_wrap=True)
        if row.outcome == "faster" and row is not tried.together:
            console.print(f"{name}: write  {row.code}", soft_wrap=True)
            console.print(
                f"    watch out: {row.watch_out}" if row.watch_out else "",
                soft_wrap=True,
                end="\n" * bool(row.watch_out),
            )
    for heading, pairs in (("Not tried", tried.not_tried.items()), ("Note", (("", note) for note in tried.notes))):
        for name, text in pairs:
            console.print(f"{heading}: {name}{': ' if name else ''}{text}", soft_wrap=True)


def _show_list(rows: Any, as_json: bool) -> None:
    if as_json:
        keys = ("name", "what", "is_switched", "rules", "code", "watch_out")
        typer.echo(json.dumps([{key: getattr(row, key) for key in keys} for row in rows]))
        return
    width = max(len(row.name) for row in rows)
    for row in rows:
        typer.echo(f"{row.name:{width}}  {row.what}: {row.code.get('', '')}")


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    try:
        value = float(number) * UNITS[unit]
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise typer.BadParameter(f"--budget: {text!r} is no time such as 90s, 10m or 1h")
    return value


def _need_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingLibraryError("torch", needed_for="flopmeter try", extra="torch")
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ConfigError("python's options -E, -I and -S keep flopmeter out of the program: leave them away")
    refuse_old_torch()


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
