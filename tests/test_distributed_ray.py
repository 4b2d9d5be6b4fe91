"""Ray Train for real, with two workers on this machine: nothing of ours knows about Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flopmeter import load_run

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "ray_train.py"


def test_a_ray_job_of_two_workers_is_measured_as_one(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch", reason="needs ray: pip install 'ray[train]'")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(EXAMPLE), "--steps", "20", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    run = load_run(tmp_path)
    assert (len(run), run.header.world_size) == (20, 2)
    layer = 2 * 32 * 64 * 256  # multiply-adds of one layer on one worker's rows, times two
    # Two layers forward; backward both weights and one input. Two workers.
    assert run.column("perf/model_flop")[-1] == pytest.approx(2 * (2 + 3) * layer)
    (event,) = [event for event in run.events if event["event"] == "ranks"]
    assert event["missing"] == []
