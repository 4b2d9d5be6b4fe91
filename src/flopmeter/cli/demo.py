"""`flopmeter demo`: see it work, on this machine, in half a minute."""

from __future__ import annotations

import json as json_format
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopmeter.devices import measure_peak, peak_flops
from flopmeter.errors import FlopmeterError, MissingLibraryError
from flopmeter.record import load_run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flopmeter.demo import DemoResult

MEASURE_S = 4.0
_ROWS = (
    ("MFU", "perf/mfu", "{:.1f} %", 100.0),
    ("HFU", "perf/hfu", "{:.1f} %", 100.0),
    ("Step time, median", "step_time_median_s", "{:.1f} ms", 1e3),
    ("Step time, 95th percentile", "step_time_p95_s", "{:.1f} ms", 1e3),
    ("Tokens per second", "perf/tokens_per_second", "{:,.0f}", 1.0),
    ("Data wait", "perf/data_wait_share", "{:.1f} %", 100.0),
    ("Forward", "perf/forward_share", "{:.1f} %", 100.0),
    ("Backward", "perf/backward_share", "{:.1f} %", 100.0),
    ("Optimizer", "perf/optimizer_share", "{:.1f} %", 100.0),
)


def command(
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Folder for the run file.")] = Path(
        "runs/demo"
    ),
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long to train.")] = 30.0,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a small GPT on synthetic text, watch its MFU, and print a summary. No account, no network.

    Example:  flopmeter demo --seconds 30
    """
    if find_spec("torch") is None:
        raise MissingLibraryError("torch", needed_for="flopmeter demo", extra="torch")
    from rich.console import Console

    talk = Console(stderr=True, quiet=json)
    with talk.status("Loading torch ..."):
        from flopmeter.demo import pick_device, run_demo
    if pick_device().type == "cpu":
        _measure_cpu_once(talk)
    talk.print(f"Training a small GPT for {seconds:.0f} s ...")
    result = run_demo(output_dir, seconds, {"monitoring": {"sinks": [] if json else ["console"]}})
    if json:
        answer = {"run": str(result.run_path), "num_steps": result.num_steps, "final_loss": result.final_loss}
        typer.echo(json_format.dumps(answer | {"summary": result.summary}))
        return
    console = Console()
    console.print(_table(result))
    console.print(f"Run file: {result.run_path}", soft_wrap=True)


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
    for label, key, pattern, scale in _ROWS:
        value = result.summary.get(key)
        table.add_row(label, "unknown" if value is None else pattern.format(value * scale))
    for event in load_run(result.run_path).events:
        if event.get("event") == "peak":
            table.add_row("Peak", f"{event['flop_per_s'] / 1e12:.3g} TFLOP/s {event['dtype']} ({event['source']})")
    return table
