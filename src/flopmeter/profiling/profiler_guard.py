"""May torch's profiler be started now, who gives way when two want it, and where did the time of this real step go?

Torch records one session per process. A second one empties the trace of the first, or crashes the process; it does so
even while the first only warms up, when no flag of torch's shows it. So every session that is not ours is noted
when it is prepared, ours starts only when there is none, and ends at once when the user's begins on the same thread.
Where it begins on another one, nobody waits: ours is lost, records no more, and is put away on its own thread once
theirs has ended.

    sampled = SampledStep(model, "cpu")
    sampled.start()
    ...one training step...
    sampled.stop()
    sampled.profile["matmul_s"]

A sampled step is split at once (see `recorded`) and thrown away. Recording costs about a microsecond a range, so that
a profiled step is longer than an ordinary one, most of all where operators are tiny. Only the raw results are read:
torch's own parsing costs many times more than the recording.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from time import time_ns
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd import profiler as torch_profiler

from flopmeter.devices import devices_of
from flopmeter.errors import CountError
from flopmeter.hook_hiding import OwnHook, hide_hooks, replace_attribute, surround_backward
from flopmeter.profiling.recorded import LOADING, NODE, Kernel, Marks, Range, Span, reduce_cpu, reduce_cuda, side_spans
from flopmeter.torch_compat import (
    HAS_ACTIVITY_FILTERS,
    PROFILER_PATCHED,
    DeviceType,
    graph_task_id,
    is_launch,
    is_profiler_running,
    kineto_thread_end,
    make_profiler,
    missing_profiler_name,
    pause_profiler_here,
)

logger = logging.getLogger("flopmeter")

# CUPTI serves one tool at a time. Where one of these is set, that tool is not Kineto.
_OTHER_TOOLS = (
    *("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NVPROF_ID"),
    *("NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "KINETO_USE_DAEMON"),
)
_BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION
_USER_SCOPE = 7  # at::RecordScope::USER_SCOPE
_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "6"


class Recording:
    """One session of ours: operators, by choice with their shapes or with the kernels that they launch.

    Started once, stopped once, both on the same thread.

    Args:
        with_shapes: Record what each operator was called with, which doubles the cost.
        keep_at: Where torch writes what was recorded, as a Kineto file; None throws it away.
        devices: CUDA devices whose kernels are recorded and waited for. CUPTI stays attached afterwards, and may slow
            the run.
    """

    def __init__(
        self, *, with_shapes: bool = True, devices: Collection[torch.device] = (), keep_at: Path | None = None
    ) -> None:
        self.was_cut_short = False
        """The user started a profiler, and this session ended early; or the device could not be waited for."""
        self.is_lost = False
        """The user started a profiler on another thread, and torch's recorder is theirs: to end ours would crash."""
        self.profiler: torch_profiler.profile | None = None
        self._with_shapes, self._keep_at = with_shapes, keep_at
        self._devices = devices
        self.owner = (0, 0)
        """Process and thread that started it: a forked child inherits the object but not the session."""
        self._unwatch: Callable[[], None] = lambda: None
        self.undo: list[Callable[[], None]] = []
        """What was hooked or replaced for this session, and goes before it ends."""

    @property
    def is_on_its_thread(self) -> bool:
        """Whether the calling thread is the one that may stop this session."""
        return self.owner == (os.getpid(), threading.get_ident())

    def start(self) -> None:
        """Begin to record.

        Raises:
            CountError: Something else is recording, or torch refuses.
        """
        with _sessions.lock:
            self._unwatch = watch()  # first, so that sessions under way are searched for once
            if reason := blocker():
                self._unwatch()
                raise CountError(f"the step is not profiled: {reason}")
            self.profiler = make_profiler(with_shapes=self._with_shapes, with_kernels=bool(self._devices))
            self.owner = os.getpid(), threading.get_ident()
            _sessions.own = self
            # Kineto reads its log level when it first starts, and would print a line for every start and stop of ours.
            is_chatty = _LOG_LEVEL not in os.environ
            if is_chatty:
                os.environ[_LOG_LEVEL] = _SILENT
            try:
                self.profiler.__enter__()  # type: ignore[no-untyped-call]
            except Exception as error:
                _sessions.own = self.profiler = None
                self._unwatch()
                raise CountError(f"torch's profiler does not start: {error}") from error
            finally:
                if is_chatty:
                    os.environ.pop(_LOG_LEVEL, None)
            atexit.register(self.give_way)  # a session that still runs when the interpreter ends crashes it
            _end_kineto_thread_before_forks()

    def discard(self) -> None:
        """Throw away what was recorded. After a call on another thread its own has to call as well."""
        self._take_away()
        self.give_way()

    def give_way(self) -> None:
        """End early, and throw away what was recorded. On another thread than its own it only becomes unwanted."""
        self.was_cut_short = True
        if not self.is_on_its_thread:
            return
        try:
            self._end()
        except Exception as error:  # noqa: BLE001 - called from inside the user's profiler, which must start
            logger.warning("flopmeter's profiler session did not end cleanly: %s: %s", type(error).__name__, error)

    def stop(self) -> list[Any]:
        """End the session and hand out its raw events; empty when it was cut short or has ended before."""
        self._take_away()
        return self._end()

    def _take_away(self) -> None:
        while self.undo:
            self.undo.pop()()

    def _end(self) -> list[Any]:
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
                atexit.unregister(self.give_way)
                self._unwatch()
            # Dropped by hand: with garbage collection off, as large runs have it, nothing else would.
            results, ended.kineto_results = ended.kineto_results, None
            self.was_cut_short = self.was_cut_short or not is_whole
            if self._keep_at is not None and is_whole and results is not None:
                try:
                    results.save(str(self._keep_at))
                except Exception as error:  # noqa: BLE001 - a full disk costs the trace, not the step
                    logger.warning("the trace was not kept: %s: %s", type(error).__name__, error)
            events: list[Any] = results.events() if results is not None else []
            # Ranges of the program's that had not ended with the session; torch before 2.12 leaves them out.
            _sessions.has_open_range |= any(
                event.scope() == _USER_SCOPE and event.start_ns() + event.duration_ns() >= end_ns
                for event in events
                if not (event.is_async() or event.name().startswith("Optimizer."))
            )
            return events if is_whole else []


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
            elif own is not None and own.owner[0] == os.getpid():
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
    watcher = on_foreign or (lambda: None)
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
    if hasattr(os, "fork") and kineto_thread_end() is None:
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
def _end_kineto_thread_before_forks() -> None:
    """Once a profiler has run, a child that is forked and ends by `exit` waits there for that thread, which it has not.

    So the thread ends in the parent before there is a child, which is left alone.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=kineto_thread_end())


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


def why_not(device_type: str, *, is_asked_for: bool = False) -> str | None:
    """Why no step may be sampled now, or None when it may.

    Args:
        is_asked_for: The user wants it, whatever stays attached.
    """
    if device_type == "cuda" and not HAS_ACTIVITY_FILTERS and not is_asked_for:
        return f"torch {torch.__version__} would leave its tracer attached; profile_steps: true allows it"
    if device_type not in ("cpu", "cuda"):
        return f"steps on {device_type} are not sampled: nobody has tried it"
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return step_blocker()


class SampledStep:
    """One step under the profiler: `start` and `stop` on the training thread, never in the first steps of a run.

    `discard` may come from another thread; the training thread has to call it then as well.

    Args:
        model: The object that the loop calls; without it forward passes are known by what surrounds them.
        device_type: Where it trains.
        keep_at: Where the trace is kept, if it is.
    """

    def __init__(self, model: nn.Module | None, device_type: str, keep_at: Path | None = None) -> None:
        self.profile: dict[str, Any] | None = None
        """What the step came to; None when nothing was recorded, or another profiler cut it short."""
        self._model = model
        self.is_cuda = device_type == "cuda"
        """Whether kernels are recorded, by a tracer that stays attached."""
        devices = devices_of(model) if self.is_cuda else ()
        self._recording = Recording(with_shapes=False, devices=devices, keep_at=keep_at)
        self._side: list[Span] = []
        self._marks = Marks((0, 0), [], [], [], side=self._side)
        self._thread = 0

    def start(self) -> None:
        """Begin to record.

        Raises:
            CountError: Another profiler is at work; ask `why_not` first.
        """
        self._recording.start()
        self._thread = threading.get_ident()
        undo = self._recording.undo
        undo.append(surround_backward(self._note_backward))
        side_spans.append(self._side)
        undo.append(lambda: side_spans.remove(self._side))
        # The compiler would look into a hook on a module that it has compiled in place.
        if self._model is not None and getattr(self._model, "_compiled_call_impl", None) is None:
            hook = _CallHook(self._thread, self._marks.forward, self._side)
            undo.append(self._model.register_forward_pre_hook(hook, prepend=True).remove)
            undo.append(self._model.register_forward_hook(hook).remove)
            undo.append(hide_hooks(self._model))
        self._marks = self._marks._replace(step=(time_ns(), 0))

    def stop(self) -> None:
        """End the recording, reduce it, and give its memory back. Does nothing the second time."""
        end_ns = time_ns()
        events = self._recording.stop()
        if events:
            self.profile = self._reduce(events, end_ns)

    def discard(self) -> None:
        """End the recording and throw it away."""
        self._recording.discard()

    def _reduce(self, events: list[Any], end_ns: int) -> dict[str, Any] | None:
        launches = {raw.correlation_id(): raw.start_ns() for raw in events if is_launch(raw)} if self.is_cuda else {}
        ranges = [range_of(raw) for raw in events if raw.device_type() == DeviceType.CPU and not is_launch(raw)]
        start_ns, forward = self._marks.step[0], self._marks.forward
        if not forward:  # from the last batch, or the step's beginning, to the first backward pass
            until_ns = min((start for start, _ in self._marks.backward), default=start_ns)
            batches = [int(r.end) for r in ranges if r.name.startswith(LOADING) and r.end <= until_ns]
            forward = [(max(batches, default=start_ns), until_ns)]
        marks = self._marks._replace(step=(start_ns, end_ns), forward=forward, launches=launches)
        if not self.is_cuda:
            return reduce_cpu(ranges, marks)
        on_device = (raw for raw in events if raw.device_type() == DeviceType.CUDA and not raw.is_user_annotation())
        kernels = []
        for raw in on_device:
            ids = raw.device_resource_id(), raw.correlation_id(), raw.linked_correlation_id()
            kernels.append(Kernel(raw.name(), raw.start_ns(), raw.start_ns() + raw.duration_ns(), *ids))
        return reduce_cuda(ranges, kernels, marks)

    @contextmanager
    def _note_backward(self, builds_graph: bool) -> Iterator[None]:
        start_ns = time_ns()
        try:
            yield
        finally:
            span = (start_ns, time_ns())
            if threading.get_ident() == self._thread:
                self._marks.backward.append(span)
                if builds_graph:
                    self._marks.graph_building.append(span)


class _CallHook(OwnHook):
    """Notes the calls of the model by the loop, not by the compiler or a backward pass; it is put before and after."""

    __slots__ = ("_side", "_spans", "_start_ns", "_thread")

    def __init__(self, thread: int, spans: list[Span], side: list[Span]) -> None:
        self._start_ns = 0
        self._thread = thread
        self._spans, self._side = spans, side

    def __call__(self, module: nn.Module, inputs: Any, *output: Any) -> None:
        if torch.compiler.is_compiling() or graph_task_id() != -1 or threading.get_ident() != self._thread:
            return
        if not output:
            self._start_ns = time_ns()
        elif self._start_ns:
            (self._spans if torch.is_grad_enabled() else self._side).append((self._start_ns, time_ns()))
