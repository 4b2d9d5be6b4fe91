"""How many FLOPs did this real step take?

    with observe(model) as observed:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    observed.result().model_flop

One Python call per operator makes the observed step slower (a few per cent when it is all large products, several times
when it is all tiny ones), so a monitor does this once in hundreds of steps.

Compiled code shows its products and little else: fused masks, recomputation and (with some back ends) everything stay
inside. So the same batch is also counted on the model's uncompiled twin, on shapes only; that says what the mathematics
needs, and how much of it was seen. The same goes for a forward pass that runs on other threads, as nn.DataParallel's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from operator import add

import torch
from torch import nn

from flopmeter.errors import CountError
from flopmeter.flops.count import count_call
from flopmeter.flops.flop_count import Convention, FlopCount, plus
from flopmeter.flops.observation import Observation

MIN_COVERAGE = 0.97
SAME = 1e-3
"""Shares of a dtype that differ by less are the same: rounding, and masks that were fused away."""


class ObservedStep(Observation):
    """An observation that asks the uncompiled twin where compiled code hides its work."""

    def result(self, convention: Convention = "exact") -> FlopCount:
        """The FLOPs of the step."""
        if self.gave_way is not None:
            twin = self._count_twin(convention)
            why = f"Only the model itself is counted, on shapes: {self.gave_way}."
            return replace(twin, method=f"the uncompiled twin ({twin.method})", left_out=(*twin.left_out, why))
        seen = super().result(convention)
        is_elsewhere = self._frames.is_spread or (seen.backward_flop > 0 and not seen.forward_flop)
        if not self.has_compiled and not is_elsewhere:
            return seen
        try:
            twin = self._count_twin(convention)
        except CountError as error:
            if is_elsewhere:
                raise CountError(
                    f"the forward pass was not seen, and its twin could not be counted: {error}"
                ) from error
            return replace(seen, left_out=(*seen.left_out, f"The uncompiled twin could not be counted: {error}"))
        recompute_flop = twin.recompute_flop
        coverage = min(1.0, seen.hardware_flop / twin.hardware_flop) if twin.hardware_flop else 1.0
        # The compiler decides what it computes again, which shows where all of its work does.
        # Unless plain products may be attention whose softmax and mask were fused away.
        hides_masks = any(call.pairs is not None and not call.pairs.is_attention for call in self.calls)
        if twin.recompute_flop and coverage >= MIN_COVERAGE and not hides_masks:
            recompute_flop = seen.model_flop + seen.recompute_flop - twin.model_flop
        is_seen = coverage >= MIN_COVERAGE
        return replace(
            _in_dtypes_of(seen, twin) if is_seen else twin,
            recompute_flop=recompute_flop,
            optimizer_flop=seen.optimizer_flop,
            hardware_flop=(seen if is_seen else twin).hardware_flop,
            hardware_by_dtype=(seen if is_seen else twin).hardware_by_dtype,
            coverage=coverage,
            uncounted=seen.uncounted,
            method=f"observed, split by the uncompiled twin ({twin.method})",
        )

    def _count_twin(self, convention: Convention) -> FlopCount:
        training = [batch for batch in self.batches if not batch.is_evaluation]
        if not training or len(self.roots) != 1:
            raise CountError("one model that was called is needed")
        counts: list[FlopCount] = []
        for batch in training:
            with torch.autocast(*batch.autocast) if batch.autocast is not None else nullcontext():
                counts.append(count_call(self.roots[0], *batch.arguments, convention=convention, may_run=False))
        return reduce(add, counts)


@contextmanager
def observe(*models: nn.Module) -> Iterator[ObservedStep]:
    """Watch the operators of all that runs inside; `models` name the modules and tell training from evaluation."""
    step = ObservedStep(models)
    step.start()
    try:
        yield step
    finally:
        step.stop()


def _in_dtypes_of(seen: FlopCount, twin: FlopCount) -> FlopCount:
    """The twin's work in the dtypes that ran: autocast inside the model casts nothing that has no values.

    Where the twin has other dtypes, nobody knows which work was done in which: all of it is taken in the same mixture.
    What ran grows as the twin's work does.
    """
    model = {dtype: twin.model_flop * share for dtype, share in _shares(seen.by_dtype).items()}
    own = twin.by_dtype
    if not model or all(abs(model.get(d, 0.0) - own.get(d, 0.0)) < SAME * twin.model_flop for d in model.keys() | own):
        model = dict(own)
    growth = {name: parts if model == own else _in_mixture(parts, model) for name, parts in twin.growth.items()}
    growth["hardware"] = _in_mixture(twin.growth.get("hardware", {}), seen.hardware_by_dtype, seen.hardware_flop)
    return replace(twin, by_dtype=model, growth=growth)


def _in_mixture(
    growth: Mapping[str, Mapping[str, float]], by_dtype: Mapping[str, float], total: float | None = None
) -> dict[str, dict[str, float]]:
    """All of the work, whatever its dtype was, in these; as much as it was, or as the total says."""
    fields: dict[str, float] = {}
    for parts in growth.values():
        fields = plus(fields, parts)
    factor = total / sum(fields.values()) if total is not None and any(fields.values()) else 1.0
    shares = _shares(by_dtype)
    return {dtype: {name: share * factor * flop for name, flop in fields.items()} for dtype, share in shares.items()}


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {name: flop / total for name, flop in parts.items()} if total else {}
