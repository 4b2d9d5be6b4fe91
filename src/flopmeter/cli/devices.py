"""Which devices have a peak on file, and what is it?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from flopmeter.devices import DTYPES, Device, list_devices


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, in FLOP/s and bytes/s.")] = False,
) -> None:
    """List the devices whose peak is on file: dense TFLOP/s by dtype, memory in TB/s.

    Example: flopmeter devices --json
    """
    if as_json:
        typer.echo(json.dumps([asdict(device) for device in list_devices()], indent=2))
        return
    _show(list_devices())


def _show(devices: tuple[Device, ...]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    width = console.width if console.is_terminal else 140
    dtypes = DTYPES if width >= 120 else ("fp32", "bf16", "fp8")
    hint = "" if dtypes == DTYPES else "a wider window, or --json, shows every dtype"
    table = Table(title="Dense peak in TFLOP/s, per device as torch counts devices", caption=hint, box=box.SIMPLE)
    table.add_column("device", overflow="fold")
    for head in (*dtypes, "TB/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for device in devices:
        peaks = (_tera(device.peak_flop_per_s.get(dtype)) for dtype in dtypes)
        table.add_row("\n".join(device.names), *peaks, _tera(device.memory_bytes_per_s))
    Console(width=width).print(table)


def _tera(value: float | None) -> str:
    return "" if value is None else f"{value / 1e12:.7g}"
