"""What could this device have done?

    from flopmeter import peak_flops

    peak_flops("NVIDIA H100 80GB HBM3", "bf16").flop_per_s  # 989.4e12

Asked in this order: what the user states, the table `devices.toml`, and for a CPU what its instruction set allows and
what was measured. A device that none of them knows is an error, never a guess. Looking up a name imports no torch.
"""

from __future__ import annotations

import math
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from flopmeter.devices import cpu
from flopmeter.devices.measure import Measurement, measure_peak, remembered
from flopmeter.devices.table import (
    CURE,
    DTYPES,
    OVERRIDE_VARIABLE,
    Device,
    default_dtype,
    find_device,
    list_devices,
    normalise_dtype,
    unknown_device,
    uses_tf32,
)
from flopmeter.errors import ConfigError, MissingLibraryError, UnknownDeviceError
from flopmeter.text import rate

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPES",
    "Device",
    "Measurement",
    "Peak",
    "find_device",
    "list_devices",
    "measure_peak",
    "normalise_dtype",
    "peak_flops",
    "uses_tf32",
]

_SPECIFICATION = re.compile(r"(cpu|cuda|xpu|mps|npu|hpu|mlu|musa)(?::(\d+))?")
"""How torch spells a device of this machine; any other string is a name as drivers print it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most that a device can do in one dtype, and why we say so."""

    flop_per_s: float
    dtype: str
    """The format that the matmul runs in: "tf32" for fp32 tensors when torch is set so."""
    device: str
    source: Literal["table", "derived", "measured", "user"]
    """The file devices.toml, a CPU's instruction set, a measurement on this machine, or the user's own figure."""
    note: str = ""
    """Caveats: where sources disagree, what was assumed."""
    reference: str = ""
    """Who states the figure, and when it was looked up."""
    memory_bytes_per_s: float | None = None
    derived_flop_per_s: float | None = None
    """CPU only: what the instruction set allows."""
    measured_flop_per_s: float | None = None
    """CPU only: the best that was measured, None before any measurement."""

    def as_record(self) -> dict[str, str | float]:
        """What a run file says of it."""
        return {"device": self.device, "flop_per_s": self.flop_per_s, "source": self.source, "note": self.note}


def peak_flops(
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    peak_flop_per_s: float | None = None,
    may_initialise: bool = False,
    is_exact: bool = False,
) -> Peak:
    """The dense peak of a device in a dtype.

    Args:
        device: A name as the driver prints it, or torch's "cuda:0" or "cpu"; None is the accelerator that torch sees,
            else this CPU.
        dtype: In torch's or any usual spelling; None is torch's default. fp32 becomes tf32 only where torch is set so.
        peak_flop_per_s: What the user states; it beats every other source.
        may_initialise: Whether asking for a name may start CUDA in a process that has not used it yet.
        is_exact: Whether fp32 stays fp32, however torch is set.

    Raises:
        UnknownDeviceError: no peak is known; the message names the ways to state or measure one.
        ConfigError: the dtype has no peak, or the stated peak is not a positive number.
    """
    key = default_dtype() if dtype is None else normalise_dtype(dtype)
    stated = _stated_peak(peak_flop_per_s)
    if stated is not None:
        flop_per_s, origin = stated
        note = f"set by {origin}, the same for every dtype"
        label = "this device" if device is None else str(device)
        return Peak(flop_per_s=flop_per_s, dtype=key, device=label, source="user", note=note)
    specification = _local_device(device)
    if specification is None:
        return _table_peak(str(device), find_device(str(device)), key, is_exact)
    kind, index = specification
    if kind == "cpu":
        return _cpu_peak(key)
    name, compute_units = _ask_driver(kind, index, may_initialise)
    return _table_peak(name, find_device(name, compute_units), key, is_exact)


def _stated_peak(argument: float | None) -> tuple[float, str] | None:
    """The user's own figure and where it was stated, the argument before the environment."""
    text = os.environ.get(OVERRIDE_VARIABLE, "").strip()
    if argument is not None:
        value, origin = argument, "monitoring.peak_flop_per_s"
    elif text:
        value, origin = math.nan, OVERRIDE_VARIABLE
        with suppress(ValueError):
            value = float(text)
    else:
        return None
    if not 0 < value < math.inf:
        raise ConfigError(
            f"{origin} is {text if argument is None else argument!r}: it must be a positive FLOP/s figure"
        )
    return float(value), origin


