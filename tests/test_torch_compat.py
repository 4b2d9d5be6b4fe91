"""Private names of torch stand in one file, and a torch that lacks one is told of: on whatever torch is here.

`test_torch_versions.py` is for the versions themselves.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).resolve().parents[1] / "src"
HOME = SOURCES / "flopmeter" / "torch_compat.py"
PRIVATE = re.compile(r"_(?!_)\w+")
IN_A_STRING = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")


def private_names(source: str) -> Iterator[str]:
    """Private modules and names of torch that the source imports, reaches by attributes, or names in a string."""
    tree = ast.parse(source)
    modules = {"torch"}
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"}
            yield from (alias.name for alias in node.names if _is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            modules |= {alias.asname or alias.name for alias in node.names}
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if _is_private(name))
        elif isinstance(node, ast.Constant) and id(node) not in told and IN_A_STRING.fullmatch(str(node.value)):
            yield str(node.value)
    for node in ast.walk(tree):
        owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) else ""
        # Operators of torch.ops are called by their names, which are in every version.
        is_path = re.fullmatch(r"[\w.]+", owner) is not None and not owner.startswith("torch.ops")
        if is_path and owner.partition(".")[0] in modules:
            yield ast.unparse(node)


def _is_private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(PRIVATE.fullmatch(part) for part in parts[1:])


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_private_names_of_torch_are_used_in_one_file_only(path: Path) -> None:
    found = list(private_names(path.read_text()))
    assert found == [] or path == HOME


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import _autograd",
        "from torch.utils._pytree import tree_map",
        "from torch.utils.data import dataloader\nx = dataloader._BaseDataLoaderIter",
        "import torch\nx = torch._C._len_torch_dispatch_stack()",
        "import torch\ndef f():\n    return torch.autograd.Variable._execution_engine",
        "import sys\nx = sys.modules.get('torch._dynamo.utils')",
    ],
)
def test_the_search_finds_each_way_to_reach_a_private_name(line: str) -> None:
    assert list(private_names(line)) != []


@pytest.mark.parametrize(
    "line",
    [
        "import torch\nx = torch.__version__",
        "x = self._model",
        "import torch\nx = torch.ops.aten._softmax",
        "'torch.nn'",
    ],
)
def test_the_search_leaves_public_names_alone(line: str) -> None:
    assert list(private_names(line)) == []


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, cwd=folder, timeout=240, check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip


WATCHED = """
    import warnings; warnings.simplefilter("ignore")
    import sys, json, torch
    {before}
    from flopmeter import load_run, watch
    num_calls = 0
    def backend(graph, inputs):
        def run(*args):
            global num_calls
            num_calls += 1
            return graph(*args)
        return run
    model = torch.nn.Linear(16, 16, bias=False)
    model = torch.compile(model, backend=backend) if {is_compiled} else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {{"monitoring": {{"peak_flop_per_s": 1e12, "report": False, "sinks": []}}}}
    for folder in ("one", "two"):
        with watch(model, optimizer, output_dir=folder, config=config):
            for _ in range(20):
                model(torch.ones(8, 16)).sum().backward()
                optimizer.step()
    found = load_run("one")
    counts = [line for line in map(json.loads, open("one/run.jsonl")) if line.get("event") == "count"]
    print(json.dumps([len(found), "perf/mfu" in found.columns, found.header.off, num_calls,
                      [(count["method"], count["model_flop"]) for count in counts]]))
"""


def watched(folder: Path, before: str, is_compiled: bool = False) -> tuple[list[Any], str]:
    answer = run(WATCHED.format(before=before, is_compiled=is_compiled), folder)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1]), answer.stderr


def test_a_torch_that_is_too_old_is_said_once_and_its_steps_are_timed(tmp_path: Path) -> None:
    (num_steps, has_mfu, off, _, counts), said = watched(tmp_path, 'torch.__version__ = "2.5.1"')
    assert (num_steps, has_mfu, counts) == (20, False, [])
    assert said.count("flopmeter needs torch 2.6 or newer, and this is torch 2.5.1") == 1
    assert off == ["flopmeter needs torch 2.6 or newer, and this is torch 2.5.1: run pip install --upgrade torch"]


def test_a_torch_that_nobody_has_tried_is_said_once_and_measured(tmp_path: Path) -> None:
    (num_steps, has_mfu, off, _, counts), said = watched(tmp_path, 'torch.__version__ = "2.99.0"')
    assert (num_steps, has_mfu, len(counts)) == (20, True, 1)
    assert said.count("torch 2.99.0 is newer than any") == 1
    assert any("torch 2.99.0 is newer than any" in line for line in off)


def test_without_a_mode_that_the_compiler_ignores_compiled_code_is_counted_on_shapes(tmp_path: Path) -> None:
    """As with 2.6 to 2.9, on whatever torch is here."""
    (_, has_mfu, off, num_calls, counts), said = watched(tmp_path, 'torch.__version__ = "2.8.0"', is_compiled=True)
    assert (has_mfu, num_calls) == (True, 40)
    assert counts == [["the uncompiled twin (meta)", 2 * 2 * 8 * 16 * 16]]  # the batch wants no gradient
    assert said.count("lets no step be observed that runs compiled code") == 2  # once in each of the two runs
    assert any("ignore_compile_internals" in line for line in off)


@pytest.mark.parametrize(
    "command", [["count", "llama-3-8b"], ["demo", "--seconds", "1"], ["run", "train.py"], ["doctor"], ["peak"]]
)
def test_the_command_line_refuses_a_torch_that_is_too_old_in_one_line(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "torch-2.5.1.dist-info").mkdir()
    (tmp_path / "torch-2.5.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    (tmp_path / "train.py").write_text("print('it ran')\n")
    answer = run(f"import sys; sys.argv = {['flopmeter', *command]}; from flopmeter.cli import main; main()", tmp_path)
    needs = "flopmeter needs torch 2.6 or newer, and this is torch 2.5.1: run pip install --upgrade torch"
    assert (answer.returncode, answer.stdout, answer.stderr.splitlines()) == (1, "", [f"flopmeter: error: {needs}"])


def test_a_run_needs_no_numpy(tmp_path: Path) -> None:
    (num_steps, has_mfu, _, _, counts), _ = watched(tmp_path, 'sys.modules["numpy"] = None')
    assert (num_steps, has_mfu, len(counts)) == (20, True, 1)
