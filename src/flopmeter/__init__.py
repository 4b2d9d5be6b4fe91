"""The true MFU of any PyTorch training run, at a cost too small to notice, and why it is not higher.

    from flopmeter import TrainingMonitor

    with TrainingMonitor("runs/mine", model=model) as monitor:
        for step, batch in enumerate(monitor.batches(loader)):
            loss = train(batch)
            monitor.log_step(step, epoch=0, loss=loss, grad_norm=None, learning_rate=None)

Names are loaded on first use, so that reading a run file never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from flopmeter.config import MonitorConfig as MonitorConfig
    from flopmeter.devices import Peak as Peak
    from flopmeter.devices import peak_flops as peak_flops
    from flopmeter.diagnosis import Diagnosis as Diagnosis
    from flopmeter.diagnosis import diagnose as diagnose
    from flopmeter.errors import ConfigError as ConfigError
    from flopmeter.errors import CountError as CountError
    from flopmeter.errors import FlopmeterError as FlopmeterError
    from flopmeter.errors import MissingLibraryError as MissingLibraryError
    from flopmeter.errors import RecordError as RecordError
    from flopmeter.errors import TraceError as TraceError
    from flopmeter.errors import UnknownDeviceError as UnknownDeviceError
    from flopmeter.flops.count import count_flops as count_flops
    from flopmeter.flops.flop_count import FlopCount as FlopCount
    from flopmeter.flops.formulas import formula as formula
    from flopmeter.monitor import TrainingMonitor as TrainingMonitor
    from flopmeter.monitor import watch as watch
    from flopmeter.record import Run as Run
    from flopmeter.record import load_run as load_run
    from flopmeter.report import write_report as write_report

_HOME = {
    "FlopmeterError": "errors",
    "ConfigError": "errors",
    "UnknownDeviceError": "errors",
    "RecordError": "errors",
    "CountError": "errors",
    "TraceError": "errors",
    "MissingLibraryError": "errors",
    "Diagnosis": "diagnosis",
    "FlopCount": "flops.flop_count",
    "MonitorConfig": "config",
    "Peak": "devices",
    "Run": "record",
    "TrainingMonitor": "monitor",
    "count_flops": "flops.count",
    "diagnose": "diagnosis",
    "formula": "flops.formulas",
    "load_run": "record",
    "peak_flops": "devices",
    "watch": "monitor",
    "write_report": "report",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'flopmeter' has no attribute {name!r}") from None
    try:
        return getattr(import_module(f"flopmeter.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from flopmeter.errors import MissingLibraryError

        raise MissingLibraryError("torch", needed_for=f"flopmeter.{name}", extra="torch") from None


def __dir__() -> list[str]:
    return sorted(__all__)
