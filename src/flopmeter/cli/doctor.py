"""`flopmeter doctor`: what works on this machine, what falls back, and why?"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopmeter.errors import refuse_old_torch
from flopmeter.schema import TOUCHED

if TYPE_CHECKING:
    from rich.table import Table

    from flopmeter.doctor import Result

_COLOURS = {"works": "green", "falls back": "yellow", "missing": "yellow", "not checked": "dim", "broken": "red"}


def command(
    only: Annotated[list[str] | None, typer.Option(help="Make only this check. May be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check in at most a minute what works here, what falls back, and why. The exit code is 1 if something is broken.

    Example: flopmeter doctor --json
    """
    from rich.console import Console

    from flopmeter.doctor import LIMIT_S, examine

    refuse_old_torch()
    console = Console(stderr=True)
    results = []
    with console.status(f"Checking this machine (at most {LIMIT_S:.0f} s) ...") as status:
        for result in examine(only or (), on_start=lambda name: status.update(f"Checking {name} ...")):
            results.append(result)
            if console.is_terminal and not as_json:
                console.print(f"{result.name}: {result.standing}", highlight=False)
    if as_json:
        typer.echo(json.dumps(as_dict(results)))
    else:
        shown = Console(highlight=False, emoji=False)
        shown.print(table(results))
        names = ", ".join(touched.name for touched in TOUCHED if touched.when == "a run")
        shown.print(f"\nWhile a run is on, these are hooked or replaced: {names}.", markup=False)
        shown.print("All of it, when and why: docs/what_it_touches.md; monitoring.patches: false replaces nothing.")
    if any(result.standing == "broken" for result in results):
        raise typer.Exit(1)


def as_dict(results: list[Result]) -> dict[str, Any]:
    """Everything that was found, with the machine that it was found on."""
    from flopmeter import __version__

    return {
        "flopmeter": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "elapsed_s": sum(result.elapsed_s for result in results),
        "is_broken": any(result.standing == "broken" for result in results),
        "checks": [asdict(result) for result in results],
        "touches": [touched._asdict() for touched in TOUCHED],
    }


def table(results: list[Result]) -> Table:
    """One row per check."""
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False)
    for heading in ("check", "standing", "why"):
        rows.add_column(heading, overflow="fold", no_wrap=heading != "why")
    for result in results:
        rows.add_row(result.name, Text(result.standing, style=_COLOURS[result.standing]), Text(result.says))
    return rows
