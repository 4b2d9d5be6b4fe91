"""`flopmeter demo`: see it work, on this machine, in half a minute."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopmeter import text
from flopmeter.cli._choice import choose
from flopmeter.demo import MIN_STEPS, PLANTS, WORKLOADS, Plant, Planted, find_plant, run_demo
from flopmeter.devices import measure_peak, peak_flops
from flopmeter.errors import FlopmeterError, MissingLibraryError, refuse_old_torch
from flopmeter.record import load_run
from flopmeter.report import REPORT_FILE
from flopmeter.schema import RUN_FILE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flopmeter.demo.training import DemoResult

FOLDER = Path("runs/demo")
MEASURE_S = 4.0
_ROWS = (
    ("MFU", "perf/mfu", text.utilisation),
    ("HFU", "perf/hfu", text.utilisation),
    ("Step time, median", "step_time_median_s", text.seconds),
    ("Step time, 95th percentile", "step_time_p95_s", text.seconds),
    ("Tokens per second", "perf/tokens_per_second", text.plain),
    ("Data wait", "perf/data_wait_share", text.percent),
    ("Forward", "perf/forward_share", text.percent),
    ("Backward", "perf/backward_share", text.percent),
    ("Optimizer", "perf/optimizer_share", text.percent),
)


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
    workload: Annotated[str, typer.Option(help="What to train: gpt, conv or hf (a Llama of transformers).")] = "gpt",
    plant: Annotated[
        list[str] | None,
        typer.Option("--plant", help="Plant a fault, to see it found; NAME or NAME=SIZE. May be repeated."),
    ] = None,
    list_plants: Annotated[bool, typer.Option("--list-plants", help="Show the faults that can be planted.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a small model on synthetic data, watch its MFU, and print a summary. No account, no network.

    With --plant something is wrong with the run, and `flopmeter diagnose` should find it.

    Example: flopmeter demo --seconds 30 --plant slow_disk=0.5
    """
    chosen = choose("--workload", workload, WORKLOADS)
    for fault in plant or ():
        choose("--plant", fault.partition("=")[0], [plant.name for plant in PLANTS])
    if list_plants:
        _show_plants(PLANTS, json)
        return
    if find_spec("torch") is None:
        raise MissingLibraryError("torch", needed_for="flopmeter demo", extra="torch")
    refuse_old_torch()
    from rich.console import Console

    talk = Console(stderr=True, quiet=json)
    with talk.status("Loading torch ..."):
        from flopmeter.demo.training import pick_device
    planted = [_planted(fault) for fault in plant or ()]
    if pick_device().type == "cpu":
        _measure_cpu_once(talk)
    faults = "".join(f" with {p.plant.name} ({p.size:.3g} {p.plant.size})" for p in planted)
    folder = output_dir or _free_folder()
    talk.print(f"Training {workload}{faults} for {seconds:.0f} s (at least {MIN_STEPS} steps), into {folder} ...")
    config = {"monitoring": {"sinks": [] if json else ["console"]}}
    result = run_demo(folder, seconds, config, workload=chosen, planted=planted)
    if json:
        answer = {"run": str(result.run_path), "num_steps": result.num_steps, "final_loss": result.final_loss}
        answer["planted"] = {p.plant.name: p.size for p in planted}
        typer.echo(json_format.dumps(answer | {"summary": result.summary}))
        return
    console = Console()
    console.print(_table(result))
    console.print(f"Run file: {result.run_path}", soft_wrap=True)
    report_path = result.run_path.with_name(REPORT_FILE)
    if report_path.exists():
        console.print(f"Report: {report_path}", soft_wrap=True)
    console.print(f"Next: flopmeter diagnose {result.run_path.parent}", soft_wrap=True)


def _free_folder() -> Path:
    """The first of runs/demo, runs/demo-2, ... without a run: a second one in the same file would be its restart."""
    names = chain([FOLDER.name], (f"{FOLDER.name}-{number}" for number in count(2)))
    return next(folder for name in names if not (folder := FOLDER.with_name(name)).joinpath(RUN_FILE).exists())


def _planted(fault: str) -> Planted:
    """A fault as it was asked for; without a size, one in the middle of its range."""
    name, _, size = fault.partition("=")
    plant = find_plant(name)
    low, high = plant.sizes
    try:
        return Planted(plant, float(size) if size else (low + high) / 2)
    except ValueError:
        raise typer.BadParameter(f"the size of {name} is a number ({plant.size}), not {size!r}") from None


def _show_plants(plants: Iterable[Plant], json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    if json:
        keys = ("name", "what", "size", "sizes", "rule", "workloads")
        typer.echo(json_format.dumps([{key: getattr(plant, key) for key in keys} for plant in plants]))
        return
    table = Table(title="Faults that can be planted", title_justify="left")
    for heading in ("Name", "What is wrong", "Size"):
        table.add_column(heading, no_wrap=heading == "Name")
    for plant in plants:
        low, high = plant.sizes
        table.add_row(plant.name, plant.what, f"{low:g} to {high:g} {plant.size}" if low < high else "")
    Console().print(table)


def _measure_cpu_once(talk: Console) -> None:
    """A CPU's derived peak is a guess at its clock: measure it too, once per machine."""
    from rich.progress import Progress

    if peak_flops("cpu", "fp32").measured_flop_per_s is not None:
        return
    with Progress(console=talk, transient=True) as bar:
        task = bar.add_task("Measuring this CPU's peak (once)", total=None)
        try:
            measure_peak("cpu", "fp32", MEASURE_S, lambda done, total: bar.update(task, completed=done, total=total))
        except FlopmeterError as error:
            talk.print(f"The peak could not be measured: {error}")


def _table(result: DemoResult) -> Table:
    from rich.table import Table

    table = Table(title="Summary of the steady steps", show_header=False, title_justify="left")
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row("Steps", str(result.num_steps))
    table.add_row("Loss at the end", f"{result.final_loss:.4f}")
    for label, key, write in _ROWS:
        table.add_row(label, write(result.summary.get(key)))
    for dtype, peak in load_run(result.run_path).peaks.items():
        table.add_row("Peak", f"{text.rate(peak['flop_per_s'], 3)} {dtype} ({peak['source']})")
    return table
