"""What do the traces of a job say, taken together?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopmeter.errors import TraceError
from flopmeter.traces.kernels import Work
from flopmeter.traces.rank import RankTrace, read_rank
from flopmeter.traces.steps import StepTime

if TYPE_CHECKING:
    from flopmeter.record import Run

Progress = Callable[[Path, int, int], None]
"""Called with the file at hand, its bytes read so far, and its size."""


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
        from flopmeter.traces.run import make_run

        return make_run(self)

    def as_dict(self) -> dict[str, Any]:
        """Everything that is known, in plain types."""
        return {"notes": list(self.notes), "ranks": [_rank_dict(rank) for rank in self.ranks]}


def load_trace(
    paths: str | Path | Iterable[str | Path],
    *,
    peak_flop_per_s: float | None = None,
    max_text_bytes: int | None = None,
    on_progress: Progress | None = None,
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
    ranks = [
        read_rank(
            file,
            peak_flop_per_s=peak_flop_per_s,
            max_text_bytes=max_text_bytes,
            on_progress=_for(on_progress, file),
        )
        for file in files
    ]
    return _join(ranks)


def _for(on_progress: Progress | None, file: Path) -> Callable[[int, int], None] | None:
    return None if on_progress is None else lambda done, size: on_progress(file, done, size)


def _join(ranks: list[RankTrace]) -> Trace:
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


def _rank_dict(rank: RankTrace) -> dict[str, Any]:
    counting = rank.counting
    return {
        "path": str(rank.path),
        "rank": rank.rank,
        "world_size": rank.world_size,
        "device": rank.device,
        "num_events": rank.num_events,
        "coverage": counting.coverage,
        "uncounted": counting.uncounted,
        "mfu_reason": rank.mfu_reason,
        "peak_flop_per_s": {dtype: peak.flop_per_s for dtype, peak in rank.peaks.items()},
        "steps": [_step_dict(rank, index, time) for index, time in enumerate(rank.times)],
        "top": [list(row) for row in rank.top],
        "facts": dict(rank.facts),
        "notes": list(rank.notes),
    }


def _step_dict(rank: RankTrace, index: int, time: StepTime) -> dict[str, Any]:
    flop = rank.flops[index]
    model_flop = sum(flop.model.values()) if flop.model else None
    return {
        "step": time.number,
        "step_s": time.step_s,
        "busy_s": time.busy_s,
        "compute_s": time.compute_s,
        "communication_s": time.communication_s,
        "exposed_communication_s": time.exposed_communication_s,
        "copy_s": time.copy_s,
        "idle_s": time.idle_s,
        "launch_gap_s": time.launch_gap_s,
        "data_wait_s": time.data_wait_s,
        "other_idle_s": time.other_idle_s,
        "matmul_s": time.work_s[Work.MATMUL],
        "recompute_s": time.work_s[Work.RECOMPUTE],
        "optimizer_s": time.work_s[Work.OPTIMIZER],
        "phase_s": time.phase_s,
        "num_launches": time.num_launches,
        "counted_flop": model_flop,
        "flop_by_phase": flop.by_phase,
        "mfu": rank.mfu(flop.model, time.step_s),
        "hfu": rank.mfu(flop.hardware, time.step_s),
    }
