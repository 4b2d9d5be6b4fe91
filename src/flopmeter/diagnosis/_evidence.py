"""What does the record of a run hold that rules can judge by? Computed once, so that a rule is a few lines.

An accessor whose answer is missing raises `NotCheckedError` with the reason; a rule that merely would like to know asks
with a default instead.
"""

from __future__ import annotations

import math
import operator
import re
from array import array
from collections.abc import Mapping
from functools import cached_property
from itertools import compress
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flopmeter.columns import LONGEST_S, known, mapping, number_or_nan
from flopmeter.diagnosis._finding import Gain, NotCheckedError
from flopmeter.text import percent
from flopmeter.waterfall import LABELS, assemble
from flopmeter.waterfall.split import Split
from flopmeter.waterfall.window import Window

if TYPE_CHECKING:
    from flopmeter.record import Run
    from flopmeter.waterfall.sampled import Sampled

MAX_COUNT = 1e18
"""Above this, a count in the record is damage."""
BUSY_SHARE = 0.5
"""From here on a loader computes rather than waits: the larger part of its time is CPU time. A worker that reads a slow
disk stays below a fifth; one that computes shares its core with the training, and so stays below 1."""
SYNC_SPAN = 100
"""Launches after a synchronisation during which a GPU still waits for the host to get ahead of it again: the depth of
the queue that it has to rebuild. On a CPU there is no queue, and the span is 1."""
LAUNCH_S = 1e-5
"""What the host takes for one launch in eager mode; longer gaps behind a synchronisation have other causes."""


MOST = 0.5
"""With more of the wall time unexplained than this, nothing is known of the run but its length."""


