"""Is the peak that an option states a likely one, and what helps here where none is on file? For the commands."""

from __future__ import annotations

import math

import typer

from flopmeter.devices.table import CURE
from flopmeter.errors import UnknownDeviceError

MIN_FLOP_PER_S = 1e9
"""No device that trains is slower; a smaller figure is one in TFLOP/s."""


def stated_peak(value: float) -> float:
    """What was given as --peak-flop-per-s, refused where its unit cannot be right."""
    if not math.isfinite(value) or value <= 0:
        raise typer.BadParameter(f"--peak-flop-per-s must be a positive number, not {value}")
    if value < MIN_FLOP_PER_S:
        raise typer.BadParameter(f"--peak-flop-per-s is in FLOP/s: {value:g} TFLOP/s is {value:g}e12")
    return value


def with_cure(error: UnknownDeviceError, cure: str) -> UnknownDeviceError:
    """The same complaint, with what helps on the command line instead of what helps a monitor."""
    return UnknownDeviceError(str(error).replace(CURE, cure))
