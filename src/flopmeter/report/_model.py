"""What does a report say? Everything that it shows, derived once from a run into typed values.

    report = report_of(load_run("runs/mine"))
    report.number.mfu           # 0.412, or None when it is unknown

Every output renders this and nothing else: the page, the live page, the terminal, Markdown, text and JSON. Numbers are
finite or None, texts are on one line and of bounded length, lists are bounded too: a run of a million steps gives about
as much as one of ten thousand. Texts are not escaped: that is each format's own business.
"""

from __future__ import annotations

import math
import operator
import re
import shlex
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec import Struct

from flopmeter import __version__
from flopmeter.columns import at, finite, mapping, read_toml
from flopmeter.devices import dtype_name
from flopmeter.devices.kernels import short_name
from flopmeter.devices.roof import throttling
from flopmeter.diagnosis import MUCH_LARGER, RULES, STANDINGS, Diagnosis, Finding, diagnose
from flopmeter.errors import RecordError
from flopmeter.goodput import Goodput, goodput
from flopmeter.metrics import certainty, flop_per_s
from flopmeter.record import Run
from flopmeter.record.reader import MIN_COVERAGE
from flopmeter.report._elsewhere import OtherName, elsewhere
from flopmeter.report._modules import Module, modules_of
from flopmeter.schema import PHASES, RUN_FILE
from flopmeter.text import clean, number, percent, rounded
from flopmeter.totals import Totals, totals
from flopmeter.trials import Tried, read_tried
from flopmeter.waterfall import FEW_STEPS, Part, Waterfall, roof_share

REPORT_VERSION = 2
MAX_BUCKETS = 2000
"""Points of one line. A run of up to twice as many steps is drawn step by step."""
MAX_BARS = 48
"""Stretches of the run for which the phases are told apart."""
MAX_MARKS = 300
"""Pauses, measured steps and the like that are marked over the steps."""
MAX_ROWS = 20
"""Operators, kernels and dtypes."""
MAX_DATASETS = MAX_STRAGGLERS = 100
MAX_SENTENCES, MAX_REMARKS = 40, 160
MAX_SENTENCE = 600
MAX_RANKS, MAX_RANK_COLUMNS, MAX_CELLS = 1024, 200, 40_000


class About(Struct, frozen=True, kw_only=True):
    """Which run it is."""

    name: str
    run_id: str
    model: str
    num_parameters: int | None
    num_trainable: int | None
    device: str
    host: str
    world_size: int
    started_at: float | None
    wall_s: float | None
    num_steps: int
    num_starts: int
    is_finished: bool
    failure: str
    is_trace: bool
    place: str
    """What a command takes to read the run again, quoted for a shell."""
    window: tuple[int, int] | None
    """First and last step number of the steps that are reported, where that is not the whole run."""


class Number(Struct, frozen=True, kw_only=True):
    """The MFU of the steady steps, and what is said with it."""

    mfu: float | None
    certainty: str | None
    """How sure it is: it stands wherever the MFU is shown."""
    standing: str
    """good, fair, low, very low, impossible or unknown."""
    goodput: float | None
    goodput_note: str
    end_to_end: float | None
    """MFU times goodput."""
    elsewhere: tuple[OtherName, ...]
    """What other people would call this MFU."""
    elsewhere_note: str
    """Why that is not known."""
    hfu: float | None
    mfu_processed: float | None
    """With padding as work."""
    tokens_per_second: float | None
    samples_per_second: float | None
    step_median_s: float | None
    step_p95_s: float | None
    num_steady: int
    overhead_share: float | None


class Line(Struct, frozen=True, kw_only=True):
    """One quantity over the steps, in buckets of neighbouring steps; None where a bucket has no value."""

    name: str
    unit: str
    """"1" for a share; s, B, W, or nothing."""
    step: list[int]
    """First step of each bucket. Smaller than the one before where a restart went back."""
    mean: list[float | None]
    low: list[float | None]
    """Empty where each bucket is one step."""
    high: list[float | None]


class Timeline(Struct, frozen=True, kw_only=True):
    """Lines on one axis of steps, and what happened when."""

    lines: tuple[Line, ...]
    warmup: list[tuple[int, int]]
    measured: list[int]
    pauses: list[tuple[int, str, float]]
    """Step after which it came, name, seconds."""
    drops: list[tuple[int, float, float]]
    """Step from which on, MFU before and after."""
    num_restarts: int


