"""Weights & Biases: how do our rows get into a user's run without pushing out the user's own?

A run has one counter of rows, and wandb drops whatever arrives at a number below it. Our rows come late and in bursts,
so appending them would move the counter past the user's next `wandb.log(..., step=step)` and lose it, and with it every
later one. So in a user's run the counter is moved only up to the training step that a row is about, which is where the
user's own code would move it; the charts' axis is `global_step`, which each row carries.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flopmeter.sinks import SinkContext, load_libraries

logger = logging.getLogger("flopmeter")

STEP_KEY = "global_step"
LIMITS_S = {"init_timeout": 30.0, "finish_timeout": 60.0}
"""wandb's own are 90 s and for ever; `wandb.settings` and WANDB_* variables override these."""

AFTER_UPLOAD_S = 5.0
BASICS = {STEP_KEY, "training/loss", "training/lr", "training/epoch"}
REDUCED_DETAIL_STEPS = 100


class Sink:
    """Logs to the run that is open when training starts, else to one opened from the settings and finished at the end.

    Once the user logs to the same run, a row of ours that comes too late for its own place joins the row that is open,
    where it may replace an earlier one of ours: the user's rows come first, and the run file has every step.
    """

    def __init__(self, context: SinkContext) -> None:
        (wandb,) = load_libraries("wandb", "wandb")
        settings = context.config.wandb
        self._is_own = wandb.run is None
        self._run = _open_run(wandb, settings.init_arguments()) if self._is_own else wandb.run
        self._run.config.update({"flopmeter": {**context.header, "rank": context.rank}}, allow_val_change=True)
        self._sends_datasets = settings.log_dataset_metrics
        self._one_detail_in = math.ceil(REDUCED_DETAIL_STEPS / context.config.monitoring.detail_every)
        self._num_rows: Counter[str] | None = Counter() if settings.reduced_logging else None
        self._defined = {STEP_KEY}
        # A run in shared mode has many writers and no counter; in our own nobody else counts.
        self._is_counted = not self._is_own and self._run.settings.mode != "shared"
        self._counter = self._run.starting_step
        self._step: int | None = None
        self._user_logs = False
        self.close_s = _upload_s(self._run) if self._is_own else 0.0
        """What `close` may take: the upload has a limit of its own, and is not left before it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step; the training step may go backwards."""
        kept = {key: metrics[key] for key in metrics if self._sends_datasets or not key.startswith("dataset/")}
        kept = kept if self._num_rows is None else self._reduced(kept, self._num_rows)
        if kept:
            self._define(kept)
            row = {**kept, STEP_KEY: step}
            if self._is_counted:
                self._fit_in(step, row)
            else:
                self._run.log(row)

    def _reduced(self, metrics: dict[str, float], num_rows: Counter[str]) -> dict[str, float]:
        """What `reduced_logging` leaves of a row: every second row's basics, details of one row in so many."""
        detail = next((kind for kind in ("dataset/", "perf/") if any(key.startswith(kind) for key in metrics)), "")
        num_rows[detail] += 1
        is_kept = not detail or num_rows[detail] % self._one_detail_in == 0
        if STEP_KEY not in metrics:  # datasets, or what the loop itself logs
            return metrics if is_kept else {}
        num_rows[STEP_KEY] += 1
        if detail and is_kept:
            return metrics
        return {key: metrics[key] for key in BASICS & metrics.keys()} if num_rows[STEP_KEY] % 2 == 0 else {}

    def close(self) -> None:
        """Finish the run if it is ours; the user's stays open."""
        if self._is_own:
            self._run.finish()

    def _define(self, metrics: Mapping[str, float]) -> None:
        """Chart each new key over the training step; by key, so that the user's own charts stay as they are."""
        for key in metrics.keys() - self._defined:
            self._defined.add(key)
            if "*" not in key:  # wandb would take it for a pattern
                self._run.define_metric(key, step_metric=STEP_KEY)

    def _fit_in(self, step: int, row: dict[str, float]) -> None:
        """Log without moving the counter past the training step, unless nobody else needs it.

        Asking for the counter costs as much as a log, so it is asked for only when the answer decides.
        """
        is_late = step <= self._counter
        if not (is_late and (self._user_logs or step == self._step)):
            counter = self._run.step
            self._user_logs = self._user_logs or counter != self._counter
            self._counter = counter
        if step > self._counter:
            self._counter = step
            self._run.log(row, step=step)
        elif self._user_logs or self._step in (None, step):
            self._run.log(row, commit=False)
        else:  # training went back to an earlier step
            self._counter += 1
            self._run.log(row, step=self._counter)
        self._step = step


def _open_run(wandb: Any, arguments: dict[str, Any]) -> Any:
    """A run as the settings say; kept offline, with one warning, when the server is out of reach."""
    known = wandb.setup().settings
    limits_s = {name: limit_s for name, limit_s in LIMITS_S.items() if name not in known.model_fields_set}
    settings = {**limits_s, **arguments.pop("settings", {})}
    mode = arguments.get("mode") or settings.get("mode") or known.mode
    if mode in ("offline", "disabled", "dryrun"):
        return wandb.init(**arguments, settings=settings)
    try:
        _check_login(wandb, settings)
        return wandb.init(**arguments, settings=settings)
    except (wandb.errors.Error, TimeoutError) as error:
        run = wandb.init(**{**arguments, "mode": "offline"}, settings=settings)
        reason = str(error).partition("\n")[0]
        logger.warning("wandb: %s; the run stays offline: upload it with  wandb sync %s", reason, run.settings.sync_dir)
        return run


def _upload_s(run: Any) -> float:
    """The limit of the upload, and a little for what comes after it."""
    try:
        return float(run.settings.finish_timeout) + AFTER_UPLOAD_S
    except (AttributeError, TypeError, ValueError):
        return LIMITS_S["finish_timeout"] + AFTER_UPLOAD_S


def _check_login(wandb: Any, settings: Mapping[str, Any]) -> None:
    """Without a key `wandb.init` asks for one at the terminal and waits; nobody expects that of a background thread."""
    is_given = not settings.keys().isdisjoint(("api_key", "identity_token_file", "base_url"))
    if not is_given and not wandb.login(prompt=False, verify=False):
        raise wandb.errors.UsageError("nobody is logged in here (run wandb login)")
