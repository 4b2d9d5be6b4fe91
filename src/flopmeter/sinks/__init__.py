"""Where numbers go while a run is on: one file in this folder per destination, named as users write it in `sinks:`.

A function of the user's is a destination, too: `package.module:function` among the `sinks:`, or `watch(..., log=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Protocol, TypeAlias, cast

from flopmeter.config import MonitorConfig
from flopmeter.errors import ConfigError, MissingLibraryError
from flopmeter.schema import METRICS_BY_KEY, USUAL

Metrics: TypeAlias = Mapping[str, float]
LogFunction: TypeAlias = Callable[[Metrics, int], object]
"""Takes metrics and their step."""
GIVEN = "log"
"""Names the sink of the function that was given to `watch`."""


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
    log: LogFunction | None = None
    """The function that was given to `watch`."""


class Sink(Protocol):
    """A destination. Each plug-in file has a class `Sink` with these methods, made from a `SinkContext`.

    All calls come from one background thread, so a sink may block; it may also raise, and is then switched off. Two
    things are optional: a class attribute `takes_every_step = True`, for one that is shown every step and thins them
    out by itself, and a static method `say_last(line)`, which gets the run's closing line.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step (keys as in `schema`)."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class FunctionSink:
    """Calls a function of the user's with what any sink gets."""

    def __init__(self, function: LogFunction) -> None:
        self._function = function

    def log(self, step: int, metrics: Metrics) -> None:
        """Metrics first, as the functions of most libraries take them; a dict of its own, to keep or to change."""
        self._function(dict(metrics), step)

    def close(self) -> None:
        """Nothing to do."""


def available_sinks() -> list[str]:
    """Names that `sinks:` accepts."""
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def check_sinks(names: tuple[str, ...], *, imports: bool = True) -> None:
    """Refuse a name that is no sink, with those that are, and a function that cannot be imported.

    Args:
        imports: Whether this is the program that trains, where functions can be found.
    """
    for name in names:
        if ":" in name:
            _ = imports and _function(name)
        elif name not in available_sinks():
            known = ", ".join([*available_sinks(), "package.module:function"])
            raise ConfigError(f"monitoring.sinks: there is no sink {name!r}; there are: {known}")


@cache
def _function(name: str) -> LogFunction:
    module, _, path = name.partition(":")
    try:
        found = reduce(getattr, path.split("."), import_module(module))
    except Exception as error:
        raise ConfigError(f"monitoring.sinks: {name} cannot be had ({type(error).__name__}: {error})") from error
    if not callable(found):
        raise ConfigError(f"monitoring.sinks: {name} is no function but of type {type(found).__name__}")
    return cast(LogFunction, found)


def takes_every_step(name: str) -> bool:
    """Whether a sink is shown every step and thins them out by itself."""
    return bool(getattr(_class(name), "takes_every_step", False))


def _class(name: str) -> Any:
    is_function = ":" in name or name == GIVEN
    return FunctionSink if is_function else import_module(f"{__name__}.{name}").Sink


def load_libraries(extra: str, *modules: str) -> list[Any]:
    """Modules of the optional library of a sink.

    Raises:
        MissingLibraryError: It is not installed; the message names the extra that brings it.
    """
    try:
        return [import_module(module) for module in modules]
    except ImportError as error:
        library = modules[0].partition(".")[0]
        raise MissingLibraryError(library, needed_for=f"the sink {extra}", extra=extra) from error


def open_sink(name: str, context: SinkContext) -> Sink:
    """The sink of that name, ready to log."""
    if name == GIVEN and context.log is not None:
        return FunctionSink(context.log)
    check_sinks((name,))
    return cast(Sink, _class(name)(context)) if ":" not in name else FunctionSink(_function(name))


def choice_of(name: str, config: MonitorConfig) -> Callable[[Metrics], Metrics]:
    """Leaves of metrics what the sink's section asks for. Numbers of the user's own are no choice of ours."""
    patterns: tuple[str, ...] = getattr(getattr(config, name, None), "metrics", ("all",))
    if "all" in patterns:
        return lambda metrics: metrics

    @cache
    def is_chosen(key: str) -> bool:
        is_usual = key in USUAL and "usual" in patterns
        return key not in METRICS_BY_KEY or is_usual or any(fnmatchcase(key, pattern) for pattern in patterns)

    return lambda metrics: {key: metrics[key] for key in metrics if is_chosen(key)}


def say_last(names: tuple[str, ...], line: str) -> None:
    """Show the run's closing line in those sinks that people read."""
    for name in names:
        say = getattr(_class(name), "say_last", None)
        if say is not None:
            say(line)
