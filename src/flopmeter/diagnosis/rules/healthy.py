"""No cause of lost time exceeds its threshold.

How we know. All other rules were asked, and none found anything; those that could not look are listed as not checked.

What to do. If the MFU is low all the same, look at the waterfall: time in matmul_below_peak means that the matmuls
themselves are slow for this device (small sizes, an odd layout, a peak that nothing reaches: `flopmeter peak
--measure` shows what matmuls can do here), time in unexplained means that the record does not tell enough. Larger
matrices help the first: a larger batch, longer sequences, a wider model.
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence, percent
from flopmeter.diagnosis._finding import Finding

IS_LAST_RESORT = True


def check(evidence: Evidence) -> Finding | None:
    """Say that nothing stands out, and what the largest parts are."""
    losses = [part for part in evidence.waterfall.parts if part.name != "ideal"]
    largest = sorted(losses, key=lambda part: -part.share)[:2]
    matmul_s = evidence.seconds_or_zero("matmul_below_peak")
    ideal_s = evidence.seconds_or_zero("ideal")
    found = [f"{part.name.replace('_', ' ')} takes {percent(part.share)} of the time" for part in largest]
    if ideal_s > 0 and evidence.sampled and ideal_s + matmul_s > 0:
        found.append(f"matmuls run at {percent(ideal_s / (ideal_s + matmul_s))} of the peak while they run")
    return Finding(
        rule="healthy",
        title="no known cause of lost time stands out",
        lost=0.0,
        evidence=tuple(found),
        advice=("see what matmuls reach on this device: flopmeter peak --measure",),
        gain=None,
    )
