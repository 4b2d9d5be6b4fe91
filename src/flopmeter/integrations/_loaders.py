"""Which wait for a batch belongs to the training? Every DataLoader of the program is timed, on one thread.

During an evaluation the loop fetches from another loader: those waits are part of the pause. Its end shows when the
iterator is asked that fed the last training step.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from flopmeter.monitor import hooks


class WaitListener(hooks.WaitListener, Protocol):
    """Whoever wants to know, and knows of evaluations."""

    @property
    def is_evaluating(self) -> bool: ...


class LoaderMarks:
    """Tells a listener of every wait for a training batch, until `remove`."""

    def __init__(self, listener: WaitListener) -> None:
        self._listener = listener
        self._last: weakref.ref[Any] | None = None
        self._training: weakref.ref[Any] | None = None
        self.remove = hooks.patch_loaders(listener, self._takes)

    def on_step(self) -> None:
        """A step has ended: whoever was asked last feeds the training."""
        self._training = self._last

    def _takes(self, iterator: Any) -> bool:
        """Whether this wait is the training's; it is remembered who was asked."""
        is_training = self._training is not None and self._training() is iterator
        if self._listener.is_evaluating and not is_training:
            return False
        self._last = weakref.ref(iterator)
        return True
