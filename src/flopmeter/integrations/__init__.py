"""How is flopmeter put into a loop that somebody else wrote? One file in this folder per kind of loop.

A file carries the import name of the framework that it serves (`transformers`, `lightning`, ...), imports that
framework at its own top, and attaches a `TrainingMonitor` by the means which the framework gives. `script` is for loops
of any kind: it is what `flopmeter run` puts into an unchanged program. Files that start with `_` are parts of those.

A framework that prepares models by an object of its own (Accelerate's `Accelerator`, Lightning's `Fabric`) also has a
function `watch` in its file: `flopmeter.watch(..., accelerator=that)` finds it by the framework's name and calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

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
