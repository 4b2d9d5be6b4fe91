"""Resources, against the real kernel and process, and a stand-in for libnvidia-ml beneath the real nvidia-ml-py."""

# ruff: noqa: N802 (the functions of the stand-in bear NVML's names)

from __future__ import annotations

import ctypes
import math
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from flopmeter import resources
from flopmeter.devices.roof import condition
from flopmeter.resources import ResourceSampler, _left_in_cgroup


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class FakeNvml:
    """Two boards, the second without an energy counter."""

    AMPERE, PASCAL = 0x1000, 0x2000
    HANDLES = MappingProxyType({b"GPU-ampere": AMPERE, b"GPU-pascal": PASCAL})
    USED_BYTES = MappingProxyType({AMPERE: 60 << 30, PASCAL: 4 << 30})
    TOTAL_BYTES = MappingProxyType({AMPERE: 80 << 30, PASCAL: 16 << 30})
    NOT_SUPPORTED, NOT_FOUND, GPU_IS_LOST = 3, 6, 15

    def __init__(self) -> None:
        self.num_open = 0
        self.energy_mj = 7_000_000
        self.is_lost = False

    def library(self) -> SimpleNamespace:
        """pynvml sets attributes on the functions it finds, so they are plain functions, not bound methods."""
        names = [name for name in dir(self) if name.startswith("nvml")]
        return SimpleNamespace(**{name: self._as_function(getattr(self, name)) for name in names})

    def _as_function(self, method: Callable[..., int]) -> Callable[..., int]:
        return lambda *arguments: method(*arguments)

    def nvmlInitWithFlags(self, flags: int) -> int:
        self.num_open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlErrorString(self, code: int) -> bytes:
        return b"error %d" % code

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:
        if uuid.value not in self.HANDLES:
            return self.NOT_FOUND
        ctypes.cast(device, ctypes.POINTER(ctypes.c_size_t))[0] = self.HANDLES[uuid.value]
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.used = self.USED_BYTES[self._address(device)]
        memory._obj.total = self.TOTAL_BYTES[self._address(device)]
        return self.GPU_IS_LOST if self.is_lost else 0

    def nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> int:
        rates._obj.gpu, rates._obj.memory = 97, 41
        return self.GPU_IS_LOST if self.is_lost else 0

    def nvmlDeviceGetPowerUsage(self, device: Any, milliwatts: Any) -> int:
        milliwatts._obj.value = 150_500
        return self.GPU_IS_LOST if self.is_lost else 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, millijoules: Any) -> int:
        if self._address(device) == self.PASCAL:
            return self.NOT_SUPPORTED
        millijoules._obj.value = self.energy_mj
        return self.GPU_IS_LOST if self.is_lost else 0

    def nvmlDeviceGetTemperature(self, device: Any, sensor: Any, celsius: Any) -> int:

        assert sensor.value == 0, "sensor 0 is the GPU's die"
        celsius._obj.value = 61
        return self.GPU_IS_LOST if self.is_lost else 0

    def nvmlDeviceGetClockInfo(self, device: Any, kind: Any, mhz: Any) -> int:
        assert kind.value == 1, "clock 1 is that of the multiprocessors"
        mhz._obj.value = 1410
        return self.GPU_IS_LOST if self.is_lost else 0

    def nvmlDeviceGetEnforcedPowerLimit(self, device: Any, milliwatts: Any) -> int:
        milliwatts._obj.value = 400_000
        return self.GPU_IS_LOST if self.is_lost else 0

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: Any, reasons: Any) -> int:
        reasons._obj.value = 0x4
        return self.GPU_IS_LOST if self.is_lost else 0

    @staticmethod
    def _address(pointer: Any) -> int:
        return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    fake = FakeNvml()
    monkeypatch.setattr(pynvml, "nvmlLib", fake.library())
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return fake


def gpu_part(sample: dict[str, float]) -> dict[str, float]:
    return {key.removeprefix("resource/gpu_"): value for key, value in sample.items() if "/gpu_" in key}


# The GPU


@pytest.mark.parametrize("uuid", ["GPU-ampere", "ampere"])
def test_a_gpu_is_found_by_its_uuid_with_or_without_prefix(nvml: FakeNvml, uuid: str) -> None:
    sample = gpu_part(ResourceSampler("cuda:5", uuid).sample())
    assert sample == {
        "memory_bytes": 60 << 30, "memory_share": 0.75, "utilisation": 0.97, "temperature_c": 61.0,
        "clock_hz": 1.41e9, "power_limit_w": 400.0, "throttle_reasons": 4.0,
    }  # fmt: skip


