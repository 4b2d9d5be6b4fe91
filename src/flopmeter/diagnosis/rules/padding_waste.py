"""A good part of the work is done on padding, which teaches the model nothing.

How we know. The attention masks tell useful tokens from padding in every step. MFU counts the useful ones only;
beside it stands the MFU that counts all tokens processed. The distance between the two is wasted work.

What to do. Pack several samples into one sequence (transformers: DataCollatorWithFlattening; TRL: packing=True), with
attention that keeps them apart. Or batch samples of like length (bucketing), and pad to the longest of the batch
rather than to a fixed length (padding="longest", pad_to_multiple_of=8).

The gain takes every padded position as filled with a useful token (expected and high: processed over useful, less
one), or the padded share of forward and backward as saved while the batches get shorter (low). It counts useful work
per second, since packed steps take as long as padded ones.
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding, Gain
from flopmeter.text import percent, utilisation

MIN_WASTE = 0.1
"""A tenth: below, the lengths within a batch are about as even as they get."""


def check(evidence: Evidence) -> Finding | None:
    """Look for work on padding."""
    useful, processed = evidence.mean("perf/mfu"), evidence.mean("perf/mfu_processed")
    waste = 1 - useful / processed if 0 < useful < processed else 0.0
    if waste < MIN_WASTE:
        return None
    saved_s = waste * max(evidence.work_s - evidence.seconds_or_zero("optimizer"), 0.0)
    shorter = evidence.gain(saved_s, low_s=saved_s, high_s=saved_s).expected
    filled = processed / useful - 1
    return Finding(
        rule="padding_waste",
        title=f"{percent(waste)} of the work is done on padding",
        lost=saved_s / evidence.wall_s,
        evidence=(
            f"MFU is {utilisation(useful)} with useful tokens and {utilisation(processed)} with all tokens processed",
        ),
        advice=(
            "pack samples into full sequences (TRL: packing=True; transformers: DataCollatorWithFlattening)",
            'or batch samples of like length and pad to the longest of the batch (padding="longest")',
        ),
        gain=Gain(low=min(shorter, filled), expected=filled, high=max(shorter, filled)),
    )
