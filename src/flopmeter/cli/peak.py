"""`flopmeter peak`: what is the peak of this device, who says so, and what does a measurement say?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flopmeter.cli._options import sweep, with_fix
from flopmeter.devices import (
    DTYPES,
    OVERRIDE_VARIABLE,
    Device,
    Peak,
    dtype_name,
    list_devices,
    normalise_dtype,
    peak_flops,
)
from flopmeter.devices.measure import Measurement
from flopmeter.devices.roof import Shape, throttling
from flopmeter.errors import ConfigError, UnknownDeviceError, refuse_old_torch
from flopmeter.text import amount, rate

_FIX = (
    f"flopmeter peak --list shows the names on file; {OVERRIDE_VARIABLE} in the environment states a peak, and "
    "--measure measures the device here"
)


def command(
    device: Annotated[
        str | None, typer.Option(help='A name as the driver prints it, or "cpu", "cuda:0". Default: the device here.')
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp64, fp32, tf32, bf16, fp16, fp8, fp4 or int8. Default: torch's own, fp32.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Sweep matmuls on the device here; needs torch.")] = False,
    like: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Sweep the products of this run in place of shapes that suit.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of the sweep.")] = 8.0,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the devices on file; a word after it filters.")
    ] = False,
    filter: Annotated[str, typer.Argument(help="With --list: part of a device's name.", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in FLOP/s and bytes/s.")] = False,
) -> None:
    """The dense peak of a device, its source and its caveats; --measure and --like add what matmuls reach here.

    Example: flopmeter peak --device "NVIDIA H100 80GB HBM3" --dtype bf16

    All that are on file: flopmeter peak --list h100
    """
    if filter and not list_all:
        raise typer.BadParameter(f"{filter!r}: a device is named with --device, or looked for with --list")
    if list_all:
        wanted = [d for d in list_devices() if any(filter.lower() in name.lower() for name in d.names)]
        if as_json:
            typer.echo(json.dumps([asdict(found) for found in wanted], indent=2))
        else:
            _show_devices(wanted)
        return
    from rich.console import Console

    if measure or like or device is None:
        refuse_old_torch()
    products = _products(like, dtype) if like else {}
    dtype = next(iter(products.values()), dtype)
    measurement = sweep(device, dtype, seconds, list(products)) if measure or like else None
    with Console(stderr=True).status("Looking the peak up ..."):  # asking torch for the device here takes seconds
        peak = _peak(device, dtype, measurement)
    if as_json:
        typer.echo(json.dumps(_as_dict(peak, measurement), indent=2))
    else:
        _show(peak, measurement)


def _products(path: Path, dtype: str | None) -> dict[Shape, str]:
    """The products of a run's last observed step in one dtype: that which is asked for, else that of most work."""
    from flopmeter.record import load_run

    found: dict[Shape, str] = {}
    wanted = None if dtype is None else normalise_dtype(dtype)
    for row in load_run(path).last("facts").get("products") or ():
        if (
            isinstance(row, list)
            and len(row) == 5
            and all(type(size) is int and 0 < size < 1 << 24 for size in row[1:])
        ):
            name = dtype_name(row[0])
            wanted = wanted or name
            if name == wanted or (name, wanted) == ("fp32", "tf32"):  # which is a way to multiply fp32
                found[row[1], row[2], row[3]] = wanted
    if not found:
        raise ConfigError(f"{path}: no observed step of that run noted its products{f' in {dtype}' if dtype else ''}")
    return found


def _peak(device: str | None, dtype: str | None, measurement: Measurement | None) -> Peak:
    """What is on file; for a device that is not, what was measured."""
    try:
        return peak_flops(device, dtype, may_initialise=True)
    except UnknownDeviceError as unknown:
        if measurement is None:
            raise with_fix(unknown, _FIX) from None
        return Peak(
            flop_per_s=measurement.best_flop_per_s,
            dtype=measurement.dtype,
            device=measurement.device,
            source="measured",
            note=f"what matmuls reach here, not a peak on file: {unknown}",
        )


def _as_dict(peak: Peak, measurement: Measurement | None) -> dict[str, Any]:
    names = ("device", "dtype", "flop_per_s", "source", "reference", "note", "memory_bytes_per_s")
    answer: dict[str, Any] = {name: getattr(peak, name) for name in names}
    if peak.derived_flop_per_s is not None:
        answer["derived"] = {"flop_per_s": peak.derived_flop_per_s}
    if measurement is not None:
        answer["measured"] = asdict(measurement)
    if peak.measured_flop_per_s is not None:
        answer.setdefault("measured", {})["kept_flop_per_s"] = peak.measured_flop_per_s
    return answer


def _show(peak: Peak, measurement: Measurement | None) -> None:
    """The number first, then what stands behind it."""
    typer.echo(f"{peak.device}, {peak.dtype}: {rate(peak.flop_per_s, 6)}")
    rows = [("source", f"{peak.source}: {peak.reference}" if peak.reference else peak.source)]
    if peak.derived_flop_per_s is not None:
        rows.append(("derived", rate(peak.derived_flop_per_s)))
    if peak.measured_flop_per_s is not None:
        rows.append(("measured", f"{rate(peak.measured_flop_per_s)}, the best so far on this machine"))
    if measurement is not None:
        shape, best = " x ".join(map(str, measurement.best_shape)), rate(measurement.best_flop_per_s)
        rows.append(("sweep", f"best {best} at {shape}, in {measurement.elapsed_s:.1f} s"))
        rows.append(("", f"typical {rate(measurement.typical_flop_per_s)}"))
        rows.append(("", measurement.note))
        rows += [
            (name, _state(state)) for name, state in (("before", measurement.before), ("after", measurement.after))
        ]
    if peak.memory_bytes_per_s is not None:
        rows.append(("memory", amount(peak.memory_bytes_per_s, "B/s", 4)))
    for name, text in [*rows, *([("note", peak.note)] if peak.note else [])]:
        if text:
            typer.echo(f"  {name:9}{text}")


def _state(state: Mapping[str, float]) -> str:
    """Clock, power cap and what holds the clock down; empty where the driver does not tell."""
    parts = [f"{state['clock_hz'] / 1e6:.0f} MHz"] if "clock_hz" in state else []
    parts += [f"power cap {state['power_limit_w']:.0f} W"] if "power_limit_w" in state else []
    held = throttling(state.get("throttle_reasons", 0.0))
    return ", ".join(parts + ([f"held down by {' and '.join(held)}"] if held else []))


def _show_devices(devices: Sequence[Device]) -> None:
    from flopmeter.report._terminal import grid_of, make_console

    console = make_console()
    console = console if console.is_terminal else make_console(width=140)
    dtypes = DTYPES if console.width >= 110 else ("fp32", "bf16", "fp8")

    def tera(value: float | None) -> str:
        return "" if value is None else f"{value / 1e12:.7g}"

    rows = [
        ("\n  ".join(d.names), *(tera(d.peak_flop_per_s.get(dtype)) for dtype in dtypes), tera(d.memory_bytes_per_s))
        for d in devices
    ]
    console.print("Dense peak in TFLOP/s, per device as torch counts devices; memory in TB/s")
    console.print(grid_of(("device", *(f"{name}#" for name in (*dtypes, "TB/s"))), rows, 80))
    if dtypes != DTYPES:
        console.print("a wider window, or --json, shows every dtype")
