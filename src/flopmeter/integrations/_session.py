"""Measures one training of a program whose loop is understood: a `TrainingMonitor`, told of steps by global hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable
from typing import Any, Protocol, TypeVar

from flopmeter.integrations._discovery import Discovery
from flopmeter.integrations._loaders import LoaderMarks
from flopmeter.integrations._models import key_of
from flopmeter.integrations._steps import IN_BACKWARD, StepRule
from flopmeter.monitor import TrainingMonitor
from flopmeter.monitor.hooks import follow_optimizer
from flopmeter.monitor.last_words import last_words

_T = TypeVar("_T")


class Keeper(Protocol):
    """Whoever holds the session."""

    def guarded(self, action: Callable[[_T], None], argument: _T) -> None: ...
    def start_anew(self, num_missed: int, gone: Collection[Hashable]) -> None: ...


class Session:
    """From the moment the loop is understood until it ends, or turns to something else.

    Args:
        keeper: Guards what runs inside the program, and is told when that seems to train something else.
    """

    def __init__(self, found: Discovery, output_dir: str, config: dict[str, Any], keeper: Keeper) -> None:
        self.last_told: Callable[[], Any] = lambda: None
        """Gives the optimizer that was last to tell of its step by a hook of its own, and does not keep it alive."""
        self._keeper = keeper
        self._is_over = False
        self._rule = StepRule(found.cycle, found.longest_turns)
        self._num_before = found.num_steps
        self._has_models = bool(found.models)
        self._monitor = TrainingMonitor(output_dir, config)
        self._monitor.is_silent_at_end = True  # whoever holds the session says what was found
        if found.models:
            self._monitor.set_model_ref(*found.models)
        try:
            self._monitor.start_training(after_step=self._num_before, has_joined=True)
        except BaseException:
            self._monitor.detach()
            raise
        self._marks = self._monitor.marks
        self._marks.has_optimizer = True
        self._loaders = LoaderMarks(self._marks)
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()
        for optimizer in found.optimizers.values():
            self._follow(optimizer)

    def _follow(self, optimizer: Any) -> None:
        # On the optimizer itself: a measurement that begins or ends there changes the global hooks, which must not
        # happen while torch goes through those. For the same reason these are never taken away, but fall silent.
        key, reference = key_of(optimizer), weakref.ref(optimizer)

        def on_end() -> None:
            self.last_told = reference
            self._keeper.guarded(self._take_turn, key)

        follow_optimizer(optimizer, self._marks, on_end)
        self._followed.add(optimizer)

    def _take_turn(self, key: Hashable) -> None:
        if self._is_over:
            return
        has_forward = self._marks.has_forward or not self._has_models
        is_over = self._rule.ends_at(key, has_forward=has_forward)
        if is_over:
            self._loaders.on_step()
        self._marks.on_optimizer_end(is_step_over=is_over)
        if self._rule.is_lost:
            # One that joins in has missed nothing, and the others go on.
            self._keeper.start_anew(self._rule.num_missed, self._rule.cycle if self._rule.num_missed else ())

    def on_any_optimizer(self, optimizer: Any, *, is_in_backward: bool) -> None:
        """Some optimizer is about to step. A new one, perhaps for the same parameters, will tell of it by itself."""
        if is_in_backward:
            if IN_BACKWARD in self._rule.cycle:
                self._marks.on_optimizer_in_backward()
        elif optimizer not in self._followed:
            self._follow(optimizer)

    def on_skipped(self, optimizer: Any) -> None:
        """A gradient scaler has kept the optimizer from stepping: that was its turn."""
        self._marks.on_skipped_step()
        self._take_turn(key_of(optimizer))

    def finish(self) -> str:
        """Close the record and say in a line what was found."""
        self._is_over = True
        self._loaders.remove()
        summary = self._monitor.finish_training()
        if not self._monitor.has_record:
            return f"no record: nothing could be written to {self._monitor.output_dir}"
        return last_words(
            summary,
            self._monitor.num_steps,
            f"run: {self._monitor.output_dir}",
            num_before=self._num_before,
            why_unknown="" if self._has_models else "no module was found that the loop calls",
        )
