"""What can a training loop tell us? `TrainingMonitor` has every method that a loop calls; `watch` needs none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from os import PathLike
from pathlib import Path
from time import perf_counter_ns
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from flopmeter.config import MonitorConfig
from flopmeter.errors import ConfigError
from flopmeter.monitor.live_run import MAX_FAILURES, LiveRun, seen_from_here
from flopmeter.monitor.step_record import Log
from flopmeter.record import write_training_log
from flopmeter.schema import PHASES
from flopmeter.sinks import LogFunction
from flopmeter.text import clean
from flopmeter.timing.late import LateNumber, LateNumbers
from flopmeter.torch_compat import has_function_mode

logger = logging.getLogger("flopmeter")

MOST = 1 << 53
"""Numbers of steps beyond it are not exact in every reader."""
MAX_REFUSED = 20
"""Warnings of arguments: a loop may make up a new name at every step."""
BESIDE = "on another thread than the one that trains: not taken out of the steps, and no time that was lost"

_T = TypeVar("_T")
_Method = TypeVar("_Method", bound=Callable[..., None])


def _harmless(method: _Method) -> _Method:
    """After the first step nothing of ours may stop a run: a failure is logged, the third one switches us off."""

    @wraps(method)
    def guarded(self: TrainingMonitor, *args: Any, **kwargs: Any) -> None:
        if self.run.num_failures >= MAX_FAILURES:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the training run comes first; the reason is logged
            self.run.fail(method.__name__, error)

    return cast(_Method, guarded)


class TrainingMonitor:
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
        log: Called with metrics and their step, as any sink: `log=mlflow.log_metrics`. From a thread of its own, which
            may wait; what it raises switches it off.
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
        log: LogFunction | None = None,
    ) -> None:
        self.run = run = LiveRun(output_dir, config, log_file, flops_profile_freq, log)
        """Everything that goes on without the loop's asking."""
        self.config, self.run_path, self.log_path = run.config, run.run_path, run.log_path
        self.recorder = run.recorder
        """What the hooks write to; where an integration that has hooks of its own tells what the loop does."""
        self._numbers = LateNumbers()
        self._refused: set[str] = set()
        self.recorder.finds_evaluation = finds_evaluation
        self.recorder.has_optimizer = optimizer is not None
        if model is not None:
            run.set_model(model)
        if optimizer is not None:
            run.hooks.attach_optimizer(optimizer)
        if loader is not None:
            run.hooks.attach_loader(loader)
            self.recorder.loader_kind = type(loader).__name__

    @property
    def output_dir(self) -> Path:
        """Where the record is, as seen from the current folder."""
        return seen_from_here(self.run.folder)

    @property
    def num_steps(self) -> int:
        """Steps measured so far."""
        return self.recorder.num_steps

    def set_model_ref(self, model: nn.Module, *others: nn.Module, within: nn.Module | None = None) -> None:
        """Name the object that the loop calls, or all of them: forward passes are marked, steps measured.

        Args:
            within: What the loop calls parts of, where these are parts: the record has its name.
        """
        self.run.set_model(model, *others, within=within)

    def start_training(self, after_step: int = 0, *, has_joined: bool = False) -> None:
        """Write the header and start the clock. `log_step` does it by itself when it was forgotten.

        Where torch.distributed is not initialised it may be later: then the record begins with the first forward pass,
        when this process knows its rank, and with the end at the latest.

        Args:
            after_step: Steps that the loop has done already: the first one that is measured has the next number.
            has_joined: Whether the process has joined its job, if it has one: the record begins at once.
        """
        self.run.start(after_step, has_joined=has_joined)

    def finish_training(self) -> dict[str, float]:
        """Close the run file with a summary, and give it. Safe to call twice."""
        return self.run.finish()

    def summary(self) -> dict[str, float]:
        """This start so far in a few numbers, from the job's record; nothing on a rank that does not keep it."""
        return self.run.sum_up()

    def set_training_phase(self, phase: str) -> None:
        """Say which phase begins (warmup, main, finetune): each has its measuring frequency in the settings.

        Raises:
            ConfigError: There is no such phase. In a run that has begun that is a warning.
        """
        try:
            self.run.effort.begin_phase(phase)
        except Exception as error:
            if self.run.state == "new":
                raise
            self._refuse("set_training_phase", error)

    @property
    def is_running(self) -> bool:
        """Whether it has started and not finished."""
        return self.run.at_exit is not None and self.run.state != "finished"

    def batches(self, loader: Iterable[_T]) -> Iterator[_T]:
        """Iterate over any loader, timing the wait for each batch."""
        self.start_training()
        iterator = iter(loader)
        while True:
            self.recorder.on_wait()
            try:
                batch = next(iterator)
            except BaseException as error:
                self.recorder.on_no_batch()
                if isinstance(error, StopIteration):
                    return
                raise
            self.recorder.on_batch()
            yield batch

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step as one of the phases: data_wait, host_to_device, forward, backward, optimizer.

        Raises:
            ConfigError: There is no such phase. In a run that has begun that is a warning, and nothing is timed.
        """
        if name not in PHASES:
            error = ConfigError(f"there is no phase {name!r}; there are: {', '.join(PHASES)}")
            if self.run.state == "new":
                raise error
            self._refuse("phase", error)
            yield
            return
        if self.recorder.is_elsewhere():
            yield
            return
        device_time = self.recorder.device_time if not self.recorder.num_pauses else None
        if device_time is not None and device_time.is_marking:
            device_time.mark(name)
        try:
            with self.recorder.clock.phase(PHASES.index(name)):
                yield
        finally:
            if device_time is not None and device_time.is_marking:
                device_time.mark("other")

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Time something between steps (eval, checkpoint): it is lost time, not step time.

        On another thread than the one that trains it is noted (event `beside`), and no time is lost.
        """
        self.start_training()
        if self.recorder.is_elsewhere():
            start_ns = perf_counter_ns()
            try:
                yield
            finally:
                if not self.recorder.is_closed:
                    duration_s = (perf_counter_ns() - start_ns) / 1e9
                    self.run.event("beside", name=name, duration_s=duration_s, message=BESIDE)
            return
        self.recorder.begin_pause()
        try:
            with self.recorder.clock.pause() as lasted_s:
                yield
        finally:
            self.recorder.num_pauses -= 1
            self.run.event("pause", name=name, duration_s=lasted_s())

    @contextmanager
    def role(self, name: str, *, counts: bool = False) -> Iterator[None]:
        """Name what the loop does besides training: rollout, reference, reward, log_probs, weight_sync, or any name.

        Its time is no step time, as that of a pause; its FLOPs are kept apart under the name. Passes with gradients in
        it are training.

        Args:
            counts: Takes its FLOPs into model work, as those of a frozen tower that is called by itself.
        """
        self.start_training()
        with self.recorder.role(clean(name, 60), counts=counts):
            yield

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
        if self.run.num_failures >= MAX_FAILURES:
            return
        start_ns = perf_counter_ns()
        try:
            if self.run.state == "new":
                self.run.start_now()
            if attention_mask is not None:
                self._see_mask(attention_mask)
            if not self.recorder.has_optimizer:
                self.recorder.end(start_ns)
                start_ns = perf_counter_ns()
            given = {
                "training/epoch": epoch, "training/lr": learning_rate, "training/loss": loss,
                "training/grad_norm": grad_norm, **extra,
            }  # fmt: skip
            values: dict[str, Any] = {"step": step if type(step) is int and -MOST < step < MOST else self._whole(step)}
            has_late, is_seen = type(values["step"]) is LateNumber, has_function_mode()
            for name, value in given.items():
                kind = type(value)
                if kind is float:
                    values[name] = value
                elif kind is int and -MOST < value < MOST:
                    values[name] = float(value)
                elif kind is Tensor and not is_seen and value.is_cpu and not value.dim() and value.is_floating_point():
                    values[name] = value.item()  # nothing to wait for
                elif value is not None and (number := self._number("log_step", name, value)) is not None:
                    values[name] = number
                    has_late = has_late or type(number) is LateNumber
            if skip_wandb is not False:
                values["skip_wandb"] = bool(self._number("log_step", "skip_wandb", skip_wandb))
            self.recorder.tell(values, has_late=has_late)
        except Exception as error:  # noqa: BLE001 - as `_harmless`, without the call in between
            self.run.fail("log_step", error)
        self.run.effort.own_ns += perf_counter_ns() - start_ns

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
            self.recorder.see_mask(mask)
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
        self.run.event("warning", message=message)

    @_harmless
    def update_dataset_metrics(
        self,
        dataset_names: Sequence[str] | str,
        loss: Any,
        logits: Any = None,
        labels: Any = None,
        predictions: Any = None,
    ) -> None:
        """Take in a batch's datasets: loss, accuracy and samples of each, accumulated on the device and read late."""
        self.run.datasets.update(dataset_names, loss, logits, labels, predictions)

    @_harmless
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
        self.start_training()
        self.recorder.hand_over(Log({**line, "step": number}, metrics, number))

    @_harmless
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

    @_harmless
    def log_epoch(self, epoch: float, avg_loss: float, elapsed_time: float, current_step: int | None = None) -> None:
        """Record the end of an epoch, and send it to all sinks."""
        given = {"epoch": epoch, "avg_loss": avg_loss, "elapsed_time": elapsed_time}
        fields = dict.fromkeys(given) | self._numbers_of("log_epoch", given)
        names = {"avg_loss": "epoch/loss", "elapsed_time": "epoch/seconds", "epoch": "training/epoch"}
        metrics = {key: fields[name] for name, key in names.items() if fields[name] is not None}
        self._log({"kind": "event", "event": "epoch", **fields}, metrics, current_step)

    @_harmless
    def save_logs(self) -> None:
        """Write the run so far as one JSON document (`training_log.json`); rank 0 does it for the job."""
        self.run.start_now()
        self.run.read_back(lambda run: write_training_log(run, self.log_path))

    def latest(self, wait_s: float = 0.0) -> dict[str, float]:
        """`perf/*` over the steps since the last call, as far as they are digested; empty when none are.

        Args:
            wait_s: How long to wait for steps that are still on their way; 0 inside a training loop.
        """
        if wait_s and self.run.worker is not None:
            self.run.worker.drain(wait_s)
        return self.run.digest.latest()

    def __enter__(self) -> TrainingMonitor:
        self.start_training()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.run.failure = failure.__name__ if failure is not None else None
        self.finish_training()


