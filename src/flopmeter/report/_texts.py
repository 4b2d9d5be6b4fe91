"""How is a report put into words and tables? The page, the terminal and Markdown all say what stands here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

from msgspec import Struct

from flopmeter import text
from flopmeter.diagnosis import Finding, Gain
from flopmeter.report._model import About, Counters, Number, Report
from flopmeter.schema import PHASES
from flopmeter.text import amount, clean, percent, plain, plural, seconds, signed, utilisation
from flopmeter.waterfall import FEW_STEPS

SMALLEST_SHARE = 0.0005
"""A part of the time below this is written as 0.0 %: it is left out of bars."""
MAX_TRIED = 20
MAX_COSTS = 5
NUM_STRETCHES = 12
"""Rows of the table over time."""


class Table(Struct, frozen=True, kw_only=True):
    """Some rows of text."""

    title: str
    columns: tuple[str, ...]
    """Headings; one that ends in `#` is of numbers."""
    rows: tuple[tuple[str, ...], ...]
    shares: tuple[float, ...] = ()
    """By row how long its bar is, where rows have bars."""


def run_line(about: About) -> str:
    """Model, device, length and date of the run in one line."""
    model = f"{about.model}, {_large(about.num_parameters)}" if about.model else ""
    if model and about.num_trainable not in (None, about.num_parameters):
        model += f" ({_large(about.num_trainable)} trainable)"
    started = about.started_at if about.started_at and 0 < about.started_at < 4e9 else None
    ended = f"ended by {about.failure}" if about.failure else "" if about.is_finished else "not finished"
    parts = (
        model,
        about.device if about.world_size == 1 else f"{about.world_size:,} ranks of {about.device}",
        f"{plural(about.num_steps, 'step')} in {seconds(about.wall_s)}",
        f"steps {about.window[0]:,} to {about.window[1]:,}" if about.window else "",
        plural(about.num_starts, "start") if about.num_starts > 1 else "",
        datetime.fromtimestamp(started, timezone.utc).strftime("%Y-%m-%d %H:%M UTC") if started else "",
        about.host,
        "" if about.is_trace else ended,
    )
    return " · ".join(part for part in parts if part)


def _large(number: int | None) -> str:
    if number is None:
        return "unknown number of parameters"
    scaled = f"{number / 1e9:.3g} billion" if number >= 1e9 else amount(number, "").replace("M", "million").strip()
    return f"{scaled} parameters"


def peak_text(report: Report) -> str:
    """What the MFU is a share of, or why it is not known."""
    if report.number.mfu is None:
        if report.is_early:
            return "no steady step yet"
        if report.method.is_partial:
            return f"the FLOPs of only {percent(report.method.coverage)} of its matmuls are known"
        return report.waterfall.note.removeprefix("MFU is unknown: ") or "no step was counted"
    peaks = report.method.peaks
    if len(peaks) != 1:
        return "of the peaks of " + ", ".join(peak.dtype for peak in peaks) if peaks else "no peak is known"
    ranks = f" x {report.about.world_size:,}" if report.about.world_size > 1 else ""
    return f"of {amount(peaks[0].flop_per_s, 'FLOP/s')} {peaks[0].dtype}{ranks}"


def names_text(number: Number) -> str:
    """What the same run would be called elsewhere."""
    return ", ".join(f"{row.short_name} {utilisation(row.mfu)}" for row in number.elsewhere if row.short_name)


def product_text(report: Report) -> str:
    """MFU times goodput; nothing for a trace, which shows some steps of a run."""
    number = report.number
    if report.about.is_trace:
        return ""
    if number.goodput is None:
        return "goodput is unknown"
    if number.mfu is None:
        return f"goodput {percent(number.goodput)}"
    return f"x goodput {percent(number.goodput)} = {utilisation(number.end_to_end)} end to end"


def gain_text(finding: Finding) -> str:
    """What a fix is worth; empty where nobody can tell."""
    if finding.gain is None:
        return ""
    low, high = signed(finding.gain.low).removesuffix(" %"), signed(finding.gain.high)
    return f"{signed(finding.gain.expected)} steps per second ({low} to {high})"


def step_text(report: Report) -> str:
    """How long a steady step takes, or that there is none."""
    number = report.number
    if number.step_median_s is None:
        return "no steady step" if report.about.num_steps else "no steps"
    return f"{seconds(number.step_median_s)} (95 % below {seconds(number.step_p95_s)})"


def metrics(report: Report) -> list[tuple[str, str]]:
    """The metrics that stand in a line under the number; those that are not known are left out."""
    number, fall = report.number, report.waterfall
    memory = next((line for line in report.timeline.lines if line.name == "Memory"), None)
    used = max((value for value in (memory.high or memory.mean) if value is not None), default=None) if memory else None
    rows = [
        ("Step", step_text(report)),
        ("Tokens/s", number.tokens_per_second and plain(number.tokens_per_second)),
        ("Samples/s", number.samples_per_second and plain(number.samples_per_second)),
        ("HFU", number.hfu and utilisation(number.hfu)),
        ("Goodput", not report.about.is_trace and number.goodput and percent(number.goodput)),
        ("Most memory", used and amount(used, "B")),
        ("Data wait", (share := fall.share("data_wait")) and percent(share)),
    ]
    return [(name, text) for name, text in rows if text]


def where_text(report: Report) -> tuple[str, str]:
    """What the bar of the time is of, and why the number in it is not the MFU where it is not."""
    fall, mfu = report.waterfall, report.number.mfu
    is_other = fall.mfu is not None and mfu is not None and utilisation(fall.mfu) != utilisation(mfu)
    note = f"The MFU of {utilisation(mfu)} is {utilisation(fall.mfu)} with pauses and measured steps in it."
    return f"Where {seconds(fall.wall_s)} of {plural(fall.num_steps, 'step')} went", note if is_other else ""


def fix_text(report: Report) -> str:
    """The first cause as one line for a log, or that there is none."""
    if report.is_early:
        return f"Too early to judge: {plural(report.number.num_steady, 'steady step')} so far."
    if not report.findings:
        return f"Nothing could be judged: {report.waterfall.note or 'no rule could be checked'}."
    title, few = report.findings[0].title, report.number.num_steady
    return f"{title[:1].upper()}{title[1:]}" + (f" (from {plural(few, 'step')} only)" if few < FEW_STEPS else "")


def timeline_text(report: Report) -> str:
    """What happened over the steps."""
    timeline = report.timeline
    told = [
        plural(report.about.num_steps, "step"),
        plural(len(timeline.pauses), "pause") if timeline.pauses else "",
        plural(len(timeline.measured), "measured step") if timeline.measured else "",
        plural(len(timeline.drops), "fall") + " of MFU" if timeline.drops else "",
        plural(timeline.num_restarts, "restart") if timeline.num_restarts else "",
    ]
    return ", ".join(text for text in told if text)


def ranks_text(report: Report) -> str:
    """What the ranks' own work times are, and who held up the others."""
    ranks = report.ranks
    if ranks is None:
        return ""
    told = ["Own work time: how long each rank works before it waits for the others"]
    if ranks.stragglers:
        last = ranks.stragglers[-1]
        where = f" on {last.host}" if last.host else ""
        told.append(f"the last straggler was rank {plain(last.rank)}{where}, {seconds(last.extra_s)} a step")
    if ranks.missing:
        told.append(f"{plural(len(ranks.missing), 'rank')} missing at the end")
    return "; ".join(told) + "."


