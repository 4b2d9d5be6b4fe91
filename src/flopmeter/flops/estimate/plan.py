"""A model's FLOPs as coefficients: read once from the module tree, evaluated for every step in microseconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from flopmeter.flops.estimate.amounts import Amount, CrossPairs, Pairs, Rows
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.workload import Needs, Workload

HARDWARE_NOTE = (
    "hardware_flop takes every token and every pair that was handed in: "
    "kernels that skip padding or masked blocks run less"
)


class Term(NamedTuple):
    """One matrix product of the model."""

    path: str
    """The module that it belongs to."""
    dtype: str
    """Of the weights."""
    amount: Amount
    """Rows or pairs that it is done for."""
    flop: float
    """Forward FLOPs for one of them."""
    num_grads: int
    """Products of the same size that the backward pass owes: for the input, for the weight."""
    num_reruns: int = 0
    """Times that activation checkpointing does it again."""


class _Line(NamedTuple):
    """All terms of one amount and dtype."""

    amount: Amount
    dtype: str
    forward: float
    backward: float
    rerun: float


@dataclass(frozen=True, kw_only=True)
class EstimatePlan:
    """Coefficients of one model as it stands: after freezing or unfreezing a parameter there is another."""

    terms: tuple[Term, ...]
    """Every product, in the order of the module tree."""
    left_out: tuple[str, ...] = ()
    """What the terms do not hold, one sentence each."""
    needs: Needs = field(default_factory=Needs)
    """What `workload_of` and `late_workload` should count for this model."""
    method: str = "estimate"
    """Says so when it is no more than a rule of thumb."""
    _lines: tuple[_Line, ...] = field(init=False, repr=False, compare=False)
    _reads_text_only: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sums: dict[tuple[Amount, str], list[float]] = defaultdict(lambda: [0, 0, 0])
        for term in self.terms:
            line = sums[term.amount, term.dtype]
            for i, times in enumerate((1, term.num_grads, term.num_reruns)):
                line[i] += term.flop * times
        sources = {term.amount.source for term in self.terms if isinstance(term.amount, Rows)}
        object.__setattr__(self, "_reads_text_only", sources <= {"tokens", "samples"})
        object.__setattr__(self, "_lines", tuple(_Line(*key, *line) for key, line in sums.items()))

    def evaluate(
        self,
        workload: Workload,
        training: bool = True,
        convention: Convention = "exact",
        dtype: str | None = None,
    ) -> FlopCount:
        """FLOPs of a step with this workload.

        Args:
            dtype: What autocast turns every product into; None where the weights' own dtype rules.
        """
        workload = self._with_rows(workload)
        forward = backward = rerun = 0.0
        growth: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        hardware: dict[str, float] = defaultdict(float)
        for line in self._lines:
            amount, processed = line.amount.of(workload, convention), line.amount.of(workload, "full")
            back = line.backward if training else 0.0
            again = line.rerun if training else 0.0
            forward += line.forward * amount
            backward += back * amount
            rerun += again * amount
            growth[dtype or line.dtype][line.amount.driver] += (line.forward + back) * amount
            hardware[dtype or line.dtype] += (line.forward + back + again) * processed
        return FlopCount(
            forward_flop=forward,
            backward_flop=backward,
            recompute_flop=rerun,
            hardware_flop=sum(hardware.values()),
            by_dtype={name: sum(parts.values()) for name, parts in growth.items()},
            hardware_by_dtype=dict(hardware),
            growth={name: dict(parts) for name, parts in growth.items()},
            coverage=None,
            method=self.method,
            convention=convention,
            left_out=(*self.left_out, HARDWARE_NOTE),
        )

    def executed(self, workload: Workload, pairs_as: Convention = "full") -> dict[str, dict[str, float]]:
        """What a device runs of it, by dtype and by what that grows with: every row, padding too, and reruns.

        Args:
            pairs_as: `exact` where attention skips what its mask forbids.
        """
        growth: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for line in self._lines:
            amount = line.amount.of(workload, "full" if isinstance(line.amount, Rows) else pairs_as)
            growth[line.dtype][line.amount.driver] += (line.forward + line.backward + line.rerun) * amount
        return growth

    def by_module(
        self, workload: Workload, training: bool = True, convention: Convention = "exact"
    ) -> Mapping[str, float]:
        """Model FLOPs by module path: slower than `evaluate`, for tables."""
        workload = self._with_rows(workload)
        amounts = {line.amount: line.amount.of(workload, convention) for line in self._lines}
        flop: dict[str, float] = defaultdict(float)
        for term in self.terms:
            flop[term.path] += term.flop * (1 + term.num_grads * training) * amounts[term.amount]
        return dict(flop)

    def _with_rows(self, workload: Workload) -> Workload:
        """A model that looks something up (labels, times) and was given vectors has one row for each sample."""
        if not self._reads_text_only or workload.tokens_processed:
            return workload
        return replace(workload, tokens=workload.samples, tokens_processed=workload.samples)


def needs_of(terms: tuple[Term, ...]) -> Needs:
    """What the terms ask of a batch. Of several sliding windows only the commonest is counted exactly."""
    pairs = [term.amount for term in terms if isinstance(term.amount, Pairs)]
    windows = [p.window for p in pairs if p.window and p.rows.is_text]
    rows = {term.amount for term in terms if isinstance(term.amount, Rows)}
    return Needs(
        window=max(windows, key=windows.count, default=0),
        patch_window=next((p.patch_window for p in pairs if p.patch_window), None),
        has_decoder=any(r.source == "decoder" for r in rows)
        or any(isinstance(term.amount, CrossPairs) for term in terms),
    )
