"""What we touch is written down: a process is compared before, during and after a run, and nothing else may differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

WATCHED = r"""
import atexit, builtins, gc, json, logging, os, signal, sys, threading, types, warnings
import torch, torch.nn.functional, torch.profiler, torch.distributed, torch.utils.checkpoint
import torch.distributed._functional_collectives
from torch import nn
from torch.utils.data import DataLoader

mode, folder = sys.argv[1:]
torch.set_num_threads(1)
at_exit = []  # python has no list of its handlers, and its count of them never falls
register, unregister = atexit.register, atexit.unregister
def count(function, *args, **kwargs):
    at_exit.append(function)
    return register(function, *args, **kwargs)
def discount(function):
    at_exit[:] = [one for one in at_exit if one != function]
    unregister(function)
atexit.register, atexit.unregister = count, discount

KINDS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
         staticmethod, classmethod, property, types.MethodType, types.GetSetDescriptorType)

def members(owner, name):
    for key, value in list(vars(owner).items()):
        if isinstance(value, KINDS):
            yield f"{name}.{key}", value
        elif "hook" in key and isinstance(value, (dict, list)):
            yield f"{name}.{key}", tuple(map(id, list(value.values() if isinstance(value, dict) else value)))

def snapshot():
    found = {}
    homes = [name for name in list(sys.modules) if name == "torch" or name.startswith("torch.")]
    for name in [*homes, "builtins", "threading", "warnings", "logging", "pickle", "copy", "io", "os"]:
        module = sys.modules.get(name)
        if not isinstance(module, types.ModuleType):
            continue
        found.update(members(module, name))
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                found.update(members(value, f"{name}.{value.__qualname__}"))
    found["sys.meta_path"] = tuple(map(id, sys.meta_path))
    found["sys.path"] = tuple(sys.path)
    found["sys.path_hooks"] = tuple(map(id, sys.path_hooks))
    found["sys.excepthook"], found["threading.excepthook"] = sys.excepthook, threading.excepthook
    found["sys.tracing"] = (sys.gettrace(), sys.getprofile())
    found["signals"] = tuple(map(str, map(signal.getsignal, sorted(signal.valid_signals()))))
    found["gc.callbacks"] = tuple(map(id, gc.callbacks))
    found["atexit"] = tuple(map(id, at_exit))
    found["warnings.filters"] = tuple(map(str, warnings.filters))
    loggers = [logging.root, *(logging.getLogger(name) for name in ("torch", "flopmeter"))]
    found["logging handlers"] = tuple(id(handler) for logger in loggers for handler in logger.handlers)
    found["logging filters"] = tuple(id(one) for logger in loggers for one in logger.filters)
    found["os.environ"] = dict(os.environ)
    found["threads"] = sorted(thread.name for thread in threading.enumerate())
    return found

def differing(before, now):
    missing, changed = object(), set()
    for key, value in before.items():
        other = now.get(key, missing)
        is_equal = type(other) is type(value) and isinstance(value, (tuple, dict, list)) and other == value
        if other is not value and not is_equal:
            changed.add(key)
    return {key for key in changed if key.rpartition(".")[0] not in changed}  # a class that is replaced is one change

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.last(torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False))

def train(model, optimizer, loader, look=lambda: None, monitor=None):
    for step, batch in enumerate(loader):
        loss = model(batch).square().mean()
        look()
        loss.backward()
        optimizer.step()
        if monitor is not None and step % 5 == 4:
            monitor.latest(wait_s=20)

