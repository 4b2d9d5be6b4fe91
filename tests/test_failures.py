"""What goes wrong inside the monitor: does the training go on, is nothing left behind, and is the record whole?"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader

from flopmeter import TrainingMonitor, load_run, watch
from flopmeter.flops import observation, pairs
from flopmeter.flops.observe import observe
from flopmeter.monitor import worker as worker_module
from flopmeter.monitor.measuring import FlopSource
from flopmeter.monitor.schedule import WARMUP_STEPS
from flopmeter.monitor.worker import Worker
from flopmeter.record import Run, RunWriter
from flopmeter.sinks import SinkContext

WIDTH, BATCH = 8, 4
CONFIG = {"monitoring": {"sinks": [], "report": False, "peak_flop_per_s": 1e12}}
FLOP = 2 * BATCH * WIDTH * WIDTH
"""Of one product with a weight."""


class Loop:
    """A model of two layers and a loop around it; all of its products are forward, weight gradient, input gradient."""

    def __init__(self, folder: Path, model: nn.Module | None = None, **arguments: Any) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.folder = folder
        self.others = threading.enumerate()
        self.monitor = watch(self.model, self.optimizer, output_dir=folder, config=CONFIG, **arguments)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        self.model(torch.ones(BATCH, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fail_three_times(self) -> None:
        tell, self.monitor.recorder.tell = self.monitor.recorder.tell, None
        for _ in range(3):
            self.monitor.log_step(99)
        self.monitor.recorder.tell = tell

    def finish(self) -> Run:
        self.monitor.finish_training()
        assert _get_current_dispatch_mode() is None
        assert torch.autograd.backward.__module__ == "torch.autograd"
        assert not self.model._forward_pre_hooks
        new = [thread.name for thread in threading.enumerate() if thread not in self.others]
        assert not [name for name in new if name.startswith("flopmeter")]
        return load_run(self.folder)


def test_an_operator_that_we_cannot_read_is_listed_and_the_step_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = observation.Observation._count

    def count(self: Any, op: str, *args: Any) -> None:
        if op == "aten::relu":
            raise RuntimeError("a tensor of an unusual kind")
        real(self, op, *args)

    monkeypatch.setattr(observation.Observation, "_count", count)
    loop = Loop(tmp_path)
    loop.train(8)
    run = loop.finish()
    assert len(run) == 8
    assert run.last("count")["uncounted"] == {"aten::relu": 1}
    assert run.column("perf/model_flop")[-1] == 5 * FLOP  # nobody wants the gradient of the input


class Nested(nn.Module):
    """Sequences of different lengths, as nested tensors."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layout = layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x[:1], x[1:]]
        return torch.cat(
            [part.flatten() for part in self.layer(torch.nested.as_nested_tensor(parts, layout=self.layout)).unbind()]
        )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_trained_and_counted(tmp_path: Path, layout: torch.layout) -> None:
    loop = Loop(tmp_path, Nested(layout))
    loop.train(8)
    run = loop.finish()
    assert len(run) == 8
    assert run.last("count")["model_flop"] == 2 * FLOP  # 4 rows forward, and the gradient of the weight


def test_an_input_that_we_cannot_read_belongs_to_the_module_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("a batch of an unusual kind")

    monkeypatch.setattr("flopmeter.flops.frames._first_tensor", refuse)
    loop = Loop(tmp_path)
    loop.train(8)
    assert loop.finish().last("count")["model_flop"] == 5 * FLOP


def test_a_model_that_cannot_be_counted_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AttributeError("no attribute sym_float")

    monkeypatch.setattr("flopmeter.flops.observation.tally", refuse)
    loop = Loop(tmp_path)
    loop.train(30)
    run = loop.finish()
    assert len(run) == 30
    assert [place for place, marks in run.marks.items() if "observed" in marks] == [WARMUP_STEPS]
    warnings = [event["message"] for event in run.named("warning")]
    assert warnings == ["no more steps are measured, because measuring failed: AttributeError: no attribute sym_float"]


def test_a_measurement_that_does_not_begin_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise RuntimeError("not now")

    monkeypatch.setattr(FlopSource, "start", refuse)
    loop = Loop(tmp_path)
    loop.train(30)
    run = loop.finish()
    assert len(run) == 30
    assert len(run.named("warning")) == 1


