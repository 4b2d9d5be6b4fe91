"""What can a training loop tell us? `TrainingMonitor`: every method that a loop calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from time import perf_counter_ns
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from flopmeter.config import MonitorConfig
from flopmeter.errors import ConfigError
from flopmeter.monitor.digest import Log
from flopmeter.monitor.lifetime import MAX_FAILURES, Lifetime, harmless
from flopmeter.monitor.tracker import StepTracker
from flopmeter.record import write_training_log
from flopmeter.schema import PHASES
from flopmeter.timing.late import LateNumbers

logger = logging.getLogger("flopmeter")

_T = TypeVar("_T")


class TrainingMonitor(Lifetime):
    """Measures a training run from inside its loop. Everything it learns goes to `<output_dir>/run.jsonl`.

    With an optimizer, a step ends when the optimizer has stepped after a forward pass, and `log_step` adds loss and
    learning rate to it; without one, `log_step` ends the step.

    Args:
        config: A YAML file, a preset's name, a mapping, or a MonitorConfig.
        log_file: Name of the plain JSON document that `save_logs` writes beside the run file.
        flops_profile_freq: Steps between two measurements of FLOPs; None takes it from the config.
        model: The object that the loop calls; without it FLOPs stay unknown until `set_model_ref`.
        optimizer: Its steps are the steps.
        loader: A DataLoader whose waits are timed; any other iterable goes through `batches`.
        finds_evaluation: Take forward passes without gradients between two steps for an evaluation, which is a pause,
            unless every step has them. Not where `pause` tells of every evaluation: there they are part of the step, as
            in preference tuning.
    """

    def __init__(
        self,
        output_dir: str | PathLike[str],
        config: str | PathLike[str] | Mapping[str, Any] | MonitorConfig | None = None,
        log_file: str = "training_log.json",
        flops_profile_freq: int | None = None,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        loader: Any = None,
        finds_evaluation: bool = True,
    ) -> None:
        super().__init__(output_dir, config, log_file, flops_profile_freq)
        self._numbers = LateNumbers()
        self._tracker.finds_evaluation = finds_evaluation
        self._has_optimizer = self._tracker.has_optimizer = optimizer is not None
        if model is not None:
            self.set_model_ref(model)
        if optimizer is not None:
            self._hooks.attach_optimizer(optimizer)
        if loader is not None:
            self._hooks.attach_loader(loader)

    def set_training_phase(self, phase: str) -> None:
        """Say which phase begins (warmup, main, finetune): each has its measuring frequency in the settings.

        Raises:
            ConfigError: There is no such phase. In a run that has begun that is a warning.
        """
        try:
            self._effort.begin_phase(phase)
        except ConfigError as error:
            if self._state == "new":
                raise
            logger.warning("set_training_phase: %s", error)
        self._steps.next_look = 0

    @property
    def marks(self) -> StepTracker:
        """Where an integration that has hooks of its own tells what the loop does."""
        return self._tracker

    @property
    def is_running(self) -> bool:
        """Whether it has started and not finished."""
        return self._state == "running"

    def batches(self, loader: Iterable[_T]) -> Iterator[_T]:
        """Iterate over any loader, timing the wait for each batch."""
        self.start_training()
        iterator = iter(loader)
        while True:
            self._tracker.on_wait()
            try:
                batch = next(iterator)
            except BaseException as error:
                self._tracker.on_no_batch()
                if isinstance(error, StopIteration):
                    return
                raise
            self._tracker.on_batch()
            yield batch

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step as one of the phases: data_wait, host_to_device, forward, backward, optimizer."""
        if name not in PHASES:
            raise ConfigError(f"there is no phase {name!r}; there are: {', '.join(PHASES)}")
        device_time = self._tracker.device_time if not self._tracker.num_pauses else None
        if device_time is not None:
            device_time.mark(name)
        try:
            with self._clock.phase(PHASES.index(name)):
                yield
        finally:
            if device_time is not None:
                device_time.mark("other")

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Time something between steps (eval, checkpoint): it is lost time, not step time."""
        self.start_training()
        self._tracker.end_evaluation()
        self._tracker.num_pauses += 1
        try:
            with self._clock.pause() as lasted_s:
                self._tracker.on_pause()
                yield
        finally:
            self._tracker.num_pauses -= 1
            self._event("pause", name=name, duration_s=lasted_s())

    def log_step(
        self,
        step: int,
        epoch: float | None = None,
        loss: Any = None,
        grad_norm: Any = None,
        learning_rate: float | None = None,
        attention_mask: Any = None,
        skip_wandb: bool = False,
        **extra: Any,
    ) -> None:
        """Tell the loop's own numbers. `loss` and `grad_norm` may be tensors on the device; they are read later.

        Args:
            attention_mask: Only needed where the model is not called with it.
            skip_wandb: Keep this step out of W&B; it is in the run file all the same.
            extra: More numbers, recorded under their own names.
        """
        if self._num_failures >= MAX_FAILURES:
            return
        start_ns = perf_counter_ns()
        try:
            if self._state == "new":
                self.start_training()
            if attention_mask is not None:
                self._steps.see_mask(attention_mask)
            if not self._has_optimizer:
                self._steps.end(start_ns)
                start_ns = perf_counter_ns()
            self._steps.tell({
                "step": step,
                "epoch": epoch,
                "lr": learning_rate,
                "loss": loss if loss is None else self._numbers.take(loss),
                "grad_norm": grad_norm if grad_norm is None else self._numbers.take(grad_norm),
                "skip_wandb": skip_wandb,
                "extra": extra or None,
            })  # fmt: skip
        except Exception as error:  # noqa: BLE001 - as `_harmless`, without the call in between
            self._note_failure("log_step", error)
        self._effort.own_ns += perf_counter_ns() - start_ns

    @harmless
    def update_dataset_metrics(
        self,
        dataset_names: Sequence[str] | str,
        loss: Any,
        logits: Any = None,
        labels: Any = None,
        predictions: Any = None,
    ) -> None:
        """Take in a batch's datasets: loss, accuracy and samples of each, accumulated on the device and read late."""
        self._datasets.update(dataset_names, loss, logits, labels, predictions)

    @harmless
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send numbers of your own to the record and to all sinks, at once."""
        values = dict(metrics)
        self._put(Log({"kind": "event", "event": "metrics", "step": step, "metrics": values}, values, step))

    @harmless
    def log_evaluation(
        self,
        step: int,
        eval_loss: float,
        eval_accuracy: float | None = None,
        additional_metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Record an evaluation, and send it to all sinks."""
        metrics = {"eval/loss": eval_loss} | ({} if eval_accuracy is None else {"eval/accuracy": eval_accuracy})
        metrics |= {f"eval/{name}": value for name, value in (additional_metrics or {}).items()}
        self._put(Log({"kind": "event", "event": "evaluation", "step": step, "metrics": metrics}, metrics, step))

    @harmless
    def log_epoch(self, epoch: float, avg_loss: float, elapsed_time: float, current_step: int | None = None) -> None:
        """Record the end of an epoch, and send it to all sinks."""
        fields = {"epoch": epoch, "avg_loss": avg_loss, "elapsed_time": elapsed_time, "step": current_step}
        metrics = {"epoch/loss": avg_loss, "epoch/seconds": elapsed_time, "training/epoch": epoch}
        self._put(Log({"kind": "event", "event": "epoch", **fields}, metrics, current_step))

    @harmless
    def save_logs(self) -> None:
        """Write the run so far as one JSON document (`training_log.json`); rank 0 does it for the job."""
        self._read_back(lambda run: write_training_log(run, self.log_path))

    def latest(self, wait_s: float = 0.0) -> dict[str, float]:
        """`perf/*` over the steps since the last call, as far as they are digested; empty when none are.

        Args:
            wait_s: How long to wait for steps that are still on their way; 0 inside a training loop.
        """
        if wait_s and self._worker is not None:
            self._worker.drain(wait_s)
        return self._digest.latest()

    def __enter__(self) -> TrainingMonitor:
        self.start_training()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._failure = failure.__name__ if failure is not None else None
        self.finish_training()
