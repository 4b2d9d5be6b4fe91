"""No cause of lost time exceeds its threshold.

How we know. All other rules were asked, and none found anything; those that could not look are listed as not checked.

What to do. If the MFU is low all the same, look at the largest part of the waterfall. Matmuls below peak: the matmuls
themselves are slow for this device (small sizes, an odd layout, a peak that nothing reaches: `flopmeter peak
--measure` shows what matmuls can do here); larger matrices help, by a larger batch, longer sequences or a wider model.
Other operators: fuse them with torch.compile or fused kernels. Unexplained: the record does not tell enough; where
that is most of the time, the verdict is `undetermined` instead.
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.diagnosis.rules._untold import why_untold
from flopmeter.text import percent
from flopmeter.waterfall import LABELS

IS_LAST_RESORT = True

_ADVICE = {
    "recompute": "store more activations and recompute fewer, as far as memory allows",
    "matmul_below_peak": "larger matrices run closer to the peak: a larger batch, longer sequences or a wider model",
    "non_matmul": "fuse the other operators: torch.compile(model), or fused kernels for norms, attention and loss",
    "optimizer": "a fused optimizer (fused=True); a larger batch spreads the update over more samples",
    "exposed_communication": "hide communication behind computing: more work a rank between two exchanges",
    "launch_gaps": "fewer and larger operators: a larger batch, or torch.compile(model)",
    "data_wait": "load ahead: more workers of the DataLoader, or a larger prefetch_factor",
    "host_to_device": "copy beside computing: pin_memory=True and .to(device, non_blocking=True)",
    "pauses": "evaluate and save less often, or beside the training",
}


def check(evidence: Evidence) -> Finding | None:
    """Say that nothing stands out, and what the largest parts are."""
    if evidence.is_untold:
        return None
    losses = [part for part in evidence.waterfall.parts if part.name != "ideal"]
    largest = sorted(losses, key=lambda part: -part.share)[:2]
    matmul_s = evidence.seconds_or_zero("matmul_below_peak")
    ideal_s = evidence.seconds_or_zero("ideal")
    found = [f"{LABELS[part.name].lower()}: {percent(part.share)} of the time" for part in largest]
    if ideal_s > 0 and evidence.sampled and ideal_s + matmul_s > 0:
        found.append(f"matmuls run at {percent(ideal_s / (ideal_s + matmul_s))} of the peak while they run")
    return Finding(
        rule="healthy",
        title="no known cause of lost time stands out",
        lost=0.0,
        evidence=tuple(found),
        advice=_advice(evidence, largest[0].name),
        gain=None,
    )


def _advice(evidence: Evidence, part: str) -> tuple[str, ...]:
    """What helps against the largest part."""
    if part == "unexplained":
        return (": ".join(why_untold(evidence)),)
    if part == "matmul_below_peak" and _can_be_measured(evidence):
        return _ADVICE[part], "see what matmuls reach on this device: flopmeter peak --measure"
    return (_ADVICE[part],)


def _can_be_measured(evidence: Evidence) -> bool:
    """Not where the device is elsewhere, as that of a trace is, and not where the peak is a measurement already."""
    is_measured = any(peak.get("source") == "measured" for peak in evidence.run.peaks.values())
    return evidence.mode != "trace" and not is_measured
