"""Which modules does the loop call? Found from the optimizer's parameters, without a line of code in the program.

One look at all live objects finds the modules that own the parameters. Which of them the loop really calls (a wrapper,
the model in a framework's module, two networks in turn) is seen by hooks on the outermost few levels, for one or two
steps; then they are gone.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from flopmeter.monitor.hooks import attach_forward

MAX_DEPTH = 4
MAX_PROBES = 1000
_OPAQUE = ("OptimizedModule", "DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "ScriptModule")
"""What is called as a whole: nothing below is probed, and a compiled graph is left alone."""


class Live(NamedTuple):
    """What there is at one moment."""

    optimizers: list[Optimizer]
    """Those that have parameters, each parameter's first one only: wrappers share those of the inner one."""
    modules: list[nn.Module]
    """All modules."""


def live() -> Live:
    """All optimizers and modules that the collector knows, in one look: a large program has a million objects."""
    # Not isinstance: it would ask proxies of all sorts for their class.
    found = [item for item in gc.get_objects() if issubclass(type(item), (nn.Module, Optimizer))]
    optimizers: dict[int, Optimizer] = {}
    for item in found:
        key = key_of(item) if issubclass(type(item), Optimizer) else None
        if key is not None:
            optimizers.setdefault(key, item)
    return Live(list(optimizers.values()), [item for item in found if issubclass(type(item), nn.Module)])


def key_of(optimizer: Any) -> int | None:
    """Names an optimizer by its first parameter, so that a wrapper, or one made anew, is the same."""
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            return id(parameter)
    return None


def parameters_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """Ids of all parameters that the optimizers change."""
    return {
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }


def holder_of(models: Sequence[nn.Module]) -> nn.Module | None:
    """The smallest module that holds all of several, as an agent holds its actor and its critic; None without one."""
    if len(models) < 2:
        return None
    called = {id(model) for model in models}
    held = [(module, {id(part): part for part in module.modules()}) for module in live().modules]
    holding = [(len(parts), module) for module, parts in held if called <= parts.keys()]
    return min(holding, key=lambda pair: pair[0])[1] if holding else None


def owners(parameters: Collection[int], modules: Collection[nn.Module]) -> list[nn.Module]:
    """Modules that may be what the loop calls: those that hold the parameters, from the outermost inwards."""
    inner = {id(child) for module in modules for child in _children(module)}
    holds: dict[int, bool] = {}

    def has_parameters(module: nn.Module) -> bool:
        if id(module) not in holds:
            holds[id(module)] = False  # a module that contains itself
            own = any(id(p) in parameters for p in module.__dict__.get("_parameters", {}).values())
            holds[id(module)] = any([own, *map(has_parameters, _children(module))])
        return holds[id(module)]

    level = [module for module in modules if id(module) not in inner and has_parameters(module)]
    found: dict[int, nn.Module] = {}
    for _ in range(MAX_DEPTH):
        found |= {id(module): module for module in level}
        level = [child for module in level for child in _probed_below(module) if has_parameters(child)]
    return list(found.values())[:MAX_PROBES]


class Calls:
    """Notes which of the modules are called for training, the outermost ones only. `remove` takes the hooks away.

    Args:
        on_forward: Told of each such call, before it runs.
    """

    def __init__(self, modules: Iterable[nn.Module], on_forward: Callable[[], None] = lambda: None) -> None:
        self.models: list[nn.Module] = []
        self.whole_step: tuple[Any, Any] = (None, None)
        """A module and a batch: its call with this as the first argument runs the whole step, and is not looked at."""
        self._on_forward = on_forward
        self._inside: nn.Module | None = None
        self._thread = threading.get_ident()
        self._undo = [attach_forward(module, _Probe(self, module)) for module in modules]

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called; nothing new when that happens inside another one's call."""
        is_elsewhere = threading.get_ident() != self._thread  # replicas of DataParallel carry our hooks with them
        is_the_step = module is self.whole_step[0] and bool(args) and args[0] is self.whole_step[1]
        if is_elsewhere or is_the_step or (self._inside is not None and self._inside is not module):
            return
        self._inside = module
        self._on_forward()
        if not any(module is known for known in self.models):
            self.models.append(module)

    def leave(self, module: nn.Module) -> None:
        """A module's call has returned."""
        if self._inside is module and threading.get_ident() == self._thread:
            self._inside = None

    def remove(self) -> None:
        """Take all hooks away. Safe to call twice."""
        while self._undo:
            self._undo.pop()()


class _Probe:
    """Listens to one module."""

    special = True  # it wants to be called

    def __init__(self, calls: Calls, module: nn.Module) -> None:
        self.on_forward = lambda args, kwargs: calls.enter(module, args)
        self.on_forward_end = lambda exception: calls.leave(module)
        self.on_evaluation = lambda *, is_training: None
        self.on_evaluation_end = lambda: None


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in (module.__dict__.get("_modules") or {}).values() if child is not None]


def _probed_below(module: nn.Module) -> list[nn.Module]:
    is_opaque = any(kind.__name__ in _OPAQUE for kind in type(module).__mro__)
    return [] if is_opaque or getattr(module, "_compiled_call_impl", None) is not None else _children(module)
