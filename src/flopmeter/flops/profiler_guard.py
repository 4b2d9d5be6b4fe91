"""May torch's profiler be started now, and who has to give way when two want it?

Torch records one session per process. A second one empties the trace of the first, or crashes the process; it does so
even while the first only warms up, when no flag of torch's tells of it. So every session that is not ours is noted
when it is prepared, ours starts only when there is none, and ends at once when the user's begins.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd import profiler as torch_profiler

from flopmeter.errors import CountError
from flopmeter.torch_compat import PROFILER_PATCHED, is_profiler_running, make_profiler, missing_profiler_name

logger = logging.getLogger("flopmeter")

MAX_WAIT_S = 30.0
"""How long a user's profiler on another thread waits for ours to finish its step: only its own thread can end it."""

# Kineto has one subscriber to CUPTI; whoever set one of these is it, or will be.
_OTHER_TOOLS = (
    "NSYS_PROFILING_SESSION_ID",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE",
    "NVPROF_ID",
    "KINETO_USE_DAEMON",
)
_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "6"


class Recording:
    """One session of ours: operators, by choice with their shapes or with the kernels that they launch.

    Started once, stopped once, both on the same thread.

    Args:
        with_shapes: Record what each operator was called with, which doubles the cost.
        devices: CUDA devices whose kernels are recorded and waited for. CUPTI stays attached afterwards, and may slow
            the run.
    """

    def __init__(self, *, with_shapes: bool = True, devices: Collection[torch.device] = ()) -> None:
        self.was_cut_short = False
        """The user started a profiler, and this session ended early; or the device could not be waited for."""
        self.ended = threading.Event()
        self.profiler: torch_profiler.profile | None = None
        self._with_shapes = with_shapes
        self._devices = devices
        self._thread = 0
        self._process = 0

    @property
    def is_in_its_process(self) -> bool:
        """False in a forked child, which inherits the object but not the session."""
        return os.getpid() == self._process

    @property
    def is_on_its_thread(self) -> bool:
        """Whether the calling thread is the one that may stop this session."""
        return self.is_in_its_process and threading.get_ident() == self._thread

    def start(self) -> None:
        """Begin to record.

        Raises:
            CountError: Something else is recording, or torch refuses.
        """
        with _sessions.lock:
            if reason := blocker():
                raise CountError(f"the step is not profiled: {reason}")
            self.profiler = make_profiler(with_shapes=self._with_shapes, with_kernels=bool(self._devices))
            self._thread, self._process = threading.get_ident(), os.getpid()
            _sessions.own = self
            try:
                with _silent_kineto():
                    self.profiler.__enter__()  # type: ignore[no-untyped-call]
            except Exception as error:
                _sessions.own = self.profiler = None
                raise CountError(f"torch's profiler does not start: {error}") from error
            atexit.register(self._stop_at_exit)
            _let_children_end()

    def stop(self) -> list[Any]:
        """End the session and hand out its raw events; empty when it was cut short or has ended before."""
        results = self._end()
        return results.events() if results is not None else []

    def give_way(self) -> None:
        """End early, and throw away what was recorded."""
        self.was_cut_short = True
        try:
            self._end()
        except Exception as error:  # noqa: BLE001 - called from inside the user's profiler, which must start
            logger.warning("flopmeter's profiler session did not end cleanly: %s: %s", type(error).__name__, error)

    def _end(self) -> Any:
        with _sessions.lock:
            if self.profiler is None:
                return None
            if not self.is_on_its_thread:
                raise CountError("a profiled step must be stopped on the thread that started it: stop it there")
            ended, self.profiler, _sessions.own = self.profiler, None, None
            atexit.unregister(self._stop_at_exit)
            is_whole = ended.use_device is None or _has_synchronized(self._devices)
            ended.use_device = None  # torch waits before it ends the session, and a wait that fails leaves it running
            try:
                ended.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            finally:
                self.ended.set()
            # Dropped by hand: with garbage collection off, as large runs have it, nothing else would.
            results, ended.kineto_results = ended.kineto_results, None
            self.was_cut_short = self.was_cut_short or not is_whole
            return results if is_whole else None

    def _stop_at_exit(self) -> None:
        """A session that still runs when the interpreter ends crashes it."""
        if self.is_on_its_thread:
            self.give_way()


