"""What does a run file say, however torn, foreign or large it may be?

The steps of a run have much the same keys. A line that is as usual is decoded straight into numbers by key; whatever is
unusual is read with patience. Rows are dealt out to their columns many at a time.
"""

from __future__ import annotations

import json
import math
import operator
import os
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeGuard

import msgspec

from flopmeter.columns import at, finite, mapping, number_or_nan, open_regular, stretches, tamed, tamed_column
from flopmeter.errors import RecordError
from flopmeter.metrics import (
    COUNTS,
    DOUBT,
    FIELDS,
    MAX_LAWS,
    MEASURED,
    OTHER_FLOP,
    ROW,
    ROW_NAMES,
    UTILISATIONS,
    WORK,
    flop_per_s,
    job_columns,
    rate_columns,
    summarise,
    utilisation_columns,
    work_columns,
)
from flopmeter.schema import RUN_FILE, SCHEMA_VERSION

if TYPE_CHECKING:
    from flopmeter.waterfall import Waterfall

MAX_LINE_BYTES = 4 << 20
MAX_COLUMNS = 4096
MIN_COVERAGE = 0.97
"""With less of the work counted, MFU is at least what it says."""
MAX_EVENTS = 100_000
MAX_LINES_WITHOUT_HEADER = 1000
LARGEST_STEP = 1 << 62
LOOP = ("training/loss", "training/lr", "training/epoch", "training/grad_norm")
"""What a loop tells of nearly every step: a line has them without their names, as many of the first as it has."""
LARGEST_FACTOR = 1e9
_JOB = ("flop", "tokens", "samples", "devices")
LATEST_S = 1 << 33
"""A Unix time beyond it (the year 2242) is a mistake."""

_decoder = msgspec.json.Decoder()


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a run said of itself when it started; a field that was missing or of the wrong type has its default."""

    schema: int = SCHEMA_VERSION
    """Version of the run file's layout."""
    run_id: str = ""
    """Names this start of the run; a restart has another."""
    started_at: float = 0.0
    """Unix time of the start, in seconds."""
    host: str = ""
    """Machine that wrote the file."""
    world_size: int = 1
    """Ranks of the job."""
    model: str = ""
    """Class of the model."""
    num_parameters: int = 0
    """Parameters of the model, frozen ones included."""
    num_trainable: int = 0
    """Those of them that are trained; 0 in a record that does not say."""
    device: str = ""
    """Device name as the driver gives it."""
    peak: Mapping[str, Any] = field(default_factory=dict)
    """Peak by dtype, as far as known: `{"bf16": {"device": ..., "flop_per_s": ..., "source": ..., "note": ...}}`."""
    mode: str = ""
    """How FLOPs are obtained: smart, profiler, estimate or hybrid."""
    convention: str = ""
    """What counts as a model FLOP: exact or full."""
    versions: Mapping[str, Any] = field(default_factory=dict)
    """Versions of flopmeter, torch and Python."""
    price_per_device_hour: float = math.nan
    """What an hour of one device costs, in the user's currency; NaN where nobody said."""
    off: list[str] = field(default_factory=list)
    """What could not be attached, or is off with this torch, and why: one line each."""
    rows: list[str] = field(default_factory=lambda: list(ROW_NAMES))
    """What the numbers of a step's row are: the file says it, so that no other version misreads them."""
    loop: list[str] = field(default_factory=lambda: list(LOOP))
    """What the numbers of the loop's own are that stand without a name."""


