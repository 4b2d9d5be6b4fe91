"""Where did the time of each step go?

A step is a `ProfilerStep` annotation. The host runs ahead of the device, so its annotation says when the step was
enqueued, not when it ran. The window of a step on the device therefore goes from the end of the last compute kernel
that the step before launched to the end of its own; the first begins with its annotation, the last ends with its last
kernel or with the annotation, whichever is later. The windows join without gaps. A wait for data at the beginning of a
step lies in that step's window. Without an accelerator the windows are the annotations.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

from flopmeter.profiling.recorded import COMPUTE, Activity, Segment, segments
from flopmeter.traces.placement import Host
from flopmeter.traces.timeline import DeviceEvents, Timeline

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
