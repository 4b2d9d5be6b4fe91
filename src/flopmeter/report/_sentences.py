"""What do the facts say in words? The sentences that stand above the charts and are read out in place of them."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from flopmeter.report._counters import counters_text
from flopmeter.text import amount, percent, plain, plural, seconds, utilisation

SECTIONS = {
    "waterfall": "From peak to observed",
    "findings": "What would help",
    "timeline": "MFU and step time",
    "phases": "Where a step goes",
    "work": "Where the FLOPs go",
    "ranks": "Ranks",
    "datasets": "Datasets",
    "method": "How this number was made",
}
"""Of every format, by the anchor in the page."""


def sentences_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Every sentence of the page, by the name that the template uses."""
    return {
        "run_line": run_line(facts["run"]),
        "step_text": step_text(facts),
        "rate": _rate(facts["headline"]),
        "titles": SECTIONS,
        "contents": {anchor: title for anchor, title in SECTIONS.items() if _has(facts, anchor)},
        "leads": {
            "waterfall": _fall_line(facts),
            "timeline": _timeline_line(facts),
            "phases": _phases_line(facts["phases"]),
            "work": _work_line(facts["work"]),
            "ranks": _ranks_line(facts["ranks"]),
        },
        "method_rows": method_rows(facts),
        "remarks": remarks_of(facts),
    }


def run_line(run: dict[str, Any]) -> str:
    """Model, device, length and date of the run in one line."""
    model = f"{run['model']} with {_large(run['num_parameters'])} parameters" if run["model"] else ""
    ranks = f"{run['world_size']:,} ranks" if run["world_size"] > 1 else ""
    starts = f"{run['num_starts']} starts" if run["num_starts"] > 1 else ""
    parts = (
        model,
        run["device"],
        ranks,
        f"{plural(run['num_steps'], 'step')} in {seconds(run['wall_s'])}",
        starts,
        _date(run["started_at"]),
        run["host"],
        "" if run["is_finished"] else f"ended by {run['failure']}" if run["failure"] else "not finished",
    )
    return " · ".join(part for part in parts if part)


def step_text(facts: dict[str, Any]) -> str:
    """How long a steady step takes, or that there is none."""
    median_s, p95_s = facts["headline"]["step_median_s"], facts["headline"]["step_p95_s"]
    if median_s is None:
        return "no steady step" if facts["run"]["num_steps"] else "no steps"
    return f"{seconds(median_s)} median, 95 % below {seconds(p95_s)}"


def _large(number: int | None) -> str:
    if number is None:
        return "an unknown number of"
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else amount(number, "").replace("M", "million").strip()


def _date(time_s: float | None) -> str:
    if time_s is None or not 0 < time_s < 4e9:
        return ""
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _rate(headline: dict[str, Any]) -> dict[str, str]:
    if headline["tokens_per_second"] is None and headline["samples_per_second"] is not None:
        return {"name": "Samples", "value": plain(headline["samples_per_second"]), "unit": "per second"}
    return {"name": "Tokens", "value": plain(headline["tokens_per_second"]), "unit": "per second, without padding"}


def _has(facts: dict[str, Any], anchor: str) -> bool:
    if anchor == "waterfall":
        return bool(facts["waterfall"]["parts"])
    if anchor == "timeline":
        return facts["series"]["mfu"] is not None or facts["series"]["step_s"] is not None
    return anchor in ("findings", "method") or bool(facts[anchor])


def _fall_line(facts: dict[str, Any]) -> str:
    fall, steady = facts["waterfall"], facts["headline"]["mfu"]
    if fall["mfu"] is None:
        return f"Where {seconds(fall['wall_s'])} of wall time went."
    line = f"Over {seconds(fall['wall_s'])} of wall time the run reached {utilisation(fall['mfu'])} of peak."
    if steady is not None and abs(steady - fall["mfu"]) >= 0.0005:
        line += f" The steady steps alone reached {utilisation(steady)}; pauses and measured steps count here too."
    return line


