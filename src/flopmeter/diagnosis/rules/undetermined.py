"""The record does not tell where most of the time went.

How we know. All other rules were asked, and none found anything; but more than half of the wall time is unexplained.
That is no sign of a healthy run: nobody looked. Most often the run was too short to be sampled, which happens for the
first time after a dozen ordinary steps.

What to do. Train longer. In estimate mode no step is ever sampled, nor with monitoring.profile_steps: false; smart
mode, the default, looks inside forward and backward now and then. Where steps were sampled all the same, the time lies
in the loop's own code, between the phases: look there.
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.diagnosis.rules._untold import why_untold
from flopmeter.text import percent

IS_LAST_RESORT = True


def check(evidence: Evidence) -> Finding | None:
    """Say that nobody can know, and what would tell."""
    if not evidence.is_untold:
        return None
    reason, advice = why_untold(evidence)
    return Finding(
        rule="undetermined",
        title=f"where the time went is undetermined: {reason}",
        lost=0.0,
        evidence=(f"unexplained: {percent(evidence.share('unexplained'))} of the time",),
        advice=(advice,),
        gain=None,
    )
