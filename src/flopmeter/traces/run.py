"""How does a trace look as a run? Then the waterfall, the rules, the report and `compare` work on it unchanged.

Each step of the trace becomes a step of the run. With the files of several ranks, the step takes as long as its slowest
rank, FLOPs are summed, shares are means; the profiled steps are those of the lowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from flopmeter import __version__
from flopmeter.metrics import Measured, add_up, as_row
from flopmeter.record import Run
from flopmeter.record.reader import RunReader
from flopmeter.schema import PHASES, SCHEMA_VERSION
from flopmeter.traces.counting import StepFlop
from flopmeter.traces.kernels import Work
from flopmeter.traces.rank import MIN_COVERAGE, RankTrace
from flopmeter.traces.steps import StepTime

if TYPE_CHECKING:
    from flopmeter.traces.trace import Trace

MAX_RANKS_LISTED = 1024
UNSEEN_MASKS = (
    "A trace holds shapes, not values: padding, masks given as tensors, and attention made of plain products count in "
    "full."
)
_FLOP_PHASES = ("forward", "backward", "recompute", "optimizer")


def make_run(trace: Trace) -> Run:
    """The run that the trace could have been."""
    steps = [_JobStep(trace, number) for number in trace.numbers]
    reader = RunReader(trace.ranks[0].path)
    reader.put(_header(trace, steps[0]))
    for step in steps:
        reader.put({"kind": "step", "step": step.number, "time": step.end_s, "metrics": as_row(step.measured())})
    for event in _events(trace, steps):
        reader.put(event)
    reader.put({"kind": "summary", "num_steps": len(steps)})
    reader.settle()
    reader.run.skipped.extend(trace.notes)
    return reader.run


class _JobStep:
    """One step of all ranks."""

    def __init__(self, trace: Trace, number: int) -> None:
        self.number = number
        self.ranks = trace.ranks
        self.times: list[StepTime] = []
        self.flops: list[StepFlop] = []
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


def _header(trace: Trace, first_step: _JobStep) -> dict[str, Any]:
    first = trace.ranks[0]
    return {
        "kind": "header",
        "schema": SCHEMA_VERSION,
        "run_id": first.path.name,
        "started_at": first_step.end_s - first_step.step_s,
        "world_size": max(first.world_size or 1, len(trace.ranks)),
        "device": "cpu" if first.is_cpu else first.device,
        "peak": {dtype: peak.as_record() for dtype, peak in first.peaks.items()},
        "mode": "trace",
        "convention": "exact",
        "versions": {"flopmeter": __version__},
    }


def _events(trace: Trace, steps: Sequence[_JobStep]) -> list[dict[str, Any]]:
    first, last = trace.ranks[0], steps[-1]
    events = [_event(step, "profile", **_profile(first, step, steps)) for step in steps]
    events.append(_event(last, "count", **_count(steps, first)))
    events.append(_event(last, "facts", **first.facts))
    if len(trace.ranks) > 1:
        events.append(_event(last, "ranks", **_rank_statistics(trace, steps)))
    return events + [_event(last, "warning", message=note) for note in (*trace.notes, first.mfu_reason) if note]


def _event(step: _JobStep, name: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "event": name, "time": step.end_s, "after_step": step.number, **fields}


def _profile(rank: RankTrace, step: _JobStep, steps: Sequence[_JobStep]) -> dict[str, Any]:
    """The step's exclusive seconds. On a CPU, as for a monitored run, gaps are those of the two passes alone."""
    time = step.times[0]
    work = time.work_s
    inside = [time.detail_s.get((kind, phase), 0.0) for kind in _INSIDE for phase in ("forward", "backward")]
    optimizer_s = time.phase_s.get("optimizer", 0.0) if rank.is_cpu else work[Work.OPTIMIZER]
    num_steps = len(rank.times)
    seconds = {
        "step_s": time.step_s,
        "typical_step_s": median(other.step_s for other in steps),
        "matmul_s": work[Work.MATMUL],
        "recompute_s": work[Work.RECOMPUTE],
        "non_matmul_s": sum(inside[:2]) if rank.is_cpu else work[Work.OTHER_COMPUTE] + work[Work.DEVICE_COPY],
        "optimizer_s": optimizer_s,
        "communication_s": work[Work.COMMUNICATION],
        "copy_s": work[Work.HOST_COPY],
        "gap_s": sum(inside[2:]) if rank.is_cpu else time.launch_gap_s,
    }
    top = [[name, total_s / num_steps, calls / num_steps] for name, total_s, calls in rank.top]
    device = "cpu" if rank.is_cpu else "cuda"
    return {"device": device, **seconds, "num_ops": time.num_launches, "top": top}


_INSIDE = (Work.OTHER_COMPUTE, Work.IDLE)


def _count(steps: Sequence[_JobStep], rank: RankTrace) -> dict[str, Any]:
    """The median step's FLOPs of the lowest rank, as a counted step would report them."""
    flop = sorted((step.flops[0] for step in steps), key=lambda flop: sum(flop.model.values()))[len(steps) // 2]
    counting = rank.counting
    left_out = [UNSEEN_MASKS]
    if counting.coverage is not None and counting.coverage < MIN_COVERAGE:
        left_out.append(rank.mfu_reason)
    phases = {f"{name}_flop": flop.by_phase.get(name, 0.0) for name in _FLOP_PHASES}
    return {
        "model_flop": sum(flop.model.values()),
        **phases,
        "hardware_flop": sum(flop.hardware.values()),
        "by_dtype": flop.model,
        "hardware_by_dtype": flop.hardware,
        "by_op": flop.by_op,
        "by_module": {},
        "coverage": counting.coverage,
        "uncounted": counting.uncounted,
        "method": "trace",
        "convention": "exact",
        "left_out": left_out,
    }


_QUANTITIES: dict[str, Callable[[StepTime], float]] = {
    "step_s": lambda time: time.step_s,
    "own_s": lambda time: time.step_s - time.exposed_communication_s,
    "blocked_s": lambda time: time.exposed_communication_s,
    **{f"{phase}_s": lambda time, phase=phase: time.phase_s.get(phase, 0.0) for phase in PHASES},  # type: ignore[misc]
}


def _rank_statistics(trace: Trace, steps: Sequence[_JobStep]) -> dict[str, Any]:
    numbers = [rank.rank or 0 for rank in trace.ranks]
    world_size = max(trace.ranks[0].world_size or 0, len(numbers))
    present = set(numbers)
    means = {
        name: [fmean(map(read, times)) for times in zip(*(step.times for step in steps), strict=True)]
        for name, read in _QUANTITIES.items()
    }
    own_s = dict(zip(numbers, means["own_s"], strict=True))
    return {
        "world_size": world_size,
        "missing": [rank for rank in range(min(world_size, MAX_RANKS_LISTED)) if rank not in present],
        "stats": {name: _statistics(values, numbers) for name, values in means.items()},
        "own_s_by_rank": [own_s.get(rank) for rank in range(min(world_size, MAX_RANKS_LISTED))],
        "num_steps": len(steps),
    }


def _statistics(values: Sequence[float], numbers: Sequence[int]) -> dict[str, float]:
    largest = max(range(len(values)), key=values.__getitem__)
    return {"min": min(values), "mean": fmean(values), "max": values[largest], "argmax": numbers[largest]}
