"""Hooks in a model must not get into the way of what users do with it, and none may stay behind."""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flopmeter import TrainingMonitor, load_run, watch
from flopmeter.config import MonitorConfig
from flopmeter.dataset_metrics import DatasetMetrics
from flopmeter.flops.workload import Needs, WorkloadReader
from flopmeter.integrations._training import LoaderMarks
from flopmeter.monitor.device_time import DeviceTime
from flopmeter.monitor.effort import Effort
from flopmeter.monitor.hooks import Hooks, attach_forward, patch_loaders
from flopmeter.monitor.recorder import Recorder
from flopmeter.timing import PhaseClock
from flopmeter.timing.late import LateNumber
from simulated_device import SimulatedDevice, timeline_on

CONFIG = {"monitoring": {"peak_flop_per_s": 1e12, "sinks": [], "report": False}}


def make_recorder(begin: Callable[[], None] = lambda: None, **options: Any) -> Recorder:
    clock, config = PhaseClock(), MonitorConfig.load(CONFIG)
    effort = Effort(config, None, clock, lambda *_, **__: None, lambda: 0.0)
    return Recorder(clock, effort, DatasetMetrics(1), 50, deque(), begin=begin, event=lambda *_, **__: None, **options)


def num_hooks(model: nn.Module) -> int:
    return len(model._forward_hooks) + len(model._forward_pre_hooks)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_all_models_of_a_loop_are_marked_and_let_go(tmp_path: Path) -> None:
    first, second, third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    monitor = TrainingMonitor(tmp_path, CONFIG)
    monitor.set_model_ref(first, second)
    assert (num_hooks(first), num_hooks(second)) == (2, 2)
    monitor.set_model_ref(third)
    assert (num_hooks(first), num_hooks(second), num_hooks(third)) == (0, 0, 2)
    monitor.start_training()
    monitor.finish_training()
    assert num_hooks(third) == 0


def test_a_watched_model_can_be_made_into_a_cuda_graph(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA: tests/gpu makes the graph")
    original = torch.cuda.make_graphed_callables
    model = nn.Linear(4, 4)
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(AssertionError, match="must not have hooks"):  # torch's own refusal, before it needs a GPU
        torch.cuda.make_graphed_callables(model, (torch.ones(2, 4),))
    handle.remove()
    monitor = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), output_dir=tmp_path, config=CONFIG)
    with pytest.raises((RuntimeError, AssertionError)) as refusal:
        torch.cuda.make_graphed_callables(model, (torch.ones(2, 4),))
    assert "hooks" not in str(refusal.value)
    assert num_hooks(model) == 2
    monitor.finish_training()
    assert num_hooks(model) == 0
    assert torch.cuda.make_graphed_callables is original


