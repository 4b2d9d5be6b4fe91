"""What was each kernel for, where did the time of each step go, and how many FLOPs did it do?

A kernel runs long after its launch, so it belongs to the phase in which it was launched. Phases are known from marks
that torch itself makes: nodes of the autograd engine are the backward pass, `Optimizer.step` annotations the optimizer,
operators that make autograd nodes the forward pass; such an operator inside the backward pass is recomputation (or a
backward pass that builds a graph, which looks the same in a trace). The rest is "other".

A step is a `ProfilerStep` annotation. The host runs ahead of the device, so its annotation says when the step was
enqueued, not when it ran. The window of a step on the device therefore goes from the end of the last compute kernel
that the step before launched to the end of its own; the first begins with its annotation, the last ends with its last
kernel or with the annotation, whichever is later. The windows join without gaps. A wait for data at the beginning of a
step lies in that step's window. Without an accelerator the windows are the annotations.

An operator counts when it launched a kernel: a recomputation that checkpointing stopped early has recorded an operator
that never ran. On a CPU nothing shows that, so such operators count (as recomputation, which MFU leaves out).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flopmeter.devices import dtype_name
from flopmeter.devices.kernels import is_matmul, is_tf32
from flopmeter.profiling.recorded import (
    COMPUTE,
    Activity,
    Cover,
    FlopSums,
    Phase,
    Range,
    Segment,
    choose,
    nest,
    segments,
    uncounted,
)
from flopmeter.traces.timeline import DeviceEvents, Spans, Timeline

_NOTHING = Cover(())


class Host:
    """The host's side of one trace, ready to be asked about instants."""

    def __init__(self, timeline: Timeline) -> None:
        steps = timeline.steps or timeline.device_steps
        main = next(iter(steps.values()))[2] if steps else -1
        self.fetches = Cover(_on_thread(timeline.fetches, main))
        if main < 0:  # the thread that trains is the one that makes most of the graph
            main = max(Counter(timeline.graph_making.thread).items(), key=lambda item: item[1], default=(-1, 0))[0]
        self._optimizer = _by_thread(timeline.optimizer)
        self._nodes = _by_thread(timeline.nodes)
        self._engine_threads = self._nodes.keys() - {main}
        self._graph_making = _by_thread(timeline.graph_making)
        self._products = _by_thread(
            (op.start, op.end, op.thread) for op in timeline.operators if op.formula and not op.formula.composite
        )
        self._forward = _forward_stretches(timeline, main)

    def phase(self, thread: int, instant: float) -> Phase:
        """The phase that a call at this instant belongs to; recomputation is among the backward pass."""
        if thread in self._engine_threads or self._nodes.get(thread, _NOTHING).holds(instant):
            return "backward"
        if self._optimizer.get(thread, _NOTHING).holds(instant):
            return "optimizer"
        return "forward" if self._forward.holds(instant) else "other"

    def is_repeated(self, thread: int, instant: float) -> bool:
        """Whether a call at this instant of the backward pass does forward work again."""
        return self._graph_making.get(thread, _NOTHING).holds(instant)

    def is_in_product(self, thread: int, instant: float) -> bool:
        """Whether a call at this instant was made by an operator that multiplies matrices."""
        return self._products.get(thread, _NOTHING).holds(instant)


def _forward_stretches(timeline: Timeline, main: int) -> Cover:
    """From the first to the last operator of each forward pass: nothing of another phase lies between the two."""
    marks = (timeline.nodes, timeline.optimizer, timeline.fetches)
    others = Cover((start, end) for spans in marks for start, end, _ in spans)
    stretches: dict[int, tuple[float, float]] = {}
    for start, end in sorted(_on_thread(timeline.graph_making, main)):
        if not others.holds(start):
            before = bisect_right(others.starts, start)
            first, last = stretches.get(before, (start, end))
            stretches[before] = (first, max(end, last))
    return Cover(stretches.values())


def _by_thread(rows: Iterable[tuple[float, float, int]]) -> dict[int, Cover]:
    found: dict[int, list[tuple[float, float]]] = {}
    for start, end, thread in rows:
        found.setdefault(thread, []).append((start, end))
    return {thread: Cover(stretches) for thread, stretches in found.items()}


def _on_thread(spans: Spans, thread: int) -> list[tuple[float, float]]:
    """The stretches of one thread; of all when the thread is not known."""
    return [(start, end) for start, end, owner in spans if thread in (owner, -1)]