@dataclass(kw_only=True, slots=True)
class Run:
    """A run file in memory, as columns: a million steps fit."""

    path: Path
    """The file that was read."""
    headers: list[Header] = field(default_factory=list)
    """One per start: more than one means that the run was restarted."""
    starts: list[int] = field(default_factory=list)
    """Position of the first step after each header of the file."""
    step: array[int] = field(default_factory=lambda: array("q"))
    """Step numbers in file order; they go back where a restart resumed from a checkpoint."""
    time: array[float] = field(default_factory=lambda: array("d"))
    """Unix time at the end of each step, in seconds."""
    columns: dict[str, array[float]] = field(default_factory=dict)
    """Metric key to one value per step; NaN where the step has none."""
    marks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Position in the columns to the marks of that step (warmup, observed, profiled)."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Pauses, counts, calibrations, epochs, evaluations, warnings, in file order."""
    turns: list[tuple[int, dict[str, Mapping[str, Any]]]] = field(default_factory=list)
    """From which position on the steps are held against which peaks, by dtype: each start and each device has its own,
    and a peak that becomes known later serves its steps before that, too."""
    work: dict[str, array[float]] = field(default_factory=dict)
    """What utilisations are derived from, as the rows hold it: FLOPs of each step by kind and dtype."""
    summary: dict[str, Any] | None = None
    """The closing summary; None while the run goes on, or when it was killed."""
    skipped: list[str] = field(default_factory=list)
    """What could not be read, one sentence each."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def header(self) -> Header:
        """The newest start's header."""
        return self.headers[-1]

    @property
    def failure(self) -> str | None:
        """What kind of error ended the run, where one did."""
        name = (self.summary or {}).get("failure")
        return str(name)[:200] if name else None

    @property
    def peaks(self) -> dict[str, Mapping[str, Any]]:
        """What MFU is held against, by dtype, as headers and events say: the newest counts."""
        return {dtype: peak for _, peaks in self.turns for dtype, peak in peaks.items()}

    @property
    def dtypes(self) -> list[str]:
        """Of the FLOPs in it."""
        return sorted({key.rpartition("/")[2] for key in self.work if "/" in key} | self.peaks.keys())

    def derived(self, peaks: Mapping[str, float], convention: str | None = None) -> Run:
        """The same run held against other peaks, in FLOP/s by dtype, or under another convention; what is not given
        stays.

        A step whose FLOPs are not in the record has no MFU then. Events stay as they were recorded: one that tells of a
        fall in MFU names that of the old peaks.
        """
        whose = {"device": self.header.device, "source": "user", "note": "stated when the run was read"}
        stated = {dtype: {**whose, "flop_per_s": peak} for dtype, peak in peaks.items()}
        turns = [(place, {**found, **stated}) for place, found in self.turns or [(0, {})]]
        dependent = {*UTILISATIONS, "perf/model_flop"} if self.work else UTILISATIONS
        said = [f"peak of {dtype}: {peak:g} FLOP/s" for dtype, peak in peaks.items()]
        said += [f"convention: {convention}"] if convention is not None else []
        told = {"kind": "event", "event": "warning", "message": f"stated when the run was read: {'; '.join(said)}"}
        run = replace(
            self,
            turns=turns,
            events=[*self.events, told],
            columns={k: v for k, v in self.columns.items() if k not in dependent},
        )
        if convention not in (None, self.header.convention or "exact"):
            run.headers = [*self.headers[:-1], replace(self.header, convention=convention)]
            run.work = _under_other_convention(self.work, is_full=convention == "full")
        run._derive()
        if self.summary is not None:
            run.summary = {**self.summary, "metrics": run.sum_up()}
        return run

    def _derive(self) -> None:
        """Make what follows from FLOPs and peaks."""
        turns = [(place, flop_per_s(peaks)) for place, peaks in self.turns]
        self.columns |= utilisation_columns(self.work, self.column("perf/step_time"), turns)

    def sum_up(self, parts: Sequence[range] | None = None, keys: Collection[str] = ()) -> dict[str, float]:
        """The steps of these stretches in a few numbers; by default all of the newest start's steady steps."""
        if parts is None:
            first = (self.starts or [0])[-1]
            parts = [range(max(part.start, first), part.stop) for part in self.steady_stretches() if part.stop > first]
        wanted = keys or [key for key in self.columns if key.startswith("perf/")]
        columns = {key: self.columns[key] for key in wanted if key in self.columns}
        return summarise(columns, parts) | self._doubt(parts)

    def _doubt(self, parts: Sequence[range]) -> dict[str, float]:
        """What `metrics.certainty` asks: how far off the FLOPs of these steps may be, and whether some are missing."""
        flop, doubts, found = at(self.column("perf/model_flop"), parts), self.work.get(DOUBT), {}
        if doubts is not None and (total := sum(finite(flop))):
            pairs = zip(flop, at(doubts, parts), strict=True)
            found["flop_doubt"] = sum(of * doubt for of, doubt in pairs if doubt > 0 and of == of) / total
        count = self.last("count")
        is_less = number_or_nan(count.get("coverage")) < MIN_COVERAGE and "twin" not in str(count.get("method"))
        if count.get("uncounted") or is_less:
            found["uncounted"] = 1.0
        return found

    def column(self, key: str) -> array[float]:
        """One value per step of the metric `key`; all NaN when the run has none."""
        return self.columns.get(key) or array("d", [math.nan]) * len(self)

    def amount(self, name: str) -> array[float]:
        """Tokens, tokens_processed or samples of each step."""
        return array("d", map(operator.mul, self.column(f"perf/{name}_per_second"), self.column("perf/step_time")))

    def named(self, name: str) -> list[dict[str, Any]]:
        """Its events of that name, in file order."""
        return [event for event in self.events if event.get("event") == name]

    def last(self, name: str) -> dict[str, Any]:
        """The newest event of that name; empty when there is none."""
        return next((event for event in reversed(self.events) if event.get("event") == name), {})

    def steady(self) -> list[int]:
        """Positions of the steps that represent the run: neither warm-up nor observed nor profiled."""
        return list(chain.from_iterable(self.steady_stretches()))

    def steady_stretches(self) -> list[range]:
        """The same as unbroken stretches, which are few even in a long run."""
        return stretches(range(len(self)), self.marks)

    def waterfall(self, start: int | None = None, stop: int | None = None) -> Waterfall:
        """Where the wall time went, from the step at position `start` up to `stop`; default all after warm-up."""
        from flopmeter.waterfall import waterfall

        return waterfall(self, start, stop)


