"""How does a loop written with Accelerate log its MFU? By one line after `prepare`, and into the trackers it has.

    from flopmeter import watch

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    monitor = watch(model, optimizer, loader, output_dir="runs/mine", accelerator=accelerator)

A step is a step of the optimizer, so the batches that `accelerator.accumulate` gathers belong to one. Whenever the loop
calls `accelerator.log`, the trackers also get `perf/*` of the steps since the last time, and the run file gets what was
logged. `accelerator.end_training()` closes the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flopmeter.integrations import LAST_LOG_WAIT_S, harmless, library
from flopmeter.monitor import TrainingMonitor

with library("accelerate"):
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
    from accelerate.tracking import GeneralTracker, on_main_process  # type: ignore[import-untyped]


def prepared(
    accelerator: Accelerator, model: Any, optimizer: Any
) -> tuple[Any, Any, Callable[[TrainingMonitor], None]]:
    """What to measure of what `accelerator.prepare` gave back, and what makes the tracker."""
    optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    # First of all trackers: the others are still open when it logs for the last time.
    return model, optimizer, lambda monitor: accelerator.trackers.insert(0, FlopmeterTracker(monitor, accelerator))


class FlopmeterTracker(GeneralTracker):  # type: ignore[misc]
    """Stands among the trackers: hears what the loop logs, and gives `perf/*` to the others at the same step."""

    name = "flopmeter"
    requires_logging_directory = False

    def __init__(self, monitor: TrainingMonitor, accelerator: Accelerator) -> None:
        super().__init__()
        self._monitor = monitor
        self._accelerator = accelerator
        self._last_step: int | None = None
        self.is_off = False

    @property
    def tracker(self) -> TrainingMonitor:
        """The monitor."""
        return self._monitor

    @on_main_process  # type: ignore[untyped-decorator]
    @harmless
    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Record the numbers, and send on what was measured since the last time."""
        self._last_step = step
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
        self._monitor.log_metrics(numbers, step)
        self._send(self._monitor.latest(), step)

    def finish(self) -> None:
        """The loop is over, on every rank: what is left goes to the other trackers before they close."""
        self._send_the_rest()
        self._monitor.finish_training()

    @on_main_process  # type: ignore[untyped-decorator]
    @harmless
    def _send_the_rest(self) -> None:
        self._send(self._monitor.latest(LAST_LOG_WAIT_S), self._last_step)

    def _send(self, perf: dict[str, float], step: int | None) -> None:
        for tracker in self._accelerator.trackers if perf else ():
            if tracker is not self:
                tracker.log(perf, step=step)
