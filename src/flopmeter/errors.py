"""What can go wrong, as types: which mistake was made, what we know about it, and what cures it.

    FlopmeterError                  catch this to catch all of them
    ├── ConfigError                 a setting is unknown, of the wrong type, or impossible
    ├── UnknownDeviceError          no peak is on file for this device and dtype
    ├── RecordError                 a run file cannot be read or written as one
    ├── CountError                  the FLOPs of a model or a step cannot be told
    ├── TraceError                  a profiler trace cannot be read
    └── MissingLibraryError         an optional library is needed and absent

Every message is one line that says what happened, what we know, and what to do. What only deserves a warning goes to
the logger `flopmeter`; where the program has no logging, it is signed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import Any


class FlopmeterError(Exception):
    """Anything flopmeter raises on purpose."""


class ConfigError(FlopmeterError):
    """A setting is unknown, of the wrong type, or impossible; the message names its full path."""


class UnknownDeviceError(FlopmeterError):
    """No peak is on file for this device and dtype. A neighbour's number is never used instead."""


class RecordError(FlopmeterError):
    """A run file is foreign, empty, of another schema, or out of reach."""


class CountError(FlopmeterError):
    """The FLOPs of a model or of a step cannot be told; nothing was changed in the attempt."""


class TraceError(FlopmeterError):
    """A profiler trace cannot be read."""


class MissingLibraryError(FlopmeterError):
    """An optional library is needed and absent; the message names the command that installs it."""

    def __init__(self, library: str, *, needed_for: str, extra: str | None = None) -> None:
        target = f"'flopmeter[{extra}]'" if extra else library
        verb = "are" if " and " in library else "is"
        super().__init__(f"{needed_for} needs {library}, which {verb} not installed: run pip install {target}")


OLDEST_TORCH = (2, 6)


def too_old_torch(version: str) -> str | None:
    """What to say of a torch of this version where it is older than any that flopmeter knows, else None."""
    if tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"flopmeter needs torch {oldest} or newer, and this is torch {version}: run pip install --upgrade torch"


def refuse_old_torch() -> None:
    """Say, before torch is loaded, that the torch which is here is too old; nothing when there is none.

    Raises:
        FlopmeterError: It is.
    """
    try:
        too_old = too_old_torch(version("torch"))
    except PackageNotFoundError:
        return
    if too_old is not None:
        raise FlopmeterError(too_old)


FEW_NAMES = 8
"""So many are read at a glance: they are listed even beside the nearest one, which may not be the one meant."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """How the message about an unknown name ends: with the nearest one, else with `otherwise` or all that there are."""
    names = list(known)
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    there_are = f"it is one of {', '.join(names)}"
    if not near:
        return otherwise or there_are
    return f"did you mean {near[0]!r}?" + (f" ({there_are})" if len(names) <= FEW_NAMES else "")


def sign_warnings() -> None:
    """Have our warnings say whose they are, where the program has no logging of its own. Safe to call again."""
    if not any(isinstance(handler, _Signed) for handler in _LOGGER.handlers):
        _LOGGER.addHandler(_Signed(logging.WARNING))


_LOGGER = logging.getLogger("flopmeter")


class _Harmless(logging.Logger):
    """A handler, filter or record factory of the program's that raises never reaches the training loop through us.

    Every warning of ours goes through this one logger, and most of them come from inside the loop.
    """

    def makeRecord(  # noqa: N802 - the name is logging's
        self, name: str, level: int, fn: str, lno: int, msg: object, args: Any, exc_info: Any, *rest: Any, **more: Any
    ) -> logging.LogRecord:
        try:
            return super().makeRecord(name, level, fn, lno, msg, args, exc_info, *rest, **more)
        except Exception:  # noqa: BLE001 - the program's own factory: the plain record does
            return logging.LogRecord(name, level, fn, lno, msg, args, exc_info)

    def handle(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # nobody is left to tell
            super().handle(record)


_LOGGER.__class__ = type("HarmlessLogger", (_Harmless, type(_LOGGER)), {})  # whatever class the program gives loggers


class _Signed(logging.Handler):
    """In the place of Python's handler of last resort, which prints the bare message; silent where there is another."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.handlers or len(_LOGGER.handlers) > 1:
            return
        try:
            print(f"flopmeter: {self.format(record)}", file=sys.stderr)  # today's: notebooks and tests replace it
        except Exception:  # noqa: BLE001 - what becomes of it is for the logging module to say
            self.handleError(record)
