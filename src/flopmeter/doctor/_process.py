"""How does a check that crashes or never ends cost only itself? By running in a process that can be thrown away."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from flopmeter.doctor._result import Result

_spawn = get_context("spawn")  # a forked copy of a process that has used CUDA or threads is of no use


class CheckProcess:
    """Runs checks one after the other in a child, which is started anew after a check that took it down."""

    def __init__(self) -> None:
        self._child: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> CheckProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, module: str, limit_s: float) -> Result:
        """The result of the check in that module; one that takes longer is killed, with all that it has started."""
        pipe = self._start() if self._pipe is None else self._pipe
        try:
            pipe.send(module)
            if pipe.poll(limit_s):
                result: Result = pipe.recv()
                return result
        except (EOFError, OSError):
            return Result(standing="broken", says=f"the process of the check died ({self._end()})")
        self._end()
        return Result(standing="not checked", says=f"gave no answer within {limit_s:.0f} s")

    def _start(self) -> Connection:
        # Python's own helper removes the semaphores of a child that was killed, and would complain of each.
        sys.warnoptions.append("ignore:resource_tracker:UserWarning")
        self._pipe, theirs = _spawn.Pipe()
        self._child = _spawn.Process(target=serve, args=(theirs,), name="flopmeter doctor")
        self._child.start()
        theirs.close()  # so that its end shows here as the end of the pipe
        return self._pipe

    def _end(self) -> str:
        """Make sure that nothing of the child is left; says how it ended if it did so by itself."""
        if self._child is None or self._pipe is None:
            return ""
        child, self._child = self._child, None
        self._pipe.close()
        self._pipe = None
        child.join(0.5)
        code = child.exitcode
        _kill(child)
        child.join()
        if code is not None and code < 0:
            return signal.Signals(-code).name
        return f"exit code {code}"


def _kill(child: SpawnProcess) -> None:
    """The child leads a session of its own: compilers and services that it started go with it."""
    assert child.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()


def serve(pipe: Connection) -> None:
    """What the child does: run what it is asked for until nobody asks any more."""
    os.setsid()
    _silence()
    warnings.simplefilter("ignore")
    while True:
        try:
            module = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(module))


def _run(module: str) -> Result:
    try:
        result: Result = import_module(module).check()
    except Exception as error:  # noqa: BLE001 - a check that fails is a result too
        reason = (str(error).splitlines() or [""])[0][:200]
        return Result(standing="broken", says=f"failed with {type(error).__name__}: {reason}")
    return result


def _silence() -> None:
    """What libraries print would stand between our lines, or in the middle of our JSON."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