class Phases(Struct, frozen=True, kw_only=True):
    """Mean seconds of a step by phase; waiting for other ranks is taken out of the backward pass."""

    steps: list[tuple[int, int]]
    """First and last step of each stretch."""
    seconds: dict[str, list[float | None]]
    steady_s: dict[str, float]
    """Of the steady steps."""


class Operator(Struct, frozen=True, kw_only=True):
    """One operator, or kernel, of the sampled step."""

    name: str
    seconds: float
    calls: float | None
    share: float | None
    """Of the sampled step."""
    flop_per_s: float | None = None
    """Model FLOPs, as counted last, over its time."""
    of_peak: float | None = None


class Operators(Struct, frozen=True, kw_only=True):
    """Where the latest sampled step spent its time, longest first; the profiler's own cost is in it."""

    is_device: bool
    """Kernels of a device, not operators of the host."""
    after_step: int | None
    step_s: float | None
    rows: tuple[Operator, ...]
    matmuls: Operator | None
    """All matmuls together."""


class Work(Struct, frozen=True, kw_only=True):
    """FLOPs of a step, as counted last."""

    model_flop: float
    hardware_flop: float | None
    recompute_flop: float | None
    by_op: list[tuple[str, float]]
    by_dtype: list[tuple[str, float]]
    modules: tuple[Module, ...]


class Straggler(Struct, frozen=True, kw_only=True):
    """A rank that held up the others."""

    rank: int | None
    host: str
    phase: str
    cause: str
    extra_s: float | None
    since_step: int | None


class Ranks(Struct, frozen=True, kw_only=True):
    """Own work time of each rank: the time that it works before it waits for the others."""

    world_size: int
    steps: list[int]
    """Last step of each interval."""
    own_s: list[list[float | None]]
    """By interval, then by rank: the slowest of the interval."""
    stats: dict[str, tuple[float | None, float | None, float | None, float | None]]
    """Of the last interval: least, mean, most, and the rank that has it."""
    missing: list[int]
    stragglers: tuple[Straggler, ...]


class Dataset(Struct, frozen=True, kw_only=True):
    """What is known of one dataset; loss and accuracy are means over its samples of the last interval."""

    name: str
    samples: float | None = None
    loss: float | None = None
    accuracy: float | None = None


class Counters(Struct, frozen=True, kw_only=True):
    """What the device's own counters said: means over the run. Utilisation stands beside HFU, not in place of it."""

    reader: str
    tensor_active: float | None
    sm_active: float | None
    dram_active: float | None
    flop_per_s: float | None
    """Of a CPU, element-wise work included."""
    note: str


class PeakLine(Struct, frozen=True, kw_only=True):
    """What MFU is held against."""

    dtype: str
    device: str
    flop_per_s: float | None
    source: str
    note: str


class Roof(Struct, frozen=True, kw_only=True):
    """What this very device was measured to reach, and the MFU of that."""

    of_peak: float
    mfu: float | None
    """MFU over the roof in place of the peak."""
    how: str


class Method(Struct, frozen=True, kw_only=True):
    """How the number was made."""

    peaks: list[PeakLine]
    mode: str
    convention: str
    flop_method: str
    coverage: float | None
    num_counts: int
    flop_error: float | None
    """Largest error of a prediction that a count has tested."""
    roof: Roof | None
    versions: dict[str, str]
    reader_version: str
    remarks: list[str]
    """What the record itself says against its numbers."""

    @property
    def is_partial(self) -> bool:
        """Whether too few of the FLOPs are known for what is said of their sum."""
        return self.coverage is not None and self.coverage < MIN_COVERAGE


