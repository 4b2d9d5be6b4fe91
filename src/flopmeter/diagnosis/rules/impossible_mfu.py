"""The utilisation is above 100 %, which cannot be: the peak, the dtype or the FLOPs are wrong.

How we know. MFU or HFU over the ordinary steps exceeds 1. It is shown as it is and never clipped, since a clipped
value would hide the mistake.

What to do. Compare the peak's source with the device: `flopmeter peak` shows it, `flopmeter peak --measure` what
matmuls reach. On a CPU a derived peak assumes a clock that turbo may exceed. A peak that you set
(monitoring.peak_flop_per_s, FLOPMETER_PEAK_FLOP_PER_S) holds for every dtype. Look whether matmuls run in a faster
format than counted (TF32, fp8, fp16 accumulation), whether several devices worked while one peak was used, and
whether the count is doubtful: `flopmeter count` shows what was counted, and perf/flop_error how predictions fared.

No gain: nothing is slow here. Until it is settled, read no figure of this run as a share of the peak; its seconds
hold.
"""

from __future__ import annotations

from flopmeter.columns import number_or_nan
from flopmeter.diagnosis._evidence import MAX_COUNT, Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.text import percent, rate

LIMIT = 1.0


def check(evidence: Evidence) -> Finding | None:
    """Look for a utilisation above the peak."""
    mfu = evidence.mean("perf/mfu")
    highest = max(mfu, evidence.mean_or_none("perf/hfu") or mfu)
    if highest <= LIMIT:
        return None
    peaks = evidence.run.peaks
    dtype, peak = list(peaks.items())[-1] if peaks else ("", {})
    flop_per_s = number_or_nan(peak.get("flop_per_s"), MAX_COUNT * MAX_COUNT)
    stated = f"{rate(flop_per_s)} {dtype[:20]}, {str(peak.get('source'))[:20]}"
    return Finding(
        rule="impossible_mfu",
        title=f"a utilisation of {percent(highest)} is impossible: the peak, the dtype or the FLOPs are wrong",
        lost=highest,
        evidence=(
            f"MFU {percent(mfu)} over the ordinary steps",
            f"peak: {stated}" if flop_per_s > 0 else "which peak was used is not in the record",
        ),
        advice=(
            "compare the peak with the device: flopmeter peak, flopmeter peak --measure",
            "look for matmuls in a faster format than counted, and for more devices than one peak",
        ),
        gain=None,
    )
