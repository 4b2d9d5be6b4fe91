"""Steps and facts: what a loop does out of the ordinary changes nothing, blinds nothing, and counts once."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flopmeter import ConfigError, Run, TrainingMonitor, load_run, watch

JOB = Path(__file__).with_name("harm_steps_job.py")
CONFIG = {"monitoring": {"sinks": [], "report": False, "peak_flop_per_s": 1e12, "profile_steps": False}}
WIDTH, ROWS = 8, 4
LAYER = 2 * ROWS * WIDTH * WIDTH


def warnings_of(run: Run) -> list[str]:
    return [event["message"] for event in run.events if event["event"] == "warning"]


def samples_of(run: Run) -> list[int]:
    pairs = zip(run.column("perf/samples_per_second"), run.column("perf/step_time"), strict=True)
    return [round(rate * seconds) for rate, seconds in pairs]


# --- two ranks


def two_ranks(folder: Path, kind: str, *, watched: bool = True) -> list[Any]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(JOB), str(folder), kind]
    jobs = [
        subprocess.Popen([*command, str(rank), str(int(watched))], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [job.communicate(timeout=120)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [0, 0], errors
    return [json.loads((folder / f"{kind}{rank}.json").read_text()) for rank in range(2)]


def test_a_hook_on_one_loss_of_ddp_runs_on_that_loss_alone(tmp_path: Path) -> None:
    plain = two_ranks(tmp_path / "plain", "hooked", watched=False)
    assert two_ranks(tmp_path / "watched", "hooked") == plain
    assert plain[0]["calls"] == ["first", "second", "before the node", "node", "late 4"]


def test_ranks_that_are_watched_before_they_know_each_other_keep_one_record(tmp_path: Path) -> None:
    two_ranks(tmp_path, "early")
    run = load_run(tmp_path / "run")
    assert (len(run.headers), len(run), run.header.world_size) == (1, 6, 2)
    assert [event["metrics"] for event in run.events if event["event"] == "metrics"] == [{"mine": 0.0}]
    assert [path.name for path in (tmp_path / "run").glob("run*.jsonl")] == ["run.jsonl"]


SECOND_WRITER = """
import sys, torch
from flopmeter import watch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = {"monitoring": {"sinks": [], "report": False, "peak_flop_per_s": 1e12, "profile_steps": False}}
monitor = watch(model, optimizer, None, sys.argv[1], config)
for step in range(5):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    monitor.log_step(step, loss=0.5)
print("trained", flush=True)
if sys.argv[2] == "stay":
    sys.stdin.read()
monitor.finish_training()
"""


def test_a_second_writer_of_one_file_is_refused_with_one_line_until_the_first_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SECOND_WRITER, str(tmp_path)]
    with subprocess.Popen([*command, "stay"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "trained\n"
        second = subprocess.run([*command, "go"], capture_output=True, text=True, timeout=60, check=True)
        first.kill()
    assert second.stdout == "trained\n"
    assert [line for line in second.stderr.splitlines() if "another process" in line] == second.stderr.splitlines()
    assert len(second.stderr.splitlines()) == 1
    assert len(load_run(tmp_path).headers) == 1
    assert not (tmp_path / "training_log.json").exists()
    third = subprocess.run([*command, "go"], capture_output=True, text=True, timeout=60, check=True)
    assert "another process" not in third.stderr
    run = load_run(tmp_path)
    assert (len(run.headers), [int(step) for step in run.column("global_step")][-5:]) == (2, [0, 1, 2, 3, 4])


# --- a pass that fails


class Failing(nn.Module):
    """Raises where it is told to: in the forward pass or in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        if self.fails_in == "forward":
            self.fails_in = ""
            raise RuntimeError("out of memory")
        if self.fails_in == "backward":
            self.fails_in = ""
            out.register_hook(self.fail)
        return out

    @staticmethod
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("out of memory")


