"""Each step does too little work for what it costs to start it: the batch is too small, or the operators are tiny.

How we know. A sampled step shows how long nothing ran while the host prepared the next operator (launch gaps), and
how many operators there were. The update of the weights takes equally long whatever the batch, so it belongs to the
fixed cost as well, unless it is slow for reasons of its own (see optimizer_heavy). Gaps behind a synchronisation, and
what the loop's own code takes between the phases, are left to host_sync. On a GPU the device was seen waiting for the
host. On a CPU the start of an operator is inside the operator's own time: 7.5 microseconds of each are taken for it.

What to do. Raise the batch size until memory is full; that spreads the fixed cost over more samples. Where memory
does not allow it, gradient accumulation spreads at least the update. Let torch.compile(model) fuse the small
operators, and on a GPU replay them from a graph: torch.compile(model, mode="reduce-overhead"). Use fused layers and a
fused optimizer.

The gain is that of a batch sixteen times as large (expected: 15/16 of the fixed cost go), twice as large (low: half of
it), or without the fixed cost (high). It counts work per second, since the steps themselves get longer. Left out:
larger matmuls run closer to the peak as well.
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.text import percent

MIN_SHARE = 0.2
"""A fifth: eager PyTorch on a healthy model loses a twentieth to a tenth here, and its update as much again."""
LIGHT_OPTIMIZERS = ("fused", "foreach")
OPERATOR_S = 7.5e-6
"""What an eager operator on a CPU takes before it computes: dispatch, autograd, memory. Set on the demo's GPT."""
EXPLAINS = ("memory_bound",)
"""Operators that are too small spend their time on being started, whatever they are."""


def check(evidence: Evidence) -> Finding | None:
    """Look for a high fixed cost per step."""
    gap_s = evidence.seconds("launch_gaps") - evidence.sync_gap_s
    is_light = evidence.facts.get("optimizer") in LIGHT_OPTIMIZERS
    update_s = evidence.seconds_or_zero("optimizer") if is_light else 0.0
    loop_s = max(evidence.loop_s - evidence.sync_gap_s, 0.0) if evidence.host_syncs and not evidence.is_gpu else 0.0
    fixed_s = max(gap_s + _starting_s(evidence) - loop_s, 0.0) + update_s
    share = fixed_s / evidence.wall_s
    if share < MIN_SHARE:
        return None
    found = [f"nothing runs for {percent(gap_s / evidence.wall_s)} of the time, while the host prepares operators"]
    if update_s:
        found.append(f"the update takes {percent(update_s / evidence.wall_s)}, whatever the batch size")
    if evidence.sampled and evidence.sampled.num_ops > 0:
        found.append(f"{evidence.sampled.num_ops:.0f} operators a step")
    verdict = evidence.window.latest("device_time").get("verdict")
    if isinstance(verdict, dict) and verdict.get("bound") == "host":
        found.append(str(verdict.get("reason"))[:200])
    return Finding(
        rule="kernel_launch",
        title=f"each step does too little work: {percent(share)} of the time is the fixed cost of a step",
        lost=share,
        evidence=tuple(found),
        advice=(
            "raise the batch size until memory is full, or accumulate gradients over more micro-batches",
            'torch.compile(model); on a GPU torch.compile(model, mode="reduce-overhead")',
            "use fused layers and optimizer(..., fused=True)",
        ),
        gain=evidence.gain(fixed_s * 15 / 16, low_s=fixed_s / 2, high_s=fixed_s),
    )


def _starting_s(evidence: Evidence) -> float:
    """What the operators of the window took before they computed; on a GPU that shows as gaps."""
    if evidence.is_gpu or not evidence.sampled or not evidence.sampled.num_ops > 0:
        return 0.0
    working_s = evidence.seconds_or_zero("matmul_below_peak") + evidence.seconds_or_zero("non_matmul")
    num_working = evidence.sampled.num_ops - sum(evidence.host_syncs.values())  # reading a value is host_sync's
    return max(0.0, min(evidence.num_steps * num_working * OPERATOR_S, working_s))
