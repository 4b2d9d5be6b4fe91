"""Work is held against the peak of the format that it ran in, whenever and however that is chosen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_loop import Loop, waits_allowed, watched
from torch import nn

from flopmeter import load_run, peak_flops
from flopmeter.errors import UnknownDeviceError

OWN_PEAKS: dict[str, Any] = {"peak_flop_per_s": None, "profile_steps": False}
"""What `watched` would state as the peak is left to the table."""
NOTICED_S = 1.5
"""How a model is trained is looked at every second at the latest."""


@pytest.fixture(autouse=True)
def _settings_as_they_were() -> Iterator[None]:
    try:
        peak_flops("cuda:0", "bf16", may_initialise=True)
    except UnknownDeviceError as unknown:
        pytest.skip(str(unknown))
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_under_autocast_the_peak_is_that_of_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    loop = Loop()
    with watched(loop, tmp_path, **OWN_PEAKS):
        for _ in range(20):
            with torch.autocast("cuda", dtype):
                loss = loop.model(loop.batch).float().square().mean()
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad(set_to_none=True)
    peak = peak_flops("cuda:0", dtype).flop_per_s
    run = load_run(tmp_path)
    assert run.column("perf/mfu")[-1] == pytest.approx(loop.flop / run.column("perf/step_time")[-1] / peak)


class Fp8Linear(nn.Module):
    """A product of two float8 matrices forward; its gradients are those of the weight in bfloat16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = torch.ones((), device=x.device)
        inputs, weight = x.to(torch.float8_e4m3fn), self.weight.detach().to(torch.float8_e4m3fn)
        product = torch._scaled_mm(inputs, weight.t(), one, one, out_dtype=torch.bfloat16)
        return product + x @ self.weight


def test_float8_products_are_held_against_the_peak_of_float8(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 units")
    rows, width = 64, 256
    with waits_allowed():
        loop = Loop()
        loop.model = nn.Sequential(Fp8Linear(width)).cuda()
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-4)
        loop.batch = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    with watched(loop, tmp_path, **OWN_PEAKS):
        loop.losses(20)
    run = load_run(tmp_path)
    count = next(event for event in run.events if event["event"] == "count")
    product = 2 * rows * width**2
    assert count["by_dtype"] == {
        "float8_e4m3fn": product,
        "bfloat16": 2 * product,
    }  # forward, and its weight's gradient
    step_s = run.column("perf/step_time")[-1]
    ideal_s = product / peak_flops("cuda:0", "fp8").flop_per_s + 2 * product / peak_flops("cuda:0", "bf16").flop_per_s
    assert run.column("perf/mfu")[-1] == pytest.approx(ideal_s / step_s)


@pytest.mark.parametrize("mode", ["smart", "estimate"])
def test_tf32_switched_on_after_watch_and_off_again_is_held_against_the_peak_of_its_time(
    tmp_path: Path, mode: str
) -> None:
    if torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 units")
    loop, last_steps, number = Loop(), {}, 0
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    with watched(loop, tmp_path, mfu_calculation_mode=mode, **OWN_PEAKS) as monitor:
        for precision in ("tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            end_s = time.monotonic() + NOTICED_S
            while time.monotonic() < end_s:
                number += 1
                monitor.log_step(number, 0, loop.step(), None, 1e-4)
            last_steps[precision] = number
    run = load_run(tmp_path)
    mfu, step_s = run.column("perf/mfu"), run.column("perf/step_time")
    peaks = {"tf32": peak_flops("cuda:0", "tf32").flop_per_s, "ieee": peak_flops("cuda:0", "fp32").flop_per_s}
    assert peaks["tf32"] > 2 * peaks["ieee"]
    for precision, step in last_steps.items():
        assert mfu[step - 1] == pytest.approx(loop.flop / step_s[step - 1] / peaks[precision]), precision
