"""How long did the device take for each phase of a step, told without ever waiting for it?

    timeline = DeviceTimeline(source)
    timeline.mark("forward")        # from here on the device works for the forward pass
    timeline.mark("backward")
    timeline.end_step(7)
    for step in timeline.poll(): ...        # steps that the device has left behind since the last call

A mark puts an event into the device's queue and notes the host's time. Events are read in order once the device has
passed them, each against the one before it: a time is float32 milliseconds, too coarse from the start of a run. An
event is used again only after it was read; when all are waiting, marks are skipped.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from typing import Literal, Protocol
from weakref import WeakSet

logger = logging.getLogger("flopmeter")

MARKS_PER_MICRO_BATCH = 8
"""Marks beyond these since the last forward pass or end of a step are skipped: timed events cost the host some
microseconds each and can get into the way of overlapped work."""

UNSPLIT = "unsplit"
"""The phase of device time in which a mark is missing: it belongs to two phases, and nobody knows how much to which."""

BEGIN = -2
"""In place of a step's number: none has ended here, and one that is marked begins."""
FIRST_STEPS, MARK_EVERY = 15, 16
"""Steps that are all marked, the warm-up and twelve more; and of how many beyond them one is."""
MAX_UNCOLLECTED_STEPS = 256
# Both clocks drift apart by up to this much; beyond it, one of them stood still or jumped.
_CLOCK_SLACK_S = 100e-6
_CLOCK_SLACK_SHARE = 200e-6

Flaw = Literal["incomplete", "unordered"]


def next_sampled(step: int) -> int:
    """The first from this one on: one in `MARK_EVERY`, by a hash, in step with nothing that a loop does at times."""
    while (step * 0x9E3779B1 & 0xFFFFFFFF) * MARK_EVERY >> 32:
        step += 1
    return step


def is_sampled(step: int) -> bool:
    """Whether a step is marked beyond the first ones, the same on every rank."""
    return next_sampled(step) == step


def has_one_connection() -> bool:
    """Megatron's setting: a timed event beside a collective would then undo its overlap with computing."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


class EventSource(Protocol):
    """Numbered timing events of one device; the simulated one and CUDA's keep the same rules."""

    num_events: int

    def initialized(self) -> bool:
        """Whether this process uses the device already. The only call that is made before it does."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph: then nothing else may be called."""
        ...

    def record(self, slot: int) -> None:
        """Queue an event behind all work enqueued so far."""
        ...

    def query(self, slot: int) -> bool:
        """Whether the device has passed the event. True for one never recorded; raises the user's own late errors."""
        ...

    def elapsed_ms(self, first: int, second: int) -> float:
        """Device time between two events that it has passed, rounded to float32."""
        ...