model, loader = Net(), DataLoader(list(torch.ones(40, 4)), 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with torch.autograd.profiler.profile(use_cpu=True):  # torch's own late changes come before the first look
    train(model, optimizer, loader)
before = snapshot()
from flopmeter import load_run, watch
settings = {"peak_flop_per_s": 1e12, "sinks": [], "report": False}
settings |= {"patches": False} if mode == "none" else {"mfu_calculation_mode": mode, "flops_profile_freq": 4}
during = set()
monitor = watch(model, optimizer, loader, folder, {"monitoring": settings})
train(model, optimizer, loader, lambda: during.update(differing(before, snapshot())), monitor)
monitor.finish_training()
run = load_run(folder)
print(json.dumps({
    "during": sorted(during), "after": sorted(differing(before, snapshot())),
    "marks": sorted({mark for marks in run.marks.values() for mark in marks}),
    "events": sorted({event["event"] for event in run.events}), "num_steps": len(run), "columns": sorted(run.columns),
    "warnings": [event["message"] for event in run.named("warning")],
    "threads": [thread.name for thread in threading.enumerate()],
}))
"""

WORDS = {
    "a handler on the logger `flopmeter`": "logging handlers",
    "threads named `flopmeter`, `flopmeter-...`": "threads",
}
"""Rows of the table that are no attribute, by what the comparison calls them."""


@pytest.fixture(scope="module")
def touches() -> list[dict[str, str]]:
    command = [sys.executable, "-m", "flopmeter", "doctor", "--only", "libraries", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found: list[dict[str, str]] = json.loads(answer.stdout)["touches"]
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What differs during and after a run, by mode; `none` is the run without patches."""
    processes = {}
    for mode in ("smart", "profiler", "none"):
        folder = str(tmp_path_factory.mktemp("touched") / mode)
        command = [sys.executable, "-W", "ignore", "-c", WATCHED, mode, folder]
        processes[mode] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = {}
    for mode, process in processes.items():
        out, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
        found[mode] = json.loads(out.splitlines()[-1])
    return found


def test_the_page_shows_the_whole_table(touches: list[dict[str, str]]) -> None:
    page = (ROOT / "docs" / "what_it_touches.md").read_text(encoding="utf-8")
    rows = []
    for row in touches:
        name = row["name"] if "`" in row["name"] or " " in row["name"] else f"`{row['name']}`"
        rows.append(f"| {name} | {row['when']} | {row['why']} | {row['until']} |")
    assert [line for line in page.splitlines() if line.startswith("| ")][1:] == rows


def test_during_a_run_nothing_differs_but_what_the_table_says(
    compared: dict[str, dict[str, Any]], touches: list[dict[str, str]]
) -> None:
    known = {WORDS.get(row["name"], row["name"]): row["when"] for row in touches}
    for mode in ("smart", "profiler"):
        assert {"observed" if mode == "smart" else "profiled"} <= set(compared[mode]["marks"])
        assert set(compared[mode]["during"]) <= set(known)
    seen = {name for mode in ("smart", "profiler") for name in compared[mode]["during"]}
    shown = {name for name, when in known.items() if when in ("a run", "a measured step") and (" " not in name)}
    assert shown | {"logging handlers", "threads"} <= seen | {"gc.callbacks"}


def test_after_a_run_nothing_differs_but_what_stays_until_the_process_ends(
    compared: dict[str, dict[str, Any]], touches: list[dict[str, str]]
) -> None:
    stays = {WORDS.get(row["name"], row["name"]) for row in touches if row["until"] == "the process ends"}
    for mode in compared:
        assert set(compared[mode]["after"]) <= stays
        assert not [name for name in compared[mode]["threads"] if "flopmeter" in name]


def test_without_patches_nothing_is_replaced_and_the_record_says_what_is_missing(
    compared: dict[str, dict[str, Any]],
) -> None:
    found = compared["none"]
    assert set(found["during"]) <= {"atexit", "logging handlers", "threads"}
    assert found["num_steps"] == 20
    assert set(found["marks"]) == {"warmup"}
    assert not {"perf/backward_share", "perf/data_wait_share"} & set(found["columns"])
    assert {"perf/forward_share", "perf/optimizer_share", "perf/mfu"} <= set(found["columns"])
    assert [text for text in found["warnings"] if text.startswith("monitoring.patches is false")]


def test_a_mode_that_measures_contradicts_a_run_without_patches(tmp_path: Path) -> None:
    from flopmeter import ConfigError, TrainingMonitor

    settings = {"patches": False, "mfu_calculation_mode": "profiler"}
    with pytest.raises(ConfigError, match="patches: false measures no step"):
        TrainingMonitor(tmp_path, {"monitoring": settings})
