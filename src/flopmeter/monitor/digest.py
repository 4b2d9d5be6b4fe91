"""How do the training thread's notes become the numbers of a step? In the background, from numbers alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, NamedTuple

from flopmeter.config import MonitorConfig
from flopmeter.dataset_metrics import Taken
from flopmeter.distributed import JobScale, Ranks, RankStep
from flopmeter.flops.prediction import Law, StepFlop, kinds_of
from flopmeter.flops.workload import PROCESSED, Workload, resolve
from flopmeter.metrics import (
    FIELDS,
    FLOP,
    MAX_LAWS,
    OTHER_FLOP,
    ROW_NAMES,
    GoodputSoFar,
    Measured,
    add_up,
    as_row,
    derive,
    of_job,
    utilisation,
    work_of,
)
from flopmeter.monitor.measuring import FlopSource
from flopmeter.monitor.step_record import NOTHING, Log, StepRecord
from flopmeter.schema import PHASES
from flopmeter.timing import BACKWARD, StepTime, split
from flopmeter.timing.late import read

Metrics = Callable[[], Mapping[str, float]]
_NO_INPUT = Workload()
MAX_UNASKED = 1000
"""Steps that `latest` adds up at most."""
MAX_KNOWN = 1024
"""Workloads and predictions that are recognised."""
REPEAT_EVERY, MAX_REPEATED = 400, 16
"""Rows after which the laws of the last ones are written again, for whoever reads only the end of a file."""
BASICS = ("global_step", "training/loss", "training/lr", "training/epoch")
"""What the sinks get at every log; the details come on top, at a rate of their own."""


class Delivery(NamedTuple):
    """What becomes of an item: lines for the run file, and what sinks get, which is made only if there are any."""

    line: Mapping[str, Any]
    """For the run file."""
    step: int = 0
    all_metrics: Metrics | None = None
    """Makes what sinks get that show every step."""
    metrics: Metrics | None = None
    """Makes what the others get, at their rate; None when it is not their turn."""
    skipped_sinks: tuple[str, ...] = ()
    before: Sequence[Mapping[str, Any]] = ()
    """Lines for the run file that come first."""


class _Row(NamedTuple):
    """A step as the record has it."""

    numbers: Sequence[Any]
    """In the order of `ROW_NAMES`; what is 0 at the end is left out."""
    more: Mapping[str, Any]
    """What has no place in that order: time blocked by ranks, and FLOPs that follow from no law."""
    scale: Mapping[str, float]
    """From the numbers of this rank to those of the job."""


UNSEEN_WITHOUT_PATCHES = ("data_wait", "host_to_device", "backward")
"""Phases that hooks on a model and an optimizer do not show: they are part of the phase "other"."""


class Digest:
    """Makes the lines of the run file and the logs of the sinks.

    A logged perf value is the aggregate since the last one, over steps that represent the run.

    Args:
        on_steps: Given the index and the seconds of every step that represents the run, some of them at once.
        on_interval: Given the first step and the MFU of every `details_every` of them.
        overhead: What flopmeter itself has used so far, as a share of the wall time.
    """

    def __init__(
        self,
        config: MonitorConfig,
        on_steps: Callable[[Sequence[tuple[int, float]]], None] = lambda steps: None,
        on_interval: Callable[[int, float | None], None] = lambda step, mfu: None,
        overhead: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.source: FlopSource | None = None
        self.ranks: Ranks | None = None
        self.last_step = 0
        self._num_before = 0
        self._on_steps = on_steps
        self._ordinary: list[tuple[int, float]] = []
        """Steps that `on_steps` is still to be given."""
        self._proven: dict[int, tuple[Workload, int, tuple[int, ...]]] = {}
        """Laws and amounts of workloads of which the source would say the same again, as long as it learns nothing."""
        self._version = -1
        self._on_interval = on_interval
        self._overhead = overhead
        self._error: float | None = None
        unseen = () if config.monitoring.patches else UNSEEN_WITHOUT_PATCHES
        self._unseen = [PHASES.index(phase) for phase in unseen]
        self._basic_every = config.training.logging_steps
        self._details_every = config.monitoring.detail_every
        self._since_log: list[_Row] = []
        self._since_asked: deque[_Row] = deque(maxlen=MAX_UNASKED)
        self._interval: list[_Row] = []
        self._interval_start = 0
        self._goodput = GoodputSoFar()
        self._convention = config.monitoring.convention
        self._scale: JobScale | None = None
        self._job: Mapping[str, float] = NOTHING
        self._laws: list[Mapping[str, Any]] = [NOTHING]
        """As the record has them; their place is their number. The first stands for unknown FLOPs."""
        self._law_numbers: dict[str, int] = {}
        self._known_laws: dict[tuple[int, float], tuple[Any, int]] = {}
        self._states: list[Any] = []
        self._amounts: dict[int, tuple[Workload, tuple[int, ...]]] = {}
        self._used: set[int] = set()
        """Laws of the rows since they were last written."""
        self._num_rows = 0

    def __call__(self, item: StepRecord | Log) -> Delivery:
        if isinstance(item, Log):
            return self._placed(item)
        time_ = split(item.clock)
        before: list[Mapping[str, Any]] = []
        metrics, skips_wandb = self._own_metrics(item)
        row = self._row(item, time_, before)
        at_s = round(item.time_s, 3)  # how long a step took, the row says to the nanosecond
        line: dict[str, Any] = {"kind": "step", "step": self.last_step, "time": at_s, "row": row.numbers}
        if row.more:
            line["metrics"] = {**metrics, **as_row(row.more)}
        elif metrics:
            line["metrics"] = metrics.copy()
        step_s = time_.step_ns / 1e9
        goodput = self._goodput.add(at_s, step_s)
        if item.marks:
            line["marks"] = item.marks
        else:
            self._since_log.append(row)
            self._since_asked.append(row)
            self._ordinary.append((item.index, step_s))
            self._add_to_interval(row)
        metrics["global_step"] = self.last_step
        if goodput == goodput:
            metrics["perf/goodput"] = goodput
        due = self._due(item.index + 1, metrics)
        skipped = ("wandb",) if skips_wandb else ()
        return Delivery(line, self.last_step, lambda: {**metrics, **self._derived([row])}, due, skipped, before)

    def end_batch(self) -> None:
        """So many steps were digested one behind the other: tell of them."""
        if self._ordinary:
            steps, self._ordinary = self._ordinary, []
            self._on_steps(steps)

    def _placed(self, item: Log) -> Delivery:
        """What happened between steps, under the loop's own numbers: those of a resumed run do not begin at 1."""
        step = self.last_step if item.step is None else item.step
        line = read(item.line)
        if line.get("metrics"):
            line["metrics"] = read(line["metrics"])
        metrics = None if item.metrics is None else read(item.metrics)
        if "step" in line:
            line["step"] = step
        if "after_step" in line:
            line["after_step"] += self._num_before
        made = None if metrics is None else lambda: metrics
        return Delivery(line, step, made, made)

    def latest(self) -> dict[str, float]:
        """The aggregate since the last call, from any thread; at most of the last `MAX_UNASKED` steps."""
        rows, self._since_asked = self._since_asked, deque(maxlen=MAX_UNASKED)
        return self._derived(list(rows.copy()))  # another thread may still be adding to it

    def _due(self, num_steps: int, own: Mapping[str, float]) -> Metrics | None:
        """What the sinks get now: the basics at their rate, the details at theirs.

        Args:
            own: The step's metrics but for those that are derived, of all steps since the last time.
        """
        if num_steps % self._details_every == 0:
            rows, self._since_log = self._since_log, []
            return lambda: {**own, **self._derived(rows)}
        if num_steps % self._basic_every or not (due := {key: own[key] for key in BASICS if key in own}):
            return None
        return lambda: due

    def _add_to_interval(self, row: _Row) -> None:
        if not self._interval:
            self._interval_start = self.last_step
        self._interval.append(row)
        if len(self._interval) >= self._details_every:
            rows, self._interval = self._interval, []
            self._on_interval(self._interval_start, self._derived(rows).get("perf/mfu"))

    def _derived(self, rows: Sequence[_Row]) -> dict[str, float]:
        """The metrics of these steps together: those that grow alike are added up first."""
        groups: dict[Any, list[_Row]] = {}
        for row in rows:
            key = row.numbers[0], len(row.numbers), id(row.scale), tuple(row.more)
            groups.setdefault(key, []).append(row)
        steps = [self._measured(group) for group in groups.values()]
        return derive(steps, self.source.peaks if self.source is not None else {}, len(rows))

    def _measured(self, rows: Sequence[_Row]) -> Measured:
        """Steps of one law as one."""
        first = rows[0]
        sums = map(sum, zip(*(row.numbers for row in rows), strict=True))
        step: dict[str, Any] = {
            name: number for name, number in zip(ROW_NAMES, sums, strict=False) if number > 0 or name not in FIELDS
        }
        for place in self._unseen:
            del step[f"{PHASES[place]}_ns"]
        work = work_of(self._laws[first.numbers[0]], step, self._convention, len(rows))
        work.pop(OTHER_FLOP, None)
        step |= work
        if first.more:
            step |= add_up([row.more for row in rows])
        return of_job(step, first.scale)

    def _row(self, item: StepRecord, time_: StepTime, before: list[Mapping[str, Any]]) -> _Row:
        """The step as the record holds it, behind whatever the record has to say first."""
        workload, source, ranks = resolve(item.seen), self.source, self.ranks
        phases = list(time_.phase_ns[:-1])
        for place in self._unseen:
            phases[place] = -1
        more: dict[str, Any] = {}
        law, flop, proven = 0, None, None
        if source is not None and source.version != self._version:
            self._version = source.version
            self._proven.clear()
        if source is not None and item.index >= source.since:
            proven = self._proven.get(id(workload))
        if proven is not None:
            law = proven[1]
            source.lacks_proof = False  # type: ignore[union-attr]
        elif source is not None:
            flop = source.predict(workload, item.index) if workload else None
            if not item.seen:
                flop = source.unseen(item.index)
            if not source.has_count and workload == _NO_INPUT:
                flop = None  # the model was given nothing: only a count can tell what it does with that
            if flop is not None or workload is not None:
                law = self._law_number(source, item.index, flop, workload, before)
            if not law and flop is not None:
                more = dict(zip(FLOP, flop[:3], strict=True))
            if flop is not None and flop.error != 0.0:
                more["doubt"] = 1.0 if flop.error is None else flop.error
        if item.blocked_ns is not None:
            more["exposed_communication_ns"] = item.blocked_ns[BACKWARD]
        amounts = proven[2] if proven is not None else self._amounts_of(workload) if workload is not None else ()
        if flop is not None and flop.error == 0.0 and law and workload is not None and item.index >= source.since:  # type: ignore[union-attr]
            if len(self._proven) >= MAX_KNOWN:
                self._proven.clear()
            self._proven[id(workload)] = workload, law, amounts
        numbers = [law, time_.step_ns, *phases, *amounts]
        self._used.add(law)
        self._num_rows += 1
        if self._num_rows % REPEAT_EVERY == 0:  # who reads only the end of a file needs them, too
            before += [self._laws[number] for number in sorted(self._used)[-MAX_REPEATED:] if number]
            self._used.clear()
        if ranks is None:
            return _Row(numbers, more, NOTHING)
        own = self._measured([_Row(numbers, more, NOTHING)])
        ranks.add(_rank_step(item, own, time_, source), is_typical=not item.marks)
        if ranks.is_writer and (ranks.scale is not self._scale or self._num_rows % REPEAT_EVERY == 0):
            if ranks.scale != self._scale:
                self._scale, self._job = ranks.scale, asdict(ranks.scale)
            before.append({"kind": "job", **self._job})
        return _Row(numbers, more, self._job)

    def _amounts_of(self, workload: Workload) -> tuple[int, ...]:
        """How much of everything that FLOPs grow with."""
        _, amounts = self._amounts.get(id(workload), (None, ()))
        if not amounts:
            found = [getattr(workload, name) for name in FIELDS]
            while found and not found[-1]:
                found.pop()
            amounts = tuple(found)
            if len(self._amounts) >= MAX_KNOWN:
                self._amounts.clear()
            self._amounts[id(workload)] = workload, amounts
        return amounts

    def _law_number(
        self, source: FlopSource, index: int, flop: StepFlop | None, workload: Workload | None, before: list[Any]
    ) -> int:
        """Under which number the record has what these FLOPs follow from; 0 where they follow from nothing.

        Steps whose FLOPs are not known yet have one too: the first count will serve them.
        """
        law = flop.law if flop is not None else None
        if flop is not None and law is None:
            return 0
        has_share = self.ranks is not None and not source.has_count
        share = 1 / self.ranks.layout.num_split if has_share else 1.0  # type: ignore[union-attr]
        seen: Any = law if law is not None and not law.is_estimate else flop if flop is not None else workload
        known = self._known_laws.get((id(seen), share))
        if known is not None:
            return known[1]
        kinds = sorted(law.kinds if law is not None and not law.is_estimate else kinds_of(workload or _NO_INPUT))
        state = source.state_at(index)
        if state not in self._states:
            self._states.append(state)
        fields = {"state": self._states.index(state), "is_estimate": law is None or law.is_estimate, "kinds": kinds}
        line = {**fields, **(per_unit(law, share, self._convention) if law is not None else {})}
        rounded = [
            (own, dtype, name, f"{flop:.11e}")  # counts of two batches differ in their last digits
            for own, by_dtype in line.items()
            if isinstance(by_dtype, Mapping)
            for dtype, parts in by_dtype.items()
            for name, flop in parts.items()
        ]
        text = f"{fields} {rounded}"
        number = self._law_numbers.get(text, 0)
        if not number and len(self._laws) < MAX_LAWS:
            number = self._law_numbers[text] = len(self._laws)
            self._laws.append({"kind": "law", "law": number, **line})
            before.append(self._laws[number])
        if len(self._known_laws) >= MAX_KNOWN:
            self._known_laws.clear()
        self._known_laws[id(seen), share] = seen, number
        return number

    def _own_metrics(self, item: StepRecord) -> tuple[dict[str, float], bool]:
        """What the row has by name: the loop's own numbers, and ours that are not of every step."""
        metrics = read(item.values) if item.values else {}
        step = metrics.pop("step", None)
        if type(step) is not int:  # nearly always it is
            is_known = step is not None and math.isfinite(step)  # it may have been lost with its device
            step = round(step) if is_known else self.last_step + 1
        self.last_step = step
        self._num_before = self.last_step - item.index - 1
        skips_wandb = bool(metrics.pop("skip_wandb", False))
        is_detailed = (item.index + 1) % self._details_every == 0
        if is_detailed:
            metrics["perf/overhead_share"] = self._overhead()
        if item.wait_cpu_share is not None:
            metrics["perf/data_wait_cpu_share"] = item.wait_cpu_share
        if item.datasets is not None:
            metrics |= dataset_values(item.datasets)
        error = self.source.error if self.source is not None else None
        if error is not None and (is_detailed or error != self._error):
            self._error = metrics["perf/flop_error"] = error
        return metrics, skips_wandb


