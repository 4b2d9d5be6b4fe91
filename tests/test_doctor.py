"""Checks of this machine: each tells the truth, and one that crashes or hangs costs only itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopmeter.demo.training import has_bfloat16
from flopmeter.devices.table import OVERRIDE_VARIABLE
from flopmeter.doctor import all_checks, clocks, compile, counting, events, examine, libraries, overhead, peak, profiler
from flopmeter.doctor import distributed as ranks
from flopmeter.doctor._process import CheckProcess
from flopmeter.doctor._trial import matmul_dtype
from flopmeter.errors import ConfigError

STANDINGS = {"works", "falls back", "missing", "not checked", "broken"}
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


@pytest.mark.parametrize("name", all_checks())
def test_every_check_keeps_the_contract(name: str) -> None:
    check: Any = all_checks()[name]
    assert isinstance(check.ORDER, int)
    assert 0 < check.LIMIT_S <= 30
    assert isinstance(check.NEEDS_TORCH, bool)
    assert callable(check.check)
    assert "?" in check.__doc__.splitlines()[0]


def test_no_two_checks_stand_at_the_same_place() -> None:
    orders = [check.ORDER for check in all_checks().values()]
    assert orders == sorted(set(orders))


def test_the_list_of_checks_imports_no_torch() -> None:
    code = "import sys; from flopmeter.doctor import all_checks; all_checks(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_is_broken_here_and_every_check_says_why() -> None:
    answer = doctor("--json")
    assert answer.returncode == 0, answer.stdout
    result = json.loads(answer.stdout)
    assert [check["name"] for check in result["checks"]] == list(all_checks())
    assert result["is_broken"] is False
    for check in result["checks"]:
        assert check["standing"] in STANDINGS
        assert check["says"]
        assert "\n" not in check["says"]


def test_without_torch_it_says_what_still_works(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_TORCH)
    answer = doctor("--json", PYTHONPATH=str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    found = standings(answer)
    assert {name for name, check in all_checks().items() if check.NEEDS_TORCH} <= {
        name for name, standing in found.items() if standing == "missing"
    }
    assert found["reading"] == "works"
    assert found["peak"] == "falls back"
    says = json.loads(answer.stdout)["checks"][0]["says"]
    assert "report, diagnose, compare, trace" in says
    assert says.endswith("pip install 'flopmeter[torch]'")


def test_a_broken_part_is_exit_code_1_and_named_in_the_table() -> None:
    answer = doctor("--only", "peak", **{OVERRIDE_VARIABLE: "1"})
    assert answer.returncode == 1
    assert "broken" in answer.stdout
    assert "too low" in " ".join(answer.stdout.split())


LEAVES_A_LOCK = """
import os, time
from multiprocessing import get_context, util

real = os.setsid

def setsid():  # the child's first act
    global lock
    real()
    lock = get_context("spawn").Lock()
    util.Finalize(None, time.sleep, args=(60,), exitpriority=100)  # it is killed before it has put its things away

os.setsid = setsid
"""


def test_a_check_that_is_killed_leaves_no_word_on_the_screen(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LEAVES_A_LOCK)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    answer = doctor("--json", "--only", "libraries", PYTHONPATH=path)
    assert standings(answer)
    assert answer.stderr == ""


def test_an_unknown_check_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="there is no check 'nonsense'; there are: libraries, torch, reading, peak"):
        list(examine(["nonsense"]))


def test_with_no_time_left_nothing_is_checked_and_each_says_so() -> None:
    results = list(examine(limit_s=0))
    assert [result.name for result in results] == list(all_checks())
    assert {result.standing for result in results} == {"not checked"}


def test_the_names_are_told_before_the_results() -> None:
    told: list[str] = []
    for result in examine(["reading", "clocks"], on_start=told.append):
        assert told[-1] == result.name
    assert told == ["reading", "clocks"]


@pytest.fixture
def made_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules the checks' process can import."""
    monkeypatch.syspath_prepend(tmp_path)
    good = "from flopmeter.doctor import Result\n"
    (tmp_path / "made_good.py").write_text(
        good + "def check():\n    print('noise')\n    return Result(standing='works', says='fine')\n"
    )
    (tmp_path / "made_raising.py").write_text("def check():\n    raise ValueError('one\\ntwo')\n")
    (tmp_path / "made_crashing.py").write_text(
        "import os, signal\ndef check():\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    (tmp_path / "made_endless.py").write_text(
        "import subprocess, sys, time\nfrom pathlib import Path\n"
        "def check():\n"
        "    helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"    Path({str(tmp_path)!r}, 'pid').write_text(str(helper.pid))\n"
        "    time.sleep(600)\n"
    )
    return tmp_path