def _has_synchronized(devices: Collection[torch.device]) -> bool:
    """Wait until the devices have done what was recorded, unless that would spoil a graph that is being captured.

    Each by its name: the current one may be another, on which a wait would even make a context.
    """
    try:
        if torch.cuda.is_current_stream_capturing():
            return False
        for device in devices:
            torch.cuda.synchronize(device)
    except Exception:  # noqa: BLE001 - the user's own error on the device: their next call shall report it, not ours
        return False
    return True


class _Sessions:
    """All profiler sessions of the process that are prepared or running."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.own: Recording | None = None
        self.foreign: WeakSet[torch_profiler.profile] = WeakSet()
        self.is_watching = False

    def watch(self) -> None:
        """From here on, note every session that others prepare; those that are under way are found once."""
        with self.lock:
            if self.is_watching:
                return
            for name in PROFILER_PATCHED:
                setattr(torch_profiler.profile, name, _wrapped(name, getattr(torch_profiler.profile, name)))
            self.foreign.update(_under_way())
            self.is_watching = True

    def is_ours(self, session: torch_profiler.profile) -> bool:
        return self.own is not None and self.own.profiler is session

    def make_way(self, session: torch_profiler.profile) -> None:
        """A session of the user's is about to be prepared: ours has to end first."""
        with self.lock:
            self.foreign.add(session)
            own = self.own
            if own is not None and own.is_on_its_thread:
                own.give_way()
        if own is not None and own.is_in_its_process and not own.ended.wait(MAX_WAIT_S):
            logger.warning("a profiler was started on another thread while flopmeter profiled a step: both may fail")


_sessions = _Sessions()


def watch() -> None:
    """Begin to note other people's profiler sessions; called early, it spares the search for those under way."""
    if missing_profiler_name() is None:
        _sessions.watch()


def blocker() -> str | None:
    """Why a profiler session of ours must not start now, or None when it may."""
    if missing := missing_profiler_name():
        return f"this torch has no {missing}, by which other profilers are noticed"
    _sessions.watch()
    if _sessions.own is not None:
        return "another step is being profiled by flopmeter"
    if _sessions.foreign:
        return "another profiler session is prepared or running"
    if is_profiler_running():
        return "another profiler is running"
    tool = next((name for name in _OTHER_TOOLS if os.environ.get(name)), None)
    if tool is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return f"another tool may be using CUPTI ({tool} is set)"
    return None


_children_can_end = False


def _let_children_end() -> None:
    """Once a profiler has run, a child that is forked and ends by `exit` waits for ever, or aborts: mend that.

    Kineto waits there for a thread of its own, which a fork does not copy. So a child leaves before that: handlers of
    `exit` run in reverse order, ours after all that the child has registered and before what the parent had.
    """
    global _children_can_end
    libc = ctypes.CDLL(None) if sys.platform == "linux" and not _children_can_end else None
    _children_can_end = True
    if libc is None or not all(hasattr(libc, name) for name in ("on_exit", "fcloseall")):
        return  # only glibc tells a handler the exit code
    leave, close_files = (ctypes.cast(function, ctypes.c_void_p) for function in (libc._exit, libc.fcloseall))

    def leave_early() -> None:
        libc.on_exit(leave, None)
        libc.on_exit(close_files, None)

    os.register_at_fork(after_in_child=leave_early)


@contextmanager
def _silent_kineto() -> Iterator[None]:
    """Kineto reads its log level when it first starts, and would print a line for every start and stop of ours."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = _SILENT
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


def _wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def prepare(self: torch_profiler.profile, *args: Any, **kwargs: Any) -> Any:
        if not _sessions.is_ours(self):
            _sessions.make_way(self)
        return original(self, *args, **kwargs)

    @wraps(original)
    def leave(self: torch_profiler.profile, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            _sessions.foreign.discard(self)

    return prepare if name == "_prepare_trace" else leave


def _under_way() -> list[torch_profiler.profile]:
    """Sessions that were prepared before anyone watched, and have not ended."""
    return [
        item
        for item in gc.get_objects()
        if type(item) is torch_profiler.profile
        and getattr(item, "entered", False)
        and not getattr(item, "profiling_end_time_ns", 0)
    ]