_WRITERS: dict[str, Callable[[Any], str]] = {
    **{name: getattr(text, name) for name in ("percent", "utilisation", "seconds", "plain")},
    **{unit: partial(amount, unit=unit) for unit in ("FLOP", "FLOP/s", "B")},
    "times": lambda value: f"{value:.1f} times",
    "doubt": lambda value: seconds(value) if value else "",
}
_COLUMNS = {
    "waterfall": {"Part": "label", "Of the time#": "share percent", "Time#": "seconds seconds",
                  "Give or take#": "uncertainty_s doubt", "How it is known": "how"},
    "operators": {"Name": "name", "Time#": "seconds seconds", "Calls#": "calls plain", "Of the step#": "share percent",
                  "Speed#": "flop_per_s FLOP/s", "Of peak#": "of_peak percent"},
    "modules": {"Module": "label", "FLOPs of a step#": "flop FLOP", "Share#": "share percent"},
    "stragglers": {"Rank#": "rank plain", "Host": "host", "Since step#": "since_step plain",
                   "Longer by#": "extra_s seconds", "Phase": "phase", "Cause": "cause"},
    "datasets": {"Dataset": "name", "Samples#": "samples plain", "Loss#": "loss plain",
                 "Accuracy#": "accuracy percent"},
    "roles": {"What": "name", "Time#": "seconds seconds", "Of the wall time#": "share percent", "FLOPs#": "flop FLOP",
              "Of the peak#": "utilisation utilisation"},
    "memory": {"Device": "device", "Most at once#": "peak_bytes B", "Held by torch#": "reserved_bytes B",
               "There is#": "total_bytes B", "Room#": "headroom_bytes B", "Batch may grow at least#": "growth times"},
    "elsewhere": {"Convention": "name", "MFU#": "mfu utilisation", "FLOPs per token": "formula", "Counts": "meaning",
                  "Used by": "used_by"},
}  # fmt: skip
"""By table its columns: the heading (one that ends in `#` is of numbers), the field of a row, and how it is written."""


