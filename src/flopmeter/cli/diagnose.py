"""`flopmeter diagnose`: why is this run's MFU not higher, and what would each cure bring?"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopmeter.cli._diagnosis import plain, show_diagnosis

if TYPE_CHECKING:
    from flopmeter.record import Run


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder, its run file, or a profiler trace.")],
    window: Annotated[
        str | None, typer.Option(help="Only the steps numbered A up to B, as A:B; either may be left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say where a run's time went and why its MFU is not higher: causes with evidence, cures and predicted gains.

    Example: flopmeter diagnose runs/demo --window 100:500
    """
    from rich.console import Console

    from flopmeter.diagnosis import diagnose
    from flopmeter.traces import load_any

    with Console(stderr=True).status("Reading the run ..."):
        loaded = load_any(run)
        diagnosis = diagnose(loaded, *_positions(loaded, window))
    if as_json:
        typer.echo(json.dumps(plain(asdict(diagnosis)), allow_nan=False))
    else:
        show_diagnosis(diagnosis, Console(markup=False, highlight=False, emoji=False))


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
