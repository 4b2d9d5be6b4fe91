"""Who may import whom, and which names are public. These tests parse the source, so they see imports that never run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import flopmeter

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "flopmeter"

FOUNDATION = {"errors", "schema", "columns", "text"}
FACTS = {"devices", "metrics", "record", "config", "conventions", "resources", "counters"}
READERS = {"sinks", "goodput", "waterfall", "totals", "traces", "diagnosis", "compare", "report", "serve"}
MEASURERS = {
    "torch_compat",
    "hook_hiding",
    "step_facts",
    "profiling",
    "flops",
    "timing",
    "distributed",
    "dataset_metrics",
}
TORCH_FREE_PARTS = {"flops.formulas", "profiling.recorded"}
"""Parts of a measuring package that readers use too."""

ALLOWED: dict[str, set[str]] = {
    **{name: set() for name in FOUNDATION},
    **dict.fromkeys(FACTS, FOUNDATION),
    "record": FOUNDATION | {"metrics", "waterfall"},  # `Run.waterfall()`, loaded when it is called
    **dict.fromkeys(READERS, FOUNDATION | FACTS | TORCH_FREE_PARTS),
    "resources": FOUNDATION | {"devices"},
    "waterfall": FOUNDATION | {"devices", "metrics", "goodput"},
    "totals": FOUNDATION | FACTS | {"goodput"},
    "diagnosis": FOUNDATION | FACTS | {"goodput", "waterfall", "totals"},
    "compare": FOUNDATION | FACTS | {"goodput", "waterfall", "diagnosis"},
    "report": FOUNDATION
    | FACTS
    | {"goodput", "waterfall", "totals", "diagnosis", "compare", "flops.formulas", "trials"},
    "serve": FOUNDATION | FACTS | READERS,
    **dict.fromkeys(MEASURERS, FOUNDATION | FACTS | {"torch_compat"}),
    "distributed": FOUNDATION | FACTS | {"torch_compat", "hook_hiding"},
    "timing": FOUNDATION | FACTS | {"torch_compat", "hook_hiding"},
    "torch_compat": {"errors"},
    "counters": FOUNDATION | {"devices"},
    "profiling": FOUNDATION | FACTS | {"torch_compat", "hook_hiding", "flops.formulas"},
    "flops": FOUNDATION | FACTS | {"torch_compat", "hook_hiding", "step_facts", "profiling"},
    "monitor": FOUNDATION | FACTS | READERS | MEASURERS,
    "integrations": {"monitor", "errors", "text", "torch_compat", "hook_hiding"},
    "trials": FOUNDATION | FACTS | READERS | {"hook_hiding"},
    "demo": {"monitor", "errors"},
    "doctor": FOUNDATION | FACTS | MEASURERS | {"demo"},
    "training": FOUNDATION | FACTS | READERS | MEASURERS | {"monitor"},
}
MAY_IMPORT_TORCH = MEASURERS | {"monitor", "integrations", "demo", "training", "trials.inside"}
PLUGIN_FOLDERS = (
    "sinks",
    "cli",
    "report",
    "report/_charts",
    "integrations",
    "flops/formulas",
)


def sources() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "src" / "training").rglob("*.py")])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(source: str, module: str, *, top_level_only: bool = False) -> Iterator[str]:
    """Every module that the source imports, TYPE_CHECKING blocks left out."""
    tree = ast.parse(source)
    for node in _running_code(tree, top_level_only):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the arrow; name the module in full"
            base = node.module or ""
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _running_code(node: ast.AST, top_level_only: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if top_level_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        yield child
        yield from _running_code(child, top_level_only)


def row_of(module: str) -> str:
    """The unit of the import table a module belongs to: "flops", or "flops.formulas" for the torch-free part of it."""
    parts = module.split(".")
    if parts[0] == "training":
        return "training"
    if ".".join(parts[1:3]) in TORCH_FREE_PARTS:
        return ".".join(parts[1:3])
    return parts[1] if len(parts) > 1 else ""


def broken_arrows(source: str, module: str) -> list[str]:
    own = row_of(module)
    if own in ("", "cli", "__main__"):
        return [name for name in imports(source, module) if own == "" and row_of(name) == "cli"]
    allowed = ALLOWED[own.partition(".")[0]]
    return [
        target
        for target in imports(source, module)
        if target.startswith("flopmeter.")
        and (row := row_of(target)) not in ("__version__", own)
        and row.partition(".")[0] != own.partition(".")[0]
        and row not in allowed
        and row.partition(".")[0] not in allowed
    ]


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_no_module_imports_against_the_arrows(path: Path) -> None:
    assert broken_arrows(path.read_text(), module_name(path)) == []


def import_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty when none do."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


WITHOUT_CIRCLES = ("flops", "profiling", "counters", "step_facts", "hook_hiding", "timing", "distributed", "monitor")


def test_counting_profiling_and_the_monitor_have_no_circle_of_imports() -> None:
    graph: dict[str, set[str]] = {}
    for path in sources():
        module = module_name(path)
        if row_of(module).partition(".")[0] in WITHOUT_CIRCLES:
            assert row_of(module) != "monitor" or "TYPE_CHECKING" not in path.read_text()  # which would hide one
            graph[module] = set(imports(path.read_text(), module)) - {module}
    known = {module: {name for name in found if name in graph} for module, found in graph.items()}
    for module, found in known.items():  # a package is loaded before its parts, and names none of them itself
        found.difference_update(package for package in graph if module.startswith(f"{package}."))
    assert import_cycle(known) == []
    assert import_cycle({"a": {"b"}, "b": {"a"}}) != []


def test_the_arrow_test_fails_on_a_wrong_arrow() -> None:
    wrong = "from flopmeter.monitor import TrainingMonitor"
    assert broken_arrows(wrong, "flopmeter.devices") == ["flopmeter.monitor", "flopmeter.monitor.TrainingMonitor"]
    assert broken_arrows("def f():\n    from flopmeter.flops import observe", "flopmeter.report") != []
    assert broken_arrows("from flopmeter.flops.formulas import find", "flopmeter.report") == []
    assert broken_arrows("from flopmeter.errors import FlopmeterError", "flopmeter.devices") == []


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_only_the_measuring_side_imports_torch_at_the_top(path: Path) -> None:
    module = module_name(path)
    if {row_of(module), module.removeprefix("flopmeter.")} & MAY_IMPORT_TORCH:
        return
    heavy = {name.partition(".")[0] for name in imports(path.read_text(), module, top_level_only=True)}
    assert "torch" not in heavy


@pytest.mark.parametrize("folder", [f for f in PLUGIN_FOLDERS if (PACKAGE / f).is_dir()])
def test_plugins_of_a_folder_do_not_import_each_other(folder: str) -> None:
    prefix = "flopmeter." + folder.replace("/", ".")
    plugins = {p.stem for p in (PACKAGE / folder).glob("*.py") if not p.name.startswith("_")}
    for name in plugins:
        module = f"{prefix}.{name}"
        siblings = {f"{prefix}.{other}" for other in plugins - {name}}
        assert siblings.isdisjoint(imports((PACKAGE / folder / f"{name}.py").read_text(), module))


def test_nothing_is_called_utils_or_the_like() -> None:
    banned = {"utils", "common", "helpers", "base", "manager", "core"}
    stems = {part for path in PACKAGE.rglob("*.py") for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert stems.isdisjoint(banned)


PUBLIC_NAMES = {
    "__version__",
    "ConfigError",
    "CountError",
    "Diagnosis",
    "FlopCount",
    "FlopmeterError",
    "MissingLibraryError",
    "MonitorConfig",
    "Peak",
    "RecordError",
    "Run",
    "TraceError",
    "TrainingMonitor",
    "UnknownDeviceError",
    "count_flops",
    "diagnose",
    "formula",
    "load_run",
    "peak_flops",
    "watch",
    "write_report",
}


def test_the_public_names_are_these_and_no_others() -> None:
    assert set(flopmeter.__all__) == PUBLIC_NAMES


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(flopmeter, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = flopmeter.nonsense


def test_a_name_that_needs_torch_says_so_when_it_is_absent() -> None:
    code = "import sys; sys.modules['torch'] = None; import flopmeter; flopmeter.watch"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.stderr.strip().endswith(
        "MissingLibraryError: flopmeter.watch needs torch, which is not installed: run pip install 'flopmeter[torch]'"
    )


TORCH_FREE = {
    "import flopmeter": "import flopmeter",
    "load_run": "import flopmeter; flopmeter.load_run",
    "settings": "import flopmeter; flopmeter.MonitorConfig.load(None)",
    "peak of a named device": "import flopmeter; flopmeter.peak_flops('NVIDIA H100 80GB HBM3', 'bf16')",
    "diagnose": "import flopmeter; flopmeter.diagnose",
    "write_report": "import flopmeter; flopmeter.write_report",
    "traces": "from flopmeter.traces import load_any",
    "compare": "from flopmeter.compare import compare",
    "--explain": "import sys; sys.argv = ['x', 'report', '--explain', 'all']; from flopmeter.cli import _run; _run()",
    "formulas": "from flopmeter.flops.formulas import all_formulas; all_formulas()",
    "what can be tried": "from flopmeter.trials.candidates import load_candidates; load_candidates()",
    "what was tried": "from flopmeter.trials import read_tried; read_tried('.')",
    "peak --list": "import sys; sys.argv = ['flopmeter', 'peak', '--list']; from flopmeter.cli import _run; _run()",
    "flopmeter --help": "import sys; sys.argv = ['flopmeter', '--help']; from flopmeter.cli import _run; _run()",
}


@pytest.mark.parametrize("use", TORCH_FREE)
def test_reading_never_imports_torch(use: str) -> None:
    code = f"{TORCH_FREE[use]}\nimport sys\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_the_torch_check_fails_when_torch_is_imported() -> None:
    code = "import torch, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
