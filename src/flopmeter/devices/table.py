"""What does the peak table say about a device of this exact name, and which of its columns did a matmul run in?

The table is `devices.toml` beside this file; its head says how to add a device. torch is only looked at when the
process has imported it already.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from flopmeter.errors import ConfigError, UnknownDeviceError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")

_ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "complex128": "fp64",  # counted as real multiply-adds, which run in fp64
    "float32": "fp32",
    "float": "fp32",
    "complex64": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2": "fp8",
    "float8_e5m2fnuz": "fp8",
    "mxfp8": "fp8",
    "float4_e2m1fn_x2": "fp4",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
}

OVERRIDE_VARIABLE = "FLOPMETER_PEAK_FLOP_PER_S"
CURE = (
    f"set peak_flop_per_s: under monitoring: in YAML or {OVERRIDE_VARIABLE} in the environment, "
    "run flopmeter peak --measure, or add it to src/flopmeter/devices/devices.toml"
)
_MAKER = re.compile(r"^(nvidia )?(tesla )?")
_MIG = re.compile(r"\bmig\b")
_LAPTOP = re.compile(r"\b(laptop|max-q|mobile)\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One block of the table."""

    names: tuple[str, ...]
    """What drivers print for this device."""
    peak_flop_per_s: Mapping[str, float]
    """Dense peak by dtype, per device as torch counts devices."""
    derived: Mapping[str, str] = field(default_factory=dict)
    """For dtypes above that no source prints: the rule that gives them."""
    memory_bytes_per_s: float | None = None
    compute_units: int | None = None
    """SMs or CUs that torch reports for this device, where the name alone is ambiguous."""
    source: str
    """Who states the figures."""
    date: str
    """When they were looked up, as year-month."""
    note: str = ""
    """Where sources disagree, or what the name does not tell."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """The same, of one dtype alone."""


def normalise_name(name: str) -> str:
    """The form in which names are compared: case and the maker's prefix do not matter, everything else does."""
    return _MAKER.sub("", name.strip().casefold())


@cache
def list_devices() -> tuple[Device, ...]:
    """Every device with a peak on file, in the order of the file."""
    return tuple(_device(block) for block in _table()["device"])


def find_device(name: str, compute_units: int | None = None) -> Device:
    """The block that holds exactly this name.

    Args:
        compute_units: What torch reports for a device at hand; another count than the block's is another board.

    Raises:
        UnknownDeviceError: rather than a neighbour's block.
    """
    device = _by_name().get(normalise_name(name))
    if device is None:
        raise unknown_device(name)
    if None not in (compute_units, device.compute_units) and compute_units != device.compute_units:
        raise _unknown(
            name, f"it has {compute_units} compute units where the device on file has {device.compute_units}"
        )
    return device


def unknown_device(name: str, arch: str = "") -> UnknownDeviceError:
    """The error for a name that is not on file, with what its spelling tells."""
    folded = normalise_name(name)
    if not folded:
        chip = f" ({arch})" if arch else ""
        why = f"its driver gives it no name, as seen on ROCm; get_device_properties().gcnArchName tells the chip{chip}"
    elif _MIG.search(folded):
        why = "it is a MIG slice, which has only a share of its card"
    elif folded in _reasons():
        why = _reasons()[folded]
    elif _LAPTOP.search(folded):
        why = "it is a laptop card, and those run at clocks of their own"
    else:
        why = _lookalikes(folded)
    return _unknown(name, why)


def _unknown(name: str, why: str) -> UnknownDeviceError:
    shown = name.strip() if len(name) <= 100 else name[:100] + "..."
    return UnknownDeviceError(f"no peak is on file for {shown!r}{f' ({why})' if why else ''}: {CURE}")


def _lookalikes(folded: str) -> str:
    """Names on file that the user may have meant; they are shown, never used."""
    keys = _by_name()
    near = [key for key in keys if folded in key] or get_close_matches(folded[:100], keys, n=3)
    shown = [next(n for n in keys[key].names if normalise_name(n) == key) for key in near[:3]]
    return "on file are " + ", ".join(repr(name) for name in shown) if shown else ""


@cache
def _table() -> dict[str, Any]:
    with Path(__file__).with_name("devices.toml").open("rb") as file:
        return tomllib.load(file, parse_float=Decimal)  # Decimal: 181.05 TFLOP/s is exactly 181.05e12


def _device(block: dict[str, Any]) -> Device:
    memory = block.get("memory_tb_per_s")
    return Device(
        names=tuple(block["names"]),
        peak_flop_per_s={dtype: _from_tera(value) for dtype, value in block["tflop_per_s"].items()},
        derived=block.get("derived", {}),
        memory_bytes_per_s=None if memory is None else _from_tera(memory),
        compute_units=block.get("compute_units"),
        source=block["source"],
        date=block["date"],
        note=block.get("note", ""),
        notes=block.get("notes", {}),
    )


def _from_tera(value: Decimal | int) -> float:
    return float(value * 10**12)


@cache
def _by_name() -> dict[str, Device]:
    return {normalise_name(name): device for device in list_devices() for name in device.names}


@cache
def _reasons() -> dict[str, str]:
    return {normalise_name(name): block["reason"] for block in _table()["unlisted"] for name in block["names"]}


def normalise_dtype(dtype: object) -> str:
    """The table's name ("bf16") for a torch dtype or for any usual spelling of one.

    Raises:
        ConfigError: for formats that have no matmul peak, such as bool and int64.
    """
    name = str(dtype).strip().casefold().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise ConfigError(f"dtype {str(dtype)!r} has no matmul peak: use one of {', '.join(DTYPES)}")
    return name


def default_dtype() -> str:
    """What torch gives a new floating-point tensor; fp32 where torch is not loaded."""
    torch = sys.modules.get("torch")
    return "fp32" if torch is None else normalise_dtype(torch.get_default_dtype())


def uses_tf32() -> bool:
    """True when torch runs fp32 matmuls on CUDA in TF32, whichever of its interfaces the user chose; never raises.

    The newer interface is asked first: once it has been used, reading the older ones raises.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    matmul = torch.backends.cuda.matmul
    with suppress(AttributeError, RuntimeError):
        if matmul.fp32_precision != "none":
            return bool(matmul.fp32_precision == "tf32")
    with suppress(AttributeError, RuntimeError):
        return bool(matmul.allow_tf32)
    with suppress(AttributeError, RuntimeError):
        return bool(torch.get_float32_matmul_precision() != "highest")
    return False
