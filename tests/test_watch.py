"""`watch`: a loop that knows nothing of us is measured by hooks, and not changed by them."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import save as checkpoint_save
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, dataloader
from torch.utils.flop_counter import FlopCounterMode

from flopmeter import ConfigError, TrainingMonitor, load_run, watch
from flopmeter.flops.observe import observe
from flopmeter.flops.workload import Needs, WorkloadReader, resolve
from flopmeter.monitor.recorder import IN_STEP
from flopmeter.report import report_of

CONFIG = {"monitoring": {"peak_flop_per_s": 1e12, "sinks": []}}
WIDTH, BATCH = 8, 4
LAYER = 2 * BATCH * WIDTH * WIDTH

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH, bias=False))


def make_loader(num_batches: int = 12, num_workers: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(
        list(torch.randn(num_batches * BATCH, WIDTH, generator=generator)), BATCH, num_workers=num_workers
    )


def train(model: Any, optimizer: Any, loader: Any, accumulate: int = 1) -> list[float]:
    """The user's loop: nothing in it knows of flopmeter."""
    torch.manual_seed(2)
    losses = []
    for index, batch in enumerate(loader, start=1):
        loss = model(batch).square().mean()
        loss.backward()
        if index % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def watched(tmp_path: Path, config: Any = None, **kwargs: Any) -> tuple[list[float], TrainingMonitor]:
    model, loader = make_model(), make_loader(kwargs.pop("num_batches", 12), kwargs.pop("num_workers", 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, loader, output_dir=tmp_path, config=config or CONFIG)
    losses = train(model, optimizer, loader, **kwargs)
    monitor.finish_training()
    return losses, monitor


def unwatched(**kwargs: Any) -> list[float]:
    model, loader = make_model(), make_loader(kwargs.pop("num_batches", 12))
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **kwargs)


def test_steps_flop_and_phases_come_from_hooks_alone(tmp_path: Path) -> None:
    watched(tmp_path)
    run = load_run(tmp_path)
    assert len(run) == 12
    # Two layers forward, both weights and one input backward.
    assert run.column("perf/model_flop")[-1] == 5 * LAYER
    for phase in ("data_wait", "forward", "backward", "optimizer"):
        assert all(0 < share < 1 for share in run.column(f"perf/{phase}_share"))


def test_a_step_is_an_optimizer_step_whatever_is_accumulated(tmp_path: Path) -> None:
    losses, _ = watched(tmp_path, accumulate=3)
    run = load_run(tmp_path)
    assert losses == unwatched(accumulate=3)
    assert len(run) == 4
    assert run.column("perf/model_flop")[-1] == 3 * 5 * LAYER


def test_log_step_adds_the_loops_numbers_to_the_step_before_it(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainingMonitor(tmp_path, CONFIG, model=model, optimizer=optimizer) as monitor:
        for step in range(10, 14):
            loss = model(torch.ones(BATCH, WIDTH)).mean()
            loss.backward()
            optimizer.step()
            monitor.log_step(step, epoch=1, loss=float(step), grad_norm=None, learning_rate=0.1, accuracy=0.5)
    run = load_run(tmp_path)
    assert list(run.step) == [10, 11, 12, 13]
    assert list(run.column("training/loss")) == [10.0, 11.0, 12.0, 13.0]
    assert list(run.column("accuracy")) == [0.5] * 4


@pytest.mark.parametrize(("is_training", "name"), [(False, "eval"), (True, "no_grad")])
def test_passes_without_gradients_between_the_steps_are_a_pause_and_no_step(
    tmp_path: Path, is_training: bool, name: str
) -> None:
    """An evaluation by the model's mode; else they may be rollouts."""
    model, loader = make_model(), make_loader(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, loader, output_dir=tmp_path, config=CONFIG)
    train(model, optimizer, loader)
    model.train(is_training)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(BATCH, WIDTH))
    model.train()
    train(model, optimizer, loader)
    monitor.finish_training()
    run = load_run(tmp_path)
    assert len(run) == 12
    pauses = [event["name"] for event in run.events if event["event"] == "pause"]
    assert [pause for pause in pauses if pause != "flopmeter"] == [name]  # the others: reading what was measured


