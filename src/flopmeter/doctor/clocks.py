"""Are the clocks fit for measuring: the host's, and under load the GPU's?"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from flopmeter.doctor._result import Result
from flopmeter.resources import find_gpu

ORDER = 40
LIMIT_S = 10.0
NEEDS_TORCH = False

NUM_READS = 20_000
SLOW_NS = 1000.0
"""A clock that the kernel must be asked for costs this much; a step needs about ten readings."""
LOAD_S = 0.5
LOW_CLOCK = 0.8
# Bits of NVML's clock event reasons that hold a busy GPU back.
_REASONS = {
    0x4: "a power limit",
    0x8: "a hardware slowdown",
    0x20: "its temperature",
    0x40: "its temperature (hardware)",
    0x80: "the power supply",
}


def check() -> Result:
    cost_ns = read_cost_ns()
    info = time.get_clock_info("perf_counter")
    figures: dict[str, float | str] = {"read_ns": cost_ns, "resolution_ns": info.resolution * 1e9}
    says = f"reading the host's clock takes {cost_ns:.0f} ns"
    if not info.monotonic:
        return Result(
            standing="broken", says="the host's clock can go backwards: no time can be trusted", figures=figures
        )
    gpu = gpu_clocks()
    if isinstance(gpu, str):
        says += f"; the GPU's clock is not known: {gpu}"
        return Result(standing="missing", says=says, figures=figures)
    if gpu is not None:
        figures |= {"sm_mhz": gpu[0], "max_sm_mhz": gpu[1]}
        says += "; " + describe(*gpu)
    if cost_ns > SLOW_NS:
        says += "; that is slow (a virtual machine without a fast clock source), so every step costs some more"
        return Result(standing="falls back", says=says, figures=figures)
    return Result(standing="works", says=says, figures=figures)


def read_cost_ns() -> float:
    start_ns = time.perf_counter_ns()
    for _ in range(NUM_READS):
        time.perf_counter_ns()
    return (time.perf_counter_ns() - start_ns) / NUM_READS


def gpu_clocks() -> tuple[float, float, int] | str | None:
    """Clock of the multiprocessors under load, its maximum, and what holds it back; None without CUDA or NVML.

    A reason instead where NVML is installed and does not answer, as on ROCm, on a Jetson and in some containers.
    """
    try:
        pynvml, torch = import_module("pynvml"), import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    _load(torch)
    try:
        return _read_clocks(pynvml, torch)
    except Exception as error:  # noqa: BLE001 - the driver's own kinds of error, and names that other builds lack
        return f"NVML does not answer ({type(error).__name__}: {error})"
    finally:
        torch.cuda.synchronize()


def _read_clocks(pynvml: Any, torch: Any) -> tuple[float, float, int]:
    pynvml.nvmlInit()
    try:
        _, board = find_gpu(pynvml, str(torch.cuda.get_device_properties(0).uuid))
        now = pynvml.nvmlDeviceGetClockInfo(board, pynvml.NVML_CLOCK_SM)
        most = pynvml.nvmlDeviceGetMaxClockInfo(board, pynvml.NVML_CLOCK_SM)
        return now, most, pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(board)
    finally:
        pynvml.nvmlShutdown()


def _load(torch: Any) -> None:
    """Give the GPU work for a moment, and leave it working."""
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)  # which older GPUs have, too
    end_s = time.perf_counter() + LOAD_S
    while time.perf_counter() < end_s:
        for _ in range(20):
            torch.mm(square, square)
        torch.cuda.current_stream().synchronize()
    for _ in range(200):
        torch.mm(square, square)


def describe(sm_mhz: float, max_mhz: float, reasons: int) -> str:
    """The GPU's clock in a sentence."""
    says = f"the GPU runs at {sm_mhz:.0f} of {max_mhz:.0f} MHz under load"
    held = [text for bit, text in _REASONS.items() if reasons & bit]
    if held:
        return f"{says}, held back by {' and '.join(held)}"
    return f"{says}, which is low, and the driver names no reason" if sm_mhz < LOW_CLOCK * max_mhz else says
