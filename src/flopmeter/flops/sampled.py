"""Where did the time of this real step go? One step under torch's profiler, reduced at once and thrown away.

    sampled = SampledStep(model, "cpu")
    sampled.start()
    ...one training step...
    sampled.stop()
    sampled.profile.fields()

Only the raw results are read: torch's own parsing costs many times more than the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import time_ns
from typing import Any

import torch
from torch import nn

from flopmeter.devices.placement import devices_of
from flopmeter.flops.patching import surround_backward
from flopmeter.flops.profiler_guard import Recording, step_blocker
from flopmeter.flops.step_profile import Kernel, Marks, Range, Span, StepProfile, reduce_cpu, reduce_cuda
from flopmeter.flops.unseen import OwnHook, hide_hooks
from flopmeter.torch_compat import HAS_ACTIVITY_FILTERS, DeviceType, graph_task_id, is_launch

_BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION


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
        model: The object that the loop calls; without it forward passes are told by what surrounds them.
        device_type: Where it trains.
    """

    def __init__(self, model: nn.Module | None, device_type: str) -> None:
        self.profile: StepProfile | None = None
        """What the step came to; None when nothing was recorded, or another profiler cut it short."""
        self._model = model
        self.is_cuda = device_type == "cuda"
        """Whether kernels are recorded, by a tracer that stays attached."""
        self._recording = Recording(with_shapes=False, devices=devices_of(model) if self.is_cuda else ())
        self._forward: list[Span] = []
        self._backward: list[Span] = []
        self._graph_building: list[Span] = []
        self._start_ns = 0
        self._thread = 0
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to record.

        Raises:
            CountError: Another profiler is at work; `why_not` tells beforehand.
        """
        self._recording.start()
        self._thread = get_ident()
        self._undo.append(surround_backward(self._note_backward))
        # The compiler would look into a hook on a module that it has compiled in place.
        if self._model is not None and getattr(self._model, "_compiled_call_impl", None) is None:
            begin = _ForwardHook(self._thread)
            self._undo.append(self._model.register_forward_pre_hook(begin, prepend=True).remove)
            self._undo.append(self._model.register_forward_hook(_ForwardEndHook(begin, self._forward)).remove)
            self._undo.append(hide_hooks(self._model))
        self._start_ns = time_ns()

    def stop(self) -> None:
        """End the recording, reduce it, and give its memory back. Does nothing the second time."""
        end_ns = time_ns()
        while self._undo:
            self._undo.pop()()
        events = self._recording.stop()
        if events:
            self.profile = self._reduce(events, end_ns)

    def discard(self) -> None:
        """End the recording and throw it away."""
        while self._undo:
            self._undo.pop()()
        self._recording.give_way()

    def _reduce(self, events: list[Any], end_ns: int) -> StepProfile | None:
        ranges = list(_ranges(events))
        marks = Marks(
            step=(self._start_ns, end_ns),
            forward=self._forward or self._guessed_forward(ranges),
            backward=self._backward,
            graph_building=self._graph_building,
        )
        if not self.is_cuda:
            return reduce_cpu(ranges, marks)
        return reduce_cuda(ranges, _kernels(events), marks._replace(launches=_launches(events)))

    def _guessed_forward(self, ranges: Iterable[Range]) -> list[Span]:
        """From the last batch, or the step's beginning, to the first backward pass."""
        end_ns = min((start for start, _ in self._backward), default=self._start_ns)
        batches = [r.end_ns for r in ranges if r.name.startswith("enumerate(DataLoader)") and r.end_ns <= end_ns]
        return [(max(batches, default=self._start_ns), end_ns)]

    @contextmanager
    def _note_backward(self, builds_graph: bool) -> Iterator[None]:
        start_ns = time_ns()
        try:
            yield
        finally:
            span = (start_ns, time_ns())
            if get_ident() == self._thread:
                self._backward.append(span)
                if builds_graph:
                    self._graph_building.append(span)


class _ForwardHook(OwnHook):
    """Notes when the model's call begins."""

    __slots__ = ("start_ns", "thread")

    def __init__(self, thread: int) -> None:
        self.start_ns = 0
        self.thread = thread

    def __call__(self, *_: Any) -> None:
        if _is_outside() and get_ident() == self.thread:
            self.start_ns = time_ns()


class _ForwardEndHook(OwnHook):
    """Notes the whole call when it ends."""

    __slots__ = ("_begun", "_spans")

    def __init__(self, begun: _ForwardHook, spans: list[Span]) -> None:
        self._begun = begun
        self._spans = spans

    def __call__(self, *_: Any) -> None:
        if _is_outside() and self._begun.start_ns and get_ident() == self._begun.thread:
            self._spans.append((self._begun.start_ns, time_ns()))


def _is_outside() -> bool:
    """Whether the model is called by the loop, and not by the compiler or a backward pass."""
    return not torch.compiler.is_compiling() and graph_task_id() == -1


def _ranges(events: Iterable[Any]) -> Iterator[Range]:
    for raw in events:
        if raw.device_type() != DeviceType.CPU or is_launch(raw):
            continue
        start_ns = raw.start_ns()
        yield Range(
            raw.name(),
            start_ns,
            start_ns + raw.duration_ns(),
            # What ends on another thread nests in nothing there.
            -1 if raw.is_async() else raw.start_thread_id(),
            raw.sequence_nr(),
            raw.scope() == _BACKWARD_SCOPE,
            raw.correlation_id(),
        )


def _kernels(events: Iterable[Any]) -> Iterator[Kernel]:
    for raw in events:
        if raw.device_type() == DeviceType.CUDA and not raw.is_user_annotation():
            start_ns, end_ns = raw.start_ns(), raw.start_ns() + raw.duration_ns()
            ids = raw.correlation_id(), raw.linked_correlation_id()
            yield Kernel(raw.name(), start_ns, end_ns, raw.device_resource_id(), *ids)


def _launches(events: Iterable[Any]) -> dict[int, int]:
    return {raw.correlation_id(): raw.start_ns() for raw in events if is_launch(raw)}