@pytest.mark.parametrize("home", [torch.cuda, torch.cuda.graphs])
def test_a_graph_can_be_made_of_a_model_whose_next_step_is_measured(tmp_path: Path, home: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA: tests/gpu makes the graph")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refusals = []
    with watch(model, optimizer, output_dir=tmp_path, config=CONFIG) as monitor:
        for _ in range(6):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            with pytest.raises((RuntimeError, AssertionError)) as refusal:
                home.make_graphed_callables(model, (torch.ones(2, 4),))
            refusals.append(str(refusal.value))
        assert monitor.run.effort.is_measuring is False
    assert not [text for text in refusals if "hooks" in text]
    assert num_hooks(model) == num_hooks(model[0]) == 0


def test_a_watched_model_can_be_compiled_and_exported_as_one_graph_later(tmp_path: Path) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=tmp_path, config=CONFIG):
        train(model, optimizer, 3)
        compiled = torch.compile(lambda batch: model(batch).sum(), backend=backend, fullgraph=True)
        for _ in range(3):
            compiled(torch.ones(2, 4)).backward()
        exported = torch.export.export(model, (torch.ones(2, 4),), strict=True)
        assert torch.equal(exported.module()(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_tracing_is_no_forward_pass() -> None:
    calls: list[str] = []

    class Listener:
        special = True  # it wants to be called

        def on_forward(self, args: Any, kwargs: Any) -> None:
            calls.append("forward")

        def on_forward_end(self, exception: BaseException | None) -> None:
            calls.append("end")

        def on_evaluation(self, *, is_training: bool) -> None:
            calls.append("evaluation")

        def on_evaluation_end(self) -> None:
            calls.append("evaluation end")

    model = nn.Linear(4, 4)
    undo = attach_forward(model, Listener())
    torch.jit.trace(model, torch.ones(2, 4), check_trace=False)
    assert calls == []
    model(torch.ones(2, 4))
    assert calls == ["forward", "end"]
    undo()


def test_a_run_that_cannot_begin_does_not_stop_the_forward_pass() -> None:
    failures: list[str] = []

    def fail() -> None:
        raise OSError("disk full")

    recorder = make_recorder(fail, on_failure=lambda where, error: failures.append(f"{where}: {error}"))
    for _ in range(3):
        recorder.on_forward((), {})
        recorder.on_forward_end()
    assert failures == ["the start of the run: disk full"]


class NoQuery:
    """An event of a stream that is being captured: asking it spoils the capture."""

    def query(self) -> bool:
        raise AssertionError("an event was queried while a graph was captured")


def test_while_a_graph_is_captured_nothing_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    number = LateNumber(torch.zeros(()), NoQuery(), [])
    assert not number.is_ready()


def test_the_batch_of_a_captured_step_is_not_looked_into() -> None:
    device = SimulatedDevice()
    timeline = timeline_on(device)
    failures: list[Any] = []
    recorder = make_recorder(on_failure=lambda *problem: failures.append(problem))
    recorder.follow_device(DeviceTime(timeline, lambda *_, **__: None, every=50), has_own_memory=True)
    recorder.read_batches(WorkloadReader(Needs()))
    for device.is_capturing in (False, True, False):
        recorder.on_forward((torch.ones(2, 4),), {})
        assert len(recorder.workloads.take()) == (0 if device.is_capturing else 1)
    assert failures == []


def test_a_forked_process_marks_nothing() -> None:
    loader = DataLoader(range(3))
    waits: list[str] = []

    class Listener:
        special = True  # it wants to be called

        def on_wait(self) -> None:
            waits.append("wait")

        def on_batch(self) -> None:
            waits.append("batch")

        def on_no_batch(self) -> None:
            waits.append("end")

    undo = patch_loaders(Listener(), lambda iterator: True)  # type: ignore[arg-type]
    try:
        list(loader)
        assert waits == [*["wait", "batch"] * 3, "wait", "end"]
        child = os.fork()
        if child == 0:
            list(loader)
            os._exit(0 if len(waits) == 8 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        undo()


class Waits:
    """Notes what it is told of waits for batches."""

    special = True  # it wants to be called

    def __init__(self) -> None:
        self.is_evaluating = False
        self.heard: list[str] = []

    def on_wait(self) -> None:
        self.is_evaluating = False  # as the recorder does: the loop trains again
        self.heard.append("wait")

    def on_batch(self) -> None:
        self.heard.append("batch")

    def on_no_batch(self) -> None:
        self.heard.append("end")

    def is_elsewhere(self) -> bool:
        return False

    def on_other_loader(self) -> bool:
        self.is_evaluating = True
        return True

    def during(self, loader: Any) -> list[str]:
        """What it is told while somebody goes through the loader."""
        self.heard.clear()
        list(loader)
        return list(self.heard)


EPOCH = [*["wait", "batch"] * 3, "wait", "end"]
DATA = list(range(6))
"""What a loader goes through in an epoch, and what it is made of."""


@pytest.fixture
def waits() -> Waits:
    return Waits()


def test_another_loader_over_the_same_dataset_is_not_the_one_that_is_watched(waits: Waits) -> None:
    training, evaluation = DataLoader(DATA, 2, shuffle=True), DataLoader(DATA, 2)
    hooks = Hooks(waits)  # type: ignore[arg-type]
    hooks.attach_loader(training)
    try:
        for _ in range(2):
            assert waits.during(training) == EPOCH
            assert waits.during(evaluation) == []
    finally:
        hooks.remove()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"batch_size": None}, id="no batches"),
        pytest.param({"batch_sampler": [[0, 1], [2, 3], [4, 5]]}, id="batches that are listed"),
        pytest.param({"batch_size": 2, "num_workers": 1, "persistent_workers": True}, id="workers that stay"),
    ],
)
def test_a_loader_of_any_kind_is_known_again_in_its_next_epoch(waits: Waits, other: dict[str, Any]) -> None:
    training = DataLoader(DATA, **other)
    hooks = Hooks(waits)  # type: ignore[arg-type]
    hooks.attach_loader(training)
    try:
        assert waits.during(training) == waits.during(training) != []
        assert waits.during(DataLoader(DATA, 2)) == []
    finally:
        hooks.remove()


