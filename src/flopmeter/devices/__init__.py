"""What could this device have done, what is it called, and on which devices does a model compute?

    from flopmeter import peak_flops

    peak_flops("NVIDIA H100 80GB HBM3", "bf16").flop_per_s  # 989.4e12

Asked in this order: what the user states, the table `devices.toml` (its head says how to add a device), and for a CPU
what its instruction set allows and what was measured. A device that none of them knows is an error, never a guess.
Looking up a name imports no torch.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flopmeter.columns import read_toml
from flopmeter.devices import cpu
from flopmeter.devices.roof import roof_of
from flopmeter.errors import ConfigError, MissingLibraryError, UnknownDeviceError
from flopmeter.text import rate

if TYPE_CHECKING:
    import torch
    from torch import nn

_SPELLINGS = {
    "fp64": "float64 double complex128",  # complex numbers are counted as real multiply-adds
    "fp32": "float32 float complex64",
    "tf32": "",
    "bf16": "bfloat16",
    "fp16": "float16 half",
    "fp8": "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz mxfp8",
    "fp4": "float4_e2m1fn_x2 mxfp4 nvfp4",
    "int8": "",
}
DTYPES = tuple(_SPELLINGS)
_DTYPE_OF = {name: dtype for dtype, others in _SPELLINGS.items() for name in (dtype, *others.split())}
NO_FLOP = frozenset(("bool", "uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64"))
"""Torch's dtypes whose products are no floating-point operations: they are in no count. int8 has units of its own."""

OVERRIDE_VARIABLE = "FLOPMETER_PEAK_FLOP_PER_S"
CURE = (
    f"set peak_flop_per_s: under monitoring: in YAML or {OVERRIDE_VARIABLE} in the environment, "
    "run flopmeter peak --measure, or add it to src/flopmeter/devices/devices.toml"
)
_SPECIFICATION = re.compile(r"(cpu|cuda|xpu|mps|npu|hpu|mlu|musa)(?::(\d+))?")
"""How torch spells a device of this machine; any other string is a name as drivers print it."""
_MAKER = re.compile(r"^(nvidia )?(tesla )?")
_MIG = re.compile(r"\bmig\b")
_LAPTOP = re.compile(r"\b(laptop|max-q|mobile)\b")
MATMUL = "matmul"
"""Stands for every family of operators that cuDNN does not rule."""
_IN_CUDNN = {"convolution": "conv", "recurrent": "rnn"}
"""The others, with the part of `torch.backends.cudnn` that rules them."""
_HOLDING = ("cpu", "meta")
"""Kinds of devices that parameters may wait on while others compute."""


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
    text = os.environ.get(OVERRIDE_VARIABLE, "").strip()
    if peak_flop_per_s is not None or text:
        origin = OVERRIDE_VARIABLE if peak_flop_per_s is None else "monitoring.peak_flop_per_s"
        stated = text if peak_flop_per_s is None else peak_flop_per_s
        label, note = str(device or "this device"), f"set by {origin}, the same for every dtype"
        with suppress(ValueError):
            if 0 < (value := float(stated)) < math.inf:
                return Peak(flop_per_s=value, dtype=key, device=label, source="user", note=note)
        raise ConfigError(f"{origin} is {stated!r}: it must be a positive FLOP/s figure")
    local = _SPECIFICATION.fullmatch(str(device).strip().casefold())
    if device is not None and local is None:
        return _table_peak(str(device), find_device(str(device)), key, is_exact)
    kind = _current_accelerator() if local is None else local[1]
    if kind == "cpu":
        return _cpu_peak(key)
    name, compute_units = _ask_driver(kind, int(local[2]) if local and local[2] else None, may_initialise)
    return _table_peak(name, find_device(name, compute_units), key, is_exact)


