"""What do the device, the process and its data workers use right now, as the driver and the kernel tell it?

    sampler = ResourceSampler("cuda:0", str(torch.cuda.get_device_properties(0).uuid))
    sampler.sample()        # {"resource/gpu_power_w": 412.0, ...}

Made for a background thread and a slow rate (every 10 s or so): a sample with eight workers costs 0.8 ms of CPU on
the host and asks nothing of CUDA. Rates cover the time since the last sample, so the first one has none.
GPU numbers need nvidia-ml-py (extra `nvml`); the process's memory and its workers need psutil (extra `resources`).
Left out: GPUs of other makers; children that Python's multiprocessing did not start; the last moments of a worker that
ended between two samples.
"""

from __future__ import annotations

import math
import multiprocessing.process
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, process_time
from types import ModuleType
from typing import Any

from flopmeter.devices.roof import gpu_probes

Probe = Callable[[], float | None]
"""One number; None, or whatever it raises, where it cannot tell."""


class ResourceSampler:
    """Numbers by key `resource/...`; whatever fails is left out. Never raises.

    Args:
        device: As torch spells it: "cuda:0", "cpu". Only "cuda" devices have GPU numbers.
        uuid: The GPU's UUID, with or without its prefix. An index would name another GPU under CUDA_VISIBLE_DEVICES, so
            without a UUID there are no GPU numbers.
        memory: Gives what torch's allocators hold, by key.
        clock, cpu_clock: Seconds of wall and of CPU time; tests pass their own.
    """

    def __init__(
        self,
        device: str,
        uuid: str | None,
        *,
        memory: Callable[[], Mapping[str, float]] = dict,
        clock: Callable[[], float] = monotonic,
        cpu_clock: Callable[[], float] = process_time,
    ) -> None:
        self._uuid = uuid if device.partition(":")[0] == "cuda" else None
        self._clock, self._cpu_clock = clock, cpu_clock
        self._memory = memory
        self._thread = threading.get_native_id()
        self._probes: dict[str, Probe] | None = None
        self._close: Callable[[], Any] = lambda: None
        self._lock = threading.Lock()

    def sample(self) -> dict[str, float]:
        """All numbers that can be had now. The first call loads the libraries."""
        with self._lock:
            if self._probes is None:
                self._probes = {
                    "resource/process_cpu_cores": Rate(self._cpu_clock, self._clock),
                    "resource/cpu_wait_share": Rate(lambda: waited_s(self._thread), self._clock),
                }
                for source in (_process_probes, self._gpu_probes):
                    self._probes |= ask(lambda source=source: source(self._clock)) or {}  # type: ignore[misc]
            found = {key: value for key, probe in self._probes.items() if (value := ask(probe)) is not None}
            return found | (ask(self._memory) or {})

    def close(self) -> None:
        """Let go of the driver; later samples are empty. Safe to call twice and while another thread samples."""
        with self._lock:
            self._probes, close, self._close = {}, self._close, lambda: None
            ask(close)

    def _gpu_probes(self, clock: Callable[[], float]) -> dict[str, Probe]:
        """One GPU, through NVML. A MIG slice is none: power and utilisation of its board are not its own.

        Power is the average since the last sample where the board counts its energy (Volta and newer), else that of
        this moment.
        """
        if self._uuid is None:
            return {}
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        try:
            # torch gives a UUID without its prefix.
            board = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid.removeprefix('GPU-')}")
        except Exception:
            nvml.nvmlShutdown()
            raise
        self._close = nvml.nvmlShutdown

        def memory() -> Any:
            return nvml.nvmlDeviceGetMemoryInfo(board)

        probes: dict[str, Probe] = {
            "resource/gpu_memory_bytes": lambda: float(memory().used),
            "resource/gpu_memory_share": lambda: (found := memory()).used / found.total,
            "resource/gpu_temperature_c": lambda: float(
                nvml.nvmlDeviceGetTemperature(board, nvml.NVML_TEMPERATURE_GPU)
            ),
            "resource/gpu_utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(board).gpu / 100,
            **{f"resource/gpu_{name}": probe for name, probe in gpu_probes(nvml, board).items()},
        }
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(board)
            power: Probe = Rate(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(board) / 1000, clock)
        except nvml.NVMLError:
            power = lambda: nvml.nvmlDeviceGetPowerUsage(board) / 1000  # noqa: E731
        return {**probes, "resource/gpu_power_w": power}


def waited_s(thread: int) -> float:
    """For how long a thread of this process was ready to run and had no core, as Linux tells it.

    Raises:
        OSError, ValueError: it does not tell.
    """
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split(maxsplit=2)[1]) / 1e9


def ask(source: Callable[[], Any]) -> Any:
    """What the source gives; None where it fails."""
    try:
        return source()
    except Exception:  # noqa: BLE001 - nothing of ours may stop a training run: that number is left out
        return None


class Rate:
    """How fast a total grew since it was last asked, per second; known from the second time on."""

    def __init__(self, total: Callable[[], float], clock: Callable[[], float]) -> None:
        self._total = total
        self._clock = clock
        self._last: tuple[float, float] | None = None

    def __call__(self) -> float | None:
        last, now = self._last, (self._total(), self._clock())
        self._last = now
        if last is None or now[1] <= last[1] or now[0] < last[0]:  # the counter or the clock did not move forward
            return None
        return (now[0] - last[0]) / (now[1] - last[1])


def _process_probes(clock: Callable[[], float]) -> dict[str, Probe]:
    psutil = import_module("psutil")
    process, workers = psutil.Process(), _Workers(psutil)
    return {
        "resource/process_memory_bytes": lambda: float(process.memory_info().rss),
        "resource/host_free_bytes": lambda: min(float(psutil.virtual_memory().available), _left_in_cgroup()),
        # In this order: the rate is that of the look which the count took.
        "resource/num_workers": workers.look,
        "resource/worker_cpu_cores": Rate(lambda: workers.total_s, clock),
    }


def _left_in_cgroup(root: Path = Path("/sys/fs/cgroup")) -> float:
    """What a container may still take, if its limit is lower than the machine's memory."""
    try:
        return float(int((root / "memory.max").read_text()) - int((root / "memory.current").read_text()))
    except (OSError, ValueError):  # no such limit ("max"), or none that is told
        return math.inf


class _Workers:
    """The processes that Python's multiprocessing started from this one: as a rule, those of DataLoaders.

    They are taken from multiprocessing's own list. `active_children()` would reap the dead, which hides from torch how
    a worker ended; searching all processes of the machine costs 30 microseconds for each.
    """

    def __init__(self, psutil: ModuleType) -> None:
        self._psutil = psutil
        self._children: set[BaseProcess] = multiprocessing.process._children  # type: ignore[attr-defined]
        self._cpu_s: dict[int, float] = {}
        self.total_s = 0.0

    def look(self) -> float:
        """How many there are; adds what they did since the last look to a total that no ending worker makes fall."""
        cpu_s = dict(filter(None, map(self._ask, list(self._children))))
        for pid, used_s in cpu_s.items():
            before_s = self._cpu_s.get(pid, 0.0)
            # Less than before: another process has got the number.
            self.total_s += used_s - before_s if used_s >= before_s else used_s
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
