"""What does a report say? Everything it shows, computed once from the run into plain JSON-able values.

    facts = facts_of(load_run("runs/mine"))
    facts["headline"]["mfu"]        # 0.412, or None when it is unknown

Numbers are finite or None, texts are on one line and of bounded length, lists are bounded too: a run of a million steps
gives about as many facts as one of ten thousand. Texts are not escaped: that is each format's own business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flopmeter import __version__
from flopmeter.columns import mapping
from flopmeter.diagnosis import RULES, Diagnosis, diagnose
from flopmeter.goodput import Goodput, goodput
from flopmeter.metrics import summarise
from flopmeter.record import Run
from flopmeter.report._counters import counters_of
from flopmeter.report._elsewhere import elsewhere
from flopmeter.report._ranks import ranks_of
from flopmeter.report._series import phases_of, series_of
from flopmeter.report._work import work_of
from flopmeter.schema import RUN_FILE
from flopmeter.text import clean, number
from flopmeter.waterfall import LABELS

FACTS_VERSION = 1
MAX_DATASETS = 100
MAX_SENTENCES = 40
MAX_SENTENCE = 600

_HEADLINE_KEYS = ("mfu", "hfu", "mfu_processed", "tokens_per_second", "samples_per_second", "overhead_share")


def facts_of(run: Run) -> dict[str, Any]:
    """All that a report shows of a run."""
    found = diagnose(run)
    spent = goodput(run)
    keys = ["perf/step_time", *(f"perf/{name}" for name in _HEADLINE_KEYS)]
    means = summarise({key: run.columns[key] for key in keys if key in run.columns}, run.steady())
    mfu = number(means.get("perf/mfu"))
    return {
        "version": FACTS_VERSION,
        "run": _run(run, spent),
        "headline": _headline(means, found, spent),
        "waterfall": _waterfall(found),
        "findings": [_finding(finding) for finding in found.findings],
        "not_checked": {clean(rule, 60): clean(why) for rule, why in found.not_checked.items()},
        "series": series_of(run),
        "phases": phases_of(run),
        "work": work_of(run),
        "ranks": ranks_of(run),
        "datasets": _datasets(run),
        "counters": counters_of(run),
        "method": _method(run, means, mfu),
        "goodput": _plain(asdict(spent)),
    }


def _run(run: Run, spent: Goodput) -> dict[str, Any]:
    header = run.header
    name = run.path.parent.name if run.path.name == RUN_FILE else run.path.stem
    return {
        "name": clean(name or run.path.resolve().parent.name, 80),
        "run_id": clean(header.run_id, 40),
        "model": clean(header.model, 80),
        "num_parameters": header.num_parameters or None,
        "device": clean(header.device, 80),
        "host": clean(header.host, 80),
        "world_size": header.world_size,
        "started_at": number(run.headers[0].started_at) or None,
        "wall_s": number(spent.wall_s),
        "num_steps": len(run),
        "num_starts": spent.num_starts,
        "is_finished": run.summary is not None and run.failure is None,
        "failure": clean(run.failure or "", 80),
    }


def _headline(means: Mapping[str, float], found: Diagnosis, spent: Goodput) -> dict[str, Any]:
    return {
        "verdict": clean(found.headline, MAX_SENTENCE),
        "standing": found.standing,
        **{name: number(means.get(f"perf/{name}")) for name in _HEADLINE_KEYS},
        "step_median_s": number(means.get("step_time_median_s")),
        "step_p95_s": number(means.get("step_time_p95_s")),
        "num_steady": int(means.get("steady_steps", 0)),
        "goodput": number(spent.share),
        "goodput_note": clean(spent.note),
    }


def _waterfall(found: Diagnosis) -> dict[str, Any]:
    fall = found.waterfall
    parts = [
        {
            "name": part.name,
            "label": LABELS.get(part.name, clean(part.name)),
            "seconds": number(part.seconds),
            "share": number(part.share),
            "uncertainty_s": number(part.uncertainty_s),
            "how": clean(part.how, MAX_SENTENCE),
        }
        for part in fall.parts
    ]
    return {"wall_s": number(fall.wall_s), "mfu": number(fall.mfu), "note": clean(fall.note or ""), "parts": parts}


def _finding(finding: Any) -> dict[str, Any]:
    gain = finding.gain
    return {
        "rule": clean(finding.rule, 60),
        "is_cause": not RULES[finding.rule].is_last_resort,
        "title": clean(finding.title, MAX_SENTENCE),
        "lost": number(finding.lost),
        "evidence": [clean(text, MAX_SENTENCE) for text in finding.evidence[:MAX_SENTENCES]],
        "advice": [clean(text, MAX_SENTENCE) for text in finding.advice[:MAX_SENTENCES]],
        "gain": gain and {name: number(getattr(gain, name)) for name in ("low", "expected", "high")},
    }


def _datasets(run: Run) -> list[dict[str, Any]]:
    """The last known numbers of each dataset, in the order in which they came up."""
    last: dict[str, float | None] = {}
    for key, column in run.columns.items():
        if key.startswith("dataset/"):
            known = (value for place in range(len(column) - 1, -1, -1) if (value := number(column[place])) is not None)
            last[key] = next(known, None)
    for event in run.named("metrics"):  # what came together after the last step that was told of
        last |= {key: number(value) for key, value in mapping(event.get("metrics")).items()}
    found: dict[str, dict[str, Any]] = {}
    for key, value in last.items():
        kind, _, rest = key.partition("/")
        name, _, quantity = rest.rpartition("/")
        if kind == "dataset" and name and quantity in ("loss", "accuracy", "samples") and len(found) < MAX_DATASETS:
            empty = {"name": clean(name, 80), "loss": None, "accuracy": None, "samples": None}
            found.setdefault(name, empty)[quantity] = value
    return list(found.values())


def _method(run: Run, means: Mapping[str, float], mfu: float | None) -> dict[str, Any]:
    """How the number was made."""
    counts = run.named("count")
    count = counts[-1] if counts else {}
    errors = [error for event in run.events if (error := number(event.get("flop_error"))) is not None]
    return {
        "peaks": _peaks(run),
        "mode": clean(run.header.mode, 40),
        "convention": clean(run.header.convention, 40),
        "flop_method": clean(count.get("method") or "", 120),
        "coverage": number(count.get("coverage")),
        "uncounted": [clean(name, 80) for name in list(mapping(count.get("uncounted")))[:MAX_SENTENCES]],
        "left_out": _sentences(count.get("left_out")),
        "num_counts": len(counts),
        "flop_error": max(map(abs, errors), default=None),
        "elsewhere": elsewhere(run, mfu),
        "overhead_share": number(means.get("perf/overhead_share")),
        "versions": {clean(k, 40): clean(v, 60) for k, v in list(run.header.versions.items())[:20]},
        "reader_version": __version__,
        "warnings": _warnings(run),
        "skipped": _sentences(run.skipped),
    }


def _peaks(run: Run) -> list[dict[str, Any]]:
    """The peak of each dtype that did work; the newest one counts."""
    return [
        {
            "dtype": clean(dtype, 20),
            "device": clean(peak.get("device") or run.header.device, 80),
            "flop_per_s": number(peak.get("flop_per_s")),
            "source": clean(peak.get("source") or "", 40),
            "note": clean(peak.get("note") or "", MAX_SENTENCE),
        }
        for dtype, peak in list(run.peaks.items())[:MAX_SENTENCES]
    ]


def _warnings(run: Run) -> list[str]:
    """Each warning once."""
    texts = (event.get("message") for event in run.named("warning"))
    return _sentences(list(dict.fromkeys(text for text in texts if isinstance(text, str))))


def _sentences(values: Any) -> list[str]:
    texts = [text for text in values if isinstance(text, str)] if isinstance(values, (list, tuple)) else []
    return [clean(text, MAX_SENTENCE) for text in texts[:MAX_SENTENCES]]


def _plain(value: Any) -> Any:
    """Finite numbers, short texts, and containers of them."""
    if isinstance(value, Mapping):
        return {clean(str(key), 40): _plain(item) for key, item in list(value.items())[:MAX_SENTENCES]}
    return clean(value) if isinstance(value, str) else number(value)