def _rank_step(item: StepRecord, step: Measured, time_: StepTime, source: FlopSource | None) -> RankStep:
    """What this rank tells the others of a step. FLOPs that are only estimated are kept, unless that is the mode."""
    peaks = source.peaks if source is not None else {}
    is_told = source is not None and (source.has_count or source.mode == "estimate")
    flop = step.get("model_flop") if is_told else None
    return RankStep(
        item.index,
        time_.step_ns / 1e9,
        [ns / 1e9 for ns in time_.phase_ns],
        None if item.blocked_ns is None else [ns / 1e9 for ns in item.blocked_ns],
        None if flop is None else sum(flop.values()),
        None if flop is None else utilisation(flop, peaks, 1.0),
        step.get("tokens_processed"),
        step.get("samples"),
    )


def per_unit(law: Law, share: float, convention: str) -> dict[str, Any]:
    """A law as the record has it: FLOPs for one of each field of `FIELDS`, by dtype.

    Args:
        share: Part of it that is this rank's.
    """
    exact, full = (law.model, law.other) if convention == "exact" else (law.other, law.model)
    processed = tuple((dtype, PROCESSED.get(name, name), flop, amount) for dtype, name, flop, amount in exact)
    found: dict[str, Any] = {}
    for own, lines in (("exact", exact), ("full", full), ("hardware", law.hardware), ("processed", processed)):
        by_dtype: dict[str, dict[str, float]] = {}
        for dtype, name, flop, amount in lines:
            parts = by_dtype.setdefault(dtype, {})
            for part, factor in _in_fields(name).items():
                parts[part] = parts.get(part, 0.0) + share * factor * flop / amount
        found[own] = {dtype: {part: flop for part, flop in parts.items() if flop} for dtype, parts in by_dtype.items()}
    return found


@cache
def _in_fields(name: str) -> Mapping[str, float]:
    """An amount as a sum of those that rows have: 5 pairs in either direction are twice the causal ones less tokens."""
    if name in (*FIELDS, "once"):
        return {name: 1.0}
    if name == "pairs_window_full_processed":
        return {"pairs_window_processed": 2.0, "tokens_processed": -1.0}
    found = {}
    for part in FIELDS:
        if part in Workload.__dataclass_fields__:
            amounts: dict[str, Any] = {"window": 1, part: 2}
            found[part] = getattr(Workload(**amounts), name) / 2
    return {part: factor for part, factor in found.items() if factor}


def dataset_values(taken: Taken) -> dict[str, float]:
    """Metrics by dataset. Reads the sums: call it when the device has caught up."""
    return taken.metrics(taken.sums.tolist() if taken.sums is not None else ())
