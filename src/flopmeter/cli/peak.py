"""What is the peak of this device, who says so, and what does a measurement say?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from flopmeter.cli._peak import with_cure
from flopmeter.devices import Measurement, Peak, measure_peak, peak_flops
from flopmeter.devices.table import OVERRIDE_VARIABLE
from flopmeter.errors import UnknownDeviceError, refuse_old_torch
from flopmeter.text import amount, rate

_CURE = (
    f"flopmeter devices lists the names on file; {OVERRIDE_VARIABLE} in the environment states a peak, and --measure "
    "measures the device here"
)


def command(
    device: Annotated[
        str | None, typer.Option(help='A name as the driver prints it, or "cpu", "cuda:0". Default: the device here.')
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp64, fp32, tf32, bf16, fp16, fp8, fp4 or int8. Default: torch's own, fp32.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Sweep matmuls on the device here; needs torch.")] = False,
    budget_s: Annotated[float, typer.Option(min=0.1, help="Length of the sweep in seconds.")] = 8.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, in FLOP/s and bytes/s.")] = False,
) -> None:
    """Print the dense peak of a device, its source and its caveats; --measure adds what matmuls reach here.

    Example: flopmeter peak --device "NVIDIA H100 80GB HBM3" --dtype bf16 --json
    """
    from rich.console import Console

    if measure or device is None:
        refuse_old_torch()
    measurement = _sweep(device, dtype, budget_s) if measure else None
    with Console(stderr=True).status("Looking the peak up ..."):  # asking torch for the device here takes seconds
        peak = _peak(device, dtype, measurement)
    if as_json:
        typer.echo(json.dumps(_as_dict(peak, measurement), indent=2))
    else:
        _show(peak, measurement)


def _sweep(device: str | None, dtype: str | None, budget_s: float) -> Measurement:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring matmuls")
        return measure_peak(
            device, dtype, budget_s, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _peak(device: str | None, dtype: str | None, measurement: Measurement | None) -> Peak:
    """What is on file; for a device that is not, what was measured."""
    try:
        return peak_flops(device, dtype, may_initialise=True)
    except UnknownDeviceError as unknown:
        if measurement is None:
            raise with_cure(unknown, _CURE) from None
        return Peak(
            flop_per_s=measurement.best_flop_per_s,
            dtype=measurement.dtype,
            device=measurement.device,
            source="measured",
            note=f"what matmuls reach here, not a peak on file: {unknown}",
        )


def _as_dict(peak: Peak, measurement: Measurement | None) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "device": peak.device,
        "dtype": peak.dtype,
        "flop_per_s": peak.flop_per_s,
        "source": peak.source,
        "reference": peak.reference,
        "note": peak.note,
        "memory_bytes_per_s": peak.memory_bytes_per_s,
    }
    if peak.derived_flop_per_s is not None:
        answer["derived"] = {"flop_per_s": peak.derived_flop_per_s}
    if measurement is not None:
        answer["measured"] = asdict(measurement)
    if peak.measured_flop_per_s is not None:
        answer.setdefault("measured", {})["kept_flop_per_s"] = peak.measured_flop_per_s
    return answer


def _show(peak: Peak, measurement: Measurement | None) -> None:
    """The figure first, then what stands behind it."""
    typer.echo(f"{peak.device}, {peak.dtype}: {rate(peak.flop_per_s, 6)}")
    _line("source", f"{peak.source}: {peak.reference}" if peak.reference else peak.source)
    if peak.derived_flop_per_s is not None:
        _line("derived", rate(peak.derived_flop_per_s))
    if peak.measured_flop_per_s is not None:
        _line("measured", f"{rate(peak.measured_flop_per_s)}, the best so far on this machine")
    if measurement is not None:
        shape = " x ".join(str(size) for size in measurement.best_shape)
        _line("sweep", f"best {rate(measurement.best_flop_per_s)} at {shape}, in {measurement.elapsed_s:.1f} s")
        _line("", f"typical {rate(measurement.typical_flop_per_s)}")
    if peak.memory_bytes_per_s is not None:
        _line("memory", amount(peak.memory_bytes_per_s, "B/s", 4))
    if peak.note:
        _line("note", peak.note)


def _line(name: str, text: str) -> None:
    typer.echo(f"  {name:9}{text}")
