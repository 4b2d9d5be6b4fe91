"""`watch(accelerator=...)`: a loop written with Accelerate is measured, and its trackers hear of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="the loop is written with accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker

from flopmeter import ConfigError, load_run, watch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

CONFIG = {"monitoring": {"peak_flop_per_s": 1e12, "sinks": [], "flops_profile_freq": 0}}
WIDTH, BATCH, NUM_BATCHES = 8, 4, 12
LAYER = 2 * BATCH * WIDTH * WIDTH


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state in the process; each test gets its own."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def train(accelerator: Accelerator, folder: Path | None, with_accelerator: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH, bias=False))
    data = list(torch.randn(NUM_BATCHES * BATCH, WIDTH, generator=torch.Generator().manual_seed(1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, BATCH))
    monitor = None
    if folder is not None:
        given = {"accelerator": accelerator} if with_accelerator else {}
        monitor = watch(model, optimizer, loader, output_dir=folder, config=CONFIG, **given)
    losses: list[float] = []
    for step, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if step % 4 == 0:
            accelerator.log({"loss": losses[-1], "note": "words are no numbers"}, step=step)
    accelerator.end_training()
    if monitor is not None and not with_accelerator:
        monitor.finish_training()
    return losses


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulated_batches_belong_to_one_step(tmp_path: Path, accumulate: int) -> None:
    train(Accelerator(cpu=True, gradient_accumulation_steps=accumulate), tmp_path)
    run = load_run(tmp_path)
    assert len(run) == NUM_BATCHES // accumulate
    # Two layers forward, two weights and one input backward.
    assert set(run.column("perf/model_flop")) == {accumulate * 5 * LAYER}
    for phase in ("data_wait", "forward", "backward", "optimizer"):
        assert all(0 < share < 1 for share in run.column(f"perf/{phase}_share"))


def test_what_the_loop_logs_is_recorded(tmp_path: Path) -> None:
    losses = train(Accelerator(cpu=True), tmp_path)
    logged = [(event["step"], event["metrics"]) for event in load_run(tmp_path).events if event["event"] == "metrics"]
    assert logged == [(step, {"loss": losses[step - 1]}) for step in (4, 8, 12)]


def test_perf_metrics_reach_the_other_trackers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the event file is TensorBoard's")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("events")
    train(accelerator, tmp_path)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    shown = events.Scalars("perf/model_flop")
    assert {scalar.value for scalar in shown} == {5 * LAYER}
    assert shown[-1].step == NUM_BATCHES
    assert [scalar.step for scalar in events.Scalars("loss")] == [4, 8, 12]


def test_losses_are_the_same_with_and_without_us(tmp_path: Path) -> None:
    watched = train(Accelerator(cpu=True, gradient_accumulation_steps=2), tmp_path)
    assert watched == train(Accelerator(cpu=True, gradient_accumulation_steps=2), None)


def test_the_prepared_objects_are_enough(tmp_path: Path) -> None:
    train(Accelerator(cpu=True, gradient_accumulation_steps=3), tmp_path, with_accelerator=False)
    assert set(load_run(tmp_path).column("perf/model_flop")) == {3 * 5 * LAYER}


def test_autocast_work_is_held_against_the_peak_of_its_dtype(tmp_path: Path) -> None:
    train(Accelerator(cpu=True, mixed_precision="bf16"), tmp_path)
    count = next(event for event in load_run(tmp_path).events if event["event"] == "count")
    assert count["by_dtype"] == {"bfloat16": 5 * LAYER}


class Broken(GeneralTracker):
    """A tracker that cannot log `perf/*`."""

    name, requires_logging_directory, tracker = "broken", False, None

    def __init__(self) -> None:
        super().__init__()

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if any(name.startswith("perf/") for name in values):
            raise OSError("the server is gone")


def test_a_tracker_that_fails_costs_neither_the_training_nor_the_record(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=Broken())
    accelerator.init_trackers("mine")
    assert len(train(accelerator, tmp_path)) == NUM_BATCHES
    run = load_run(tmp_path)
    assert len(run) == NUM_BATCHES
    assert run.summary is not None


def test_another_kind_of_accelerator_is_refused(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"accelerate's Accelerator or lightning's Fabric, not builtins\.str"):
        watch(model, output_dir=tmp_path, accelerator="cuda")
