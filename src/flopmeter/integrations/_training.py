"""Measures one training of a program that knows nothing of us: two steps are looked at, those after them measured.

The two steps show which modules the loop calls. Then a `TrainingMonitor` is attached to those, and told of steps by
hooks on the optimizers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any

from flopmeter.integrations._called import Calls, holder_of, key_of, live, owners, parameters_of
from flopmeter.monitor import TrainingMonitor
from flopmeter.monitor.header import last_words
from flopmeter.monitor.hooks import follow_optimizer, patch_loaders
from flopmeter.monitor.recorder import Recorder
from flopmeter.torch_compat import graph_task_id

if TYPE_CHECKING:
    from flopmeter.integrations.script import Program

NUM_LOOKED_AT = 2
TURNS_WITHOUT_MODULE = 16
"""A loop that calls no module by then has its steps timed."""


IN_BACKWARD = "in backward"
"""Stands for all optimizers that step inside the backward pass."""
PATIENCE_TURNS = 8
"""An optimizer that has never stepped while another one did so often takes no part in the cycle."""
MAX_STRAY_TURNS = 8
"""Turns of one optimizer that fit no cycle before we conclude that the program now trains something else."""
MAX_TURNS_APART, MAX_TIMES_LONGER = 64, 8
"""Turns of one optimizer without one of another before we conclude that the other has been given up: so many, or so
many times the most that one had within a step so far."""
MAX_STEPS_A_JOIN = 4
"""An optimizer that joins in has a turn in so many steps. One that comes more seldom is left out of the cycle."""


class LoaderMarks:
    """Which wait for a batch belongs to the training? Every DataLoader of the program is timed, on one thread.

    During an evaluation the loop fetches from another loader: those waits are part of the pause. Its end shows when the
    loader is asked that fed the last training step. What is evaluated may be no module that we know, such as an average
    of the weights: then another loader that is asked again and again, with no training between, shows the evaluation.
    """

    def __init__(self, listener: Recorder) -> None:
        self._listener = listener
        self._last: _Loader | None = None
        self._training: _Loader | None = None
        self.remove = patch_loaders(listener, self._takes)

    def on_step(self) -> None:
        """A step has ended: whoever was asked last feeds the training."""
        self._training = self._last

    def _takes(self, iterator: Any) -> bool:
        """Whether this wait is the training's; it is remembered who was asked."""
        if self._listener.is_elsewhere():
            return False
        training, last = self._training, self._last
        if self._listener.is_evaluating and (training is None or not training.made(iterator)):
            self._last = training  # whoever was asked before that was asked for the evaluation, too
            return False
        if last is None or not last.made(iterator):
            self._last = _Loader(iterator)
        elif last is not training and training is not None and self._listener.on_other_loader():
            self._last = training
            return False
        return True


class _Loader:
    """A loader, known by an iterator of it: each epoch has a new one, with the loader's own index sampler.

    Keeps nothing alive. When the loader is gone, one over the same dataset is the same loader, made anew.
    """

    __slots__ = ("_dataset_id", "_sampler")

    def __init__(self, iterator: Any) -> None:
        sampler = iterator._index_sampler
        try:
            self._sampler: Callable[[], Any] = weakref.ref(sampler)
        except TypeError:  # a list of batches: it has no more than indices, and may be kept
            self._sampler = lambda: sampler
        self._dataset_id = id(iterator._dataset)

    def made(self, iterator: Any) -> bool:
        sampler = self._sampler()
        if sampler is None:
            return id(iterator._dataset) == self._dataset_id
        return sampler is iterator._index_sampler


