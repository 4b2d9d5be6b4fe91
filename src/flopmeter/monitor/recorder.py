"""What is the loop doing right now, and when is a step over? What the training thread notes, and what becomes of it.

The hooks note phases here, on every step; what is ordinary they do by themselves. Where something is `special` (a
pause, an evaluation, another thread, a device, other ranks) they call the methods of `Recorder`. A step that has ended
becomes a `StepRecord`, which goes into the queue of the background once nothing more will be said of it and its numbers
have come from the device. What has its turn now and then (warm-up, measuring, details) waits for the step that is named
beforehand.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from sys import exc_info
from threading import get_ident
from time import monotonic, perf_counter_ns, sleep, thread_time_ns, time, time_ns
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flopmeter.dataset_metrics import DatasetMetrics
from flopmeter.distributed.blocking import Blocking
from flopmeter.flops import observation
from flopmeter.flops.workload import Seen, WorkloadReader
from flopmeter.monitor.device_time import DeviceTime
from flopmeter.monitor.effort import Effort
from flopmeter.monitor.measuring import FlopSource
from flopmeter.monitor.schedule import WARMUP_STEPS
from flopmeter.monitor.step_record import NOTHING, Log, StepRecord, copied_to_host
from flopmeter.profiling.recorded import side_spans
from flopmeter.schema import PHASES
from flopmeter.timing import (
    BACKWARD,
    DATA_WAIT,
    FORWARD,
    HOST_TO_DEVICE,
    NO_GRAD,
    OPTIMIZER,
    OTHER,
    PAUSE,
    PhaseClock,
    split,
)
from flopmeter.timing.late import POLL_S, HostCopies, give_back
from flopmeter.torch_compat import DisableTorchFunction

logger = logging.getLogger("flopmeter")

LOOK_EVERY = 7
"""Waits for data from one whose CPU time is looked at to the next: the thread's clock costs as much as all marks."""
HABIT_STEPS = 3
"""Forward passes without gradients that come with so many steps in turn are no evaluation, but the loop's way of
training. As many as warm-up has: what a run is judged by is timed in one way only."""
MIN_SAVE_NS = 1_000_000
"""What is saved in less time is no checkpoint worth the name."""
STEPS_PER_MOVE = 10
"""Steps on one thread until one may be measured, for each time that the training has moved from a thread to another."""
TELL_ROLES_NS = 5_000_000_000
"""Roles may change thousands of times a second: what they took is added up for so long."""
MANY_DUMMIES = 10
"""Optimizer steps with no pass before them, in a run without any step: one or two are a checkpoint that is loaded."""
PATIENCE_S, MAX_PATIENCE_S = 1.0, 10.0
"""What the device is given at the end of the run to deliver the last numbers, at least and at most."""
PATIENCE_STEPS = 4
"""In between, so many times what the longest of the last steps took: a device may be some steps behind."""
UNTIL_WAIT = 2
"""Steps after which a wait for a batch of the given loader must have been seen: the first may have come before."""
MAX_HELD_BYTES = 32 << 20
"""What waiting steps may keep alive of the batches' masks; beyond it, masks are summed up before they are queued."""
LOOK_AT_QUEUE = 50
"""Steps after which the queue is looked at, at most: several times within the steps that a kill may cost."""

IN_STEP = (
    "forward passes without gradients belong to the step here: their time is step time, their FLOPs are not counted; "
    'name them by role("teacher"), or pause("eval") if they are an evaluation'
)
FETCHED_ELSEWHERE = (
    "batches are fetched on another thread than the one that trains: the wait for data is not timed; to time it, "
    "iterate over monitor.batches(loader) where the loop takes its batches"
)
NOT_FETCHED = (
    "no batch was seen to come from the given loader ({}): the wait for data is not timed; to time it, iterate over "
    "monitor.batches(loader)"
)
CALLED_ELSEWHERE = (
    "the model is called with gradients on another thread than the one that trains: those passes count, and are not "
    "timed"
)
NOT_SEEN = (
    "no step is recorded: the optimizer steps, and neither a forward pass of the model nor a backward pass is seen "
    "before; name the object that the loop calls by set_model_ref"
)
NOT_CALLED = (
    "the loop trains {0} and does not call it: a method or a part of it is called instead, or it is called inside a "
    "compiled function. Steps are timed, samples and tokens are unknown, and FLOPs are those of the observed steps, as "
    "long as these agree; to have all, name what the loop calls by set_model_ref"
)
_OPTIMIZER_FILE = sys.modules[Optimizer.__module__].__file__
"""Torch takes the name of this module out of `torch.optim` again."""


