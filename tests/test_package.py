"""What leaves the repository: the wheel and the source archive hold all that is needed, and work on their own.

The wheel is installed into an empty virtual environment without its dependencies; those come from the tests' own one,
behind it on the path, so that nothing is downloaded and the installed package is the one that runs.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flopmeter import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling, which builds the package, is absent")


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def build(source: Path, kind: str, target: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    answer = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return next(target.iterdir())


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Site-packages of an environment that holds flopmeter and nothing else."""
    home = tmp_path_factory.mktemp("environment")
    assert run(sys.executable, "-m", "venv", "--without-pip", home).returncode == 0
    site = next((home / "lib").glob("python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check", "-q"]
    answer = run(*pip, "--target", site, wheel)
    assert answer.returncode == 0, answer.stderr
    return site


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def shipped() -> set[str]:
    """What of the sources belongs into the wheel: every file, not only Python's."""
    files = {path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    names = {path.relative_to(ROOT / "src").as_posix() for path in files if "egg-info" not in str(path)}
    return names | {f"flopmeter/configs/{path.name}" for path in (ROOT / "configs").iterdir()}


def test_the_wheel_holds_every_file_of_the_sources_and_the_presets(wheel: Path) -> None:
    held = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert held == shipped()
    data = {"flopmeter/devices/devices.toml", "flopmeter/conventions.toml", "flopmeter/configs/smart.yaml"}
    assert {"flopmeter/py.typed"} | data <= held
    assert any(name.endswith(".html") for name in held)


def test_the_wheel_carries_the_licence_and_the_command(wheel: Path) -> None:
    info = f"flopmeter-{__version__}.dist-info"
    assert f"{info}/licenses/LICENSE" in contents(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert "flopmeter = flopmeter.cli:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_a_wheel_built_from_the_source_archive_is_the_same(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build(next(tmp_path.iterdir()), "wheel", tmp_path / "out")
    assert contents(again) == contents(wheel)


def test_the_source_archive_has_tests_and_readme_and_no_left_overs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "tests/test_package.py", "configs/smart.yaml"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops.isdisjoint({".venv", "wandb", "runs", "build", "dist", ".mypy_cache", ".ci"})


def test_the_version_is_written_in_one_place(wheel: Path, sdist: Path) -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert "version" not in PROJECT
    written = [path for path in (ROOT / "src").rglob("*.py") if re.search(r"^__version__ = ", path.read_text(), re.M)]
    assert written == [ROOT / "src" / "flopmeter" / "__init__.py"]
    assert wheel.name.startswith(f"flopmeter-{__version__}-")
    assert sdist.name == f"flopmeter-{__version__}.tar.gz"
    citation = ROOT / "CITATION.cff"
    if citation.exists():
        assert re.search(rf"^version: {re.escape(__version__)}$", citation.read_text(), re.M)


NO_TORCH = """
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == 'torch' else real(name, package)
class NoTorch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition('.')[0] == 'torch':
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, NoTorch)
"""


@pytest.fixture
def without_torch(installed: Path, tmp_path: Path) -> dict[str, str]:
    """An environment in which the installed wheel is found first, and torch cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(NO_TORCH)
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{installed}"}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    metrics = {"perf/step_time": 0.5, "perf/mfu": 0.25, "perf/model_flop": 1e12}
    lines = [{"kind": "header", "schema": 2, "started_at": 0.0, "device": "made up"}]
    lines += [
        {"kind": "step", "step": n, "time": n / 2, "metrics": {**metrics, "global_step": n}} for n in range(1, 61)
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def test_the_installed_wheel_is_the_one_that_runs(installed: Path, without_torch: dict[str, str]) -> None:
    answer = run(sys.executable, "-c", "import flopmeter; print(flopmeter.__file__)", **without_torch)
    assert Path(answer.stdout.strip()).is_relative_to(installed)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("peak", "--list"),
        ("peak", "--device", "NVIDIA H100 80GB HBM3", "--dtype", "bf16"),
        ("report", "RUN", "--json"),
        ("report", "RUN", "-o", "RUN/report.html"),
        ("report", "RUN", "-o", "RUN/report.md"),
        ("compare", "RUN", "RUN", "--json"),
        ("doctor", "--only", "load"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_readers_of_the_installed_wheel_work_without_torch(
    arguments: tuple[str, ...], record: Path, without_torch: dict[str, str]
) -> None:
    words = [word.replace("RUN", str(record)) for word in arguments]
    answer = run(sys.executable, "-m", "flopmeter", *words, **without_torch)
    assert answer.returncode == 0, answer.stderr
    assert "Traceback" not in answer.stderr


def test_the_installed_wheel_measures_with_torch_and_knows_its_presets(installed: Path, tmp_path: Path) -> None:
    code = f"""
import torch, flopmeter, training.utils.monitor
from pathlib import Path
assert Path(flopmeter.__file__).is_relative_to({str(installed)!r})
assert Path(training.utils.monitor.__file__).is_relative_to({str(installed)!r})
assert flopmeter.MonitorConfig.load("estimate").monitoring.mfu_calculation_mode == "estimate"
model = torch.nn.Linear(8, 8, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with flopmeter.watch(model, optimizer, output_dir={str(tmp_path)!r}, config={{"monitoring": {{"sinks": []}}}}):
    for _ in range(6):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
run = flopmeter.load_run({str(tmp_path)!r})
assert len(run) == 6
assert run.column("perf/model_flop")[-1] == 2 * (2 * 4 * 8 * 8)
"""
    answer = run(sys.executable, "-W", "ignore", "-c", code, PYTHONPATH=str(installed))
    assert answer.returncode == 0, answer.stderr


RIGHT = """
from flopmeter import Run, TrainingMonitor, diagnose, load_run, peak_flops

def mean_mfu(run: Run) -> float:
    values = run.column("perf/mfu")
    return sum(values) / len(values)

def headline(path: str) -> str:
    return diagnose(load_run(path)).headline

rate: float = peak_flops("cpu", "fp32").flop_per_s

def start(monitor: TrainingMonitor) -> None:
    monitor.log_step(1, epoch=0, loss=0.5, grad_norm=None, learning_rate=1e-3)
"""
WRONG = """
from flopmeter import load_run, peak_flops

rate: str = peak_flops("cpu", "fp32").flop_per_s
load_run(3)
load_run("run").no_such_thing
"""


def type_check(program: str, site: Path, folder: Path) -> list[str]:
    """Errors that mypy finds in a user's program, in the environment that flopmeter is installed in."""
    (folder / "program.py").write_text(program)
    python = site.parents[2] / "bin" / "python"
    cache = ["--cache-dir", str(folder / "cache"), "--config-file", os.devnull]
    command = [sys.executable, "-m", "mypy", "--strict", *cache, "--python-executable", str(python), "program.py"]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert answer.returncode in (0, 1), answer.stdout + answer.stderr
    return [line for line in answer.stdout.splitlines() if ": error: " in line]


def test_a_typed_users_program_passes_and_a_wrong_one_does_not(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="it reads the types")
    assert type_check(RIGHT, installed, tmp_path) == []
    kinds = [line.rpartition("[")[2].rstrip("]") for line in type_check(WRONG, installed, tmp_path)]
    assert kinds == ["assignment", "arg-type", "attr-defined"]


def distributions_by_module() -> dict[str, set[str]]:
    return {name: {_canonical(found) for found in owners} for name, owners in metadata.packages_distributions().items()}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(lines: list[str]) -> set[str]:
    return {_canonical(Requirement(line).name) for line in lines}


def imported_at_the_top(path: Path) -> set[str]:
    """Top-level packages that importing this file imports."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found - {"flopmeter", "training", "__future__"} - sys.stdlib_module_names


def test_whatever_is_imported_at_the_top_is_a_dependency() -> None:
    owners = distributions_by_module()
    allowed = required(PROJECT["dependencies"]) | required(PROJECT["optional-dependencies"]["torch"])
    strangers = {}
    for path in (ROOT / "src" / "flopmeter").rglob("*.py"):
        # Each integration has its own framework at the top; the server's folder says what to install before it imports.
        if "integrations" not in path.parts and path.parent.name != "serve":
            names = {name for name in imported_at_the_top(path) if not owners.get(name, {name}) & allowed}
            strangers |= {path.name: names} if names else {}
    assert strangers == {}


def test_every_extra_that_a_message_names_exists() -> None:
    named = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MissingLibraryError":
                named |= {word.value.value for word in node.keywords if _is_extra(word)}
    assert {"torch", "serve"} <= named
    assert named <= PROJECT["optional-dependencies"].keys()


def _is_extra(word: ast.keyword) -> bool:
    return word.arg == "extra" and isinstance(word.value, ast.Constant)
