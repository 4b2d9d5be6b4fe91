"""Why is the MFU not higher, and what would each fix bring?

    from flopmeter import diagnose, load_run

    for finding in diagnose(load_run("runs/mine")).findings:
        print(finding.rule, finding.gain)

Rules (`rules.py`) look at the evidence that a record holds (`evidence.py`), and claim no more than the parts of the
waterfall leave them. Findings are ordered by expected gain; those that cost too little to be a reason come behind the
others. The headline names the first; where something else takes far more of the time, that comes before it. That
other programs keep the process from its core is said before all, and the cause beside it is looked for all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from flopmeter.diagnosis.evidence import Evidence, Finding, Gain, NotCheckedError, Rule, explanations
from flopmeter.diagnosis.rules import RULES, matmul_speed
from flopmeter.errors import ConfigError, did_you_mean
from flopmeter.text import clean, percent, plural, utilisation
from flopmeter.waterfall import FEW_STEPS, Part, Waterfall

if TYPE_CHECKING:
    from flopmeter.record import Run

__all__ = ["RULES", "Diagnosis", "Evidence", "Finding", "Gain", "NotCheckedError", "Rule", "diagnose", "explain"]

Standing = Literal["good", "fair", "low", "very low", "unknown"]
STANDINGS: tuple[tuple[float, Standing], ...] = ((0.5, "good"), (0.2, "fair"), (0.1, "low"), (0.0, "very low"))
"""MFU from which on. Above half of the peak is what well-tuned large runs report; below a fifth something is usually
wrong."""
MUCH_LARGER = 2.0
"""A part of the time that is so many times a finding's loss, and none that it comes from, is named before it."""
UNTOLD = 3.0
"""With so many times its loss untold, a finding does not lead."""
WORTH_NAMING = 0.05
"""Smallest part of the time that the rest is said to consist of."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's record says about its speed."""

    headline: str
    """Where the run stands, the first cause, and where the rest of the time went."""
    standing: Standing
    """good above 50 % MFU, fair above 20 %, low above 10 %, very low below."""
    mfu: float | None
    """Over wall time, pauses included; None when unknown."""
    waterfall: Waterfall
    """Where the time went."""
    findings: tuple[Finding, ...]
    """By expected gain, the largest first; one that puts all figures in doubt comes before them."""
    symptoms: tuple[Finding, ...]
    """Findings that another one explains, which is as large or could lead. Two runs are compared by these, too."""
    not_checked: Mapping[str, str]
    """Rules whose check was skipped, and why."""


def diagnose(run: Run, start: int | None = None, stop: int | None = None) -> Diagnosis:
    """Judge a run, or its steps at positions `start` up to `stop`; never raises, whatever the record holds."""
    evidence = Evidence(run, start, stop)
    found: dict[str, Finding] = {}
    not_checked: dict[str, str] = {}
    for rule in sorted(RULES.values(), key=lambda rule: rule.is_last_resort):
        if rule.is_last_resort and not _is_open(found.values(), evidence):
            continue
        try:
            if not evidence.window.timed:
                raise NotCheckedError(evidence.waterfall.note)
            finding = rule.look(evidence, rule)
        except NotCheckedError as reason:
            not_checked[rule.name] = clean(str(reason))
        except Exception as error:  # noqa: BLE001 - a broken rule costs only itself
            not_checked[rule.name] = f"the rule failed on this record ({type(error).__name__})"
        else:
            found |= {rule.name: finding} if finding else {}
    explained = {
        symptom
        for name, finding in found.items()
        for symptom in RULES[name].explains
        if symptom in found and (finding.lost >= found[symptom].lost or not _is_small(finding))
    }
    findings = sorted((found[name] for name in found if name not in explained), key=_weight, reverse=True)
    return Diagnosis(
        headline=_headline(findings, evidence, len(not_checked)),
        standing=standing(evidence.waterfall.mfu),
        mfu=evidence.waterfall.mfu,
        waterfall=evidence.waterfall,
        findings=tuple(findings),
        symptoms=tuple(found[name] for name in found if name in explained),
        not_checked=not_checked,
    )


def explain(name: str) -> str:
    """What a rule looks for, how, and what to do about it.

    Raises:
        ConfigError: there is no such rule.
    """
    if name in RULES:
        return explanations()[name]
    raise ConfigError(f"there is no rule {name!r}: {did_you_mean(name, RULES)}")


def standing(mfu: float | None) -> Standing:
    """Where a run with this MFU stands."""
    return next((word for least, word in STANDINGS if mfu is not None and (mfu > least or not least)), "unknown")


