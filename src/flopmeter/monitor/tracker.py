"""What is the loop doing right now? Turns the hooks' calls into phases of the clock, marks on the device, and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any

from flopmeter.monitor.device_time import DeviceTime
from flopmeter.monitor.measuring import FlopSource
from flopmeter.monitor.workloads import WorkloadReader
from flopmeter.timing import BACKWARD, DATA_WAIT, FORWARD, HOST_TO_DEVICE, OPTIMIZER, OTHER, PAUSE, PhaseClock


class StepTracker:
    """Listens to the hooks. Its methods run on every step, on the training thread: they only move clocks.

    Args:
        on_start: Called before the first forward pass.
        on_step: Called when a step has ended: the optimizer stepped after a forward pass.
        on_failure: Told what went wrong in reading a batch, which must not stop the forward pass.
        event: Writes an event to the run file.
    """

    def __init__(
        self,
        on_start: Callable[[], None],
        on_step: Callable[[], None],
        on_failure: Callable[[str, Exception], None],
        event: Callable[..., None],
    ) -> None:
        self.clock = PhaseClock()
        self.source: FlopSource | None = None
        self.workloads: WorkloadReader | None = None
        self.device_time: DeviceTime | None = None
        self._on_start = on_start
        self._on_step = on_step
        self._on_failure = on_failure
        self._event = event
        self._has_forward = False
        self._has_stepped_in_backward = False
        self._is_first = True
        self._evaluating_since_ns: int | None = None

    def on_wait(self) -> None:
        self.end_evaluation()
        self._enter(DATA_WAIT, "data_wait")

    def on_batch(self) -> None:
        self._enter(HOST_TO_DEVICE, "host_to_device")

    def on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._is_first:
            self._on_start()
        self.end_evaluation()
        self._enter(FORWARD, "forward")
        self._has_forward = True
        if self.workloads is None or self.source is None:
            return
        try:
            if self._is_first:
                self.source.note_autocast()
            self._is_first = False
            self.workloads.see(args, kwargs)
        except Exception as error:  # noqa: BLE001 - an odd batch must not stop the forward pass
            self._on_failure("reading the batch", error)

    def on_forward_end(self) -> None:
        self.clock.switch(OTHER)  # no mark on the device: what the loss takes belongs to forward there

    def on_evaluation(self) -> None:
        if self._evaluating_since_ns is None and not self._is_first:  # before the first step it is start-up
            self._evaluating_since_ns = perf_counter_ns()
            self._enter(PAUSE, "pause")

    def on_backward(self) -> None:
        self._enter(BACKWARD, "backward")

    def on_backward_end(self) -> None:
        self._enter(OTHER, "other")
        if self._has_stepped_in_backward:
            self._has_stepped_in_backward = False
            self._on_step()

    def on_optimizer_in_backward(self) -> None:
        self._has_stepped_in_backward = True

    def on_optimizer(self) -> None:
        self._enter(OPTIMIZER, "optimizer")

    def on_optimizer_end(self) -> None:
        self.clock.switch(OTHER)
        if self._has_forward:  # several optimizers in a row belong to one step
            self._on_step()

    def end_evaluation(self) -> None:
        """The loop trains again: what lay between was a pause."""
        if self._evaluating_since_ns is not None:
            duration_s = (perf_counter_ns() - self._evaluating_since_ns) / 1e9
            self._evaluating_since_ns = None
            self.clock.switch(OTHER)
            self._event("pause", name="eval", duration_s=duration_s)

    def end_step(self) -> None:
        """The step is over: the next forward pass belongs to another."""
        self.end_evaluation()
        self._has_forward = False

    def _enter(self, phase: int, name: str) -> None:
        self.clock.switch(phase)
        if self.device_time is not None:
            self.device_time.mark(name)
