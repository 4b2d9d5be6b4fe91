"""Lightning's callback and Fabric: what the training step calls is found, counted and not changed."""

from __future__ import annotations

import copy
import csv
import logging
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="the Trainer is lightning's")

from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from flopmeter import Run, TrainingMonitor, count_flops, load_run, watch
from flopmeter.integrations.lightning import FlopmeterCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::ResourceWarning"
)

CONFIG = {"monitoring": {"peak_flop_per_s": 1e12, "sinks": [], "flops_profile_freq": 0}}
WIDTH, BATCH, NUM_BATCHES = 8, 4, 12
LAYER = 2 * BATCH * WIDTH * WIDTH
STEP = 5 * LAYER
"""Two layers forward, two weights and one input backward."""


class Net(LightningModule):
    """Two layers, called in one of the ways that people call them."""

    def __init__(self, way: str = "self") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "self":
            return self(x)
        return self.layers(x) if self.way == "inner" else self.layers[1](self.layers[0](x))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.predict(batch).square().mean()
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.predict(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(num_batches: int = NUM_BATCHES) -> DataLoader[Any]:
    return DataLoader(list(torch.randn(num_batches * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))), BATCH)


def fit(folder: Path, module: LightningModule, *more: Any, callbacks: Any = None, **settings: Any) -> Trainer:
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **settings}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", default_root_dir=folder, callbacks=callbacks, **quiet, **settings)
    trainer.fit(module, *(more or (loader(),)))
    return trainer


def measured(folder: Path, module: LightningModule | None = None, *more: Any, **settings: Any) -> Run:
    callbacks = [FlopmeterCallback(config=CONFIG), *settings.pop("callbacks", ())]
    fit(folder, module or Net(), *more, callbacks=callbacks, **settings)
    return load_run(folder)


@pytest.mark.parametrize("way", ["self", "inner", "layer by layer"])
def test_what_the_training_step_calls_is_counted(tmp_path: Path, way: str) -> None:
    run = measured(tmp_path, Net(way))
    assert list(run.step) == list(range(1, NUM_BATCHES + 1))
    assert set(run.column("perf/model_flop")[1:]) == {STEP}  # the first step shows what is called
    assert run.header.model == "Net"
    for phase in ("data_wait", "forward", "backward", "optimizer"):
        assert all(0 < share < 1 for share in run.column(f"perf/{phase}_share")[1:])


def test_batches_that_the_step_leaves_out_tell_nothing_of_what_it_calls(tmp_path: Path) -> None:
    class Choosy(Net):
        def training_step(self, batch: torch.Tensor, index: int) -> Any:
            return None if index in (0, 1, 5) else super().training_step(batch, index)

    run = measured(tmp_path, Choosy("inner"))
    assert run.column("perf/model_flop")[-1] == STEP
    assert {flop for flop in run.column("perf/model_flop") if not math.isnan(flop)} == {STEP}


def test_a_callback_that_has_measured_can_be_copied_and_sent(tmp_path: Path) -> None:
    callback = FlopmeterCallback(tmp_path, CONFIG)
    fit(tmp_path, Net(), callbacks=[callback])
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert twin.monitor is None
        fit(tmp_path, Net(), callbacks=[twin])
    assert [len(load_run(path)) for path in (tmp_path, *tmp_path.glob("run.2*.jsonl"))] == [NUM_BATCHES] * 3


def test_the_forward_pass_inside_of_the_optimizers_step_is_not_the_optimizers(tmp_path: Path) -> None:
    # Lightning hands the whole training step to `optimizer.step` as its closure.
    run = measured(tmp_path)
    count = next(event for event in run.events if event["event"] == "count")
    assert (count["forward_flop"], count["backward_flop"], count["optimizer_flop"]) == (2 * LAYER, 3 * LAYER, 0)


def test_accumulated_batches_belong_to_one_step(tmp_path: Path) -> None:
    run = measured(tmp_path, accumulate_grad_batches=3)
    assert list(run.step) == [1, 2, 3, 4]
    assert set(run.column("perf/model_flop")[1:]) == {3 * STEP}
    rates, times = run.column("perf/samples_per_second"), run.column("perf/step_time")
    assert {round(rates[i] * times[i]) for i in (1, 2, 3)} == {3 * BATCH}