class Report(Struct, frozen=True, kw_only=True):
    """All that is shown of a run."""

    version: int
    about: About
    number: Number
    verdict: str
    """One sentence: where the run stands, and the first cause."""
    waterfall: Waterfall
    findings: tuple[Finding, ...]
    """Largest gain first."""
    code: dict[str, str]
    """By rule: a line to copy, where its advice has one."""
    larger: Part | None
    """A part of the time that is much larger than what the first finding costs, and that no fix is known for."""
    not_checked: dict[str, str]
    tried: Tried | None
    """What `flopmeter try` measured on this program."""
    timeline: Timeline
    phases: Phases | None
    operators: Operators | None
    work: Work | None
    ranks: Ranks | None
    datasets: tuple[Dataset, ...]
    counters: Counters | None
    method: Method
    goodput: Goodput
    whole: Totals
    """The whole run in sums, whatever steps are reported."""

    @property
    def fix(self) -> Finding | None:
        """What to fix first; None where no cause is known."""
        return self.findings[0] if self.findings and self.findings[0].is_cause and not self.is_early else None

    @property
    def is_early(self) -> bool:
        """Whether the run goes on and has too few steps yet for a verdict."""
        about = self.about
        return not (about.is_finished or about.failure or about.is_trace) and self.number.num_steady < FEW_STEPS


def report_of(run: Run, start: int | None = None, stop: int | None = None) -> Report:
    """All that a report shows of a run, or of its steps at positions `start` up to `stop`; goodput is the run's."""
    found, spent, slow_host = diagnose(run, start, stop), goodput(run), run.last("straggler").get("host")
    places = range(len(run))[start:stop]
    stretches = (range(max(of.start, places.start), min(of.stop, places.stop)) for of in run.steady_stretches())
    steady = list(filter(None, stretches))
    is_whole = len(places) == len(run)
    told = _number(run, steady, spent)
    return Report(
        version=REPORT_VERSION,
        about=_about(run, spent, None if is_whole or not places else (run.step[places[0]], run.step[places[-1]])),
        number=told,
        verdict=clean(found.headline, MAX_SENTENCE),
        waterfall=found.waterfall,
        findings=found.findings,
        code={finding.rule: code for finding in found.findings if (code := code_of(finding, slow_host))},
        larger=_larger(found),
        not_checked=dict(found.not_checked),
        tried=_tried(run),
        timeline=timeline_of(run, places),
        phases=_phases(run, places, steady),
        operators=_operators(run),
        work=_work(run),
        ranks=_ranks(run),
        datasets=_datasets(run),
        counters=_counters(run),
        method=_method(run, told.mfu),
        goodput=spent,
        whole=totals(run, spent),
    )


def _tried(run: Run) -> Tried | None:
    with suppress(RecordError):
        return read_tried(run.path.parent) if run.path.name == RUN_FILE else None
    return None


def _larger(found: Diagnosis) -> Part | None:
    first = found.findings[0] if found.findings else None
    largest = max((part for part in found.waterfall.parts if part.name != "ideal"), key=lambda p: p.share, default=None)
    if first is None or largest is None or not first.is_cause:
        return None
    named = [RULES[rule].parts for rule in (first.rule, *RULES[first.rule].explains)]
    if any(largest.name in parts for parts in named):
        return None
    return largest if largest.share > MUCH_LARGER * first.lost else None


def _about(run: Run, spent: Goodput, window: tuple[int, int] | None) -> About:
    header, is_file = run.header, run.path.name == RUN_FILE
    place = run.path.parent if is_file else run.path
    name = run.path.resolve().parent.name if is_file else run.path.stem
    return About(
        name=clean(name, 80),
        **{field: clean(getattr(header, field), 80) for field in ("run_id", "model", "device", "host")},
        num_parameters=header.num_parameters or None,
        num_trainable=header.num_trainable or None,
        world_size=header.world_size,
        started_at=number(run.headers[0].started_at) or None,
        wall_s=number(spent.wall_s),
        num_steps=len(run),
        num_starts=spent.num_starts,
        is_finished=run.summary is not None and run.failure is None,
        failure=clean(run.failure or "", 80),
        is_trace=header.mode == "trace",
        # A page is sent to others: it does not tell where on this machine the run lies.
        place=shlex.quote(clean(place.name if place.is_absolute() else str(place), 200)),
        window=window,
    )


def _number(run: Run, steady: Sequence[range], spent: Goodput) -> Number:
    names = ("mfu", "hfu", "mfu_processed", "tokens_per_second", "samples_per_second", "overhead_share")
    means = run.sum_up(steady, ["perf/step_time", *(f"perf/{name}" for name in names)])
    mfu, share = number(means.get("perf/mfu")), number(spent.share)
    standing = next((name for least, name in STANDINGS if mfu is not None and (mfu > least or not least)), "unknown")
    others, why_not = elsewhere(run, mfu)
    return Number(
        **{name: number(means.get(f"perf/{name}")) for name in names},
        certainty=certainty(means),
        standing="impossible" if max(mfu or 0.0, number(means.get("perf/hfu")) or 0.0) > 1 else standing,
        goodput=share,
        goodput_note=clean(spent.note),
        end_to_end=None if mfu is None or share is None else mfu * share,
        elsewhere=others,
        elsewhere_note=why_not,
        step_median_s=number(means.get("step_time_median_s")),
        step_p95_s=number(means.get("step_time_p95_s")),
        num_steady=int(means.get("steady_steps", 0)),
    )


