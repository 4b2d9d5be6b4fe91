"""Which wait for a batch belongs to the training? Every DataLoader of the program is timed, on one thread.

During an evaluation the loop fetches from another loader: those waits are part of the pause. Its end shows when the
loader is asked that fed the last training step. What is evaluated may be no module that we know, such as an average of
the weights: then another loader that is asked again and again, with no training in between, shows the evaluation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from flopmeter.monitor.hooks import patch_loaders
from flopmeter.monitor.recorder import Recorder


class LoaderMarks:
    """Tells a listener of every wait for a training batch, until `remove`."""

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
        self._sampler = _reference(iterator._index_sampler)
        self._dataset_id = id(iterator._dataset)

    def made(self, iterator: Any) -> bool:
        sampler = self._sampler()
        if sampler is None:
            return id(iterator._dataset) == self._dataset_id
        return sampler is iterator._index_sampler


def _reference(sampler: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(sampler)
    except TypeError:  # a list of batches: it has no more than indices, and may be kept
        return lambda: sampler
