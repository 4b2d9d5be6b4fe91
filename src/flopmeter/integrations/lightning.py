"""How does a Lightning `Trainer`, or a loop written with Fabric, log its MFU?

    from flopmeter.integrations.lightning import FlopmeterCallback

    trainer = Trainer(callbacks=[FlopmeterCallback("runs/mine")])

    fabric = Fabric()                                                  # or a loop of your own
    model, optimizer = fabric.setup(model, optimizer)
    monitor = flopmeter.watch(model, optimizer, loader, output_dir="runs/mine", accelerator=fabric)

The Trainer calls `training_step` and not the module itself, so the first batch shows which module the step calls; that
one is measured from then on. A step is a training batch in which an optimizer stepped, with the batches accumulated
before it; a GAN's two optimizers make one. `perf/*` go to the Trainer's loggers at its `log_every_n_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from os import PathLike
from typing import Any

from torch import nn

from flopmeter.integrations import LAST_LOG_WAIT_S, NO_SINKS, Config, TrainerPart, harmless, library
from flopmeter.integrations._called import Calls
from flopmeter.monitor import TrainingMonitor

with library("lightning"):
    from lightning.fabric.wrappers import is_wrapped
    from lightning.pytorch import Callback, LightningModule, Trainer

MAX_LEFT_OUT = 8
"""Batches that a step may leave out before we stop looking for what it calls."""


class FlopmeterCallback(TrainerPart, Callback):
    """Measures `Trainer.fit`. Its record is complete when fitting ends; `monitor` is the monitor of the last fit.

    Args:
        output_dir: Where `run.jsonl` goes; the Trainer's `default_root_dir` when None. A resumed run is appended.
        config: As for TrainingMonitor. Without one no sink is on.
    """

    def __init__(self, output_dir: str | PathLike[str] | None = None, config: Config = NO_SINKS) -> None:
        super().__init__(output_dir, config)
        self._has_stepped = False
        self._num_steps = 0
        self._search: Calls | None = None
        self._num_left_out = 0
        self._stand_in: _StandIn | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is sent to another process, measures for itself."""
        return vars(FlopmeterCallback(self._output_dir, self._config))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitor = self._begin(trainer.default_root_dir, pl_module, trainer.train_dataloader)
        self._has_stepped, self._stand_in, self._num_left_out = False, None, 0
        with_weights = [part for part in pl_module.modules() if next(part.parameters(), None) is not None]
        self._search = Calls(with_weights)
        self._undo.callback(self._search.remove)
        self._undo.callback(_pause_in_saving(trainer, monitor))

    @harmless
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._search is not None:
            self._search.whole_step = pl_module, batch  # so it is under DDP
        if self._stand_in is not None and self.monitor is not None:
            self._stand_in(batch)
            self._phase.enter_context(self.monitor.phase("forward"))  # until the backward pass marks itself

    @harmless
    def on_before_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._phase.close()
        if self.monitor is not None:
            self._phase.enter_context(self.monitor.phase("optimizer"))
        self._has_stepped = True

    @harmless
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._phase.close()
        # `training_step` gives nothing back for a batch that it leaves out.
        self._end_search(pl_module, is_left_out=outputs is None or (isinstance(outputs, Mapping) and not outputs))
        if self.monitor is None or not self._has_stepped:
            return
        self._has_stepped = False
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        groups = trainer.optimizers[0].param_groups if trainer.optimizers else ()
        rate = groups[0].get("lr") if groups else None
        self.monitor.log_step(trainer.global_step, epoch=trainer.current_epoch, loss=loss, learning_rate=rate)
        self._num_steps += 1
        every = getattr(trainer, "log_every_n_steps", 0)
        if every and self._num_steps % every == 0:
            _log(trainer, self.monitor.latest())

    @harmless
    def on_validation_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if self.monitor is not None and not trainer.sanity_checking:
            self._pause.enter_context(self.monitor.pause("eval"))

    @harmless
    def on_validation_end(self, *_: Any, **__: Any) -> None:
        self._pause.close()

    def on_train_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._log_the_rest(trainer)
        self._finish()

    def on_exception(self, *_: Any, **__: Any) -> None:
        self._finish()

    @harmless
    def _log_the_rest(self, trainer: Trainer) -> None:
        if self.monitor is not None:
            _log(trainer, self.monitor.latest(LAST_LOG_WAIT_S))

    def _end_search(self, pl_module: LightningModule, *, is_left_out: bool) -> None:
        """After the first batch: measure the one module that the step called, or the batch where there are several.

        After a batch that a step left out, the next one is looked at.
        """
        search = self._search
        if search is None or self.monitor is None:
            return
        if is_left_out and not search.models and self._num_left_out < MAX_LEFT_OUT:
            self._num_left_out += 1
            return
        search.remove()
        self._search = None
        if len(search.models) == 1:
            self.monitor.set_model_ref(search.models[0])
        else:
            self._stand_in = _StandIn(pl_module)
            self.monitor.set_model_ref(self._stand_in, within=pl_module)


class _StandIn(nn.Module):
    """Called with the batch where no single module is: its weights are the step's, its workload is the batch."""

    def __init__(self, step: LightningModule) -> None:
        super().__init__()
        self.step = step

    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __call__(self, batch: Any) -> None:
        if isinstance(batch, Mapping):
            super().__call__(**batch)
        else:
            super().__call__(*(batch if isinstance(batch, (list, tuple)) else (batch,)))


def _log(trainer: Trainer, perf: dict[str, float]) -> None:
    """To the Trainer's loggers, over the steps that its own metrics are logged over."""
    for destination in trainer.loggers if perf else ():
        destination.log_metrics(perf, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def _pause_in_saving(trainer: Trainer, monitor: TrainingMonitor) -> Callable[[], None]:
    """Saving has no hook that tells its end, so the one method that saves is wrapped; gives what undoes it."""
    original = trainer.save_checkpoint

    @wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        with monitor.pause("checkpoint"):
            original(*args, **kwargs)

    trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
    return lambda: vars(trainer).pop("save_checkpoint", None)


def prepared(accelerator: Any, model: Any, optimizer: Any) -> tuple[Any, Any, Callable[[TrainingMonitor], None]]:
    """What to measure of what Fabric's `setup` gave back."""
    model = model.module if is_wrapped(model) else model
    return model, optimizer.optimizer if is_wrapped(optimizer) else optimizer, lambda monitor: None
