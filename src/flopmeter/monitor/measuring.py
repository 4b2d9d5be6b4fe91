"""Where do the FLOPs of each step come from? The four modes: estimate, smart, profiler, hybrid."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import nn

from flopmeter.config import MonitorConfig
from flopmeter.counters import CounterReader, CounterUnavailableError, open_counters
from flopmeter.devices import Peak, devices_of, dtype_name, peak_flops
from flopmeter.devices.roof import roof_of
from flopmeter.distributed import Ranks
from flopmeter.errors import FlopmeterError
from flopmeter.flops.estimate import estimate_call, read_leaves
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.observe import ObservedStep
from flopmeter.flops.prediction import OFF, Predictor, StepFlop, training_state
from flopmeter.flops.profiled import ProfiledStep
from flopmeter.flops.workload import PatchWindow, Seen, Shape, Workload, needs_of, resolve
from flopmeter.monitor.header import device_name, device_of, device_uuid
from flopmeter.profiling import profiler_guard
from flopmeter.schema import METRICS_BY_KEY, StepMark
from flopmeter.step_facts import facts_of
from flopmeter.torch_compat import HAS_ACTIVITY_FILTERS, has_saved_tensor_hooks, num_dispatch_modes, num_recompiles

logger = logging.getLogger("flopmeter")

MAX_STATES = 8
"""Ways of training whose counts are kept: a loop that goes back to one finds its counts."""
MAX_KNOWN_SHAPES = 10_000
MAX_TURNS = 100
"""Changes that are remembered until the steps before them are digested."""
CHANGED = (
    "what is trained, checkpointed or computed in TF32 has changed: FLOPs are estimated until a step is measured again"
)
DIFFERENT = (
    "FLOPs differ between steps of the same shape by {:.0%}, as where layers are dropped at random: "
    "the mean of the measured ones is used"
)
NEW_KIND = "no measured step had {} yet: what they take is estimated from the layers of the model until one is measured"
INEXACT = (
    "FLOPs of a step of another shape were predicted {:+.1%} off: steps of new shapes are measured one by one, and the "
    "others are marked as predicted"
)
UNSEEN = (
    "FLOPs of the steps are unknown: they differ, and the loop does not call the model itself, which would tell why"
)
_BULKY = ("by_op", "by_module", "uncounted", "formula", "left_out", "workload", "needs")
"""What a prediction does not need: it would be most of the note."""
_FIELDS = (
    "model_flop", "forward_flop", "backward_flop", "recompute_flop", "optimizer_flop", "hardware_flop", "by_dtype",
    "by_op", "by_module", "by_role", "growth", "coverage", "uncounted", "method", "convention", "left_out",
)  # fmt: skip


class FlopSource:
    """Measures some steps and predicts the others.

    `start`, `finish`, `stop` and `take_change` are called on the training thread, `read_counters` in the background;
    `predict`, `peaks` and `error` from any.

    Args:
        models: The modules that the loop calls.
        event: Writes an event to the run file.
    """

    def __init__(self, models: Sequence[nn.Module], config: MonitorConfig, event: Callable[..., None]) -> None:
        self._roots = models
        self._model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self._settings = config.monitoring
        self._event = event
        self._measurement: ObservedStep | ProfiledStep | None = None
        self._counters = self._open_counters()
        self._device, self._devices = device_of(self._model), devices_of(self._model)
        self._looked_up: set[tuple[torch.device, str]] = set()
        self.peaks: dict[str, float] = {}
        """FLOP/s by dtype, as far as known."""
        self.recorded_peaks: dict[str, dict[str, str | float]] = {}
        """The same with device, source and note, for the run's header."""
        self._shapes: set[Shape] = set()
        self.version = 0
        """Grows whenever something was learnt, or the model is trained in another way: predictions may differ then."""
        self.since = 0
        """The first step of the way in which the model is trained now."""
        self.lacks_proof = False
        """Whether the step that was last predicted is neither counted nor proven to follow from one that was."""
        self.is_choosy = False
        """Whether the running step is measured only if its first batch has a shape that is wanted."""
        self._num_recompiles: int | None = None
        self._has_told_error = False
        self._roofs: set[str] = set()
        """Dtypes whose roof was looked up."""
        self._facts: dict[str, Any] | None = None
        self._last_blocker: str | None = None
        self._has_failed = False
        self.ranks: Ranks | None = None
        """The other ranks of the job: rank 0 measures for all that do the same work."""
        self.needs = needs_of(*models)
        """What to look for in a batch."""
        self._state = training_state(models)
        self._predictor = self._make_predictor()
        self._by_state = {self._state: self._predictor}
        self._turns = [(0, self._predictor)]
        self._notes: dict[int, Mapping[str, Any]] = {}
        self._is_watched = True
        self._has_told_difference = False
        self._has_told_kind = False
        self.mode = self._effective_mode()

    @property
    def has_count(self) -> bool:
        """Whether anything was counted yet, here or on rank 0, of the model as it is trained now."""
        return self._predictor.has_count

    @property
    def measures(self) -> bool:
        """Whether steps are measured at all in this mode, and on this rank."""
        return self.mode != "estimate" and not self._has_failed and (self.ranks is None or self.ranks.measures)

    @property
    def is_measuring(self) -> bool:
        """Whether the running step is being measured."""
        return self._measurement is not None

    @property
    def kind(self) -> StepMark:
        """What a measured step is called in the record."""
        return "profiled" if self.mode == "profiler" else "observed"

    @property
    def error(self) -> float | None:
        """Relative error of the last prediction that a measurement tested."""
        return self._predictor.error

    def note_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is called for the first time: autocast decides the dtype of what is only estimated so far.

        In estimate mode this call is counted on shapes, in two seconds at most, unless nothing may be replaced, or the
        program looks on: at operators (a dispatch mode, a profiler) or at what is saved for a backward pass.
        """
        self.follow_model()
        device = self._device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self._predictor.dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            self._find_peak(dtype_name(self._predictor.dtype))
        if self.mode != "estimate" or len(self._roots) > 1 or not (args or kwargs) or not self._settings.patches:
            return  # to count on shapes replaces functions of torch for a moment
        if self._blocker() is not None or has_saved_tensor_hooks():
            return
        if self.is_changed():
            self.take_change(0)
        count = estimate_call(self._model, args, kwargs, training=True, convention=self._settings.convention)
        self._event("count", flop_error=None, **{name: _plain(getattr(count, name)) for name in _FIELDS})
        if count.workload is not None and count.model_flop and "counted" in count.method:
            self._learn(self._predictor, count, count.workload)

    def follow_model(self) -> None:
        """A model that was moved since it was given to us is held against what its device can do."""
        device, before = device_of(self._model), self._device
        if device == before:
            return
        self._device, self._devices = device, devices_of(self._model)
        self.peaks, self.recorded_peaks = {}, {}
        for dtype in [dtype for where, dtype in self._looked_up if where == before]:
            self._find_peak(dtype)
        if self._settings.mfu_calculation_mode == "hybrid":
            counters, self._counters = self._counters, self._open_counters()
            self.mode = self._effective_mode()
            if counters is not None:
                counters.close()

    def start(self, obstacle: str | None, is_early: bool = False) -> None:
        """Measure the step that begins now, unless something is in the way or somebody else's tool is at work.

        Args:
            is_early: Only if its shape is one that the law is not proven for.
        """
        if (reason := obstacle or self._blocker()) is not None:
            if reason != self._last_blocker:
                self._event("warning", message=f"steps are not measured now: {reason}")
            self._last_blocker = reason
            return
        measurement = ProfiledStep(self._device) if self.mode == "profiler" else ObservedStep(self._roots)
        measurement.start()
        self._measurement = measurement
        self.is_choosy = is_early
        self._num_recompiles = num_recompiles() if is_early else None

    def wants(self, shape: Shape | None) -> bool:
        """Whether the step that is measured for its shape is to be: its first batch has come."""
        self.is_choosy = False
        measurement = self._measurement
        if shape is None or self._predictor.is_known(shape):
            return False
        is_first = shape not in self._shapes  # of which the compiler may have to make code
        return not (is_first and isinstance(measurement, ObservedStep) and measurement.has_compiled)

    def _blocker(self) -> str | None:
        """Why this step must not be measured, or None."""
        if self.mode == "profiler":
            return profiler_guard.step_blocker()
        if reason := profiler_guard.foreign_profiler():
            return f"{reason}, and would show our calls"
        if num_dispatch_modes():
            return "a dispatch mode of the training code is active, whose exit would take ours for its own"
        return None

    def finish(self, seen: Callable[[], Sequence[Seen]]) -> None:
        """The measured step is over: learn from it.

        Args:
            seen: Gives what the step was given, and may wait for it: it is asked last.
        """
        measurement, self._measurement = self._measurement, None
        assert measurement is not None
        measurement.stop()
        self.is_choosy = False
        if self._num_recompiles is not None and self._num_recompiles != num_recompiles():
            return  # parts of it ran in the compiler: a later step of this shape is taken
        if isinstance(measurement, ObservedStep) and measurement.gave_way is not None:
            if measurement.gave_way != self._last_blocker:
                self._last_blocker = measurement.gave_way
                self._warn(f"{measurement.gave_way}: FLOPs are counted on shapes")
            if not measurement.batches:
                return  # before the model was called: a later step is tried
        count = measurement.result(self._settings.convention)
        batches = _counted_of(seen(), measurement)
        workload = resolve(batches)
        if not batches and count.model_flop and self._predictor.learn_unseen(count):
            self._warn(UNSEEN)
        # A count of nothing is used where nothing was hidden: a model of look-ups takes none.
        is_sure = count.model_flop > 0 or (bool(batches) and count.coverage == 1 and not count.uncounted)
        error = self._learn(self._predictor, count, workload) if is_sure else None
        if count.model_flop and self.ranks is not None and self.ranks.is_writer and workload:
            self.ranks.publish({**_note_of(count, workload), "state": self._state})
        told = {name: _plain(getattr(count, name)) for name in _FIELDS}
        self._event("count", flop_error=error, calibration=self._predictor.calibration, **told)
        if isinstance(measurement, ObservedStep) and measurement.gave_way is None:
            self._facts = facts_of(measurement, count)
            self._tell_facts()
            self._tell_roofs(self._facts["products"])

    def give_up(self, error: Exception) -> None:
        """Measuring has failed: no more steps are measured. What is known of the model goes on being used."""
        self._has_failed = True
        self.stop()
        self._warn(f"no more steps are measured, because measuring failed: {type(error).__name__}: {error}")

    def _warn(self, message: str) -> None:
        logger.warning("%s", message)
        self._event("warning", message=message)

    def read_counters(self) -> None:
        """What the device's counters say. Called in the background: a source may take a second."""
        counters = self._counters
        if counters is None:
            return
        try:
            reading = counters.read()
            known = {f"counter/{name}": value for name, value in reading.items() if value is not None}
            shares = {key: value for key, value in known.items() if key in METRICS_BY_KEY}
            self._event("counters", shares or None, reader=counters.name, **reading)
        except Exception as error:  # noqa: BLE001 - the thread that writes the record goes on without them
            if self._counters is counters:  # else it belongs to a device that the model has left
                self._counters = None  # not closed: what cannot be read is not asked for anything more
            self._warn(f"{counters.name}: no more hardware counters: {type(error).__name__}: {error}")

    def take_count(self, note: Mapping[str, Any]) -> None:
        """Rank 0 has counted a step of the same work. Called in the background."""
        state = note.get("state", self._state)
        predictor = self._by_state.get(state)
        if predictor is None:  # rank 0 has noticed a change before us
            self._notes = {state: note}
            return
        self._learn(predictor, *_read_note(note))

    def _learn(self, predictor: Predictor, count: FlopCount, workload: Workload | None) -> float | None:
        error = predictor.learn(count, workload) if workload is not None else None
        self.version += 1
        for dtype in (*count.by_dtype, *count.hardware_by_dtype):
            self._find_peak(dtype_name(dtype))
        if predictor.difference:
            if not self._has_told_difference:
                self._has_told_difference = True
                self._event("warning", message=DIFFERENT.format(predictor.difference))
        elif error is not None and abs(error) > OFF and not self._has_told_error:
            self._has_told_error = True
            self._warn(INEXACT.format(error))
        return error

    def is_changed(self) -> bool:
        """Whether the model is trained in another way than before."""
        if not self._is_watched:
            return False
        try:
            return training_state(self._roots) != self._state
        except Exception as error:  # noqa: BLE001 - modules of a user may be anything; the counts go on being used
            self._is_watched = False
            logger.warning("changes of the model are no longer noticed: %s: %s", type(error).__name__, error)
            return False

    def take_change(self, index: int) -> bool:
        """From the step `index` on the model is trained in another way. Gives whether it should be counted anew.

        What was counted before is used only together with what the module tree says of the change.
        """
        state = training_state(self._roots)
        before, now = self._predictor, self._by_state.get(state)
        if now is None:
            now = self._make_predictor(before)
            now.dtype = before.dtype
            kept = list(self._by_state.items())[1 - MAX_STATES :]
            self._by_state = {**dict(kept), state: now}  # replaced: the background thread may be reading
        self._state, self._predictor, self.since = state, now, index
        self.version += 1
        self._turns = [*self._turns, (index, now)][-MAX_TURNS:]
        note = self._notes.pop(state, None)
        if note is not None:
            self._learn(now, *_read_note(note))
        is_due = before.has_count and not now.has_count
        if is_due and not now.is_told:
            now.is_told = True
            self._event("warning", message=CHANGED)
        return is_due

    def stop(self, *, is_over: bool = True) -> None:
        """The running step is measured no further. Safe to call when none is.

        Args:
            is_over: Whether the calling thread can end the measurement. If not, it is kept for the one that can.
        """
        measurement, self.is_choosy = self._measurement, False
        if is_over:
            self._measurement = None
        if isinstance(measurement, ProfiledStep):
            measurement.discard()
        elif measurement is not None:
            measurement.stop()

    def close(self) -> None:
        """The run is over, and every step of it digested."""
        if self._facts is not None and self._facts["num_shapes"] != len(self._shapes):
            self._tell_facts()
        counters, self._counters = self._counters, None
        if counters is not None:
            counters.close()

    def _tell_facts(self) -> None:
        """What the last observed step showed, with the input shapes seen so far."""
        assert self._facts is not None
        self._facts["num_shapes"] = max(1, len(self._shapes))
        self._event("facts", **self._facts)

    def _tell_roofs(self, products: Sequence[Sequence[Any]]) -> None:
        """What was measured on this device before (`flopmeter peak --measure`), at this program's shapes if it was."""
        for dtype in self.peaks.keys() - self._roofs:
            self._roofs.add(dtype)
            names = {dtype, "fp32"} if dtype == "tf32" else {dtype}
            own = {(m, n, k): calls for name, m, n, k, calls in products if dtype_name(name) in names}
            found = roof_of(device_name(self._device), device_uuid(self._device), dtype, own)
            if found is not None:
                self._event("roof", dtype=dtype, **found)

    def predict(self, workload: Workload, index: int | None = None) -> StepFlop | None:
        """FLOPs of a step with this workload, by the dtype names of the peak table.

        Args:
            index: Which step it is: one from before a change of the model is not told by what came after. None: now.
        """
        predictor = self._predictor if index is None else self._predictor_at(index)
        if len(self._roots) > 1 and not predictor.has_count:
            return None  # several modules called in turn have no estimate together
        if len(self._shapes) < MAX_KNOWN_SHAPES:
            self._shapes.add(workload.shape)
        found = predictor.predict(workload)
        self.lacks_proof = self.mode == "smart" and found is not None and found.error != 0.0
        if predictor.missing and predictor.has_count and not self._has_told_kind:
            self._has_told_kind = True
            self._event("warning", message=NEW_KIND.format(" and ".join(sorted(predictor.missing))))
        return found

    @property
    def lacks_kind(self) -> bool:
        """Whether a step had a kind of input, as images, that no measured one had."""
        return self._predictor.has_count and bool(self._predictor.missing)

    def unseen(self, index: int) -> StepFlop | None:
        """FLOPs of a step in which the model itself was not called, where they are known."""
        return self._predictor_at(index).unseen

    def state_at(self, index: int) -> Predictor:
        """Names the way in which the model was trained at that step: counts serve its own steps."""
        return self._predictor_at(index)

    def _predictor_at(self, index: int) -> Predictor:
        turns = self._turns
        return next((own for since, own in reversed(turns) if index >= since), turns[0][1])

    def _effective_mode(self) -> str:
        mode = self._settings.mfu_calculation_mode
        if mode != "hybrid":
            return mode
        is_profiler = self._counters is None and self._settings.performance_monitoring.hybrid_mode.fallback_to_profiler
        if is_profiler and not HAS_ACTIVITY_FILTERS and device_of(self._model).type == "cuda":
            return "smart"  # nobody has asked for the profiler, and its tracer would stay attached
        return "profiler" if is_profiler else "smart"

    def _open_counters(self) -> CounterReader | None:
        hybrid = self._settings.performance_monitoring.hybrid_mode
        if self._settings.mfu_calculation_mode != "hybrid" or not hybrid.hardware_counters_enabled:
            return None
        device = device_of(self._model)
        try:
            reader = open_counters(str(device), uuid=device_uuid(device))
        except CounterUnavailableError as error:
            instead = "the profiler" if hybrid.fallback_to_profiler else "smart mode"
            self._warn(f"{error}: using {instead} instead")
            return None
        return reader

    def _make_predictor(self, before: Predictor | None = None) -> Predictor:
        try:
            estimate = read_leaves(self._model, convention=self._settings.convention)
        except Exception as error:  # noqa: BLE001 - parameters that are not there yet, say; the run begins all the same
            logger.warning("no estimate for this model: %s", error)
            estimate = None
        for dtype in estimate.by_dtype if estimate is not None else ():
            self._find_peak(dtype_name(dtype))
        is_calibrated = self._settings.performance_monitoring.smart_mode.calibration_enabled
        return Predictor(estimate, before, is_calibrated=is_calibrated)

    def _find_peak(self, dtype: str) -> None:
        if (self._device, dtype) in self._looked_up:
            return
        self._looked_up.add((self._device, dtype))
        try:
            peak = self._peak(dtype)
        except FlopmeterError as error:
            logger.warning("MFU stays unknown where %s work counts: %s", dtype, error)
            self._event("warning", message=str(error))
            return
        self.peaks = self.peaks | {dtype: peak.flop_per_s}  # replaced: the background thread may be reading
        self.recorded_peaks[dtype] = peak.as_record()
        self._event("peak", dtype=dtype, **self.recorded_peaks[dtype])

    def _peak(self, dtype: str) -> Peak:
        """What all devices of this process could have done together; a figure that the user states is for all."""
        # Counts for CUDA say "tf32" where they mean it. Elsewhere (ROCm) the setting of this moment is all there is.
        is_exact = torch.version.cuda is not None
        peak = peak_flops(self._device, dtype, peak_flop_per_s=self._settings.peak_flop_per_s, is_exact=is_exact)
        others = [device for device in self._devices if device != self._device and device.type == self._device.type]
        if peak.source == "user" or not others:
            return peak
        total = peak.flop_per_s + sum(peak_flops(device, dtype, is_exact=is_exact).flop_per_s for device in others)
        note = f"Of {len(others) + 1} devices together. {peak.note}"
        return replace(peak, flop_per_s=total, note=note.rstrip())


def _counted_of(seen: Sequence[Seen], measurement: ObservedStep | ProfiledStep) -> Sequence[Seen]:
    """Those micro-batches of a step that its count holds: one that gave way to the compiler has the first ones."""
    if isinstance(measurement, ProfiledStep) or measurement.gave_way is None:
        return seen
    return seen[: sum(not batch.is_evaluation for batch in measurement.batches)]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _note_of(count: FlopCount, workload: Workload) -> dict[str, Any]:
    """A count and what it was counted for, as plain values."""
    plain = {f.name: getattr(count, f.name) for f in fields(count) if f.name not in _BULKY}
    return {"count": plain, "workload": asdict(workload)}


def _read_note(note: Mapping[str, Any]) -> tuple[FlopCount, Workload]:
    """The same on the other side."""
    workload = dict(note["workload"])
    if workload["patch_window"] is not None:
        workload["patch_window"] = PatchWindow(*workload["patch_window"])
    workload["shape"] = tuple([tuple(map(tuple, call)) for call in workload.get("shape", ())])
    return FlopCount(**note["count"]), Workload(**workload)
