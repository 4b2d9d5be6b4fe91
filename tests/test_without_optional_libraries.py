"""With any optional library absent, everything that does not need it works; what needs it says so in one line.

Absent means: a finder in front of all others refuses to import it, and no package list has it, in a process of its own.
A framework may itself need another library (Accelerate needs psutil), so only the absent one's integration is tried.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = (
    "transformers", "lightning", "accelerate", "torchtitan", "peft", "trl", "ray", "wandb", "tensorboard",
    "prometheus_client", "psutil", "starlette",
)  # fmt: skip
FRAMEWORKS = ("transformers", "lightning", "accelerate", "torchtitan", "ray")
SINKS = {"wandb": "wandb", "tensorboard": "tensorboard", "prometheus_client": "prometheus"}

PROGRAM = """
import importlib, importlib.metadata, json, pkgutil, sys, tempfile, warnings
from pathlib import Path

class Refuses:
    def __init__(self, libraries):
        self.libraries = libraries

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.libraries:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def hide(self):
        found = importlib.metadata.Distribution.from_name.__func__

        def from_name(cls, name):
            if name.replace("-", "_") in self.libraries:
                raise importlib.metadata.PackageNotFoundError(name)
            return found(cls, name)

        importlib.metadata.Distribution.from_name = classmethod(from_name)

def purge():
    for name in list(sys.modules):
        if name.partition(".")[0] == "flopmeter":
            del sys.modules[name]

def refused_modules(others):
    import flopmeter
    skipped = {"flopmeter.__main__", *(f"flopmeter.integrations.{name}" for name in others)}
    refused = {}
    for module in pkgutil.walk_packages(flopmeter.__path__, "flopmeter.", onerror=lambda name: None):
        if module.name in skipped or module.name.endswith("__main__") or ".sitecustomize" in module.name:
            continue
        try:
            importlib.import_module(module.name)
        except Exception as error:
            refused[module.name] = [type(error).__name__, str(error)]
    return refused

def train(folder):
    import torch, flopmeter
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"monitoring": {"sinks": [], "peak_flop_per_s": 1e12}}
    monitor = flopmeter.watch(model, optimizer, output_dir=folder, config=config)
    for _ in range(5):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    monitor.finish_training()
    run = flopmeter.load_run(folder)
    flop = flopmeter.count_flops(model, torch.ones(4, 8)).model_flop
    return [len(run), run.column("perf/model_flop")[-1], flop]

def missing_sink(name):
    from flopmeter import MonitorConfig, sinks
    context = sinks.SinkContext(config=MonitorConfig.load(None), output_dir=Path(tempfile.mkdtemp()))
    try:
        sinks.open_sink(name, context).close()
    except Exception as error:
        return [type(error).__name__, str(error)]

warnings.simplefilter("ignore")
cases, sinks_of = json.loads(sys.argv[1]), json.loads(sys.argv[2])
finder = Refuses(set())
sys.meta_path.insert(0, finder)
finder.hide()
answers = {}
for case in cases:
    libraries = case.split("+")
    purge()
    finder.libraries = set(libraries)
    with tempfile.TemporaryDirectory() as folder:
        others = set(sys.argv[3].split()) - set(libraries)
        answers[case] = {"refused": refused_modules(others), "trained": train(folder)}
    answers[case]["sinks"] = {name: missing_sink(sinks_of[name]) for name in libraries if name in sinks_of}
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What happened with each of them absent, and with all of them absent: one process, whose imports start anew."""
    cases = ["+".join(LIBRARIES), *LIBRARIES]
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases), json.dumps(SINKS), " ".join(FRAMEWORKS)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=280)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


CASES = [*LIBRARIES, "+".join(LIBRARIES)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case if "+" not in case else "all of them")
def test_measuring_and_counting_work_without_it(answers: dict[str, Any], case: str) -> None:
    flop = 2 * 2 * 4 * 8 * 8  # forward, and the weight's gradient
    assert answers[case]["trained"] == [5, flop, flop]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case if "+" not in case else "all of them")
def test_only_its_own_integration_cannot_be_imported(answers: dict[str, Any], case: str) -> None:
    refused, libraries = answers[case]["refused"], case.split("+")
    own = {f"flopmeter.integrations.{library}" for library in libraries}
    assert set(refused) <= own | ({"flopmeter.serve"} if "starlette" in libraries else set())
    for kind, message in refused.values():
        assert kind == "MissingLibraryError"
        assert "which is not installed: run pip install" in message
        assert "\n" not in message


@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate"])
def test_an_integration_names_what_it_lacks(answers: dict[str, Any], library: str) -> None:
    _, message = answers[library]["refused"][f"flopmeter.integrations.{library}"]
    assert message.startswith(f"flopmeter.integrations.{library} needs {library}")


@pytest.mark.parametrize("library", SINKS)
def test_a_sink_names_what_it_lacks(answers: dict[str, Any], library: str) -> None:
    kind, message = answers[library]["sinks"][library]
    assert kind == "MissingLibraryError"
    assert message == (
        f"the sink {SINKS[library]} needs {library}, which is not installed: "
        f"run pip install 'flopmeter[{SINKS[library]}]'"
    )


def test_the_finder_refuses_what_is_there() -> None:
    code = PROGRAM.partition("def purge")[0] + "sys.meta_path.insert(0, Refuses({'json5', 'pytest'}))\nimport pytest"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.stderr.strip().endswith("ModuleNotFoundError: No module named 'pytest'")
