"""How does a run begin, follow its model and end? What `TrainingMonitor` does without being asked.

It ties work, time and peak together; each of its parts is a module of this folder.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, wraps
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from flopmeter.config import MonitorConfig
from flopmeter.dataset_metrics import DatasetMetrics
from flopmeter.distributed import PATIENCE_S, Ranks
from flopmeter.errors import FlopmeterError, sign_warnings
from flopmeter.flops.workload import WorkloadReader
from flopmeter.monitor.device_time import DeviceTime
from flopmeter.monitor.digest import Digest, Log, dataset_values
from flopmeter.monitor.effort import Effort
from flopmeter.monitor.ending import Endings, unhandled
from flopmeter.monitor.header import device_name, device_of, make_header, make_sampler
from flopmeter.monitor.hooks import Hooks
from flopmeter.monitor.last_words import last_words
from flopmeter.monitor.measuring import FlopSource
from flopmeter.monitor.ranks import connect_device, join, my_rank, record_path, seen_from_here, sink_names
from flopmeter.monitor.steps import Steps
from flopmeter.monitor.tracker import StepTracker
from flopmeter.monitor.worker import Worker
from flopmeter.record import Run, RunWriter, load_run, write_training_log
from flopmeter.report import leave_report
from flopmeter.resources import ResourceSampler
from flopmeter.schema import RUN_FILE
from flopmeter.sinks import SinkContext, check_sinks, say_last
from flopmeter.timing.cuda import timeline_of
from flopmeter.torch_compat import NEWER, TOO_OLD, DisableTorchFunction

logger = logging.getLogger("flopmeter")

MAX_FAILURES = 3
DRAIN_S = 10.0
MAX_EARLY = 1000
"""Logs from before the record is begun."""
STEPS_READ_PER_S = 10_000
"""Steps of a record that even a slow machine reads in a second: a long one is waited for longer."""
SIGNAL_S = 5.0
"""What the record is given when a signal ends the process: launchers kill after 10 to 30 s."""
MAX_STEPS_IN_LOG = 20_000
"""Beyond it `training_log.json` is written when it is asked for: nobody waits for it at the end of a long run."""
NO_PATCHES = (
    "monitoring.patches is false: FLOPs are estimated, no step is observed or profiled; backward passes, waits for "
    "data and for other ranks are part of other time; collections of garbage are not told"
)

_Method = TypeVar("_Method", bound=Callable[..., None])


@cache
def say_once(message: str) -> None:
    """Warn of what is so for the whole process, however many runs it has."""
    logger.warning("%s", message)


def harmless(method: _Method) -> _Method:
    """After the first step nothing of ours may stop a run: a failure is logged, the third one switches us off."""

    @wraps(method)
    def guarded(self: Lifetime, *args: Any, **kwargs: Any) -> None:
        if self._num_failures >= MAX_FAILURES:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the training run comes first; the reason is logged
            self._note_failure(method.__name__, error)

    return cast(_Method, guarded)


def unnoticed(method: _Method) -> _Method:
    """A function mode of the user's, and tensor classes of theirs, see none of the calls in it."""

    @wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> None:
        with DisableTorchFunction():
            method(*args, **kwargs)

    return cast(_Method, guarded)


