"""Which hardware counters can watch this device, and what do they say?

Every other file of this folder is one reader; its name is what users see. A reader module has

    DEVICE_TYPE  the kind of device it reads: "cuda" or "cpu"
    ORDER        readers of one kind are tried from low to high: the cheapest and sharpest first
    open(uuid)   an object with `start`, `read` and `close` (see `CounterReader`), or `CounterUnavailableError` with the
                 reason. GPUs are asked for by UUID ("GPU-..."): an index names another GPU under CUDA_VISIBLE_DEVICES.

    counters = open_counters("cuda:0", uuid=str(torch.cuda.get_device_properties(0).uuid))
    if isinstance(counters, Unavailable):
        logger.info("%s: using smart", counters)

Opening may wait for a server (seconds), reading may wait as well: both belong in the monitor's background thread, at a
slow rate, never in a training step. No torch is imported here. Left out: MIG slices, which no reader serves.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from flopmeter.errors import FlopmeterError

_logger = logging.getLogger("flopmeter")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a reader saw. Shares are 0-1 and say how long a unit was busy, never how many FLOPs it did."""

    flop: float | None = None
    """Floating-point operations of this process since `start()`: a true count. CPU readers only."""
    tensor_active: float | None = None
    """Tensor pipes of any type, as a share of the cycles that elapsed."""
    sm_active: float | None = None
    """Multiprocessors with at least one warp."""
    dram_active: float | None = None
    """Device memory interface."""
    interval_s: float | None = None
    """The time that the values cover; None when the source does not say."""
    note: str = ""
    """What the values leave out, or why there are none."""


class CounterUnavailableError(FlopmeterError):
    """A reader cannot serve this device now; the message is the reason, in a few words."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No reader serves the device."""

    device: str
    """The device that was asked for."""
    reasons: dict[str, str]
    """Reader name -> why not, in the order in which they were tried."""

    def __str__(self) -> str:
        tried = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return f"hardware counters: none ({tried or f'no reader is made for {self.device}'})"


class CounterReader:
    """A reader that never raises and may be closed while another thread reads: failures become notes."""

    def __init__(self, name: str, reader: Any) -> None:
        self.name = name
        self._reader = reader
        self._lock = threading.Lock()
        self._broken = ""

    def start(self) -> None:
        """Mark the beginning of the time that the next reading covers."""
        with self._lock:
            try:
                self._reader.start()
            except Exception as error:  # noqa: BLE001 (nothing of ours may stop a training run)
                self._broken = self._broken or _describe(error)

    def read(self) -> Reading:
        """What happened since `start()` (counts) or since the last reading (shares)."""
        with self._lock:
            if self._broken:
                return Reading(note=f"{self.name}: {self._broken}")
            try:
                return Reading(**self._reader.read())
            except Exception as error:  # noqa: BLE001 (nothing of ours may stop a training run)
                return Reading(note=f"{self.name}: {_describe(error)}")

    def close(self) -> None:
        """Give back what the reader holds."""
        with self._lock:
            if self._broken == "closed":
                return
            self._broken = "closed"
            try:
                self._reader.close()
            except Exception as error:  # noqa: BLE001 (nothing of ours may stop a training run)
                _logger.debug("%s did not close cleanly: %s", self.name, error)


def open_counters(device: str, *, uuid: str | None = None) -> CounterReader | Unavailable:
    """The first reader that serves the device, made safe for a training run; else every reader's reason.

    Args:
        uuid: The GPU's UUID, with or without the prefix "GPU-". GPU readers need it.
    """
    if uuid is not None and not uuid.startswith(("GPU-", "MIG-")):
        uuid = f"GPU-{uuid}"
    reasons: dict[str, str] = {}
    for name, module in reader_modules(device.partition(":")[0]).items():
        try:
            return CounterReader(name, module.open(uuid))
        except Exception as error:  # noqa: BLE001 (a reader's defect must cost its numbers, not the run)
            reasons[name] = _describe(error)
    return Unavailable(device, reasons)


def reader_modules(device_type: str) -> dict[str, Any]:
    """The readers made for a kind of device, by name, in the order in which they are tried."""
    names = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
    modules = {name: import_module(f"{__name__}.{name}") for name in names}
    fitting = [(name, module) for name, module in modules.items() if device_type == module.DEVICE_TYPE]
    return dict(sorted(fitting, key=lambda item: int(item[1].ORDER)))


def as_share(value: float) -> float | None:
    """The value if it can be a share. DCGM's blanks are huge numbers (from 2^47 on), a missing one may be NaN."""
    return value if 0.0 <= value <= 1.01 else None


def require_gpu(uuid: str | None) -> str:
    """The UUID of a whole GPU."""
    if uuid is None:
        raise CounterUnavailableError("the GPU's UUID is not known")
    if uuid.startswith("MIG-"):
        raise CounterUnavailableError("a MIG slice's counters are not read")
    return uuid


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CounterUnavailableError) else f"{type(error).__name__}: {error}"
