"""Where numbers go while a run is on: one file in this folder per destination, named as users write it in `sinks:`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Protocol, cast

from flopmeter.config import MonitorConfig
from flopmeter.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkContext:
    """What a sink may know of the run it serves."""

    config: MonitorConfig
    """All settings; a sink reads its own section."""
    output_dir: Path
    """The run's folder."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """The run file's header: model, device, peak, mode, versions."""
    rank: int = 0
    """This process's rank."""


class Sink(Protocol):
    """A destination. Each plug-in file has a class `Sink` with these methods, made from a `SinkContext`.

    All calls come from one background thread, so a sink may block; it may also raise, and is then switched off.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step (keys as in `schema`)."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


def available_sinks() -> list[str]:
    """Names that `sinks:` accepts."""
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def check_sinks(names: tuple[str, ...]) -> None:
    """Refuse a name that is no sink, with those that are."""
    for name in names:
        if name not in available_sinks():
            raise ConfigError(f"monitoring.sinks: there is no sink {name!r}; there are: {', '.join(available_sinks())}")


def takes_every_step(name: str) -> bool:
    """Whether a sink shows every step and thins them out by itself (its file says TAKES_EVERY_STEP = True)."""
    return bool(getattr(import_module(f"{__name__}.{name}"), "TAKES_EVERY_STEP", False))


def open_sink(name: str, context: SinkContext) -> Sink:
    """The sink of that name, ready to log."""
    check_sinks((name,))
    return cast(Sink, import_module(f"{__name__}.{name}").Sink(context))


def say_last(names: tuple[str, ...], line: str) -> None:
    """Show the run's closing line in those sinks that people read (their file has a function `say_last`)."""
    for name in names:
        say = getattr(import_module(f"{__name__}.{name}"), "say_last", None)
        if say is not None:
            say(line)