def test_power_is_the_energy_since_the_last_sample_over_the_time(nvml: FakeNvml) -> None:
    clock = Clock()
    sampler = ResourceSampler("cuda:0", "GPU-ampere", clock=clock)
    assert "resource/gpu_power_w" not in sampler.sample()
    clock.now_s += 10.0
    nvml.energy_mj += 4_000_000  # 4 kJ in 10 s
    assert sampler.sample()["resource/gpu_power_w"] == 400.0


def test_power_of_a_gpu_without_energy_counter_is_that_of_the_moment(nvml: FakeNvml) -> None:
    assert ResourceSampler("cuda:0", "GPU-pascal").sample()["resource/gpu_power_w"] == 150.5


def test_an_energy_counter_that_was_reset_gives_no_power(nvml: FakeNvml) -> None:
    clock = Clock()
    sampler = ResourceSampler("cuda:0", "GPU-ampere", clock=clock)
    for energy_mj, power_w in [(900, None), (100, None), (20_100, 20.0)]:
        clock.now_s += 1.0
        nvml.energy_mj = energy_mj
        assert sampler.sample().get("resource/gpu_power_w") == power_w


def test_a_slice_of_a_gpu_is_no_gpu_and_has_no_number_of_its_board(nvml: FakeNvml) -> None:
    sampler = ResourceSampler("cuda:0", "slice")  # torch gives a slice's UUID without its prefix, too
    assert gpu_part(sampler.sample()) == {}
    assert nvml.num_open == 0


def test_a_gpu_that_falls_off_the_bus_leaves_the_other_numbers_and_its_own_come_back(nvml: FakeNvml) -> None:
    sampler = ResourceSampler("cuda:0", "GPU-ampere")
    sampler.sample()
    nvml.is_lost = True
    sample = sampler.sample()
    assert gpu_part(sample) == {}
    assert "resource/process_cpu_cores" in sample
    nvml.is_lost = False
    shown = (
        "memory_bytes",
        "memory_share",
        "utilisation",
        "temperature_c",
        "clock_hz",
        "power_limit_w",
        "throttle_reasons",
    )
    assert {*shown, "power_w"} <= gpu_part(sampler.sample()).keys()


def test_a_measurement_notes_clock_power_cap_and_what_holds_the_clock_down(nvml: FakeNvml) -> None:
    assert condition("ampere") == {"clock_hz": 1.41e9, "power_limit_w": 400.0, "throttle_reasons": 4.0}
    assert condition("elsewhere") == condition(None) == {}
    assert nvml.num_open == 0


def test_closing_lets_go_of_nvml_once(nvml: FakeNvml) -> None:
    sampler = ResourceSampler("cuda:0", "GPU-ampere")
    sampler.sample()
    assert nvml.num_open == 1
    sampler.close()
    sampler.close()
    assert nvml.num_open == 0
    assert sampler.sample() == {}


def test_a_gpu_that_nvml_does_not_know_is_named_and_nvml_closed(nvml: FakeNvml) -> None:
    sampler = ResourceSampler("cuda:0", "elsewhere")
    assert gpu_part(sampler.sample()) == {}
    assert nvml.num_open == 0


def test_a_gpu_known_by_index_only_is_not_guessed(nvml: FakeNvml) -> None:
    sampler = ResourceSampler("cuda:0", None)
    assert gpu_part(sampler.sample()) == {}


def test_without_nvidia_ml_py_there_are_no_numbers_of_a_gpu_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler = ResourceSampler("cuda:0", "GPU-ampere")
    assert gpu_part(sampler.sample()) == {}


def test_without_a_driver_there_are_no_numbers_of_a_gpu_and_no_error() -> None:
    assert gpu_part(ResourceSampler("cuda:0", "GPU-ampere").sample()) == {}


# The process and its workers

