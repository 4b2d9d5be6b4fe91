"""Examples, self-checks and benchmarks run as their first lines say: what nobody runs, rots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str | Path) -> str:
    command = [sys.executable, *map(str, arguments)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=280)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_the_plain_loop_runs(tmp_path: Path) -> None:
    out = run("examples/plain_loop.py", "--steps", "10", "--output-dir", tmp_path)
    assert "perf/mfu" in out
    assert (tmp_path / "run.jsonl").exists()


def test_the_multimodal_example_tells_images_from_text(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the example trains a model of transformers")
    out = run("examples/multimodal.py", "--steps", "9", "--output-dir", tmp_path)
    assert "charts: loss" in out
    assert "photos: loss" in out
    # Two kinds of steps: with the vision tower and without it.
    assert len(json.loads(out.rpartition(": ")[2])) == 2


@pytest.mark.parametrize("script", ["test_profiler_mfu.py", "scripts/test_simplified_flops.py"])
def test_the_self_checks_pass(script: str) -> None:
    out = run(script)
    assert "ok  " in out
    assert "FAIL" not in out


def test_a_benchmark_ends_with_one_line_of_json() -> None:
    result = json.loads(run("benchmarks/overhead.py", "--quick").splitlines()[-1])
    assert result["version"] >= 1
