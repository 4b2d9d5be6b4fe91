"""What ends a program that is measured: an error, a signal, or the end of a forked child?

A signal whose default is death (SIGTERM of SLURM, `timeout` or a preemption, SIGHUP of a closed terminal) leaves Python
no moment for a last line. A handler of Python's own would run only when the training thread comes back to the
interpreter: a job that hangs in a collective could no longer be ended. So the handler is faulthandler's, in C: it runs
at once, on any thread, and writes a few bytes to a pipe. A thread of ours waits at its other end, has the record
closed within a few seconds, and sends the signal again with its default back in place.

To the program nothing changes: `signal.getsignal` still says SIG_DFL, and a handler that it has, or sets later, is the
only one. Children never have ours: it is away while the process forks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import weakref
from contextlib import suppress
from select import poll
from typing import Protocol

logger = logging.getLogger("flopmeter")

SIGNALS = ("SIGTERM", "SIGHUP")


def unhandled() -> type[BaseException] | None:
    """The error that ends the program; at a prompt errors end nothing."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_type", None)


class Ending(Protocol):
    """A run that wants to know."""

    def end_by_signal(self, name: str) -> None: ...
    def leave_to_parent(self) -> None: ...


class Endings:
    """The runs of this process, and what of the process is changed for their sake while there are any."""

    def __init__(self) -> None:
        self._runs: weakref.WeakSet[Ending] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._pipes: dict[int, tuple[int, int]] = {}
        """By the signal that is caught; read end, write end."""
        self._stop = (-1, -1)
        self._thread: threading.Thread | None = None
        self._has_fork_hooks = False

    def add(self, run: Ending) -> None:
        """A run begins. Never raises."""
        try:
            with self._lock:
                self._runs.add(run)
                if not self._has_fork_hooks and hasattr(os, "register_at_fork"):
                    self._has_fork_hooks = True
                    os.register_at_fork(
                        before=self._let_go, after_in_parent=self._take_hold, after_in_child=self._forget
                    )
                if not self._pipes:
                    self._catch()
        except Exception as error:  # noqa: BLE001 - without it, a signal costs what was not flushed
            logger.warning("the record will not be closed when a signal ends the process: %s", error)

    def remove(self, run: Ending) -> None:
        """A run has ended. With the last one everything is as it was."""
        with self._lock:
            self._runs.discard(run)
            if self._pipes and not self._runs:
                self._let_go()
                self._pipes = {}
                os.write(self._stop[1], b".")
                if self._thread is not None:
                    self._thread.join(1.0)

    def _catch(self) -> None:
        import faulthandler

        names = [name for name in SIGNALS if hasattr(signal, name) and _is_deadly(getattr(signal, name))]
        if not names or not hasattr(faulthandler, "register"):
            return
        pipes = {}
        for name in names:
            read, write = os.pipe()
            os.set_blocking(write, False)
            pipes[int(getattr(signal, name))] = read, write
        stop = os.pipe()
        self._thread = threading.Thread(target=_wait, args=(self, pipes, stop), name="flopmeter-signals", daemon=True)
        self._thread.start()
        self._pipes, self._stop = pipes, stop
        self._take_hold()

    def _take_hold(self) -> None:
        if self._pipes:
            import faulthandler

            for number, (_, write) in self._pipes.items():
                if signal.getsignal(number) == signal.SIG_DFL:
                    faulthandler.unregister(number)  # a place that is taken would be changed and not put in force
                    faulthandler.register(number, file=write, all_threads=False)

    def _let_go(self) -> None:
        if self._pipes:
            import faulthandler

            for number in self._pipes:
                if signal.getsignal(number) == signal.SIG_DFL:  # else the program has a handler of its own by now
                    faulthandler.unregister(number)

    def _forget(self) -> None:
        """In a forked child."""
        self._let_go()
        if self._pipes:
            _close(self._pipes, self._stop)
        self._pipes = {}
        self._lock = threading.Lock()
        runs, self._runs = list(self._runs), weakref.WeakSet()
        for run in runs:
            run.leave_to_parent()

    def end_by(self, number: int) -> None:
        """A signal has come that is to end the process: close the records, then let it."""
        for run in list(self._runs):
            with suppress(Exception):  # the process is to die, whatever happens
                run.end_by_signal(signal.Signals(number).name)
        self._let_go()
        os.kill(os.getpid(), number)


def _wait(endings: Endings, pipes: dict[int, tuple[int, int]], stop: tuple[int, int]) -> None:
    """Runs on a thread of its own, until a signal comes or the last run has ended."""
    waiting, ends = poll(), {read: number for number, (read, _) in pipes.items()}
    for end in (*ends, stop[0]):
        waiting.register(end)
    ready = [end for end, _ in waiting.poll()]
    if stop[0] not in ready:
        endings.end_by(ends[ready[0]])
    _close(pipes, stop)


def _close(pipes: dict[int, tuple[int, int]], stop: tuple[int, int]) -> None:
    for end in (*stop, *(end for pair in pipes.values() for end in pair)):
        os.close(end)


def _is_deadly(number: int) -> bool:
    """Whether the signal ends the process: nobody handles, ignores or blocks it, in Python or in C."""
    if signal.getsignal(number) != signal.SIG_DFL or number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return False
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        masks = dict(line.split(":", 1) for line in file if line.startswith(("SigIgn", "SigCgt")))
        return not any(int(mask, 16) >> (number - 1) & 1 for mask in masks.values())
    return True
