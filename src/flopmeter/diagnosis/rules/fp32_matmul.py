"""Matmuls run in a slower format than the device offers: float64 by mistake, or float32 where bf16 would do.

How we know. An observed step adds up the FLOPs of its matmuls by dtype, and the device table says what each format
can do. float64 in training is nearly always an accident: a numpy array or a Python constant that made its way into
the model. float32 is flagged on devices whose table entry has a faster format; on a CPU only float64 is, since the
record does not say whether the CPU has bf16 units.

What to do. float64: cast the data (torch.as_tensor(x, dtype=torch.float32)) and the model (model.float()), and look
for torch.set_default_dtype(torch.float64). float32: train under torch.autocast("cuda", dtype=torch.bfloat16), or at
least allow TF32: torch.backends.cuda.matmul.fp32_precision = "tf32" (before torch 2.9:
torch.set_float32_matmul_precision("high")).

The gain for float64 takes half of all computing as saved, since the numbers are half as long (expected), or half of
the matmuls alone (low). For float32 it takes the matmul time times one less the ratio of the peaks as saved (high),
and half of that as likely.
"""

from __future__ import annotations

import math

from flopmeter.columns import mapping, number_or_nan
from flopmeter.devices.table import find_device, normalise_dtype
from flopmeter.diagnosis._evidence import MAX_COUNT, Evidence
from flopmeter.diagnosis._finding import Finding, NotCheckedError
from flopmeter.errors import FlopmeterError
from flopmeter.text import percent, rate

EXPLAINS = ("memory_bound",)
"""Numbers that are twice as long take twice as long to move."""
MIN_SHARE = 0.1
"""Share of the matmul FLOPs: a head or a loss in float32 is common and meant."""


def check(evidence: Evidence) -> Finding | None:
    """Look for FLOPs in a format that is slower than it need be."""
    flop = _flop_by_dtype(evidence)
    total = sum(flop.values())
    if flop.get("fp64", 0.0) >= MIN_SHARE * total:
        return _float64(evidence, flop["fp64"] / total)
    if flop.get("fp32", 0.0) < MIN_SHARE * total or evidence.facts.get("tf32") is True:
        return None
    if not evidence.is_gpu:
        raise NotCheckedError("float64 was not seen; whether this CPU is faster in bf16 is not in the record")
    return _float32(evidence, flop["fp32"] / total)


def _flop_by_dtype(evidence: Evidence) -> dict[str, float]:
    seen = mapping(evidence.facts.get("matmul_dtypes")) or mapping(evidence.window.latest("count").get("by_dtype"))
    flop: dict[str, float] = {}
    for dtype, amount in seen.items():
        try:
            name = normalise_dtype(dtype)
        except FlopmeterError:
            continue
        if (value := number_or_nan(amount, MAX_COUNT * MAX_COUNT)) > 0:
            flop[name] = flop.get(name, 0.0) + value
    if not flop:
        raise NotCheckedError("no observed step counted its matmuls by dtype")
    return flop


def _float64(evidence: Evidence, share: float) -> Finding:
    matmul_s = _matmul_s(evidence) * share
    expected_s = evidence.work_s * share / 2
    return Finding(
        rule="fp32_matmul",
        title=f"{percent(share)} of the matmul FLOPs are float64, which is hardly ever meant",
        lost=expected_s / evidence.wall_s,
        evidence=(f"{percent(share)} of the matmul FLOPs of the observed step ran in float64",),
        advice=(
            "cast data and model to float32: torch.as_tensor(x, dtype=torch.float32), model.float()",
            "look for torch.set_default_dtype(torch.float64) and for numpy arrays, which are float64 unless told",
        ),
        gain=evidence.gain(expected_s, low_s=matmul_s / 2, high_s=expected_s * 1.2),
    )


def _float32(evidence: Evidence, share: float) -> Finding | None:
    try:
        peaks = find_device(evidence.device).peak_flop_per_s
    except FlopmeterError as error:
        raise NotCheckedError(f"what this device could do is not on file: {error}") from None
    fp32_peak = peaks.get("fp32", math.inf)
    faster = [dtype for dtype in ("bf16", "tf32") if dtype in peaks and peaks[dtype] > fp32_peak]
    if not faster:
        return None
    best = max(faster, key=lambda dtype: peaks[dtype])
    ratio = peaks[best] / fp32_peak
    high_s = _matmul_s(evidence) * share * (1 - 1 / ratio)
    return Finding(
        rule="fp32_matmul",
        title=f"{percent(share)} of the matmul FLOPs are float32, and {best} would be {ratio:.3g} times as fast",
        lost=high_s / 2 / evidence.wall_s,
        evidence=(
            f"{percent(share)} of the matmul FLOPs of the observed step ran in float32, TF32 is off",
            f"peaks on file: {best} {rate(peaks[best])}, fp32 {rate(fp32_peak)}",
        ),
        advice=(
            'train under torch.autocast("cuda", dtype=torch.bfloat16)',
            'or allow TF32: torch.backends.cuda.matmul.fp32_precision = "tf32"',
        ),
        gain=evidence.gain(high_s / 2, low_s=high_s / 4, high_s=high_s),
    )


def _matmul_s(evidence: Evidence) -> float:
    """Matmul time; without a sampled step, what the peak says it takes at least."""
    return evidence.seconds_or_zero("ideal") + evidence.seconds_or_zero("matmul_below_peak")
