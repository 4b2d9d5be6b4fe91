"""The loop asks the device for values in every step, and waits for them: .item(), .cpu(), print(tensor).

How we know. An observed step saw the operators that hand a value to Python, and where they were called. On a GPU each
of them drains the queue of launched work, and the device then waits for the next launches: the cost is the launch
gaps behind them, about a hundred launches, a millisecond, each. On a CPU there is no queue: a call costs only itself
and the interpreter around it, and only what was measured of that is claimed. Where values are read in the loop and
not in the model, what is done with them (printing, metrics) is part of it: the loop's own code, outside forward,
backward and optimizer, is taken as its cost if that is more.

What to do. Keep losses and metrics as tensors and read them every hundred steps; sum them on the device (total +=
loss.detach()). Replace `if loss.isnan()` by torch.where or check now and then; log with flopmeter's log_step, which
takes tensors and never waits; no print in the loop. clip_grad_norm_(..., error_if_nonfinite=False) does not wait.
torch.cuda.set_sync_debug_mode("warn") shows every place.

The gain is what the calls and the gaps behind them, or the loop's own code, took (expected), half of it (low), on a
GPU all launch gaps (high).
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding, NotCheckedError
from flopmeter.text import percent

MIN_SHARE = 0.02
"""Reading the loss once a step is common, and costs less than that on a step of any length."""
_CALLS = r"::item$|_local_scalar_dense|is_nonzero|StreamSynchronize|DeviceSynchronize"


def check(evidence: Evidence) -> Finding | None:
    """Look for reads of device values that cost something."""
    evidence.need_facts()
    syncs = evidence.host_syncs
    if not syncs:
        return None
    if evidence.sampled is None:
        raise NotCheckedError("values are read from the device, but no step was sampled to tell what that costs")
    calls_s = evidence.top_s(_CALLS) * evidence.num_steps
    inside_s = calls_s + evidence.sync_gap_s
    lost_s = max(inside_s, evidence.loop_s)
    share = lost_s / evidence.wall_s
    if share < MIN_SHARE:
        return None
    places = evidence.facts.get("host_sync_places")
    where = ", ".join(str(place)[:80] for place in places[:5]) if isinstance(places, list) else ""
    listed = ", ".join(f"{op} x {num:.0f}" for op, num in sorted(syncs.items(), key=lambda item: -item[1])[:4])
    high_s = max(lost_s, calls_s + evidence.seconds_or_zero("launch_gaps") if evidence.is_gpu else lost_s)
    return Finding(
        rule="host_sync",
        title=f"the loop reads values from the device {sum(syncs.values()):.0f} times a step",
        lost=share,
        evidence=(
            f"seen in a step: {listed}" + (f"; at {where}" if where else ""),
            f"the calls took {percent(calls_s / evidence.wall_s)} of the time, the gaps behind them "
            f"{percent(evidence.sync_gap_s / evidence.wall_s)}",
            f"the loop's own code, outside all phases, takes {percent(evidence.loop_s / evidence.wall_s)}",
        ),
        advice=(
            "keep losses and metrics as tensors (loss.detach()) and read them every hundred steps",
            "no print(tensor), .item(), .cpu(), bool(tensor) in the loop; log_step takes tensors and never waits",
        ),
        gain=evidence.gain(lost_s, low_s=lost_s / 2, high_s=high_s),
    )