def watch(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    loader: Any = None,
    output_dir: str | PathLike[str] = "runs/run",
    config: str | PathLike[str] | Mapping[str, Any] | MonitorConfig | None = None,
    accelerator: Any = None,
    log: LogFunction | None = None,
) -> TrainingMonitor:
    """Monitor a loop by hooks alone: phases, steps and FLOPs without a line of code in it.

    `log_step` is only needed to have loss and learning rate in the record too.

    Args:
        accelerator: The `Accelerator` or `Fabric` that prepared the model, where there is one.
        log: Called with metrics and their step: `log=mlflow.log_metrics` (docs/logging.md).
    """
    attach: Callable[[TrainingMonitor], None] | None = None
    if accelerator is not None:  # the integration that carries the name of the framework which it comes from knows it
        framework = type(accelerator).__module__.partition(".")[0]
        try:
            prepared = import_module(f"flopmeter.integrations.{framework}").prepared
        except (ImportError, AttributeError):
            kind = f"{type(accelerator).__module__}.{type(accelerator).__qualname__}"
            raise ConfigError(f"accelerator: accelerate's Accelerator or lightning's Fabric, not {kind}") from None
        model, optimizer, attach = prepared(accelerator, model, optimizer)
    monitor = TrainingMonitor(output_dir, config, model=model, optimizer=optimizer, loader=loader, log=log)
    monitor.start_training()
    if attach is not None:
        attach(monitor)
    return monitor
