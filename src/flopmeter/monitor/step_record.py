"""What does the training thread hand over? A step as it left it, or something that is to be noted at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec import Struct

from flopmeter.dataset_metrics import Taken
from flopmeter.flops.workload import Lengths, Seen, Workload, resolve
from flopmeter.schema import StepMark
from flopmeter.timing.late import Arrival, HostCopies, is_ready, without_late

NOTHING: Mapping[str, Any] = MappingProxyType({})


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

    def without_late(self) -> StepRecord:
        """The same, with what is still on its way unknown for good."""
        if self.arrival is not None:
            self._forget_copies()
            self.arrival = None
        self.values = without_late(self.values)
        return self

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
