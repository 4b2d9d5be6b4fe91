"""Does one profiled step show where its time goes?"""

from __future__ import annotations

from flopmeter.doctor._result import Result

ORDER = 110  # late: on CUDA the profiler stays attached and may slow what comes after it
LIMIT_S = 15.0
NEEDS_TORCH = True

_NO_SPLIT = "the waterfall does not split forward and backward"


def check() -> Result:
    from flopmeter.doctor._trial import Trial, device_at_hand, wait_for
    from flopmeter.profiling.sampled import SampledStep, why_not

    device = device_at_hand()
    if reason := why_not(device.type):
        return Result(standing="falls back", says=f"{reason}: {_NO_SPLIT}")
    trial = Trial(device)
    for _ in range(3):
        trial.step()
    wait_for(device)
    sampled = SampledStep(trial.model, device.type)
    sampled.start()
    trial.step()
    wait_for(device)
    sampled.stop()
    if sampled.profile is None:
        says = f"the profiler gave no events (it may lack permission, or another tool has the GPU): {_NO_SPLIT}"
        return Result(standing="falls back", says=says)
    fields = sampled.profile.fields()
    says = f"a profiled step gave {fields['num_ops']} operators, {fields.get('matmul_s', 0.0) * 1e3:.2f} ms in matmuls"
    return Result(standing="works", says=says, figures={"num_ops": fields["num_ops"]})