def code_of(finding: Finding, slow_host: Any = "") -> str:
    """A line to copy from the first advice that has one; empty where none has."""
    signs = read_toml(Path(__file__).parent / "_assets" / "code.toml")["code"]
    code = next((str(code) for text in finding.advice for sign, code in signs.items() if sign in text), "")
    # A host's name is only used where a shell and ssh take it as nothing else.
    is_host = isinstance(slow_host, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,80}", slow_host)
    return f"ssh {slow_host} {code}" if finding.rule == "straggler" and is_host and code else code


def timeline_of(run: Run, places: range | None = None) -> Timeline:
    """MFU, step time, loss, memory and power over the steps, with what happened beside them."""
    places = range(len(run)) if places is None else places
    lines = [
        _line("MFU", "1", run.step, run.columns.get("perf/mfu"), places),
        _line("Step time", "s", run.step, run.columns.get("perf/step_time"), places),
        _line("Loss", "", run.step, run.columns.get("training/loss"), places),
        *_resources(run, places),
    ]
    inside = run.step[places.start : places.stop]
    low, high = min(inside, default=0), max(inside, default=0)
    warmup = sorted(place for place, marks in run.marks.items() if "warmup" in marks and place in places)
    measured = sorted(place for place, marks in run.marks.items() if "warmup" not in marks and place in places)
    pauses = [
        (step, clean(event.get("name"), 40), duration_s)
        for event in run.named("pause")
        if (duration_s := number(event.get("duration_s"))) is not None
        and (step := _step(event.get("after_step"))) is not None
    ]
    drops = [
        (step, before, after)
        for event in run.named("regime")
        if (before := number(event.get("from_mfu"))) is not None
        and (after := number(event.get("to_mfu"))) is not None
        and (step := _step(event.get("since_step"))) is not None
    ]
    return Timeline(
        lines=tuple(line for line in lines if line is not None),
        warmup=[(run.step[part.start], run.step[part.stop - 1]) for part in _stretches(warmup)][:MAX_MARKS],
        measured=[run.step[place] for place in evenly(measured, MAX_MARKS)],
        pauses=sorted(sorted((row for row in pauses if low <= row[0] <= high), key=lambda row: -row[2])[:MAX_MARKS]),
        drops=[row for row in drops if low <= row[0] <= high][:MAX_MARKS],
        num_restarts=len(run.headers) - 1,
    )


def _resources(run: Run, places: range) -> Iterator[Line | None]:
    """What was sampled beside the steps: its own times are told as the step that ran then."""
    events = [(time_s, mapping(event.get("metrics"))) for event in run.named("resources")
              if (time_s := number(event.get("time"))) is not None]  # fmt: skip
    memory = ("resource/gpu_memory_bytes", "resource/process_memory_bytes")
    used = next((key for key in memory if any(key in metrics for _, metrics in events)), memory[0])
    lines = [("Memory", "B", used), ("Power", "W", "resource/gpu_power_w"), ("Clock", "Hz", "resource/gpu_clock_hz")]
    held = {"allocated": "Memory of tensors", "reserved": "Memory that torch holds"}
    named = dict.fromkeys(key for _, metrics in events for key in metrics if key.startswith("resource/memory_"))
    for key in list(named)[:MAX_ROWS]:
        what, _, device = key.removeprefix("resource/memory_").partition("/")
        if (name := held.get(what.removesuffix("_bytes"))) is not None:
            lines.append((f"{name}, {clean(device, 20)}" if device else name, "B", key))
    for name, unit, key in lines:
        steps, values = array("q"), array("d")
        for time_s, metrics in events:
            place = min(bisect_left(run.time, time_s), len(run) - 1)
            if place in places and (value := number(metrics.get(key))) is not None:
                steps.append(run.step[place])
                values.append(value)
        yield _line(name, unit, steps, values, range(len(steps)))