class StepRule:
    """Which optimizer step ends a training step?

    A training step ends when an optimizer has stepped after a forward pass of training, and with it each optimizer
    of the cycle has had a turn. The cycle are all optimizers that exist, without those that never step; most loops
    have one. Further optimizer steps before the next forward pass belong to the step: a subclass that calls
    `super().step()`, groups of parameters stepped one by one. One that a gradient scaler keeps from stepping has
    had its turn all the same. Optimizers that step inside the backward pass, parameter by parameter, have one turn
    together.

    Args:
        expected: Keys of the optimizers that exist.
    """

    def __init__(self, expected: Collection[Hashable]) -> None:
        self.cycle = set(expected)
        self.num_steps = 0
        """Steps that have ended."""
        self.is_lost = False
        """Whether the cycle no longer holds: optimizers step that have nothing to do with it, or join in."""
        self.num_missed = 0
        """Steps that were not seen to end by then, the last one left out."""
        self._seen: set[Hashable] = set()
        self._turns: Counter[Hashable] = Counter()
        self._longest = 1
        self._strays: Counter[Hashable] = Counter()
        self._joining: dict[Hashable, list[int]] = {}
        """Optimizers with forward passes of their own between our steps: their turns, and our steps since the first."""

    def ends_at(self, key: Hashable, *, has_forward: bool) -> bool:
        """An optimizer has had its turn: is the step over?

        Args:
            has_forward: Whether there was a forward pass of training since the last step ended.
        """
        if key not in self.cycle or not has_forward:
            self._note_stray(key, has_forward=has_forward)
            return False
        self._seen.add(key)
        self._turns[key] += 1
        num_turns = self._turns[key]
        missing = self.cycle - self._turns.keys()
        if missing and num_turns >= PATIENCE_TURNS and missing.isdisjoint(self._seen):
            self.cycle -= missing  # what looked like the beginning of a step were so many steps
            self.num_steps += num_turns - 1
        elif missing:
            if num_turns >= max(MAX_TURNS_APART, MAX_TIMES_LONGER * self._longest):
                self._lose(num_turns - 1)
            return False
        else:
            self._longest = max(self._longest, *self._turns.values())
        self._turns.clear()
        self._strays.clear()
        self.num_steps += 1
        for counts in self._joining.values():
            counts[1] += 1
        return True

    def _note_stray(self, key: Hashable, *, has_forward: bool) -> None:
        self._strays[key] += 1
        if self._strays[key] >= MAX_STRAY_TURNS:
            self._lose(self._strays[key] - 1)
        if key in self.cycle or not has_forward:
            return
        counts = self._joining.setdefault(key, [0, 0])
        counts[0] += 1
        if counts[0] >= MAX_STRAY_TURNS:
            del self._joining[key]
            if counts[1] <= MAX_STEPS_A_JOIN * MAX_STRAY_TURNS:
                self._lose(0)

    def _lose(self, num_missed: int) -> None:
        self.is_lost, self.num_missed = True, num_missed


