"""How many FLOPs does this step need, when only some steps are counted?

A counted step says how much of its work grows with tokens, with attended pairs, with image patches. The closed form
says by how much each of these grows from that step's workload to another's. So one counted step predicts all others,
the next one tests the prediction, and its error is published.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from flopmeter.flops.estimate import EstimatePlan
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.workload import Workload, pairs

MAX_KNOWN = 256
SAME_TOTAL, SAME_PART = 0.05, 0.1
"""A closed form this close to the count is right; a part of the count this far from the closed form's is mistaken."""


class Prediction(NamedTuple):
    """FLOPs of one step."""

    model_flop: Mapping[str, float]
    """By dtype of the operation."""
    hardware_flop: Mapping[str, float]
    """By dtype of the operation."""
    method: str
    """counted (this very workload), calibrated, estimate, or scaled."""


@dataclass(frozen=True, slots=True)
class _Calibration:
    count: FlopCount
    workload: Workload


class Predictor:
    """FLOPs of any workload, from a closed form and the steps that were counted. Safe to read from another thread.

    Args:
        plan: The model's closed form.
        is_calibrated: False keeps the closed form as it is, whatever is counted.
    """

    def __init__(self, plan: EstimatePlan, convention: Convention, *, is_calibrated: bool = True) -> None:
        self.plan = plan
        self.error: float | None = None
        """Relative error of the last prediction that a count tested."""
        self.dtype: str | None = None
        """What autocast turns every product into, as long as nothing was counted; None for the weights' own."""
        self._convention = convention
        self._is_calibrated = is_calibrated
        self._calibration: _Calibration | None = None
        self._known: OrderedDict[Workload, Prediction] = OrderedDict()

    def learn(self, count: FlopCount, workload: Workload) -> float | None:
        """Take a counted step; returns the relative error of what had been predicted for it."""
        predicted = sum(self._predict(workload).model_flop.values())
        if count.model_flop:
            self.error = predicted / count.model_flop - 1
        if self._is_calibrated:
            self._calibration = _Calibration(self._with_sound_growth(count, workload), workload)
            self._known = OrderedDict()  # replaced, not cleared: another thread may be reading
            self._remember(workload, Prediction(count.by_dtype, count.hardware_by_dtype, "counted"))
        return self.error

    def predict(self, workload: Workload) -> Prediction:
        """The FLOPs of a step with this workload."""
        known = self._known.get(workload)
        return known if known is not None else self._remember(workload, self._predict(workload))

    def _remember(self, workload: Workload, prediction: Prediction) -> Prediction:
        if len(self._known) >= MAX_KNOWN:
            self._known.popitem(last=False)
        self._known[workload] = prediction
        return prediction

    def _predict(self, workload: Workload) -> Prediction:
        calibration = self._calibration
        if calibration is None:
            count = self.plan.evaluate(workload, convention=self._convention, dtype=self.dtype)
            return Prediction(count.by_dtype, count.hardware_by_dtype, count.method)
        count, scales = calibration.count, self._scales(calibration.workload, workload)
        total = sum(count.by_dtype.values())
        model = {
            dtype: sum(flop * scales.get(_kind(driver), scales[""]) for driver, flop in parts.items())
            for dtype, parts in (count.growth or {dtype: {"": flop} for dtype, flop in count.by_dtype.items()}).items()
        }
        ratio = sum(model.values()) / total if total else 1.0
        hardware = {dtype: flop * ratio for dtype, flop in count.hardware_by_dtype.items()}
        return Prediction(model, hardware, "calibrated" if self.plan.method == "estimate" else "scaled")

    def _with_sound_growth(self, count: FlopCount, workload: Workload) -> FlopCount:
        """Rows are told apart by their number; where two kinds have the same, the closed form knows better."""
        planned, total = self._growth(workload), count.model_flop
        if self.plan.method != "estimate" or not total or abs(sum(planned.values()) / total - 1) > SAME_TOTAL:
            return count
        seen: dict[str, float] = defaultdict(float)
        for parts in count.growth.values():
            for driver, flop in parts.items():
                seen[_kind(driver)] += flop
        if all(abs(seen[kind] - planned[kind]) <= SAME_PART * total for kind in {*seen, *planned}):
            return count
        shares = {kind: flop / sum(planned.values()) for kind, flop in planned.items()}
        growth = {
            dtype: {kind: flop * share for kind, share in shares.items()} for dtype, flop in count.by_dtype.items()
        }
        return replace(count, growth=growth)

    def _scales(self, counted: Workload, wanted: Workload) -> dict[str, float]:
        """By how much each kind of work grows; "" stands for all of it."""
        before, after = self._growth(counted), self._growth(wanted)
        scales = {kind: after.get(kind, 0.0) / flop for kind, flop in before.items() if flop}
        total = sum(before.values())
        scales[""] = sum(after.values()) / total if total else 1.0
        return scales

    def _growth(self, workload: Workload) -> dict[str, float]:
        growth: dict[str, float] = defaultdict(float)
        for parts in self.plan.evaluate(workload, convention=self._convention).growth.values():
            for driver, flop in parts.items():
                growth[_kind(driver)] += flop
        return growth


def as_if_unpadded(workload: Workload) -> Workload:
    """The same rows of text with every padding token a real one: what the device processed."""
    rows, tokens = workload.samples, workload.tokens_processed
    if not rows or workload.tokens == tokens:
        return workload
    length = tokens // rows
    window = rows * pairs(length, causal=True, window=workload.window) if workload.window else 0
    return replace(workload, tokens=tokens, pairs_causal=rows * pairs(length, causal=True), pairs_window=window)


def _kind(driver: str) -> str:
    """Text pairs are one kind: the closed form knows which of them a mask lets through."""
    return "pair" if driver in ("causal_pair", "full_pair", "other_pair") else driver
