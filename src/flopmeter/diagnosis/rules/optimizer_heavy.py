"""The update of the weights runs one small operator after another, tensor by tensor.

How we know. Every step measures the optimizer's share, and an observed step counted its operators: many for each
parameter tensor, where a fused update needs one pass. A large share with an update that is fused already is not this:
it means that the batch is too small (see kernel_launch).

What to do. torch.optim.AdamW(..., fused=True), on CPU as on GPU; foreach=True where there is no fused version.
Parameters that are spread over many tiny tensors cost more than few large ones. An optimizer of your own can use
torch._foreach_* operators, or be wrapped in torch.compile.

The gain follows from memory traffic. A loop moves about three tensor lengths for each operator (two in, one out), a
fused Adam seven in all (weights, gradient, two moments in; weights and moments out). So 7 / (3 x operators per
tensor) of the time remains (expected); half of it goes at least (low), all of it at most (high).
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding, NotCheckedError
from flopmeter.text import percent, seconds

MIN_SHARE = 0.1
"""A tenth: a fused update of a model with a sensible batch stays below a twentieth."""
MANY_OPS = 4.0
"""Operators per parameter tensor from which the update counts as a loop: a foreach update has a few dozen in all."""
FUSED_LENGTHS, LOOP_LENGTHS = 7, 3
USUAL_OPS = 9.0
"""Operators per tensor of torch's own AdamW loop, where none was counted."""


def check(evidence: Evidence) -> Finding | None:
    """Look for an update that is a loop, and matters."""
    share, update_s = evidence.share("optimizer"), evidence.seconds("optimizer")
    if share < MIN_SHARE:
        return None
    kind = evidence.facts.get("optimizer")
    num_ops, num_tensors = evidence.count_fact("num_optimizer_ops"), evidence.count_fact("num_parameter_tensors")
    ops_per_tensor = num_ops / num_tensors if num_ops and num_tensors else None
    if kind in ("foreach", "fused"):
        return None
    if kind != "for-loop":
        if ops_per_tensor is None:
            raise NotCheckedError("how the optimizer does its update was not seen (event `facts`)")
        if ops_per_tensor < MANY_OPS:
            return None
    left = min(FUSED_LENGTHS / (LOOP_LENGTHS * (ops_per_tensor or USUAL_OPS)), 0.5)
    counted = f": {num_ops:.0f} operators for {num_tensors:.0f} tensors" if ops_per_tensor else ""
    return Finding(
        rule="optimizer_heavy",
        title=f"the update of the weights is a loop over tensors and takes {percent(share)} of the time",
        lost=share * (1 - left),
        evidence=(
            f"{seconds(update_s / evidence.num_steps)} of every step are the optimizer's",
            f"its update goes tensor by tensor{counted}",
        ),
        advice=(
            "torch.optim.AdamW(..., fused=True), on CPU as on GPU; else foreach=True",
            "an optimizer of your own: torch._foreach_* operators, or torch.compile around its step",
        ),
        gain=evidence.gain(update_s * (1 - left), low_s=update_s / 2, high_s=update_s),
    )
