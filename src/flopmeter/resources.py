"""What do the device, the process and its data workers use right now, as the driver and the kernel tell it?

    sampler = ResourceSampler("cuda:0", str(torch.cuda.get_device_properties(0).uuid))
    sampler.sample()        # {"resource/gpu_power_w": 412.0, ...}
    sampler.missing         # {"resource/num_workers": "... needs psutil, which is not installed: ..."}

Made for a background thread and a slow rate (every 10 s or so): a sample with eight workers costs 0.8 ms of CPU on
the host and asks nothing of CUDA. Rates cover the time since the last sample, so the first one has none.
GPU numbers need nvidia-ml-py (extra `nvml`); the process's memory and its workers need psutil (extra `resources`).
Left out: GPUs of other makers; children that Python's multiprocessing did not start; the last moments of a worker that
ended between two samples.
"""

from __future__ import annotations

import multiprocessing.process
import threading
from collections.abc import Callable
from importlib import import_module
from multiprocessing.process import BaseProcess
from time import monotonic, process_time
from types import ModuleType
from typing import Any

from flopmeter.errors import FlopmeterError, MissingLibraryError

GPU_KEYS = (
    "resource/gpu_memory_bytes",
    "resource/gpu_memory_share",
    "resource/gpu_utilisation",
    "resource/gpu_power_w",
    "resource/gpu_temperature_c",
)
PROCESS_KEYS = ("resource/process_memory_bytes",)
WORKER_KEYS = ("resource/num_workers", "resource/worker_cpu_cores")

Probe = Callable[[], float]
"""One number; raises when it cannot tell, and the message is the reason."""


class ResourceUnavailableError(FlopmeterError):
    """A number cannot be told on this machine, or not yet; the message is the reason."""


class ResourceSampler:
    """Numbers by key `resource/...`; whatever fails is left out, and `missing` says why. Never raises.

    Args:
        device: As torch spells it: "cuda:0", "cpu". Only "cuda" devices have GPU numbers.
        uuid: The GPU's or the MIG slice's UUID, with or without its prefix. An index would name another GPU under
            CUDA_VISIBLE_DEVICES, so without a UUID there are no GPU numbers.
        clock, cpu_clock: Seconds of wall and of CPU time; tests pass their own.
    """

    def __init__(
        self,
        device: str,
        uuid: str | None,
        *,
        clock: Callable[[], float] = monotonic,
        cpu_clock: Callable[[], float] = process_time,
    ) -> None:
        self.missing: dict[str, str] = {}
        """Key to the reason why the last sample did not have it."""
        self._device = device
        self._uuid = uuid
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._probes: dict[str, Probe] | None = None
        self._gpu: _Gpu | None = None
        self._lock = threading.Lock()

    def sample(self) -> dict[str, float]:
        """All numbers that can be had now. The first call loads the libraries."""
        with self._lock:
            if self._probes is None:
                self._probes = self._open()
            return {key: value for key, probe in self._probes.items() if (value := self._ask(key, probe)) is not None}

    def close(self) -> None:
        """Let go of the driver; later samples are empty. Safe to call twice and while another thread samples."""
        with self._lock:
            self._probes = {}
            if self._gpu is not None:
                self._ask("close", self._gpu.close)
                self._gpu = None

    def _ask(self, key: str, probe: Callable[[], Any]) -> Any:
        try:
            value = probe()
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop a training run; the reason is kept)
            self.missing[key] = str(error) if isinstance(error, FlopmeterError) else f"{type(error).__name__}: {error}"
            return None
        self.missing.pop(key, None)
        return value

    def _open(self) -> dict[str, Probe]:
        probes: dict[str, Probe] = {"resource/process_cpu_cores": _Rate(self._cpu_clock, self._clock)}
        probes |= self._part(PROCESS_KEYS, _process_probes)
        probes |= self._part(WORKER_KEYS, lambda: _Workers(_load_psutil()).probes(self._clock))
        if self._device.partition(":")[0] == "cuda":
            probes |= self._part(GPU_KEYS, self._gpu_probes)
        return probes

    def _part(self, keys: tuple[str, ...], probes: Callable[[], dict[str, Probe]]) -> dict[str, Probe]:
        """The probes of one source; if it cannot be opened, all of its keys are missing for the same reason."""
        found = self._ask(keys[0], probes)
        if found is None:
            self.missing |= dict.fromkeys(keys, self.missing[keys[0]])
        return found or {}

    def _gpu_probes(self) -> dict[str, Probe]:
        self._gpu = _Gpu.open(self._uuid)
        return self._gpu.probes(self._clock)


class _Rate:
    """How fast a total grew since it was last asked, per second."""

    def __init__(self, total: Probe, clock: Callable[[], float]) -> None:
        self._total = total
        self._clock = clock
        self._last: tuple[float, float] | None = None

    def __call__(self) -> float:
        last, now = self._last, (self._total(), self._clock())
        self._last = now
        if last is None:
            raise ResourceUnavailableError("a rate is known from the second sample on")
        if now[1] <= last[1] or now[0] < last[0]:
            raise ResourceUnavailableError("the counter or the clock did not move forward since the last sample")
        return (now[0] - last[0]) / (now[1] - last[1])


