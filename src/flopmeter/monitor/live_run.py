"""How does a run begin, follow its model and end? What happens without the loop asking for it.

A run ties work, time and peak together; each of its parts is a module of this folder.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, wraps
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from flopmeter.config import MonitorConfig
from flopmeter.dataset_metrics import DatasetMetrics
from flopmeter.distributed import COMMUNICATION, PATIENCE_S, Ranks, join_job
from flopmeter.errors import ConfigError, FlopmeterError, sign_warnings
from flopmeter.flops.workload import WorkloadReader
from flopmeter.monitor.device_time import DeviceTime
from flopmeter.monitor.digest import Digest, dataset_values
from flopmeter.monitor.effort import Effort
from flopmeter.monitor.ending import Endings, unhandled
from flopmeter.monitor.header import device_name, device_of, device_uuid, last_words, make_header, make_sampler
from flopmeter.monitor.hooks import Hooks
from flopmeter.monitor.measuring import FlopSource
from flopmeter.monitor.recorder import Recorder
from flopmeter.monitor.step_record import Log
from flopmeter.monitor.worker import Worker
from flopmeter.record import Run, RunWriter, load_run, write_training_log
from flopmeter.report import leave_report
from flopmeter.resources import ResourceSampler
from flopmeter.schema import RUN_FILE, TRACE_FILE
from flopmeter.sinks import GIVEN, LogFunction, SinkContext, check_sinks, say_last
from flopmeter.timing import PhaseClock
from flopmeter.timing.cuda import timeline_of, waits_of
from flopmeter.torch_compat import NEWER, TOO_OLD, DisableTorchFunction

logger = logging.getLogger("flopmeter")

MAX_FAILURES = 3
DRAIN_S = 10.0
MAX_QUEUED = 10_000
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


def unnoticed(method: _Method) -> _Method:
    """A function mode of the user's, and tensor classes of theirs, see none of the calls in it."""

    @wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> None:
        with DisableTorchFunction():
            method(*args, **kwargs)

    return cast(_Method, guarded)


