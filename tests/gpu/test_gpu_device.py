"""What the driver tells: the right GPU's numbers, counters beside a run, a profile, and what all of it costs."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_loop import Loop, waits_allowed, watched

from flopmeter.counters import CounterUnavailableError, open_counters
from flopmeter.devices import peak_flops
from flopmeter.devices.measure import measure_peak
from flopmeter.errors import UnknownDeviceError
from flopmeter.monitor.header import make_sampler
from flopmeter.profiling.profiler_guard import SampledStep, why_not
from flopmeter.resources import ResourceSampler

NUM_PAIRS, BLOCK = 20, 50
IS_SIMULATED = "SIMCUDA_DEVICES" in os.environ


def uuid_of(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def test_nvml_is_asked_for_this_gpu_by_its_uuid() -> None:
    pytest.importorskip("pynvml")
    with waits_allowed():
        ballast = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        sample = ResourceSampler("cuda:0", uuid_of(0)).sample()
        free, total = torch.cuda.mem_get_info(0)
    assert sample["resource/gpu_memory_bytes"] >= ballast.numel()
    assert sample["resource/gpu_memory_bytes"] == pytest.approx(total - free, rel=0.1, abs=1e9)


def test_what_torch_holds_what_the_board_draws_and_its_clock_are_sampled() -> None:
    pynvml = pytest.importorskip("pynvml")
    with waits_allowed():
        model = torch.nn.Linear(4096, 4096, device="cuda")
        ballast = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        del ballast
        sampler = make_sampler(model)
        sampler.sample()
        end_s = time.perf_counter() + 2
        while time.perf_counter() < end_s:
            model(torch.randn(4096, 4096, device="cuda")).sum().item()
        sample = sampler.sample()
        held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
    for name, expected in zip(("allocated", "reserved", "peak"), held, strict=True):
        assert sample[f"resource/memory_{name}_bytes"] == expected
    assert sample["resource/memory_peak_bytes"] >= 1 << 30
    assert sample["resource/memory_total_bytes"] == torch.cuda.get_device_properties(0).total_memory
    pynvml.nvmlInit()
    board = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid_of(0).removeprefix('GPU-')}")
    most = pynvml.nvmlDeviceGetMaxClockInfo(board, pynvml.NVML_CLOCK_SM) * 1e6
    assert 0.1 * most < sample["resource/gpu_clock_hz"] <= most
    assert 0 < sample["resource/gpu_power_w"] < 1.2 * sample["resource/gpu_power_limit_w"]
    if IS_SIMULATED:  # which draws 70 W, and 600 W more while it is busy
        assert sample["resource/gpu_power_w"] == pytest.approx(70 + 600 * sample["resource/gpu_utilisation"], abs=60)
        assert (sample["resource/gpu_clock_hz"], sample["resource/gpu_power_limit_w"]) == (1.98e9, 700.0)


@pytest.mark.devices(2)  # of one GPU the index is the number
def test_hidden_gpus_do_not_shift_the_numbers() -> None:
    pytest.importorskip("pynvml")
    code = (
        "import torch; from flopmeter.resources import ResourceSampler\n"
        "ballast = torch.empty(2 << 30, dtype=torch.uint8, device='cuda')\n"
        "uuid = str(torch.cuda.get_device_properties(0).uuid)\n"
        "assert ResourceSampler('cuda:0', uuid).sample()['resource/gpu_memory_bytes'] >= ballast.numel()\n"
    )
    command = ["env", f"CUDA_VISIBLE_DEVICES={torch.cuda.device_count() - 1}", sys.executable, "-c", code]
    assert subprocess.run(command, check=False).returncode == 0


def test_counters_give_shares_or_say_why_not() -> None:
    try:
        counters = open_counters("cuda:0", uuid=uuid_of(0))
    except CounterUnavailableError as error:
        pytest.skip(str(error))
    with waits_allowed():
        square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        end_s = time.perf_counter() + 3
        while time.perf_counter() < end_s:
            torch.mm(square, square)
            torch.cuda.synchronize()
        reading = counters.read()
        counters.close()
    assert reading["tensor_active"] is not None, reading["note"]
    assert 0.2 < reading["tensor_active"] <= 1.0


def test_matmuls_stay_below_the_peak_on_file() -> None:
    with waits_allowed():
        measured = measure_peak("cuda:0", "bf16", budget_s=5.0)
    try:
        peak = peak_flops("cuda:0", "bf16")
    except UnknownDeviceError as unknown:
        pytest.skip(str(unknown))
    assert 0.4 < measured.best_flop_per_s / peak.flop_per_s < 1.03


def test_a_profiled_step_has_kernels_and_leaves_the_run_as_fast_as_before(tmp_path: Path) -> None:
    if reason := why_not("cuda"):
        pytest.skip(reason)
    loop = Loop(width=2048)

    def median_s() -> float:
        times_s = []
        with waits_allowed():
            for _ in range(40):
                torch.cuda.synchronize()
                start_s = time.perf_counter()
                loop.step()
                torch.cuda.synchronize()
                times_s.append(time.perf_counter() - start_s)
        return statistics.median(times_s)

    loop.losses(10)
    before_s = median_s()
    with waits_allowed():
        sampled = SampledStep(loop.model, "cuda")
        sampled.start()
        loop.step()
        torch.cuda.synchronize()
        sampled.stop()
    assert sampled.profile is not None, "no kernels: the profiler may lack permission in this container"
    assert sampled.profile["matmul_s"] > 0
    after_s = median_s()
    print(f"step before {before_s * 1e3:.3f} ms, after a profile {after_s * 1e3:.3f} ms: {after_s / before_s - 1:+.2%}")


def test_beside_nsight_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert why_not("cuda") is not None


def test_what_watching_costs(tmp_path: Path) -> None:
    """Printed, not asserted: the figure belongs to the machine."""
    plain, ours = Loop(width=64, num_layers=8), Loop(width=64, num_layers=8)

    def seconds(loop: Loop) -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        loop.losses(BLOCK)
        torch.cuda.synchronize()
        return (time.perf_counter() - start_s) / BLOCK

    with watched(ours, tmp_path, profile_steps=False):
        seconds(plain), seconds(ours)
        pairs = [(seconds(ours), seconds(plain)) for _ in range(NUM_PAIRS)]
    ratio = statistics.median(on / off for on, off in pairs)
    step_us = statistics.median(off for _, off in pairs) * 1e6
    print(f"watching adds {ratio - 1:+.2%} to a step of {step_us:.0f} us ({(ratio - 1) * step_us:.1f} us)")
