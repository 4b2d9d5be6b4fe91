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
from flopmeter.timing.late import LateNumber, LateNumbers

logger = logging.getLogger("flopmeter")

MOST = 1 << 53
"""Numbers of steps beyond it are not exact in every reader."""
MAX_REFUSED = 20
"""Warnings of arguments: a loop may make up a new name at every step."""
BESIDE = "on another thread than the one that trains: not taken out of the steps, and no time that was lost"

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
        self._refused: set[str] = set()
        self._tracker.finds_evaluation = finds_evaluation
        self._has_optimizer = self._tracker.has_optimizer = optimizer is not None
        if model is not None:
            self.set_model_ref(model)
        if optimizer is not None:
            self._hooks.attach_optimizer(optimizer)
        if loader is not None:
            self._hooks.attach_loader(loader)
            self._tracker.loader_kind = type(loader).__name__

    def set_training_phase(self, phase: str) -> None:
        """Say which phase begins (warmup, main, finetune): each has its measuring frequency in the settings.

        Raises:
            ConfigError: There is no such phase. In a run that has begun that is a warning.
        """
        try:
            self._effort.begin_phase(phase)
        except Exception as error:
            if self._state == "new":
                raise
            self._refuse("set_training_phase", error)
        self._steps.next_look = 0

    @property
    def marks(self) -> StepTracker:
        """Where an integration that has hooks of its own tells what the loop does."""
        return self._tracker

    @property
    def is_running(self) -> bool:
        """Whether it has started and not finished."""
        return self._at_exit is not None and self._state != "finished"

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
        """Time a part of the step as one of the phases: data_wait, host_to_device, forward, backward, optimizer.

        Raises:
            ConfigError: There is no such phase. In a run that has begun that is a warning, and nothing is timed.
        """
        if name not in PHASES:
            error = ConfigError(f"there is no phase {name!r}; there are: {', '.join(PHASES)}")
            if self._state == "new":
                raise error
            self._refuse("phase", error)
            yield
            return
        if self._tracker.is_elsewhere():
            yield
            return
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
        """Time something between steps (eval, checkpoint): it is lost time, not step time.

        On another thread than the one that trains it is noted (event `beside`), and no time is lost.
        """
        self.start_training()
        if self._tracker.is_elsewhere():
            start_ns = perf_counter_ns()
            try:
                yield
            finally:
                if not self._tracker.is_closed:
                    duration_s = (perf_counter_ns() - start_ns) / 1e9
                    self._event("beside", name=name, duration_s=duration_s, message=BESIDE)
            return
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
        """Tell the loop's own numbers: whatever `float` takes. Those on a device are read later, without a wait.

        One that is no number is left out, with one warning.

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
                self._start()
            if attention_mask is not None:
                self._see_mask(attention_mask)
            if not self._has_optimizer:
                self._steps.end(start_ns)
                start_ns = perf_counter_ns()
            given = {
                "training/epoch": epoch, "training/lr": learning_rate, "training/loss": loss,
                "training/grad_norm": grad_norm, **extra,
            }  # fmt: skip
            values: dict[str, Any] = {"step": step if type(step) is int and -MOST < step < MOST else self._whole(step)}
            for name, value in given.items():
                number = value if type(value) is float else self._number("log_step", name, value)
                if number is not None:
                    values[name] = number
            if skip_wandb is not False:
                values["skip_wandb"] = bool(self._number("log_step", "skip_wandb", skip_wandb))
            self._steps.tell(values)
        except Exception as error:  # noqa: BLE001 - as `_harmless`, without the call in between
            self._note_failure("log_step", error)
        self._effort.own_ns += perf_counter_ns() - start_ns

    def _number(self, where: str, name: str, value: Any) -> float | LateNumber | None:
        """What `float` makes of an argument, late if it is on a device; None, with one warning, if that is nothing."""
        if value is None:
            return None
        try:
            return self._numbers.take(value)
        except Exception as error:  # noqa: BLE001 - anything may come, and its own class may raise anything
            self._refuse(f"{where}: {name}", error)
            return None

    def _numbers_of(self, where: str, values: Any) -> dict[str, Any]:
        """Those of a mapping's values that are numbers."""
        try:
            items = [(str(name), value) for name, value in dict(values or {}).items()]
        except Exception as error:  # noqa: BLE001 - as above
            self._refuse(where, error)
            return {}
        numbers = {name: self._number(where, name, value) for name, value in items}
        return {name: number for name, number in numbers.items() if number is not None}

    def _whole(self, value: Any) -> int | LateNumber | None:
        """The number of a step; None, which counts on, where it is none."""
        number = self._number("log", "step", value)
        if number is None or isinstance(number, LateNumber):
            return number
        if not (number.is_integer() and -MOST < number < MOST):
            self._refuse("log: step", ValueError(f"{number} is no number of a step"))
            return None
        return int(number)

    def _see_mask(self, mask: Any) -> None:
        try:
            self._steps.see_mask(mask)
        except Exception as error:  # noqa: BLE001 - as above
            self._refuse("log_step: attention_mask", error)

    def _refuse(self, what: str, error: Exception) -> None:
        """A bad argument costs what it was given for, and one warning."""
        if what in self._refused or len(self._refused) >= MAX_REFUSED:
            return
        self._refused.add(what)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"{what} is left out whenever it is no number or name that is known ({reason[:200]})"
        logger.warning("%s", message)
        self._event("warning", message=message)

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
        values = self._numbers_of("log_metrics", metrics)
        if values:
            self._log({"kind": "event", "event": "metrics", "metrics": values}, values, step)

    def _log(self, line: dict[str, Any], metrics: Mapping[str, Any], step: Any) -> None:
        number = self._whole(step)
        if isinstance(number, LateNumber):  # where it belongs must be known now
            self._refuse("log: step", ValueError("it is on a device"))
            number = None
        self._steps.hand_over(Log({**line, "step": number}, metrics, number))

    @harmless
    def log_evaluation(
        self,
        step: int,
        eval_loss: float,
        eval_accuracy: float | None = None,
        additional_metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Record an evaluation, and send it to all sinks."""
        more = self._numbers_of("log_evaluation", additional_metrics)
        metrics = self._numbers_of("log_evaluation", {"eval/loss": eval_loss, "eval/accuracy": eval_accuracy})
        metrics |= {f"eval/{name}": value for name, value in more.items()}
        self._log({"kind": "event", "event": "evaluation", "metrics": metrics}, metrics, step)

    @harmless
    def log_epoch(self, epoch: float, avg_loss: float, elapsed_time: float, current_step: int | None = None) -> None:
        """Record the end of an epoch, and send it to all sinks."""
        given = {"epoch": epoch, "avg_loss": avg_loss, "elapsed_time": elapsed_time}
        fields = dict.fromkeys(given) | self._numbers_of("log_epoch", given)
        names = {"avg_loss": "epoch/loss", "elapsed_time": "epoch/seconds", "epoch": "training/epoch"}
        metrics = {key: fields[name] for name, key in names.items() if fields[name] is not None}
        self._log({"kind": "event", "event": "epoch", **fields}, metrics, current_step)

    @harmless
    def save_logs(self) -> None:
        """Write the run so far as one JSON document (`training_log.json`); rank 0 does it for the job."""
        self._start()
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