class Gan(LightningModule):
    """Manual optimization: two optimizers step in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        for module, optimizer in zip((self.generator, self.critic), self.optimizers(), strict=True):
            loss = module(batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(module.parameters(), lr=0.1) for module in (self.generator, self.critic)]


def test_two_optimizers_that_step_by_hand_make_one_step(tmp_path: Path) -> None:
    run = measured(tmp_path, Gan())
    assert list(run.step) == [2 * (i + 1) for i in range(NUM_BATCHES)]  # as Lightning counts them
    assert run.column("perf/model_flop")[-1] == 2 * 2 * LAYER  # a layer forward, its weight backward, twice


def test_validation_and_saving_are_pauses(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=4, save_top_k=-1)
    settings = {"enable_checkpointing": True, "val_check_interval": 6, "num_sanity_val_steps": 2}
    run = measured(tmp_path, Net(), loader(), loader(2), callbacks=[saving], **settings)
    assert len(run) == NUM_BATCHES
    pauses = [
        (event["name"], event["after_step"])
        for event in run.events
        if event["event"] == "pause" and event["name"] != "flopmeter"
    ]
    assert sorted(pauses) == [("checkpoint", 4), ("checkpoint", 8), ("checkpoint", 12), ("eval", 6), ("eval", 12)]


def test_perf_metrics_reach_the_trainers_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    measured(tmp_path, logger=logger, log_every_n_steps=4)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("perf/mfu")]
    assert rows
    assert all(0 < float(row["perf/mfu"]) < 1 and int(row["step"]) < NUM_BATCHES + 1 for row in rows)


def test_a_resumed_run_is_appended(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path / "saved", save_last=True)
    measured(tmp_path, callbacks=[saving], enable_checkpointing=True)
    trainer = Trainer(
        accelerator="cpu", default_root_dir=tmp_path, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[FlopmeterCallback(config=CONFIG)],
    )  # fmt: skip
    trainer.fit(Net(), loader(), ckpt_path=tmp_path / "saved" / "last.ckpt")
    assert list(load_run(tmp_path).step) == list(range(1, 2 * NUM_BATCHES + 1))


def test_losses_are_the_same_with_and_without_the_callback(tmp_path: Path) -> None:
    watched, alone = Net("inner"), Net("inner")
    run = measured(tmp_path, watched)
    fit(tmp_path, alone)
    assert watched.losses == alone.losses
    assert list(run.column("training/loss")) == pytest.approx(watched.losses)
    assert set(run.column("training/lr")) == {0.1}


def test_everything_is_taken_away_again(tmp_path: Path) -> None:
    module, backward = Net("inner"), torch.autograd.backward
    trainer = fit(tmp_path, module, callbacks=[FlopmeterCallback(config=CONFIG)])
    assert torch.autograd.backward is backward
    assert "save_checkpoint" not in vars(trainer)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_a_run_that_dies_leaves_its_record(tmp_path: Path) -> None:
    class Dies(Net):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if index == 5:
                raise ValueError("the user's own")
            return super().training_step(batch, index)

    with pytest.raises(ValueError, match="the user's own"):
        measured(tmp_path, Dies())
    assert len(load_run(tmp_path)) == 5


def test_a_failing_monitor_leaves_the_trainer_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(FlopmeterCallback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            super().on_train_start(trainer, pl_module)
            assert self.monitor is not None
            self.monitor.phase = None  # type: ignore[method-assign, assignment]

    with caplog.at_level(logging.WARNING, "flopmeter"):
        trainer = fit(tmp_path, Net(), callbacks=[Breaks(config=CONFIG)])
    assert trainer.global_step == NUM_BATCHES
    assert len([record for record in caplog.records if "monitoring is now off" in record.message]) == 1
    assert load_run(tmp_path).summary is not None


def test_a_model_of_transformers_inside_is_counted_without_its_padding(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the model is transformers'")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip

    class Text(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.LlamaForCausalLM(config)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    ids = torch.randint(2, 64, (16,), generator=torch.Generator().manual_seed(0))
    sample = {"input_ids": ids, "labels": ids, "attention_mask": (torch.arange(16) < 11).long()}
    module = Text()
    run = measured(tmp_path, module, DataLoader([sample] * NUM_BATCHES * BATCH, BATCH))
    batch = {name: value.expand(BATCH, 16).clone() for name, value in sample.items()}
    assert set(run.column("perf/model_flop")[1:]) == {count_flops(module.model, batch).model_flop}


def test_under_ddp_the_module_inside_is_still_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as environment:
        # What Lightning sets for its processes must not outlive this test.
        for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "RANK"):
            environment.setenv(name, "0")
            del os.environ[name]
        try:
            run = measured(tmp_path, Net("inner"), strategy="ddp", devices=1)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    assert len(run) == NUM_BATCHES
    assert set(run.column("perf/model_flop")[1:]) == {STEP}


def test_a_fabric_loop_is_watched(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    plain = Net().layers
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    data = fabric.setup_dataloaders(loader())
    monitor: TrainingMonitor = watch(model, optimizer, data, output_dir=tmp_path, config=CONFIG, accelerator=fabric)
    for batch in data:
        loss = model(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    perf = monitor.latest(wait_s=5.0)
    monitor.finish_training()
    run = load_run(tmp_path)
    assert len(run) == NUM_BATCHES
    assert set(run.column("perf/model_flop")) == {STEP}
    assert perf["perf/model_flop"] == STEP
    assert all(share > 0 for share in run.column("perf/data_wait_share"))