def test_passes_without_gradients_in_every_step_are_no_pauses_and_their_flop_is_not_counted(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config=CONFIG)
    x = torch.ones(BATCH, WIDTH)
    for _ in range(12):  # self-conditioning, and a target before the backward pass
        with torch.no_grad():
            guess = model(x)
        out = model(x + guess)
        with torch.no_grad():
            target = model(x)
        (out - target).square().mean().backward()
        optimizer.step()
    monitor.finish_training()
    run = load_run(tmp_path)
    pauses = [event["after_step"] for event in run.events if event["event"] == "pause" and event["name"] == "no_grad"]
    assert all(step < 3 for step in pauses)
    assert [event["message"] for event in run.events if event["event"] == "warning"] == [IN_STEP]
    # Two layers forward, both weights and one input backward: that of the one pass with gradients.
    assert run.column("perf/model_flop")[-1] == 5 * LAYER


LOGGINGS = {
    "none": ("", "flopmeter: "),
    "its own": ("import logging; logging.basicConfig()", "WARNING:flopmeter:"),
    "its own, set up later": ("", "WARNING:flopmeter:"),
    "a handler for us": ("import logging; logging.getLogger('flopmeter').addHandler(logging.StreamHandler())", ""),
    "a handler that keeps us silent": (
        "import logging; logging.getLogger('flopmeter').addHandler(logging.NullHandler())", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGGINGS)
def test_a_warning_says_whose_it_is_where_the_program_has_no_logging(tmp_path: Path, name: str) -> None:
    setup, signature = LOGGINGS[name]
    code = f"""
{setup}
import logging
from flopmeter import TrainingMonitor
for _ in range(3):
    with TrainingMonitor("run", {{"monitoring": {{"sinks": []}}}}) as monitor:
        monitor.log_step(1)
    if {name == "its own, set up later"}:
        logging.basicConfig()
"""
    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    message = "run/run.jsonl was a run that has ended: it is now"
    lines = [line.partition(message)[0] for line in answer.stderr.splitlines() if message in line]
    assert lines == ([] if signature is None else [signature] * 2)


def test_everything_is_taken_away_again(tmp_path: Path) -> None:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward, fetch = torch.autograd.backward, dataloader._BaseDataLoaderIter.__next__
    threads = threading.active_count()
    monitor = watch(model, optimizer, loader, output_dir=tmp_path, config=CONFIG)
    train(model, optimizer, loader)
    monitor.finish_training()
    monitor.finish_training()
    assert torch.autograd.backward is backward
    assert dataloader._BaseDataLoaderIter.__next__ is fetch
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert threading.active_count() == threads


def test_two_monitors_in_one_process_keep_to_their_own_model(tmp_path: Path) -> None:
    backward = torch.autograd.backward
    first, second = make_model(), make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    monitors = [
        watch(model, optimizer, output_dir=tmp_path / str(i), config=CONFIG)
        for i, (model, optimizer) in enumerate(zip((first, second), optimizers, strict=True))
    ]
    train(first, optimizers[0], make_loader(5))
    train(second, optimizers[1], make_loader(7))
    for monitor in monitors:  # the second one's patches stand on the first one's, which goes first
        monitor.finish_training()
    assert [len(load_run(tmp_path / str(i))) for i in range(2)] == [5, 7]
    assert torch.autograd.backward is backward


class Graphs:
    """A compiler back end that counts graphs: a hook that breaks one shows up here."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.num_graphs += 1
        return graph.forward


@pytest.mark.parametrize("way", ["torch.compile, hooked inside", "torch.compile, hooked outside", "module.compile"])
def test_a_compiled_model_stays_one_graph_and_is_marked(tmp_path: Path, way: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    torch._dynamo.reset()
    graphs, model = Graphs(), Model()
    called: Any = model
    if way == "module.compile":
        model.compile(backend=graphs, fullgraph=True)
    else:
        called = torch.compile(model, backend=graphs, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked = model if "inside" in way else called
    monitor = watch(hooked, optimizer, output_dir=tmp_path, config=CONFIG)
    train(called, optimizer, make_loader())
    monitor.finish_training()
    run = load_run(tmp_path)
    assert graphs.num_graphs == 1
    assert len(run) == 12
    assert all(share > 0 for share in run.column("perf/forward_share"))
    torch._dynamo.reset()


def test_hooks_do_not_travel_with_the_model(tmp_path: Path) -> None:
    model = make_model()
    monitor = watch(model, output_dir=tmp_path, config=CONFIG)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), AveragedModel(model), torch.load(file, weights_only=False)]
    monitor.finish_training()
    for twin in copies:
        twin(torch.ones(BATCH, WIDTH))
    assert len(load_run(tmp_path)) == 0


def test_checkpointing_does_not_count_its_second_forward_as_a_batch(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config=CONFIG)
    for _ in range(6):
        checkpoint(model, torch.ones(BATCH, WIDTH, requires_grad=True), use_reentrant=False).sum().backward()
        optimizer.step()
    monitor.finish_training()
    run = load_run(tmp_path)
    samples = [
        rate * s for rate, s in zip(run.column("perf/samples_per_second"), run.column("perf/step_time"), strict=True)
    ]
    assert samples == pytest.approx([BATCH] * 6)


def test_the_autograd_graph_is_free_after_log_step(tmp_path: Path) -> None:
    model = make_model()
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor:
        hidden = model(torch.ones(BATCH, WIDTH))
        graph = weakref.ref(hidden)
        loss = hidden.mean()
        loss.backward()
        monitor.log_step(1, 0, loss, loss * 2, 0.1)
        del hidden, loss
        gc.collect()
        assert graph() is None


def test_nothing_is_read_from_the_device(tmp_path: Path) -> None:
    # On the meta device every way of reading raises; so would it stop a GPU.
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.layer(self.embedding(input_ids)).mean()

    model = Tagger().to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"monitoring": {**CONFIG["monitoring"], "mfu_calculation_mode": "estimate"}}
    monitor = watch(model, optimizer, output_dir=tmp_path, config=config)
    ids = torch.zeros(2, 5, dtype=torch.long, device="meta")
    for step in range(4):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        loss.backward()
        optimizer.step()
        monitor.update_dataset_metrics(["web", "code"], loss, torch.zeros(2, 5, 9, device="meta"), labels=ids)
        monitor.log_step(step, 0, loss, loss.detach(), 0.1, attention_mask=torch.ones_like(ids))
    assert monitor.run.num_failures == 0
    monitor.finish_training()


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_recorded_as_it_is(tmp_path: Path, loss: float) -> None:
    with TrainingMonitor(tmp_path, CONFIG) as monitor:
        monitor.log_step(1, 0, torch.tensor(loss), None, None)
        monitor.log_step(5, 0, 1.0, None, None)
        monitor.log_step(2, 0, 1.0, None, None)  # resumed from a checkpoint
    run = load_run(tmp_path)
    assert str(run.column("training/loss")[0]) == str(loss)
    assert list(run.step) == [1, 5, 2]


@pytest.mark.parametrize(
    ("settings", "accuracy"),
    [({}, 1.0), ({"dataset_labels_shifted": False}, 0.0), ({"log_dataset_metrics": False}, 1.0)],  # W&B's alone
)
def test_each_dataset_has_its_loss_and_accuracy_in_the_record(
    tmp_path: Path, settings: dict[str, bool], accuracy: float
) -> None:
    labels = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0]])
    logits = nn.functional.one_hot(1 - labels, 2).float()  # each position names what comes after it
    section = "wandb" if "log_dataset_metrics" in settings else "monitoring"
    config = {**CONFIG, "monitoring": {**CONFIG["monitoring"], "detail_every": 2, "dataset_metrics_every": 1}}
    config[section] = {**config.get(section, {}), **settings}
    with TrainingMonitor(tmp_path, config) as monitor:
        for step, (web_loss, code_loss) in enumerate([(1.0, 4.0), (3.0, 8.0)], start=1):
            monitor.update_dataset_metrics(["web", "code"], torch.tensor([web_loss, code_loss]), logits, labels)
            monitor.log_step(step, 0, 1.0, None, None)
    run = load_run(tmp_path)
    found = {key: values[1] for key, values in run.columns.items() if key.startswith("dataset/")}
    assert found == {
        "dataset/web/loss": 2.0, "dataset/web/accuracy": accuracy, "dataset/web/samples": 2,
        "dataset/code/loss": 6.0, "dataset/code/accuracy": accuracy, "dataset/code/samples": 2,
    }  # fmt: skip


def test_the_report_of_a_short_run_knows_its_datasets(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, CONFIG) as monitor:
        monitor.update_dataset_metrics(["web"], torch.tensor([4.0]))
        monitor.log_step(1, 0, 1.0, None, None)  # of the 50 after which datasets are told
    (row,) = report_of(load_run(tmp_path)).datasets
    assert (row.name, row.loss, row.samples) == ("web", 4.0, 1.0)


def test_a_run_starts_with_its_first_step_and_its_header_names_the_peak(tmp_path: Path) -> None:
    model = make_model()
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)
    with pytest.raises(ConfigError):
        monitor.set_training_phase("bogus")
    assert not monitor.is_running
    assert not monitor.run_path.exists()
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    monitor.log_step(1, 0, 1.0, None, None)
    monitor.finish_training()
    run = load_run(tmp_path)
    assert run.header.peak["fp32"]["flop_per_s"] == 1e12
    assert run.header.peak["fp32"]["source"] == "user"
    assert run.named("peak") == []


def test_what_happens_before_the_first_batch_is_starting_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_ns = 0
    for module in ("flopmeter.monitor.recorder", "flopmeter.timing"):
        monkeypatch.setattr(f"{module}.perf_counter_ns", lambda: time.perf_counter_ns() + ahead_ns)
    model, loader = make_model(), make_loader(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, loader, output_dir=tmp_path, config=CONFIG)
    monitor.recorder.clock._now_ns = lambda: time.perf_counter_ns() + ahead_ns  # type: ignore[method-assign]
    ahead_ns = 3600 * 10**9  # an hour of tokenising
    train(model, optimizer, loader)
    monitor.finish_training()
    assert max(load_run(tmp_path).column("perf/step_time")) < 3600


def test_own_events_evaluations_and_metrics_are_recorded(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path, CONFIG) as monitor:
        monitor.log_step(1, 0, 1.0, None, None)
        monitor.log_evaluation(1, eval_loss=0.5, eval_accuracy=0.9, additional_metrics={"f1": 0.8})
        monitor.log_metrics({"custom/x": 3.0}, step=1)
        monitor.log_epoch(0, avg_loss=1.0, elapsed_time=2.0)
    events = {event["event"]: event for event in load_run(tmp_path).events}
    assert events["evaluation"]["metrics"] == {"eval/loss": 0.5, "eval/accuracy": 0.9, "eval/f1": 0.8}
    assert events["metrics"]["metrics"] == {"custom/x": 3.0}
    assert events["epoch"]["avg_loss"] == 1.0


SCRIPT = """
import signal, sys, torch
from flopmeter import watch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background would have it ignored
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = watch(model, optimizer, output_dir=sys.argv[1], config={"monitoring": {"sinks": [], "flush_every": 5}})
for step in range(int(sys.argv[2])):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    monitor.log_step(step, 0, 1.0, None, None)
    if sys.argv[3:] and step == 20:
        print("ready", flush=True)
        exec(sys.argv[3])
"""

NAP = "import time; [time.sleep(0.1) for _ in range(600)]"
"""In short pieces: a signal just before a sleep begins is looked at after it."""


def script(tmp_path: Path, num_steps: int, *then: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(num_steps), *then]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_forgotten_finish_leaves_a_closed_record(tmp_path: Path) -> None:
    with script(tmp_path, 30) as process:
        assert process.wait(120) == 0
    run = load_run(tmp_path)
    assert len(run) == 30
    assert run.summary is not None


def test_an_exception_reaches_the_user_untouched_and_the_record_is_closed(tmp_path: Path) -> None:
    with script(tmp_path, 30, "raise KeyError('mine')") as process:
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert stderr.rstrip().endswith("KeyError: 'mine'")
    run = load_run(tmp_path)
    assert len(run) == 21
    assert run.summary is not None


def test_ctrl_c_leaves_a_closed_record(tmp_path: Path) -> None:
    with script(tmp_path, 30, NAP) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert load_run(tmp_path).summary is not None


def test_kill_9_loses_no_more_than_the_flush_bound(tmp_path: Path) -> None:
    with script(tmp_path, 30, NAP) as process:
        assert process.stdout is not None
        process.stdout.readline()
        threading.Event().wait(2.0)  # the thread has long been awake since
        process.kill()
    run = load_run(tmp_path)
    assert len(run) > 21 - 5  # `flush_every: 5`
    assert run.summary is None
    assert run.skipped == []
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("mode", ["smart", "profiler", "hybrid", "estimate"])
def test_every_mode_has_the_same_flop_between_measurements(tmp_path: Path, mode: str) -> None:
    config = {"monitoring": {**CONFIG["monitoring"], "mfu_calculation_mode": mode, "flops_profile_freq": 0}}
    watched(tmp_path, config)
    assert load_run(tmp_path).column("perf/model_flop")[-1] == pytest.approx(5 * LAYER)


def test_an_optimizer_that_steps_inside_backward_makes_one_step_of_it(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    next(model.parameters()).register_post_accumulate_grad_hook(update)  # the first layer's gradient comes last
    monitor = watch(model, optimizer, output_dir=tmp_path, config=CONFIG)
    for _ in range(8):
        model(torch.ones(BATCH, WIDTH)).sum().backward()
    monitor.finish_training()
    run = load_run(tmp_path)
    assert len(run) == 8
    assert run.column("perf/model_flop")[-1] == 5 * LAYER


def test_no_step_is_observed_inside_a_dispatch_mode_of_the_users(tmp_path: Path) -> None:
    model, loader = make_model(), make_loader(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, loader, output_dir=tmp_path, config=CONFIG)
    with FlopCounterMode(display=False) as theirs:
        train(model, optimizer, loader)
    train(model, optimizer, loader)
    monitor.finish_training()
    run = load_run(tmp_path)
    assert theirs.get_total_flops() == 8 * 5 * LAYER
    observed = [position for position, marks in run.marks.items() if "observed" in marks]
    assert observed
    assert min(observed) >= 8  # the first step after theirs
    assert any("dispatch mode" in event.get("message", "") for event in run.events)


def test_a_mode_of_the_users_that_outlives_the_step_is_left_alone(tmp_path: Path, caplog: Any) -> None:
    model = make_model()
    theirs = FlopCounterMode(display=False)
    step = observe(model)
    with step as observed:
        model(torch.ones(BATCH, WIDTH))
        theirs.__enter__()
        model(torch.ones(BATCH, WIDTH))
    model(torch.ones(BATCH, WIDTH))
    theirs.__exit__(None, None, None)
    assert theirs.get_total_flops() == 2 * 2 * LAYER
    assert observed.result().forward_flop == 2 * 2 * LAYER
    assert "another dispatch mode" in caplog.text
    while torch._C._len_torch_dispatch_stack():  # ours lies beneath, quiet; the test takes it away
        torch.utils._python_dispatch._pop_mode()


def test_workers_that_are_born_in_an_observed_step_hold_no_mode(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config=CONFIG)
    for _ in range(6):  # every step forks its own workers, the observed one too
        batches = list(make_loader(2, num_workers=1))
        model(batches[0]).sum().backward()
        optimizer.step()
    monitor.finish_training()
    run = load_run(tmp_path)
    assert any("observed" in marks for marks in run.marks.values())
    assert run.column("perf/model_flop")[-1] == 5 * LAYER
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_training_phase_has_its_own_frequency(tmp_path: Path) -> None:
    frequencies = {"warmup": 2, "main": 0, "finetune": 3}
    settings = {"overhead_budget": 0.5, "performance_monitoring": {"phase_frequency": frequencies}}
    config = {"monitoring": {**CONFIG["monitoring"], **settings}}
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config=config)
    for phase in ("warmup", "main", "finetune"):
        monitor.set_training_phase(phase)
        train(model, optimizer, make_loader(10))
    monitor.set_training_phase("later")  # a slip in the middle of a run does not stop it
    monitor.finish_training()
    with pytest.raises(ConfigError, match="'later' is not allowed"):
        TrainingMonitor(tmp_path / "new", config).set_training_phase("later")
    phases = [event for event in load_run(tmp_path).events if event["event"] == "training_phase"]
    assert [event["interval_steps"] for event in phases] == [2, 0, 3]


def test_reduced_logging_halves_the_calls_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="counts the calls of the real library, offline")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr("flopmeter.monitor.worker.CLOSE_TIMEOUT_S", 60.0)  # it opens slowly on a busy machine
    import_module("wandb_service").forget_service()
    calls: list[int] = []
    real_log = wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(
        wandb.sdk.wandb_run.Run, "log", lambda run, *a, **k: (calls.append(1), real_log(run, *a, **k))[1]
    )
    counted = []
    for is_reduced in (False, True):
        calls.clear()
        folder = tmp_path / str(is_reduced)
        section = {"enabled": True, "project": "test", "reduced_logging": is_reduced, "dir": str(folder)}
        folder.mkdir()
        watched(folder, {**CONFIG, "wandb": section}, num_batches=40)
        counted.append(len(calls))
    assert counted == [40, 20]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("lengths", "padded_to"), [((3, 1), 4), ((3001, 259), 4096)])
def test_a_mask_of_any_dtype_tells_the_lengths(dtype: torch.dtype, lengths: tuple[int, int], padded_to: int) -> None:
    reader = WorkloadReader(Needs())
    mask = torch.stack([(torch.arange(padded_to) < length).to(dtype) for length in lengths])
    reader.see((), {"input_ids": torch.zeros(2, padded_to, dtype=torch.long), "attention_mask": mask})
    found = resolve(reader.take())
    assert found is not None
    assert (found.tokens, found.tokens_processed) == (sum(lengths), 2 * padded_to)
    assert found.pairs_causal == sum(length * (length + 1) // 2 for length in lengths)


def test_a_mask_that_is_written_over_before_it_was_read_leaves_the_step_without_a_count() -> None:
    reader = WorkloadReader(Needs())
    buffer = torch.ones(2, 8, dtype=torch.long)
    reader.see((), {"input_ids": buffer.clone(), "attention_mask": buffer})
    seen = reader.take()
    known = resolve(seen)
    assert known is not None
    assert known.tokens == 16
    buffer[:, 4:] = 0  # the loop reuses its buffer for the next batch
    assert resolve(seen) is None


@pytest.mark.parametrize("is_made_by_numpy", [True, False])
def test_a_mask_that_numpy_writes_over_later_is_read_before(is_made_by_numpy: bool) -> None:
    np = pytest.importorskip("numpy")
    reader, ids = WorkloadReader(Needs()), torch.zeros(2, 8, dtype=torch.long)
    if is_made_by_numpy:
        buffer = np.ones((2, 8), dtype=np.int64)
        mask = torch.from_numpy(buffer)
    else:
        mask = torch.ones(2, 8, dtype=torch.long)
        buffer = mask.numpy()
    reader.see((), {"input_ids": ids, "attention_mask": mask})
    buffer[:, 3:] = 0  # the next batch: no version of the tensor tells of it
    reader.see((), {"input_ids": ids, "attention_mask": mask})
    buffer[:] = 0
    found = [resolve([seen]) for seen in reader.take()]
    assert [workload and workload.tokens for workload in found] == [2 * 8, 2 * 3]


@pytest.mark.parametrize("how", ["found", "said"])
def test_an_evaluation_that_begins_with_a_measured_step_is_not_measured(tmp_path: Path, how: str) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    was_measuring = []
    with watch(model, optimizer, output_dir=tmp_path, config=CONFIG) as monitor:
        for number in range(1, 8):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            if number == 3:  # the next one is to be observed
                assert monitor.run.effort.is_measuring
                with monitor.pause("eval") if how == "said" else nullcontext(), torch.no_grad():
                    for _ in range(2):
                        model(torch.ones(2, 8))
                        was_measuring.append(torch._C._len_torch_dispatch_stack() > 0)
    assert was_measuring == [False, False]
    run = load_run(tmp_path)
    assert [index for index, marks in run.marks.items() if "observed" in marks] == [4]  # the one after it instead
    assert [event["event"] for event in run.events].count("count") == 1


def test_a_loop_that_calls_its_model_without_gradients_in_every_step_is_measured_all_the_same(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=tmp_path, config=CONFIG):
        for _ in range(10):
            with torch.no_grad():
                model(torch.ones(2, 8))
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    run = load_run(tmp_path)
    assert [event["event"] for event in run.events].count("count") == 1
    assert run.column("perf/model_flop")[-1] == 2 * 2 * (2 * 8 * 8)  # forward, and the gradient of the weights


class Slow:
    """Takes a twentieth of a second to be saved."""

    def __reduce__(self) -> Any:
        time.sleep(0.05)
        return int, (1,)


def test_a_checkpoint_between_steps_is_a_pause_whether_it_is_said_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flopmeter.monitor.recorder.MIN_SAVE_NS", 40_000_000)  # a busy machine saves one number slowly
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    original = torch.save
    with watch(model, optimizer, output_dir=tmp_path, config=CONFIG) as monitor:
        assert pickle.loads(pickle.dumps(torch.save)) is torch.save
        for number in range(1, 11):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if number == 6:
                torch.save({"model": model.state_dict(), "slow": Slow()}, tmp_path / "last.pt")
            if number == 7:
                torch.save(1, tmp_path / "small.pt")
            if number == 8:
                with monitor.pause("checkpoint"):
                    torch.save(Slow(), tmp_path / "last.pt")
        assert torch.load(tmp_path / "small.pt") == 1
    assert torch.save is original is torch.serialization.save
    run = load_run(tmp_path)
    saves = [event for event in run.named("pause") if event["name"] == "checkpoint"]
    assert [event["after_step"] for event in saves] == [6, 8]
    for place, event in zip((6, 8), saves, strict=True):
        assert event["duration_s"] >= 0.05
        wall_s = run.time[place] - run.time[place - 1]
        assert run.column("perf/step_time")[place] == pytest.approx(wall_s - event["duration_s"], abs=0.04)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_by_a_name_that_was_imported_before_is_one_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flopmeter.monitor.recorder.MIN_SAVE_NS", 0)
    model, saves = nn.Linear(4, 4), (torch.save, save_file, checkpoint_save)  # as `from ... import` takes them
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=tmp_path / "run", config=CONFIG):
        for number, save in enumerate((None, None, *saves)):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if save is checkpoint_save:
                checkpoint_save(model.state_dict(), checkpoint_id=tmp_path / "folder", no_dist=True)
            elif save is not None:
                save(model.state_dict(), tmp_path / f"{number}.pt")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    pauses = [event for event in load_run(tmp_path / "run").named("pause") if event["name"] == "checkpoint"]
    assert [event["after_step"] for event in pauses] == [3, 4, 5]


def test_a_save_that_fails_raises_as_it_does_by_itself(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=tmp_path, config=CONFIG), pytest.raises(RuntimeError) as watched:
        torch.save(1, tmp_path / "no" / "folder.pt")
    with pytest.raises(RuntimeError) as alone:
        torch.save(1, tmp_path / "no" / "folder.pt")
    assert str(watched.value) == str(alone.value)
