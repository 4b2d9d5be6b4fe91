"""How many FLOPs does a step take while the model is trained in one way? Freezing a part of it begins another stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flopmeter.devices import normalise_dtype
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.prediction import MAX_KNOWN, Predictor, as_if_unpadded
from flopmeter.flops.workload import Workload

SAME = 0.005
"""Counts that differ by less are of the same work."""


class StepFlop(NamedTuple):
    """FLOPs of one step by dtype, under the names of the peak table."""

    model: Mapping[str, float]
    hardware: Mapping[str, float]
    processed: Mapping[str, float]
    """Model FLOPs if padding counted as work."""


class Stage:
    """What was counted, and what follows from it for other batches."""

    def __init__(self, predictor: Predictor | None) -> None:
        self.predictor = predictor
        self.has_count = False
        self.is_told = False
        """Whether the run file says that it has begun."""
        self._known: dict[Workload, StepFlop] = {}
        self.unseen: StepFlop | None = None
        """FLOPs of a step whose batch nobody saw, as long as all counts of such steps agree."""
        self._unseen_counts: list[float] = []
        self._differ = False

    def learn(self, count: FlopCount, workload: Workload | None) -> float | None:
        """A step was counted; gives the relative error of what had been predicted for it."""
        error = self.predictor.learn(count, workload) if self.predictor is not None and workload else None
        self._known = {}  # replaced, not cleared: the background thread may be reading
        self.has_count = True
        return error

    def learn_unseen(self, count: FlopCount) -> bool:
        """A step was counted in which the model itself was not called; gives whether such steps differ from now on."""
        self.has_count, before = True, self.unseen
        self._unseen_counts = [*self._unseen_counts[:1], count.model_flop]  # the first and the last
        model, hardware = _short(count.by_dtype), _short(count.hardware_by_dtype)
        least, most = min(self._unseen_counts), max(self._unseen_counts)
        self._differ = self._differ or most > (1 + SAME) * least
        self.unseen = None if self._differ else StepFlop(model, hardware, model)
        return self._differ and before is not None

    def predict(self, workload: Workload) -> tuple[StepFlop | None, bool]:
        """FLOPs of a step with this workload, and whether that is asked for the first time since the last count."""
        by_workload = self._known  # a measurement that ends meanwhile must not find what was foretold without it
        known = by_workload.get(workload)
        if known is not None or self.predictor is None:
            return known, False
        found, processed = self.predictor.predict(workload), self.predictor.predict(as_if_unpadded(workload))
        known = StepFlop(_short(found.model_flop), _short(found.hardware_flop), _short(processed.model_flop))
        if len(by_workload) >= MAX_KNOWN:
            by_workload.clear()
        by_workload[workload] = known
        return known, True


def _short(flop: Mapping[str, float]) -> dict[str, float]:
    """FLOPs by the dtype names of the peak table."""
    result: dict[str, float] = {}
    for dtype, amount in flop.items():
        name = normalise_dtype(dtype)
        result[name] = result.get(name, 0.0) + amount
    return result