def place(timeline: Timeline, host: Host) -> DeviceEvents:
    """Join what ran with what the host was doing: on the accelerator, or on the host itself where there is none."""
    if not len(timeline.device_events):
        return _operators(timeline, host)
    placed = timeline.device_events
    for position, correlation in enumerate(placed.correlation):
        launch_us, thread = timeline.launches.get(correlation, (math.nan, -1))
        phase: Phase = host.phase(thread, launch_us) if thread >= 0 else "other"
        placed.launch_us.append(launch_us)
        placed.thread.append(thread)
        placed.phase.append(phase)
        if placed.activity[position] == Activity.OTHER_COMPUTE:
            is_product = is_matmul(timeline.kernel_names[placed.name[position]])
            placed.activity[position] = _purpose(host, phase, thread, launch_us, is_product)
    return placed


def _purpose(host: Host, phase: Phase, thread: int, instant: float, is_product: bool) -> Activity:
    if phase == "optimizer":
        return Activity.OPTIMIZER
    if phase == "backward" and host.is_repeated(thread, instant):
        return Activity.RECOMPUTE
    if is_product or host.is_in_product(thread, instant):
        return Activity.MATMUL
    return Activity.OTHER_COMPUTE


def _operators(timeline: Timeline, host: Host) -> DeviceEvents:
    """Operators of a CPU, and waits for data. They nest: a product is charged before what surrounds it."""
    spans, fetches = timeline.dispatched, host.fetches
    num_fetches = len(fetches.starts)
    placed = DeviceEvents(
        start_us=spans.start_us + array("d", fetches.starts),
        end_us=spans.end_us + array("d", fetches.ends),
        launch_us=spans.start_us + array("d", [math.nan]) * num_fetches,
        thread=spans.thread + array("l", [-1]) * num_fetches,
    )
    for start_us, _, thread in spans:
        phase = host.phase(thread, start_us)
        placed.phase.append(phase)
        placed.activity.append(_purpose(host, phase, thread, start_us, False))
    placed.phase += ["other"] * num_fetches
    placed.activity.extend([Activity.DATA] * num_fetches)
    return placed


_US = 1e-6
_IDLE, _DATA, _HOST_COPY = (
    int(Activity.IDLE),
    int(Activity.DATA),
    int(Activity.HOST_COPY),
)  # an enum's members are slow to name


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """One step's stretch of time."""

    number: int
    """As the profiler counts; 0 when the trace has no steps and is taken as one."""
    host_us: float
    """When the host began it."""
    host_end_us: float
    """When the host began the next, or ended the last."""
    start_us: float
    """When the device came to it."""
    end_us: float