class LiveRun:
    """From the settings to the record's last line. After the first step no failure of it stops the training."""

    @unnoticed
    def __init__(
        self,
        output_dir: str | PathLike[str],
        config: str | PathLike[str] | Mapping[str, Any] | MonitorConfig | None,
        log_file: str,
        flops_profile_freq: int | None,
        log: LogFunction | None,
    ) -> None:
        sign_warnings()
        self.config = MonitorConfig.load(config)
        check_sinks(self.config.sink_names)
        if log is not None and not callable(log):
            raise ConfigError(f"log: a function of metrics and a step, not {type(log).__name__}")
        self._log_function = log
        self.folder = Path(output_dir).absolute()  # wherever the program goes meanwhile
        self.run_path = self.folder / RUN_FILE
        self.log_path = self.folder / log_file
        self.worker: Worker | None = None
        self.resources: ResourceSampler | None = None
        self._device = device_of(None)
        """Where the model was when the run began, or when it was last looked at."""
        self.at_exit: Callable[[], None] | None = None
        self.rank = 0
        self.ranks: Ranks | None = None
        clock = PhaseClock()
        self.effort = Effort(self.config, flops_profile_freq, clock, self.event, self._threads_s)
        self.digest = Digest(self.config, self.effort.note_steps, self.effort.sampling.end_interval, self.effort.share)
        own = self.config.monitoring
        self.datasets = DatasetMetrics(own.dataset_metrics_every, shift_labels=own.dataset_labels_shifted)
        self._queue: deque[Any] = deque()
        """What the background writes; before the start, events that follow the header."""
        self.recorder = Recorder(
            clock,
            self.effort,
            self.datasets,
            own.detail_every,
            self._queue,
            begin=self._begin,
            catch_up=self._catch_up,
            detach=lambda: self.hooks.remove(),
            on_failure=self.fail,
            event=self.event,
            flush_every=own.flush_every,
            sees_backward=own.patches,
        )
        """What the hooks write to; where an integration that has hooks of its own tells what the loop does."""
        self.hooks = Hooks(self.recorder, patches=own.patches)
        self.is_silent_at_end = False
        """Whether somebody else says what was found, instead of a line where the console shows the steps."""
        self._report: Path | None = None
        self.num_failures = 0
        self.state = "new"
        self._pid = os.getpid()
        self.failure: str | None = None
        self._has_left = False
        """Whether this is a forked child, in which nothing is kept any more."""
        self._is_disk_well = True
        self._is_interrupted = False
        """Whether Ctrl-C has ended the program: then no more is loaded than the record needs."""
        self._last_summary: dict[str, float] = {}
        self.model: nn.Module | None = None
        self._named: list[nn.Module] = []

    @property
    def trace_hint(self) -> str:
        """Where the trace of a sampled step is kept, as the end of a line; empty without one."""
        folder = seen_from_here(self.folder)
        return f"; trace: {folder / TRACE_FILE}, opens in Perfetto" if self.effort.sampling.has_trace else ""

    @unnoticed
    def set_model(self, model: nn.Module, *others: nn.Module, within: nn.Module | None = None) -> None:
        """Name the object that the loop calls, or all of them: forward passes are marked, steps measured.

        Args:
            within: What the loop calls parts of, where these are parts: the record has its name.
        """
        if model is self.model:
            return
        before = self.recorder.source
        if before is not None:
            self.recorder.has_forward |= self.recorder.has_backward  # an open step says nothing of the new model
            self.recorder.discard_measurement()
            self.recorder.flush()
            if self.worker is not None:
                self.worker.drain(DRAIN_S)  # the steps so far are the other model's
        self.model = self.recorder.model = model
        self._named = [model, *others] if within is None else [within]
        self.effort.next_look = 0
        if TOO_OLD is not None:
            say_once(f"{TOO_OLD}; steps are timed, and no FLOPs are counted")
            self.hooks.attach_models(model, *others)
            return
        if NEWER is not None:
            say_once(NEWER)
        source = FlopSource([model, *others], self.config, self.event)
        self.recorder.source = self.digest.source = source
        self.recorder.read_batches(WorkloadReader(source.needs, self.recorder.copies, [model, *others]))
        self.hooks.attach_models(model, *others)
        self._join_job()
        if self.state == "running":
            self._follow_model()

    @unnoticed
    def start(self, after_step: int = 0, *, has_joined: bool = False) -> None:
        """Write the header and start the clock. `log_step` does it by itself when it was forgotten.

        Where torch.distributed is not initialised it may be later: then the record begins with the first forward pass,
        when this process knows its rank, and with the end at the latest.

        Args:
            after_step: Steps that the loop has done already: the first one that is measured has the next number.
            has_joined: Whether the process has joined its job, if it has one: the record begins at once.
        """
        if after_step:
            self.digest.last_step = after_step
        if self.state == "new" and self.at_exit is None:
            self._pid = os.getpid()
            self.at_exit = _finish_at_exit(self)
            self.recorder.clock.start()
        if has_joined or my_rank() is not None:
            self.start_now()

    def start_now(self) -> None:
        """By now the rank is known, or this process is alone."""
        if self.state != "new":
            return
        self.state = "running"
        try:
            self._start_record()
        except Exception as error:  # noqa: BLE001 - the process may have no more threads, or memory
            self._give_up()
            logger.warning("nothing is measured: the run could not begin (%s: %s)", type(error).__name__, error)
        if self.worker is not None and self.worker.writer.is_refused:  # which was said
            self.rank = -1  # neither a rank of this job nor the keeper of its record
            self._give_up()

    def _give_up(self) -> None:
        self.num_failures = MAX_FAILURES
        self.recorder.switch_off()
        self._guarded(self.hooks.remove)

    def _start_record(self) -> None:
        self._pid = os.getpid()
        self.rank = my_rank() or 0
        source = self.recorder.source
        if source is not None:
            source.follow_model()  # it may have been moved since
        peaks = source.recorded_peaks if source is not None else {}
        header = {**make_header(self.model, self.config, dict(peaks), self._named), "rank": self.rank}
        context = SinkContext(
            config=self.config, output_dir=self.folder, header=header, rank=self.rank, log=self._log_function
        )
        for log in [log for log in self._queue if log.line["event"] == "peak"]:
            self._queue.remove(log)  # those are in the header
        self.worker = Worker(
            RunWriter(record_path(self.folder, self.rank, self.config)),
            sink_names(self.config, self.rank, is_function_given=self._log_function is not None),
            context,
            self.digest,
            header,
            self._queue,
            flush_every=self.config.monitoring.flush_every,
            flush_s=self.config.monitoring.flush_s,
            end_batch=self.digest.end_batch,
            sample=self._sampler(),
            sink_cpu_share=None
            if self.config.is_written("training.logging_steps")
            else self.config.monitoring.overhead_budget,
        )
        self._device = device_of(self.model)
        self._time_device()
        if not self.config.monitoring.patches:
            self.event("warning", message=NO_PATCHES)
        self.worker.used = self.recorder.copies.used
        # Only the profile of rank 0 reaches the record.
        self.effort.start_run(self.folder, is_sampled=self.rank == 0, on_profiler=self.recorder.discard_measurement)
        self._join_job()
        self.worker.drain(1.0)  # a run that dies at once has left its header
        if self.at_exit is None:
            self.recorder.clock.start()
        else:  # behind the exchange's: what is registered last is called first
            atexit.unregister(self.at_exit)
        self.at_exit = _finish_at_exit(self)
        if self.config.monitoring.patches:
            ENDINGS.add(self)

    def _begin(self) -> None:
        """The first forward pass: by now the model is where it trains, and ranks know each other."""
        self.start_now()
        self._follow_model()

    def _follow_model(self) -> None:
        """What was set up for the device where the model was is set up again for the one that it was moved to."""
        device = device_of(self.model)
        if device == self._device:
            return
        self._device = device
        self.event("device", device=device_name(device))
        self._close_timeline()
        self._time_device()
        before, self.resources = self.resources, make_sampler(self.model)
        if before is not None:
            before.close()
        if self.ranks is not None and self.model is not None:
            connect_device(self.ranks, self.recorder, self.model)
        self.effort.next_look = 0

    def _time_device(self) -> None:
        timeline, device_time = timeline_of(self._device), None
        if timeline is not None:
            every = self.config.monitoring.detail_every
            device_time = DeviceTime(timeline, self.event, every, lambda: self.effort.sampling.kernel_share)
        self.recorder.follow_device(device_time, has_own_memory=self._device.type != "cpu")

    def finish(self) -> dict[str, float]:
        """Close the run file with a summary, and give it. Safe to call twice."""
        if self.at_exit is not None and os.getpid() == self._pid:
            self.start_now()
        if self.state == "running" and os.getpid() == self._pid:
            self.state = "finished"
            ENDINGS.remove(self)
            self._close()
            if self.at_exit is not None:
                atexit.unregister(self.at_exit)
        return self._last_summary if self.state == "finished" else self.sum_up()

    def sum_up(self, timeout_s: float | None = None) -> dict[str, float]:
        """This start so far in a few numbers, from the job's record; nothing on a rank that does not keep it."""
        run = self.read_back(timeout_s=timeout_s)
        return {} if run is None else run.sum_up()

    @property
    def has_record(self) -> bool:
        """Whether there is a run file that can be read back."""
        return self.worker is not None and self.worker.writer.has_file

    def read_back(self, and_do: Callable[[Run], None] | None = None, timeout_s: float | None = None) -> Run | None:
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
        if self.rank != 0 or not self.has_record or self.worker is None:
            return None
        try:
            run = self.worker.ask(read, timeout_s or DRAIN_S + self.recorder.num_steps / STEPS_READ_PER_S)
        except (FlopmeterError, OSError) as error:
            reason = str(error)
        if run is None:
            logger.warning("the record cannot be read back: %s", reason)
        return run

    def end_by_signal(self, name: str) -> None:
        """The process is about to die: what was measured and a last line go to disk. From another thread, bounded."""
        self.failure = name
        self.recorder.switch_off()
        self._guarded(self.recorder.tell_roles)
        self._guarded(self.recorder.flush)
        if self.worker is not None:
            metrics = self.sum_up(SIGNAL_S)
            self.worker.close([self._last_line(metrics)], timeout_s=SIGNAL_S)

    def leave_to_parent(self) -> None:
        """In a forked child: the record is the parent's."""
        self.recorder.switch_off()
        self.recorder.read_batches(None)
        self._has_left = True

    def _threads_s(self) -> float:
        """CPU time of all threads of ours."""
        worker_s = self.worker.own_cpu_s if self.worker is not None else 0.0
        return worker_s + (self.ranks.exchange.cpu_s if self.ranks is not None else 0.0)

    def _sampler(self) -> Callable[[], Mapping[str, float]]:
        self.resources = make_sampler(self.model)

        def sample() -> Mapping[str, float]:
            if self.recorder.source is not None:
                self.recorder.source.read_counters()
            found = self.resources.sample() if self.resources is not None else {}
            if self.ranks is not None:
                self.ranks.note_resources(found)
            return found

        return sample

    @unnoticed
    def _close(self) -> None:
        """End everything, each part for itself: whatever fails, the hooks are gone and the record is on disk."""
        parts = (
            self._stop_measuring, self._detach_hooks, self.recorder.end_evaluation, self.recorder.tell_roles,
            self.recorder.flush,
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
        self.recorder.read_batches(None)
        self.recorder.close()
        self.effort.close(self.recorder.num_steps)
        self.recorder.expect(self.effort.leftover_thread)

    def _detach_hooks(self) -> None:
        """Take all hooks away: at once, or on the thread that has to take a measurement away, by its next hook."""
        if not self.effort.leftover_thread:
            self.hooks.remove()

    def _close_timeline(self) -> None:
        if self.recorder.device_time is not None:
            self.recorder.device_time.close()

    def _tell_last(self) -> None:
        """What is known only when every step is digested."""
        leftover = self.datasets.take()
        if leftover is not None:
            values = dataset_values(leftover)
            self.put(Log({"kind": "event", "event": "metrics", "step": None, "metrics": values}, values))
        if self.worker is None:
            return
        self.worker.drain(DRAIN_S)
        if self.recorder.source is not None:
            self.recorder.source.close()
        if self.ranks is not None:
            self.ranks.close(PATIENCE_S if self.failure is None else 0.0)
        self._is_disk_well = self.worker.drain(DRAIN_S)

    def _close_record(self) -> None:
        if self.worker is None:
            return
        self._last_summary = self.sum_up() if self._is_disk_well else {}
        line = self._last_line(self._last_summary)
        self.worker.close([line], self._leave_pages if self.rank == 0 and self.has_record else None)
        if self.resources is not None:
            self.resources.close()

    def _last_line(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        line = {
            "kind": "summary",
            "time": time.time(),
            "num_steps": self.recorder.num_steps,
            "last_step": self.digest.last_step,
            "metrics": metrics,
        }
        return line if self.failure is None else {**line, "failure": self.failure}

    def _leave_pages(self) -> None:
        """Run on the thread that owns the disk, when the record is closed."""
        run = load_run(self.run_path)
        if len(run) <= MAX_STEPS_IN_LOG:
            write_training_log(run, self.log_path)
        else:
            asked = f"flopmeter report {seen_from_here(self.folder)} --format training_log"
            logger.warning("%d steps: %s is made by  %s", len(run), self.log_path.name, asked)
        if self.config.monitoring.report and not self._is_interrupted:
            self._report = leave_report(run)

    def _say_result(self) -> None:
        """One line where a sink is for people to read."""
        if self.is_silent_at_end or self.rank != 0 or not self.recorder.num_steps or not self.has_record:
            return
        found = ("run", self.folder) if self._report is None else ("report", self._report)
        place = f"{found[0]}: {seen_from_here(found[1])}{self.trace_hint}"
        why_unknown = "" if self.model is not None else "no model was named"
        words = last_words(self._last_summary, self.recorder.num_steps, place, why_unknown=why_unknown)
        say_last(self.config.sink_names, f"flopmeter: {words}")

    def event(self, event: str, metrics: Mapping[str, float] | None = None, **fields: Any) -> None:
        """Write an event to the record; its `metrics` are what the sinks get of it."""
        line = {"kind": "event", "event": event, "time": time.time(), "after_step": self.recorder.num_steps, **fields}
        self.put(Log(line, metrics))

    def _join_job(self) -> None:
        """Take part in a job of several ranks, once there is a model and the run is on."""
        is_ready = self.recorder.source is not None and self.state == "running"
        if self.model is not None and self.ranks is None and is_ready:
            self.ranks = self.digest.ranks = join(self.model, self.config, self.recorder, self.event)
            self.effort.next_look = 0

    def put(self, item: Log) -> None:
        """Into the queue, in order; not beyond what may wait there."""
        if len(self._queue) < (MAX_EARLY if self.worker is None else MAX_QUEUED) and not self._has_left:
            self._queue.append(item)

    def _catch_up(self) -> None:
        if self.worker is not None:
            self.worker.catch_up()

    def fail(self, where: str, error: Exception) -> None:
        self.num_failures += 1
        off = ""
        if self.num_failures >= MAX_FAILURES:
            self.recorder.switch_off()
            self._guarded(self._stop_measuring)
            self._guarded(self._close_timeline)
            off = "; monitoring is now off"
        logger.warning("%s failed (%s: %s); training goes on%s", where, type(error).__name__, error, off)


ENDINGS = Endings()
"""Of all monitors of this process."""


def _finish_at_exit(run: LiveRun) -> Callable[[], None]:
    """A forgotten `finish_training` still leaves a complete record; the monitor can be collected all the same.

    Gives what was registered, so that a finished run leaves nothing behind.
    """
    reference, pid = weakref.ref(run), os.getpid()

    def finish() -> None:
        alive = reference()
        if alive is not None and alive.state != "finished" and os.getpid() == pid:
            error = unhandled()
            alive.failure = error.__name__ if error is not None else None
            alive._is_interrupted = error is not None and issubclass(error, KeyboardInterrupt)
            with suppress(KeyboardInterrupt):  # who presses Ctrl-C again does not want to wait
                alive.finish()

    return atexit.register(finish)


# How does a run take part in a job of several ranks?


def my_rank() -> int | None:
    """This process's rank; None as long as torch.distributed does not say."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def seen_from_here(path: Path) -> Path:
    """Relative to the current folder where it lies below that, as most people give it."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):  # it lies elsewhere, or the current folder is gone
        return path


def record_path(output_dir: Path, rank: int, config: MonitorConfig) -> Path:
    """Where this rank's record goes: rank 0 keeps the job's, the others one of their own when asked, else none."""
    if rank == 0:
        return output_dir / RUN_FILE
    stem, _, suffix = RUN_FILE.partition(".")
    is_asked = config.monitoring.distributed.record_every_rank
    return output_dir / f"{stem}.rank{rank}.{suffix}" if is_asked else Path(os.devnull)


def sink_names(config: MonitorConfig, rank: int, *, is_function_given: bool) -> tuple[str, ...]:
    """The sinks of this rank: all of them on rank 0, elsewhere a Prometheus page when asked."""
    if rank == 0:
        return (*config.sink_names, GIVEN) if is_function_given else config.sink_names
    return tuple(name for name in config.sink_names if name == "prometheus" and config.prometheus.ranks == "all")


def join(model: nn.Module, config: MonitorConfig, recorder: Recorder, emit: Callable[..., None]) -> Ranks | None:
    """Connect the parts of this rank's monitor with the job; None when it is alone, or when that fails."""
    clock = recorder.clock
    try:
        ranks = join_job(model, config.monitoring.distributed, lambda: clock.current, emit, _device_name(model))
        if ranks is not None:
            ranks.blocking.is_on = config.monitoring.patches
            _connect(ranks, recorder, model)
            ranks.start()
    except Exception as error:  # noqa: BLE001 - a job without statistics is still a job
        logger.warning("the ranks are not compared: %s: %s", type(error).__name__, error)
        return None
    return ranks


def _connect(ranks: Ranks, recorder: Recorder, model: nn.Module) -> None:
    recorder.follow_ranks(ranks.blocking)
    if recorder.source is not None:
        recorder.source.ranks = ranks
        ranks.on_count = recorder.source.take_count
    connect_device(ranks, recorder, model)


def connect_device(ranks: Ranks, recorder: Recorder, model: nn.Module) -> None:
    """Let the ranks know what the device does, where there is one."""
    if (device_time := recorder.device_time) is not None:
        device_time.on_step = ranks.add_device
        ranks.blocking.on_backward_computed = lambda: device_time.mark_inside_backward(COMMUNICATION)
        if ranks.blocking.is_on and _is_sharded(model):
            device_time.waits = waits_of(device_of(model), lambda: recorder.clock.current)
            if device_time.waits is not None:
                device_time.waits.attach()


def _is_sharded(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever uses it has imported it, which takes a second
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def _device_name(model: nn.Module | None) -> str:
    """Names a device among those of its host; the CPU is one, however many ranks compute on it."""
    device = device_of(model)
    return device_uuid(device) or str(device)