def _table_peak(name: str, device: Device, dtype: str, is_exact: bool) -> Peak:
    notes = []
    if not is_exact and dtype == "fp32" and "tf32" in device.peak_flop_per_s and uses_tf32():
        dtype = "tf32"
        notes.append("torch is set to run fp32 matmuls in TF32.")
    if dtype not in device.peak_flop_per_s:
        known = ", ".join(device.peak_flop_per_s)
        raise UnknownDeviceError(f"no {dtype} peak is on file for {name.strip()!r} (on file: {known}): {CURE}")
    notes += [device.note, device.notes.get(dtype, "")]
    notes += [f"{dtype} is derived: {device.derived[dtype]}."] if dtype in device.derived else []
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
    (derived, how), roof = cpu.derive(dtype, here), roof_of("cpu", None, dtype)
    measured = roof["flop_per_s"] if roof else None
    if derived is None and measured is None:
        raise UnknownDeviceError(f"no {dtype} peak can be derived for the CPU {here.model!r}: {CURE}")
    # A measurement counts for its threads and dtype only: the command must not measure others.
    command = f"OMP_NUM_THREADS={cpu.num_threads(here)} flopmeter peak --device cpu --dtype {dtype} --measure"
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


def _current_accelerator() -> str:
    try:
        torch = import_module("torch")
    except ImportError:
        return "cpu"
    found = torch.accelerator.current_accelerator()
    return str(found.type) if found is not None and getattr(torch, found.type).device_count() else "cpu"


def _ask_driver(kind: str, index: int | None, may_initialise: bool) -> tuple[str, int | None]:
    """Name and number of compute units of an accelerator of this machine."""
    torch = need_torch(f"asking for the name of {kind}")
    backend: Any = getattr(torch, kind, None)
    count = backend.device_count() if backend else 0
    if (index or 0) >= count:
        raise UnknownDeviceError(f"torch sees {count} {kind} devices here and no {kind}:{index or 0}: give a name")
    if kind == "mps":
        return str(torch.backends.mps.get_name()), None
    if not may_initialise and not getattr(backend, "is_initialized", lambda: True)():
        raise UnknownDeviceError(f"this process has not started {kind}: ask again later, or give the device's name")
    number = backend.current_device() if index is None else index
    properties = backend.get_device_properties(number)
    name = str(backend.get_device_name(number))
    if not name.strip():
        raise _unknown_device(name, arch=str(getattr(properties, "gcnArchName", "")))
    units = getattr(properties, "multi_processor_count", None) or getattr(properties, "max_compute_units", None)
    return name, units


def need_torch(needed_for: str) -> Any:
    try:
        return import_module("torch")
    except ImportError:
        raise MissingLibraryError("torch", needed_for=needed_for, extra="torch") from None


@cache
def _table() -> dict[str, Any]:
    return read_toml(Path(__file__).with_name("devices.toml"))


@cache
def list_devices() -> tuple[Device, ...]:
    """Every device with a peak on file, in the order of the file."""
    found = []
    for block in map(dict, _table()["device"]):
        peaks = {dtype: float(value * 10**12) for dtype, value in block.pop("tflop_per_s").items()}
        memory = block.pop("memory_tb_per_s", None)
        block |= {"names": tuple(block["names"]), "memory_bytes_per_s": memory and float(memory * 10**12)}
        found.append(Device(**block, peak_flop_per_s=peaks))
    return tuple(found)


@cache
def _by_name() -> dict[str, Device]:
    return {normalise_name(name): device for device in list_devices() for name in device.names}


def normalise_name(name: str) -> str:
    """The form in which names are compared: case and the maker's prefix do not matter, everything else does."""
    return _MAKER.sub("", name.strip().casefold())


def find_device(name: str, compute_units: int | None = None) -> Device:
    """The block that holds exactly this name.

    Args:
        compute_units: What torch reports for a device at hand; another count than the block's is another board.

    Raises:
        UnknownDeviceError: rather than a neighbour's block.
    """
    device = _by_name().get(normalise_name(name))
    if device is None:
        raise _unknown_device(name)
    if None not in (compute_units, device.compute_units) and compute_units != device.compute_units:
        raise _unknown(name, f"it has {compute_units} compute units, and the device on file has {device.compute_units}")
    return device