@dataclass(kw_only=True, slots=True)
class TracedStep:
    """Seconds of one step. compute, exposed communication, copies and idle add up to the step."""

    number: int
    end_us: float
    step_s: float
    activity_s: dict[int, float] = field(default_factory=lambda: dict.fromkeys(map(int, Activity), 0.0))
    """By `Activity`: what each instant is charged to."""
    communication_s: float = 0.0
    """With communication running, hidden by compute or not."""
    launch_gap_s: float = 0.0
    """Idle because the host had not launched the next kernel yet."""
    data_wait_s: float = 0.0
    """Idle while the host waited for a batch."""
    other_idle_s: float = 0.0
    """Idle although the next kernel was in the queue (it waited for another stream, or the device needed a moment to
    begin it), or idle for a reason that the trace does not show."""
    phase_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By phase; an idle stretch belongs to the phase of the kernel that ends it. They add up to the step."""
    detail_s: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    """By work and phase at once."""
    num_launches: int = 0
    """Kernels and copies, or operators on a CPU."""
    num_optimizer_launches: int = 0

    @property
    def compute_s(self) -> float:
        return sum(self.activity_s[work] for work in COMPUTE)

    @property
    def exposed_communication_s(self) -> float:
        """Communication that no compute hides."""
        return self.activity_s[Activity.COMMUNICATION]

    @property
    def copy_s(self) -> float:
        """Copies and fills that neither compute nor communication hides."""
        return self.activity_s[Activity.DEVICE_COPY] + self.activity_s[Activity.HOST_COPY]

    @property
    def idle_s(self) -> float:
        """Nothing ran; on a CPU, fetching a batch is among it."""
        return self.activity_s[Activity.IDLE] + self.activity_s[Activity.DATA]

    @property
    def busy_s(self) -> float:
        return self.step_s - self.idle_s


def find_windows(timeline: Timeline, placed: DeviceEvents) -> list[StepWindow]:
    """The steps of a trace in the order of time; one for the whole of it when it has none.

    A last step in which nothing was launched (the loop found no more data) is none.
    """
    found = timeline.steps or timeline.device_steps
    rows = sorted((start, end, number) for number, (start, end, _) in found.items())
    last_launch_us = max((us for us in placed.launch_us if us == us), default=-math.inf)
    while len(rows) > 1 and last_launch_us < rows[-1][0]:
        rows.pop()
    starts = [start for start, _, _ in rows]
    ends = [*starts[1:], *(end for _, end, _ in rows[-1:])]
    if not rows:  # all of it is one
        start_us, end_us = min(placed.start_us, default=0.0), max(placed.end_us, default=0.0)
        whole = StepWindow(number=0, host_us=-math.inf, host_end_us=math.inf, start_us=start_us, end_us=end_us)
        return [whole] if end_us > start_us else []
    bounds = _device_ends(starts, ends, placed) if len(timeline.device_events) else ends
    windows, begin = [], starts[0]
    if len(timeline.device_events):
        begin = max(begin, _leftovers_us(begin, bounds[0], placed))
    for start, end, bound, (_, _, number) in zip(starts, ends, bounds, rows, strict=True):
        if bound > begin:
            windows.append(StepWindow(number=number, host_us=start, host_end_us=end, start_us=begin, end_us=bound))
            begin = bound
    return windows


def _device_ends(starts: list[float], ends: list[float], placed: DeviceEvents) -> list[float]:
    """When the device was done with each step; the host's word for one that launched nothing."""
    compute, anything = [-math.inf] * len(starts), [-math.inf] * len(starts)
    for position, launch_us in enumerate(placed.launch_us):
        instant = placed.start_us[position] if math.isnan(launch_us) else launch_us
        index = bisect_right(starts, instant) - 1
        if index < 0 or instant > ends[-1]:
            continue
        anything[index] = max(anything[index], placed.end_us[position])
        if placed.activity[position] in COMPUTE:
            compute[index] = max(compute[index], placed.end_us[position])
    compute[-1] = max(anything[-1], ends[-1])
    return [end if math.isinf(done) else done for done, end in zip(compute, ends, strict=True)]


def _leftovers_us(first_us: float, done_us: float, placed: DeviceEvents) -> float:
    """When the device was done with what had been launched before the first step.

    Such kernels have an older launch or none on record. Where kernels without a launch run on beyond the first step,
    they are not left over but badly recorded, and are no sign of anything.
    """
    rows = zip(placed.end_us, placed.launch_us, placed.activity, strict=True)
    older = [end_us for end_us, launch_us, work in rows if work in COMPUTE and not launch_us >= first_us]
    last_us = max(older, default=-math.inf)
    return last_us if last_us < done_us else -math.inf


def split(windows: list[StepWindow], placed: DeviceEvents, host: Host) -> list[TracedStep]:
    """Charge every instant of every window."""
    times = [TracedStep(number=w.number, end_us=w.end_us, step_s=(w.end_us - w.start_us) * _US) for w in windows]
    starts = [window.start_us for window in windows]
    index = 0
    for segment in segments(placed.start_us, placed.end_us, placed.activity, [*starts, windows[-1].end_us]):
        while segment.start >= windows[index].end_us:
            index += 1
        _charge(times[index], segment, placed, host)
    for start_us, activity in zip(placed.start_us, placed.activity, strict=True):
        index = bisect_right(starts, start_us) - 1
        if index >= 0 and start_us < windows[index].end_us and activity != _DATA:
            times[index].num_launches += 1
            times[index].num_optimizer_launches += activity == Activity.OPTIMIZER
    return times


def _charge(time: TracedStep, segment: Segment, placed: DeviceEvents, host: Host) -> None:
    seconds, activity = (segment.end - segment.start) * _US, segment.activity
    time.activity_s[activity] += seconds
    if segment.is_communicating:
        time.communication_s += seconds
    if activity == _IDLE:  # why? Until the next kernel was launched the host may have waited for data
        launch_us = placed.launch_us[segment.owner] if segment.owner >= 0 else math.nan
        is_queued = launch_us <= segment.start
        until_us = segment.end if math.isnan(launch_us) else min(launch_us, segment.end)
        waited_s = 0.0 if is_queued else host.fetches.overlap(segment.start, until_us) * _US
        seconds -= waited_s
        time.data_wait_s += waited_s
        time.phase_s["data_wait"] += waited_s
        if is_queued or math.isnan(launch_us):
            time.other_idle_s += seconds
        else:
            time.launch_gap_s += seconds
    if activity == _DATA:
        time.data_wait_s += seconds
        phase = "data_wait"
    elif activity == _HOST_COPY:
        phase = "host_to_device"
    else:
        phase = placed.phase[segment.owner] if segment.owner >= 0 else "other"
    time.phase_s[phase] += seconds
    time.detail_s[activity, phase] += seconds


