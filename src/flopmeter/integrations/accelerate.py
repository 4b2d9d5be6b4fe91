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
from os import PathLike
from typing import Any

from torch import nn
from torch.optim import Optimizer

import flopmeter
from flopmeter.errors import MissingLibraryError
from flopmeter.integrations import harmless
from flopmeter.monitor import TrainingMonitor
from flopmeter.monitor import watch as watch_loop

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
    from accelerate.tracking import GeneralTracker, on_main_process  # type: ignore[import-untyped]
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise MissingLibraryError("accelerate", needed_for="flopmeter.integrations.accelerate") from error

LAST_LOG_WAIT_S = 2.0


def watch(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    loader: Any = None,
    output_dir: str | PathLike[str] = "runs/run",
    config: str | PathLike[str] | Mapping[str, Any] | flopmeter.MonitorConfig | None = None,
    accelerator: Accelerator | None = None,
    log: Callable[[Mapping[str, float], int], object] | None = None,
) -> TrainingMonitor:
    """As `flopmeter.watch`, for what `accelerator.prepare` gave back."""
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    monitor = watch_loop(model, optimizer, loader, output_dir, config, log=log)
    if accelerator is not None:
        # First of all trackers: the others are still open when it logs for the last time.
        accelerator.trackers.insert(0, FlopmeterTracker(monitor, accelerator))
    return monitor


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
