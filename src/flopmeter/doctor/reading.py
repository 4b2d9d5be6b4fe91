"""Can a run be written, read, diagnosed and reported? All of it without torch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from flopmeter.doctor._result import Result

ORDER = 20
LIMIT_S = 15.0
NEEDS_TORCH = False

NUM_STEPS = 50


def check() -> Result:
    from flopmeter.diagnosis import diagnose
    from flopmeter.record import RunWriter, load_run
    from flopmeter.report import render
    from flopmeter.schema import RUN_FILE

    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(Path(folder) / RUN_FILE)
        for line in made_up_run():
            writer.write(line)
        writer.close()
        run = load_run(folder)
        mfu = diagnose(run).mfu
        page = render(run, "html")
    if len(run) != NUM_STEPS or mfu is None:
        return Result(standing="broken", says=f"a run of {NUM_STEPS} steps was read back with {len(run)}, MFU {mfu}")
    says = f"a run of {NUM_STEPS} steps was written, read, diagnosed and made into a page of {len(page) / 1e6:.1f} MB"
    return Result(standing="works", says=says)


def made_up_run() -> list[dict[str, Any]]:
    """Steps of a second at an MFU of one half."""
    from flopmeter.schema import SCHEMA_VERSION

    metrics = {"perf/step_time": 1.0, "perf/mfu": 0.5, "perf/model_flop": 1e12}
    steps = [
        {"kind": "step", "step": step, "time": float(step), "metrics": {**metrics, "global_step": step}}
        for step in range(1, NUM_STEPS + 1)
    ]
    return [{"kind": "header", "schema": SCHEMA_VERSION, "started_at": 0.0, "device": "made up"}, *steps]
