"""Training stands still while checkpoints are written.

How we know. Pauses named checkpoint or save, as the loop or the framework's callback marks them, between the first
and the last step.

What to do. Write in the background: torch.distributed.checkpoint.async_save copies to host memory and returns at
once. Save less often; goodput says how much a crash would cost. Let every rank write its own shard
(torch.distributed.checkpoint) instead of gathering on rank 0, to a local disk first, and leave out what can be had
again. torch.save of the optimizer's state is often twice the size of the weights.

The gain takes nearly all of it as hidden (expected: 95 %), or half of it (low: half as often).
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.text import percent, seconds

NAMES = r"checkpoint|ckpt|save|saving"
MIN_SHARE = 0.03
"""A copy to host memory every few hundred steps stays below that."""


def check(evidence: Evidence) -> Finding | None:
    """Look for time spent on saving."""
    pause_s = evidence.pause_s(NAMES)
    share = pause_s / evidence.wall_s
    if share < MIN_SHARE:
        return None
    return Finding(
        rule="checkpoint_pause",
        title=f"training stands still for {percent(share)} of the time while checkpoints are written",
        lost=share,
        evidence=(f"{seconds(pause_s)} of {seconds(evidence.wall_s)} are pauses for checkpoints",),
        advice=(
            "torch.distributed.checkpoint.async_save: copy to host memory, write in the background",
            "save less often, or sharded and to a local disk first",
        ),
        gain=evidence.gain(0.95 * pause_s, low_s=pause_s / 2, high_s=pause_s),
    )
