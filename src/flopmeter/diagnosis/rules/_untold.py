"""Why does the record not tell what went on inside forward and backward, and what would?"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence

MANY_STEPS = 50
"""The first step is sampled after ten ordinary ones: a run of so many that has none was told not to sample."""


def why_untold(evidence: Evidence) -> tuple[str, str]:
    """The reason, as the end of a sentence, and the advice."""
    if evidence.sampled:
        return (
            "most of it lies outside what the profiler sees",
            "look at the loop's own code, between the phases, or record a longer run",
        )
    if evidence.mode == "estimate":
        return "estimate mode samples no step", "record with monitoring.mfu_calculation_mode: smart to learn more"
    if evidence.window.num_ordinary < MANY_STEPS:
        return "too few steps were sampled; train longer", "train longer: the first step is sampled after a dozen or so"
    return "no step was sampled", "record with monitoring.profile_steps: true to learn more"
