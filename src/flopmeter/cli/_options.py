"""What do several commands share: options that mend a run, values that are one of a list, a file that is written?"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopmeter.devices import CURE
from flopmeter.errors import RecordError, UnknownDeviceError, did_you_mean

if TYPE_CHECKING:
    from flopmeter.devices.measure import Measurement
    from flopmeter.devices.roof import Shape
    from flopmeter.record import Run

_PEAK_HELP = "Compare with this peak instead, in FLOP/s: 989e12 for every dtype, or bf16=989e12. May be repeated."
_CONVENTION_HELP = "Count under this convention instead: exact or full."
_DTYPE_HELP = "Compare with the device's peak for this dtype instead, such as tf32."
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Peaks = Annotated[list[str] | None, typer.Option("--peak-flop-per-s", help=_PEAK_HELP)]
Convention = Annotated[str | None, typer.Option("--convention", help=_CONVENTION_HELP)]
Dtype = Annotated[str | None, typer.Option("--dtype", help=_DTYPE_HELP)]
MIN_FLOP_PER_S = 1e9
"""No device that trains is slower; a smaller number is one in TFLOP/s."""


def choose(option: str, value: str, known: Collection[str]) -> Any:
    """The value itself, refused with the nearest one unless it is known."""
    if value in known:
        return value
    raise typer.BadParameter(f"{option}: unknown {value!r}: {did_you_mean(value, known)}")


def stated_peak(value: float) -> float:
    """What was given as --peak-flop-per-s, refused where its unit cannot be right."""
    if not math.isfinite(value) or value <= 0:
        raise typer.BadParameter(f"--peak-flop-per-s must be a positive number, not {value}")
    if value < MIN_FLOP_PER_S:
        raise typer.BadParameter(f"--peak-flop-per-s is in FLOP/s: {value:g} TFLOP/s is {value:g}e12")
    return value


def with_fix(error: UnknownDeviceError, fix: str) -> UnknownDeviceError:
    """The same complaint, with what helps on the command line instead of what helps a monitor."""
    return UnknownDeviceError(str(error).replace(CURE, fix))


def mended(run: Run, peaks: Sequence[str] | None, convention: str | None, dtype: str | None = None) -> Run:
    """The run as it is under a peak or a convention that was wrong, or not known, when it was recorded."""
    from flopmeter.devices import normalise_dtype, peak_flops

    if convention not in (None, "exact", "full"):
        raise typer.BadParameter(f"--convention is exact or full, not {convention}")
    stated: dict[str, float] = {}
    if dtype is not None:
        known = (str(peak["device"]) for peak in run.peaks.values() if peak.get("device"))
        stated = dict.fromkeys(run.dtypes, peak_flops(next(known, run.header.device), dtype).flop_per_s)
    for text in peaks or ():
        name, _, rate = text.rpartition("=")
        try:
            value = stated_peak(float(rate))
        except ValueError:
            raise typer.BadParameter(f"--peak-flop-per-s is a number or dtype=number, not {text}") from None
        stated |= dict.fromkeys([normalise_dtype(name)] if name else run.dtypes, value)
    return run.derived(stated, convention) if stated or convention else run


def written(what: str, text: str, target: Path) -> None:
    """Write the text to a file, all or nothing."""
    from flopmeter.record import replace_file

    try:
        replace_file(target, lambda file: file.write(text))
    except OSError as error:
        raise RecordError(f"cannot write {what} to {target}: {error.strerror}") from None


def sweep(device: str | None, dtype: str | None, seconds: float, shapes: Sequence[Shape] = ()) -> Measurement:
    """What matmuls reach on a device here, at these shapes or the usual ones, with a bar of how long it still takes."""
    from rich.console import Console
    from rich.progress import Progress

    from flopmeter.devices.measure import measure_peak

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Measuring matmuls")
        shown = partial(bar.update, task)
        return measure_peak(
            device, dtype, seconds, lambda done, total: shown(completed=done, total=total), own_shapes=shapes
        )
