"""What does the trace of one rank say: its steps' times and FLOPs, the longest kernels, host syncs, eager attention?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from flopmeter.devices import Peak, peak_flops
from flopmeter.devices.kernels import short_name
from flopmeter.errors import FlopmeterError, TraceError
from flopmeter.metrics import utilisation
from flopmeter.profiling.recorded import Activity, Cover, FlopSums
from flopmeter.record.reader import MIN_COVERAGE
from flopmeter.text import percent
from flopmeter.traces.events import UNREADABLE, EventReader, Head, trace_text
from flopmeter.traces.steps import Counting, Host, StepWindow, TracedStep, count, find_windows, place, split
from flopmeter.traces.timeline import MAX_EVENTS, Collector, DeviceEvents, Timeline

MANY_LOST = 0.05
"""Share of idle time with work in the queue from which on it is worth a note."""
MAX_TOP = 20
MIN_ATTENTION_LENGTH = 64
"""A square of scores smaller than this costs next to nothing."""
_FUSED = re.compile(r"aten::_fused_(adam|adamw|sgd|adagrad)|Optimizer\.step#.*Fused")

CPU = "the CPU of the trace"
_NO_CPU_PEAK = (
    "a trace does not say which CPU it is of: give its peak with --peak-flop-per-s (peak_flop_per_s in Python)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """One file: the steps of one rank, and what they were made of."""

    path: Path
    rank: int | None
    """As the trace says; None when it does not."""
    world_size: int | None
    device: str
    """Name of the accelerator, or `CPU`."""
    is_cpu: bool
    """Whether no kernel was recorded, so that operators are the work."""
    origin_us: float
    """Unix time of the trace's zero, in microseconds."""
    num_events: int
    times: tuple[TracedStep, ...]
    flops: tuple[FlopSums, ...]
    """One for each of `times`."""
    counting: Counting
    peaks: Mapping[str, Peak] = field(default_factory=dict)
    """Peak by dtype, for the dtypes that did work."""
    mfu_reason: str = ""
    """Why there is no MFU; empty when there is."""
    top: tuple[tuple[str, float, int], ...] = ()
    """The longest kernels of all steps: name, seconds, calls."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the steps showed besides: see the event `facts` of a run."""
    notes: tuple[str, ...] = ()
    """What is missing or uncertain, one sentence each."""

    def mfu(self, flop: Mapping[str, float], seconds: float) -> float | None:
        """FLOPs over what the device could have done in the time; None for `mfu_reason`."""
        peaks = {dtype: peak.flop_per_s for dtype, peak in self.peaks.items()}
        return None if self.mfu_reason else utilisation(flop, peaks, seconds)


def read_timeline(path: Path, *, max_text_bytes: int | None = None) -> tuple[Timeline, Head, list[str]]:
    """What is kept of a file, what it says of itself, and what could not be read.

    Raises:
        TraceError: it is missing, not a trace, or holds more than it may.
    """
    problems: list[str] = []
    text = trace_text(path, problems, max_text_bytes=max_text_bytes)
    reader, collector = EventReader(text, str(path)), Collector()
    for batch in reader:
        collector.take(batch)
        if collector.is_full:
            problems.append(f"it has more than {MAX_EVENTS:,} events: the rest is not read")
            break
    timeline = collector.finish()
    problems += reader.problems
    if timeline.num_unsound:
        problems.append(f"{timeline.num_unsound} events have impossible times and are left out")
    return timeline, reader.head, problems


