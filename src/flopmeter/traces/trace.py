"""What do the traces of a job say, taken together, and how do they look as a run?

As a run, the waterfall, the rules, the report and `compare` work on them unchanged. Each step of the trace becomes a
step of the run. With the files of several ranks, the step takes as long as its slowest rank, FLOPs are summed, shares
are means; the profiled steps are those of the lowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from flopmeter import __version__
from flopmeter.errors import TraceError
from flopmeter.metrics import Measured, add_up, as_row
from flopmeter.profiling.recorded import PARTS, UNSEEN_MASKS, Activity, FlopSums
from flopmeter.record import Run
from flopmeter.record.reader import MIN_COVERAGE, RunReader
from flopmeter.schema import PHASES, SCHEMA_VERSION
from flopmeter.traces.rank import RankTrace, read_rank
from flopmeter.traces.steps import TracedStep

MAX_RANKS_LISTED = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The traces of the ranks of one job, at least one."""

    ranks: tuple[RankTrace, ...]
    """In the order of their ranks."""
    numbers: tuple[int, ...]
    """The steps that every rank has, as the profiler counts them."""
    notes: tuple[str, ...] = ()
    """What is missing or uncertain, one sentence each."""

    def as_run(self) -> Run:
        """The trace as if it had been a monitored run of these steps, for the waterfall, the rules and the report."""
        first = self.ranks[0]
        steps = [_JobStep(self, number) for number in self.numbers]
        header = {
            "kind": "header",
            "schema": SCHEMA_VERSION,
            "run_id": first.path.name,
            "started_at": steps[0].end_s - steps[0].step_s,
            "world_size": max(first.world_size or 1, len(self.ranks)),
            "device": "cpu" if first.is_cpu else first.device,
            "peak": {dtype: peak.as_record() for dtype, peak in first.peaks.items()},
            "mode": "trace",
            "convention": "exact",
            "versions": {"flopmeter": __version__},
        }
        rows = (
            {"kind": "step", "step": step.number, "time": step.end_s, "metrics": as_row(step.measured())}
            for step in steps
        )
        last = steps[-1]
        events = [
            *(_event(step, "profile", **_profile(first, step, steps)) for step in steps),
            _event(last, "count", **_count(steps, first)),
            _event(last, "facts", **first.facts),
            *([_event(last, "ranks", **_rank_statistics(self, steps))] if len(self.ranks) > 1 else []),
            *(_event(last, "warning", message=note) for note in (*self.notes, first.mfu_reason) if note),
        ]
        reader = RunReader(first.path)
        for line in (header, *rows, *events, {"kind": "summary", "num_steps": len(steps)}):
            reader.put(line)
        reader.settle()
        reader.run.skipped.extend(self.notes)
        return reader.run


def load_trace(
    paths: str | Path | Iterable[str | Path],
    *,
    peak_flop_per_s: float | None = None,
    max_text_bytes: int | None = None,
) -> Trace:
    """Read the traces of one job, a file for each rank; what is damaged or missing is named in `Trace.notes`.

    Args:
        peak_flop_per_s: Peak of the device, where it is not on file or the trace is of a CPU.
        max_text_bytes: Most text that a file may hold; by default 32 GB, and 200 times the size of a compressed file.

    Raises:
        TraceError: a file cannot be read as a trace, or the files are not of one job.
    """
    files = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    if not files:
        raise TraceError("no trace was given")
    ranks = [read_rank(file, peak_flop_per_s=peak_flop_per_s, max_text_bytes=max_text_bytes) for file in files]
    notes = [f"{rank.path.name}: {note}" if len(ranks) > 1 else note for rank in ranks for note in rank.notes]
    known = [rank.rank for rank in ranks]
    if len(ranks) > 1 and (None in known or len(set(known)) < len(known)):
        raise TraceError(f"each file must be of another rank of one job, and these say they are of ranks {known}")
    ordered = sorted(ranks, key=lambda rank: rank.rank or 0)
    common = set.intersection(*({time.number for time in rank.times} for rank in ranks))
    if not common:
        raise TraceError(f"the {len(ranks)} traces have no step in common: they are not of one job at one time")
    numbers = tuple(time.number for time in ordered[0].times if time.number in common)
    dropped = sum(len(rank.times) - len(numbers) for rank in ranks)
    if dropped:
        notes.append(f"{dropped} steps that not every rank has are left out of the job's figures")
    if len({rank.device for rank in ranks}) > 1:
        notes.append(f"the ranks ran on different devices; peaks are those of {ordered[0].device}")
    return Trace(ranks=tuple(ordered), numbers=numbers, notes=tuple(notes))


