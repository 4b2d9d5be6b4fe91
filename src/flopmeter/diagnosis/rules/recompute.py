"""Activation checkpointing computes the forward pass again, and memory may not need it.

How we know. A sampled step shows the seconds spent on operators that run a second time inside the backward pass;
where none was sampled, HFU less MFU gives the least that it can take. A GPU whose memory is nearly full needs
checkpointing, and is left alone.

What to do. Switch it off (transformers: model.gradient_checkpointing_disable(), gradient_checkpointing=False) and see
whether the run still fits. If it does not, checkpoint every second block only, or keep the matmul results and compute
the cheap operators again: torch.utils.checkpoint with context_fn=create_selective_checkpoint_contexts(...). A smaller
batch without checkpointing is often faster than a larger one with it.

The gain takes the recomputation as gone (expected and high), or half of it (low: selective checkpointing).
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.text import percent, seconds

MIN_SHARE = 0.05
"""Fused attention recomputes its scores by design, for one to three percent."""
FULL_MEMORY = 0.8
"""From here on the activations that checkpointing saves would hardly fit."""


def check(evidence: Evidence) -> Finding | None:
    """Look for recomputation that there is room to do without."""
    share, again_s = evidence.share("recompute"), evidence.seconds("recompute")
    memory = evidence.resource("resource/gpu_memory_share")
    if share < MIN_SHARE or (memory is not None and memory >= FULL_MEMORY):
        return None
    room = "how full the memory is was not recorded: try whether the run fits without"
    return Finding(
        rule="recompute",
        title=f"{percent(share)} of the time goes into computing activations a second time",
        lost=share,
        evidence=(
            f"{seconds(again_s / evidence.num_steps)} of every step are recomputation in the backward pass",
            room if memory is None else f"the GPU's memory is {percent(memory)} full",
        ),
        advice=(
            "switch checkpointing off (transformers: gradient_checkpointing=False)",
            "or checkpoint fewer blocks, or only what is cheap to recompute (create_selective_checkpoint_contexts)",
        ),
        gain=evidence.gain(again_s, low_s=again_s / 2, high_s=again_s),
    )
