"""Operators that only move memory (norms, activations, element-wise arithmetic) take much of the time.

How we know. A sampled step splits computing into matmuls and everything else. The latter does next to no FLOPs: its
time goes into reading and writing activations, once for every operator.

What to do. torch.compile(model) fuses chains of them, so that an activation is read and written once. Use fused
layers (torch.nn.functional.rms_norm, Liger kernels, fused cross-entropy), bf16 activations (half the bytes), and no
operators on copies that are not contiguous. Larger models shift the balance towards matmuls by themselves.

The gain takes half of that time as saved (expected: a chain of three or four operators becomes one), a quarter (low),
or two thirds (high); where the model is compiled already, none is promised.
"""

from __future__ import annotations

import re

from flopmeter.devices.kernels import is_communication, is_matmul, short_name
from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.text import percent, seconds

MIN_SHARE = 0.4
"""Eager transformers of middling width spend a quarter to a third on it, convolutional nets a little more."""

_OTHERS = re.compile(r"mm(_|$)|conv|gloo|memcpy|optimizer|fused_?adam", re.IGNORECASE)
"""Names of matmuls, communication and updates on a CPU, and of copies: none of these operators."""


def check(evidence: Evidence) -> Finding | None:
    """Look for a high share of operators other than matmuls."""
    share, moving_s = evidence.share("non_matmul"), evidence.seconds("non_matmul")
    if share < MIN_SHARE:
        return None
    is_compiled = evidence.facts.get("is_compiled") is True
    rows = evidence.sampled.top if evidence.sampled else ()
    own = [row for row in rows if not (is_matmul(row[0]) or is_communication(row[0]) or _OTHERS.search(row[0]))]
    longest = ", ".join(f"{short_name(name)[:60]} {seconds(own_s)}" for name, own_s, _ in own[:4])
    return Finding(
        rule="memory_bound",
        title=f"operators other than matmuls take {percent(share)} of the time",
        lost=share,
        evidence=(f"the longest of them in a step: {longest or 'not recorded'}",),
        advice=(
            "the model is compiled already: look for graph breaks (TORCH_LOGS=graph_breaks)"
            if is_compiled
            else "torch.compile(model): it fuses chains of them",
            "use fused layers (F.rms_norm, fused cross-entropy) and bf16 activations",
        ),
        gain=None if is_compiled else evidence.gain(moving_s / 2, low_s=moving_s / 4, high_s=moving_s * 2 / 3),
    )