def read_rank(path: Path, *, peak_flop_per_s: float | None = None, max_text_bytes: int | None = None) -> RankTrace:
    """Read and analyse one file.

    Raises:
        TraceError: nothing can be said about it.
    """
    timeline, head, problems = read_timeline(path, max_text_bytes=max_text_bytes)
    if timeline.elsewhere and not len(timeline.device_events):
        seen = ", ".join(sorted(timeline.elsewhere)[:3])
        raise TraceError(
            f"{path} is of an accelerator ({seen}) and has no kernel that can be read, and what the host did is not "
            "what the device did: record a GPU's kernels with ProfilerActivity.CUDA or XPU; other devices' are not read"
        )
    host = Host(timeline)
    placed = place(timeline, host)
    windows = find_windows(timeline, placed)
    if not windows:
        missing = f" ({'; '.join(problems)})" if problems else ""
        raise TraceError(f"{path} has no kernel and no operator, so there is nothing to analyse{missing}")
    is_cpu, origin_us = not len(timeline.device_events), 0.0
    device = CPU if is_cpu else _device_name(head, timeline)
    counting = count(timeline, placed, host, windows)
    peaks, reason = _peaks(device, counting, timeline, peak_flop_per_s)
    times = tuple(split(windows, placed, host))
    info = head.distributed if isinstance(head.distributed, dict) else {}
    stated = [info.get(key) for key in ("rank", "world_size")]
    rank, world_size = (n if isinstance(n, int) and 0 <= n < 1 << 31 else None for n in stated)
    with suppress(TypeError, ValueError, OverflowError):
        base_time_ns = float(head.base_time_ns)
        origin_us = base_time_ns / 1e3 if 0 <= base_time_ns < 1e19 else 0.0
    return RankTrace(
        path=path,
        rank=rank,
        world_size=world_size or None,
        device=device,
        is_cpu=is_cpu,
        origin_us=origin_us,
        num_events=timeline.num_events,
        times=times,
        flops=tuple(counting.steps),
        counting=counting,
        peaks=peaks,
        mfu_reason=reason,
        top=top_kernels(timeline, windows),
        facts=find_facts(timeline, windows, times, counting, is_cpu),
        notes=(*problems, *_notes(timeline, times, counting, placed)),
    )


def _device_name(head: Head, timeline: Timeline) -> str:
    rows = head.device_properties if isinstance(head.device_properties, list) else []
    named = {str(row.get("id")): str(row.get("name")) for row in rows if isinstance(row, dict) and row.get("name")}
    used = [named[str(key)] for key in timeline.device_ids if str(key) in named]
    return (used or list(named.values()) or ["an unnamed device"])[0]


def _peaks(device: str, counting: Counting, timeline: Timeline, stated: float | None) -> tuple[dict[str, Peak], str]:
    """Peaks of the dtypes that did work, and why there is no MFU."""
    dtypes = sorted({dtype for step in counting.steps for dtype in (*step.model, *step.hardware)})
    peaks: dict[str, Peak] = {}
    reason = ""
    if timeline.operators and all(operator.flop is None for operator in timeline.operators):
        reason = "the trace has no shapes: record it with record_shapes=True"
    elif not dtypes:
        reason = "no operator with a FLOP formula was recorded in its steps"
    elif counting.coverage is not None and counting.coverage < MIN_COVERAGE:
        lost = ", ".join(sorted(counting.uncounted)[:4]) or "kernels that no recorded operator launched"
        reason = f"shapes are known for only {percent(counting.coverage)} of the matrix work (by time); unknown: {lost}"
    for dtype in dtypes:
        try:
            peaks[dtype] = peak_flops(device, dtype, peak_flop_per_s=stated)
        except FlopmeterError as error:
            reason = reason or (_NO_CPU_PEAK if device == CPU else str(error))
    return peaks, reason


