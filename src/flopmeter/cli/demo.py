"""`flopmeter demo`: see it work, on this machine, in half a minute."""

from __future__ import annotations

import json as json_format
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Annotated

import typer

from flopmeter.cli._options import Json, choose, sweep
from flopmeter.devices import peak_flops
from flopmeter.errors import FlopmeterError, MissingLibraryError, refuse_old_torch
from flopmeter.record import load_run
from flopmeter.report import REPORT_FILE
from flopmeter.schema import RUN_FILE

FOLDER = Path("runs/demo")
MEASURE_S = 4.0
FAULTS = {
    "none": "a healthy run",
    "slow_disk": "each sample takes 8 ms to read",
    "tiny_batch": "one short sample a step",
    "padding": "half of each sample is padding",
}


def command(
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            "-o",
            help="Folder for the run file and the report. Default: runs/demo, else runs/demo-2, ...",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="How long to train; ten steps are done in any case.")
    ] = 30.0,
    fault: Annotated[
        str, typer.Option(help="What is wrong with the run: slow_disk, tiny_batch, padding, or none.")
    ] = "none",
    json: Json = False,
) -> None:
    """Train a small GPT on synthetic text, watch its MFU, and print a summary. No account, no network.

    With --fault something is wrong with the run, and the report should find it.

    Example: flopmeter demo --fault slow_disk
    """
    fault = choose("--fault", fault, FAULTS)
    if find_spec("torch") is None:
        raise MissingLibraryError("torch", needed_for="flopmeter demo", extra="torch")
    refuse_old_torch()
    from rich.console import Console

    talk = Console(stderr=True, quiet=json)
    with talk.status("Loading torch ..."):
        from flopmeter.demo import MIN_STEPS, pick_device, train
    if pick_device().type == "cpu" and peak_flops("cpu", "fp32").measured_flop_per_s is None:
        # A CPU's derived peak is a guess at its clock: it is measured too, once per machine.
        with suppress(FlopmeterError):
            sweep("cpu", "fp32", MEASURE_S)
    # The first of runs/demo, runs/demo-2, ... without a run: a second one in the same file would be its restart.
    names = chain([FOLDER.name], (f"{FOLDER.name}-{number}" for number in count(2)))
    folder = output_dir or next(f for name in names if not (f := FOLDER.with_name(name)).joinpath(RUN_FILE).exists())
    talk.print(f"Training a small GPT ({FAULTS[fault]}) for {seconds:.0f} s, at least {MIN_STEPS} steps, in {folder}")
    run_path = train(folder, seconds, fault, {"monitoring": {"sinks": [] if json else ["console"]}})
    run = load_run(run_path)
    if json:
        answer = {"run": str(run_path), "num_steps": len(run), "fault": fault, "summary": run.summary}
        typer.echo(json_format.dumps(answer))
        return
    from flopmeter.report import report_of
    from flopmeter.report._terminal import make_console, show

    show(report_of(run), make_console())
    typer.echo(f"\nRun file: {run_path}\nReport: {run_path.with_name(REPORT_FILE)}")