def _line(name: str, unit: str, step: array[int], values: array[float] | None, places: range) -> Line | None:
    if values is None or not any(map(math.isfinite, values)):
        return None
    is_each = len(places) <= 2 * MAX_BUCKETS
    parts = [range(place, place + 1) for place in places] if is_each else list(buckets(places, MAX_BUCKETS))
    mean, low, high = [], [], []
    for part in parts:
        inside = finite(values[part.start : part.stop])
        mean.append(rounded(sum(inside) / len(inside)) if len(inside) else None)
        if not is_each:
            low.append(rounded(min(inside, default=math.nan)))
            high.append(rounded(max(inside, default=math.nan)))
    return Line(name=name, unit=unit, step=[step[part.start] for part in parts], mean=mean, low=low, high=high)


def buckets(places: range, num: int) -> Iterator[range]:
    """The positions, cut into at most `num` stretches of nearly equal length."""
    num = min(num, len(places))
    for index in range(num):
        yield places[index * len(places) // num : (index + 1) * len(places) // num]


def evenly(items: Sequence[Any], num: int) -> list[Any]:
    """At most `num` of the items, the first and the last among them."""
    if len(items) <= num:
        return list(items)
    return [items[round(index * (len(items) - 1) / (num - 1))] for index in range(num)]


def _stretches(places: Sequence[int]) -> Iterator[range]:
    """Unbroken stretches of sorted positions."""
    start = 0
    for index, place in enumerate(places):
        if index + 1 == len(places) or places[index + 1] != place + 1:
            yield range(places[start], place + 1)
            start = index + 1


def _step(value: Any) -> int | None:
    step = number(value)
    return None if step is None or abs(step) >= 1 << 53 else int(step)


def _phases(run: Run, places: range, steady: Sequence[range]) -> Phases | None:
    columns = {phase: run.columns[key] for phase in PHASES if (key := f"perf/{phase}_share") in run.columns}
    waiting = run.columns.get("perf/exposed_communication_share")
    if not columns or not places:
        return None
    if waiting is not None and "backward" in columns:
        known = array("d", [value if value == value else 0.0 for value in waiting])
        columns["backward"] = array("d", map(operator.sub, columns["backward"], known))
        columns["exposed_communication"] = known
    order = (*PHASES[: PHASES.index("backward") + 1], "exposed_communication", *PHASES)
    step_s, parts = run.column("perf/step_time"), list(buckets(places, MAX_BARS))
    seconds: dict[str, list[float | None]] = {}
    steady_s: dict[str, float] = {}
    for name in dict.fromkeys(name for name in order if name in columns):
        of_step = array("d", map(operator.mul, columns[name], step_s))
        mean_s = _mean(at(of_step, steady))
        values = [rounded(_mean(of_step[part.start : part.stop])) for part in parts]
        if mean_s or any(values):  # what no step has is no phase of it
            seconds[name] = values
            steady_s |= {name: mean_s} if mean_s is not None else {}
    return Phases(
        steps=[(run.step[part.start], run.step[part.stop - 1]) for part in parts], seconds=seconds, steady_s=steady_s
    )


def _mean(values: Sequence[float]) -> float | None:
    known = finite(values)
    return number(sum(known) / len(known)) if len(known) else None


def _operators(run: Run) -> Operators | None:
    event = next((event for event in reversed(run.named("profile")) if isinstance(event.get("top"), list)), None)
    if event is None:
        return None
    count, is_device = run.last("count"), event.get("device") != "cpu"
    step_s, by_dtype = number(event.get("step_s")), _flop(count.get("by_dtype"))
    dtype, most = max(by_dtype.items(), key=lambda item: item[1], default=("", 0.0))
    is_only = most >= 0.99 * sum(by_dtype.values())  # several dtypes have several peaks
    peak = flop_per_s(run.peaks).get(dtype_name(dtype)) if is_only else None
    flop = {} if is_device else _flop(count.get("by_op"))  # kernels have names that no operator has

    def row(name: str, seconds: float, calls: float | None, flop: float | None) -> Operator:
        rate = flop / seconds if flop and seconds > 0 else None
        return Operator(
            name=clean(name, 100),
            seconds=seconds,
            calls=calls,
            share=seconds / step_s if step_s and step_s > 0 else None,
            flop_per_s=rate,
            of_peak=rate / peak if rate and peak else None,
        )

    rows = []
    for item in event["top"][:MAX_ROWS]:
        name, spent, calls = item[:3] if isinstance(item, list) and len(item) >= 3 else (None, None, None)
        spent_s, num_calls = number(spent), number(calls)
        if isinstance(name, str) and spent_s is not None and num_calls is not None and min(spent_s, num_calls) >= 0:
            rows.append(row(short_name(name) if is_device else name, spent_s, num_calls, flop.get(name)))
    matmul_s, model_flop = number(event.get("matmul_s")), number(count.get("model_flop"))
    if (coverage := number(count.get("coverage"))) is not None and coverage < MIN_COVERAGE:
        model_flop = None  # of a part of the matmuls: over the time of all it is no speed
    return Operators(
        is_device=is_device,
        after_step=_step(event.get("after_step")),
        step_s=step_s,
        rows=tuple(sorted(rows, key=lambda row: -row.seconds)),
        matmuls=row("All matmuls", matmul_s, None, model_flop) if matmul_s else None,
    )


def _flop(values: Any) -> dict[str, float]:
    """Name to FLOPs, sound entries only."""
    return {str(name): flop for name, value in mapping(values).items() if (flop := number(value)) and flop > 0}


def _work(run: Run) -> Work | None:
    count = run.last("count")
    model_flop = number(count.get("model_flop"))
    if not model_flop or model_flop <= 0:
        return None
    by_op, by_dtype = (_largest(_flop(count.get(name))) for name in ("by_op", "by_dtype"))
    return Work(
        model_flop=model_flop,
        hardware_flop=number(count.get("hardware_flop")),
        recompute_flop=number(count.get("recompute_flop")),
        by_op=by_op,
        by_dtype=by_dtype,
        modules=modules_of(_flop(count.get("by_module"))),
    )


def _largest(flop: Mapping[str, float]) -> list[tuple[str, float]]:
    ordered = sorted(flop.items(), key=lambda item: -item[1])
    rest = sum(value for _, value in ordered[MAX_ROWS:])
    shown = [(clean(name, 80), value) for name, value in ordered[:MAX_ROWS]]
    return [*shown, (f"{len(ordered) - MAX_ROWS} others", rest)] if rest else shown


_QUANTITIES = ("step_s", "own_s", "blocked_s", "data_wait_s", "forward_s", "backward_s", "optimizer_s", "memory_bytes")


def _ranks(run: Run) -> Ranks | None:
    events = run.named("ranks")
    if not events:
        return None
    last, sound = events[-1], [event for event in events if _list(event.get("own_s_by_rank"))]
    num_ranks = max((len(event["own_s_by_rank"]) for event in sound), default=0)
    parts = list(buckets(range(len(sound)), min(MAX_RANK_COLUMNS, max(MAX_CELLS // max(num_ranks, 1), 1))))
    parts = parts if 0 < num_ranks <= MAX_RANKS else []
    stats = {name: mapping(mapping(last.get("stats")).get(name)) for name in _QUANTITIES}
    return Ranks(
        world_size=int(number(last.get("world_size")) or run.header.world_size),
        steps=[_step(sound[part[-1]].get("after_step")) or 0 for part in parts],
        own_s=[[_slowest([sound[place] for place in part], rank) for rank in range(num_ranks)] for part in parts],
        stats={
            name: (number(of.get("min")), number(of.get("mean")), number(of.get("max")), number(of.get("argmax")))
            for name, of in stats.items()
            if of
        },
        missing=[rank for rank in _list(last.get("missing")) if type(rank) is int][:MAX_STRAGGLERS],
        stragglers=tuple(
            Straggler(
                rank=_step(event.get("rank")),
                since_step=_step(event.get("since_step")),
                extra_s=number(event.get("extra_s")),
                **{name: clean(event.get(name) or "", 80) for name in ("host", "phase", "cause")},
            )
            for event in run.named("straggler")[-MAX_STRAGGLERS:]
        ),
    )


def _slowest(events: Sequence[dict[str, Any]], rank: int) -> float | None:
    rows = (event["own_s_by_rank"] for event in events)
    known = [own_s for row in rows if rank < len(row) and (own_s := number(row[rank])) is not None]
    return rounded(max(known, default=None))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _datasets(run: Run) -> tuple[Dataset, ...]:
    """The last known numbers of each dataset, in the order in which they came up."""
    last: dict[str, float | None] = {}
    for key, column in run.columns.items():
        if key.startswith("dataset/"):
            known = (value for place in range(len(column) - 1, -1, -1) if (value := number(column[place])) is not None)
            last[key] = next(known, None)
    for event in run.named("metrics"):  # what came together after the last step that was told of
        last |= {key: number(value) for key, value in mapping(event.get("metrics")).items()}
    found: dict[str, dict[str, float | None]] = {}
    for key, value in last.items():
        kind, _, rest = key.partition("/")
        name, _, quantity = rest.rpartition("/")
        if kind == "dataset" and name and quantity in ("loss", "accuracy", "samples") and len(found) < MAX_DATASETS:
            found.setdefault(clean(name, 80), {})[quantity] = value
    return tuple(Dataset(name=name, **values) for name, values in found.items())


def _counters(run: Run) -> Counters | None:
    events = run.named("counters")
    if not events:
        return None
    means = {
        name: fmean(known) if (known := [v for event in events if (v := number(event.get(name))) is not None]) else None
        for name in ("tensor_active", "sm_active", "dram_active")
    }
    # A CPU's counter counts since the start: the rate is that from the first reading to the last one.
    read = []
    for event in events:
        time_s, flop = number(event.get("time")), number(event.get("flop"))
        if time_s is not None and flop is not None:
            read.append((time_s, flop))
    spent_s = read[-1][0] - read[0][0] if read else 0.0
    return Counters(
        reader=clean(events[-1].get("reader") or "", 40),
        **means,
        flop_per_s=(read[-1][1] - read[0][1]) / spent_s if spent_s > 0 else None,
        note=clean(events[-1].get("note") or "", 200),
    )


def _roof(run: Run, mfu: float | None) -> Roof | None:
    share, event = roof_share(run), run.last("roof")
    if share is None or (mfu or 0.0) > share:
        return None
    own, clock = number(event.get("own_shapes")) or 0.0, number(event.get("clock_hz"))
    how = f"measured at products of this run ({percent(own)} of their FLOPs)" if own else "the best that was measured"
    held = throttling(number(event.get("throttle_reasons")) or 0.0)
    how += f", at {clock / 1e6:.0f} MHz" if clock else ""
    how += f", held down by {' and '.join(held)}" if held else ""
    return Roof(of_peak=share, mfu=None if mfu is None else number(mfu / share), how=how)


def _method(run: Run, mfu: float | None) -> Method:
    counts, count = run.named("count"), run.last("count")
    first = next((place for place, event in enumerate(run.events) if event.get("event") == "count"), len(run.events))
    # The first count tests the guess that warm-up steps had: no steady step stands on it.
    errors = [error for event in run.events[first + 1 :] if (error := number(event.get("flop_error"))) is not None]
    uncounted = ", ".join(clean(name, 80) for name in list(mapping(count.get("uncounted")))[:MAX_SENTENCES])
    warnings = [event.get("message") for event in run.named("warning")]
    remarks = [*warnings, *_list(count.get("left_out"))]
    remarks += [*([f"not counted: {uncounted}"] if uncounted else []), *run.skipped]
    told = dict.fromkeys(clean(text, MAX_SENTENCE) for text in remarks if isinstance(text, str))
    return Method(
        peaks=[
            PeakLine(
                dtype=clean(dtype, 20),
                device=clean(peak.get("device") or run.header.device, 80),
                flop_per_s=number(peak.get("flop_per_s")),
                source=clean(peak.get("source") or "", 40),
                note=clean(peak.get("note") or "", MAX_SENTENCE),
            )
            for dtype, peak in list(run.peaks.items())[:MAX_ROWS]
        ],
        mode=clean(run.header.mode, 40),
        convention=clean(run.header.convention, 40),
        flop_method=clean(count.get("method") or "", 120),
        coverage=number(count.get("coverage")),
        num_counts=len(counts),
        flop_error=max(map(abs, errors), default=None),
        roof=_roof(run, mfu),
        versions={clean(k, 40): clean(v, 60) for k, v in list(run.header.versions.items())[:MAX_ROWS]},
        reader_version=__version__,
        remarks=list(told)[:MAX_REMARKS],
    )
