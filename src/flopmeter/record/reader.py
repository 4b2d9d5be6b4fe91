"""What does a run file say, however torn, foreign or large it may be?"""

from __future__ import annotations

import json
import math
import operator
import os
import stat
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeGuard

import msgspec

from flopmeter.columns import open_regular, stretches, tamed
from flopmeter.errors import RecordError
from flopmeter.metrics import MEASURED, UTILISATIONS, WORK, flop_per_s, rate_columns, summarise, utilisation_columns
from flopmeter.record.rows import Rows, number, usual_step
from flopmeter.schema import RUN_FILE, SCHEMA_VERSION

if TYPE_CHECKING:
    from flopmeter.waterfall import Waterfall

MAX_LINE_BYTES = 4 << 20
MAX_COLUMNS = 4096
MAX_EVENTS = 100_000
MAX_LINES_WITHOUT_HEADER = 1000
LARGEST_STEP = 1 << 62
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
    off: list[str] = field(default_factory=list)
    """What could not be attached, or is off with this torch, and why: one line each."""


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

    def derived(self, peaks: Mapping[str, float]) -> Run:
        """The same run held against other peaks, in FLOP/s by dtype; those that are not given stay.

        A step whose FLOPs are not in the record has no MFU then. Events stay as they were recorded: one that tells of a
        fall in MFU names that of the old peaks.
        """
        told = {"device": self.header.device, "source": "user", "note": "stated when the run was read"}
        stated = {dtype: {**told, "flop_per_s": peak} for dtype, peak in peaks.items()}
        turns = [(place, {**found, **stated}) for place, found in self.turns or [(0, {})]]
        run = replace(self, turns=turns, columns={k: v for k, v in self.columns.items() if k not in UTILISATIONS})
        run._derive()
        if self.summary is not None:
            run.summary = {**self.summary, "metrics": run.sum_up()}
        return run

    def _derive(self) -> None:
        """Make what follows from FLOPs and peaks."""
        turns = [(place, flop_per_s(peaks)) for place, peaks in self.turns]
        self.columns |= utilisation_columns(self.work, self.column("perf/step_time"), turns)

    def sum_up(self) -> dict[str, float]:
        """The newest start in a few numbers."""
        return summarise(self.columns, [place for place in self.steady() if place >= (self.starts or [0])[-1]])

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


def look_at(path: Path) -> tuple[Literal["", "running", "ended", "foreign"], float]:
    """What is at the path of a run that is about to begin, and when that began (Unix time).

    Nothing ("", also a pipe or a device, of which nothing is read), a run that goes on or was killed, one that has
    ended, or a file that this version cannot read: of another schema, or without a header in front.

    Raises:
        OSError: It cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return "", 0.0
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        os.close(descriptor)
        return "", 0.0
    with os.fdopen(descriptor, "rb") as file:
        first = _object(file.readline(MAX_LINE_BYTES + 1))
        file.seek(max(status.st_size - MAX_LINE_BYTES, 0))
        last = _object(file.read(MAX_LINE_BYTES).rstrip().rpartition(b"\n")[2])
    started_at = first.get("started_at")
    if not isinstance(started_at, (int, float)) or not 0 < started_at < LATEST_S:
        started_at = status.st_mtime
    if first.get("kind") != "header" or first.get("schema") != SCHEMA_VERSION:
        return "foreign", started_at
    return ("ended" if last.get("kind") == "summary" else "running"), started_at


def _object(raw: bytes) -> dict[str, Any]:
    """A line as a JSON object; empty when it is none."""
    try:
        line = _parse(raw)
    except (ValueError, RecursionError):
        line = None
    return line if isinstance(line, dict) else {}


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
        self.settle()
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

    def settle(self) -> None:
        """Derive what follows from the rows so far, and name what was skipped; more lines may follow."""
        self._rows.deal()
        run, rows = self.run, self._written
        run.work = {key: values for key, values in rows.items() if key.startswith(WORK)}
        run.columns = {key: rows[key] for key in rows if key not in MEASURED and key not in run.work}
        if found := rate_columns(rows, run.time, run.starts):
            run.columns |= {"global_step": array("d", run.step), **found}
        if run.work:
            run._derive()
        self.run.skipped.clear()
        for problem, numbers in self._bad.items():
            others = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            self.run.skipped.append(f"skipped line {numbers[0]}{others}: {problem}")

    def _taken(self, raw: bytes) -> str | None:
        usual = usual_step(raw) if self.run.headers and len(raw) <= MAX_LINE_BYTES else None
        if usual is not None and _is_step_number(usual.step):  # as nearly all lines of a long run are
            return self._add_step(usual.step, usual.time, usual.marks, usual.metrics)
        if not raw.strip():
            return None
        if len(raw) > MAX_LINE_BYTES:
            self._has_overlong = True
            return f"longer than {MAX_LINE_BYTES >> 20} MB"
        try:
            line = _parse(raw)
        except (ValueError, RecursionError):
            return "not JSON" if raw.endswith(b"\n") else "cut off in mid-line"
        if not isinstance(line, dict) or line.get("kind") not in ("header", "step", "event", "summary"):
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
                f"use the flopmeter that wrote it"
            )
        known: dict[str, Any] = {}
        for name, spec in Header.__dataclass_fields__.items():
            value, kind = line.get(name), _KINDS[str(spec.type).partition("[")[0]]
            if isinstance(value, kind) and not isinstance(value, bool):
                known[name] = value
        header = Header(**known)
        self.run.headers.append(header)
        peaks = {dtype: peak for dtype, peak in header.peak.items() if isinstance(peak, Mapping)}
        self.run.turns.append((len(self.run), peaks))
        self.run.starts.append(len(self.run))
        self.run.summary = None
        return None

    def _step(self, line: dict[str, Any]) -> str | None:
        step, metrics = line.get("step"), line.get("metrics")
        if not _is_step_number(step) or not isinstance(metrics, dict):
            return "a step without number or metrics"
        numbers = {key: number(value) for key, value in metrics.items()}
        return self._add_step(step, number(line.get("time")), line.get("marks"), numbers)

    def _add_step(self, step: int, time_s: float, marks: Any, metrics: Mapping[str, Any]) -> str | None:
        if isinstance(marks, list) and marks:
            self.run.marks[len(self.run.step)] = tuple(str(mark) for mark in marks)
        self.run.step.append(step)
        self.run.time.append(time_s)
        return None if self._rows.add(metrics) else f"with metrics beyond the first {MAX_COLUMNS}"

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
