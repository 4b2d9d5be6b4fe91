"""May torch's profiler be started now, and who has to give way when two want it?

Torch records one session per process. A second one empties the trace of the first, or crashes the process; it does so
even while the first only warms up, when no flag of torch's shows it. So every session that is not ours is noted
when it is prepared, ours starts only when there is none, and ends at once when the user's begins on the same thread.
Where it begins on another one, nobody waits: ours is lost, records no more, and is put away on its own thread once
theirs has ended.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd import profiler as torch_profiler

from flopmeter.errors import CountError
from flopmeter.hook_hiding import replace_attribute
from flopmeter.profiling.recorded import NODE, Range
from flopmeter.torch_compat import (
    PROFILER_PATCHED,
    is_profiler_running,
    kineto_settings_thread,
    make_profiler,
    missing_profiler_name,
    pause_profiler_here,
)

logger = logging.getLogger("flopmeter")

# CUPTI serves one tool at a time. Where one of these is set, that tool is not Kineto.
_OTHER_TOOLS = (
    "NSYS_PROFILING_SESSION_ID",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE",
    "NVPROF_ID",
    "KINETO_USE_DAEMON",
)
_BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION
_USER_SCOPE = 7  # at::RecordScope::USER_SCOPE
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
        self.is_lost = False
        """The user started a profiler on another thread, and torch's recorder is theirs: to end ours would crash."""
        self.profiler: torch_profiler.profile | None = None
        self._with_shapes = with_shapes
        self._devices = devices
        self._thread = 0
        self._process = 0
        self._unwatch: Callable[[], None] = lambda: None

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
            self._unwatch = watch()
            self.profiler = make_profiler(with_shapes=self._with_shapes, with_kernels=bool(self._devices))
            self._thread, self._process = threading.get_ident(), os.getpid()
            _sessions.own = self
            try:
                with _silent_kineto():
                    self.profiler.__enter__()  # type: ignore[no-untyped-call]
            except Exception as error:
                _sessions.own = self.profiler = None
                self._unwatch()
                raise CountError(f"torch's profiler does not start: {error}") from error
            atexit.register(self._stop_at_exit)
            _end_kineto_thread_before_forks()

    def give_way(self) -> None:
        """End early, and throw away what was recorded. On another thread than its own it only becomes unwanted."""
        self.was_cut_short = True
        if not self.is_on_its_thread:
            return
        try:
            self.stop()
        except Exception as error:  # noqa: BLE001 - called from inside the user's profiler, which must start
            logger.warning("flopmeter's profiler session did not end cleanly: %s: %s", type(error).__name__, error)

    def stop(self) -> list[Any]:
        """End the session and hand out its raw events; empty when it was cut short or has ended before."""
        with _sessions.lock:
            if self.profiler is None:
                return []
            if not self.is_on_its_thread:
                raise CountError("a profiled step must be stopped on the thread that started it: stop it there")
            ended = self.profiler
            if self.is_lost and _sessions.foreign:
                # Theirs still runs. On this thread nothing more is recorded; the rest has to wait.
                pause_profiler_here()
                return []
            is_whole = not self.is_lost and (ended.use_device is None or _has_synchronized(self._devices))
            end_ns = time.time_ns()
            ended.use_device = None  # torch waits before it ends the session, and a wait that fails leaves it running
            try:
                if self.is_lost:  # without a trace to end, torch would crash
                    ended._prepare_trace()  # type: ignore[no-untyped-call]
                ended.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            finally:
                self.profiler = _sessions.own = None
                atexit.unregister(self._stop_at_exit)
                self._unwatch()
            # Dropped by hand: with garbage collection off, as large runs have it, nothing else would.
            results, ended.kineto_results = ended.kineto_results, None
            self.was_cut_short = self.was_cut_short or not is_whole
            events: list[Any] = results.events() if results is not None else []
            _sessions.has_open_range |= any(_is_open(event, end_ns) for event in events)
            return events if is_whole else []

    def _stop_at_exit(self) -> None:
        """A session that still runs when the interpreter ends crashes it."""
        if self.is_on_its_thread:
            self.give_way()


def range_of(raw: Any) -> Range:
    """What the host did, from torch's own record of it."""
    name, start_ns = raw.name(), raw.start_ns()
    is_node = raw.scope() == _BACKWARD_SCOPE or name.startswith(NODE)
    return Range(
        name,
        start_ns,
        start_ns + raw.duration_ns(),
        -1 if raw.is_async() else raw.start_thread_id(),  # what ends on another thread nests in nothing there
        raw.sequence_nr(),
        is_node,
        raw.fwd_thread_id() if is_node else 0,
        raw.correlation_id(),
    )


