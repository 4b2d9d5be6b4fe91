"""How does torchtitan log its MFU? By a metrics processor in the place of its own.

    from flopmeter.integrations.torchtitan import FlopmeterProcessor

    config.metrics = FlopmeterProcessor.Config(log_freq=10, output_dir="runs/mine")      # in the job's configuration

torchtitan asks its processor before each step whether to log that one: at the first question the model's parts are
there, split and wrapped as they will be trained, and the monitor is attached to them. `perf/*` of the steps since the
last log join torchtitan's own metrics; its own `mfu(%)` stays beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flopmeter
from flopmeter.integrations import LAST_LOG_WAIT_S, NO_SINKS, harmless, library
from flopmeter.monitor import TrainingMonitor

with library("torchtitan"):
    from torchtitan.components.metrics import MetricsProcessor  # type: ignore[import-not-found]


class FlopmeterProcessor(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's processor, and the monitor of the run."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """torchtitan's settings and two more."""

        output_dir: str = ""
        """Where `run.jsonl` goes; empty: the job's `dump_folder`."""
        monitoring: dict[str, Any] = field(default_factory=lambda: dict(NO_SINKS["monitoring"]))
        """flopmeter's section `monitoring`. torchtitan logs by itself, so no sink is on."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.monitor: TrainingMonitor | None = None
        self.is_off = False
        self._last_step = 0
        self._output_dir = Path(config.output_dir or parts.get("dump_folder") or "./outputs")
        self._monitoring = flopmeter.MonitorConfig(monitoring=config.monitoring)  # a wrong setting shows here

    def should_log(self, step: int) -> bool:
        """Asked before every step, on every rank."""
        if self.monitor is None and not self.is_off and self.model_parts:
            self._attach()
        return bool(super().should_log(step))

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Record the numbers, and log them with what was measured since the last time."""
        more = dict(extra_metrics or {})
        self._note(step, global_avg_loss, grad_norm, more)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, more)

    def close(self) -> None:
        """The training is over."""
        if self.monitor is not None:
            self._log_the_rest()
            self.monitor.finish_training()
        super().close()

    @harmless
    def _attach(self) -> None:
        parts, optimizers = self.model_parts, getattr(self.optimizers, "optimizers", None)
        # Each part has an optimizer of its own, which step one after the other: the last one's step ends the step.
        last = list(optimizers)[-1] if optimizers else None
        monitor = TrainingMonitor(self._output_dir, self._monitoring, optimizer=last)
        monitor.set_model_ref(*parts)
        monitor.start_training(has_joined=True)
        self.monitor = monitor

    @harmless
    def _log_the_rest(self) -> None:
        if self.monitor is not None and (perf := self.monitor.latest(LAST_LOG_WAIT_S)):
            self.logger.log(perf, self._last_step)

    @harmless
    def _note(self, step: int, loss: float, grad_norm: float, metrics: dict[str, Any]) -> None:
        self._last_step = step
        if self.monitor is not None:
            rate = next((value for key, value in metrics.items() if "lr" in key), None)
            self.monitor.log_step(step, None, loss, grad_norm, rate)
            metrics |= self.monitor.latest()