def tables(report: Report) -> dict[str, Table]:
    """Every table, by the section that it stands in; those without a row are left out."""
    work, found, ranks = report.work, report.operators, report.ranks
    is_device = found is not None and found.is_device
    rows: dict[str, tuple[str, Sequence[Any]]] = {
        "waterfall": ("Parts of the time", [p for p in report.waterfall.parts if abs(p.share) >= SMALLEST_SHARE]),
        "operators": (
            "Time by kernel" if is_device else "Time by operator",
            [row for row in (found.matmuls, *found.rows) if row] if found else (),
        ),
        "modules": ("FLOPs by module", work.modules if work else ()),
        "stragglers": ("Ranks that held up the others", ranks.stragglers if ranks else ()),
        "datasets": ("Datasets", report.datasets),
        "elsewhere": ("The same run under other conventions", report.number.elsewhere),
        "roles": ("Training, and what else the run did", roles if len(roles := report.whole.roles) > 1 else ()),
        "memory": ("Memory", report.whole.memory),
    }
    made = {}
    for name, (title, of_rows) in rows.items():
        fields = [column.split() for column in _COLUMNS[name].values()]
        told = [[_written(getattr(row, field), *how) for field, *how in fields] for row in of_rows]
        shares = [row.share or 0.0 for row in of_rows if hasattr(row, "share")]
        made[name] = _table(title, list(_COLUMNS[name]), told, shares)
    made |= {
        "tried": _tried(report),
        "timeline": _stretches(report),
        "phases": _phases(report),
        "flop": _flop(report),
        "ranks": _ranks(report),
    }
    return {name: table for name, table in made.items() if table.rows}


def _written(value: Any, how: str = "") -> str:
    return "" if value is None else _WRITERS[how](value) if how else str(value)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], shares: Iterable[float] = ()) -> Table:
    """Columns in which no row says anything are left out."""
    rows = list(rows)
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    cells = tuple(tuple(row[place] for place in kept) for row in rows)
    return Table(title=title, columns=tuple(columns[place] for place in kept), rows=cells, shares=tuple(shares))