def _is_open(event: Any, end_ns: int) -> bool:
    """Whether it is a range of the program's that had not ended with the session. Torch before 2.12 leaves it out."""
    is_range = event.scope() == _USER_SCOPE and not event.is_async() and not event.name().startswith("Optimizer.")
    return bool(is_range and event.start_ns() + event.duration_ns() >= end_ns)


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
        self.has_collided = False
        """Whether the user has started a profiler on another thread while ours ran: they may do so again."""
        self.has_open_range = False
        """Whether a session of ours has ended inside a `record_function` of the program's. Torch writes the end of that
        range into memory that it has freed, if another session runs by then, and nobody tells when it is closed."""
        self.watchers: list[Callable[[], None]] = []
        """Each is called when a session of the user's is about to begin, on the user's thread."""
        self.undo: list[Callable[[], None]] = []

    def make_way(self, session: torch_profiler.profile) -> None:
        """A session of the user's is about to be prepared: ours has to end first, or is lost."""
        for give_way in tuple(self.watchers):
            give_way()
        with self.lock:
            own = self.own
            if own is not None and own.is_on_its_thread:
                own.give_way()
            elif own is not None and own.is_in_its_process:
                own.is_lost = own.was_cut_short = self.has_collided = True
            self.foreign.add(session)


_sessions = _Sessions()


def watch(on_foreign: Callable[[], None] | None = None) -> Callable[[], None]:
    """Note other people's profiler sessions until what is given back is called; then torch is as it was.

    Called early, it spares the search for those under way.

    Args:
        on_foreign: Called when one is about to begin, on the thread where it does. Must not raise.
    """
    if missing_profiler_name() is not None:
        return lambda: None
    watcher = on_foreign if on_foreign is not None else lambda: None
    with _sessions.lock:
        if not _sessions.watchers:
            _sessions.foreign, _sessions.has_open_range = WeakSet(_under_way()), False
            _sessions.undo = [
                replace_attribute(torch_profiler.profile, name, _noticed(name)) for name in PROFILER_PATCHED
            ]
        _sessions.watchers.append(watcher)

    def unwatch() -> None:
        with _sessions.lock:
            if watcher in _sessions.watchers:
                _sessions.watchers.remove(watcher)
                while not _sessions.watchers and _sessions.undo:
                    _sessions.undo.pop()()

    return unwatch


def foreign_profiler() -> str | None:
    """Which profiler that is not ours is at work, if any."""
    if _sessions.foreign if _sessions.watchers else _under_way():
        return "another profiler session is prepared or running"
    return "another profiler is running" if _sessions.own is None and is_profiler_running() else None


def blocker() -> str | None:
    """Why a profiler session of ours must not start now, or None when it may."""
    if missing := missing_profiler_name():
        return f"this torch has no {missing}, by which other profilers are noticed"
    if hasattr(os, "fork") and _kineto() is None:
        return "a process that is forked after a profile would not end with this torch"
    own = _sessions.own
    if own is not None and own.is_lost:
        own.give_way()
    if _sessions.has_collided:
        return "the program profiles on another thread than the one that trains"
    if _sessions.has_open_range:
        return "the program was inside a record_function when the last profile ended, and torch might crash"
    if _sessions.own is not None:
        return "another step is being profiled by flopmeter"
    if reason := foreign_profiler():
        return reason
    tool = next((name for name in _OTHER_TOOLS if os.environ.get(name)), None)
    if tool is not None and (tool.startswith("KINETO") or torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return f"another tool may be using CUPTI ({tool} is set)"
    return None


def step_blocker() -> str | None:
    """Why no step of a training loop may be profiled now, or None when it may.

    A thread that ends in a profiled step takes the session with it, and the interpreter crashes at its end.
    """
    if threading.current_thread() is not threading.main_thread():
        return "the loop does not run on the main thread, where torch's profiler wants to be started"
    return blocker()


@cache
def _kineto() -> Callable[[], None] | None:
    """Gives what ends the thread that kineto starts with its first session, to read its settings again now and then."""
    try:
        instance, stop = kineto_settings_thread()
    except (OSError, AttributeError):
        return None
    instance.restype, stop.argtypes, stop.restype = ctypes.c_void_p, [ctypes.c_void_p], None
    return lambda: stop(instance())


@cache
def _end_kineto_thread_before_forks() -> None:
    """Once a profiler has run, a child that is forked and ends by `exit` waits there for that thread, which it has not.

    So the thread ends in the parent before there is a child, which is left alone.
    """
    stop = _kineto()
    if stop is not None and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=stop)


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


def _noticed(name: str) -> Callable[..., Any]:
    """A method of torch's profiler, with a note for us that a session of the user's is prepared, or has ended."""
    original = getattr(torch_profiler.profile, name)
    begins = name == "_prepare_trace"

    @wraps(original)
    def call(self: torch_profiler.profile, *args: Any, **kwargs: Any) -> Any:
        if begins and not (_sessions.own is not None and _sessions.own.profiler is self):
            _sessions.make_way(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            if not begins:
                _sessions.foreign.discard(self)

    return call


def _under_way() -> list[torch_profiler.profile]:
    """Sessions that were prepared before anyone watched, and have not ended."""
    return [
        item
        for item in gc.get_objects()
        if type(item) is torch_profiler.profile
        and getattr(item, "entered", False)
        and not getattr(item, "profiling_end_time_ns", 0)
    ]