def _load_psutil() -> ModuleType:
    try:
        return import_module("psutil")
    except ImportError as error:
        raise MissingLibraryError(
            "psutil", needed_for="watching the process and its workers", extra="resources"
        ) from error


def _process_probes() -> dict[str, Probe]:
    process = _load_psutil().Process()
    return {"resource/process_memory_bytes": lambda: float(process.memory_info().rss)}


class _Workers:
    """The processes that Python's multiprocessing started from this one: as a rule, those of DataLoaders.

    They are taken from multiprocessing's own list. `active_children()` would reap the dead, which hides from torch how
    a worker ended; searching all processes of the machine costs 30 microseconds for each.
    """

    def __init__(self, psutil: ModuleType) -> None:
        self._psutil = psutil
        self._children: set[BaseProcess] = multiprocessing.process._children  # type: ignore[attr-defined]
        self._cpu_s: dict[int, float] = {}
        self._total_s = 0.0

    def probes(self, clock: Callable[[], float]) -> dict[str, Probe]:
        # In this order: the rate is that of the look which the count took.
        return {"resource/num_workers": self._look, "resource/worker_cpu_cores": _Rate(lambda: self._total_s, clock)}

    def _look(self) -> float:
        """How many there are; adds what they did since the last look to a total that no ending worker makes fall."""
        cpu_s = dict(filter(None, map(self._ask, list(self._children))))
        for pid, used_s in cpu_s.items():
            before_s = self._cpu_s.get(pid, 0.0)
            # Less than before: another process has got the number.
            self._total_s += used_s - before_s if used_s >= before_s else used_s
        self._cpu_s = cpu_s
        return float(len(cpu_s))

    def _ask(self, child: BaseProcess) -> tuple[int, float] | None:
        """Number and CPU time of a worker, its own children apart; None when it has ended or been closed."""
        try:
            process = self._psutil.Process(child.pid)
            with process.oneshot():
                times = process.cpu_times()
                has_ended = process.status() == self._psutil.STATUS_ZOMBIE
        except (self._psutil.Error, ValueError):
            return None
        return None if has_ended else (process.pid, float(times.user + times.system))


def find_gpu(nvml: ModuleType, uuid: str) -> tuple[Any, Any]:
    """NVML's handles of a device and of its board, which are one but for a MIG slice.

    Args:
        uuid: With or without its prefix: torch writes none, not even for a slice.
    """
    spellings = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"MIG-{uuid}", f"GPU-{uuid}"]
    for spelling in spellings:
        try:
            device = nvml.nvmlDeviceGetHandleByUUID(spelling)
        except nvml.NVMLError:
            continue
        is_slice = spelling.startswith("MIG-")
        return device, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device) if is_slice else device
    raise ResourceUnavailableError(f"NVML knows no {' or '.join(spellings)}")


class _Gpu:
    """One GPU, or one MIG slice, through NVML.

    A slice has memory of its own and the temperature of its board. NVML tells no utilisation of slices, and the power
    of the board is not theirs alone.
    """

    def __init__(self, nvml: ModuleType, uuid: str) -> None:
        self._nvml = nvml
        self._device, self._board = find_gpu(nvml, uuid)

    @classmethod
    def open(cls, uuid: str | None) -> _Gpu:
        if uuid is None:
            raise ResourceUnavailableError("the GPU's UUID is not known")
        try:
            nvml = import_module("pynvml")
        except ImportError as error:
            raise MissingLibraryError("nvidia-ml-py", needed_for="watching a GPU", extra="nvml") from error
        nvml.nvmlInit()
        try:
            return cls(nvml, uuid)
        except Exception:
            nvml.nvmlShutdown()
            raise

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def probes(self, clock: Callable[[], float]) -> dict[str, Probe]:
        nvml, device = self._nvml, self._device
        probes = {
            "resource/gpu_memory_bytes": lambda: float(nvml.nvmlDeviceGetMemoryInfo(device).used),
            "resource/gpu_memory_share": self._memory_share,
            "resource/gpu_utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
            "resource/gpu_power_w": self._power(clock),
            "resource/gpu_temperature_c": lambda: float(
                nvml.nvmlDeviceGetTemperature(self._board, nvml.NVML_TEMPERATURE_GPU)
            ),
        }
        if self._device is not self._board:
            probes |= dict.fromkeys(("resource/gpu_utilisation", "resource/gpu_power_w"), _refuse_slice)
        return probes

    def _memory_share(self) -> float:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._device)
        return float(memory.used / memory.total)

    def _power(self, clock: Callable[[], float]) -> Probe:
        """Average since the last sample where the board counts its energy (Volta and newer), else of this moment."""
        nvml, board = self._nvml, self._board
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(board)
        except nvml.NVMLError:
            return lambda: nvml.nvmlDeviceGetPowerUsage(board) / 1000
        return _Rate(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(board) / 1000, clock)


def _refuse_slice() -> float:
    raise ResourceUnavailableError("NVML tells it of whole GPUs only, and this is a MIG slice")
