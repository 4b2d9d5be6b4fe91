"""What does measuring cost here? The same tiny training with and without a monitor, in turn."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from flopmeter.doctor._result import Result

ORDER = 100
LIMIT_S = 20.0
NEEDS_TORCH = True

NUM_PAIRS, STEPS_PER_BLOCK, WARMUP = 15, 20, 10


def check() -> Result:
    import torch

    from flopmeter.doctor._trial import Trial, device_at_hand
    from flopmeter.monitor import watch
    from flopmeter.record import load_run

    torch.set_num_threads(1)  # two on a busy machine vary many times more than what is looked for
    device = device_at_hand()
    watched, plain = Trial(device), Trial(device)
    with tempfile.TemporaryDirectory() as folder:
        config = {"monitoring": {"sinks": [], "report": False, "peak_flop_per_s": 1e12}}
        monitor = watch(watched.model, watched.optimizer, output_dir=folder, config=config)
        _seconds(watched, WARMUP)
        _seconds(plain, WARMUP)
        pairs = [(_seconds(watched, STEPS_PER_BLOCK), _seconds(plain, STEPS_PER_BLOCK)) for _ in range(NUM_PAIRS)]
        monitor.finish_training()
        num_steps = len(load_run(Path(folder)))
    expected = WARMUP + NUM_PAIRS * STEPS_PER_BLOCK
    if num_steps != expected:
        return Result(standing="broken", says=f"{num_steps} of {expected} steps are in the record")
    return describe([on / STEPS_PER_BLOCK for on, _ in pairs], [off / STEPS_PER_BLOCK for _, off in pairs])


def describe(on_s: list[float], off_s: list[float]) -> Result:
    """Medians of the differences between neighbouring blocks; the middle half of them tells the noise."""
    added_us = [(on - off) * 1e6 for on, off in zip(on_s, off_s, strict=True)]
    low_us, middle_us, high_us = quantiles(added_us, n=4)
    step_s = median(off_s)
    spread = f"middle half of {len(added_us)} comparisons: {low_us:.0f} to {high_us:.0f}"
    if low_us <= 0 <= high_us:
        says = (
            f"not distinguishable from noise here on a step of {step_s * 1e3:.1f} ms ({spread} us); "
            f"a step of 100 ms would be at most {high_us / 1e3:.2g} % longer"
        )
    else:
        says = (
            f"{middle_us:.0f} us on a step of {step_s * 1e3:.1f} ms ({spread}); "
            f"a step of 100 ms would be {middle_us / 1e3:.2g} % longer"
        )
    return Result(standing="works", says=says, figures={"added_us": middle_us, "step_s": step_s})


def _seconds(trial: object, num_steps: int) -> float:
    from flopmeter.doctor._trial import Trial, wait_for

    assert isinstance(trial, Trial)
    device = next(trial.model.parameters()).device
    start_s = time.perf_counter()
    for _ in range(num_steps):
        trial.step()
    wait_for(device)
    return time.perf_counter() - start_s
