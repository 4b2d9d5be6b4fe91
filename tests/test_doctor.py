"""Checks of this machine: each tells the truth, and one that fails costs only its own line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flopmeter import doctor as checks
from flopmeter.demo import has_bfloat16
from flopmeter.devices import OVERRIDE_VARIABLE
from flopmeter.doctor import CHECKS, Result, examine
from flopmeter.errors import ConfigError

STANDINGS = {"ok", "warning", "missing", "failed"}
NEEDS_TORCH = {"versions", "device", "profile"}
NO_TORCH = """
import importlib.util, sys

class NoTorch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition('.')[0] == 'torch':
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)

real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == 'torch' else real(name, package)
sys.meta_path.insert(0, NoTorch)
"""


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flopmeter", "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=200,
    )


def standings(answer: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return {check["name"]: check["standing"] for check in json.loads(answer.stdout)["checks"]}


def test_the_list_of_checks_imports_no_torch() -> None:
    code = "import sys; from flopmeter.doctor import CHECKS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_has_failed_here_and_every_check_says_why() -> None:
    answer = doctor("--json")
    assert answer.returncode == 0, answer.stdout
    result = json.loads(answer.stdout)
    assert [check["name"] for check in result["checks"]] == list(CHECKS)
    assert result["has_failed"] is False
    for check in result["checks"]:
        assert check["standing"] in STANDINGS
        assert check["says"]
        assert "\n" not in check["says"]


def test_without_torch_it_says_what_still_works(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_TORCH)
    answer = doctor("--json", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert answer.returncode == 0, answer.stderr
    found = standings(answer)
    assert {name for name in CHECKS if found[name] == "missing"} >= NEEDS_TORCH
    assert found["peak"] == "warning"
    says = json.loads(answer.stdout)["checks"][0]["says"]
    assert "reports can be read" in says
    assert says.endswith("pip install 'flopmeter[torch]'")


def test_a_failed_part_is_exit_code_1_and_named_in_the_table() -> None:
    answer = doctor("--only", "peak", **{OVERRIDE_VARIABLE: "1"})
    assert answer.returncode == 1
    assert "failed" in answer.stdout
    assert "too low" in " ".join(answer.stdout.split())


def test_an_unknown_check_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="there is no check 'nonsense'; there are: versions, libraries, device, peak"):
        list(examine(["nonsense"]))


def test_the_names_come_before_the_results() -> None:
    started: list[str] = []
    for result in examine(["load", "versions"], on_start=started.append):
        assert started[-1] == result.name
    assert started == ["load", "versions"]


def test_a_check_that_raises_has_failed_with_its_reason_in_one_line_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises() -> Result:
        raise ValueError("one\ntwo")

    fine = Result(standing="ok", says="fine")
    monkeypatch.setattr(checks, "CHECKS", {"raises": raises, "fine": lambda: fine})
    first, second = examine()
    assert (first.standing, first.says) == ("failed", "failed with ValueError: one")
    assert (second.standing, second.says) == ("ok", "fine")


@pytest.mark.parametrize(
    ("busy", "quota", "standing", "word"),
    [
        (0.5, None, "ok", "2 cores, load 0.5"),
        (16.0, None, "warning", "other programs compete"),
        (0.5, 0.5, "warning", "leaves 0.5 of them"),
        (0.5, 4.0, "ok", "2 cores"),
    ],
)
def test_a_machine_that_is_busy_or_limited_is_a_warning(
    busy: float, quota: float | None, standing: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (busy, 0.0, 0.0))
    monkeypatch.setattr(checks, "cpu_quota", lambda: quota)
    result = checks.load()
    assert result.standing == standing
    assert word in result.says


def test_the_quota_of_a_container_is_read_from_either_version_of_control_groups(tmp_path: Path) -> None:
    assert checks.cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert checks.cpu_quota(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert checks.cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert checks.cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("measured", "standing", "word"),
    [(9e12, "ok", "90 % of it"), (4e12, "warning", "power limit"), (10.5e12, "failed", "too low")],
)
def test_a_peak_below_what_is_measured_has_failed(measured: float, standing: str, word: str) -> None:
    result = checks.judge_peak("a card, bf16", 10e12, "table", measured)
    assert result.standing == standing
    assert word in result.says


def test_a_gpu_that_is_held_back_says_by_what() -> None:
    # Bits as NVML documents them: 0x4 software power cap, 0x20 software thermal slowdown, 0x1 idle.
    sound = Result(standing="ok", says="matmuls reach 80 %")
    held = checks.with_clock(sound, {"clock_hz": 900e6, "throttle_reasons": 0x4 | 0x20})
    assert (held.standing, held.says) == (
        "warning",
        "matmuls reach 80 %; at 900 MHz, held down by the power cap and heat",
    )
    free = checks.with_clock(sound, {"clock_hz": 1900e6, "throttle_reasons": 0x1})
    assert (free.standing, free.says) == ("ok", "matmuls reach 80 %; at 1900 MHz")
    assert checks.with_clock(sound, {}) == sound


@pytest.mark.parametrize(("is_native", "dtype"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_is_measured_in_a_dtype_that_it_has(is_native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_native or including_emulation)
    assert checks.matmul_dtype(torch.device("cuda", 0)) == dtype
    assert checks.matmul_dtype(torch.device("cpu")) == "fp32"
    assert has_bfloat16() is is_native  # the demo trains in float32 without it


def test_a_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert checks.compiler_lacks("cpu") == "there is no C++ compiler"
    assert checks.compiler_lacks("cuda") == "there is no C compiler, which triton needs"
    monkeypatch.setenv("CC", "/opt/cc")
    assert checks.compiler_lacks("cuda") is None


def test_libraries_come_from_the_packages_own_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["rich>=13", "torch>=2.13; extra == 'torch'", 'made-up-sink>=1 ; extra == "sinks"', "x; extra == 'dev'"]
    monkeypatch.setattr(checks.metadata, "requires", lambda name: requires)
    result = checks.libraries()
    assert (result.standing, result.says) == ("missing", "made-up-sink: run pip install 'flopmeter[sinks]'")
    assert set(result.figures) == {"torch"}