def _under_other_convention(work: Mapping[str, array[float]], *, is_full: bool) -> dict[str, array[float]]:
    """FLOPs with the model's and those of the other convention in each other's place."""
    model, other, processed = (f"{ROW}{kind}/" for kind in ("model_flop", OTHER_FLOP, "processed_flop"))
    found = {key: values for key, values in work.items() if not key.startswith((model, other, processed))}
    for key, values in work.items():
        if key.startswith(other):
            dtype = key.removeprefix(other)
            found |= {f"{model}{dtype}": values} | ({f"{processed}{dtype}": values} if is_full else {})
        elif key.startswith(model):
            found[f"{other}{key.removeprefix(model)}"] = values
    return found


def load_run(path: str | Path) -> Run:
    """Read a run file, or the `run.jsonl` of a folder; what is unsound is skipped and named in `Run.skipped`.

    Raises:
        RecordError: The file is missing, empty, not a run file, or of a schema that this version cannot read.
    """
    file_path = Path(path)
    try:
        if file_path.is_dir():
            if not (file_path / RUN_FILE).exists():
                raise RecordError(f"{file_path} holds no run (no {RUN_FILE})")
            file_path = file_path / RUN_FILE
        with open_regular(file_path) as file:
            return RunReader(file_path).read(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecordError(f"cannot read the run file {file_path}: {reason}{nearest_run(file_path)}") from None


def nearest_run(path: Path) -> str:
    """How the message about a path that is not there ends: with the run beside it that was likely meant, if any."""
    if path.exists():
        return ""
    with suppress(OSError):
        beside = {run.parent.name: run.parent for run in path.parent.glob(f"*/{RUN_FILE}")}
        near = get_close_matches(path.name, beside)
        return f"; did you mean {beside[near[0]]}?" if near else ""
    return ""


def look_at(path: Path) -> tuple[Literal["", "running", "ended", "foreign"], float, int | None]:
    """What is at the path of a run that is about to begin, when that began (Unix time), and its last step.

    Nothing ("", also a pipe or a device, of which nothing is read), a run that goes on, was killed or failed, one that
    has ended, or a file that this version cannot read: of another schema, or without a header in front.

    Raises:
        OSError: It cannot be read.
    """
    if not path.is_file() or not path.stat().st_size:
        return "", 0.0, None
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        first = _object(file.readline(MAX_LINE_BYTES + 1))
        file.seek(max(status.st_size - MAX_LINE_BYTES, 0))
        last = _object(file.read(MAX_LINE_BYTES).rstrip().rpartition(b"\n")[2])
    started_at = first.get("started_at")
    if not isinstance(started_at, (int, float)) or not 0 < started_at < LATEST_S:
        started_at = status.st_mtime
    if first.get("kind") != "header" or first.get("schema") != SCHEMA_VERSION:
        return "foreign", started_at, None
    has_ended = last.get("kind") == "summary" and last.get("failure") in (None, "KeyboardInterrupt")
    last_step = last.get("last_step")
    return ("ended" if has_ended else "running"), started_at, last_step if isinstance(last_step, int) else None


def _object(raw: bytes) -> dict[str, Any]:
    """A line as a JSON object; empty when it is none."""
    try:
        line = _parse(raw)
    except (ValueError, RecursionError):
        line = None
    return line if isinstance(line, dict) else {}


MAX_WAITING = 1 << 17
"""Values that wait to be dealt out to their columns."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class StepLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The line of a step; a field that is not named here would make every line unusual."""

    kind: Literal["step"] | None = None
    """Not there where there is a row."""
    step: Any  # the reader has its own idea of what a step number is
    time: float = math.nan
    row: list[float] = []
    loop: list[float | str] = []
    metrics: dict[str, float | str | None] = {}
    marks: Any = None


_step_decoder = msgspec.json.Decoder(StepLine)


def usual_step(raw: bytes) -> StepLine | None:
    """The line of a step; None for any other line, or one that wants a closer look."""
    try:
        return _step_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class Rows:
    """Fills columns, row by row. All of them are equally long after `deal`."""

    def __init__(self, columns: dict[str, array[float]], max_columns: int) -> None:
        self._columns = columns
        self._max_columns = max_columns
        self._empty: dict[str, float] = {}  # the row of a step without metrics; its order is that of the columns
        self._waiting = array("d")
        self._num_rows = 0

    def begin_with(self, names: list[str]) -> bool:
        """Whether these are the first columns."""
        return list(islice(self._empty, len(names))) == names

    def add_first(self, values: list[Any]) -> bool:
        """One more row of the first columns alone; not so where a value is no number."""
        try:
            self._waiting.fromlist(values + [math.nan] * (len(self._empty) - len(values)))
        except (TypeError, OverflowError):
            return False
        self._num_rows += 1
        if len(self._waiting) >= MAX_WAITING:
            self.deal()
        return True

    def add(self, metrics: Mapping[str, Any]) -> bool:
        """One more row with whatever keys; says whether there was a column for each of them."""
        row, is_all = {**self._empty, **metrics}, True
        if len(row) > len(self._empty):
            self.deal()
            for key in list(row)[len(self._empty) : self._max_columns]:
                self._empty[key] = math.nan
                self._columns[key] = array("d", [math.nan]) * self._num_rows
            is_all = len(row) == len(self._empty)
            row = {key: row[key] for key in self._empty}
        if not self.add_first(list(row.values())):
            self.add_first(list(map(number, row.values())))
        return is_all

    def deal(self) -> None:
        """Give each column its part of the rows that wait."""
        for place, key in enumerate(self._empty):
            self._columns[key].extend(tamed_column(self._waiting[place :: len(self._empty)]))
        self._waiting = array("d")


def number(value: Any) -> float:
    """The value as a float, NaN where it is none: a record may hold anything."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, math.nan)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.nan
    return math.nan


class RunReader:
    """Builds a Run line by line, all at once with `read`, or as lines arrive with `take` and `settle`."""

    def __init__(self, path: Path) -> None:
        self.run = Run(path=path)
        """As far as it was read; only sound once it has a header, and after `settle`."""
        self._num_lines = 0
        self._has_overlong = False
        self._bad: dict[str, list[int]] = {}
        self._written: dict[str, array[float]] = {}
        self._rows = Rows(self._written, MAX_COLUMNS)
        self._columns: list[str] = []
        self._usual = (-1, -1)
        """How long row and loop of a step are that have the first columns, in their order."""
        self._laws: dict[float, dict[str, Any]] = {}
        self._jobs: list[tuple[int, dict[str, float]]] = [(0, {})]

    def read(self, file: BinaryIO) -> Run:
        """Read a whole file.

        Raises:
            RecordError: It is not a run file.
        """
        for raw in _lines(file):
            if not self.take(raw) and self.is_hopeless:
                break
        if not self.run.headers:
            raise RecordError(f"{self.run.path} is not a flopmeter run file: it has no header line")
        self.settle(is_last=True)
        return self.run

    def take(self, raw: bytes) -> bool:
        """Read one more line, and say whether it is sound; what is wrong with it will be in `Run.skipped`."""
        self._num_lines += 1
        problem = self._taken(raw)
        if problem:
            self._bad.setdefault(problem, []).append(self._num_lines)
        return not problem

    @property
    def is_hopeless(self) -> bool:
        """Whether so much went by without a header that this is no run file."""
        return (self._num_lines >= MAX_LINES_WITHOUT_HEADER or self._has_overlong) and not self.run.headers

    def settle(self, *, is_last: bool = False) -> None:
        """Derive what follows from the rows so far, and name what was skipped.

        Args:
            is_last: No more lines follow: what the rows held is let go as soon as all was derived from it.
        """
        self._rows.deal()
        run = self.run
        convention = "full" if run.headers and run.header.convention == "full" else "exact"
        rows = job_columns(self._written | work_columns(self._served(), self._laws, convention), self._jobs)
        if is_last:
            self._written.clear()
            for name in {"law", *FIELDS}.difference(COUNTS):  # what FLOPs are derived from, and rates are not
                rows.pop(ROW + name, None)
        run.work = {key: values for key, values in rows.items() if key.startswith(WORK)}
        run.columns = {key: rows[key] for key in rows if key not in MEASURED and key not in run.work}
        if found := rate_columns(rows, run.time, run.starts):
            run.columns |= {"global_step": array("d", run.step), **found}
        if is_last:
            rows.clear()
        if run.work:
            run._derive()
        self.run.skipped.clear()
        for problem, numbers in self._bad.items():
            others = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            self.run.skipped.append(f"skipped line {numbers[0]}{others}: {problem}")

    def _served(self) -> dict[str, array[float]]:
        """The rows with the laws that serve them: a count also serves the estimated steps before it, back to the last
        change of the model.
        """
        counted = [(number, law) for number, law in self._laws.items() if not law["is_estimate"]]
        serves = {
            number: next((own for own, of in counted if of["state"] == law["state"] and of["kinds"] >= law["kinds"]
                          and own // MAX_LAWS == number // MAX_LAWS), number)
            for number, law in self._laws.items() if law["is_estimate"]
        }  # fmt: skip
        if all(number == own for number, own in serves.items()):
            return self._written
        numbers = array("d", [serves.get(number, number) for number in self._written[f"{ROW}law"]])
        return {**self._written, f"{ROW}law": numbers}

    def _law(self, line: dict[str, Any]) -> str | None:
        law = line.get("law")
        if type(law) is not int or not 0 < law < MAX_LAWS:
            return "a law without a number"
        kinds = line.get("kinds")
        found: dict[str, Any] = {"state": line.get("state"), "is_estimate": line.get("is_estimate") is True}
        found["kinds"] = frozenset(map(str, kinds)) if isinstance(kinds, list) else frozenset()
        for name in ("exact", "full", "hardware", "processed"):
            found[name] = {
                dtype: {own: number(flop) for own, flop in mapping(parts).items() if own in _GROWS_WITH}
                for dtype, parts in mapping(line.get(name)).items()
            }
        self._laws[float(MAX_LAWS * len(self.run.headers) + law)] = found
        return None

    def _job(self, line: dict[str, Any]) -> str | None:
        factors = {name: number(line.get(name)) for name in _JOB}
        if not all(0 < factor < LARGEST_FACTOR for factor in factors.values()):
            return "a job without its size"
        self._jobs.append((len(self.run), factors))
        return None

    def _taken(self, raw: bytes) -> str | None:
        usual = usual_step(raw) if self.run.headers and len(raw) <= MAX_LINE_BYTES else None
        if (
            usual is not None and (usual.kind or usual.row) and _is_step_number(usual.step)
        ):  # as nearly all lines of a long run are
            return self._add_step(usual.step, usual.time, usual.marks, usual.row, usual.loop, usual.metrics)
        if not raw.strip():
            return None
        if len(raw) > MAX_LINE_BYTES:
            self._has_overlong = True
            return f"longer than {MAX_LINE_BYTES >> 20} MB"
        try:
            line = _parse(raw)
        except (ValueError, RecursionError):
            return "not JSON" if raw.endswith(b"\n") else "cut off in mid-line"
        if isinstance(line, dict) and "row" in line:
            line.setdefault("kind", "step")
        if not isinstance(line, dict) or line.get("kind") not in _KINDS_OF_LINES:
            return "of no known kind"
        if not self.run.headers and line["kind"] != "header":
            return "before any header"
        # Metrics of steps are tamed column by column.
        return self.put(line if line["kind"] == "step" else tamed(line))

    def put(self, line: dict[str, Any]) -> str | None:
        """Take one more line that is read already, of a known kind, and say what is wrong with it."""
        problem: str | None = getattr(self, f"_{line['kind']}")(line)
        return problem

    def _header(self, line: dict[str, Any]) -> str | None:
        schema = line.get("schema")
        if schema != SCHEMA_VERSION or isinstance(schema, bool):
            raise RecordError(
                f"{self.run.path} has run-file schema {str(schema)[:40]}; this flopmeter reads {SCHEMA_VERSION}: "
                + ("flopmeter 0.1 reads it" if schema == 1 else "use the flopmeter that wrote it")
            )
        known: dict[str, Any] = {}
        for name, spec in Header.__dataclass_fields__.items():
            value, kind = line.get(name), _KINDS[str(spec.type).partition("[")[0]]
            if isinstance(value, kind) and not isinstance(value, bool):
                known[name] = value
        header = Header(**known)
        if header.rows[:1] != ["law"] or not all(isinstance(name, str) for name in (*header.rows, *header.loop)):
            raise RecordError(f"{self.run.path} has rows that this flopmeter cannot read: use the one that wrote it")
        self._columns, self._usual = [ROW + name for name in header.rows], (-1, -1)
        self.run.headers.append(header)
        peaks = {dtype: peak for dtype, peak in header.peak.items() if isinstance(peak, Mapping)}
        self.run.turns.append((len(self.run), peaks))
        self.run.starts.append(len(self.run))
        self._jobs.append((len(self.run), {}))
        self.run.summary = None
        return None

    def _step(self, line: dict[str, Any]) -> str | None:
        step, row, metrics = line.get("step"), line.get("row", []), line.get("metrics", {})
        loop = line.get("loop", [])
        if not _is_step_number(step) or not isinstance(metrics, dict) or not isinstance(row, list):
            return "a step without number or metrics"
        told = list(map(number, loop)) if isinstance(loop, list) else []
        numbers = {key: number(value) for key, value in metrics.items()}
        return self._add_step(step, number(line.get("time")), line.get("marks"), list(map(number, row)), told, numbers)

    def _add_step(
        self, step: int, time_s: float, marks: Any, row: list[float], loop: list[Any], metrics: Mapping[str, Any]
    ) -> str | None:
        if row:
            row[0] += MAX_LAWS * len(self.run.headers)
        if isinstance(marks, list) and marks:
            self.run.marks[len(self.run.step)] = tuple(str(mark) for mark in marks)
        self.run.step.append(step)
        self.run.time.append(time_s)
        lengths = len(row), len(loop)
        # Most rows have the columns of the one before: no need to go by names.
        if not metrics and lengths == self._usual and min(row) >= 0 and self._rows.add_first([*row, *loop]):
            return None
        names, of_loop = self._columns[: len(row)], self.run.header.loop[: len(loop)]
        measured = {name: amount for name, amount in zip(names, row, strict=False) if amount >= 0}
        is_all = self._rows.add({**measured, **dict(zip(of_loop, loop, strict=False)), **metrics})
        is_named = row and lengths == (len(names), len(of_loop)) and self._rows.begin_with([*names, *of_loop])
        self._usual = lengths if is_named else (-1, -1)
        return None if is_all else f"with metrics beyond the first {MAX_COLUMNS}"

    def _event(self, line: dict[str, Any]) -> str | None:
        if len(self.run.events) >= MAX_EVENTS:
            return f"an event beyond the first {MAX_EVENTS}"
        self.run.events.append(line)
        peaks = self.run.turns[-1][1]
        if line.get("event") == "peak":
            peaks[str(line.get("dtype"))] = line
        elif line.get("event") == "device" and isinstance(line.get("device"), str):
            self.run.headers[-1] = replace(self.run.headers[-1], device=line["device"])  # moved after the start
            kept = {dtype: peak for dtype, peak in peaks.items() if peak.get("device") == line["device"]}
            self.run.turns.append((len(self.run), kept))
        return None

    def _summary(self, line: dict[str, Any]) -> str | None:
        self.run.summary = line
        return None


_KINDS_OF_LINES = ("header", "step", "law", "job", "event", "summary")
_GROWS_WITH = frozenset(("once", *FIELDS))
_KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int, "str": str, "float": (int, float), "Mapping": dict, "list": list,
}  # fmt: skip


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file of any kind; of an overlong one only the beginning is kept."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)


def _parse(raw: bytes) -> Any:
    """One line as JSON; what the fast parser refuses, such as a bare NaN, the standard one decides."""
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json.loads(raw)


def _is_step_number(step: Any) -> TypeGuard[int]:
    return type(step) is int and abs(step) < LARGEST_STEP
