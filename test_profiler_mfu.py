"""Self-check of profiler mode on this machine: its MFU, the monitor with it, and what each frequency would cost.

python test_profiler_mfu.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import torch
from torch import nn

from flopmeter import load_run
from training.utils.monitor import TrainingMonitor, calculate_mfu_with_profiler, get_gpu_peak_flops

BATCH, FEATURES, LAYERS = 64, 512, 4
STEPS = 12


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(LAYERS)))


def expected_flop() -> int:
    """Forward and both gradients of every layer, but the first layer's input needs none."""
    return 2 * BATCH * FEATURES * FEATURES * (3 * LAYERS - 1)


def train(monitor: TrainingMonitor | None, model: nn.Module, num_steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times_s = []
    for step in range(1, num_steps + 1):
        start_s = time.perf_counter()
        loss = model(torch.ones(BATCH, FEATURES)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.log_step(step, 0, loss, None, 1e-3)
        times_s.append(time.perf_counter() - start_s)
    return times_s


def check(name: str, is_right: bool, detail: str) -> bool:
    print(f"{'ok  ' if is_right else 'FAIL'} {name}: {detail}")
    return is_right


def main() -> int:
    peak = get_gpu_peak_flops()
    results = [check("peak", peak > 0, f"{peak / 1e9:.1f} GFLOP/s")]

    model = make_model()
    typical_s = statistics.median(train(None, model))
    mfu = calculate_mfu_with_profiler(model, BATCH, 1, typical_s)
    results.append(check("profiler MFU", 0 < mfu <= 1, f"{mfu:.1%} of the peak at {typical_s * 1e3:.2f} ms a step"))

    folder = tempfile.mkdtemp()
    config = {"monitoring": {"mfu_calculation_mode": "profiler", "sinks": []}}
    model = make_model()
    with TrainingMonitor(folder, config, flops_profile_freq=5, model=model) as monitor:
        times_s = train(monitor, model)
    run = load_run(folder)
    counted = run.column("perf/model_flop")[-1]
    is_close = abs(counted / expected_flop() - 1) < 0.001
    results.append(check("monitor", is_close, f"{counted / 1e6:.1f} MFLOP a step, {expected_flop() / 1e6:.1f} by hand"))

    profiled = [times_s[place] for place, marks in run.marks.items() if "profiled" in marks]
    results.append(check("profiled steps", bool(profiled), f"{len(profiled)} of {STEPS}"))
    extra_s = max(0.0, statistics.median(profiled) - typical_s) if profiled else 0.0
    for every in (1, 10, 50, 100, 500):
        print(f"     every {every:>3} steps: {extra_s / every / typical_s:.2%} slower")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