def _unknown_device(name: str, arch: str = "") -> UnknownDeviceError:
    """The error for a name that is not on file, with what its spelling tells."""
    folded = normalise_name(name)
    reasons = {normalise_name(name): block["reason"] for block in _table()["unlisted"] for name in block["names"]}
    if not folded:
        chip = f" ({arch})" if arch else ""
        why = f"its driver gives it no name, as seen on ROCm; get_device_properties().gcnArchName tells the chip{chip}"
    elif _MIG.search(folded):
        why = "it is a MIG slice, which has only a share of its card"
    elif folded in reasons:
        why = reasons[folded]
    elif _LAPTOP.search(folded):
        why = "it is a laptop card, and those run at clocks of their own"
    else:  # names on file that the user may have meant; they are shown, never used
        keys = _by_name()
        near = [key for key in keys if folded in key] or get_close_matches(folded[:100], keys, n=3)
        shown = [next(n for n in keys[key].names if normalise_name(n) == key) for key in near[:3]]
        why = "on file are " + ", ".join(map(repr, shown)) if shown else ""
    return _unknown(name, why)


def _unknown(name: str, why: str) -> UnknownDeviceError:
    shown = name.strip() if len(name) <= 100 else name[:100] + "..."
    return UnknownDeviceError(f"no peak is on file for {shown!r}{f' ({why})' if why else ''}: {CURE}")


def normalise_dtype(dtype: object) -> str:
    """The table's name ("bf16") for a torch dtype or for any usual spelling of one.

    Raises:
        ConfigError: for formats that have no matmul peak, such as bool and int64.
    """
    name = dtype_name(dtype)
    if name not in _SPELLINGS:
        raise ConfigError(f"dtype {str(dtype)!r} has no matmul peak: use one of {', '.join(DTYPES)}")
    return name


def dtype_name(dtype: object) -> str:
    """The table's name for a dtype that was counted or recorded; one that has no peak keeps its own."""
    name = str(dtype).strip().casefold().removeprefix("torch.")
    return _DTYPE_OF.get(name, name)


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


def tf32_families(device: torch.device | None) -> frozenset[str]:
    """Families of operators ("convolution", "recurrent", `MATMUL`) whose float32 products a GPU computes in TF32.

    Torch allows it for convolutions and recurrences from the start, and for matmuls only where the user says so, at any
    time. On a GPU that has the units (Ampere and newer), held against the fp32 peak such work would look eight times as
    good as it is. Starts no CUDA.
    """
    lib: Any = sys.modules["torch"]
    if device is None or device.type != "cuda" or lib.version.cuda is None:
        return frozenset()
    if not lib.cuda.is_initialized() or lib.cuda.get_device_capability(device) < (8, 0):
        return frozenset()
    in_cudnn = (family for family, part in _IN_CUDNN.items() if _allows_tf32(lib.backends.cudnn, part))
    return frozenset((*in_cudnn, MATMUL) if uses_tf32() else in_cudnn)


def _allows_tf32(cudnn: Any, part: str) -> bool:
    try:
        return bool(getattr(cudnn, part).fp32_precision == "tf32")  # tells of the older setting as well
    except AttributeError:
        return bool(cudnn.allow_tf32)


def product_dtype(dtype: str, family: str, families: frozenset[str]) -> str:
    """What a product of this family runs in, given what `tf32_families` says."""
    return "tf32" if dtype == "float32" and (family if family in _IN_CUDNN else MATMUL) in families else dtype


def devices_of(model: nn.Module | None) -> tuple[torch.device, ...]:
    """The accelerators that a model computes on, in the order of its parameters; else the CPU. Starts none of them.

    Not always those where its parameters lie: some are brought there for each pass. Left out: layers that other
    libraries bring to a device one by one (Accelerate's `cpu_offload`).
    """
    lib: Any = sys.modules["torch"]
    if model is None:
        return (lib.device("cpu"),)
    if isinstance(model, lib.nn.DataParallel) and hasattr(model, "src_device_obj"):
        return tuple(lib.device(model.src_device_obj.type, index) for index in model.device_ids)
    held = list(dict.fromkeys(parameter.device for parameter in model.parameters()))
    accelerators = tuple(device for device in held if device.type not in _HOLDING)
    if accelerators or not held:
        return accelerators or (lib.device("cpu"),)
    # FSDP takes the parameters that it keeps on the host there: FSDP1 names the device, FSDP2 its mesh.
    for module in model.modules():
        named = getattr(module, "compute_device", None)
        if isinstance(named, lib.device) and named.type not in _HOLDING:
            return (named,)
    kind = getattr(getattr(next(model.parameters()), "device_mesh", None), "device_type", "cpu")
    return (held[0] if kind in _HOLDING else lib.device(kind, getattr(lib, kind).current_device()),)