def test_a_check_that_crashes_is_named_and_the_next_one_runs(made_checks: Path) -> None:
    with CheckProcess() as process:
        crashed = process.run("made_crashing", 60)
        after = process.run("made_good", 60)
    assert (crashed.standing, crashed.says) == ("broken", "the process of the check died (SIGSEGV)")
    assert (after.standing, after.says) == ("works", "fine")


def test_a_check_that_raises_is_broken_with_its_reason_in_one_line(made_checks: Path) -> None:
    with CheckProcess() as process:
        result = process.run("made_raising", 60)
    assert (result.standing, result.says) == ("broken", "failed with ValueError: one")


def test_a_check_that_never_ends_is_given_up_with_all_that_it_started(made_checks: Path) -> None:
    psutil = pytest.importorskip("psutil", reason="it looks whether a process is still there")
    pid_file = made_checks / "pid"
    with CheckProcess() as process:
        assert process.run("made_good", 60).standing == "works"  # the process is up: the limit is for the check alone
        result = process.run("made_endless", 3.0)
        while not pid_file.exists() or not pid_file.read_text():  # a machine too busy to start it within 3 s
            result = process.run("made_endless", 10.0)
        helper = int(pid_file.read_text())
    assert result.standing == "not checked"
    assert result.says.startswith("gave no answer within ")
    end_s = time.monotonic() + 20
    while psutil.pid_exists(helper) and psutil.Process(helper).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s, "the helper of a check that was given up still runs"
        time.sleep(0.05)