def _table_peak(name: str, device: Device, dtype: str, is_exact: bool) -> Peak:
    notes = []
    if not is_exact and dtype == "fp32" and "tf32" in device.peak_flop_per_s and uses_tf32():
        dtype = "tf32"
        notes.append("torch is set to run fp32 matmuls in TF32.")
    if dtype not in device.peak_flop_per_s:
        known = ", ".join(device.peak_flop_per_s)
        raise UnknownDeviceError(f"no {dtype} peak is on file for {name.strip()!r} (on file: {known}): {CURE}")
    rule = device.derived.get(dtype)
    notes += [device.note, device.notes.get(dtype, ""), f"{dtype} is derived: {rule}." if rule else ""]
    return Peak(
        flop_per_s=device.peak_flop_per_s[dtype],
        dtype=dtype,
        device=name.strip(),
        source="table",
        note=" ".join(filter(None, notes)),
        reference=f"{device.source} ({device.date})",
        memory_bytes_per_s=device.memory_bytes_per_s,
    )


def _cpu_peak(dtype: str) -> Peak:
    """The larger of what the instruction set allows and what was measured; both are kept."""
    here = cpu.read_cpu()
    derivation, measured = cpu.derive(dtype, here), remembered(dtype, here)
    derived = derivation.flop_per_s if derivation else None
    if derived is None and measured is None:
        raise UnknownDeviceError(f"no {dtype} peak can be derived for the CPU {here.model!r}: {CURE}")
    # A measurement counts for its threads and dtype only: the command must not measure others.
    command = f"OMP_NUM_THREADS={cpu.num_threads(here)} flopmeter peak --device cpu --dtype {dtype} --measure"
    how = derivation.note if derivation else "the instruction set or the clock of this CPU is not known"
    how += "" if measured else f"; not measured yet: {command}"
    is_measured = (measured or 0.0) > (derived or 0.0)
    if is_measured:
        less = f"derived would be less, {rate(derived)}: {how}" if derived else how
        how = f"measured on this machine and kept for this user ({command} measures again); {less}"
    return Peak(
        flop_per_s=max(derived or 0.0, measured or 0.0),
        dtype=dtype,
        device=here.model,
        source="measured" if is_measured else "derived",
        note=how,
        derived_flop_per_s=derived,
        measured_flop_per_s=measured,
    )


def _local_device(device: object) -> tuple[str, int | None] | None:
    """Kind and index of a device of this machine; None when a driver's name was given."""
    if device is None:
        return _current_accelerator() or "cpu", None
    match = _SPECIFICATION.fullmatch(str(device).strip().casefold())
    if match is None:
        return None
    return match.group(1), int(match.group(2)) if match.group(2) else None


def _current_accelerator() -> str | None:
    try:
        torch = import_module("torch")
    except ImportError:
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not getattr(torch, accelerator.type).device_count():
        return None
    return str(accelerator.type)


def _ask_driver(kind: str, index: int | None, may_initialise: bool) -> tuple[str, int | None]:
    """Name and number of compute units of an accelerator of this machine."""
    backend = _backend(kind)
    count = backend.device_count() if backend else 0
    if backend is None or (index or 0) >= count:
        raise UnknownDeviceError(
            f"torch sees {count} {kind} devices here and no {kind}:{index or 0}: give a name instead"
        )
    if kind == "mps":
        return str(sys.modules["torch"].backends.mps.get_name()), None
    if not may_initialise and not getattr(backend, "is_initialized", lambda: True)():
        raise UnknownDeviceError(f"this process has not started {kind}: ask again later, or give the device's name")
    number = backend.current_device() if index is None else index
    properties = backend.get_device_properties(number)
    name = str(backend.get_device_name(number))
    if not name.strip():
        raise unknown_device(name, arch=str(getattr(properties, "gcnArchName", "")))
    units = getattr(properties, "multi_processor_count", None) or getattr(properties, "max_compute_units", None)
    return name, units


def _backend(kind: str) -> ModuleType | None:
    try:
        torch = import_module("torch")
    except ImportError:
        raise MissingLibraryError("torch", needed_for=f"asking for the name of {kind}", extra="torch") from None
    return getattr(torch, kind, None)
