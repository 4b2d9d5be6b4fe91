"""Which calls to CUDA does the timeline need? These five, on a pool of events for one device.

    timeline = timeline_of(next(model.parameters()).device)

Nothing here runs before `torch.cuda.is_initialized()`: a context of ours would take memory on GPU 0 and break a later
fork. On a build without CUDA most of these names raise when called, so they are looked up only when they are needed.

How long does a GPU wait for FSDP2's collectives? The host does not block there, so events around the waits tell.

Three places of torch's, private and looked for before they are used: `FSDPParamGroup.wait_for_unshard`, where the
computing stream is told to wait for gathered weights, `FSDPParamGroup.post_backward`, where it waits for the gradients
of a layer before, whose memory is wanted again, and `FSDPState._root_post_backward_final_callback`, where it waits for
the last gradients. The first two do other work as well: there the wait is made once more before it, by itself, between
two events. A model of many layers has hundreds of waits, so that only one step in so many is
looked at; and none with CUDA_DEVICE_MAX_CONNECTIONS=1, where events beside collectives would cost their overlap.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch

from flopmeter.hook_hiding import replace_attribute
from flopmeter.schema import PHASES
from flopmeter.timing.events import DeviceTimeline, EventSource, has_one_connection
from flopmeter.torch_compat import FSDP2_WAITS

logger = logging.getLogger("flopmeter")

NUM_EVENTS = 512
"""Per device: 64 micro-batches that the host may be ahead. Torch creates each one at its first record."""
NUM_WAIT_EVENTS = 1024
"""For the waits of one step of FSDP2: 128 layers, gathered twice, and some more."""


class CudaApi(Protocol):
    """What is used of `torch.cuda`; tests pass a stub that knows the rules."""

    def is_initialized(self) -> bool: ...

    def is_current_stream_capturing(self) -> bool: ...

    def current_stream(self, device: int) -> Any: ...

    def Event(self, enable_timing: bool) -> Any: ...  # noqa: N802 - torch's name


class CudaEvents:
    """Timing events of one device, recorded on the stream that is current there.

    Args:
        device: Index of the model's device, which need not be the current one: an event belongs to the device of its
            first record, and another device's stream raises.
    """

    def __init__(self, device: int, *, num_events: int = NUM_EVENTS, cuda: CudaApi | None = None) -> None:
        self.num_events = num_events
        self._device = device
        self._cuda: CudaApi = cuda if cuda is not None else torch.cuda
        self._events: list[Any] = []

    def initialized(self) -> bool:
        return self._cuda.is_initialized()

    def capturing(self) -> bool:
        # `torch.cuda.graph` makes its stream and device the current ones, so this sees captures on any device.
        return self._cuda.is_current_stream_capturing()

    def record(self, slot: int) -> None:
        if not self._events:
            self._events = [self._cuda.Event(enable_timing=True) for _ in range(self.num_events)]
        self._events[slot].record(self._cuda.current_stream(self._device))

    def query(self, slot: int) -> bool:
        return bool(self._events[slot].query())

    def elapsed_ms(self, first: int, second: int) -> float:
        return float(self._events[first].elapsed_time(self._events[second]))


def waits_of(device: torch.device, phase: Callable[[], int]) -> ShardedWaits | None:
    """What tells how long the device waits for FSDP2; None where there are no events."""
    if device.type != "cuda" or device.index is None:
        return None
    return ShardedWaits(CudaEvents(device.index, num_events=NUM_WAIT_EVENTS), phase)


def timeline_of(device: torch.device) -> DeviceTimeline | None:
    """A timeline with its own pool of events; None where there are none, and the host's times are the truth."""
    if device.type != "cuda" or device.index is None:
        return None
    return DeviceTimeline(CudaEvents(device.index))