class FailingOptimizer(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        return super().step(closure)


@pytest.mark.parametrize("in_except", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_whose_pass_failed_and_was_tried_again_counts_once(
    tmp_path: Path, where: str, accumulate: int, in_except: bool
) -> None:
    if where == "optimizer" and accumulate == 2:
        pytest.skip("all micro-batches are tried again there")
    model = Failing()
    optimizer = FailingOptimizer(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer, None, tmp_path, CONFIG)
    failing = (3, 6)  # the observed step, and one that is predicted

    def train(rows: int, *, is_last: bool) -> None:
        model(torch.randn(rows, WIDTH)).sum().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    for step in range(9):
        for part in range(accumulate):
            is_last = part == accumulate - 1
            if step not in failing or not is_last:
                train(ROWS, is_last=is_last)
                continue
            model.fails_in, optimizer.fails = where, where == "optimizer"
            failed = False
            try:
                train(2 * ROWS, is_last=True)
            except RuntimeError:
                failed = True
                if in_except:
                    train(ROWS, is_last=True)
            assert failed
            if not in_except:
                train(ROWS, is_last=True)
    monitor.finish_training()
    run = load_run(tmp_path)
    assert len(run) == 9
    assert samples_of(run) == [accumulate * ROWS] * 9
    assert [int(flop) for flop in run.column("perf/model_flop")] == [accumulate * 2 * LAYER] * 9
    assert [event["model_flop"] for event in run.events if event["event"] == "count"] == [accumulate * 2 * LAYER]


# --- arguments


def trained(folder: Path, say: Callable[[Any, int], None], steps: int = 6) -> Run:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, None, folder, CONFIG)
    for step in range(steps):
        model(torch.randn(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        say(monitor, step)
    monitor.finish_training()
    return load_run(folder)


GOOD = {
    "vector_of_one": torch.tensor([0.25]), "matrix_of_one": torch.tensor([[0.25]]), "half": torch.tensor(0.25).half(),
    "with_graph": torch.tensor(0.25, requires_grad=True) * 1, "numpy": np.float32(0.25), "array": np.array(0.25),
    "array_of_one": np.array([0.25]), "decimal": Decimal("0.25"), "fraction": Fraction(1, 4), "text": "0.25",
    "parameter": nn.Parameter(torch.tensor(0.25)),
}  # fmt: skip
BAD = {
    "vector": torch.ones(2), "empty": torch.ones(0), "complex": torch.tensor(1j), "words": "high", "list": [0.25],
    "object": object(), "huge": 10**400, "complex_number": 1j, "array_of_two": np.ones(2),
}  # fmt: skip


def test_whatever_float_takes_is_recorded_as_a_number(tmp_path: Path) -> None:
    def say(monitor: Any, step: int) -> None:
        monitor.log_step(
            np.int64(step), np.float32(1), torch.tensor([[0.25]]), np.float32(0.25), torch.tensor(0.25), **GOOD
        )
        monitor.log_metrics(GOOD, step=torch.tensor(step))
        monitor.log_evaluation(step, torch.tensor(0.25), np.float32(0.25), GOOD)
        monitor.log_epoch(torch.tensor(1), torch.tensor(0.25), np.float32(2), step)

    run = trained(tmp_path, say)
    assert warnings_of(run) == []
    assert [int(step) for step in run.column("global_step")] == list(range(6))
    for name in (*GOOD, "training/loss", "training/grad_norm", "training/lr"):
        assert list(run.column(name)) == [0.25] * 6, name
    events = {
        name: [event for event in run.events if event["event"] == name] for name in ("metrics", "evaluation", "epoch")
    }
    assert [event["metrics"] for event in events["metrics"]] == [dict.fromkeys(GOOD, 0.25)] * 6
    named = {f"eval/{name}": 0.25 for name in (*GOOD, "loss", "accuracy")}
    assert [event["metrics"] for event in events["evaluation"]] == [named] * 6
    assert [(event["epoch"], event["avg_loss"], event["elapsed_time"]) for event in events["epoch"]] == [
        (1, 0.25, 2)
    ] * 6


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_costs_that_one_number_and_one_warning(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def say(monitor: Any, step: int) -> None:
        monitor.log_step(step, loss=BAD[name], learning_rate=0.5, mine=2.5)
        monitor.log_metrics({"good": 1.5, "bad": BAD[name]}, step=step)

    run = trained(tmp_path, say, 8)
    assert len(run) == 8
    assert "training/loss" not in run.columns
    assert list(run.column("mine")) == [2.5] * 8
    assert list(run.column("training/lr")) == [0.5] * 8
    assert [event["metrics"] for event in run.events if event["event"] == "metrics"] == [{"good": 1.5}] * 8
    (about_loss,) = [message for message in warnings_of(run) if "loss" in message]
    (about_bad,) = [message for message in warnings_of(run) if "bad" in message]
    assert [record.getMessage() for record in caplog.records] == [about_loss, about_bad]


@pytest.mark.parametrize("step", [float("nan"), float("inf"), "seven", 10**30, torch.ones(3), 1.5, None])
def test_a_step_without_a_number_counts_on(tmp_path: Path, step: Any) -> None:
    run = trained(tmp_path, lambda monitor, index: monitor.log_step(step if index % 2 else index + 1, loss=0.5))
    assert [int(number) for number in run.column("global_step")] == [1, 2, 3, 4, 5, 6]
    assert len(warnings_of(run)) == (0 if step is None else 1)


def test_other_odd_arguments_stop_nothing_either(tmp_path: Path) -> None:
    def say(monitor: Any, step: int) -> None:
        monitor.log_step(step, epoch="soon", grad_norm=torch.ones(3), attention_mask=[1, 2], skip_wandb=torch.ones(2))
        monitor.log_metrics(None)
        monitor.log_metrics(3)
        monitor.log_evaluation(object(), "?", additional_metrics=7)
        monitor.log_epoch("one", None, "long", "now")
        monitor.update_dataset_metrics("code", np.float32(0.5))
        monitor.set_training_phase(["main"])
        with monitor.phase("forwrad"):
            done.append(step)

    done: list[int] = []
    run = trained(tmp_path, say)
    assert (len(run), done) == (6, list(range(6)))
    assert sum("forwrad" in message for message in warnings_of(run)) == 1
    monitor = watch(nn.Linear(1, 1), output_dir=tmp_path / "b")
    with pytest.raises(ConfigError, match="forwrad"), monitor.phase("forwrad"):
        raise AssertionError("a phase that there is not")
    monitor.finish_training()


# --- steps without the root's forward


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def ways(model: Coder) -> dict[str, tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
    nets = nn.ModuleDict({"one": model.inner, "two": model.outer})
    spread = nn.DataParallel(model)
    return {
        "method": (model, model.encode),
        "parts": (model, lambda x: model.outer(model.inner(x))),
        "nets": (nets, lambda x: nets["two"](nets["one"](x))),
        "wrapped": (spread, spread.module),
        "compiled": (model, torch.compile(lambda x: model(x), backend="aot_eager")),
        "functional": (model, lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,))),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("way", ["method", "parts", "nets", "wrapped", "compiled", "functional"])
def test_a_loop_that_never_calls_the_root_has_its_steps_and_a_word_about_it(tmp_path: Path, way: str) -> None:
    root, call = ways(Coder())[way]
    optimizer = torch.optim.SGD(root.parameters(), lr=0.1)
    monitor = watch(root, optimizer, None, tmp_path, CONFIG)
    optimizer.step()  # as where a checkpoint is loaded: no step
    for step in range(8):
        call(torch.randn(ROWS, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log_step(step, loss=0.5)
    monitor.finish_training()
    run = load_run(tmp_path)
    assert [int(step) for step in run.column("global_step")] == list(range(8))
    assert list(run.column("training/loss")) == [0.5] * 8
    assert all(seconds > 0 for seconds in run.column("perf/step_time"))
    # Two layers forward, their weight gradients, and the gradient of what is between them.
    assert int(run.column("perf/model_flop")[-1]) == 5 * LAYER
    assert sum("does not call it" in message for message in warnings_of(run)) == (way != "functional")


def test_steps_of_different_work_that_nobody_can_tell_apart_have_no_flops(tmp_path: Path) -> None:
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"monitoring": {**CONFIG["monitoring"], "overhead_budget": 0.5}}
    monitor = TrainingMonitor(tmp_path, settings, flops_profile_freq=5, model=model, optimizer=optimizer)
    for step in range(60):
        model.encode(torch.randn(ROWS * (1 + step // 6), WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    monitor.finish_training()
    run = load_run(tmp_path)
    assert len([event for event in run.events if event["event"] == "count"]) >= 2
    assert sum("unknown" in message and "differ" in message for message in warnings_of(run)) == 1


# --- the look at the modules


class CountedChildren(dict[str, Any]):
    """A module's children; to look at them takes as long as at thousands."""

    num_looks = 0

    def values(self) -> Any:
        self.num_looks += 1
        time.sleep(0.05)
        return super().values()


def test_the_look_at_a_model_of_many_modules_keeps_to_the_budget(tmp_path: Path) -> None:
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitoring = {**CONFIG["monitoring"], "mfu_calculation_mode": "estimate"}
    children = CountedChildren(model._modules)
    model._modules = children
    monitor = watch(model, optimizer, None, tmp_path, {"monitoring": monitoring})
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()  # with the first look of the run
    before, start_s = children.num_looks, time.monotonic()
    while time.monotonic() - start_s < 2.5:  # 50 ms once a second would be ten times the budget
        model(torch.randn(2, WIDTH)).sum().backward()
        optimizer.step()
    assert children.num_looks == before
    monitor.finish_training()