def test_the_third_failure_stops_the_measurement_and_keeps_the_record(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(WARMUP_STEPS)
    assert _get_current_dispatch_mode() is not None  # the observed step has begun
    loop.fail_three_times()
    assert _get_current_dispatch_mode() is None
    loop.train(20)
    run = loop.finish()
    assert len(run) == WARMUP_STEPS
    assert run.summary is not None


def test_a_batch_that_cannot_be_read_is_complained_of_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)

    def refuse(*_: Any) -> None:
        raise RuntimeError("odd")

    assert loop.monitor.recorder.workloads is not None
    monkeypatch.setattr(loop.monitor.recorder.workloads, "see", refuse, raising=False)
    monkeypatch.setattr(loop.monitor.recorder, "see", refuse)  # what the hooks call on ordinary steps
    loop.train(50)
    assert sum("reading the batch failed" in record.message for record in caplog.records) == 3
    loop.finish()


def test_another_model_in_the_middle_of_an_observed_step_leaves_no_mode_behind(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(WARMUP_STEPS)
    loop.monitor.set_model_ref(nn.Linear(WIDTH, WIDTH))
    assert _get_current_dispatch_mode() is None
    loop.train(3)
    loop.finish()


def test_steps_before_another_model_keep_their_own_flops(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(20)
    wide = nn.Sequential(nn.Linear(WIDTH, 10 * WIDTH), nn.ReLU(), nn.Linear(10 * WIDTH, WIDTH))
    loop.monitor.set_model_ref(wide)
    loop.optimizer.add_param_group({"params": list(wide.parameters())})
    loop.model = wide
    loop.train(20)
    flop = loop.finish().column("perf/model_flop")
    assert flop[19] == 5 * FLOP
    assert flop[39] == 50 * FLOP


def test_a_part_of_the_end_that_fails_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path)
    loop.train(8)

    def refuse() -> None:
        raise RuntimeError("the profiler does not stop")

    monkeypatch.setattr(loop.monitor.run.effort.sampling._garbage, "close", refuse)
    run = loop.finish()
    assert len(run) == 8
    assert run.summary is not None
    assert (tmp_path / "training_log.json").exists()


def test_a_disk_that_hangs_does_not_hang_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "CLOSE_TIMEOUT_S", 0.2)
    pipe = tmp_path / "run.jsonl"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    config = TrainingMonitor(tmp_path / "other", CONFIG).config
    context = SinkContext(config=config, output_dir=tmp_path, header={}, rank=0)
    writing = Worker(RunWriter(pipe), [], context, lambda item: item, {}, deque(), flush_every=1, flush_s=1.0)
    writing.queue.append({"text": "x" * (1 << 20)})  # more than a pipe holds
    start_s = time.monotonic()
    writing.close()
    took_s = time.monotonic() - start_s
    while writing._thread.is_alive():
        try:
            os.read(reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
    os.close(reader)
    assert took_s < 5  # before, for ever


def test_a_phase_that_is_told_at_every_step_is_no_new_phase(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for number in range(60):
        loop.monitor.set_training_phase("warmup" if number < 10 else "main")
        loop.step()
    run = loop.finish()
    assert len(run.named("training_phase")) == 2
    assert [place for place, marks in run.marks.items() if "observed" in marks] == [WARMUP_STEPS]


def test_an_evaluation_with_gradients_inside_a_pause_is_no_training(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(8)
    with loop.monitor.pause("eval"):
        with loop.monitor.pause("inner"):
            pass
        for _ in range(5):
            loop.model(torch.ones(100 * BATCH, WIDTH))
        time.sleep(0.3)
    loop.train(2)
    run = loop.finish()
    assert len(run) == 10
    assert run.column("perf/model_flop")[8] == 5 * FLOP
    assert run.column("perf/step_time")[8] < 0.3


def test_a_call_without_gradients_inside_a_step_is_in_its_time_and_in_nothing_else(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(8)
    loss = loop.model(torch.ones(BATCH, WIDTH)).sum()
    with torch.no_grad():
        loop.model(torch.ones(BATCH, WIDTH))
    time.sleep(0.2)
    loss.backward()
    time.sleep(0.2)
    loop.optimizer.step()
    run = loop.finish()
    assert [event for event in run.named("pause") if event["name"] == "eval"] == []
    assert run.column("perf/step_time")[8] >= 0.4
    assert run.column("perf/model_flop")[8] == 5 * FLOP


def test_what_follows_the_last_batch_is_no_copying(tmp_path: Path) -> None:
    loader = DataLoader(list(torch.ones(6 * BATCH, WIDTH)), BATCH)
    loop = Loop(tmp_path, loader=loader)
    for _ in range(2):
        for _ in loader:
            loop.step()
        time.sleep(0.3)  # a checkpoint at the end of the epoch
    run = loop.finish()
    assert run.column("perf/step_time")[6] > 0.3
    assert run.column("perf/host_to_device_share")[6] < 0.5
    assert run.column("perf/other_share")[6] > 0.5


def test_numbers_without_a_step_get_the_last_one_and_a_dict_may_be_used_again(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    values = {"mine": 0.0}
    for number in range(1, 7):
        loop.step()
        loop.monitor.log_step(1000 + number)
        values["mine"] = float(number)
        loop.monitor.log_metrics(values)
    with loop.monitor.pause("checkpoint"):
        pass
    run = loop.finish()
    assert [(event["step"], event["metrics"]["mine"]) for event in run.named("metrics")] == [
        (1000 + number, float(number)) for number in range(1, 7)
    ]
    assert run.last("pause")["after_step"] == 1006


def test_all_shapes_are_in_the_facts_of_a_short_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for rows in range(1, 21):
        loop.model(torch.ones(rows, WIDTH)).sum().backward()
        loop.optimizer.step()
    assert loop.finish().last("facts")["num_shapes"] == 20


def test_a_forked_child_ends_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(5)
    child = os.fork()
    if child == 0:
        start_s = time.monotonic()
        loop.monitor.finish_training()
        os._exit(0 if time.monotonic() - start_s < 5 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loop.train(1)
    assert len(loop.finish()) == 6


def test_a_model_without_its_parameters_can_be_watched(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, CONFIG, model=nn.LazyLinear(WIDTH)) as monitor:
        assert monitor.is_running


def test_a_failure_is_in_the_summary(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TrainingMonitor(tmp_path, CONFIG):
        raise KeyError("the training code's own")
    summary = load_run(tmp_path).summary
    assert summary is not None
    assert summary["failure"] == "KeyError"


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_mask_given_as_a_function_is_asked_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    length, heads, channels = 256, 2, 16
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu")
    query = torch.ones(1, heads, length, channels)
    # Two products of 2 * channels for each of the pairs on and below the diagonal.
    exact = heads * 2 * 2 * channels * length * (length + 1) // 2
    for max_pairs, band_pairs, error in ((1 << 26, 1 << 22, 0.0), (1 << 26, 3 * length, 0.0), (1 << 12, 1 << 10, 0.01)):
        monkeypatch.setattr(pairs, "MAX_PAIRS", max_pairs)
        monkeypatch.setattr(pairs, "BAND_PAIRS", band_pairs)
        with observe() as observed:
            flex_attention(query, query, query, block_mask=block_mask)
        assert observed.result().forward_flop == pytest.approx(exact, rel=error or 1e-12)


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files by /proc")
def test_a_monitor_that_was_switched_off_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    loop = Loop(tmp_path)
    loop.train(2)
    loop.fail_three_times()
    loop.finish()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_second_run_in_the_same_folder_puts_the_first_aside_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Loop(tmp_path), None
    first.train(8)
    first.finish()
    assert "has ended" not in caplog.text
    second = Loop(tmp_path)
    second.train(20)
    run = second.finish()
    assert "run.jsonl was a run that has ended: it is now run.2" in caplog.text
    assert (run.starts, len(run)) == ([0], 20)
    (aside,) = tmp_path.glob("run.2*.jsonl")
    assert len(load_run(aside)) == 8
    assert run.summary is not None
    # Three of the twenty warm up, one is observed.
    assert run.summary["metrics"]["steady_steps"] == 16


@pytest.mark.parametrize(
    ("first_step", "variable", "is_restart"), [(9, None, True), (5, None, False), (1, "SLURM_RESTART_COUNT", True)]
)
def test_a_run_goes_on_where_its_first_step_or_the_launcher_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_step: int, variable: str | None, is_restart: bool
) -> None:
    for start in (1, first_step):
        monitor = TrainingMonitor(tmp_path, {"monitoring": {"sinks": [], "report": False}})
        for step in range(start, start + 8):
            monitor.log_step(step)
        monitor.finish_training()
        if variable is not None:
            monkeypatch.setenv(variable, "1")
    run = load_run(tmp_path)
    assert len(run.headers) == (2 if is_restart else 1)
    assert list(run.step) == [*(range(1, 9) if is_restart else ()), *range(first_step, first_step + 8)]
    assert len(list(tmp_path.glob("run.2*.jsonl"))) == (0 if is_restart else 1)