def _timeline_line(facts: dict[str, Any]) -> str:
    series, run = facts["series"], facts["run"]
    marks, thinned = series["marks"], any(_is_thinned(series[key]) for key in ("mfu", "step_s"))
    told = [
        plural(run["num_steps"], "step") + (", thinned with the extremes kept" if thinned else ""),
        plural(len(marks["pauses"]), "pause"),
        plural(len(marks["measured"]), "measured step"),
        plural(len(marks["drops"]), "fall") + " of MFU" if marks["drops"] else "",
        plural(marks["num_restarts"], "restart") if marks["num_restarts"] else "",
    ]
    return "; ".join(text for text in told if text) + "."


def _is_thinned(line: dict[str, Any] | None) -> bool:
    return line is not None and len(line["value"]) < line["num_values"]


def _phases_line(phases: dict[str, Any] | None) -> str:
    known = {name: value for name, value in (phases or {"steady_s": {}})["steady_s"].items() if value is not None}
    total_s = sum(known.values())
    if not total_s:
        return "The phases of steady steps are unknown."
    largest = sorted(known.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{name.replace('_', ' ')} {percent(value / total_s)}" for name, value in largest)
    return f"Of a steady step of {seconds(total_s)} on average: {shares}."


def _work_line(work: dict[str, Any] | None) -> str:
    if work is None:
        return ""
    line = f"A step, as counted last, needs {amount(work['model_flop'], 'FLOP')} by the model's mathematics"
    if work["hardware_flop"]:
        line += f"; {amount(work['hardware_flop'], 'FLOP')} ran"
    if work["recompute_flop"]:
        line += f", {amount(work['recompute_flop'], 'FLOP')} of them recomputation"
    return line + "."


def _ranks_line(ranks: dict[str, Any] | None) -> str:
    if ranks is None:
        return ""
    told = [
        f"Own work time of {ranks['world_size']:,.0f} ranks: the time that each works before it waits for the others"
    ]
    if ranks["stragglers"]:
        last = ranks["stragglers"][-1]
        where = f" on {last['host']}" if last["host"] else ""
        told.append(f"the last straggler was rank {plain(last['rank'])}{where}, {seconds(last['extra_s'])} a step")
    if ranks["missing"]:
        told.append(f"{len(ranks['missing'])} ranks were missing at the end")
    return "; ".join(told) + "."


def method_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """How the number was made, row by row."""
    method = facts["method"]
    rows = [("Peak", _peak_text(peak)) for peak in method["peaks"]] or [("Peak", "unknown")]
    rows += [
        ("FLOPs", _flops_text(method)),
        ("Coverage of the count", percent(method["coverage"])),
        ("Largest error of a prediction", percent(method["flop_error"], 2)),
        ("Convention", method["convention"] or "unknown"),
        ("MFU with padding as work", utilisation(facts["headline"]["mfu_processed"])),
        ("flopmeter's own cost, of the wall time", percent(method["overhead_share"], 2)),
        ("Steps behind MFU", f"{facts['headline']['num_steady']:,} of {facts['run']['num_steps']:,}: "
         "warm-up and measured steps are left out"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in method["versions"].items()) or "unknown"),
    ]  # fmt: skip
    if facts["counters"]:
        rows.append(("Hardware counters", counters_text(facts["counters"], facts["headline"]["hfu"])))
    return rows


def _flops_text(method: dict[str, Any]) -> str:
    if method["mode"] == "trace":
        return "from the shapes in the trace"
    how = f", the last one {method['flop_method']}" if method["flop_method"] else ""
    return f"mode {method['mode'] or 'unknown'}; {plural(method['num_counts'], 'step')} counted{how}"


def _peak_text(peak: dict[str, Any]) -> str:
    note = f" ({peak['note']})" if peak["note"] else ""
    return f"{amount(peak['flop_per_s'], 'FLOP/s')} {peak['dtype']}, {peak['device']}: {peak['source']}{note}"


def remarks_of(facts: dict[str, Any]) -> list[str]:
    """What the record itself says against its numbers."""
    method = facts["method"]
    uncounted = [f"not counted: {', '.join(method['uncounted'])}"] if method["uncounted"] else []
    return [*method["warnings"], *method["left_out"], *uncounted, *method["skipped"]]
