"""What is said in one line when a run is over? The same words under `flopmeter run` and in the console."""

from __future__ import annotations

from collections.abc import Mapping

from flopmeter.text import plural, seconds, utilisation


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
    found = f"MFU {utilisation(mfu)}" if mfu is not None else "MFU unknown" + (f" ({reason})" if reason else "")
    if step_s is not None:
        found += f", {seconds(step_s)} per step (median)"
    steps = plural(num_steps + num_before, "step")
    return f"{found}, {f'{num_steps:,} of {steps} measured' if num_before else steps}; {place}"
