"""What does the device run in a step that was not counted? Padding as well, and masked pairs unless they are skipped.

A counted step's hardware FLOPs are taken apart: what grows with rows is known from its model FLOPs and its padding; the
rest is attention, and tells how it was run. Over all pairs, masked or not (attention written out, or fused with a mask
tensor), or over those alone that causality allows (fused, told to be causal).

Assumed: fused attention is given a mask tensor where a batch has padding or packed documents, and is told to be causal
where it has none, as transformers does. Left out: the rounding of skipped regions to whole blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flopmeter.flops.estimate import EstimatePlan
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.workload import Workload

PAIR_KINDS = ("pair", "patch_pair")
LEAST, REPEATED, MOST = 0.9, 1.05, 1.3
"""Attention that was run, over what the closed form says: in between it is understood. A fused backward pass does one
product in seven a second time."""

Growth = Mapping[str, Mapping[str, float]]
_Way = Callable[[EstimatePlan, Workload], Growth]


def by_kind(growth: Growth) -> dict[str, float]:
    """FLOPs by kind of work; kinds that there is none of are not in it."""
    found: dict[str, float] = defaultdict(float)
    for parts in growth.values():
        for driver, flop in parts.items():
            if flop:
                found[kind_of(driver)] += flop
    return dict(found)


def kind_of(driver: str) -> str:
    """Text pairs are one kind: the closed form knows which of them a mask lets through."""
    return "pair" if driver in ("causal_pair", "full_pair", "other_pair") else driver


@dataclass(frozen=True, slots=True)
class Executed:
    """The hardware FLOPs of a counted step, by what they grow with."""

    growth: Growth
    """By dtype and kind; "" for what grows as everything does."""
    fixed: Mapping[str, float]
    """By dtype: what does not grow with the batch, as the matrix work of an optimizer."""
    planned: Mapping[str, float]
    """What the closed form says of the same step, by kind."""
    way: _Way
    """How attention is run, as the closed form has it."""

    @classmethod
    def of(cls, count: FlopCount, plan: EstimatePlan, workload: Workload, model: Mapping[str, float]) -> Executed:
        """Take a counted step apart.

        Args:
            model: Model FLOPs of the same step by kind, as the closed form has them.
        """
        planned = by_kind(_over_all_pairs(plan, workload))
        seen = by_kind(count.growth)
        if seen.keys() == model.keys():
            rows = sum(flop * planned[kind] / model[kind] for kind, flop in seen.items() if kind not in PAIR_KINDS)
            attention = sum(count.hardware_by_dtype.values()) - rows - count.optimizer_flop
            way = _way_of(attention, plan, workload)
            if way is not None:
                return cls._split(count, attention, model, by_kind(way(plan, workload)), way)
        total = sum(count.hardware_by_dtype.values())
        moving = 1 - count.optimizer_flop / total if total else 1.0
        growth = {dtype: {"": flop * moving} for dtype, flop in count.hardware_by_dtype.items()}
        fixed = {dtype: flop * (1 - moving) for dtype, flop in count.hardware_by_dtype.items()}
        return cls(growth, fixed, planned, _over_all_pairs)

    @classmethod
    def _split(
        cls, count: FlopCount, attention: float, model: Mapping[str, float], planned: Mapping[str, float], way: _Way
    ) -> Executed:
        seen = by_kind(count.growth)
        times = {kind: planned.get(kind, 0.0) / flop for kind, flop in model.items()}
        pairs = {kind: times[kind] for kind in PAIR_KINDS if kind in seen}
        repeated = attention / sum(seen[kind] * factor for kind, factor in pairs.items())
        times |= {kind: factor * repeated for kind, factor in pairs.items()}
        growth: dict[str, dict[str, float]] = {dtype: defaultdict(float) for dtype in count.hardware_by_dtype}
        for dtype, parts in count.growth.items():
            for driver, flop in parts.items():
                kind = kind_of(driver)
                if flop:
                    growth.setdefault(dtype, defaultdict(float))[kind] += flop * times[kind]
        run = count.hardware_by_dtype
        return cls(growth, {dtype: run.get(dtype, 0.0) - sum(growth[dtype].values()) for dtype in growth}, planned, way)

    def at(self, plan: EstimatePlan, workload: Workload) -> dict[str, float]:
        """What the device runs in a step with this workload, by dtype."""
        planned = self.way(plan, workload)
        after = by_kind(planned)
        before = sum(self.planned.values())
        scales = {kind: after.get(kind, 0.0) / flop for kind, flop in self.planned.items()}
        scales[""] = sum(after.get(kind, 0.0) for kind in self.planned) / before if before else 1.0
        run = {
            dtype: self.fixed[dtype] + sum(flop * scales[kind] for kind, flop in parts.items())
            for dtype, parts in self.growth.items()
        }
        for dtype, parts in planned.items():
            own = dtype if len(self.growth) != 1 else next(iter(self.growth))
            for driver, flop in parts.items():
                if flop and kind_of(driver) not in self.planned:  # the counted step had no work of this kind
                    run[own] = run.get(own, 0.0) + flop
        return run


def _way_of(attention: float, plan: EstimatePlan, workload: Workload) -> _Way | None:
    """How so much attention is run; None where no way that we know leads to it."""
    for way in (_over_all_pairs, _as_if_causal, _over_needed_pairs):
        pairs = sum(flop for kind, flop in by_kind(way(plan, workload)).items() if kind in PAIR_KINDS)
        if pairs and LEAST <= attention / pairs <= MOST:
            is_fused = attention / pairs > REPEATED
            fits_both = is_fused and way is (_over_all_pairs if _has_gaps(workload) else _as_if_causal)
            return _over_what_the_mask_needs if fits_both else way
    return None


def _over_all_pairs(plan: EstimatePlan, workload: Workload) -> Growth:
    return plan.executed(workload)


def _as_if_causal(plan: EstimatePlan, workload: Workload) -> Growth:
    return plan.executed(without_gaps(workload), "exact")


def _over_needed_pairs(plan: EstimatePlan, workload: Workload) -> Growth:
    return plan.executed(workload, "exact")


def _over_what_the_mask_needs(plan: EstimatePlan, workload: Workload) -> Growth:
    return plan.executed(workload, "full" if _has_gaps(workload) else "exact")


def _has_gaps(workload: Workload) -> bool:
    """Whether a row holds padding, or several documents, or is longer than the window that a token sees."""
    is_cut = workload.window > 0 and workload.pairs_window < workload.pairs_causal
    return (
        is_cut
        or 2 * workload.pairs_causal != workload.pairs_processed + workload.tokens_processed
        or 2 * workload.decoder_pairs_causal != workload.decoder_pairs_processed + workload.decoder_tokens_processed
    )


def without_gaps(workload: Workload) -> Workload:
    """The same rows, each full of one text. Rows of n tokens have n^2 pairs and n(n + 1) / 2 causal ones."""
    return replace(
        workload,
        tokens=workload.tokens_processed,
        pairs_causal=(workload.pairs_processed + workload.tokens_processed) // 2,
        decoder_tokens=workload.decoder_tokens_processed,
        decoder_pairs_causal=(workload.decoder_pairs_processed + workload.decoder_tokens_processed) // 2,
        cross_pairs=workload.cross_pairs_processed,
        values=workload.values + workload.values_padding,
        values_squared=workload.values_squared + workload.values_squared_padding,
        values_padding=0,
        values_squared_padding=0,
    )
