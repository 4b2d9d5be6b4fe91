"""How do the training thread's notes become the numbers of a step? In the background, from numbers alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from flopmeter.config import MonitorConfig
from flopmeter.dataset_metrics import Taken
from flopmeter.dataset_metrics import resolve as resolve_datasets
from flopmeter.flops.workload import Lengths, Seen, Workload, resolve
from flopmeter.metrics import COUNTS, FLOP, GoodputSoFar, Measured, as_row, derive
from flopmeter.monitor.ranks import rank_step, scaled
from flopmeter.schema import PHASES, StepMark
from flopmeter.timing import BACKWARD, StepTime, split
from flopmeter.timing.late import Arrival, HostCopies, is_ready, read, without_late

if TYPE_CHECKING:
    from flopmeter.distributed import Ranks
    from flopmeter.monitor.measuring import FlopSource

NOTHING: Mapping[str, Any] = MappingProxyType({})
MAX_UNASKED = 1000
"""Steps that `latest` adds up at most."""
_OVERHEAD_EVERY = 16
BASICS = ("global_step", "training/loss", "training/lr", "training/epoch")
"""What the sinks get at every log; the details come on top, at a rate of their own."""


class StepRecord(Struct, gc=False):
    """One step as the training thread left it: nothing is computed, nothing is read yet. Made on every step.

    It and what it holds of ours are out of the garbage collector's sight (tuples, dicts of numbers, structs that say
    so): thousands of them wait for the background, and their survival would make it look through all of the loop's
    objects again and again, which takes a fifth of a second.
    """

    index: int
    """Steps of this process before it."""
    time_s: float
    """Unix time at its end."""
    clock: Sequence[int]
    """Marks of the phase clock, for `timing.split`."""
    seen: Sequence[Seen] = ()
    """What the model was given, micro-batch by micro-batch."""
    marks: tuple[StepMark, ...] = ()
    """Why it does not represent the run."""
    values: Mapping[str, Any] = NOTHING
    """What `log_step` was told, by metric; beside that `step` and `skip_wandb`."""
    blocked_ns: Sequence[int] | None = None
    """Time blocked in collectives, by phase; None where there are none or the host cannot tell."""
    datasets: Taken | None = None
    """What came together by dataset since the last time."""
    wait_cpu_share: float | None = None
    """Share of the wait for data in which this thread computed, where it was looked at."""
    arrival: Arrival | None = None
    """When what was copied for `seen` and `datasets` is on the host; None when it is."""
    has_copies: bool = False
    """Whether any of that was: the training thread wants it back, to let it go."""

    def is_ready(self) -> bool:
        """Whether the device has caught up with it."""
        arrival = self.arrival
        if arrival is not None:
            if not arrival.is_ready():
                return False
            if arrival.is_lost:
                self._forget_copies()
            self.arrival = None
        return is_ready(self.values)

    def held_bytes(self) -> int:
        """Memory of the batch that it keeps alive: masks on the host, or what they are a part of."""
        return sum(item.tensor.untyped_storage().nbytes() for item in self.seen if type(item) is Lengths)

    def let_go(self) -> None:
        """Sum the masks up now, on the training thread, where too many steps wait."""
        if self.arrival is None:
            try:
                workload = resolve(self.seen)
            except Exception:  # noqa: BLE001 - a mask that cannot be read says nothing of the step
                workload = None
            self.seen = () if workload is None else (workload,)

    def forget_late(self) -> None:
        """What is still on its way is unknown for good."""
        if self.arrival is not None:
            self._forget_copies()
            self.arrival = None
        self.values = without_late(self.values)

    def _forget_copies(self) -> None:
        if not all(isinstance(item, Workload) for item in self.seen):
            self.seen = ()
        if self.datasets is not None:
            self.datasets = replace(self.datasets, sums=None)


def copied_to_host(taken: Taken | None, copies: HostCopies) -> Taken | None:
    """Sums by dataset, on their way to the host."""
    if taken is None or taken.sums is None:
        return taken
    return replace(taken, sums=copies.put(taken.sums))


class Log(NamedTuple):
    """Something to record and send on at once."""

    line: Mapping[str, Any]
    metrics: Mapping[str, float] | None = None
    """What the sinks get of it."""
    step: int | None = None
    """None: the last step before it in the queue."""

    def is_ready(self) -> bool:
        """Whether the device has caught up with its numbers."""
        return is_ready(self.line) and is_ready(self.line.get("metrics") or NOTHING)

    def without_late(self) -> Log:
        """The same, with what is still on its way unknown for good."""
        line = without_late(self.line)
        if "metrics" in line:
            line["metrics"] = without_late(line["metrics"])
        return Log(line, None if self.metrics is None else without_late(self.metrics), self.step)


class Delivery(NamedTuple):
    """What becomes of an item."""

    line: Mapping[str, Any]
    """For the run file."""
    step: int = 0
    all_metrics: Mapping[str, float] | None = None
    """For sinks that show every step."""
    metrics: Mapping[str, float] | None = None
    """For the others, at their rate; None when it is not their turn."""
    skipped_sinks: tuple[str, ...] = ()


UNSEEN_WITHOUT_PATCHES = ("data_wait", "host_to_device", "backward")
"""Phases that hooks on a model and an optimizer do not show: they are part of the phase "other"."""


class Digest:
    """Makes the lines of the run file and the logs of the sinks.

    A logged perf value is the aggregate since the last one, over steps that represent the run.

    Args:
        on_step: Told the index and the metrics of every step that represents the run.
        overhead: What flopmeter itself has used so far, as a share of the wall time.
    """

    def __init__(
        self,
        config: MonitorConfig,
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
        overhead: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.source: FlopSource | None = None
        self.ranks: Ranks | None = None
        self.last_step = 0
        self._num_before = 0
        self._on_step = on_step
        self._overhead = overhead
        self._overhead_share = 0.0
        unseen = ("other",) if config.monitoring.patches else ("other", *UNSEEN_WITHOUT_PATCHES)
        self._phases = [(f"{phase}_ns", place) for place, phase in enumerate(PHASES) if phase not in unseen]
        self._basic_every = config.basic_every
        self._details_every = config.details_every
        self._since_log: list[Measured] = []
        self._since_asked: deque[Measured] = deque(maxlen=MAX_UNASKED)
        self._goodput = GoodputSoFar()

    def __call__(self, item: StepRecord | Log) -> Delivery:
        if isinstance(item, Log):
            return self._placed(item)
        time_ = split(item.clock)
        step = self._of_job(item, time_, self._measured(item, time_))
        own = self._own_metrics(item)
        row = {**own, **as_row(step)}
        line: dict[str, Any] = {"kind": "step", "step": self.last_step, "time": item.time_s, "metrics": row}
        own["global_step"] = self.last_step
        goodput = self._goodput.add(item.time_s, time_.step_ns / 1e9)
        if goodput == goodput:
            own["perf/goodput"] = goodput
        metrics = own | self._derived([step])
        if item.marks:
            line["marks"] = item.marks
        else:
            self._since_log.append(step)
            self._since_asked.append(step)
            if self._on_step is not None:
                self._on_step(item.index, metrics)
        skipped = ("wandb",) if item.values.get("skip_wandb") else ()
        return Delivery(line, self.last_step, metrics, self._due(item.index + 1, own), skipped)

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
        return Delivery(line, step, metrics, metrics)

    def latest(self) -> dict[str, float]:
        """The aggregate since the last call, from any thread; at most of the last `MAX_UNASKED` steps."""
        steps, self._since_asked = self._since_asked, deque(maxlen=MAX_UNASKED)
        return self._derived(list(steps.copy()))  # another thread may still be adding to it

    def _due(self, num_steps: int, own: Mapping[str, float]) -> dict[str, float] | None:
        """What the sinks get now: the basics at their rate, the details at theirs.

        Args:
            own: The step's metrics but for those that are derived, of all steps since the last time.
        """
        if num_steps % self._details_every == 0:
            steps, self._since_log = self._since_log, []
            return {**own, **self._derived(steps)}
        due = {key: own[key] for key in BASICS if key in own} if num_steps % self._basic_every == 0 else {}
        return due or None

    def _derived(self, steps: Sequence[Measured]) -> dict[str, float]:
        return derive(steps, self.source.peaks if self.source is not None else {})

    def _of_job(self, item: StepRecord, time_: StepTime, step: Measured) -> Measured:
        """Tell the other ranks of the step; on rank 0, make it the whole job's."""
        ranks = self.ranks
        if ranks is None:
            return step
        if self.source is None or not self.source.has_count:  # the estimate reads whole shapes
            step = scaled(step, 1 / ranks.layout.num_split)
        ranks.add(rank_step(item, step, time_, self.source), is_typical=not item.marks)
        return scaled(step, 1.0, ranks.scale) if ranks.is_writer else step

    def _measured(self, item: StepRecord, time_: StepTime) -> Measured:
        workload = resolve(item.seen)
        predicted = self.source.predict(workload, item.index) if self.source is not None and workload else None
        if not item.seen and self.source is not None:
            predicted = self.source.unseen(item.index)
        if workload == Workload() and not (self.source is not None and self.source.has_count):
            predicted = None  # the model was given nothing: only a count can tell what it does with that
        step: dict[str, Any] = {"ns": time_.step_ns, "device_ns": time_.step_ns}
        for name, place in self._phases:
            step[name] = time_.phase_ns[place]
        if item.blocked_ns is not None:
            step["exposed_communication_ns"] = item.blocked_ns[BACKWARD]
        if workload:
            step |= {name: count for name in COUNTS if (count := getattr(workload, name))}
        if predicted:
            step |= zip(FLOP, (predicted.model, predicted.hardware, predicted.processed), strict=True)
        return step

    def _own_metrics(self, item: StepRecord) -> dict[str, float]:
        values = read(item.values)
        step = values.pop("step", None)
        is_known = step is not None and math.isfinite(step)  # it may have been lost with its device
        self.last_step = round(step) if is_known else self.last_step + 1
        self._num_before = self.last_step - item.index - 1
        values.pop("skip_wandb", None)
        metrics: dict[str, float] = values
        if item.index % _OVERHEAD_EVERY == 0:
            self._overhead_share = self._overhead()
        metrics["perf/overhead_share"] = self._overhead_share
        if item.wait_cpu_share is not None:
            metrics["perf/data_wait_cpu_share"] = item.wait_cpu_share
        if item.datasets is not None:
            metrics |= dataset_values(item.datasets)
        if self.source is not None and self.source.error is not None:
            metrics["perf/flop_error"] = self.source.error
        return metrics


def dataset_values(taken: Taken) -> dict[str, float]:
    """Metrics by dataset. Reads the sums: call it when the device has caught up."""
    return resolve_datasets(taken.totals(taken.sums.tolist() if taken.sums is not None else ()))