class ShardedWaits:
    """Seconds that the device waited, by phase, on sampled steps. Never raises: the first failure switches it off.

    Args:
        source: Events of its own; a step with more waits than half of them is not told.
        phase: Gives the phase that runs now, as an index into `schema.PHASES`; a larger one is a pause.
    """

    def __init__(self, source: EventSource, phase: Callable[[], int]) -> None:
        self._source = source
        self._phase = phase
        self._is_sampling = False
        self._is_off = has_one_connection()
        self._is_whole = True
        self._phases: list[int] = []
        self._num_marks = 0
        self._step: int | None = None
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Start listening; without all of torch's names nothing is told, since half of the waits would mislead."""
        makers = (self._unsharding, self._reducing, self._finishing)
        try:
            owners = [(getattr(import_module(module), owner), name) for module, owner, name in FSDP2_WAITS]
            originals = [getattr(owner, name) for owner, name in owners]
        except (ImportError, AttributeError) as error:
            logger.info("waits of FSDP2 are not measured: %s", error)
            return
        for (owner, name), make, original in zip(owners, makers, originals, strict=True):
            self._undo.append(replace_attribute(owner, name, make(original)))

    def detach(self) -> None:
        """Take everything away again. Safe to call twice."""
        self._is_sampling = False
        while self._undo:
            self._undo.pop()()

    def end_step(self, number: int, *, begins: bool) -> None:
        """The host has ended a step.

        Args:
            begins: Whether the next one is to be looked at.
        """
        if self._is_sampling:
            self._is_sampling = False
            self._step = number if self._is_whole else None
        elif begins and not self._is_off:
            self._phases, self._num_marks, self._step = [], 0, None
            self._is_sampling = self._is_whole = True

    def take(self, number: int) -> dict[str, float] | None:
        """Seconds by phase of a step that the device has finished; None for one that was not looked at."""
        if number != self._step or self._is_off:
            return None
        self._step = None
        waited_s: dict[str, float] = defaultdict(float)
        try:
            for wait, phase in enumerate(self._phases):
                if phase < len(PHASES):
                    waited_s[PHASES[phase]] += self._source.elapsed_ms(2 * wait, 2 * wait + 1) / 1e3
        except Exception as error:  # noqa: BLE001 - most likely the user's own, which their next call reports
            self._switch_off(error)
            return None
        return dict(waited_s)

    def _unsharding(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def wait_for_unshard(group: Any) -> Any:
            if self._is_sampling:
                self._wait(group, getattr(getattr(group, "_all_gather_result", None), "all_gather_event", None))
            return original(group)

        return wait_for_unshard

    def _reducing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def post_backward(group: Any, *args: Any) -> Any:
            states = getattr(group.comm_ctx, "reduce_scatter_states", ())
            num_done = len(states) - getattr(group.comm_ctx, "reduce_scatter_max_input_buffers", math.inf)
            if self._is_sampling and num_done >= 0 and group._param_group_index == group._num_param_groups - 1:
                self._wait(group, states[int(num_done)].event)  # the last of those whose memory is taken
            return original(group, *args)

        return post_backward

    def _wait(self, group: Any, event: Any) -> None:
        if event is not None:
            self._mark()
            group.device_handle.current_stream().wait_event(event)
            self._mark()

    def _finishing(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def finish(state: Any) -> Any:
            if not self._is_sampling:
                return original(state)
            self._mark()
            try:
                return original(state)
            finally:
                self._mark()

        return finish

    def _mark(self) -> None:
        """The first mark of a wait, or its second."""
        if not self._is_whole:
            return
        try:
            if self._num_marks >= self._source.num_events or self._source.capturing():
                self._is_whole = False
                return
            self._source.record(self._num_marks)
        except Exception as error:  # noqa: BLE001 - from here it would end the user's pass
            self._switch_off(error)
            return
        if self._num_marks % 2 == 0:
            self._phases.append(self._phase())
        self._num_marks += 1

    def _switch_off(self, error: Exception) -> None:
        self._is_sampling = self._is_whole = False
        self._is_off = True
        logger.warning("waits of FSDP2 are not measured from here on: %s: %s", type(error).__name__, error)
