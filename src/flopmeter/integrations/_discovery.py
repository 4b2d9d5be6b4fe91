"""What does the program train? Its first steps show which optimizers take turns and which modules it calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from typing import Any

from torch import nn

from flopmeter.integrations._models import Calls, has_gradients, key_of, live, owners, parameters_of
from flopmeter.integrations._steps import IN_BACKWARD, LEARNING_TURNS, MAX_TURNS_APART, CycleLearner


class Discovery:
    """Watches until the loop is understood.

    Args:
        on_ready: Called once, between two steps.
        num_missed: Steps that were done before.
        gone: Keys of optimizers that the program has done with, whether or not they are still there.
        is_in_backward: Whether the optimizers step inside the backward pass.
    """

    def __init__(
        self, on_ready: Callable[[], None], num_missed: int, gone: Collection[Hashable], *, is_in_backward: bool
    ) -> None:
        optimizers, modules = live()
        keys: set[Hashable] = {key_of(optimizer) for optimizer in optimizers}
        self.optimizers: dict[Hashable, Any] = {}
        """Those that have had a turn outside of a backward pass, by their keys."""
        self._on_ready = on_ready
        self._num_missed = num_missed
        self._seen = {IN_BACKWARD} if is_in_backward else keys
        self._turns: Counter[Hashable] = Counter()
        self._learner = CycleLearner(self._seen.difference(gone))
        self._calls = Calls(owners(parameters_of(optimizers), modules), self._note_forward)

    @property
    def models(self) -> list[nn.Module]:
        """The modules that the loop calls."""
        return self._calls.models

    @property
    def cycle(self) -> frozenset[Hashable]:
        """Keys of the optimizers that make up a step."""
        return self._learner.cycle or frozenset()

    @property
    def longest_turns(self) -> int:
        """Most turns that one optimizer had within a step."""
        return self._learner.longest_turns

    @property
    def num_steps(self) -> int:
        """Steps that the loop has done up to now."""
        return self._num_missed + self._learner.num_steps

    def note(self, optimizer: Any, *, is_in_backward: bool) -> None:
        """An optimizer has had its turn."""
        if is_in_backward:
            self._learner.note(IN_BACKWARD)
            return
        if not self._learner.num_turns and not has_gradients(optimizer):
            return  # some call `step` once before the training begins, to quieten a scheduler
        key = key_of(optimizer)
        self._turns[key] += 1
        if self._turns[key] > MAX_TURNS_APART:
            return  # it will not be understood any more, until somebody looks again
        self.optimizers[key] = optimizer
        self._learner.note(key)
        if self._is_ready():
            self._on_ready()

    def num_lost(self, optimizer: Any) -> int:
        """Steps of an optimizer that show that the program trains something else by now; 0 while they do not.

        It came after the look at all objects, or goes on and on without making the cycle that was learned.
        """
        num_turns = self._turns[key := key_of(optimizer)]
        is_lost = num_turns >= (1 if key not in self._seen else MAX_TURNS_APART)
        return num_turns if is_lost else 0

    def close(self) -> None:
        """Take all hooks away."""
        self._calls.remove()

    def _note_forward(self) -> None:
        # Inside a backward pass nothing can begin: such a loop is ready at its next forward pass.
        if self._learner.cycle == frozenset((IN_BACKWARD,)):
            self._on_ready()
        else:
            self._learner.note_forward()

    def _is_ready(self) -> bool:
        is_understood = bool(self._calls.models) or self._learner.num_turns >= LEARNING_TURNS
        return is_understood and self._learner.cycle is not None and self._learner.is_at_step_end