def test_counting_agrees_with_a_count_by_hand() -> None:
    tokens = 4 * 32
    linears = 2 * tokens * (2 * (3 + 1 + 4 + 4) * 64 * 64 + 64 * 256)
    attention = 2 * (2 * 2 * 64) * (4 * 32 * 33 // 2)  # layers, scores and mixing, causal pairs of four samples
    result = counting.check()
    assert result.standing == "works"
    assert set(result.figures.values()) == {3 * (linears + attention)}


def test_a_profiled_step_shows_its_operators() -> None:
    result = profiler.check()
    assert result.standing == "works"
    assert result.figures["num_ops"] > 2 * 12  # two layers of six linears, forward and backward


def test_ranks_can_leave_notes_here() -> None:
    result = ranks.check()
    assert result.standing == "works"
    assert "gloo" in result.says


def test_on_a_cpu_the_hosts_clock_is_the_truth() -> None:
    if events.check().figures:
        pytest.skip("this machine has a GPU")
    assert events.check().standing == "works"
    assert "host's clock" in events.check().says


@pytest.mark.parametrize(
    ("measured", "standing", "word"),
    [(9e12, "works", "90 % of it"), (4e12, "works", "power limit"), (10.5e12, "broken", "too low")],
)
def test_a_peak_below_what_is_measured_is_broken(measured: float, standing: str, word: str) -> None:
    result = peak.judge("a card, bf16", 10e12, "table", measured)
    assert result.standing == standing
    assert word in result.says


def test_a_gpu_that_is_held_back_says_by_what() -> None:
    # Bits as NVML documents them: 0x4 software power cap, 0x20 software thermal slowdown.
    assert clocks.describe(900, 1980, 0x4 | 0x20).endswith("held back by a power limit and its temperature")
    assert clocks.describe(1900, 1980, 0x1) == "the GPU runs at 1900 of 1980 MHz under load"
    assert "names no reason" in clocks.describe(300, 1980, 0)


def test_the_clock_of_a_mig_slice_is_that_of_its_board(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        NVMLError=KeyError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID={"MIG-abc": "slice"}.__getitem__,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle={"slice": "board"}.__getitem__,
        nvmlDeviceGetClockInfo=lambda device, clock: {"board": 1410}[device],
        nvmlDeviceGetMaxClockInfo=lambda device, clock: {"board": 1980}[device],
        nvmlDeviceGetCurrentClocksThrottleReasons={"board": 0x4}.__getitem__,
    )
    cuda = SimpleNamespace(
        is_available=lambda: True,
        get_device_properties=lambda index: SimpleNamespace(uuid="abc"),
        synchronize=lambda: None,
    )
    modules = {"pynvml": nvml, "torch": SimpleNamespace(cuda=cuda)}
    monkeypatch.setattr(clocks, "import_module", modules.__getitem__)
    monkeypatch.setattr(clocks, "_load", lambda torch: None)
    assert clocks.gpu_clocks() == (1410, 1980, 0x4)


def test_clocks_that_nvml_does_not_tell_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise LookupError("Driver Not Loaded")

    cuda = SimpleNamespace(is_available=lambda: True, synchronize=lambda: None)
    modules = {"pynvml": SimpleNamespace(nvmlInit=fail), "torch": SimpleNamespace(cuda=cuda)}
    monkeypatch.setattr(clocks, "import_module", modules.__getitem__)
    monkeypatch.setattr(clocks, "_load", lambda torch: None)
    monkeypatch.setattr(clocks, "read_cost_ns", lambda: 50.0)
    result = clocks.check()
    assert result.standing == "missing"
    assert result.says.endswith("NVML does not answer (LookupError: Driver Not Loaded)")


@pytest.mark.parametrize(("is_native", "dtype"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_is_measured_in_a_dtype_that_it_has(is_native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_native or including_emulation)
    assert matmul_dtype(torch.device("cuda", 0)) == dtype
    assert matmul_dtype(torch.device("cpu")) == "fp32"
    assert has_bfloat16() is is_native  # the demo trains in float32 without it


def test_triton_without_a_c_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert compile.why_not("cuda") == "there is no C compiler, which triton needs"
    monkeypatch.setenv("CC", "/opt/cc")
    assert compile.why_not("cuda") is None


def test_overhead_is_the_median_difference_of_neighbouring_blocks() -> None:
    off = [10e-3, 20e-3, 10e-3, 10e-3, 10e-3]  # a slow moment hits both blocks of its pair
    result = overhead.describe([block + 50e-6 for block in off], off)
    assert result.figures["added_us"] == pytest.approx(50)
    assert result.figures["step_s"] == pytest.approx(10e-3)
    assert result.says.startswith("50 us on a step of 10.0 ms")
    assert result.says.endswith("a step of 100 ms would be 0.05 % longer")


def test_an_overhead_within_the_noise_is_told_as_a_bound() -> None:
    # Differences of -120, -60, 0, 60 and 120 us: their quartiles lie half-way between, at -90 and 90.
    on = [10e-3 + added_us * 1e-6 for added_us in (-120, -60, 0, 60, 120)]
    result = overhead.describe(on, [10e-3] * 5)
    assert result.says.startswith("not distinguishable from noise here on a step of 10.0 ms")
    assert "-90 to 90 us" in result.says
    assert result.says.endswith("a step of 100 ms would be at most 0.09 % longer")


def test_without_a_compiler_compile_is_missing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    result = compile.check()
    if compile.why_not("cpu") is None or "triton" in result.says:
        pytest.skip("this machine compiles without a C++ compiler on the path")
    assert result.standing == "missing"
    assert result.says.startswith("there is no C++ compiler")


def test_libraries_come_from_the_packages_own_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["rich>=13", "torch>=2.13; extra == 'torch'", 'made-up-sink>=1 ; extra == "sinks"', "x; extra == 'dev'"]
    monkeypatch.setattr(libraries.metadata, "requires", lambda name: requires)
    assert libraries.optional() == {"torch": "torch", "made-up-sink": "sinks"}
    result = libraries.check()
    assert (result.standing, result.says) == ("missing", "made-up-sink: run pip install 'flopmeter[sinks]'")