def _is_open(found: Iterable[Finding], evidence: Evidence) -> bool:
    """Whether no cause is large enough to be the first, or most of the time is untold. That the process gets too
    little of the machine is a circumstance: it leaves open what the program does."""
    causes = [finding for finding in found if not RULES[finding.rule].is_circumstance]
    if any(finding.is_doubt for finding in causes):
        return False
    most = max((finding.lost for finding in causes), default=0.0)
    return all(map(_is_small, causes)) or (evidence.is_untold and most < evidence.untold_s / evidence.wall_s / UNTOLD)


def _is_small(finding: Finding) -> bool:
    return finding.is_cause and not finding.is_doubt and finding.lost < RULES[finding.rule].leads_from


def _weight(finding: Finding) -> tuple[bool, bool, bool, bool, float, float]:
    gain = finding.gain.expected if finding.gain else 0.0
    rank = finding.is_doubt, RULES[finding.rule].is_circumstance, not _is_small(finding), not finding.is_cause
    return *rank, gain, finding.lost


def _headline(findings: Sequence[Finding], evidence: Evidence, num_blind: int) -> str:
    fall = evidence.waterfall
    start = "MFU is unknown"
    if fall.mfu is not None:
        start = f"MFU over the wall time is {utilisation(fall.mfu)}, {standing(fall.mfu)}"
    if not findings:
        return f"{start}; nothing could be judged: {fall.note or 'no rule could be checked'}."
    circumstances = [finding for finding in findings if RULES[finding.rule].is_circumstance]
    first, *others = [finding for finding in findings if finding not in circumstances] or findings
    losses = sorted((part for part in fall.parts if part.name != "ideal"), key=lambda part: -part.share)
    from_parts = RULES[first.rule].parts
    title, named = _with_gain(first), [name for name in from_parts if len(from_parts) == 1]
    small = next((finding for finding in others if finding.is_cause and finding.lost > 0), None)
    if first.is_cause and not first.is_doubt:
        largest = losses[0]
        if largest.name not in from_parts and largest.share > MUCH_LARGER * first.lost:
            titles = [finding.title for finding in others if RULES[finding.rule].parts == (largest.name,)]
            title = f"{titles[0] if titles else _sentence(largest, evidence)}. What can be mended: {title}"
            named.append(largest.name)
        # What the finding may consist of is not told twice.
        named += [part.name for part in losses if part.name in from_parts and part.share <= first.lost]
    elif not evidence.is_untold and small is not None:
        title += f"; the largest that was found: {_with_gain(small)}"
        named += RULES[small.rule].parts if len(RULES[small.rule].parts) == 1 else ()
    elif not first.is_cause and num_blind and not evidence.is_untold:
        num_rules = sum(not rule.is_last_resort for rule in RULES.values())
        title += f", though {num_blind} of {num_rules} rules could not be checked"
    if circumstances:
        title = f"{_with_gain(circumstances[0])}. Apart from that, {title}"
    few = evidence.window.num_ordinary
    reserve = f" (from {plural(few, 'step')} only)" if few < FEW_STEPS else ""
    start += f"{';' if fall.mfu is None or ':' in title.partition('. ')[0] else ':'} {title}{reserve}."
    named += ["unexplained", "launch_gaps"] if evidence.is_untold and not first.is_cause else []
    rest = [part for part in losses if part.name not in named and part.share >= WORTH_NAMING][:3]
    if first.is_doubt or not rest:
        return start
    listed = ", ".join(f"{_label(part, evidence)} {percent(part.share)}" for part in rest)
    return f"{start} The rest of the time: {listed}."


def _label(part: Part, evidence: Evidence) -> str:
    """Without a peak, all of the matmuls' time is in their part."""
    is_all = part.name == "matmul_below_peak" and evidence.waterfall.mfu is None
    return "matmuls" if is_all else part.label.lower()


def _with_gain(finding: Finding) -> str:
    """Beyond twice as fast, percentages are hard to picture."""
    if finding.gain is None or not finding.gain.expected:
        return finding.title
    gain = finding.gain.expected
    faster = f"{percent(gain)} faster" if gain <= 1 else f"{1 + gain:.1f} times as fast"
    return f"{finding.title}; without that it would run about {faster}"


def _sentence(part: Part, evidence: Evidence) -> str:
    """What a large part of the time says by itself."""
    if part.name == "matmul_below_peak" and (speed := matmul_speed(evidence)):
        return f"matmuls run at {speed} of the peak, which costs {percent(part.share)} of the time"
    if part.name == "unexplained":
        return f"{percent(part.share)} of the time is unexplained ({evidence.why_untold[0]})"
    return f"{percent(part.share)} of the time goes into {_label(part, evidence)}"
