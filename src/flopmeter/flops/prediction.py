"""How many FLOPs does this step need, when only some steps are counted?

A counted step says how much of its work grows with tokens, with attended pairs, with image patches. The closed form
says by how much each of these grows from that step's workload to another's. So one counted step predicts all others,
the next one tests the prediction, and its error is published. A step with work of a kind that no counted step had (the
first image after text alone) takes that kind from the closed form.

Hardware FLOPs follow what the device is handed, padding included: `executed` says how.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from flopmeter.flops.estimate import EstimatePlan
from flopmeter.flops.executed import Executed, by_kind, kind_of, without_gaps
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.varying import Counts
from flopmeter.flops.workload import Workload, pairs

MAX_KNOWN = 256
SAME_TOTAL, SAME_PART, SAME_KIND = 0.05, 0.1, 0.01
"""A closed form this close to the count is right; a part of the count this far from the closed form's is mistaken; a
kind of work this close in both is beyond doubt."""


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
    growth: Mapping[str, float]
    """What the closed form says of the counted step, by kind of work."""
    executed: Executed
    """What the device ran in it."""


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
        self._calibrations: dict[frozenset[str], _Calibration] = {}
        self._known: OrderedDict[Workload, Prediction] = OrderedDict()
        self._counts = Counts()

    @property
    def difference(self) -> float:
        """By how much counts of the last counted workload differ, as a share of their mean; 0 where they agree."""
        return self._counts.difference

    def learn(self, count: FlopCount, workload: Workload) -> float | None:
        """Take a counted step; returns the relative error of what had been predicted for it."""
        predicted = sum(self._predict(workload).model_flop.values())
        if count.model_flop:
            self.error = predicted / count.model_flop - 1
        if self._is_calibrated:
            count = self._counts.add(count, workload)
            growth = self._growth(workload)
            others = {kinds: other for kinds, other in self._calibrations.items() if kinds != frozenset(growth)}
            sound = self._with_sound_growth(count, growth)
            calibration = _Calibration(sound, growth, Executed.of(sound, self.plan, workload, growth))
            self._calibrations = {**others, frozenset(growth): calibration}  # the last is the newest
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
        planned = self.plan.evaluate(workload, convention=self._convention, dtype=self.dtype)
        growth = by_kind(planned.growth)
        calibration = self._nearest(frozenset(growth))
        if calibration is None:
            return Prediction(planned.by_dtype, planned.hardware_by_dtype, planned.method)
        count = calibration.count
        scales = _scales(calibration.growth, growth, by_kind(count.growth))
        model = {
            dtype: sum(flop * scales.get(kind_of(driver), scales[""]) for driver, flop in parts.items())
            for dtype, parts in (count.growth or {dtype: {"": flop} for dtype, flop in count.by_dtype.items()}).items()
        }
        for dtype, parts in planned.growth.items() if count.growth else ():
            own = dtype if len(count.by_dtype) != 1 else next(iter(count.by_dtype))  # autocast's, where it was counted
            for driver, flop in parts.items():
                if flop and kind_of(driver) not in calibration.growth:
                    model[own] = model.get(own, 0.0) + flop
        hardware = calibration.executed.at(self.plan, workload)
        return Prediction(model, hardware, "calibrated" if self.plan.method == "estimate" else "scaled")

    def _nearest(self, kinds: frozenset[str]) -> _Calibration | None:
        """The newest counted step with these kinds of work and no others, or with all of them, or of any kind."""
        known = self._calibrations
        if kinds in known:
            return known[kinds]
        fitting = [known[others] for others in known if kinds <= others] or list(known.values())
        return fitting[-1] if fitting else None

    def _with_sound_growth(self, count: FlopCount, planned: Mapping[str, float]) -> FlopCount:
        """Rows are told apart by their number; where two kinds have the same, the closed form knows better."""
        total = count.model_flop
        if self.plan.method != "estimate" or not total or abs(sum(planned.values()) / total - 1) > SAME_TOTAL:
            return count
        seen = by_kind(count.growth)
        if all(abs(seen.get(kind, 0.0) - planned.get(kind, 0.0)) <= SAME_PART * total for kind in {*seen, *planned}):
            return count
        shares = _shares(total, seen, planned)
        growth = {
            dtype: {kind: flop * share for kind, share in shares.items()} for dtype, flop in count.by_dtype.items()
        }
        return replace(count, growth=growth)

    def _growth(self, workload: Workload) -> dict[str, float]:
        return by_kind(self.plan.evaluate(workload, convention=self._convention).growth)


def _shares(total: float, seen: Mapping[str, float], planned: Mapping[str, float]) -> dict[str, float]:
    """Each kind's share: as counted where the closed form says the same, the rest divided as the closed form does."""
    agreed = {kind: flop for kind, flop in planned.items() if abs(seen.get(kind, 0.0) - flop) <= SAME_KIND * flop}
    rest = {kind: flop for kind, flop in planned.items() if kind not in agreed}
    if not rest:
        return {kind: flop / sum(planned.values()) for kind, flop in planned.items()}
    left = (total - sum(seen[kind] for kind in agreed)) / sum(rest.values())
    return {kind: (seen[kind] if kind in agreed else flop * left) / total for kind, flop in planned.items()}


def _scales(before: Mapping[str, float], after: Mapping[str, float], seen: Mapping[str, float]) -> dict[str, float]:
    """By how much each kind of work grows; "" is for what was counted under a name that the closed form does not use.

    That grows as what the closed form has and the count does not know by name: images there are patches here.
    """
    scales = {kind: after.get(kind, 0.0) / flop for kind, flop in before.items()}
    unmatched = [kind for kind in before if kind not in seen] or list(before)
    total = sum(before[kind] for kind in unmatched)
    scales[""] = sum(after.get(kind, 0.0) for kind in unmatched) / total if total else 1.0
    return scales


def as_if_unpadded(workload: Workload) -> Workload:
    """The same rows with every padding token a real one: what the device processed."""
    rows, tokens = workload.samples, workload.tokens_processed
    is_padded = workload.tokens != tokens or workload.decoder_tokens != workload.decoder_tokens_processed
    if not rows or not is_padded:
        return workload
    window = rows * pairs(tokens // rows, causal=True, window=workload.window) if workload.window else 0
    return replace(without_gaps(workload), pairs_window=window)
