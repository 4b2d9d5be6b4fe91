"""Is the peak of this device known, and do matmuls here agree with it?"""

from __future__ import annotations

from importlib.util import find_spec

from flopmeter.doctor._result import Result
from flopmeter.text import percent, rate

ORDER = 30
LIMIT_S = 15.0
NEEDS_TORCH = False

SWEEP_S = 2.0
TOLERANCE = 1.03
"""Clocks may be a little above what the maker states; a rate further above the peak means that the peak is wrong."""
LOW_SHARE = 0.5


def check() -> Result:
    from flopmeter.devices import measure_peak, peak_flops
    from flopmeter.errors import UnknownDeviceError

    if find_spec("torch") is None:
        stated = peak_flops("cpu", "fp32")
        says = f"not measured, because torch is not installed; {stated.device}, fp32: {rate(stated.flop_per_s)}"
        return Result(standing="falls back", says=says, figures={"peak_flop_per_s": stated.flop_per_s})
    from flopmeter.doctor._trial import device_at_hand, matmul_dtype

    device = device_at_hand()
    dtype = matmul_dtype(device)
    try:
        measured = measure_peak(device, dtype, SWEEP_S)
    except UnknownDeviceError as refused:  # some Macs multiply no bf16
        return Result(standing="falls back", says=f"not measured: {refused}")
    try:
        peak = peak_flops(device, dtype, may_initialise=True)
    except UnknownDeviceError as unknown:
        says = f"no peak is on file, so MFU is unknown ({unknown}); matmuls reach {rate(measured.best_flop_per_s)}"
        return Result(standing="falls back", says=says, figures={"measured_flop_per_s": measured.best_flop_per_s})
    return judge(f"{peak.device}, {peak.dtype}", peak.flop_per_s, peak.source, measured.best_flop_per_s)


def judge(device: str, peak_flop_per_s: float, source: str, measured_flop_per_s: float) -> Result:
    """Compare what is on file with what was reached."""
    share = measured_flop_per_s / peak_flop_per_s
    figures: dict[str, float | str] = {
        "peak_flop_per_s": peak_flop_per_s,
        "source": source,
        "measured_flop_per_s": measured_flop_per_s,
        "share": share,
    }
    reached = f"matmuls reach {rate(measured_flop_per_s)}, {percent(share, 0)} of it"
    says = f"{device}: {rate(peak_flop_per_s)} ({source}); {reached}"
    if share > TOLERANCE:
        cure = "that peak is too low, and MFU too high: set monitoring.peak_flop_per_s, or report a wrong table"
        return Result(standing="broken", says=f"{says}; {cure}", figures=figures)
    if share < LOW_SHARE:
        says += "; other programs on the machine, a power limit or low clocks keep it down"
    return Result(standing="works", says=says, figures=figures)
