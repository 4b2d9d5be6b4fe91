"""How is a loop monitored that tells us nothing? By hooks on what it trains with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from os import PathLike
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from flopmeter.config import MonitorConfig
from flopmeter.errors import ConfigError
from flopmeter.monitor.training_monitor import TrainingMonitor


def watch(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    loader: Any = None,
    output_dir: str | PathLike[str] = "runs/run",
    config: str | PathLike[str] | Mapping[str, Any] | MonitorConfig | None = None,
    accelerator: Any = None,
) -> TrainingMonitor:
    """Monitor a loop by hooks alone: phases, steps and FLOPs without a line of code in it.

    `log_step` is only needed to have loss and learning rate in the record too.

    Args:
        accelerator: The `Accelerator` or `Fabric` that prepared the model, where there is one.
    """
    if accelerator is not None:
        return _watch_prepared(accelerator)(model, optimizer, loader, output_dir, config, accelerator)
    monitor = TrainingMonitor(output_dir, config, model=model, optimizer=optimizer, loader=loader)
    monitor.start_training()
    return monitor


def _watch_prepared(accelerator: Any) -> Callable[..., TrainingMonitor]:
    """`watch` of the integration that carries the name of the framework which the object comes from."""
    framework = type(accelerator).__module__.partition(".")[0]
    try:
        return cast(Callable[..., TrainingMonitor], import_module(f"flopmeter.integrations.{framework}").watch)
    except (ImportError, AttributeError):
        kind = f"{type(accelerator).__module__}.{type(accelerator).__qualname__}"
        raise ConfigError(f"accelerator: accelerate's Accelerator or lightning's Fabric, not {kind}") from None
