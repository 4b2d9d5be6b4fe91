"""Which destinations for live numbers can be opened here?"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from flopmeter.doctor._result import Result

ORDER = 90
LIMIT_S = 20.0
NEEDS_TORCH = False


def check() -> Result:
    from flopmeter.sinks import available_sinks

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_SILENT": "true"}
        reasons = {name: why_not(name, Path(folder)) for name in available_sinks()}
    good = [name for name, reason in reasons.items() if reason is None]
    bad = {name: reason for name, reason in reasons.items() if reason is not None}
    says = "; ".join([f"opened: {', '.join(good)}", *(f"not {name}: {reason}" for name, reason in bad.items())])
    return Result(standing="missing" if bad else "works", says=says)


def why_not(name: str, folder: Path) -> str | None:
    """Open the sink, send one number and close it; the reason if that fails. W&B stays offline."""
    from flopmeter.config import MonitorConfig
    from flopmeter.sinks import SinkContext, open_sink

    config = MonitorConfig.load({"prometheus": {"port": _free_port()}})
    try:
        sink = open_sink(name, SinkContext(config=config, output_dir=folder / name))
        sink.log(1, {"training/loss": 1.0})
        sink.close()
    except Exception as error:  # noqa: BLE001 - whatever keeps it from working is the answer
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