CPU_KEYS = {"resource/process_cpu_cores", *(["resource/cpu_wait_share"] if sys.platform == "linux" else [])}
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def test_memory_of_the_process_and_what_is_left_for_it_are_those_of_psutil(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    sample = ResourceSampler("cpu", None).sample()
    assert sample["resource/process_memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    assert sample["resource/host_free_bytes"] <= psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert _left_in_cgroup(tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert _left_in_cgroup(tmp_path) == math.inf


def test_what_torchs_allocators_hold_joins_a_sample_and_may_fail() -> None:
    held = {"resource/memory_allocated_bytes": 5.0}
    assert ResourceSampler("cpu", None, memory=lambda: held).sample().items() >= held.items()
    assert ResourceSampler("cpu", None, memory=lambda: 1 / 0).sample()  # type: ignore[arg-type,return-value]


def test_cpu_time_over_wall_time_is_the_number_of_busy_cores() -> None:
    clock, cpu_clock = Clock(), Clock(3.0)
    sampler = ResourceSampler("cpu", None, clock=clock, cpu_clock=cpu_clock)
    sampler.sample()
    clock.now_s += 4.0
    cpu_clock.now_s += 10.0
    assert sampler.sample()["resource/process_cpu_cores"] == 2.5


def test_the_wait_for_a_core_is_what_the_kernel_says_of_the_thread_that_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    sampler = ResourceSampler("cpu", None, clock=clock)
    # Nanoseconds on a core, in its queue, and turns.
    told = {f"/proc/self/task/{threading.get_native_id()}/schedstat": tmp_path / "schedstat"}
    monkeypatch.setattr(resources, "Path", told.__getitem__)
    (tmp_path / "schedstat").write_text("9000000000 1000000000 7\n")
    sampler.sample()
    clock.now_s += 4.0
    (tmp_path / "schedstat").write_text("9500000000 3000000000 9\n")
    assert sampler.sample()["resource/cpu_wait_share"] == 0.5


def test_two_samples_at_the_same_moment_give_no_rate() -> None:
    sampler = ResourceSampler("cpu", None, clock=Clock())
    sampler.sample()
    assert "resource/process_cpu_cores" not in sampler.sample()


def test_memory_is_what_the_kernel_says_of_this_process() -> None:
    pytest.importorskip("psutil", reason="psutil is not installed")
    sampler = ResourceSampler("cpu", None)
    before = sampler.sample()["resource/process_memory_bytes"]
    ballast = mmap.mmap(-1, 64 << 20)  # pages of its own: what was freed before is not used again
    for place in range(0, 64 << 20, mmap.PAGESIZE):
        ballast[place] = 1
    assert sampler.sample()["resource/process_memory_bytes"] - before >= 60 << 20


def work(connection: Any) -> None:
    """Burn CPU time whenever asked, and say how much has been used in all."""
    while connection.recv():
        until_s = time.process_time() + 0.1
        while time.process_time() < until_s:
            continue
        connection.send(time.process_time())


@contextmanager
def worker(method: str) -> Iterator[Any]:
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        ours.send(False)
        process.join()


@FORKS
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_cpu_time_of_workers_is_counted_from_their_birth_and_does_not_fall_when_one_ends(method: str) -> None:
    pytest.importorskip("psutil", reason="psutil is not installed")
    clock = Clock()
    sampler = ResourceSampler("cpu", None, clock=clock)
    assert sampler.sample()["resource/num_workers"] == 0.0
    with worker(method) as connection:
        before_s = 0.0
        for _ in range(2):
            connection.send(True)
            used_s = connection.recv()
            clock.now_s += 1.0
            sample = sampler.sample()
            assert sample["resource/num_workers"] == 1.0
            # The kernel counts in hundredths of a second.
            assert sample["resource/worker_cpu_cores"] == pytest.approx(used_s - before_s, abs=0.04)
            before_s = used_s
    clock.now_s += 1.0
    sample = sampler.sample()
    assert (sample["resource/num_workers"], sample["resource/worker_cpu_cores"]) == (0.0, 0.0)


@FORKS
def test_workers_of_a_data_loader_are_seen_and_other_children_are_not() -> None:
    pytest.importorskip("psutil", reason="psutil is not installed")
    data = pytest.importorskip("torch.utils.data")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        sampler = ResourceSampler("cpu", None)
        batches = iter(data.DataLoader(range(8), num_workers=2))
        next(batches)
        assert sampler.sample()["resource/num_workers"] == 2.0
        del batches
        assert sampler.sample()["resource/num_workers"] == 0.0
        stranger.communicate(b"\n")


@FORKS
def test_a_dead_worker_is_left_for_others_to_find() -> None:
    pytest.importorskip("psutil", reason="psutil is not installed")
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ResourceSampler("cpu", None).sample()["resource/num_workers"] == 0.0
    # Still in multiprocessing's list, so not reaped: torch asks the kernel how its workers ended.
    assert process in multiprocessing.process._children  # type: ignore[attr-defined]
    process.join()
    assert process.exitcode == 0


def test_without_psutil_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    clock = Clock()
    sampler = ResourceSampler("cpu", None, clock=clock)
    sampler.sample()
    clock.now_s += 1.0
    assert sampler.sample().keys() == CPU_KEYS


def test_importing_and_sampling_needs_neither_torch_nor_an_optional_library() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(torch=None, psutil=None, pynvml=None)\n"
        "from flopmeter.resources import ResourceSampler\n"
        "sampler = ResourceSampler('cuda:0', 'x')\n"
        "assert sampler.sample() == {}\n"
        f"assert sampler.sample().keys() == {CPU_KEYS}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
