"""What becomes of a step that is over? Closed when the optimizer steps, completed by `log_step`, then handed over.

On every step only a record is made. What has its turn now and then (warm-up, measuring, details) waits for the step
that is named beforehand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic, perf_counter_ns, sleep, time
from typing import Any

import torch
from torch import nn

from flopmeter.dataset_metrics import DatasetMetrics
from flopmeter.monitor.digest import NOTHING, Log, StepRecord, copied_to_host
from flopmeter.monitor.effort import Effort
from flopmeter.monitor.schedule import WARMUP_STEPS
from flopmeter.monitor.tracker import StepTracker
from flopmeter.timing import split
from flopmeter.timing.late import POLL_S, HostCopies, give_back
from flopmeter.torch_compat import DisableTorchFunction

PATIENCE_S, MAX_PATIENCE_S = 1.0, 10.0
"""What the device is given at the end of the run to deliver the last numbers, at least and at most."""
PATIENCE_STEPS = 4
"""In between, so many times what the longest of the last steps took: a device may be some steps behind."""
UNTIL_WAIT = 2
"""Steps after which a wait for a batch of the given loader must have been seen: the first may have come before."""
LOOK_AGAIN = 8
"""Steps until a measurement that was due and did not begin is tried again; in estimate mode none ever does."""


class Steps:
    """Makes the record of each step and hands it over once the device has caught up with it.

    Args:
        put: Takes finished records.
        on_failure: Told what went wrong, which must not stop the training.
    """

    def __init__(
        self,
        tracker: StepTracker,
        effort: Effort,
        datasets: DatasetMetrics,
        details_every: int,
        put: Callable[[StepRecord | Log], None],
        on_failure: Callable[[str, Exception], None],
    ) -> None:
        self.put = put
        self.num_steps = 0
        """Steps that have ended."""
        self.copies = HostCopies()
        """Whatever is read from the device for a step goes through it, so that the record waits for it."""
        self.model: nn.Module | None = None
        self.next_look = 0
        """Before so many steps have ended nothing but a record is due. Set to 0 when something else may be."""
        tracker.on_step = self.end
        tracker.num_steps = lambda: self.num_steps
        tracker.on_pause, tracker.discard_measurement = self.give_way, self.discard_measurement
        self._tracker = tracker
        self._clock = tracker.clock
        self._effort = effort
        self._sampling_plan = effort.sampling.plan  # the background asks for a step by it
        self._datasets = datasets
        self._details_every = details_every
        self._on_failure = on_failure
        self._ended: StepRecord | None = None
        """The last step, as long as the loop may have something to say of it."""
        self._values: Mapping[str, Any] = NOTHING
        """What was said of the running step."""
        self._said_ns = 0
        """When that was said, if it may have been of `_ended`: the next forward pass or the next step will tell."""
        self._pending: deque[StepRecord | Log] = deque()

    def end(self, now_ns: int) -> None:
        """The running step is over. Never raises."""
        try:
            tracker, index = self._tracker, self.num_steps
            tracker.end_here()
            if tracker.device_time is not None and tracker.device_time.is_capturing():
                self._end_capture(now_ns)
                return
            if tracker.is_evaluating:
                tracker.end_evaluation()
            if tracker.has_failed:
                tracker.has_failed = False
                self.discard_measurement()
            tracker.end_step(self.model)
            if self._ended is not None:
                self._settle(self._ended)
            seen = () if tracker.workloads is None else tracker.workloads.take()
            record = self._ended = StepRecord(index, time(), self._clock.take(now_ns), seen)
            self.num_steps = index = index + 1
            if tracker.wait_cpu_share is not None:
                record.wait_cpu_share, tracker.wait_cpu_share = tracker.wait_cpu_share, None
            if index >= self.next_look or index >= self._sampling_plan.next_step:
                with DisableTorchFunction():  # a function mode of the user's sees none of our calls
                    self._look(record, index)
            if self.copies.arrival is not None:
                record.arrival, self.copies.arrival, record.has_copies = self.copies.arrival, None, True
            if self._values:  # a loop that speaks again before the next forward pass means this step, too
                record.values, self._values = self._values, NOTHING
        except Exception as error:  # noqa: BLE001 - the training run comes first; the reason is logged
            self._on_failure("the end of a step", error)
        self._effort.own_ns += perf_counter_ns() - now_ns

    def discard_measurement(self) -> None:
        """Nothing can be learnt from this step, or what runs through it would spoil a graph. Never raises."""
        self._effort.discard(self.num_steps)
        self._tracker.expect(self._effort.leftover_thread)

    def give_way(self) -> None:
        """A pause begins. Never raises."""
        self._effort.give_way(self.num_steps)

    def tell(self, values: Mapping[str, Any]) -> None:
        """What the loop says of the step that has ended, or of the one that is running once it has a forward pass.

        A loop speaks before or after its optimizer steps. What it says when the optimizer was kept from stepping, or
        of a micro-batch, is replaced by what it says of the same step later.
        """
        record = self._ended
        if record is not None and not (self._tracker.has_forward or self._tracker.has_backward):
            if record.values:
                give_back(record.values)
            record.values = values
            self._complete(record)
            return
        if self._values:
            give_back(self._values)
        self._values = values
        if record is not None:
            if record.values:
                self._complete(record)
            else:
                self._said_ns = perf_counter_ns()

    def see_mask(self, mask: torch.Tensor) -> None:
        """The mask of the step that the loop is about to tell of."""
        workloads, record = self._tracker.workloads, self._ended
        if workloads is None:
            return
        if record is None or self._tracker.has_forward or self._tracker.has_backward:
            workloads.see_mask(mask)
            return
        record.seen = workloads.with_mask(record.seen, mask)
        if self.copies.arrival is not None:  # later on the same device than whatever the record waits for
            record.arrival, self.copies.arrival, record.has_copies = self.copies.arrival, None, True

    def switch_off(self) -> None:
        """From now on a step that ends is nobody's business."""
        self._tracker.on_step = lambda now_ns: None

    def flush(self) -> None:
        """Hand everything over. The device has a moment to catch up; what is not there then is unknown."""
        if self._ended is not None:
            self._ended.values = self._ended.values or self._values
            self._complete(self._ended)
        clocks = [item.clock for item in self._pending if isinstance(item, StepRecord)]
        step_s = max((split(clock).step_ns / 1e9 for clock in clocks), default=0.0)
        deadline_s = monotonic() + max(PATIENCE_S, min(PATIENCE_STEPS * step_s, MAX_PATIENCE_S))
        while self._pending:
            item = self._pending.popleft()
            while not (is_ready := item.is_ready()) and monotonic() < deadline_s:
                sleep(POLL_S)
            if not is_ready and isinstance(item, StepRecord):
                item.forget_late()
            self.put(item if is_ready or isinstance(item, StepRecord) else item.without_late())

    def _end_capture(self, now_ns: int) -> None:
        """The loop went through a step that did not run: it was captured into a graph."""
        self._tracker.end_step(None)
        marks = self._clock.take(now_ns)
        self._effort.end_capture(self.num_steps, (marks[-1] - marks[0]) / 1e9)

    def _settle(self, record: StepRecord) -> None:
        """Another step has ended: nothing more will be said of this one.

        What was said during the other one, with no word of this one before, was of this one if a forward pass came
        after it: such a loop calls its model between a step and its log, as a GAN's does.
        """
        if self._said_ns and self._tracker.forward_ns >= self._said_ns:
            record.values, self._values = self._values, NOTHING
        self._complete(record)

    def _complete(self, record: StepRecord) -> None:
        self._ended, self._said_ns = None, 0
        self.hand_over(record)

    def hand_over(self, item: StepRecord | Log) -> None:
        """Pass it on when its numbers are there, and not before what came earlier."""
        if not self._pending and item.is_ready():
            self.put(item)
            return
        self._pending.append(item)
        while self._pending and self._pending[0].is_ready():
            self.put(self._pending.popleft())

    def _look(self, record: StepRecord, num_steps: int) -> None:
        """Do what is due at the end of this step, and find out when there will be something again."""
        tracker, effort, every = self._tracker, self._effort, self._details_every
        if num_steps <= WARMUP_STEPS:
            record.marks = ("warmup",)
        if num_steps >= UNTIL_WAIT:
            tracker.check_waits()
        if tracker.blocking is not None:
            record.blocked_ns = tracker.blocking.take()
        if tracker.device_time is not None:
            tracker.device_time.end_step(num_steps)
        watch_at = num_steps + every
        if tracker.source is not None:
            watch_at = effort.watch_model(tracker.source, num_steps)
        if effort.is_measuring:
            record.arrival = self.copies.arrival
            effort.end_step(tracker.source, record, num_steps)
        if tracker.device_time is not None:
            tracker.device_time.take_finished(num_steps, is_typical=not record.marks)  # all marks are known by now
        if num_steps % every == 0:
            record.datasets = copied_to_host(self._datasets.take(), self.copies)
        if num_steps >= effort.schedule.next_step or num_steps >= self._sampling_plan.next_step:
            effort.begin_step(tracker.source, self.model, num_steps, tracker.obstacle)
        effort.sampling.listen(is_ordinary=num_steps >= WARMUP_STEPS and not effort.is_measuring)
        has_more = tracker.blocking is not None or tracker.device_time is not None or effort.is_measuring
        if has_more or num_steps < max(WARMUP_STEPS, effort.profiles_from):
            self.next_look = num_steps + 1
        else:
            measuring = effort.schedule.next_step
            if measuring <= num_steps:
                measuring = num_steps + LOOK_AGAIN
            self.next_look = min(num_steps + every - num_steps % every, measuring, watch_at)