def _stretches(report: Report) -> Table:
    lines, rows = report.timeline.lines[:3], []
    last = len(lines[0].step) - 1 if lines else -1
    for place in sorted({index * last // (NUM_STRETCHES - 1) for index in range(NUM_STRETCHES)} if lines else ()):
        values = [in_unit(line.mean[place], line.unit) if place < len(line.mean) else "" for line in lines]
        rows.append((plain(lines[0].step[place]), *values))
    return _table("Over time", ("Step#", *(f"{line.name}#" for line in lines)), rows)


def in_unit(value: float | None, unit: str) -> str:
    """The value of a line over the steps."""
    if unit == "s":
        return seconds(value)
    return utilisation(value) if unit == "1" else amount(value, unit) if unit else plain(value)


def _tried(report: Report) -> Table:
    def likely(gain: Gain | None) -> str:
        low = signed(gain.low).removesuffix(" %") if gain else ""
        return f"{signed(gain.expected)} ({low} to {signed(gain.high)})" if gain else ""

    found = report.tried
    rows = [
        *(found.rows[:MAX_TRIED] if found else ()),
        *([found.together] if found and found.together else []),
    ]
    told = (
        (
            row.what,
            likely(row.predicted),
            likely(row.gain) or row.reason or row.outcome,
            row.losses_text,
            row.memory_text,
            row.code,
        )
        for row in rows
    )
    columns = ("Change", "Predicted#", "Measured#", "Loss", "Memory", "To write")
    return _table("Tried on this program", columns, ([clean(cell, 400) for cell in row] for row in told))


def _phases(report: Report) -> Table:
    known = report.phases.steady_s if report.phases else {}
    total_s = sum(known.values()) or 1.0
    rows = ((phase_name(name), seconds(value), percent(value / total_s)) for name, value in known.items())
    shares = (value / total_s for value in known.values())
    return _table("Phases of a steady step", ("Phase", "Mean#", "Share#"), rows, shares)


def phase_name(phase: str) -> str:
    """As people read it."""
    return phase.replace("_", " ").capitalize()


def phase_style(phase: str) -> str:
    """The phase, or other for one that no colour is known for."""
    return phase if phase in (*PHASES, "exposed_communication") else "other"


def _flop(report: Report) -> Table:
    work = report.work
    parts: list[tuple[str, float | None]] = []
    if work:
        parts = [("by the model's mathematics", work.model_flop), ("executed", work.hardware_flop)]
        parts += [("recomputed", work.recompute_flop), *work.by_dtype, *work.by_op]
    rows = [(name, amount(flop, "FLOP"), percent(flop / work.model_flop)) for name, flop in parts if flop and work]
    return _table("FLOPs of a step", ("What", "FLOPs#", "Of the model's#"), rows)


def _ranks(report: Report) -> Table:
    rows = []
    for name, stats in (report.ranks.stats if report.ranks else {}).items():
        write = _WRITERS["B"] if name == "memory_bytes" else seconds
        label = phase_name(name.replace("own_s", "own_work").removesuffix("_s").removesuffix("_bytes"))
        rows.append((label, *map(write, stats[:3]), plain(stats[3])))
    return _table("Spread over the ranks", ("Last interval", "Least#", "Mean#", "Most#", "At rank#"), rows)


def totals_rows(report: Report) -> list[tuple[str, str]]:
    """The whole run in sums; what is not known is left out."""
    whole = report.whole
    cost = None if whole.cost is None else plain(whole.cost)
    lost = [f"{finding.rule} {plain(finding.lost * whole.cost)}" for finding in report.findings[:MAX_COSTS]
            if whole.cost and finding.is_cause and finding.lost]  # fmt: skip
    rows = [
        ("Tokens", whole.tokens and plain(whole.tokens)),
        ("Samples", whole.samples and plain(whole.samples)),
        ("FLOPs of the model", whole.model_flop and amount(whole.model_flop, "FLOP")),
        ("FLOPs that ran", whole.hardware_flop and amount(whole.hardware_flop, "FLOP")),
        ("Energy", whole.energy_kwh and f"{plain(whole.energy_kwh)} kWh"),
        ("Energy per token", whole.joules_per_token and f"{plain(whole.joules_per_token)} J"),
        ("Cost", cost and f"{cost}, in the currency of price_per_device_hour"),
        ("Cost of a million tokens", whole.cost_per_million_tokens and plain(whole.cost_per_million_tokens)),
        ("Cost of lost time", ", ".join(lost)),
        ("Left out", "; ".join(whole.notes)),
    ]
    return [(name, text) for name, text in rows if text]


def method_rows(report: Report) -> list[tuple[str, str]]:
    """How the number was made, row by row; what does not apply or is not known is left out."""
    method, number = report.method, report.number
    peaks = [
        f"{amount(peak.flop_per_s, 'FLOP/s')} {peak.dtype}, {peak.device}: {peak.source}"
        + (f" ({peak.note})" if peak.note else "")
        for peak in method.peaks
    ]
    how = f", the last one {method.flop_method}" if method.flop_method else ""
    counted = f"mode {method.mode or 'unknown'}; {plural(method.num_counts, 'step')} counted{how}"
    versions = ", ".join(f"{name} {version}" for name, version in method.versions.items())
    rows = [
        *(("Peak", text) for text in peaks or ["unknown"]),
        ("Roof of this device", method.roof and f"{percent(method.roof.of_peak)} of the peak, {method.roof.how}"),
        ("MFU of the roof", method.roof and method.roof.mfu and utilisation(method.roof.mfu)),
        ("FLOPs", "from the shapes in the trace" if method.mode == "trace" else counted),
        ("Coverage of the count", method.coverage and percent(method.coverage)),
        ("Largest error of a prediction", None if method.flop_error is None else percent(method.flop_error, 2)),
        ("Convention", method.convention),
        ("HFU, recomputation included", number.hfu and utilisation(number.hfu)),
        ("MFU with padding as work", number.mfu_processed and utilisation(number.mfu_processed)),
        ("Steady steps", f"{number.num_steady:,} of {report.about.num_steps:,} (without warm-up and measured steps)"),
        ("Goodput", number.goodput_note),
        ("flopmeter's own cost", number.overhead_share and percent(number.overhead_share, 2)),
        ("Hardware counters", report.counters and _counters_text(report.counters, number.hfu)),
        ("Other conventions", number.elsewhere_note and f"not given: {number.elsewhere_note}"),
        ("Versions", versions and f"{versions}; read by flopmeter {method.reader_version}"),
    ]
    return [(name, text) for name, text in rows if text]


def _counters_text(counters: Counters, hfu: float | None) -> str:
    """Utilisation stands beside HFU and is not turned into it."""
    shares = {"tensor pipes": counters.tensor_active, "multiprocessors": counters.sm_active}
    shares["memory"] = counters.dram_active
    told = [f"{words} busy {percent(share)}" for words, share in shares.items() if share is not None]
    if counters.flop_per_s is not None:
        told.append(f"{amount(counters.flop_per_s, 'FLOP/s')} executed, element-wise work included")
    if not told:
        return f"{counters.reader}: no values ({counters.note or 'the source gave none'})"
    return f"{counters.reader}: {', '.join(told)}; HFU by counting {percent(hfu)}"
