"""What is the loop doing right now? Turns the hooks' calls into phases of the clock, marks on the device, and steps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from threading import get_ident
from time import perf_counter_ns, thread_time_ns
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from flopmeter.distributed.blocking import Blocking
from flopmeter.flops.workload import WorkloadReader
from flopmeter.monitor.device_time import DeviceTime
from flopmeter.monitor.hooks import handled_exception
from flopmeter.monitor.measuring import FlopSource
from flopmeter.timing import BACKWARD, DATA_WAIT, FORWARD, HOST_TO_DEVICE, OPTIMIZER, OTHER, PAUSE, PhaseClock
from flopmeter.torch_compat import DisableTorchFunction

if TYPE_CHECKING:
    from flopmeter.monitor.worker import Worker

logger = logging.getLogger("flopmeter")

_LOOK_EVERY = 7
"""Waits for data from one whose CPU time is looked at to the next: the thread's clock costs as much as all marks."""
HABIT_STEPS = 3
"""Forward passes without gradients that come with so many steps in turn are no evaluation, but the loop's way of
training. As many as warm-up has: what a run is judged by is timed in one way only."""
IN_STEP = (
    "forward passes without gradients belong to the step here: their time is step time, their FLOPs are not counted; "
    'if they are an evaluation, tell it by pause("eval")'
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
STEPS_PER_MOVE = 10
"""Steps on one thread until one may be measured, for each time that the training has moved from a thread to another."""

MANY_DUMMIES = 10
"""Optimizer steps with no pass before them, in a run without any step: one or two are a checkpoint that is loaded."""
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


class StepTracker:
    """Listens to the hooks. Its methods run on every step, on the training thread: they only move clocks.

    The training thread is the one that ended the last step; from the first step on that begins on another one, that is
    it, unless only the forward passes run elsewhere, as those of nn.DataParallel's copies do. What other threads do
    is not timed.

    Args:
        on_start: Called before the first forward pass.
        on_failure: Told what went wrong in reading a batch, which must not stop the forward pass.
        event: Writes an event to the run file.
    """

    def __init__(
        self,
        on_start: Callable[[], None],
        on_failure: Callable[[str, Exception], None],
        event: Callable[..., None],
    ) -> None:
        self.clock = PhaseClock()
        self._note = self.clock.note
        self.source: FlopSource | None = None
        self.workloads: WorkloadReader | None = None
        self.device_time: DeviceTime | None = None
        self.blocking: Blocking | None = None
        self.background: Worker | None = None
        self.finds_evaluation = True
        """Whether forward passes without gradients between two steps are taken for an evaluation, unless they come with
        every step."""
        self.has_optimizer = False
        """Whether an optimizer ends the steps: all from a forward pass of training up to there is the step's."""
        self.num_pauses = 0
        """Pauses that somebody has said we are in, one inside another: whatever is done in them belongs to them."""
        self.on_step: Callable[[int], None] = lambda now_ns: None
        """Called with the clock when a step has ended: the optimizer stepped after a forward or a backward pass. Must
        not raise."""
        self.num_steps: Callable[[], int] = lambda: 0
        """Gives the steps that have ended."""
        self.on_pause: Callable[[], None] = lambda: None
        """Called when an evaluation or another pause begins. Must not raise."""
        self.discard_measurement: Callable[[], None] = lambda: None
        """Called when nothing can be learnt from the running step, and on a thread that has to take away what it
        measured with. Must not raise."""
        self._thread = self._training_thread = get_ident()
        """The first is 0 while something is left over or nothing is to be done: then all hooks look closer."""
        self._has_trained = False
        self._forward_thread = 0
        self._leftover_thread = 0
        self.is_closed = False
        """Whether nothing is timed any more."""
        self.loader_kind = ""
        """What the user has given as the loader, if anything: a wait for it is expected then."""
        self._num_moves = 0
        self._moved_at = 0
        self.is_spread = False
        """Whether the forward passes of the last step ran on other threads than the one that ended it."""
        self._on_start = on_start
        self._on_failure = on_failure
        self._event = event
        self.has_forward = False
        """Whether the running step has had a forward pass of training."""
        self.has_backward = False
        """Whether it has had a backward pass."""
        self.has_failed = False
        """Whether a pass of it has raised, and what runs through the step is still to be thrown away."""
        self._passes: list[tuple[int, bool, int]] = []
        """Forward passes that run, the outermost first: micro-batches and forward passes of the step before each, and
        the exception that was being handled."""
        self._num_backward = 0
        """Micro-batches of the step that have been through a backward pass."""
        self._is_stepping = False
        """Whether the optimizer has begun to step and not ended."""
        self._num_dummies = 0
        self._told: set[str] = set()
        self.forward_ns = 0
        """When the last forward pass of training began."""
        self._backward_ns = 0
        self._has_stepped_in_backward = False
        self._is_first = True
        self._has_begun = False
        self.is_evaluating = False
        """Whether an evaluation is taken to be on: the model was last called without gradients, between two steps."""
        self._evaluating_since_ns = 0
        self._is_in_bare_forward = False
        self._has_told_in_step = False
        # A model in training mode is hardly being evaluated: what comes with most steps is a habit of such a loop.
        self._habits = {True: _Habit(max_distance=2), False: _Habit(max_distance=1)}
        self._loader_habit = _Habit(max_distance=1)
        self.wait_cpu_share: float | None = None
        """Share of the last wait for data that was looked at in which this thread computed."""
        self._num_waits = 0
        self._waiting_since: tuple[int, int] | None = None

    def is_elsewhere(self, *, is_in_optimizer: bool = False) -> bool:
        """Whether the calling thread is another one than the one that trains."""
        thread = get_ident()
        if thread == self._thread:
            return False
        # An optimizer goes through its hooks while one is called: none may be taken away there.
        if thread == self._leftover_thread and not is_in_optimizer:
            self._leftover_thread = 0
            self._thread = 0 if self.is_closed else self._training_thread
            self.discard_measurement()
        return self.is_closed or thread != self._training_thread

    def expect(self, leftover_thread: int) -> None:
        """This thread has something to take away, which no other one can: its next hook will."""
        self._leftover_thread = leftover_thread
        self._thread = 0 if leftover_thread or self.is_closed else self._training_thread

    def close(self) -> None:
        """From now on nothing is timed."""
        self.is_closed, self._thread = True, 0

    def begins_here(self) -> bool:
        """A thread that did not train calls the model with gradients: does the training go on here?"""
        if self.is_closed or (self._has_trained and (self.has_forward or self.is_spread)):
            return False
        self._move_here()
        return True

    def end_here(self) -> None:
        """A step ends on the calling thread, wherever it began."""
        thread = get_ident()
        if thread != self._training_thread:
            self._move_here()
        self.is_spread = self._forward_thread not in (0, thread)
        self._has_trained = True

    def _move_here(self) -> None:
        if self._has_trained:
            self._num_moves += 1
            self._moved_at = self.num_steps()
            self.discard_measurement()
        self._training_thread = get_ident()
        if self._thread:
            self._thread = self._training_thread
        self._has_trained = True

    def obstacle(self, *, to_profiler: bool) -> str | None:
        """Why the next step must not be measured, as far as threads go."""
        if self.num_steps() - self._moved_at < STEPS_PER_MOVE * self._num_moves:
            return "the steps run on changing threads"
        if to_profiler and self.is_spread:
            return "the forward passes run on other threads than the optimizer, where torch's profiler sees nothing"
        return None

    def check_waits(self) -> None:
        """A loader was given: has any wait for it been seen?"""
        if self.loader_kind and not self._num_waits and FETCHED_ELSEWHERE not in self._told:
            self._tell(NOT_FETCHED.format(self.loader_kind))

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning("%s", message)
            self._event("warning", message=message)

    def on_wait(self) -> None:
        if get_ident() != self._thread and self.is_elsewhere():
            if self._has_trained or self.is_closed:
                if not self.is_closed and not self.num_pauses:
                    self._tell(FETCHED_ELSEWHERE)
                return
            self._thread = self._training_thread = get_ident()  # as long as nobody has trained, whoever fetches will
        if self.num_pauses:
            return
        if not self._has_begun:
            self._begin_step()
        if self.is_evaluating:
            self.end_evaluation()
        self._note((perf_counter_ns(), DATA_WAIT))
        if self.device_time is not None:
            self.device_time.mark("data_wait")
        self._num_waits = num_waits = self._num_waits + 1
        if num_waits % _LOOK_EVERY == 0:
            self.clock.bound()
            self._waiting_since = perf_counter_ns(), thread_time_ns()

    def on_batch(self) -> None:
        self._end_wait(HOST_TO_DEVICE, "host_to_device")

    def on_no_batch(self) -> None:
        """The loader has no more: what follows is the loop's, an end of epoch perhaps, and no copying."""
        self._end_wait(OTHER, "other")

    def _end_wait(self, phase: int, mark: str) -> None:
        if get_ident() != self._thread and self.is_elsewhere():
            return
        if not self.num_pauses:
            self._note((perf_counter_ns(), phase))
            if self.device_time is not None:
                self.device_time.mark(mark)
        if self._waiting_since is not None:
            wall_ns, cpu_ns = perf_counter_ns() - self._waiting_since[0], thread_time_ns() - self._waiting_since[1]
            self._waiting_since = None
            self.wait_cpu_share = min(1.0, cpu_ns / wall_ns) if wall_ns > 0 else None

    def on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        is_elsewhere = get_ident() != self._thread and self.is_elsewhere() and not self.begins_here()
        if self.num_pauses or self.is_closed:  # an evaluation that keeps gradients on
            return
        self._forward_thread = get_ident()
        if is_elsewhere:
            self._forward_elsewhere(args, kwargs)
            return
        self._has_trained = True
        if self._is_first:
            self._begin(args, kwargs)
        if self.is_evaluating:
            self.end_evaluation()
        if self._is_stepping and not _is_in_optimizer_step():
            self._drop(0)  # it has raised: that step is tried again, or given up
            self.has_forward = self.has_backward = self._is_stepping = False
        if self.has_failed:
            self.has_failed = False
            self.discard_measurement()
        self.forward_ns = now_ns = perf_counter_ns()
        self._note((now_ns, FORWARD))
        if self.has_forward:  # another micro-batch, or a loop that never steps
            self.clock.bound()
        self._passes.append((self._num_seen(), self.has_forward, handled_exception()))
        self.has_forward = True
        if self.device_time is not None:
            self.device_time.mark("forward")
            if self.device_time.is_capturing():
                self.discard_measurement()
                return  # to look into the batch would spoil the user's graph
        self._see(args, kwargs)

    def _forward_elsewhere(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A part of the batch goes through a copy of the model on a thread of its own, or all of it through a pool."""
        self._tell(CALLED_ELSEWHERE)
        if not self.is_spread:
            self.discard_measurement()  # what was begun with the step does not see it
        if self._is_first:
            self._begin(args, kwargs)
        self.has_forward = True
        self._see(args, kwargs)

    def _see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.workloads is not None:
            try:
                self.workloads.see(args, kwargs)
            except Exception as error:  # noqa: BLE001 - an odd batch must not stop the forward pass
                self._on_failure("reading the batch", error)

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
                self._on_start()
                if self.source is not None:
                    self.source.note_call(args, kwargs)
        except Exception as error:  # noqa: BLE001 - a run that cannot begin must not stop the forward pass
            self._on_failure("the start of the run", error)

    def on_forward_end(self, exception: int = id(None)) -> None:
        if not self.num_pauses and (get_ident() == self._thread or not self.is_elsewhere()):
            self._note((perf_counter_ns(), OTHER))  # not on the device: what the loss takes belongs to forward there
            if self._passes:
                num_before, had_forward, handled = self._passes.pop()
                if exception != handled:  # it was left by another exception: its batch was not trained on
                    self._drop(num_before)
                    self.has_forward = had_forward

    def _num_seen(self) -> int:
        return self.workloads.num_seen if self.workloads is not None else 0

    def _drop(self, num_kept: int) -> None:
        """A pass has failed: its micro-batches are not the step's. Hooks are being called: nothing else happens now."""
        self.has_failed = True
        self._num_backward = min(self._num_backward, num_kept)
        if self.workloads is not None:
            self.workloads.drop(num_kept)

    def end_step(self, model: Any) -> None:
        """The next pass belongs to another step. An empty look at the model is told."""
        if self.has_backward and not self.has_forward and model is not None:
            self._tell(NOT_CALLED.format(type(model).__name__))
        self.has_forward = self.has_backward = False
        self._is_stepping, self._num_backward, self._num_dummies = False, 0, 0
        self._passes.clear()  # of one that was left by Ctrl-C

    def on_evaluation(self, *, is_training: bool) -> None:
        """The model is called without gradients.

        Args:
            is_training: Whether it is in training mode.
        """
        if (get_ident() != self._thread and self.is_elsewhere()) or self.num_pauses:
            return
        is_in_step = self._takes_in(is_training)
        if self._is_first:  # before a step it is start-up
            return
        if is_in_step:
            self._begin_bare_forward()
        elif not self.is_evaluating:
            self._begin_evaluation()

    def on_other_loader(self) -> bool:
        """Another loader than the training's is asked again, with no step in between: gives whether to evaluate."""
        if self.num_pauses or self._is_first or self.has_forward or self.has_backward or not self.finds_evaluation:
            return False
        if self._loader_habit.is_settled or self._loader_habit.note(self.num_steps()):
            return False
        self._begin_evaluation()
        return True

    def _begin_evaluation(self) -> None:
        self.is_evaluating = True
        self._evaluating_since_ns = perf_counter_ns()
        self._note((self._evaluating_since_ns, PAUSE))
        self.on_pause()
        if self.device_time is not None:
            self.device_time.mark("pause")

    def _takes_in(self, is_training: bool) -> bool:
        """Whether a forward pass without gradients belongs to the step."""
        if not self.finds_evaluation:
            return True
        if (self.has_forward or self.has_backward) and (self.has_optimizer or self.forward_ns > self._backward_ns):
            return True
        habit = self._habits[is_training]
        return habit.is_settled or habit.note(self.num_steps())

    def _begin_bare_forward(self) -> None:
        if self.is_evaluating:
            self.end_evaluation()
        if not self._has_told_in_step:
            self._has_told_in_step = True
            self._event("warning", message=IN_STEP)
        if self.clock.current != FORWARD:  # else it is a part of a forward pass of training
            self._is_in_bare_forward = True
            self.clock.switch(FORWARD)
            if self.device_time is not None:
                self.device_time.mark("forward")

    def on_evaluation_end(self) -> None:
        if self._is_in_bare_forward and (get_ident() == self._thread or not self.is_elsewhere()):
            self._is_in_bare_forward = False
            if not self.num_pauses:
                self.clock.switch(OTHER)

    def on_backward(self, roots: Any) -> None:
        if (get_ident() != self._thread and self.is_elsewhere()) or self.num_pauses:
            return
        if self.is_evaluating:  # of something that no marked forward pass came before
            self.end_evaluation()
        self.has_backward = True
        self._backward_ns = now_ns = perf_counter_ns()
        self._note((now_ns, BACKWARD))
        if self.background is not None and now_ns >= self.background.due_ns:
            self.background.wake()  # the engine of autograd leaves the interpreter to whoever wants it
        if self.device_time is not None:
            self.device_time.mark("backward")
        if self.blocking is not None:
            with DisableTorchFunction():
                self.blocking.on_backward(roots)

    def on_backward_end(self, *, has_failed: bool = False) -> None:
        if (get_ident() != self._thread and self.is_elsewhere()) or self.num_pauses:
            return
        if has_failed:
            self._drop(self._num_backward)
        else:
            self._num_backward = self._num_seen()
        if self.blocking is not None:
            self.blocking.on_backward_end()
        self._note((perf_counter_ns(), OTHER))
        if self.device_time is not None:
            self.device_time.mark("other")
        if self._has_stepped_in_backward:
            self._has_stepped_in_backward = False
            self.on_step(perf_counter_ns())

    def on_optimizer_in_backward(self) -> None:
        self._has_stepped_in_backward = True

    def on_optimizer(self) -> None:
        if (get_ident() != self._thread and self.is_elsewhere(is_in_optimizer=True)) or self.num_pauses:
            return
        self._note((perf_counter_ns(), OPTIMIZER))
        self._is_stepping = True
        if self.device_time is not None:
            self.device_time.mark("optimizer")

    def on_optimizer_end(self, is_step_over: bool | None = None) -> None:
        if self.num_pauses or self.is_closed:
            return
        now_ns = perf_counter_ns()
        if get_ident() == self._thread or not self.is_elsewhere(is_in_optimizer=True):
            self._note((now_ns, OTHER))
        self._is_stepping = False
        is_open = self.has_forward or self.has_backward
        if is_open if is_step_over is None else is_step_over:  # several optimizers in a row: one step
            if self._is_first:  # the model's own forward was not called
                self._has_begun = True
                self._begin()
            self.on_step(now_ns)
        elif not is_open:
            self._num_dummies += 1
            if self._num_dummies == MANY_DUMMIES and not self.num_steps():
                self._tell(NOT_SEEN)

    def on_skipped_step(self) -> None:
        """A gradient scaler has kept the optimizer from stepping: the step counts, and the record says so."""
        self._event("skipped_step")

    def end_evaluation(self) -> None:
        """The loop trains again: what lay between was a pause."""
        if self.is_evaluating:
            duration_s = (perf_counter_ns() - self._evaluating_since_ns) / 1e9
            self.is_evaluating = False
            self.clock.switch(OTHER)
            self._event("pause", name="eval", duration_s=duration_s)


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

    __slots__ = ("_last_step", "_max_distance", "_num_in_turn", "is_settled")

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