class Training:
    """From the first step of an optimizer until the training ends, or turns to something else.

    Args:
        program: Says where the record goes, guards what runs inside the program, and begins another training.
        num_missed: Steps that were done before.
        gone: Keys of optimizers that the program has done with, whether or not they are still there.
    """

    def __init__(self, program: Program, num_missed: int, gone: Collection[Hashable]) -> None:
        optimizers, modules = live()
        self.last_told: Callable[[], Any] = lambda: None
        """Gives the optimizer that was last to tell of its step by a hook of its own, and does not keep it alive."""
        self.monitor: TrainingMonitor | None = None
        """None while the loop is looked at."""
        self._program = program
        self._num_missed = num_missed
        self._keys: set[Hashable] = {key_of(optimizer) for optimizer in optimizers}
        self._rule = StepRule({IN_BACKWARD} if graph_task_id() != -1 else self._keys.difference(gone))
        self._optimizers: dict[Hashable, Any] = {}
        """Those that have had a turn outside of a backward pass, by their keys."""
        self._turns: Counter[Hashable] = Counter()
        self._has_forward = False
        self._is_over = False
        self._calls = Calls(owners(parameters_of(optimizers), modules), self._note_forward)

    def num_lost(self, optimizer: Any) -> int:
        """Steps of an optimizer that show that the look must be taken again; 0 while they do not.

        It came after the look at all objects, or goes on and on without its loop being understood.
        """
        if graph_task_id() != -1:
            return 0
        num_turns = self._turns[key := key_of(optimizer)]
        return num_turns if num_turns >= (1 if key not in self._keys else MAX_TURNS_APART) else 0

    def note(self, optimizer: Any) -> None:
        """An optimizer has stepped while the loop is looked at."""
        is_in_backward = graph_task_id() != -1
        key: Hashable = IN_BACKWARD if is_in_backward else key_of(optimizer)
        has_forward = self._has_forward or not self._calls.models
        if is_in_backward and not has_forward:
            return  # the next parameter of the same pass
        self._turns[key] += 1
        if key in self._keys:
            self._rule.cycle.add(key)  # whoever steps is not gone
        if not is_in_backward:
            self._optimizers[key] = optimizer
        if not self._rule.ends_at(key, has_forward=has_forward):
            return
        self._has_forward = False
        is_understood = self._calls.models or self._turns[key] >= TURNS_WITHOUT_MODULE
        if is_understood and self._rule.num_steps >= NUM_LOOKED_AT and not is_in_backward:
            self._attach()

    def _note_forward(self) -> None:
        if not self._calls.models:  # what came before belongs to one step
            self._rule.num_steps = min(self._rule.num_steps, 1)
        self._has_forward = True
        # Inside a backward pass nothing can begin: such a loop is measured from its next forward pass on.
        if self._rule.cycle == {IN_BACKWARD} and self._rule.num_steps >= NUM_LOOKED_AT:
            self._attach()

    def stop_looking(self) -> None:
        """Take the hooks of the look away."""
        self._calls.remove()

    def _attach(self) -> None:
        self.stop_looking()
        models, program = self._calls.models, self._program
        self._num_before = self._num_missed + self._rule.num_steps
        monitor = program.new_monitor()
        monitor.run.is_silent_at_end = True  # the program says what was found
        if models:
            monitor.set_model_ref(*models, within=holder_of(models))
        try:
            monitor.start_training(after_step=self._num_before, has_joined=True)
        except BaseException:
            monitor.run.hooks.remove()
            raise
        self._marks = monitor.recorder
        self._marks.has_optimizer = True
        self._loaders = LoaderMarks(self._marks)
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()
        for optimizer in self._optimizers.values():
            self._follow(optimizer)
        self._optimizers.clear()
        self.monitor = monitor

    def _follow(self, optimizer: Any) -> None:
        # On the optimizer itself: a measurement that begins or ends there changes the global hooks, which must not
        # happen while torch goes through those. For the same reason these are never taken away, but fall silent.
        key, reference = key_of(optimizer), weakref.ref(optimizer)

        def on_end() -> None:
            self.last_told = reference
            self._program.guarded(self._take_turn, key)

        follow_optimizer(optimizer, self._marks, on_end)
        self._followed.add(optimizer)

    def _take_turn(self, key: Hashable) -> None:
        if self._is_over:
            return
        has_forward = self._marks.has_forward or not self._calls.models
        is_step_over = self._rule.ends_at(key, has_forward=has_forward)
        if is_step_over:
            self._loaders.on_step()
        self._marks.on_optimizer_end(is_step_over=is_step_over)
        if self._rule.is_lost:
            # One that joins in has missed nothing, and the others go on.
            self._program.start_anew(self._rule.num_missed, self._rule.cycle if self._rule.num_missed else ())

    def on_any_optimizer(self, optimizer: Any) -> None:
        """Some optimizer is about to step. A new one, perhaps for the same parameters, will tell of it by itself."""
        if graph_task_id() != -1:
            if IN_BACKWARD in self._rule.cycle:
                self._marks.on_optimizer_in_backward()
        elif optimizer not in self._followed:
            self._follow(optimizer)

    def on_skipped(self, optimizer: Any) -> None:
        """A gradient scaler has kept the optimizer from stepping: that was its turn."""
        if self.monitor is None:
            self.note(optimizer)
            return
        self._marks.on_skipped_step()
        self._take_turn(key_of(optimizer))

    def finish(self) -> str:
        """Close the record and say in a line what was found; nothing where nothing was measured."""
        self._is_over = True
        self.stop_looking()
        monitor = self.monitor
        if monitor is None:
            return ""
        self._loaders.remove()
        summary = monitor.finish_training()
        if not monitor.run.has_record:
            return f"no record: nothing could be written to {monitor.output_dir}"
        unknown = "" if self._calls.models else "no module was found that the loop calls"
        place = f"run: {monitor.output_dir}{monitor.run.trace_hint}"
        return last_words(summary, monitor.num_steps, place, num_before=self._num_before, why_unknown=unknown)
