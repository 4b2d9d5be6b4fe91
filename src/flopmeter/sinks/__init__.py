"""Where numbers go while a run is on: one file in this folder per destination, named as users write it in `sinks:`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast

from flopmeter.errors import ConfigError


class Sink(Protocol):
    """A destination. Each plug-in file has a class `Sink` with these methods and a constructor without arguments."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step (keys as in `schema`)."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


def available_sinks() -> list[str]:
    """Names that `sinks:` accepts."""
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def open_sink(name: str) -> Sink:
    """The sink of that name, ready to log."""
    if name not in available_sinks():
        raise ConfigError(f"monitoring.sinks: there is no sink {name!r}; there are: {', '.join(available_sinks())}")
    return cast(Sink, import_module(f"{__name__}.{name}").Sink())
