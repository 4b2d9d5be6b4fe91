"""Where a model lies: on the second device, on two, on a slice of one, on one that others cannot see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_loop import IS_SIMULATED, Loop, events, waits_allowed, watched
from torch import nn

from flopmeter import load_run, peak_flops
from flopmeter.errors import UnknownDeviceError


class Split(nn.Module):
    """Half of the layers on each of two devices, as `device_map` places them: activations travel."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        half = len(layers) // 2
        self.first, self.second = layers[:half].to("cuda:0"), layers[half:].to("cuda:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).to("cuda:1", non_blocking=True))


@pytest.mark.devices(2)
def test_a_model_split_over_two_devices_is_counted_whole_and_held_against_both(tmp_path: Path) -> None:
    try:
        peak = 2 * peak_flops("cuda:0", "fp32").flop_per_s
    except UnknownDeviceError as unknown:
        pytest.skip(str(unknown))
    with waits_allowed():
        loop = Loop()
        loop.model = Split(loop.model)
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-4)
    with watched(loop, tmp_path, peak_flop_per_s=None, detail_every=20) as monitor:
        loop.losses(50, monitor)
    run = load_run(tmp_path)
    assert set(run.column("perf/model_flop")) == {loop.flop}
    assert run.column("perf/mfu")[-1] == pytest.approx(loop.flop / run.column("perf/step_time")[-1] / peak)
    assert events(tmp_path, "device_time")


@pytest.mark.devices(2)
def test_a_model_on_the_second_device_is_timed_there(tmp_path: Path) -> None:
    """The current device stays the first: an event of ours that were recorded there would raise."""
    with waits_allowed():
        loop = Loop(width=2048)
        loop.model.to("cuda:1")
        loop.batch = loop.batch.to("cuda:1")
    with watched(loop, tmp_path, detail_every=20) as monitor:
        loop.losses(50, monitor)
    device_s = events(tmp_path, "device_time")[-1]["device_s"]
    assert device_s["backward"] > device_s["forward"] > 0


PROGRAM = """
import sys, time, torch
from itertools import count
from torch import nn
from flopmeter import watch
where = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(512, 512, bias=False).to(where)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
settings = {"sinks": [], "report": False, "profile_steps": False, "mfu_calculation_mode": sys.argv[2]}
monitor = watch(model, optimizer, output_dir=sys.argv[1], config={"monitoring": settings})
batch = torch.randn(64, 512, device=where)
end_s = time.monotonic() + (3 if sys.argv[2] == "hybrid" else 0)  # counters are read first after two seconds
for number in count():
    if number >= 40 and time.monotonic() >= end_s:
        break
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
monitor.finish_training()
"""


def run_program(folder: Path, mode: str = "smart", **environment: str) -> list[str]:
    """Trains in a process of its own, which sees the devices that the environment tells of; gives its complaints."""
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), mode],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    return answer.stderr.splitlines()


def test_a_process_that_is_shown_no_device_trains_on_the_cpu(tmp_path: Path) -> None:
    run_program(tmp_path, CUDA_VISIBLE_DEVICES="")
    run = load_run(tmp_path)
    assert run.header.device == "cpu"
    assert run.column("perf/model_flop")[-1] == 2 * 2 * 64 * 512**2


@pytest.mark.devices(2)
def test_a_device_named_by_its_uuid_is_the_one_that_is_read(tmp_path: Path) -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(1).uuid}"
    assert not run_program(tmp_path, "hybrid", CUDA_VISIBLE_DEVICES=uuid)
    run = load_run(tmp_path)
    assert run.header.device == torch.cuda.get_device_name(1)
    assert events(tmp_path, "counters") or not IS_SIMULATED  # the simulated H100 has them


@pytest.mark.skipif(not IS_SIMULATED, reason="how a GPU is cut up is not for a test to change")
def test_a_slice_of_a_device_has_no_peak_of_the_whole_and_says_so(tmp_path: Path) -> None:
    complaints = run_program(tmp_path, "hybrid", SIMCUDA_MIG="1")
    assert [line for line in complaints if "MIG slice" in line]
    run = load_run(tmp_path)
    assert "MIG" in run.header.device
    assert run.column("perf/model_flop")[-1] == 2 * 2 * 64 * 512**2
    assert not [value for value in run.column("perf/mfu") if value == value]