class _JobStep:
    """One step of all ranks."""

    def __init__(self, trace: Trace, number: int) -> None:
        self.number = number
        self.ranks = trace.ranks
        self.times: list[TracedStep] = []
        self.flops: list[FlopSums] = []
        for rank in trace.ranks:
            index = next(i for i, time in enumerate(rank.times) if time.number == number)
            self.times.append(rank.times[index])
            self.flops.append(rank.flops[index])
        self.end_s = (trace.ranks[0].origin_us + self.times[0].end_us) * 1e-6

    @property
    def step_s(self) -> float:
        return max(time.step_s for time in self.times)

    def measured(self) -> Measured:
        """The step as a row of a run file would hold it: of times, the mean share of the ranks."""
        ns = 1e9 * self.step_s
        exposed = fmean(time.exposed_communication_s / time.step_s for time in self.times)
        step: dict[str, Any] = {"ns": ns, "device_ns": ns * len(self.ranks), "exposed_communication_ns": exposed * ns}
        for phase in PHASES[:-1]:
            step[f"{phase}_ns"] = ns * fmean(time.phase_s.get(phase, 0.0) / time.step_s for time in self.times)
        if not any(rank.mfu_reason for rank in self.ranks):
            step |= add_up([{"model_flop": flop.model, "hardware_flop": flop.hardware} for flop in self.flops])
        return step


def _event(step: _JobStep, name: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "event": name, "time": step.end_s, "after_step": step.number, **fields}


def _profile(rank: RankTrace, step: _JobStep, steps: Sequence[_JobStep]) -> dict[str, Any]:
    """The step's exclusive seconds. On a CPU, as for a monitored run, gaps are those of the two passes alone."""
    time, num_steps = step.times[0], len(rank.times)
    seconds = {f"{part}_s": time.activity_s[work] for part, work in PARTS.items()}
    if rank.is_cpu:
        passes = ("forward", "backward")
        seconds["non_matmul_s"] = sum(time.detail_s.get((Activity.OTHER_COMPUTE, phase), 0.0) for phase in passes)
        seconds["gap_s"] = sum(time.detail_s.get((Activity.IDLE, phase), 0.0) for phase in passes)
        seconds["optimizer_s"] = time.phase_s.get("optimizer", 0.0)
    else:
        seconds["non_matmul_s"] += time.activity_s[Activity.DEVICE_COPY]
        seconds["gap_s"], seconds["queued_s"] = time.launch_gap_s, time.other_idle_s
    return {
        "device": "cpu" if rank.is_cpu else "cuda",
        "step_s": time.step_s,
        "typical_step_s": median(other.step_s for other in steps),
        **seconds,
        "num_ops": time.num_launches,
        "top": [[name, total_s / num_steps, calls / num_steps] for name, total_s, calls in rank.top],
    }


def _count(steps: Sequence[_JobStep], rank: RankTrace) -> dict[str, Any]:
    """The median step's FLOPs of the lowest rank, as a counted step would report them."""
    flop = sorted((step.flops[0] for step in steps), key=lambda flop: sum(flop.model.values()))[len(steps) // 2]
    counting = rank.counting
    is_partial = counting.coverage is not None and counting.coverage < MIN_COVERAGE
    return {
        "model_flop": sum(flop.model.values()),
        **flop.fields(),
        "by_module": {},
        "coverage": counting.coverage,
        "uncounted": counting.uncounted,
        "method": "trace",
        "convention": "exact",
        "left_out": [UNSEEN_MASKS, *([rank.mfu_reason] if is_partial else [])],
    }


_QUANTITIES: dict[str, Callable[[TracedStep], float]] = {
    "step_s": lambda time: time.step_s,
    "own_s": lambda time: time.step_s - time.exposed_communication_s,
    "blocked_s": lambda time: time.exposed_communication_s,
    **{f"{phase}_s": lambda time, phase=phase: time.phase_s.get(phase, 0.0) for phase in PHASES},  # type: ignore[misc]
}


def _rank_statistics(trace: Trace, steps: Sequence[_JobStep]) -> dict[str, Any]:
    numbers = [rank.rank or 0 for rank in trace.ranks]
    world_size = max(trace.ranks[0].world_size or 0, len(numbers))
    means = {
        name: {number: fmean(read(step.times[i]) for step in steps) for i, number in enumerate(numbers)}
        for name, read in _QUANTITIES.items()
    }
    stats = {}
    for name, by_rank in means.items():
        values, slowest = by_rank.values(), max(by_rank, key=by_rank.__getitem__)
        stats[name] = {"min": min(values), "mean": fmean(values), "max": by_rank[slowest], "argmax": slowest}
    listed = range(min(world_size, MAX_RANKS_LISTED))
    return {
        "world_size": world_size,
        "missing": [rank for rank in listed if rank not in numbers],
        "stats": stats,
        "own_s_by_rank": [means["own_s"].get(rank) for rank in listed],
        "num_steps": len(steps),
    }
