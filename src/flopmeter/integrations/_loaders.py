"""Which wait for a batch belongs to the training? Every DataLoader of the program is timed, on one thread.

During an evaluation the loop fetches from another loader: those waits are part of the pause. Its end shows when the
iterator is asked that fed the last training step.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.data import dataloader

from flopmeter.monitor.hooks import hide_frame


class WaitListener(Protocol):
    """Whoever wants to know. Methods must not raise."""

    @property
    def is_evaluating(self) -> bool: ...
    def on_wait(self) -> None: ...
    def on_batch(self) -> None: ...


class LoaderMarks:
    """Tells a listener of every wait for a training batch, until `remove`."""

    def __init__(self, listener: WaitListener) -> None:
        self._last: weakref.ref[Any] | None = None
        self._training: weakref.ref[Any] | None = None
        self.remove = self._patch(listener)

    def on_step(self) -> None:
        """A step has ended: whoever was asked last feeds the training."""
        self._training = self._last

    def _is_foreign(self, iterator: Any, listener: WaitListener) -> bool:
        is_training = self._training is not None and self._training() is iterator
        return listener.is_evaluating and not is_training

    def _patch(self, listener: WaitListener) -> Callable[[], None]:
        owner = dataloader._BaseDataLoaderIter
        original = owner.__next__
        thread, pid = threading.get_ident(), os.getpid()

        def fetch(iterator: Any) -> Any:
            if threading.get_ident() != thread or os.getpid() != pid or self._is_foreign(iterator, listener):
                return original(iterator)
            self._last = weakref.ref(iterator)
            listener.on_wait()
            try:
                return original(iterator)
            except BaseException as error:
                hide_frame(error)
                raise
            finally:
                listener.on_batch()

        owner.__next__ = fetch  # type: ignore[method-assign, assignment]

        def undo() -> None:
            if owner.__next__ is fetch:
                owner.__next__ = original  # type: ignore[method-assign]

        return undo
