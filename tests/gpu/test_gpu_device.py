"""What the driver tells: the right GPU's numbers, counters beside a run, a profile, and what all of it costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_loop import Loop, waits_allowed, watched

from flopmeter.counters import Unavailable, open_counters
from flopmeter.devices import measure_peak, peak_flops
from flopmeter.errors import UnknownDeviceError
from flopmeter.profiling.sampled import SampledStep, why_not
from flopmeter.resources import ResourceSampler

NUM_PAIRS, BLOCK = 20, 50


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
    counters = open_counters("cuda:0", uuid=uuid_of(0))
    if isinstance(counters, Unavailable):
        assert set(counters.reasons) == {"nvml_gpm", "dcgm_exporter"}
        pytest.skip(str(counters))
    with waits_allowed():
        counters.start()
        square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        end_s = time.perf_counter() + 3
        while time.perf_counter() < end_s:
            torch.mm(square, square)
            torch.cuda.synchronize()
        reading = counters.read()
        counters.close()
    assert reading.tensor_active is not None, reading.note
    assert 0.2 < reading.tensor_active <= 1.0


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
    assert sampled.profile.fields()["matmul_s"] > 0
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
