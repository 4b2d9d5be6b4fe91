"""How does a Hugging Face `Trainer` log its MFU? By one callback, which tells the monitor where the Trainer stands.

    from flopmeter.integrations.transformers import FlopmeterCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[FlopmeterCallback()])

A step is what the Trainer calls one: an optimizer step with all of its micro-batches. `perf/*` join the Trainer's own
logs, three of them unless `logged` names others, and so reach whatever `report_to` names (which shows them as
`train/perf/...`); every step is in the run file.
Trainers built on it, as those of TRL, work the same way.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping
from os import PathLike
from types import FrameType
from typing import Any, cast

from torch import nn

from flopmeter.integrations import LAST_LOG_WAIT_S, NO_SINKS, Config, TrainerPart, harmless, library

with library("transformers"):
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler
    from transformers.trainer_utils import SaveStrategy

logger = logging.getLogger("flopmeter")

LOGGED = ("perf/mfu", "perf/tokens_per_second", "perf/data_wait_share")
"""Few, because the Trainer prints them all; the run file has the others."""


class FlopmeterCallback(TrainerPart, TrainerCallback):
    """Measures a Trainer's run. Its record is complete when training ends; `monitor` is the monitor of the last run.

    Args:
        output_dir: Where `run.jsonl` goes; the Trainer's own `output_dir` when None. A resumed run is appended.
        config: As for TrainingMonitor. Without one no sink is on.
        logged: Keys that join the Trainer's own logs; None for all that there are.
    """

    def __init__(
        self,
        output_dir: str | PathLike[str] | None = None,
        config: Config = NO_SINKS,
        logged: Collection[str] | None = LOGGED,
    ) -> None:
        super().__init__(output_dir, config)
        self._logged = logged
        self._has_open_step = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is sent to another process, measures for itself."""
        return vars(FlopmeterCallback(self._output_dir, self._config, self._logged))

    def on_init_end(self, *_: Any, **__: Any) -> None:
        self._stand_before_the_reporters()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stand_before_the_reporters()  # when it was added to a Trainer that exists
        self._has_open_step = False
        model = _called_model(kwargs.get("model"))
        monitor = self._begin(args.output_dir or ".", model, kwargs.get("train_dataloader"))
        if args.eval_on_start:
            self._pause.enter_context(monitor.pause("eval"))

    @harmless
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.monitor is not None:
            self._phase.enter_context(self.monitor.phase("optimizer"))

    @harmless
    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._phase.close()

    @harmless
    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._has_open_step = True
        if not control.should_log:  # else its loss follows in a moment, in on_log
            self._end_step(state, control, {})

    @harmless
    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if self._has_open_step:
            self._end_step(state, control, logs or {})

    @harmless
    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._begin_pause(control)

    @harmless
    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        metrics = metrics or {}
        if self.monitor is not None and "eval_loss" in metrics:
            self.monitor.log_evaluation(state.global_step, metrics["eval_loss"])
        if args.save_strategy != SaveStrategy.BEST:  # else it decides now whether to save, which belongs to it
            self._begin_pause(control)

    @harmless
    def on_save(self, *_: Any, **__: Any) -> None:
        self._pause.close()

    on_step_begin = on_save

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._finish()

    @harmless
    def add_perf(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Put `perf/*` of the steps since the last log into the Trainer's logs and its history."""
        is_last = "train_runtime" in logs
        if self.monitor is None or not (is_last or "loss" in logs):  # an evaluation's
            return
        perf = self.monitor.latest(LAST_LOG_WAIT_S if is_last else 0.0)
        if self._logged is not None:
            perf = {key: value for key, value in perf.items() if key in self._logged}
        logs.update(perf)
        if state.log_history:
            state.log_history[-1].update(perf)

    def _end_step(self, state: TrainerState, control: TrainerControl, logs: Mapping[str, Any]) -> None:
        self._has_open_step = False
        if self.monitor is not None:
            loss, norm, rate = (logs.get(name) for name in ("loss", "grad_norm", "learning_rate"))
            self.monitor.log_step(state.global_step, state.epoch, loss, norm, rate)
        self._begin_pause(control)

    def _begin_pause(self, control: TrainerControl) -> None:
        """The Trainer evaluates, then saves; it tells when each is over, so what begins is known from its plans."""
        self._pause.close()
        name = "eval" if control.should_evaluate else "checkpoint" if control.should_save else None
        if self.monitor is not None and name is not None:
            self._pause.enter_context(self.monitor.pause(name))

    def _stand_before_the_reporters(self) -> None:
        """Reporters come before a user's callbacks, and would never see what those add to the logs."""
        handler = cast(
            "CallbackHandler | None", _caller(CallbackHandler)
        )  # a callback is not given the list it stands in
        if handler is None:
            logger.warning("this version of transformers hides its callbacks: perf/* are in the run file only")
        elif not any(isinstance(callback, _PerfInLogs) and callback.owner is self for callback in handler.callbacks):
            handler.callbacks = [_PerfInLogs(self), *handler.callbacks]  # a new list: the old one is being walked


class _PerfInLogs(TrainerCallback):
    """The first of all callbacks: what it adds to the logs reaches all others."""

    def __init__(self, owner: FlopmeterCallback) -> None:
        self.owner = owner

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is not None:
            self.owner.add_perf(state, logs)


def _called_model(model: nn.Module | None) -> nn.Module | None:
    """What the Trainer calls: with several GPUs in one process that is nn.DataParallel, of which it tells nobody."""
    wrapped = getattr(_caller(Trainer), "model_wrapped", None)
    return wrapped if isinstance(wrapped, nn.DataParallel) and wrapped.module is model else model


def _caller(kind: type) -> Any:
    """The object of this kind that called us, however far up; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), kind):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
