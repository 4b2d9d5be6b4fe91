"""`flopmeter doctor`: what works on this machine, what is missing or off, and why?"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopmeter.cli._options import Json
from flopmeter.columns import read_toml
from flopmeter.errors import refuse_old_torch

if TYPE_CHECKING:
    from flopmeter.doctor import Result

_COLOURS = {"ok": "green", "warning": "yellow", "missing": "yellow", "failed": "red"}


def command(
    only: Annotated[list[str] | None, typer.Option(help="Make only this check. May be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Check in some seconds what works here, what is missing or off, and why. The exit code is 1 if something failed.

    Example: flopmeter doctor --json
    """
    from rich.console import Console
    from rich.text import Text

    from flopmeter.doctor import examine

    refuse_old_torch()
    console = Console(stderr=True)
    results = []
    with console.status("Checking this machine ...") as status:
        for result in examine(only or (), on_start=lambda name: status.update(f"Checking {name} ...")):
            results.append(result)
            if console.is_terminal and not as_json:
                console.print(f"{result.name}: {result.standing}", highlight=False)
    if as_json:
        typer.echo(json.dumps(as_dict(results)))
    else:
        from flopmeter.report._terminal import grid_of, make_console

        rows = [(r.name, Text(r.standing, style=_COLOURS[r.standing]), r.says) for r in results]
        names = ", ".join(touched["name"] for touched in touches() if touched["when"] == "a run")
        shown = make_console()
        shown.print(grid_of(("check", "standing", "why"), rows))
        shown.print(f"\nWhile a run is on, these are hooked or replaced: {names}.")
        shown.print("All of it, when and why: docs/what_it_touches.md; monitoring.patches: false replaces nothing.")
    if any(result.standing == "failed" for result in results):
        raise typer.Exit(1)


def touches() -> list[dict[str, str]]:
    """What of the user's process is hooked, replaced or added to: `name`, `when`, `why`, `until`."""
    rows = read_toml(Path(__file__).parents[1] / "touched.toml")["touched"]
    return [dict(zip(("name", "when", "why", "until"), row, strict=True)) for row in rows]


def as_dict(results: list[Result]) -> dict[str, Any]:
    """Everything that was found, with the machine that it was found on."""
    from flopmeter import __version__

    return {
        "flopmeter": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "elapsed_s": sum(result.elapsed_s for result in results),
        "has_failed": any(result.standing == "failed" for result in results),
        "checks": [asdict(result) for result in results],
        "touches": touches(),
    }
