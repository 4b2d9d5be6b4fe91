"""Ties work, time and peak together for one training loop, and writes what it learns to the run file.

with TrainingMonitor("runs/mine", model=model) as monitor:
    for step, batch in enumerate(monitor.batches(loader)):
        loss = train(batch)
        monitor.log_step(step, epoch=0, loss=loss, grad_norm=None, learning_rate=3e-4)
"""

from __future__ import annotations

import logging
import platform
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from flopmeter import __version__
from flopmeter.config import MonitorConfig
from flopmeter.devices import Peak, normalise_dtype, peak_flops
from flopmeter.errors import FlopmeterError
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.observe import ObservedStep
from flopmeter.metrics import Step, Window, summarise
from flopmeter.record import RunWriter, load_run, write_training_log
from flopmeter.schema import RUN_FILE, SCHEMA_VERSION
from flopmeter.sinks import Sink, SinkContext, check_sinks, open_sink
from flopmeter.timing import StepClock
from flopmeter.timing.late import LateValue, take

logger = logging.getLogger("flopmeter")

WARMUP_STEPS = 3
MAX_FAILURES = 3

_T = TypeVar("_T")
_Method = TypeVar("_Method", bound=Callable[..., None])


def _harmless(method: _Method) -> _Method:
    """After the first step nothing of ours may stop a run: a failure is logged, the third one switches us off."""

    @wraps(method)
    def guarded(self: TrainingMonitor, *args: Any, **kwargs: Any) -> None:
        if self._num_failures >= MAX_FAILURES:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the training run comes first; the reason is logged
            self._note_failure(method.__name__, error)

    return cast(_Method, guarded)


class _PendingStep(NamedTuple):
    line: dict[str, Any]
    late: dict[str, LateValue]


class _Workload(NamedTuple):
    samples: int = 0
    tokens: int = 0

    def plus(self, batch: Any) -> _Workload:
        """Add a batch, told from the shape of its token ids or of its first tensor."""
        if isinstance(batch, Mapping):
            tensor = batch.get("input_ids", next(iter(batch.values()), None))
        else:
            tensor = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
            return self
        length = tensor.shape[1] if tensor.dim() == 2 and not tensor.is_floating_point() else 1
        return _Workload(self.samples + tensor.shape[0], self.tokens + tensor.shape[0] * length)