@dataclass(kw_only=True, slots=True)
class Counting:
    """The FLOPs of a trace."""

    steps: list[FlopSums]
    """One for each window."""
    coverage: float | None = None
    """Share of the matrix work, by its time, whose shapes were recorded and understood; None when there is none."""
    uncounted: dict[str, int] = field(default_factory=dict)
    """Operators whose FLOPs do not follow from what was recorded, with their number of calls."""
    has_tf32: bool | None = None
    """Whether fp32 products ran in TF32; None when no kernel of one was seen."""
    has_flags_lost: bool = False
    """Whether attention was counted without knowing if it was causal."""


def count(timeline: Timeline, placed: DeviceEvents, host: Host, windows: list[StepWindow]) -> Counting:
    """Add up the operators of each window."""
    nested = nest(timeline.operators)
    counted, lost = choose(nested), uncounted(nested)
    result = Counting(steps=[FlopSums() for _ in windows], uncounted=Counter(operator.name for operator in lost))
    kernels = _Kernels(timeline, placed) if len(timeline.device_events) else None
    for operator in counted:
        launched = kernels.of(operator) if kernels else []
        index = bisect_right(windows, operator.start, key=lambda window: window.host_us) - 1
        if index < 0 or operator.start >= windows[index].host_end_us or (kernels and not launched):
            continue
        assert operator.formula is not None
        assert operator.flop is not None
        phase = host.phase(operator.thread, operator.start)
        if phase == "backward" and host.is_repeated(operator.thread, operator.start):
            phase = "recompute"
        if not operator.flop.hardware:
            continue
        dtype = _dtype(operator, kernels, launched, result)
        result.steps[index].add(operator.name, phase, dtype, operator.flop.exact, operator.flop.hardware)
        result.has_flags_lost |= operator.formula.family == "attention" and not timeline.has_values
    if kernels:
        counted_us, other_us = kernels.seen_us()
    else:
        counted_us, other_us = (sum(operator.end - operator.start for operator in group) for group in (counted, lost))
    result.coverage = counted_us / (counted_us + other_us) if counted_us + other_us > 0 else None
    return result


class _Kernels:
    """The kernels that each thread launched, in the order of their launches."""

    def __init__(self, timeline: Timeline, placed: DeviceEvents) -> None:
        self._names, self._placed = timeline.kernel_names, placed
        self._launches: dict[int, tuple[list[float], list[int]]] = {}
        self._counted: set[int] = set()
        known = (position for position, thread in enumerate(placed.thread) if thread >= 0)
        for position in sorted(known, key=placed.launch_us.__getitem__):
            times, positions = self._launches.setdefault(placed.thread[position], ([], []))
            times.append(placed.launch_us[position])
            positions.append(position)

    def of(self, operator: Range) -> list[int]:
        """Positions of the kernels that an operator launched."""
        times, positions = self._launches.get(operator.thread, ([], []))
        found = positions[bisect_left(times, operator.start) : bisect_right(times, operator.end)]
        self._counted.update(found)
        return found

    def names(self, positions: list[int]) -> Iterator[str]:
        return (self._names[self._placed.name[position]] for position in positions)

    def seen_us(self) -> tuple[float, float]:
        """Time of the kernels that multiply matrices: those of counted operators, and the others."""
        spent_us = [0.0, 0.0]
        for position in range(len(self._placed)):
            if self._placed.activity[position] < Activity.COMMUNICATION and is_matmul(next(self.names([position]))):
                is_other = position not in self._counted
                spent_us[is_other] += self._placed.end_us[position] - self._placed.start_us[position]
        return spent_us[0], spent_us[1]


def _dtype(operator: Range, kernels: _Kernels | None, launched: list[int], result: Counting) -> str:
    dtype = dtype_name(operator.dtype) or "unknown"
    if dtype != "fp32" or kernels is None:
        return dtype
    is_tensor_core = any(is_tf32(name) for name in kernels.names(launched))
    result.has_tf32 = bool(result.has_tf32) or is_tensor_core
    return "tf32" if is_tensor_core else "fp32"
