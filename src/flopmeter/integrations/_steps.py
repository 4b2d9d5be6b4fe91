"""Which optimizer step ends a training step?

A training step ends when an optimizer has stepped after a forward pass of training. Further optimizer steps before the
next forward pass belong to it: several optimizers after one backward pass, a subclass that calls `super().step()`,
groups of parameters stepped one by one. Where several optimizers take turns (a GAN), the step is one cycle of them all.
One that a gradient scaler keeps from stepping has had its turn all the same. Optimizers that step inside the backward
pass, parameter by parameter, have one turn together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable

IN_BACKWARD = "in backward"
"""Stands for all optimizers that step inside the backward pass."""
PATIENCE_TURNS = 8
"""An optimizer that has never stepped while another one did so often takes no part in the cycle."""
LEARNING_TURNS = 16
"""Nor does one that has stepped only once while another one did so often."""
MAX_STRAY_TURNS = 8
"""Steps of one optimizer that fit no cycle before we conclude that the program now trains something else."""


class StepRule:
    """Tells from what the loop does when a step is over.

    Args:
        cycle: Keys of the optimizers that make up a step.
    """

    def __init__(self, cycle: Collection[Hashable]) -> None:
        self.cycle = frozenset(cycle)
        self.is_lost = False
        """Whether optimizers step that have nothing to do with what was learned."""
        self._stepped: set[Hashable] = set()
        self._strays: Counter[Hashable] = Counter()

    def ends_at(self, key: Hashable, *, has_forward: bool) -> bool:
        """An optimizer has had its turn: is the step over?

        Args:
            has_forward: Whether there was a forward pass of training since the last step ended.
        """
        if key not in self.cycle or not has_forward:
            self.note_stray(key)
            return False
        self._stepped.add(key)
        if self._stepped != self.cycle:
            return False
        self._stepped.clear()
        self._strays.clear()
        self.is_lost = False
        return True

    def note_stray(self, key: Hashable) -> None:
        """An optimizer has stepped that fits no cycle."""
        self._strays[key] += 1
        self.is_lost = self.is_lost or self._strays[key] >= MAX_STRAY_TURNS


class CycleLearner:
    """Learns from the first optimizer steps of a program which of its optimizers take turns.

    Args:
        expected: Keys of the optimizers that exist: each is waited for, for a while.
    """

    def __init__(self, expected: Collection[Hashable]) -> None:
        self._expected = frozenset(expected)
        self._turns: list[Hashable] = []
        self._since_forward: set[Hashable] = set()

    def note_forward(self) -> None:
        """A forward pass of training begins."""
        self._since_forward.clear()

    def note(self, key: Hashable) -> None:
        """An optimizer has stepped, or would have; twice after one forward pass is one turn."""
        if key not in self._since_forward:
            self._since_forward.add(key)
            self._turns.append(key)

    @property
    def cycle(self) -> frozenset[Hashable] | None:
        """The optimizers that make up a step, once each has been seen twice; None until then."""
        turns = Counter(self._turns)
        regular = frozenset(key for key, count in turns.items() if count >= 2)
        most = max(turns.values(), default=0)
        is_complete = bool(regular) and regular == turns.keys() | (self._expected if most < PATIENCE_TURNS else set())
        return regular if is_complete or most >= LEARNING_TURNS else None

    @property
    def num_turns(self) -> int:
        """Turns of all optimizers so far."""
        return len(self._turns)

    @property
    def num_steps(self) -> int:
        """Steps that have ended so far, by the cycle as it is known."""
        return sum(self._ends())

    @property
    def is_at_step_end(self) -> bool:
        """Whether the last turn ended a step."""
        return self._ends()[-1:] == [True]

    def _ends(self) -> list[bool]:
        rule = StepRule(self.cycle or ())
        return [rule.ends_at(key, has_forward=True) for key in self._turns]