class TrainingMonitor:
    """Measures a training run from inside its loop. Everything it learns goes to `<output_dir>/run.jsonl`.

    Args:
        config: A YAML file, a preset's name, a mapping, or a MonitorConfig.
        log_file: Name of the plain JSON document that `save_logs` writes beside the run file.
        flops_profile_freq: Steps between two measurements of FLOPs; None takes it from the config.
        model: The module that the loop calls; without it FLOPs stay unknown until `set_model_ref`.
    """

    def __init__(
        self,
        output_dir: str | PathLike[str],
        config: str | PathLike[str] | Mapping[str, Any] | MonitorConfig | None = None,
        log_file: str = "training_log.json",
        flops_profile_freq: int | None = None,
        *,
        model: nn.Module | None = None,
    ) -> None:
        self.config = MonitorConfig.load(config)
        self.output_dir = Path(output_dir)
        self.log_path = self.output_dir / log_file
        self._interval = self.config.measuring_interval(argument=flops_profile_freq)
        self._writer = RunWriter(self.output_dir / RUN_FILE)
        check_sinks(self.config.sink_names)
        context = SinkContext(config=self.config, output_dir=self.output_dir)
        self._sinks: list[Sink] = [open_sink(name, context) for name in self.config.sink_names]
        self._clock = StepClock()
        self._pending: deque[_PendingStep] = deque()
        self._workload = _Workload()
        self._model = model
        self._observation: ObservedStep | None = None
        self._counts: dict[_Workload, FlopCount] = {}
        self._peaks: dict[str, Peak | None] = {}
        self._num_steps = 0
        self._num_failures = 0
        self._last_flush_s = time.monotonic()
        self._state = "new"

    @property
    def run_path(self) -> Path:
        """The run file."""
        return self._writer.path

    def set_model_ref(self, model: nn.Module) -> None:
        """Name the module that the loop calls."""
        self._model = model

    def start_training(self) -> None:
        """Write the header and start the clock. `log_step` does it by itself when it was forgotten."""
        if self._state != "new":
            return
        self._state = "running"
        self._writer.write(self._header())
        self._writer.flush()
        self._clock.start()

    def batches(self, loader: Iterable[_T]) -> Iterator[_T]:
        """Iterate over a loader, timing the wait for each batch."""
        self.start_training()
        iterator = iter(loader)
        while True:
            with self._clock.phase("data_wait"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            self._workload = self._workload.plus(batch)
            yield batch

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step: host_to_device, forward, backward, optimizer."""
        with self._clock.phase(name):
            yield

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Time something between steps (eval, checkpoint): it is lost time, not step time."""
        with self._clock.pause() as lasted_s:
            yield
        self._event("pause", name=name, duration_s=lasted_s())

    @_harmless
    def log_step(
        self,
        step: int,
        epoch: float,
        loss: Any,
        grad_norm: Any,
        learning_rate: float | None,
        **extra: Any,
    ) -> None:
        """End an optimizer step. `loss` and `grad_norm` may be tensors on the device; they are read later."""
        self.start_training()
        step_s, phase_s = self._clock.end_step()
        marks = ["warmup"] if self._num_steps < WARMUP_STEPS else []
        if self._observation is not None:
            marks.append("observed")
            self._finish_observation()
        workload, self._workload = self._workload, _Workload()
        metrics: dict[str, Any] = {**self._measure(step_s, phase_s, workload)}
        metrics |= {"global_step": step, "training/epoch": epoch}
        if learning_rate is not None:
            metrics["training/lr"] = learning_rate
        late = {"training/loss": take(loss)}
        if grad_norm is not None:
            late["training/grad_norm"] = take(grad_norm)
        metrics |= {key: value for key, value in extra.items() if isinstance(value, (int, float))}
        line = {"kind": "step", "step": step, "time": time.time(), "metrics": metrics}
        if marks:
            line["marks"] = marks
        self._pending.append(_PendingStep(line, late))
        self._num_steps += 1
        self._drain()
        self._maybe_observe()

    def log_epoch(self, epoch: float, avg_loss: float, elapsed_time: float, current_step: int | None = None) -> None:
        """Record the end of an epoch."""
        self._event("epoch", epoch=epoch, avg_loss=avg_loss, elapsed_time=elapsed_time, step=current_step)

    @_harmless
    def save_logs(self) -> None:
        """Write the run so far as one JSON document (`training_log.json`)."""
        self._drain()
        if self._writer.flush():
            write_training_log(load_run(self.run_path), self.log_path)

    def finish_training(self) -> dict[str, float]:
        """Close the run file with a summary, and give it. Safe to call twice."""
        if self._state == "running":
            self._state = "finished"
            self._close()
        return self._summary()

    def __enter__(self) -> TrainingMonitor:
        self.start_training()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish_training()

    @_harmless
    def _close(self) -> None:
        if self._observation is not None:
            self._observation.stop()
            self._observation = None
        self._drain()
        for sink in self._sinks:
            sink.close()
        self._writer.flush()
        self._writer.write({"kind": "summary", "time": time.time(), "metrics": self._summary()})
        self._writer.close()
        self.save_logs()

    def _summary(self) -> dict[str, float]:
        try:
            run = load_run(self.run_path)
        except FlopmeterError as error:
            logger.warning("no summary: %s", error)
            return {}
        return summarise(run.columns, run.steady())

    def _measure(self, step_s: float, phase_s: Mapping[str, float], workload: _Workload) -> dict[str, float]:
        count = self._counts.get(workload)
        step = Step(
            step_s=step_s,
            phase_s=phase_s,
            samples=workload.samples or None,
            tokens=workload.tokens or None,
            model_flop=_short_dtypes(count.by_dtype) if count else None,
            hardware_flop=_short_dtypes(count.hardware_by_dtype) if count else None,
        )
        window = Window()
        window.add(step)
        return window.compute(self._known_peaks(step.hardware_flop or {}))

    def _known_peaks(self, dtypes: Iterable[str]) -> dict[str, float]:
        for dtype in dtypes:
            if dtype not in self._peaks:
                self._peaks[dtype] = self._find_peak(dtype)
        return {dtype: peak.flop_per_s for dtype, peak in self._peaks.items() if peak is not None}

    def _find_peak(self, dtype: str) -> Peak | None:
        try:
            peak = peak_flops(self._device(), dtype, peak_flop_per_s=self.config.monitoring.peak_flop_per_s)
        except FlopmeterError as error:
            logger.warning("MFU stays unknown: %s", error)
            self._event("warning", message=str(error))
            return None
        self._event(
            "peak", dtype=dtype, device=peak.device, flop_per_s=peak.flop_per_s, source=peak.source, note=peak.note
        )
        return peak

    def _device(self) -> torch.device:
        parameter = next(self._model.parameters(), None) if self._model is not None else None
        return parameter.device if parameter is not None else torch.device("cpu")

    def _maybe_observe(self) -> None:
        """Let the next step be observed: once after the warm-up, then every interval."""
        if self._model is None or self._num_steps < WARMUP_STEPS or self._observation is not None:
            return
        since = self._num_steps - WARMUP_STEPS
        if since == 0 or (self._interval.steps and since % self._interval.steps == 0):
            self._observation = ObservedStep([self._model])
            self._observation.start()

    def _finish_observation(self) -> None:
        assert self._observation is not None
        observation, self._observation = self._observation, None
        observation.stop()
        count = observation.result(self.config.monitoring.convention)
        self._counts[self._workload] = count
        self._event(
            "count",
            model_flop=count.model_flop,
            hardware_flop=count.hardware_flop,
            forward_flop=count.forward_flop,
            backward_flop=count.backward_flop,
            recompute_flop=count.recompute_flop,
            by_dtype=dict(count.by_dtype),
            uncounted=dict(count.uncounted),
            method=count.method,
            convention=count.convention,
        )

    def _drain(self) -> None:
        """Write the steps whose late values have arrived; flush when the bound is reached."""
        while self._pending and all(value.is_ready() for value in self._pending[0].late.values()):
            line, late = self._pending.popleft()
            line["metrics"] |= {key: value.read() for key, value in late.items()}
            self._writer.write(line)
            for sink in self._sinks:
                sink.log(line["step"], line["metrics"])
        now_s = time.monotonic()
        settings = self.config.monitoring
        if self._num_steps % settings.flush_every == 0 or now_s - self._last_flush_s >= settings.flush_s:
            self._last_flush_s = now_s
            self._writer.flush()

    @_harmless
    def _event(self, event: str, **fields: Any) -> None:
        self._writer.write(
            {"kind": "event", "event": event, "time": time.time(), "after_step": self._num_steps, **fields}
        )

    def _header(self) -> dict[str, Any]:
        device = self._device()
        return {
            "kind": "header",
            "schema": SCHEMA_VERSION,
            "run_id": uuid.uuid4().hex[:12],
            "started_at": time.time(),
            "host": socket.gethostname(),
            "world_size": 1,
            "model": type(self._model).__name__ if self._model is not None else "",
            "num_parameters": sum(p.numel() for p in self._model.parameters()) if self._model is not None else 0,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "mode": self.config.monitoring.mfu_calculation_mode,
            "convention": self.config.monitoring.convention,
            "versions": {"flopmeter": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def _note_failure(self, where: str, error: Exception) -> None:
        self._num_failures += 1
        off = "; monitoring is now off" if self._num_failures >= MAX_FAILURES else ""
        logger.warning("%s failed (%s: %s); training goes on%s", where, type(error).__name__, error, off)


def _short_dtypes(flop: Mapping[str, float]) -> dict[str, float]:
    """FLOPs by the dtype names of the peak table."""
    result: dict[str, float] = {}
    for dtype, amount in flop.items():
        name = normalise_dtype(dtype)
        result[name] = result.get(name, 0.0) + amount
    return result
