"""Why is the MFU not higher, and what would each cure bring? One file in `rules/` per cause.

    from flopmeter import diagnose, load_run

    for finding in diagnose(load_run("runs/mine")).findings:
        print(finding.rule, finding.gain)

A rule is a file in `rules/` whose name is the cause. It has

    a docstring     the text of `flopmeter explain NAME`: what it is, how we know, what to do
    check(evidence) a Finding, or None when all is well; `NotCheckedError` from the evidence says what is missing
    EXPLAINS        optional: rules whose findings are this one's symptoms, and are dropped when it has found something
    IS_LAST_RESORT  optional, True: asked only when no other rule has found anything

Rules do not know each other; who takes precedence is said by EXPLAINS alone. Findings are ordered by expected gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import cleandoc
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

from flopmeter.diagnosis import rules
from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding, Gain, NotCheckedError
from flopmeter.errors import ConfigError, did_you_mean
from flopmeter.text import percent, plural, utilisation
from flopmeter.waterfall import Waterfall
from flopmeter.waterfall.split import FEW_STEPS

if TYPE_CHECKING:
    from flopmeter.record import Run

__all__ = ["RULES", "Diagnosis", "Evidence", "Finding", "Gain", "NotCheckedError", "Rule", "diagnose", "explain"]

Standing = Literal["good", "fair", "low", "very low", "unknown"]
GOOD_MFU, FAIR_MFU, LOW_MFU = 0.5, 0.2, 0.1
"""Above half of the peak is what well-tuned large runs report; below a fifth something is usually wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One cause that can be looked for."""

    name: str
    """As users type it."""
    explanation: str
    """What it is, how we know, what to do."""
    check: Callable[[Evidence], Finding | None]
    """Looks for it."""
    explains: tuple[str, ...]
    """Rules whose findings are symptoms of this one."""
    is_last_resort: bool
    """Asked only when no other rule has found anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What a run's record says about its speed."""

    headline: str
    """Where the run stands, and the first cause."""
    standing: Standing
    """good above 50 % MFU, fair above 20 %, low above 10 %, very low below."""
    mfu: float | None
    """Over wall time, pauses included; None when unknown."""
    waterfall: Waterfall
    """Where the time went."""
    findings: tuple[Finding, ...]
    """By expected gain, the largest first; one that puts all figures in doubt comes before them."""
    not_checked: Mapping[str, str]
    """Rules that could not look, and why."""


def _load_rule(name: str) -> Rule:
    module = import_module(f"{rules.__name__}.{name}")
    return Rule(
        name=name,
        explanation=cleandoc(module.__doc__ or ""),
        check=module.check,
        explains=tuple(getattr(module, "EXPLAINS", ())),
        is_last_resort=bool(getattr(module, "IS_LAST_RESORT", False)),
    )


RULES: Mapping[str, Rule] = {
    name: _load_rule(name) for _, name, _ in iter_modules(rules.__path__) if not name.startswith("_")
}
"""Every rule by its name."""


def diagnose(run: Run, start: int | None = None, stop: int | None = None) -> Diagnosis:
    """Judge a run, or its steps at positions `start` up to `stop`; never raises, whatever the record holds."""
    evidence = Evidence(run, start, stop)
    found: dict[str, Finding] = {}
    not_checked: dict[str, str] = {}
    for rule in sorted(RULES.values(), key=lambda rule: rule.is_last_resort):
        if rule.is_last_resort and found:
            continue
        try:
            finding = rule.check(evidence) if evidence.window.timed else _refuse(evidence)
        except NotCheckedError as reason:
            not_checked[rule.name] = str(reason)
        except Exception as error:  # noqa: BLE001 - a broken rule costs only itself
            not_checked[rule.name] = f"the rule failed on this record ({type(error).__name__}: {error})"[:200]
        else:
            found |= {rule.name: finding} if finding else {}
    findings = tuple(sorted(_without_symptoms(found), key=_weight, reverse=True))
    mfu = evidence.waterfall.mfu
    return Diagnosis(
        headline=_headline(mfu, findings, evidence, len(not_checked)),
        standing=_standing(mfu),
        mfu=mfu,
        waterfall=evidence.waterfall,
        findings=findings,
        not_checked=not_checked,
    )


def explain(name: str) -> str:
    """What a rule looks for, how, and what to do about it.

    Raises:
        ConfigError: there is no such rule.
    """
    if name in RULES:
        return RULES[name].explanation
    raise ConfigError(f"there is no rule {name!r}: {did_you_mean(name, RULES)}")


def _refuse(evidence: Evidence) -> Finding | None:
    raise NotCheckedError(evidence.waterfall.note)


def _without_symptoms(found: Mapping[str, Finding]) -> list[Finding]:
    explained = {symptom for name in found for symptom in RULES[name].explains}
    return [finding for name, finding in found.items() if name not in explained]


def _weight(finding: Finding) -> tuple[bool, float, float]:
    return finding.lost >= 1, finding.gain.expected if finding.gain else 0.0, finding.lost


def _standing(mfu: float | None) -> Standing:
    if mfu is None:
        return "unknown"
    return "good" if mfu > GOOD_MFU else "fair" if mfu > FAIR_MFU else "low" if mfu >= LOW_MFU else "very low"


def _headline(mfu: float | None, findings: tuple[Finding, ...], evidence: Evidence, num_blind: int) -> str:
    where = "MFU is unknown" if mfu is None else f"MFU over the wall time is {utilisation(mfu)}, {_standing(mfu)}"
    if not findings:
        return f"{where}; nothing could be judged: {evidence.waterfall.note or 'no rule could be checked'}."
    first = findings[0]
    cause = f"{where}{';' if mfu is None or ':' in first.title else ':'} {first.title}"
    if first.gain is not None:
        cause += f"; without that it would run about {_faster(first.gain.expected)}"
    elif RULES[first.rule].is_last_resort and num_blind and not evidence.is_untold:
        num_rules = sum(not rule.is_last_resort for rule in RULES.values())
        cause += f", though {num_blind} of {num_rules} rules could not look"
    return f"{cause}{_reserve(evidence.window.num_ordinary)}."


def _faster(gain: float) -> str:
    """Beyond twice as fast, percentages are hard to picture."""
    return f"{percent(gain)} faster" if gain <= 1 else f"{1 + gain:.1f} times as fast"


def _reserve(num_steps: int) -> str:
    return f" (from {plural(num_steps, 'step')} only)" if num_steps < FEW_STEPS else ""