class Recorder:
    """What the hooks write to, and the methods that they call where something is `special`.

    All of it runs on the training thread and only moves clocks. The training thread is the one that ended the last
    step; from the first step on that begins on another one, that is it, unless only the forward passes run elsewhere,
    as those of nn.DataParallel's copies do. What other threads do is not timed.

    Args:
        effort: Begins and ends measurements at the ends of steps.
        details_every: Steps from one look at what comes together to the next.
        queue: Takes records, in order.
        begin: Called before the first forward pass.
        catch_up: Called when many steps wait in the queue.
        detach: Takes all hooks away; called when the thread comes back that had to end a measurement first.
        on_failure: Told what went wrong, which must not stop the training.
        event: Writes an event to the run file.
        flush_every: Steps that may be lost when the process is killed.
        sees_backward: Whether backward passes are told; else an optimizer that steps inside one has to be asked for.
    """

    def __init__(
        self,
        clock: PhaseClock,
        effort: Effort,
        datasets: DatasetMetrics,
        details_every: int,
        queue: deque[StepRecord | Log],
        *,
        begin: Callable[[], None] = lambda: None,
        catch_up: Callable[[], None] = lambda: None,
        detach: Callable[[], None] = lambda: None,
        on_failure: Callable[[str, Exception], None],
        event: Callable[..., None],
        flush_every: int = 4 * LOOK_AT_QUEUE,
        sees_backward: bool = True,
    ) -> None:
        self.clock, self.note, self.marks = clock, clock.note, clock.marks
        self.special = True
        """Whether anything is not as in every step. Whoever begins something rare sets it; the end of a step looks
        whether it still is so."""
        self.thread = self._training_thread = get_ident()
        """The first is 0 while something is left over or nothing is to be done: then all hooks look closer."""
        self.has_forward = self.has_backward = False
        """Whether the running step has had a forward pass of training, a backward pass."""
        self.is_stepping = False
        """Whether the optimizer has begun to step and not ended."""
        self.seen: list[Seen] = []
        """The running step's micro-batches, as `workloads` keeps them."""
        self.see: Callable[[tuple[Any, ...], Mapping[str, Any]], None] = lambda args, kwargs: None
        self.passes: list[int | tuple[int, int]] = []
        """Forward passes that run, the outermost first: micro-batches of the step before each, and the exception that
        was being handled, if any was."""
        self.num_backward = 0
        """Micro-batches of the step that have been through a backward pass."""
        self.forward_ns = self.backward_ns = 0
        """When the last forward pass of training began, and the last backward pass."""
        self.num_steps = 0
        """Steps that have ended."""
        self.num_waits = 0
        self.waiting_since: tuple[int, int] | None = None
        self.after_fetch = HOST_TO_DEVICE
        """What a fetched batch goes through; OTHER where it goes to no device of its own."""
        self.has_stepped_in_backward = False

        self.model: nn.Module | None = None
        self.source: FlopSource | None = None
        self.workloads: WorkloadReader | None = None
        self.device_time: DeviceTime | None = None
        self.blocking: Blocking | None = None
        self.finds_evaluation = True
        """Whether forward passes without gradients between two steps are taken for an evaluation, unless they come with
        every step."""
        self.has_optimizer = False
        """Whether an optimizer ends the steps: all from a forward pass of training up to there is the step's."""
        self.loader_kind = ""
        """What the user has given as the loader, if anything: a wait for it is expected then."""
        self.num_pauses = 0
        """Pauses that somebody has said we are in, one inside another: whatever is done in them belongs to them."""
        self.is_evaluating = False
        """Whether an evaluation is taken to be on: the model was last called without gradients, between two steps."""
        self.is_closed = False
        """Whether nothing is timed any more."""
        self.copies = HostCopies()
        """Whatever is read from the device for a step goes through it, so that the record waits for it."""
        self.has_failed = False
        """Whether a pass of it has raised, and what runs through the step is still to be thrown away."""
        self.is_spread = False
        """Whether the forward passes of the last step ran on other threads than the one that ended it."""

        self._effort, self._datasets, self._details_every, self._queue = effort, datasets, details_every, queue
        self._begin_run, self._catch_up, self._detach = begin, catch_up, detach
        self.on_failure, self._event = on_failure, event
        self._sees_backward = sees_backward
        self._look_every = max(1, min(LOOK_AT_QUEUE, flush_every // 4))
        self._ended: StepRecord | None = None
        """The last step, as long as the loop may have something to say of it."""
        self._values: Mapping[str, Any] = NOTHING
        """What was said of the running step."""
        self._said_ns = 0
        """When that was said, if it may have been of `_ended`: the next forward pass or the next step will tell."""
        self._pending: deque[StepRecord | Log] = deque()
        self._has_trained = self._has_begun = False
        self._is_first = True
        self._is_off = False
        self._forward_thread = self._leftover_thread = 0
        self._num_moves = self._moved_at = self._num_dummies = 0
        self._told: set[str] = set()
        self._evaluating_since_ns = 0
        self._pause_name = ""
        """What that is called: a model in training mode is hardly being evaluated."""
        self._resumed_at = 0
        """Where in the marks the wait stands that may have ended the evaluation; 0 for none."""
        self._roles: list[str] = []
        """Roles that are open and timed, the outermost first."""
        self._role_since_ns = self._roles_told_ns = 0
        self._role_times: dict[str, int] = {}
        """Nanoseconds of each role since they were last told."""
        self._is_in_bare_forward = False
        # A model in training mode is hardly being evaluated: what comes with most steps is a habit of such a loop.
        self._habits = {True: _Habit(max_distance=2), False: _Habit(max_distance=1)}
        self._loader_habit = _Habit(max_distance=1)
        self._wait_cpu_share: float | None = None
        """Share of the last wait for data that was looked at in which this thread computed."""

    # The parts of a monitor that are known only later

    def read_batches(self, workloads: WorkloadReader | None) -> None:
        """Look from now on into batches with this; with None no more."""
        self.workloads, self.special = workloads, True
        if workloads is not None:
            self.seen, self.see = workloads.batches, workloads.see
        self._look_for_captures()

    def follow_device(self, device_time: DeviceTime | None, *, has_own_memory: bool) -> None:
        """Mark the timeline of the device that the model is on, where it has one."""
        self.device_time, self.special = device_time, True
        self.after_fetch = HOST_TO_DEVICE if has_own_memory else OTHER
        self._look_for_captures()

    def _look_for_captures(self) -> None:
        """Where graphs can be captured, each batch is looked into only while none is: it would spoil the user's."""
        workloads, device_time = self.workloads, self.device_time
        if workloads is None:
            return
        if device_time is None:
            self.see = workloads.see
            return

        def see(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if device_time.is_capturing():
                self.special = True
                self.discard_measurement()
            else:
                workloads.see(args, kwargs)

        self.see = see

    def follow_ranks(self, blocking: Blocking) -> None:
        """Note how long other ranks are waited for."""
        self.blocking, self.special = blocking, True

    def close(self) -> None:
        """From now on nothing is timed."""
        self.is_closed, self.thread, self.special = True, 0, True

    def switch_off(self) -> None:
        """From now on a step that ends is nobody's business."""
        self._is_off = self.special = True

    def _is_rare(self) -> bool:
        """Whether the next step has to be followed closely."""
        return (
            self.num_pauses > 0
            or self.is_closed
            or self._is_off
            or self._is_first
            or not self._has_begun
            or self.is_evaluating
            or self.has_failed
            or self.is_spread
            or self.workloads is None
            or not self._sees_backward
            or (self.device_time is not None and self.device_time.is_marking)
            or self.blocking is not None
            or self._effort.is_measuring
        )

    def _mark(self, phase: int, now_ns: int = 0) -> None:
        """Another phase begins, on the device as well."""
        self.note((now_ns or perf_counter_ns(), phase))
        if self.device_time is not None and self.device_time.is_marking:
            self.device_time.mark(PHASES[phase] if phase < PAUSE else "pause")

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            if message is not IN_STEP:  # which is only of the record
                logger.warning("%s", message)
            self._event("warning", message=message)

    # On which thread?

    def is_elsewhere(self, *, is_in_optimizer: bool = False) -> bool:
        """Whether the calling thread is another one than the one that trains."""
        thread = get_ident()
        if thread == self.thread:
            return False
        # An optimizer goes through its hooks while one is called: none may be taken away there.
        if thread == self._leftover_thread and not is_in_optimizer:
            self._leftover_thread = 0
            self.thread = 0 if self.is_closed else self._training_thread
            self.discard_measurement()
            if self.is_closed:
                self._detach()
        return self.is_closed or thread != self._training_thread

    def expect(self, leftover_thread: int) -> None:
        """This thread has something to take away, which no other one can: its next hook will."""
        self._leftover_thread = leftover_thread
        self.thread = 0 if leftover_thread or self.is_closed else self._training_thread

    def _move_here(self) -> None:
        if self._has_trained:
            self._num_moves += 1
            self._moved_at = self.num_steps
            self.discard_measurement()
        self._training_thread = get_ident()
        if self.thread:
            self.thread = self._training_thread
        self._has_trained = True

    def obstacle(self, *, to_profiler: bool) -> str | None:
        """Why the next step must not be measured, as far as threads go."""
        if self.num_steps - self._moved_at < STEPS_PER_MOVE * self._num_moves:
            return "the steps run on changing threads"
        if to_profiler and self.is_spread:
            return "the forward passes run on other threads than the optimizer, where torch's profiler sees nothing"
        return None

    # Batches

    def on_wait(self) -> None:
        if get_ident() != self.thread and self.is_elsewhere():
            if self._has_trained or self.is_closed:
                if not self.is_closed and not self.num_pauses:
                    self._tell(FETCHED_ELSEWHERE)
                return
            self.thread = self._training_thread = get_ident()  # as long as nobody has trained, whoever fetches will
        if self.num_pauses:
            return
        if not self._has_begun:
            self._begin_step()
        self.num_waits += 1
        if self.is_evaluating:  # for its next batch, or for the next step's? The next pass will tell
            if self._resumed_at:
                del self.marks[self._resumed_at :]
            self._resumed_at = len(self.marks)
            self.note((perf_counter_ns(), DATA_WAIT))
            return
        self._mark(DATA_WAIT)
        if self.num_waits % LOOK_EVERY == 0:
            self.clock.bound()
            self.waiting_since = perf_counter_ns(), thread_time_ns()

    def on_batch(self) -> None:
        self._end_wait(self.after_fetch)

    def on_no_batch(self) -> None:
        """The loader has no more: what follows is the loop's, an end of epoch perhaps, and no copying."""
        if self._resumed_at:  # an evaluation has gone through all of it
            del self.marks[self._resumed_at :]
            self._resumed_at = 0
            self.end_evaluation()
        self._end_wait(OTHER)

    def _end_wait(self, phase: int) -> None:
        if get_ident() != self.thread and self.is_elsewhere():
            return
        if self._resumed_at:  # the device is still marked as pausing
            self.note((perf_counter_ns(), phase))
        elif not self.num_pauses:
            self._mark(phase)
        if self.waiting_since is not None:
            wall_ns, cpu_ns = perf_counter_ns() - self.waiting_since[0], thread_time_ns() - self.waiting_since[1]
            self.waiting_since = None
            self._wait_cpu_share = min(1.0, cpu_ns / wall_ns) if wall_ns > 0 else None

    def on_other_loader(self) -> bool:
        """Another loader than the training's is asked again, with no step in between: gives whether to evaluate."""
        if self.num_pauses or self._is_first or self.has_forward or self.has_backward or not self.finds_evaluation:
            return False
        if self._loader_habit.is_settled or self._loader_habit.note(self.num_steps):
            return False
        self._begin_evaluation("eval")
        return True

    # Forward passes of training

    def on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        thread = get_ident()
        is_elsewhere = thread != self.thread and self.is_elsewhere()
        if is_elsewhere and not self.is_closed and not (self._has_trained and (self.has_forward or self.is_spread)):
            self._move_here()  # a thread that did not train begins a step: the training goes on here
            is_elsewhere = False
        if self._is_paused() or self.is_closed:  # an evaluation that keeps gradients on
            return
        self._forward_thread = thread
        if is_elsewhere:  # a part of the batch goes through a copy of the model on a thread of its own, or all of it
            self.special = True
            self._tell(CALLED_ELSEWHERE)
            if not self.is_spread:
                self.discard_measurement()  # what was begun with the step does not see it
            if self._is_first:
                self._begin(args, kwargs)
            self.has_forward = True
            self._see(args, kwargs)
            return
        self._has_trained = True
        if self._is_first:
            self._begin(args, kwargs)
        if self.is_evaluating:
            self.end_evaluation()
        if self.is_stepping and not _is_in_optimizer_step():
            self._drop(0)  # it has raised: that step is tried again, or given up
            self.has_forward = self.has_backward = self.is_stepping = False
        if self.has_failed:
            self.has_failed = False
            self.discard_measurement()
        self.forward_ns = perf_counter_ns()
        self._mark(FORWARD, self.forward_ns)
        if self.has_forward:  # another micro-batch, or a loop that never steps
            self.clock.bound()
        handled = exc_info()[1]
        self.passes.append(len(self.seen) if handled is None else (len(self.seen), id(handled)))
        self.has_forward = True
        self._see(args, kwargs)

    def _see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.workloads is not None:
            try:
                self.see(args, kwargs)
                source = self.source
                if source is not None and source.is_choosy and not source.wants(self.workloads.last_shape):
                    self.discard_measurement()
            except Exception as error:  # noqa: BLE001 - an odd batch must not stop the forward pass
                self.on_failure("reading the batch", error)

    def on_forward_end(self, exception: BaseException | None = None) -> None:
        """A forward pass of training is over.

        Args:
            exception: What is being handled now. A pass that ends with another one than it began with has failed.
        """
        if not self.num_pauses and (get_ident() == self.thread or not self.is_elsewhere()):
            self.note((perf_counter_ns(), OTHER))  # not on the device: what the loss takes belongs to forward there
            if self.passes:
                begun = self.passes.pop()
                num_before, handled = begun if isinstance(begun, tuple) else (begun, id(None))
                if id(exception) != handled:  # its batch was not trained on
                    self._drop(num_before)
                    self.has_forward = num_before > 0

    def _drop(self, num_kept: int) -> None:
        """A pass has failed: its micro-batches are not the step's. Hooks are being called: nothing else happens now."""
        self.has_failed = self.special = True
        self.num_backward = min(self.num_backward, num_kept)
        if self.workloads is not None:
            self.workloads.drop(num_kept)

    def _begin_step(self) -> None:
        """The loop waits for its first batch, or calls its model with it: what went before was starting up."""
        self._has_begun = True
        self.clock.start()

    def _begin(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._is_first = False
        if not self._has_begun:
            self._begin_step()
        try:
            with DisableTorchFunction():  # a function mode of the user's sees none of our calls
                self.tell_roles()  # told later, their time would be start-up as well, or of a run that had not begun
                self._begin_run()
                if self.source is not None:
                    self.source.note_call(args, kwargs)
        except Exception as error:  # noqa: BLE001 - a run that cannot begin must not stop the forward pass
            self.on_failure("the start of the run", error)

    # Forward passes without gradients

    def on_evaluation(self, *, is_training: bool) -> None:
        """The model is called without gradients.

        Args:
            is_training: Whether it is in training mode.
        """
        if self.passes:  # inside a pass of training: its end is to be told from that one's
            self.special = True
        if (get_ident() != self.thread and self.is_elsewhere()) or self.num_pauses:
            return
        is_in_step = self._takes_in(is_training)
        if self._is_first:  # before a step it is start-up
            return
        if not is_in_step:
            if not self.is_evaluating:
                self._begin_evaluation("no_grad" if is_training else "eval")
            elif self._resumed_at:  # its own batch was waited for
                del self.marks[self._resumed_at :]
                self._resumed_at = 0
            return
        if self.is_evaluating:
            self.end_evaluation()
        self._tell(IN_STEP)
        if self.clock.current != FORWARD:  # else it is a part of a forward pass of training
            self._is_in_bare_forward = True
            self._mark(NO_GRAD)
            self.clock.bound()

    def on_evaluation_end(self) -> None:
        if self._is_in_bare_forward and (get_ident() == self.thread or not self.is_elsewhere()):
            self._is_in_bare_forward = False
            if not self.num_pauses:
                self._mark(OTHER)
                self.clock.bound()

    def _takes_in(self, is_training: bool) -> bool:
        """Whether a forward pass without gradients belongs to the step."""
        if not self.finds_evaluation:
            return True
        if (self.has_forward or self.has_backward) and (self.has_optimizer or self.forward_ns > self.backward_ns):
            return True
        habit = self._habits[is_training]
        return habit.is_settled or habit.note(self.num_steps)

    def _begin_evaluation(self, name: str) -> None:
        self._pause_name, self.is_evaluating, self.special = name, True, True
        marks, since_ns = self.marks, perf_counter_ns()
        is_between = not (self.has_forward or self.has_backward)
        waits = [place for place in range(2, len(marks), 2) if is_between and marks[place + 1] == DATA_WAIT]
        if waits:  # a batch that was fetched since the last step, and not trained on, was fetched to be evaluated
            since_ns = marks[waits[-1]]
            del marks[waits[-1] :]
        self._evaluating_since_ns = since_ns
        self._mark(PAUSE, since_ns)
        self._effort.give_way(self.num_steps)

    def end_evaluation(self) -> None:
        """The loop trains again: what lay between was a pause."""
        if self.is_evaluating:
            if self._resumed_at:
                end_ns = self.marks[self._resumed_at]
            else:
                end_ns = perf_counter_ns()
                self.note((end_ns, OTHER))
            self.is_evaluating, self._resumed_at = False, 0
            lasted_ns = end_ns - self._evaluating_since_ns
            if self._pause_name == "eval":
                self._event("pause", name="eval", duration_s=lasted_ns / 1e9)
            else:
                self._add_role(self._pause_name, lasted_ns)

    def begin_pause(self) -> None:
        """Somebody says that the loop pauses: whatever is done until `end_pause` belongs to that."""
        self.end_evaluation()
        self.num_pauses += 1
        self.special = True
        self._effort.give_way(self.num_steps)

    @contextmanager
    def role(self, name: str, *, counts: bool = False) -> Iterator[None]:
        """What is done for another purpose than training is taken out of the step, as a pause is.

        One inside another is taken out of that. Passes with gradients are training, and end it. In a pause, and on
        another thread than the one that trains, nothing is timed; nor where it counts as training.
        """
        is_in_pause = (self.num_pauses and not self._roles) or (self.is_evaluating and self._pause_name == "eval")
        is_untimed = counts or is_in_pause or self.is_elsewhere()
        with observation.role(name, counts=counts), nullcontext() if is_untimed else self._timed(name):
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self.end_evaluation()
        outer, now_ns = self.clock.current, perf_counter_ns()
        if self._roles:
            self._add_role(self._roles[-1], now_ns - self._role_since_ns)
        else:
            self.num_pauses, self.special = self.num_pauses + 1, True
            self._mark(PAUSE, now_ns)
        self._roles.append(name)
        depth, self._role_since_ns, start_ns = len(self._roles), now_ns, time_ns()
        try:
            yield
        finally:
            if len(self._roles) == depth:  # else it has turned out to be training
                now_ns = perf_counter_ns()
                self._add_role(self._roles.pop(), now_ns - self._role_since_ns)
                self._role_since_ns = now_ns
                for spans in side_spans:
                    spans.append((start_ns, time_ns()))
                if not self._roles:
                    self.num_pauses -= 1
                    self._mark(outer, now_ns)
                    self.clock.bound()

    def _is_paused(self) -> bool:
        """Whether a pass with gradients, or a step, is none of the training: it ends a role that it is in."""
        if self._roles:
            self._add_role(self._roles[-1], perf_counter_ns() - self._role_since_ns)
            self._roles.clear()
            self.num_pauses -= 1
            self.clock.switch(OTHER)
        return self.num_pauses > 0

    def _add_role(self, name: str, spent_ns: int) -> None:
        self._role_times[name] = self._role_times.get(name, 0) + spent_ns
        if (now_ns := perf_counter_ns()) - self._roles_told_ns >= TELL_ROLES_NS:
            self._roles_told_ns = now_ns
            self.tell_roles()

    def tell_roles(self) -> None:
        """Write what roles have taken since the last time."""
        told, self._role_times = self._role_times, {}
        for name, spent_ns in told.items():
            self._event("pause", name=name, duration_s=spent_ns / 1e9, is_role=True)

    # Backward passes

    def on_backward(self, roots: Any) -> None:
        if (get_ident() != self.thread and self.is_elsewhere()) or self._is_paused():
            return
        if self.is_evaluating:  # of something that no marked forward pass came before
            self.end_evaluation()
        self.has_backward = True
        self.backward_ns = perf_counter_ns()
        self._mark(BACKWARD, self.backward_ns)
        if self.blocking is not None:
            with DisableTorchFunction():
                self.blocking.on_backward(roots)

    def on_backward_end(self, *, has_failed: bool = False) -> None:
        if (get_ident() != self.thread and self.is_elsewhere()) or self.num_pauses:
            return
        if has_failed:
            self._drop(self.num_backward)
        else:
            self.num_backward = len(self.seen)
        if self.blocking is not None:
            self.blocking.on_backward_end()
        self._mark(OTHER)
        if self.has_stepped_in_backward:
            self.has_stepped_in_backward = False
            self.end(perf_counter_ns())

    # Optimizers

    def on_optimizer(self) -> None:
        if (get_ident() != self.thread and self.is_elsewhere(is_in_optimizer=True)) or self._is_paused():
            return
        self._mark(OPTIMIZER)
        self.is_stepping = True

    def on_optimizer_end(self, is_step_over: bool | None = None) -> None:
        if self.num_pauses or self.is_closed:
            return
        now_ns = perf_counter_ns()
        if get_ident() == self.thread or not self.is_elsewhere(is_in_optimizer=True):
            self.note((now_ns, OTHER))
        self.is_stepping = False
        is_open = self.has_forward or self.has_backward
        if is_open if is_step_over is None else is_step_over:  # several optimizers in a row: one step
            if self._is_first:  # the model's own forward was not called
                self._has_begun = True
                self._begin()
            self.end(now_ns)
        elif not is_open:
            self._num_dummies += 1
            if self._num_dummies == MANY_DUMMIES and not self.num_steps:
                self._tell(NOT_SEEN)

    def on_optimizer_in_backward(self) -> None:
        self.has_stepped_in_backward = True

    def on_skipped_step(self) -> None:
        """A gradient scaler has kept the optimizer from stepping: the step counts, and the record says so."""
        self._event("skipped_step")

    def on_saved(self, start_ns: int) -> None:
        """The loop has saved something since then: that was a pause, unless it lies in one."""
        now_ns, phase = perf_counter_ns(), self.clock.current
        if now_ns - start_ns < MIN_SAVE_NS or self.is_closed or self._is_first or not self._has_begun:
            return
        if self.num_pauses or self.is_evaluating or self.marks[-2] > start_ns or self.is_elsewhere():
            return
        self.note((start_ns, PAUSE))
        self.note((now_ns, phase))
        self._event("pause", name="checkpoint", duration_s=(now_ns - start_ns) / 1e9)

    # The end of a step

    def end(self, now_ns: int) -> None:
        """The running step is over: the optimizer stepped after a forward or a backward pass. Never raises."""
        try:
            if self.special or not self.has_forward or get_ident() != self.thread:
                if not self._end_special(now_ns):
                    return
            else:
                self.has_forward = self.has_backward = False
                self.num_backward = 0
                self.passes.clear()  # of one that was left by Ctrl-C
            ended, marks, seen = self._ended, self.marks, self.seen
            if ended is not None:
                if self._said_ns or self._pending or ended.arrival is not None or ended.values:
                    self._settle(ended)
                else:
                    self._queue.append(ended)
            index = self.num_steps
            record = self._ended = StepRecord(index, time(), (*marks, now_ns), (*seen,))
            marks[:] = now_ns, marks[-1]
            seen.clear()
            self.num_steps = index = index + 1
            if self._wait_cpu_share is not None:
                record.wait_cpu_share, self._wait_cpu_share = self._wait_cpu_share, None
            if index >= self._effort.next_look:
                with DisableTorchFunction():  # a function mode of the user's sees none of our calls
                    self._look(record, index)
            if self.copies.arrival is not None:
                record.arrival, self.copies.arrival, record.has_copies = self.copies.arrival, None, True
            if self._values:  # a loop that speaks again before the next forward pass means this step, too
                record.values, self._values = self._values, NOTHING
        except Exception as error:  # noqa: BLE001 - the training run comes first; the reason is logged
            self.on_failure("the end of a step", error)
        self._effort.own_ns += perf_counter_ns() - now_ns

    def _end_special(self, now_ns: int) -> bool:
        """Whether the step that ends is one for the record; the next pass belongs to another one."""
        if self._is_off:
            return False
        thread = get_ident()
        if thread != self._training_thread:  # a step ends on the calling thread, wherever it began
            self._move_here()
        self.is_spread = self._forward_thread not in (0, thread)
        self._has_trained = True
        is_captured = self.device_time is not None and self.device_time.is_capturing()
        if not is_captured:
            self.end_evaluation()
            if self.has_failed:
                self.has_failed = False
                self.discard_measurement()
            if self.has_backward and not self.has_forward and self.model is not None:
                self._tell(NOT_CALLED.format(type(self.model).__name__))
        self.has_forward = self.has_backward = self.is_stepping = False
        self.num_backward = self._num_dummies = 0
        self.passes.clear()
        if is_captured:  # the loop went through a step that did not run: it was captured into a graph
            self.discard_measurement()
            marks = self.clock.take(now_ns)
            self._event("pause", name="graph capture", duration_s=(marks[-1] - marks[0]) / 1e9)
            return False
        self.special = self._is_rare()
        return True

    def _look(self, record: StepRecord, num_steps: int) -> None:
        """Do what is due at the end of this step, and find out when there will be something again."""
        effort, every = self._effort, self._details_every
        if num_steps <= WARMUP_STEPS:
            record.marks = ("warmup",)
        if num_steps >= UNTIL_WAIT and self.loader_kind and not self.num_waits and FETCHED_ELSEWHERE not in self._told:
            self._tell(NOT_FETCHED.format(self.loader_kind))
        if self.blocking is not None:
            record.blocked_ns = self.blocking.take()
        if self.device_time is not None:
            self.device_time.end_step(num_steps)
        watch_at = num_steps + every
        if self.source is not None:
            watch_at = effort.watch_model(self.source, num_steps)
        if effort.is_measuring:
            record.arrival = self.copies.arrival
            effort.end_step(self.source, record, num_steps)
        if self.device_time is not None:
            self.device_time.take_finished(num_steps, is_typical=not record.marks)  # all marks are known by now
        if num_steps % every == 0:
            record.datasets = copied_to_host(self._datasets.take(), self.copies)
        effort.begin_step(self.source, self.model, num_steps, self.obstacle)
        effort.sampling.listen(is_ordinary=num_steps >= WARMUP_STEPS and not effort.is_measuring)
        self.special = self._is_rare()
        look_at = num_steps + self._look_at_queue(record)
        if self.device_time is not None:
            look_at = min(look_at, self.device_time.next_border(num_steps))
        if (
            self.blocking is not None
            or effort.is_measuring
            or effort.asks
            or num_steps < max(WARMUP_STEPS, effort.profiles_from)
        ):
            effort.next_look = num_steps + 1
        else:
            effort.next_look = min(look_at, num_steps + every - num_steps % every, watch_at, effort.next_due(num_steps))

    def _look_at_queue(self, record: StepRecord) -> int:
        """Keep what waits for the background within bounds, and say in how many steps to look again."""
        queue, num_queued = self._queue, len(self._queue)
        if num_queued >= self._look_every:
            self._catch_up()
        held_bytes = record.held_bytes()
        if not held_bytes:
            return self._look_every
        if num_queued * held_bytes > MAX_HELD_BYTES:
            for item in list(queue):
                if type(item) is StepRecord:
                    item.let_go()
        return max(1, min(self._look_every, MAX_HELD_BYTES // (4 * held_bytes)))

    def discard_measurement(self) -> None:
        """Nothing can be learnt from this step, or what runs through it would spoil a graph. Never raises."""
        self._effort.discard(self.num_steps)
        self.expect(self._effort.leftover_thread)

    # What the loop says of its steps

    def tell(self, values: Mapping[str, Any], *, has_late: bool = True) -> None:
        """What the loop says of the step that has ended, or of the one that is running once it has a forward pass.

        A loop speaks before or after its optimizer steps. What it says when the optimizer was kept from stepping, or
        of a micro-batch, is replaced by what it says of the same step later.

        Args:
            has_late: Whether any of it may still be on its way from the device.
        """
        record = self._ended
        if record is not None and not (self.has_forward or self.has_backward):
            if record.values:
                give_back(record.values)
            record.values = values
            if has_late or self._pending or record.arrival is not None:
                self._complete(record)
            else:
                self._ended, self._said_ns = None, 0
                self._queue.append(record)
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
        workloads, record = self.workloads, self._ended
        if workloads is None:
            return
        if record is None or self.has_forward or self.has_backward:
            workloads.see_mask(mask)
            return
        record.seen = workloads.with_mask(record.seen, mask)
        if self.copies.arrival is not None:  # later on the same device than whatever the record waits for
            record.arrival, self.copies.arrival, record.has_copies = self.copies.arrival, None, True

    def _settle(self, record: StepRecord) -> None:
        """Another step has ended: nothing more will be said of this one.

        What was said during the other one, with no word of this one before, was of this one if a forward pass came
        after it: such a loop calls its model between a step and its log, as a GAN's does.
        """
        if self._said_ns and self.forward_ns >= self._said_ns:
            record.values, self._values = self._values, NOTHING
        self._complete(record)

    def _complete(self, record: StepRecord) -> None:
        self._ended, self._said_ns = None, 0
        self.hand_over(record)

    def hand_over(self, item: StepRecord | Log) -> None:
        """Pass it on when its numbers are there, and not before what came earlier."""
        pending = self._pending
        pending.append(item)
        while pending and pending[0].is_ready():
            self._queue.append(pending.popleft())

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
            self._queue.append(item if is_ready else item.without_late())


def _is_in_optimizer_step() -> bool:
    """Whether an optimizer is stepping: a closure calls the model from there. Asked only where one has begun to."""
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == _OPTIMIZER_FILE:
            return True
    return False


class _Habit:
    """Do forward passes without gradients, or batches of another loader, come with every step, or almost?

    Args:
        max_distance: Steps from one with such passes to the next one with them, to be in turn.
    """

    def __init__(self, max_distance: int) -> None:
        self.is_settled = False
        self._max_distance = max_distance
        self._last_step: int | None = None
        self._num_in_turn = 0

    def note(self, step: int) -> bool:
        """The running step has such a pass: is it a habit by now?"""
        last = self._last_step
        if step != last:
            is_in_turn = last is not None and step - last <= self._max_distance
            self._num_in_turn = self._num_in_turn + 1 if is_in_turn else 1
            self._last_step = step
            self.is_settled = self._num_in_turn >= HABIT_STEPS
        return self.is_settled
