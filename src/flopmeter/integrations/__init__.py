"""How is flopmeter put into a loop that somebody else wrote? One file in this folder per kind of loop.

A file carries the import name of the framework that it serves (`transformers`, `lightning`, ...), imports that
framework at its own top, and attaches a `TrainingMonitor` by the means which the framework gives. `script` is for loops
of any kind: it is what `flopmeter run` puts into an unchanged program. Files that start with `_` are parts of those.

A framework that prepares models by an object of its own (Accelerate's `Accelerator`, Lightning's `Fabric`) also has a
function `prepared` in its file, which `flopmeter.watch(..., accelerator=that)` finds by the framework's name: it gives
what to measure of what was prepared, and what is to be done once the monitor has started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import flopmeter
from flopmeter.errors import MissingLibraryError

if TYPE_CHECKING:
    from torch import nn

NO_SINKS: Mapping[str, Any] = {"monitoring": {"sinks": []}}
"""Trainers print and report by themselves."""
LAST_LOG_WAIT_S = 2.0
"""What the last log of a run waits for the steps before it."""
Config: TypeAlias = "str | PathLike[str] | Mapping[str, Any] | flopmeter.MonitorConfig | None"
_Method = TypeVar("_Method", bound=Callable[..., None])


def harmless(method: _Method) -> _Method:
    """A callback's method whose error the framework never sees: the first sets `is_off` and ends the measuring."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_off:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the training run comes first; the reason is logged
            self.is_off = True
            failed = f"{method.__name__} failed ({type(error).__name__}: {error})"
            logging.getLogger("flopmeter").warning("%s; training goes on, monitoring is now off", failed)

    return cast(_Method, guarded)


@contextmanager
def library(name: str) -> Iterator[None]:
    """Around the imports of a framework: says what to install where it is the framework itself that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingLibraryError(name, needed_for=f"flopmeter.integrations.{name}") from error


class TrainerPart:
    """What the callbacks of all trainers have: one monitor at a time, and what is open of it.

    Args:
        output_dir: Where `run.jsonl` goes; the trainer's own folder when None. A resumed run is appended.
        config: As for TrainingMonitor.
    """

    def __init__(self, output_dir: str | PathLike[str] | None, config: Config) -> None:
        self.monitor: flopmeter.TrainingMonitor | None = None
        self.is_off = False
        self._config = flopmeter.MonitorConfig.load(config)  # a wrong setting shows here, not an hour later
        self._output_dir = output_dir
        self._phase, self._pause, self._undo = ExitStack(), ExitStack(), ExitStack()

    def _begin(self, output_dir: str, model: nn.Module | None, loader: Any) -> flopmeter.TrainingMonitor:
        self._finish()
        self.is_off = False
        self.monitor = monitor = flopmeter.TrainingMonitor(
            self._output_dir or output_dir, self._config, model=model, loader=loader, finds_evaluation=False
        )
        monitor.start_training(has_joined=True)
        return monitor

    def _finish(self) -> None:
        for stack in (self._pause, self._phase, self._undo):
            stack.close()
        if self.monitor is not None:
            self.monitor.finish_training()
