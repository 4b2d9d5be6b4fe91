"""How does flopmeter get into `python train.py` without being in anyone's way?

`flopmeter run` replaces itself by the very command that would have been typed without it, with this folder in front of
`PYTHONPATH`: Python imports a module of this name before the program starts. It takes its own traces away, so that
child processes know nothing of it, lets the environment's own `sitecustomize` run, and waits for torch to be imported.
Until then nothing of flopmeter is loaded.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # not from typing, whose import would take longer than all of this
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

SETTINGS, TRIAL = "FLOPMETER_RUN", "FLOPMETER_TRIAL"
_HERE = os.path.dirname(os.path.abspath(__file__))


class _TorchFinder:
    """Lets the other finders find torch, and has something done once it is imported."""

    def __init__(self, settings: str | None, trial: str | None) -> None:
        self.settings, self.trial = settings, trial
        self.has_seen_torch = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        try:
            spec = _found(name, self)
            if spec is not None:
                self._follow(spec.loader)
        except Exception:  # noqa: BLE001 - a finder or a loader that is not as usual: python finds torch by itself
            return None
        return spec

    def _follow(self, loader: Any) -> None:
        # On the instance, and only until it was used: torch's own loader stays what it is.
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            try:
                run(module)
            except BaseException as error:
                if error.__traceback__ is not None:
                    error.__traceback__ = error.__traceback__.tb_next  # no frame of ours in the program's traceback
                raise
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.has_seen_torch = True
                _install("integrations.script", self.settings)
                _install("trials.inside", self.trial)

        loader.__dict__["exec_module"] = exec_module


def _found(name: str, besides: object = None) -> ModuleSpec | None:
    """What the finders say, one of them not asked."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)  # up to Python 3.11 a finder may have none
        spec: ModuleSpec | None = find_spec(name, None) if find_spec is not None and finder is not besides else None
        if spec is not None:
            return spec
    return None


def _install(module: str, settings: str | None) -> None:
    if settings is None:
        return
    try:
        from importlib import import_module

        import_module(f"flopmeter.{module}").install(settings)
    except Exception as error:  # noqa: BLE001 - the program comes first
        _say(f"not measured: {type(error).__name__}: {error}")


def _say(line: str) -> None:
    """On stderr, where there is one and the program has not closed it; print would take stdout instead."""
    try:
        if sys.stderr is not None:
            print(f"flopmeter: {line}", file=sys.stderr)
    except (OSError, ValueError):
        return


def _leave_no_trace() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    mine, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if mine == _HERE:
        os.environ["PYTHONPATH"] = rest
        if not rest:
            del os.environ["PYTHONPATH"]


def _run_the_other_one() -> None:
    """The `sitecustomize` that Python would have imported; its mistakes are reported as Python does."""
    spec = _found("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = type(sys)("sitecustomize")
    module.__spec__, module.__file__, module.__loader__ = spec, spec.origin, spec.loader
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _is_module() -> bool:
    """Whether python is to run a module, or a folder's, which it looks for later."""
    return sys.argv[0] == "-m" or os.path.isdir(sys.argv[0])


def _has_failed(is_module: bool) -> bool:
    """Whether python has just told of an error: of the program's, or that there is no such module."""
    return hasattr(sys, "last_type") or (is_module and sys.modules["__main__"].__spec__ is None)


def _say_that_nothing_was_seen(finder: _TorchFinder, pid: int, is_module: bool) -> None:
    try:
        if finder.has_seen_torch or os.getpid() != pid or os.environ.get("RANK", "0") != "0":
            return
        # Not read as JSON: a program may have left no way to import anything.
        if not _has_failed(is_module) and '"is_quiet": true' not in (finder.settings or '"is_quiet": true'):
            is_there = "torch" in sys.modules
            why = "torch was not imported in the usual way" if is_there else "the program did not import torch"
            _say(f"nothing to measure: {why}")
    except Exception:  # noqa: BLE001 - the program may have taken the interpreter apart; it has ended all the same
        return


def _start() -> None:
    settings, trial = os.environ.pop(SETTINGS, None), os.environ.pop(TRIAL, None)
    _leave_no_trace()
    is_there = _is_module() or sys.argv[0] == "-" or os.path.exists(sys.argv[0])
    if (settings is not None or trial is not None) and is_there:  # else python says what is missing
        finder = _TorchFinder(settings, trial)
        sys.meta_path.insert(0, finder)
        atexit.register(_say_that_nothing_was_seen, finder, os.getpid(), _is_module())
    _run_the_other_one()


_start()
