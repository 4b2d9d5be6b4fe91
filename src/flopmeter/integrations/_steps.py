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


MAX_TURNS_APART = 64
"""Turns of one optimizer without one of another before we conclude that the other has been given up."""
MAX_TIMES_LONGER = 8
"""The same, as a multiple of the most turns that one had when the cycle was learned."""

MAX_STEPS_A_JOIN = 4
"""An optimizer that joins in has a turn in so many steps. More seldom, it might not be learned when we look again."""


class StepRule:
    """Tells from what the loop does when a step is over.

    Args:
        cycle: Keys of the optimizers that make up a step.
        longest_turns: Most turns that one of them was seen to have within a step.
    """

    def __init__(self, cycle: Collection[Hashable], longest_turns: int = 1) -> None:
        self.cycle = frozenset(cycle)
        self.is_lost = False
        """Whether what was learned no longer holds: optimizers step that have nothing to do with it, or join in."""
        self.num_missed = 0
        """Steps in no record by then, the last one left out."""
        self._max_turns = max(MAX_TURNS_APART, MAX_TIMES_LONGER * longest_turns)
        self._turns: Counter[Hashable] = Counter()
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
        if len(self.cycle) > 1 and not self._has_all_with(key):
            return False
        self._strays.clear()
        for counts in self._joining.values():
            counts[1] += 1
        return True

    def _has_all_with(self, key: Hashable) -> bool:
        """Whether with this turn each optimizer of the cycle has had one; then the next cycle begins."""
        self._turns[key] += 1
        if self._turns.keys() == self.cycle:
            self._turns.clear()
            return True
        if self._turns[key] >= self._max_turns:
            self._lose(self._turns[key] - 1)
        return False

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
        self.is_lost = True
        self.num_missed = num_missed


class CycleLearner:
    """Learns from the first optimizer steps of a program which of its optimizers take turns.

    Args:
        expected: Keys of the optimizers that exist: each is waited for, for a while.
    """

    def __init__(self, expected: Collection[Hashable]) -> None:
        self._expected = frozenset(expected)
        self._turns: list[Hashable] = []
        self._since_forward: set[Hashable] = set()
        self._has_forward = False

    def note_forward(self) -> None:
        """A forward pass of training begins."""
        if not self._has_forward:
            self._has_forward = True
            self._turns = list(dict.fromkeys(self._turns))  # what came before belongs to one step
        self._since_forward.clear()

    def note(self, key: Hashable) -> None:
        """An optimizer has stepped, or would have; twice after one forward pass is one turn.

        Where no forward pass is ever seen, because the loop calls no module, each time is one.
        """
        if key not in self._since_forward or not self._has_forward:
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
    def longest_turns(self) -> int:
        """Most turns that one optimizer had within a step."""
        longest, turns = 1, Counter[Hashable]()
        for key, is_end in zip(self._turns, self._ends(), strict=True):
            turns[key] += 1
            longest = max(longest, turns[key])
            if is_end:
                turns.clear()
        return longest

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
