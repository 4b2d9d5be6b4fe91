"""How are the phases of a step timed here: by the device's own events, or by the host's clock?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flopmeter.doctor._result import Result

if TYPE_CHECKING:
    import torch

ORDER = 50
LIMIT_S = 15.0
NEEDS_TORCH = True

NUM_STEPS = 30


def check() -> Result:
    from flopmeter.doctor._trial import device_at_hand

    device = device_at_hand()
    if device.type == "cpu":
        return Result(
            standing="works", says="no GPU: the host's clock times the phases, and on a CPU that is the truth"
        )
    if device.type != "cuda":
        says = f"device times of {device.type} are not read: phases are what the host saw, steps are right on average"
        return Result(standing="falls back", says=says)
    return _on_cuda(device)


def _on_cuda(device: torch.device) -> Result:
    from flopmeter.doctor._trial import Trial, wait_for
    from flopmeter.timing.bound import judge
    from flopmeter.timing.cuda import timeline_of

    trial, timeline = Trial(device), timeline_of(device)
    assert timeline is not None
    for step in range(NUM_STEPS):
        timeline.mark("forward")
        trial.step()
        timeline.end_step(step)
    wait_for(device)
    steps = [step for step in timeline.poll() if step.flaw is None]
    timeline.close()
    if len(steps) < NUM_STEPS // 2:
        says = f"only {len(steps)} of {NUM_STEPS} steps could be timed by CUDA events; the host's clock serves instead"
        return Result(standing="falls back", says=says)
    step_s = sum(step.device_s or 0.0 for step in steps) / len(steps)
    says = (
        f"CUDA events timed {len(steps)} of {NUM_STEPS} tiny steps, {step_s * 1e3:.2f} ms each; {judge(steps).reason}"
    )
    return Result(standing="works", says=says, figures={"device_step_s": step_s, "num_steps": len(steps)})