class Lifetime:
    """From the settings to the record's last line. After the first step no failure of it stops the training."""

    @unnoticed
    def __init__(
        self,
        output_dir: str | PathLike[str],
        config: str | PathLike[str] | Mapping[str, Any] | MonitorConfig | None,
        log_file: str,
        flops_profile_freq: int | None,
    ) -> None:
        sign_warnings()
        self.config = MonitorConfig.load(config)
        check_sinks(self.config.sink_names)
        self._folder = Path(output_dir).absolute()  # wherever the program goes meanwhile
        self.run_path = self._folder / RUN_FILE
        self.log_path = self._folder / log_file
        self._tracker = StepTracker(self._begin, self._note_failure, self._event)
        self._clock = self._tracker.clock
        self._hooks = Hooks(self._tracker, patches=self.config.monitoring.patches)
        self._worker: Worker | None = None
        self._resources: ResourceSampler | None = None
        self._device = device_of(None)
        """Where the model was when the run began, or when it was last looked at."""
        self._at_exit: Callable[[], None] | None = None
        self._rank = 0
        self._ranks: Ranks | None = None
        self._effort = Effort(self.config, flops_profile_freq, self._clock, self._event, self._threads_s)
        self._digest = Digest(self.config, self._effort.note_step, self._effort.share)
        own = self.config.monitoring
        self._datasets = DatasetMetrics(own.dataset_metrics_every, shift_labels=own.dataset_labels_shifted)
        self._steps = Steps(
            self._tracker, self._effort, self._datasets, self.config.details_every, self._put, self._note_failure
        )
        self._hooks.on_graphing = self._steps.discard_measurement
        self.is_silent_at_end = False
        """Whether somebody else says what was found, instead of a line where the console shows the steps."""
        self._report: Path | None = None
        self._num_failures = 0
        self._state = "new"
        self._early: list[Log] = []
        """Events from before the start: they follow the header."""
        self._pid = os.getpid()
        self._failure: str | None = None
        self._is_disk_well = True
        self._is_interrupted = False
        """Whether Ctrl-C has ended the program: then no more is loaded than the record needs."""
        self._last_summary: dict[str, float] = {}
        self._model: nn.Module | None = None

    @property
    def output_dir(self) -> Path:
        """Where the record is, as seen from the current folder."""
        return seen_from_here(self._folder)

    @property
    def num_steps(self) -> int:
        """Steps measured so far."""
        return self._steps.num_steps

    @unnoticed
    def set_model_ref(self, model: nn.Module, *others: nn.Module) -> None:
        """Name the object that the loop calls, or all of them: forward passes are marked, steps measured."""
        if model is self._model:
            return
        before = self._tracker.source
        if before is not None:
            self._tracker.has_forward |= self._tracker.has_backward  # an open step says nothing of the new model
            self._steps.discard_measurement()
            self._steps.flush()
            if self._worker is not None:
                self._worker.drain(DRAIN_S)  # the steps so far are the other model's
        self._model = self._steps.model = model
        self._steps.next_look = 0
        if TOO_OLD is not None:
            say_once(f"{TOO_OLD}; steps are timed, and no FLOPs are counted")
            self._hooks.attach_models(model, *others)
            return
        if NEWER is not None:
            say_once(NEWER)
        source = FlopSource([model, *others], self.config, self._event)
        self._tracker.source = self._digest.source = source
        self._tracker.workloads = WorkloadReader(source.needs, self._steps.copies, [model, *others])
        self._hooks.attach_models(model, *others)
        self._join_job()
        if self._state == "running":
            self._follow_model()

    @unnoticed
    def start_training(self, after_step: int = 0, *, has_joined: bool = False) -> None:
        """Write the header and start the clock. `log_step` does it by itself when it was forgotten.

        Where torch.distributed is not initialised it may be later: then the record begins with the first forward pass,
        when this process knows its rank, and with the end at the latest.

        Args:
            after_step: Steps that the loop has done already: the first one that is measured has the next number.
            has_joined: Whether the process has joined its job, if it has one: the record begins at once.
        """
        if after_step:
            self._digest.last_step = after_step
        if self._state == "new" and self._at_exit is None:
            self._pid = os.getpid()
            self._at_exit = _finish_at_exit(self)
            self._clock.start()
        if has_joined or my_rank() is not None:
            self._start()

    def _start(self) -> None:
        """By now the rank is known, or this process is alone."""
        if self._state != "new":
            return
        self._state = "running"
        try:
            self._start_record()
        except Exception as error:  # noqa: BLE001 - the process may have no more threads, or memory
            self._give_up()
            logger.warning("nothing is measured: the run could not begin (%s: %s)", type(error).__name__, error)
        if self._worker is not None and self._worker.is_refused:  # which was said
            self._rank = -1  # neither a rank of this job nor the keeper of its record
            self._give_up()

    def _give_up(self) -> None:
        self._num_failures = MAX_FAILURES
        self._steps.switch_off()
        self._guarded(self._hooks.remove)

    def _start_record(self) -> None:
        self._pid = os.getpid()
        self._rank = my_rank() or 0
        source = self._tracker.source
        if source is not None:
            source.follow_model()  # it may have been moved since
        peaks = source.recorded_peaks if source is not None else {}
        header = {**make_header(self._model, self.config, dict(peaks)), "rank": self._rank}
        context = SinkContext(config=self.config, output_dir=self._folder, header=header, rank=self._rank)
        self._worker = Worker(
            RunWriter(record_path(self._folder, self._rank, self.config)),
            sink_names(self.config, self._rank),
            context,
            self._digest,
            header,
            flush_every=self.config.monitoring.flush_every,
            flush_s=self.config.monitoring.flush_s,
            sample=self._sampler(),
            sink_cpu_share=None if self.config.has_explicit_logging_steps else self.config.monitoring.overhead_budget,
        )
        self._device = device_of(self._model)
        self._time_device()
        for log in self._early:
            if log.line["event"] != "peak":  # those are in the header
                self._worker.put(log)
        self._early.clear()
        if not self.config.monitoring.patches:
            self._event("warning", message=NO_PATCHES)
        self._steps.put, self._worker.used = self._worker.put, self._steps.copies.used
        self._tracker.background = self._worker
        # Only the profile of rank 0 reaches the record.
        self._effort.start_run(is_sampled=self._rank == 0, on_profiler=self._steps.discard_measurement)
        self._join_job()
        self._worker.drain(1.0)  # a run that dies at once has left its header
        if self._at_exit is None:
            self._clock.start()
        else:  # behind the exchange's: what is registered last is called first
            atexit.unregister(self._at_exit)
        self._at_exit = _finish_at_exit(self)
        if self.config.monitoring.patches:
            ENDINGS.add(self)

    def _begin(self) -> None:
        """The first forward pass: by now the model is where it trains, and ranks know each other."""
        self._start()
        self._follow_model()

    @harmless
    def _follow_model(self) -> None:
        """What was set up for the device where the model was is set up again for the one that it was moved to."""
        device = device_of(self._model)
        if device == self._device:
            return
        self._device = device
        self._event("device", device=device_name(device))
        if self._tracker.device_time is not None:
            self._tracker.device_time.close()
            self._tracker.device_time = None
        self._time_device()
        before, self._resources = self._resources, make_sampler(self._model)
        if before is not None:
            before.close()
        if self._ranks is not None and self._model is not None:
            connect_device(self._ranks, self._tracker, self._model)
        self._steps.next_look = 0

    def _time_device(self) -> None:
        timeline = timeline_of(self._device)
        if timeline is not None:
            self._tracker.device_time = DeviceTime(
                timeline, self._event, self.config.details_every, lambda: self._effort.sampling.kernel_share
            )

    def finish_training(self) -> dict[str, float]:
        """Close the run file with a summary, and give it. Safe to call twice."""
        if self._at_exit is not None and os.getpid() == self._pid:
            self._start()
        if self._state == "running" and os.getpid() == self._pid:
            self._state = "finished"
            ENDINGS.remove(self)
            self._close()
            if self._at_exit is not None:
                atexit.unregister(self._at_exit)
        return self._last_summary if self._state == "finished" else self.summary()

    def summary(self) -> dict[str, float]:
        """This start so far in a few numbers, from the job's record; nothing on a rank that does not keep it."""
        return self._sum_up()

    def _sum_up(self, timeout_s: float | None = None) -> dict[str, float]:
        run = self._read_back(timeout_s=timeout_s)
        return {} if run is None else run.sum_up()

    @property
    def has_record(self) -> bool:
        """Whether there is a run file that can be read back."""
        return self._worker is not None and self._worker.has_record

    def _read_back(self, and_do: Callable[[Run], None] | None = None, timeout_s: float | None = None) -> Run | None:
        """The job's record so far, read beside the training thread; None, with a warning, where that is not possible.

        Args:
            and_do: Done with it on the thread that reads it.
            timeout_s: None: by its length.
        """

        def read() -> Run:
            run = load_run(self.run_path)
            if and_do is not None:
                and_do(run)
            return run

        run, reason = None, "the disk does not answer"
        if self._rank != 0 or not self.has_record or self._worker is None:
            return None
        try:
            run = self._worker.ask(read, timeout_s or DRAIN_S + self.num_steps / STEPS_READ_PER_S)
        except (FlopmeterError, OSError) as error:
            reason = str(error)
        if run is None:
            logger.warning("the record cannot be read back: %s", reason)
        return run

    def end_by_signal(self, name: str) -> None:
        """The process is about to die: what was measured and a last line go to disk. From another thread, bounded."""
        self._failure = name
        self._steps.switch_off()
        self._guarded(self._steps.flush)
        if self._worker is not None:
            metrics = self._sum_up(SIGNAL_S)
            self._worker.close([self._last_line(metrics)], timeout_s=SIGNAL_S)

    def leave_to_parent(self) -> None:
        """In a forked child: the record is the parent's."""
        self._steps.switch_off()
        self._tracker.workloads = None
        if self._worker is not None:
            self._worker.abandon()
            self._steps.put = self._worker.put

    def detach(self) -> None:
        """Take all hooks away: a run that could not begin has nothing more to do with the loop."""
        self._hooks.remove()

    def _threads_s(self) -> float:
        """CPU time of all threads of ours."""
        worker_s = self._worker.own_cpu_s if self._worker is not None else 0.0
        return worker_s + (self._ranks.exchange.cpu_s if self._ranks is not None else 0.0)

    def _sampler(self) -> Callable[[], Mapping[str, float]]:
        self._resources = make_sampler(self._model)

        def sample() -> Mapping[str, float]:
            if self._tracker.source is not None:
                self._tracker.source.read_counters()
            found = self._resources.sample() if self._resources is not None else {}
            if self._ranks is not None:
                self._ranks.note_resources(found)
            return found

        return sample

    @unnoticed
    def _close(self) -> None:
        """End everything, each part for itself: whatever fails, the hooks are gone and the record is on disk."""
        parts = (
            self._stop_measuring, self._detach_hooks, self._tracker.end_evaluation, self._steps.flush,
            self._close_timeline, self._tell_last, self._close_record, self._say_result,
        )  # fmt: skip
        for part in parts:
            self._guarded(part)

    def _guarded(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:  # noqa: BLE001 - the program goes on; the reason is logged
            name = part.__name__.strip("_").replace("_", " ")
            logger.warning("closing the run: %s failed (%s: %s)", name, type(error).__name__, error)

    def _stop_measuring(self) -> None:
        """Nothing runs through a step any more, and batches are not looked into."""
        self._tracker.workloads = None
        self._tracker.close()
        self._effort.close(self.num_steps)
        self._tracker.expect(self._effort.leftover_thread)

    def _detach_hooks(self) -> None:
        """Take all hooks away: at once, or on the thread that has to take a measurement away, by its next hook."""
        if self._effort.leftover_thread:
            self._tracker.discard_measurement = self._detach_hooks_here
        else:
            self._hooks.remove()

    def _detach_hooks_here(self) -> None:
        self._steps.discard_measurement()
        self._hooks.remove()

    def _close_timeline(self) -> None:
        if self._tracker.device_time is not None:
            self._tracker.device_time.close()

    def _tell_last(self) -> None:
        """What is known only when every step is digested."""
        leftover = self._datasets.take()
        if leftover is not None:
            values = dataset_values(leftover)
            self._put(Log({"kind": "event", "event": "metrics", "step": None, "metrics": values}, values))
        if self._worker is None:
            return
        self._worker.drain(DRAIN_S)
        if self._tracker.source is not None:
            self._tracker.source.close()
        if self._ranks is not None:
            self._ranks.close(PATIENCE_S if self._failure is None else 0.0)
        self._is_disk_well = self._worker.drain(DRAIN_S)

    def _close_record(self) -> None:
        if self._worker is None:
            return
        self._last_summary = self.summary() if self._is_disk_well else {}
        line = self._last_line(self._last_summary)
        self._worker.close([line], self._leave_pages if self._rank == 0 and self.has_record else None)
        if self._resources is not None:
            self._resources.close()

    def _last_line(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        line = {"kind": "summary", "time": time.time(), "num_steps": self.num_steps, "metrics": metrics}
        return line if self._failure is None else {**line, "failure": self._failure}

    def _leave_pages(self) -> None:
        """Run on the thread that owns the disk, when the record is closed."""
        run = load_run(self.run_path)
        if len(run) <= MAX_STEPS_IN_LOG:
            write_training_log(run, self.log_path)
        else:
            asked = f"flopmeter report {self.output_dir} --format training_log"
            logger.warning("%d steps: %s is made by  %s", len(run), self.log_path.name, asked)
        if self.config.monitoring.report and not self._is_interrupted:
            self._report = leave_report(run)

    def _say_result(self) -> None:
        """One line where a sink is for people to read."""
        if self.is_silent_at_end or self._rank != 0 or not self.num_steps or not self.has_record:
            return
        place = f"run: {self.output_dir}" if self._report is None else f"report: {seen_from_here(self._report)}"
        why_unknown = "" if self._model is not None else "no model was named"
        words = last_words(self._last_summary, self.num_steps, place, why_unknown=why_unknown)
        say_last(self.config.sink_names, f"flopmeter: {words}")

    def _event(self, event: str, metrics: Mapping[str, float] | None = None, **fields: Any) -> None:
        """Write an event to the record; its `metrics` are what the sinks get of it."""
        line = {"kind": "event", "event": event, "time": time.time(), "after_step": self.num_steps, **fields}
        if self._state == "new":
            self._early.append(Log(line, metrics))
        else:
            self._put(Log(line, metrics))

    def _join_job(self) -> None:
        """Take part in a job of several ranks, once there is a model and the run is on."""
        is_ready = self._tracker.source is not None and self._state == "running"
        if self._model is not None and self._ranks is None and is_ready:
            self._ranks = self._digest.ranks = join(self._model, self.config, self._tracker, self._event)
            self._steps.next_look = 0

    def _put(self, item: Any) -> None:
        if self._worker is None:
            if isinstance(item, Log) and self._state == "new" and len(self._early) < MAX_EARLY:
                self._early.append(item)
                self.start_training()
                return
            self._start()
        if self._worker is not None:
            self._worker.put(item)

    def _note_failure(self, where: str, error: Exception) -> None:
        self._num_failures += 1
        off = ""
        if self._num_failures >= MAX_FAILURES:
            self._steps.switch_off()
            self._guarded(self._stop_measuring)
            self._guarded(self._close_timeline)
            off = "; monitoring is now off"
        logger.warning("%s failed (%s: %s); training goes on%s", where, type(error).__name__, error, off)


ENDINGS = Endings()
"""Of all monitors of this process."""


def _finish_at_exit(monitor: Lifetime) -> Callable[[], None]:
    """A forgotten `finish_training` still leaves a complete record; the monitor can be collected all the same.

    Gives what was registered, so that a finished run leaves nothing behind.
    """
    reference, pid = weakref.ref(monitor), os.getpid()

    def finish() -> None:
        alive = reference()
        if alive is not None and alive._state != "finished" and os.getpid() == pid:
            error = unhandled()
            alive._failure = error.__name__ if error is not None else None
            alive._is_interrupted = error is not None and issubclass(error, KeyboardInterrupt)
            with suppress(KeyboardInterrupt):  # who presses Ctrl-C again does not want to wait
                alive.finish_training()

    return atexit.register(finish)