@dataclass(slots=True)
class PhaseTime:
    """One phase of one step, summed over its micro-batches. Not frozen: it is filled while the step is read."""

    device_s: float = 0.0
    """Time that passed on the device between the marks, idle or not."""
    host_s: float = 0.0
    """Time that the host took to enqueue it."""
    has_backlog: bool = False
    """The host had left the phase before the device even reached it."""
    lag_at_least_s: float = 0.0
    """How far the device was behind when the host left the phase for the last time. The host's time is read after the
    event is recorded, so this is too large by up to the duration of a record."""
    lag_at_most_s: float = 0.0
    """The same from above: tight only where the host waited for the device somewhere in the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceStep:
    """One step as the device went through it, from its end of the step before to its end of this one."""

    step: int
    """The number given to `end_step`."""
    device_s: float | None
    """Sum of the phases. None when the step has a flaw."""
    phases: Mapping[str, PhaseTime]
    """By name, in the order of first entry; empty when the step has a flaw."""
    flaw: Flaw | None = None
    """incomplete: the mark at its start is missing. unordered: the times contradict each other (several streams, a
    clock that jumped, a suspended process)."""


class _Mark:
    """What the host knew when it recorded the event of the same number; one each, made beforehand."""

    __slots__ = ("finds_backlog", "follows_gap", "follows_lost_end", "host_ns", "phase", "step")

    def __init__(self) -> None:
        self.phase, self.step, self.host_ns = "", -1, 0
        self.finds_backlog = self.follows_gap = self.follows_lost_end = False


class _OpenStep:
    """The step that is being read: sums so far, and what its marks tell about the distance between the two clocks."""

    __slots__ = ("_device_s", "_host_s", "_offset_high_s", "_offset_low_s", "_start_ns", "flaw", "phases")

    def __init__(self, host_ns: int, seen_ns: int, flaw: Flaw | None = None) -> None:
        self.flaw = flaw
        self.phases: dict[str, PhaseTime] = {}
        self._start_ns = host_ns
        self._host_s = 0.0
        self._device_s = 0.0
        # An event is passed after it was recorded and before it was seen: both bound host clock minus device clock.
        self._offset_low_s = 0.0
        self._offset_high_s = (seen_ns - host_ns) / 1e9

    def add(self, phase: str, interval_s: float, mark: _Mark, seen_ns: int) -> None:
        """Take the mark that closes `phase`."""
        if not interval_s >= 0:
            self.flaw = self.flaw or "unordered"
        if mark.follows_lost_end:
            self.flaw = "incomplete"
        if mark.follows_gap:
            phase = UNSPLIT
        host_s = (mark.host_ns - self._start_ns) / 1e9
        time = self.phases.get(phase)
        if time is None:
            time = self.phases[phase] = PhaseTime()
        time.device_s += interval_s
        time.host_s += host_s - self._host_s
        time.has_backlog = time.has_backlog or mark.finds_backlog
        self._host_s = host_s
        device_s = self._device_s = self._device_s + interval_s
        time.lag_at_least_s = device_s - host_s  # on two clocks, until `close` knows how far they are apart
        if host_s - device_s > self._offset_low_s:
            self._offset_low_s = host_s - device_s
        seen_s = (seen_ns - self._start_ns) / 1e9
        if seen_s - device_s < self._offset_high_s:
            self._offset_high_s = seen_s - device_s

    def close(self, step: int) -> DeviceStep:
        slack_s = _CLOCK_SLACK_S + _CLOCK_SLACK_SHARE * self._host_s
        if self._offset_low_s > self._offset_high_s + slack_s:
            self.flaw = self.flaw or "unordered"
        if self.flaw:
            return DeviceStep(step=step, device_s=None, phases={}, flaw=self.flaw)
        for time in self.phases.values():
            time.lag_at_most_s = time.lag_at_least_s + self._offset_high_s
            time.lag_at_least_s += self._offset_low_s
        return DeviceStep(step=step, device_s=self._device_s, phases=self.phases)


_timelines: WeakSet[DeviceTimeline] = WeakSet()


def _leave_to_parent() -> None:
    """In a forked child, which may not use the device. To ask for the process in each mark costs a system call."""
    for timeline in list(_timelines):
        timeline.close()
        timeline._finished.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class DeviceTimeline:
    """Marks the borders of phases on one device and tells, steps later, how long the device took between them.

    Works on the thread and in the process that created it, does nothing elsewhere, calls nothing before the device is
    in use or while a graph is captured, and never raises: the first failure switches it off, with one warning.

    Args:
        now_ns: The host's clock; tests pass a simulated one.
    """

    def __init__(self, source: EventSource, *, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._source = source
        self._now_ns = now_ns
        self._thread = get_ident()
        _timelines.add(self)
        self._is_armed, self._is_in_use = True, False
        self._has_one_connection = has_one_connection()
        # A ring, as long as there are events: `_num_read - 1` is the last one read, kept to measure the next against.
        size = self._size = source.num_events
        self._num_recorded = self._num_read = 0
        self._marks = [_Mark() for _ in range(size)]
        self._phase = ""
        self._marks_left = MARKS_PER_MICRO_BATCH
        self._missed_mark = self._missed_end = False
        self._open: _OpenStep | None = None
        self._finished: deque[DeviceStep] = deque(maxlen=MAX_UNCOLLECTED_STEPS)

    def is_capturing(self) -> bool:
        """Whether a graph is being captured: nothing runs then, and any call of ours to the device would spoil it."""
        try:
            return self._is_in_use and self._source.capturing()
        except Exception as error:  # noqa: BLE001 - most likely the user's own, which their next call reports
            self._disarm(error)
            return False

    def mark(self, phase: str) -> None:
        """From here on the device works for `phase`. Ignored when it does so already, and on any other thread."""
        if phase != self._phase and get_ident() == self._thread:
            self._place(phase, -1)

    def mark_inside_backward(self, phase: str) -> None:
        """The same from a callback of autograd's, on whichever thread it runs: ours is waiting in `backward` for it."""
        if self._phase == "backward" and not self._has_one_connection:
            self._place(phase, -1)

    def end_step(self, step: int) -> None:
        """The step's last mark; what follows belongs to the next one, to "other" until a mark says more.

        Args:
            step: Not negative; comes back in `DeviceStep.step`.
        """
        if get_ident() == self._thread:
            self._place("other", step)

    def begin(self) -> None:
        """A step begins here that is marked, behind one that is not."""
        if get_ident() == self._thread:
            self._place("other", BEGIN)

    def poll(self) -> list[DeviceStep]:
        """Steps finished since the last call, in order; never waits.

        A step whose end could not be marked never comes: whoever waits for it may stop when a later one is here.
        """
        if get_ident() != self._thread:
            return []
        if self._num_recorded > self._num_read and self._is_armed:
            try:
                if not self._source.capturing():
                    self._read()
            except Exception as error:  # noqa: BLE001 - most likely the user's own, which their next call reports
                self._disarm(error)
        finished = list(self._finished)
        self._finished.clear()
        return finished

    def close(self) -> None:
        """Mark and read no more."""
        self._is_armed = False

    def _place(self, phase: str, step: int) -> None:
        if not self._is_armed:
            return
        self._phase = phase
        if phase in ("forward", "no_grad") or step != -1:
            self._marks_left = MARKS_PER_MICRO_BATCH
        try:
            if not self._is_in_use and not self._source.initialized():
                return
            self._is_in_use = True
            if self._source.capturing():
                self._skip(step)
                return
            self._read()
            # One event stays behind as the start of the next interval.
            is_full = self._num_recorded - self._num_read >= self._size - 1
            if is_full or self._marks_left <= 0:
                self._skip(step)
                return
            slot = self._num_recorded % self._size
            mark = self._marks[slot]
            self._source.record(slot)
            mark.host_ns = self._now_ns()
            mark.phase, mark.step = phase, step
            mark.finds_backlog = self._num_recorded > self._num_read
            mark.follows_gap, mark.follows_lost_end = self._missed_mark, self._missed_end
            self._missed_mark = self._missed_end = False
            self._marks_left -= 1
            self._num_recorded += 1
        except Exception as error:  # noqa: BLE001 - most likely the user's own, which their next call reports
            self._disarm(error)

    def _skip(self, step: int) -> None:
        """No event for this mark: none is free, there were too many in a micro-batch, or a graph is captured."""
        self._missed_mark = True
        self._missed_end = self._missed_end or step != -1

    def _read(self) -> None:
        """Read every event that the device has passed. Only recorded ones are asked: `query` is True for the rest."""
        while self._num_read < self._num_recorded:
            slot = self._num_read % self._size
            if not self._source.query(slot):
                return
            mark, seen_ns = self._marks[slot], self._now_ns()
            if mark.step == BEGIN:
                self._open = _OpenStep(mark.host_ns, seen_ns)
            elif self._open is None:
                self._open = _OpenStep(mark.host_ns, seen_ns, "incomplete")
            else:
                last = (self._num_read - 1) % self._size
                interval_s = self._source.elapsed_ms(last, slot) / 1e3
                self._open.add(self._marks[last].phase, interval_s, mark, seen_ns)
            if mark.step >= 0:
                self._finished.append(self._open.close(mark.step))
                self._open = _OpenStep(mark.host_ns, seen_ns)
            self._num_read += 1

    def _disarm(self, error: Exception) -> None:
        self._is_armed = False
        reason = (str(error).splitlines() or [""])[0]
        logger.warning(
            "device times end here, host times go on: an event failed with %s: %s. If an operation of yours failed on "
            "the device, your next call to it says so",
            type(error).__name__,
            reason,
        )