class Evidence:
    """The facts of one window of a run."""

    def __init__(self, run: Run, start: int | None = None, stop: int | None = None) -> None:
        self.run = run
        self.window = Window(run, start, stop)
        self._split = Split(self.window)
        self.waterfall = assemble(self._split)

    @property
    def wall_s(self) -> float:
        """Wall time of the window."""
        return self.waterfall.wall_s

    @property
    def num_steps(self) -> int:
        """Steps of the window."""
        return len(self.window)

    @cached_property
    def sampled(self) -> Sampled | None:
        """The sampled steps, if there are any."""
        return self._split.sampled if self.window.timed else None

    @cached_property
    def is_untold(self) -> bool:
        """Whether the record does not tell where most of the time went."""
        return (self.waterfall.share("unexplained") or 0.0) > MOST

    @cached_property
    def is_gpu(self) -> bool:
        """Whether the work was done by a GPU."""
        is_sampled_there = self.sampled is not None and self.sampled.device == "cuda"
        return is_sampled_there or self.device.split(":")[0] not in ("", "cpu")

    @property
    def device(self) -> str:
        """Its name, as the driver gives it; "" when unknown."""
        return self.run.headers[-1].device if self.run.headers else ""

    @property
    def mode(self) -> str:
        """How the FLOPs were obtained; "trace" for a run that was made of a profiler's trace, "" when unknown."""
        return self.run.headers[-1].mode if self.run.headers else ""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.run.headers[-1].world_size if self.run.headers else 1

    def share(self, part: str) -> float:
        """Share of the wall time of a part of the waterfall."""
        share = self.waterfall.share(part)
        if share is None:
            raise NotCheckedError(_MISSING_PART.get(part, f"the record does not tell {LABELS.get(part, part).lower()}"))
        return share

    def seconds(self, part: str) -> float:
        """Seconds of a part of the waterfall."""
        return self.share(part) * self.wall_s

    def seconds_or_zero(self, part: str) -> float:
        """The same, for a part that only adds to a judgement."""
        return self.waterfall.seconds(part) or 0.0

    def mean(self, key: str) -> float:
        """A column over the ordinary steps, weighted by their time."""
        amount, step = self.window.amount(key), self.window.step
        if amount is None or step is None:
            raise NotCheckedError(f"no step has {key}")
        return amount.mean_s / step.mean_s

    def mean_or_none(self, key: str) -> float | None:
        """The same, or None."""
        try:
            return self.mean(key)
        except NotCheckedError:
            return None

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What the last observed step showed."""
        return self.window.latest("facts")

    def need_facts(self) -> Mapping[str, Any]:
        """The same, for a rule that cannot do without."""
        if not self.facts:
            raise NotCheckedError("no observed step noted what it saw (event `facts`)")
        return self.facts

    def count_fact(self, key: str) -> float | None:
        """A number among the facts."""
        value = number_or_nan(self.facts.get(key), MAX_COUNT)
        return None if math.isnan(value) else value

    def resource(self, key: str) -> float | None:
        """Mean of what was sampled of the machine, as `resource/...`; None when it was not."""
        events = self.window.events("resources") or [self.window.latest("resources")]
        values = known((mapping(event.get("metrics")).get(key) for event in events), MAX_COUNT)
        return fmean(values) if values else None

    @cached_property
    def loader_busy(self) -> float | None:
        """Share of its time for which the loader computes while the training waits for it; None when unknown."""
        num_workers, cores = self.resource("resource/num_workers"), self.resource("resource/worker_cpu_cores")
        if num_workers:
            return None if cores is None else cores / num_workers
        return self._cpu_share_of_wait()

    def _cpu_share_of_wait(self) -> float | None:
        """CPU time of the training thread over the time that it waited for data; long waits count for more."""
        if not self.run.columns.keys() >= set(_WAIT):
            return None
        wait, cpu = map(self.window.values, _WAIT)
        wait_s = array("d", map(operator.mul, self.window.step_s, wait))
        cpu_s = array("d", map(operator.mul, wait_s, cpu))
        pairs = zip(wait_s, cpu_s, strict=True)
        is_known = bytes(0 <= waited < LONGEST_S and 0 <= computed < LONGEST_S for waited, computed in pairs)
        total_s = math.fsum(compress(wait_s, is_known))
        return math.fsum(compress(cpu_s, is_known)) / total_s if total_s > 0 else None

    def loader_evidence(self) -> str:
        """The same in words."""
        num_workers = self.resource("resource/num_workers")
        if self.loader_busy is None:
            return "whether the loader computes or waits meanwhile is not in the record"
        if num_workers == 1:
            return f"its one worker is busy for {percent(self.loader_busy)} of the time"
        if num_workers:
            return f"its {num_workers:.3g} workers are busy for {percent(self.loader_busy)} of the time each"
        return f"the batch is made by the training process, which computes for {percent(self.loader_busy)} of the wait"

    def top_s(self, pattern: str) -> float:
        """Seconds a step of the longest operators whose name matches; 0 when none does or none was sampled."""
        rows = self.sampled.top if self.sampled else ()
        return math.fsum(seconds for name, seconds, _ in rows if re.search(pattern, name, re.IGNORECASE))

    @cached_property
    def host_syncs(self) -> dict[str, float]:
        """Calls a step that make the host wait for the device, by operator."""
        calls = {
            str(op)[:80]: number_or_nan(num, MAX_COUNT) for op, num in mapping(self.facts.get("host_syncs")).items()
        }
        for name, _, num in self.sampled.top if self.sampled else ():  # a later step, perhaps with more of them
            if name in calls:
                calls[name] = max(calls[name], num)
        return {op: num for op, num in calls.items() if num > 0}

    @cached_property
    def sync_gap_s(self) -> float:
        """Launch gaps, over the window, that stand behind synchronisations rather than behind slow launching."""
        num_ops = self.sampled.num_ops if self.sampled else math.nan
        if not num_ops > 0:
            return 0.0
        calls, gap_s = sum(self.host_syncs.values()), self.seconds_or_zero("launch_gaps")
        if not self.is_gpu:
            return gap_s * min(calls / num_ops, 1.0)
        return min(gap_s * min(SYNC_SPAN * calls / num_ops, 1.0), self.num_steps * calls * SYNC_SPAN * LAUNCH_S)

    @property
    def work_s(self) -> float:
        """Time of the window that went into operators: what is left without waits, gaps and pauses."""
        return max(self.wall_s - math.fsum(map(self.seconds_or_zero, _NO_WORK)), 0.0)

    @cached_property
    def loop_s(self) -> float:
        """Time of the window that the loop's own code took, outside all phases and garbage collections."""
        # A CPU copies nothing to a device: that phase is code of the loop, too.
        names = ("other",) if self.is_gpu else ("other", "host_to_device")
        amounts = [self.window.amount(f"perf/{name}_share") for name in names]
        return max(self.num_steps * sum(amount.mean_s for amount in amounts if amount) - self.window.gc_s, 0.0)

    def gain(self, expected_s: float, *, low_s: float, high_s: float) -> Gain:
        """What saving these seconds of the window brings."""
        return Gain.of_saving(self.wall_s, low_s, expected_s, high_s)

    def pause_s(self, pattern: str) -> float:
        """Seconds of the pauses whose name matches."""
        named = self.window.pauses_s
        return math.fsum(seconds for name, seconds in named.items() if re.search(pattern, name, re.IGNORECASE))


_WAIT = ("perf/data_wait_share", "perf/data_wait_cpu_share")
_NO_WORK = ("launch_gaps", "data_wait", "host_to_device", "exposed_communication", "pauses")
_MISSING_PART = {
    "launch_gaps": "no step was sampled by the profiler",
    "non_matmul": "no step was sampled by the profiler",
    "matmul_below_peak": "no step was sampled by the profiler",
    "ideal": "MFU is unknown",
    "recompute": "neither a sampled step nor HFU is in the record",
    "exposed_communication": "the time blocked in communication was not measured",
}
