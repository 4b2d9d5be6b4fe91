"""What becomes of an error in a callback of ours? The framework never sees it; the first one ends the measuring."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

logger = logging.getLogger("flopmeter")


class Switch(Protocol):
    """A callback that can be switched off."""

    is_off: bool


_Method = TypeVar("_Method", bound=Callable[..., None])


def harmless(method: _Method) -> _Method:
    """Whatever goes wrong in here, the training goes on."""

    @wraps(method)
    def guarded(self: Switch, *args: Any, **kwargs: Any) -> None:
        if self.is_off:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the training run comes first; the reason is logged
            self.is_off = True
            name, kind = method.__name__, type(error).__name__
            logger.warning("%s failed (%s: %s); training goes on, monitoring is now off", name, kind, error)

    return cast(_Method, guarded)