def _notes(timeline: Timeline, times: tuple[TracedStep, ...], counting: Counting, placed: DeviceEvents) -> list[str]:
    notes = []
    if not timeline.steps and not timeline.device_steps:
        notes.append("it has no ProfilerStep, so all of it is taken as one step: call profiler.step() in the loop")
    num_empty = len(timeline.steps or timeline.device_steps) - len(times)
    if num_empty > 0:
        notes.append(f"{num_empty} of its steps are left out: nothing is known to have run in them")
    if len(timeline.device_ids) > 1:
        notes.append(f"{len(timeline.device_ids)} devices share it and are shown as one: busy if any of them is")
    if counting.has_flags_lost:
        notes.append("whether attention was causal is not recorded, so every query-key pair counts")
    if counting.steps and sum(step.by_phase.get("recompute", 0.0) for step in counting.steps) > 0:
        notes.append("recomputation is known by gradients being on in the backward pass, as with create_graph=True")
    idle_s, all_s = sum(time.other_idle_s for time in times), sum(time.step_s for time in times)
    if len(timeline.device_events) and idle_s > MANY_LOST * all_s:
        notes.append(
            f"for {percent(idle_s / all_s)} of the time the device was idle with work in its queue: it waited for "
            "another stream or rank, or ran what the profiler did not record"
        )
    num_orphans = sum(
        thread < 0 and work != Activity.DATA for thread, work in zip(placed.thread, placed.activity, strict=True)
    )
    if num_orphans:
        notes.append(f"{num_orphans} kernels and copies have no recorded launch, so their phase is unknown")
    return notes


def top_kernels(timeline: Timeline, windows: list[StepWindow]) -> tuple[tuple[str, float, int], ...]:
    """The longest kernels (outermost operators on a CPU) of all steps: name, seconds, calls."""
    events = timeline.device_events
    rows = zip(events.start_us, events.end_us, events.name, strict=True) if len(events) else timeline.outermost()
    names = timeline.kernel_names if len(events) else timeline.operator_names
    first_us, last_us = windows[0].start_us, windows[-1].end_us
    found: dict[str, list[float]] = {}
    for start_us, end_us, name in rows:
        if first_us <= start_us < last_us:
            total = found.setdefault(short_name(names[name]), [0.0, 0])
            total[0] += (end_us - start_us) * 1e-6
            total[1] += 1
    longest = sorted(found.items(), key=lambda item: -item[1][0])[:MAX_TOP]
    return tuple((name, seconds, int(calls)) for name, (seconds, calls) in longest)


def find_facts(
    timeline: Timeline, windows: list[StepWindow], times: tuple[TracedStep, ...], counting: Counting, is_cpu: bool
) -> dict[str, Any]:
    """A typical step in the words of the event `facts`: means over the steps."""
    num_steps = len(times)
    by_dtype: dict[str, float] = {}
    for step in counting.steps:
        for dtype, flop in step.hardware.items():
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + flop / num_steps
    steps = Cover((window.host_us, window.host_end_us) for window in windows)
    syncs = {} if is_cpu else {name: sum(map(steps.holds, times_us)) for name, times_us in timeline.waits.items()}
    kind = "foreach" if any("_foreach_" in name for name in timeline.optimizer_ops) else "for-loop"
    kind = "fused" if any(map(_FUSED.search, timeline.optimizer_ops)) else kind
    facts: dict[str, Any] = {
        "num_ops": round(sum(time.num_launches for time in times) / num_steps),
        "num_optimizer_ops": round(sum(time.num_optimizer_launches for time in times) / num_steps),
        "host_syncs": {name: -(-number // len(windows)) for name, number in syncs.items() if number},
        "matmul_dtypes": by_dtype,
        "tf32": counting.has_tf32,
        "optimizer": kind if len(timeline.optimizer) else None,
        "is_compiled": any(name.startswith("triton_") for name in timeline.kernel_names),
    }
    # Softmax over a square of scores: attention made of plain operators, the scores written to memory.
    lengths = [_attention_length(shapes) for instant, shapes in timeline.softmaxes if steps.holds(instant)]
    if squares := [length for length in lengths if length]:
        facts["eager_attention"] = {"calls": -(-len(squares) // len(windows)), "length": max(squares), "modules": []}
    return facts


def _attention_length(shapes: bytes) -> int:
    """Side of the square of scores that a softmax was over; 0 when it was over none."""
    try:
        shape = msgspec.json.decode(shapes, type=list[list[int]])[0]
    except (*UNREADABLE, IndexError):
        return 0
    return shape[-1] if len(shape) >= 3 and shape[-1] == shape[-2] >= MIN_ATTENTION_LENGTH else 0
