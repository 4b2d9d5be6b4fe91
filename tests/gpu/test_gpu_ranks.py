"""DDP over NCCL: exposed communication from one callback, against the profiler's view of the same job."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_ddp_job import ROWS, WIDTH
from gpu_loop import Loop, waits_allowed, watched

from flopmeter import load_run

JOB = Path(__file__).with_name("gpu_ddp_job.py")


def launch(folder: Path, bucket_mb: int, **environment: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOB)]
    command += [str(folder), str(bucket_mb)]
    environment = {"SIMCUDA_NVLINK_GBS": "4", **environment}  # read by the simulated device only: slow enough to show
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, env={**os.environ, **environment}
    )
    assert answer.returncode == 0, answer.stderr[-2000:]


@pytest.mark.devices(2)
@pytest.mark.parametrize("bucket_mb", [1, 25])
def test_exposed_communication_agrees_with_a_profiled_step(tmp_path: Path, bucket_mb: int) -> None:
    launch(tmp_path, bucket_mb)
    run = load_run(tmp_path)
    times = [event["device_s"] for event in run.events if event["event"] == "device_time"]
    shares = [device_s["communication"] / sum(device_s.values()) for device_s in times if "communication" in device_s]
    assert shares, "no stretch of the run has a share of exposed communication"
    profiles = [event for event in run.events if event["event"] == "profile" and "communication_s" in event]
    if not profiles:
        pytest.skip("no profiled step: see the record's warnings")
    # Of the device's time, as the marks have it: the step itself is longer by what it takes to attach the tracer.
    kinds = ("matmul", "recompute", "non_matmul", "optimizer", "copy", "communication", "gap")
    by_profiler = profiles[-1]["communication_s"] / sum(profiles[-1][f"{kind}_s"] for kind in kinds)
    by_marks = statistics.median(shares)
    print(f"bucket {bucket_mb} MB: exposed {by_marks:.1%} by marks, {by_profiler:.1%} by the profiler")
    assert by_marks == pytest.approx(by_profiler, abs=0.1)


@pytest.mark.devices(2)
def test_a_sharded_model_is_counted_whole_and_its_waits_are_told(tmp_path: Path) -> None:
    launch(tmp_path, 0)
    run = load_run(tmp_path)
    # Eight layers on each of two ranks, the first of which owes its input no gradient; the record is the job's.
    assert run.column("perf/model_flop")[-1] == 2 * 2 * ROWS * WIDTH**2 * (3 * 8 - 1)
    times = [event["device_s"] for event in run.events if event["event"] == "device_time"]
    assert all(device_s[phase] > 0 for device_s in times for phase in ("forward", "backward", "optimizer"))
    assert [device_s for device_s in times if device_s.get("communication", 0) > 0]


@pytest.mark.devices(2)
def test_with_one_connection_the_overlap_stays(tmp_path: Path) -> None:
    """Timed events beside collectives can take their overlap away; printed, because it belongs to the machine."""
    step_s = {}
    for kind in ("plain", "watched"):
        launch(tmp_path / kind, 25, CUDA_DEVICE_MAX_CONNECTIONS="1", JOB_KIND=kind)
        step_s[kind] = json.loads((tmp_path / kind / "step_s.json").read_text())
    print(
        f"CUDA_DEVICE_MAX_CONNECTIONS=1: {step_s['plain']:.6f} s a step without us, {step_s['watched']:.6f} s with us"
    )


@pytest.mark.devices(2)
@pytest.mark.filterwarnings(r"ignore:\s*There is an imbalance:UserWarning")
def test_a_model_on_several_gpus_of_one_process_is_counted_whole(tmp_path: Path) -> None:
    loop = Loop()
    with waits_allowed():  # DataParallel's own
        loop.model = torch.nn.DataParallel(loop.model)
        with watched(loop, tmp_path, model=loop.model, profile_steps=False):
            loop.losses(20)
    run = load_run(tmp_path)
    assert set(run.column("perf/model_flop")) == {loop.flop}
    assert [event["model_flop"] for event in run.events if event["event"] == "count"] == [loop.flop]


SECOND_GPU = """
import torch
from torch import nn
from flopmeter.profiling.profiler_guard import SampledStep
model = nn.Linear(64, 64).to("cuda:1")
batch = torch.randn(8, 64, device="cuda:1")
def step():
    model(batch).sum().backward()
step()
before = torch._C._cuda_hasPrimaryContext(0)
sampled = SampledStep(model, "cuda")
sampled.start()
step()
sampled.stop()
assert sampled.profile is not None, "no kernels"
assert torch._C._cuda_hasPrimaryContext(0) == before, "a context on a GPU that the program does not use"
"""


@pytest.mark.devices(2)
def test_a_profile_of_a_model_on_the_second_gpu_leaves_the_first_alone() -> None:
    answer = subprocess.run([sys.executable, "-c", SECOND_GPU], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
