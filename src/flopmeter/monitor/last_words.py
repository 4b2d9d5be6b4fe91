"""What is said in one line when a run is over? The same words under `flopmeter run` and in the console."""

from __future__ import annotations

from collections.abc import Mapping


def last_words(
    summary: Mapping[str, float], num_steps: int, place: str, *, num_before: int = 0, why_unknown: str = ""
) -> str:
    """MFU, step time, how many steps they are of, and where to read more.

    Args:
        summary: Of the steady steps; nothing when there were too few.
        num_steps: Steps that the record has.
        num_before: Steps that the loop did before: those in which it was being understood.
        why_unknown: Why there is no MFU, where that is not for want of steps.
    """
    mfu, step_s = summary.get("perf/mfu"), summary.get("step_time_median_s")
    reason = why_unknown or ("too few steps" if step_s is None else "")
    found = f"MFU {100 * mfu:.1f} %" if mfu is not None else "MFU unknown" + (f" ({reason})" if reason else "")
    if step_s is not None:
        found += f", {step_s * 1e3:.3g} ms per step (median)"
    num_all = num_steps + num_before
    steps = f"{num_all} step{'s' * (num_all != 1)}"
    return f"{found}, {f'{num_steps} of {steps} measured' if num_before else steps}; {place}"