def test_a_copy_of_the_loader_that_a_framework_has_made_is_known_by_its_dataset(waits: Waits) -> None:
    hooks = Hooks(waits)  # type: ignore[arg-type]
    hooks.attach_loader(DataLoader(DATA, 2, shuffle=True))
    try:
        assert waits.during(DataLoader(DATA, 2)) == EPOCH
        assert waits.during(DataLoader(list(DATA), 2)) == []
    finally:
        hooks.remove()


def test_any_programs_training_loader_is_known_again_after_an_evaluation(waits: Waits) -> None:
    training, evaluation = DataLoader(DATA, 2, shuffle=True), DataLoader(DATA, 2)
    marks = LoaderMarks(waits)  # type: ignore[arg-type]
    try:
        for _ in range(3):
            assert waits.during(training) == EPOCH
            marks.on_step()
            waits.is_evaluating = True
            assert waits.during(evaluation) == []
    finally:
        marks.remove()


def test_a_training_loader_that_is_made_anew_each_epoch_is_known_by_its_dataset(waits: Waits) -> None:
    evaluation = DataLoader(list(DATA), 2)
    marks = LoaderMarks(waits)  # type: ignore[arg-type]
    try:
        for _ in range(3):
            assert waits.during(DataLoader(DATA, 2, shuffle=True)) == EPOCH
            marks.on_step()
            waits.is_evaluating = True
            assert waits.during(evaluation) == []
    finally:
        marks.remove()


def test_a_loader_that_only_evaluations_use_never_feeds_the_training(waits: Waits) -> None:
    evaluation = DataLoader(DATA, 2)
    marks = LoaderMarks(waits)  # type: ignore[arg-type]
    try:
        for _ in range(3):
            batches = iter(evaluation)
            next(batches)  # nobody knows yet
            waits.is_evaluating = True
            assert waits.during(batches) == []
            waits.is_evaluating = False
            marks.on_step()
    finally:
        marks.remove()


def test_another_loader_that_is_asked_again_without_a_step_in_between_is_an_evaluations(waits: Waits) -> None:
    training, evaluation = DataLoader(DATA, 2, shuffle=True), DataLoader(DATA, 2)
    marks = LoaderMarks(waits)  # type: ignore[arg-type]
    try:
        for _ in range(3):
            assert waits.during(training) == EPOCH
            marks.on_step()
            assert waits.during(evaluation) == [
                "wait",
                "batch",
            ]  # may be a second loader of the step
    finally:
        marks.remove()


def test_no_loader_is_kept_alive(waits: Waits) -> None:
    dataset = Numbers()
    training, kept = DataLoader(dataset, 2), weakref.ref(dataset)
    marks = LoaderMarks(waits)  # type: ignore[arg-type]
    try:
        list(training)
        marks.on_step()
        del training, dataset
        assert kept() is None
    finally:
        marks.remove()


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


def test_a_finished_run_leaves_nothing_for_the_interpreters_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda function: waiting.append(function) or function)
    monkeypatch.setattr(atexit, "unregister", waiting.remove)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config=CONFIG)
    train(model, optimizer, 5)
    assert [function.__qualname__ for function in waiting] == ["_finish_at_exit.<locals>.finish"]
    monitor.finish_training()
    assert waiting == []
    assert len(load_run(tmp_path)) == 5
