"""Training stands still for evaluation for a good part of the time.

How we know. Pauses named evaluation or validation, as the loop or the framework's callback marks them, between the
first and the last step.

What to do. Evaluate less often (eval_steps) or on a fixed part of the data; use a larger batch, since no activations
are kept; torch.inference_mode() and bf16; no generation during training, or on a handful of prompts. Or evaluate
saved checkpoints in a process of its own.

The gain takes half of it as saved (expected: half as often), a quarter (low) or four fifths (high).
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.text import percent, seconds

NAMES = r"eval|valid|test"
MIN_SHARE = 0.1
"""Evaluation is work that somebody wants; a tenth of the time is where it is worth a question."""


def check(evidence: Evidence) -> Finding | None:
    """Look for time spent on evaluation."""
    pause_s = evidence.pause_s(NAMES)
    share = pause_s / evidence.wall_s
    if share < MIN_SHARE:
        return None
    return Finding(
        rule="eval_pause",
        title=f"training stands still for evaluation for {percent(share)} of the time",
        lost=share,
        evidence=(f"{seconds(pause_s)} of {seconds(evidence.wall_s)} are pauses for evaluation",),
        advice=(
            "evaluate less often (eval_steps), or on a fixed part of the data",
            "evaluate with a larger batch, under torch.inference_mode() and in bf16",
        ),
        gain=evidence.gain(pause_s / 2, low_s=pause_s / 4, high_s=0.8 * pause_s),
    )
