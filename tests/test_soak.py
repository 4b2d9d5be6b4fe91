"""Nothing grows in a long run and nothing stays after a short one: the soak benchmark in its short form."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

for _library in ("psutil", "prometheus_client", "tensorboard", "wandb"):
    pytest.importorskip(_library, reason="every sink is on, and the process is looked at from outside")

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> dict[str, Any]:
    # The service of a test before this one in the same process has ended by now.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    command = [sys.executable, str(SCRIPT), "--short"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert answer.stdout, answer.stderr
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return result


def test_no_goal_is_missed(soak: dict[str, Any]) -> None:
    assert soak["missed"] == []


@pytest.mark.parametrize("trial", ["every sink", "no sink", "rank 0 of 2", "rank 1 of 2"])
def test_every_step_is_in_the_record_once(soak: dict[str, Any], trial: str) -> None:
    num_steps = 200 if "rank" in trial else 2000
    assert soak["runs"][trial]["record"] == {
        "num_steps": num_steps,
        "is_complete": True,
        "has_summary": True,
        "unreadable": 0,
    }


def test_fifty_runs_in_one_process_leave_nothing_behind(soak: dict[str, Any]) -> None:
    cycles = soak["cycles"]
    assert cycles["num_cycles"] == cycles["num_complete"] == 50
    assert {name: after for name, (_, after) in cycles["hooks"].items()} == {
        "forward_hooks": 0,
        "optimizer_hooks": 0,
        "backward": "torch.autograd",
        "engine": "torch.autograd.graph",
        "loader": "torch.utils.data.dataloader",
        "dispatch_modes": 0,
        "gc_callbacks": 0,
    }
    assert (cycles["monitors_alive"], cycles["left_for_exit"]) == (0, 0)
    for kind in ("files", "threads", "python_threads"):
        before, after = cycles[kind]
        assert after <= before


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module("soak")


def test_growth_is_told_in_bytes_a_step(script: ModuleType) -> None:
    # 1,000 bytes a step after a jump in the first half; a file more in the last quarter; once, a thread for a moment.
    samples = [
        {
            "step": step,
            "rss": 1000 * step + (5_000_000 if step > 10 else 0),
            "files": 3 + (step > 32),
            "threads": 2 + (step == 35),
        }
        for step in range(1, 41)
    ]
    grown = script.growth(samples)
    assert grown["rss_bytes_per_step"] == pytest.approx(1000)
    assert (grown["files"], grown["threads"]) == ([3, 4], [2, 2])


def test_a_missed_goal_is_named(script: ModuleType, soak: dict[str, Any]) -> None:
    worse = json.loads(json.dumps(soak))
    worse["is_short"] = False
    worse["runs"]["no sink"] |= {"rss_bytes_per_step": 900.0, "files": [5, 9]}
    worse["runs"]["every sink"]["rss_bytes_per_step"] = 0.0
    for rank in (0, 1):
        worse["runs"][f"rank {rank} of 2"]["rss_bytes_per_step"] = 0.0
    worse["cycles"]["hooks"]["backward"] = ["torch.autograd", "flopmeter.monitor.hooks"]
    worse["cycles"]["num_complete"] = 49
    assert script.missed_goals(worse) == [
        "no sink: memory grows by 900 bytes a step",
        "no sink: files grew from 5 to 9",
        "cycles: backward went from torch.autograd to flopmeter.monitor.hooks",
        "cycles: 49 of 50 records are complete",
    ]
