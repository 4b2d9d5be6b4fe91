"""The result of counting: how many FLOPs, of which kind, where, and how sure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from flopmeter.errors import CountError

if TYPE_CHECKING:
    from flopmeter.flops.workload import Needs, Workload

Convention = Literal["exact", "full"]
"""exact: attended pairs and tokens that are not padding. full: all pairs and all tokens (PaLM's way)."""


Growth = Mapping[str, Mapping[str, Mapping[str, float]]]


def new_growth() -> dict[str, dict[str, dict[str, float]]]:
    """As `FlopCount.growth`, to be added to."""
    names = ("exact", "full", "hardware", "forward", "recompute")
    return {name: defaultdict(lambda: defaultdict(float)) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopCount:
    """FLOPs of one training step (or of one forward pass); a multiply-add is two."""

    forward_flop: float
    """The forward pass."""
    backward_flop: float = 0
    """Gradients, frozen parts left out as they were when it ran."""
    recompute_flop: float = 0
    """Forward work done again during the backward pass (activation checkpointing)."""
    optimizer_flop: float = 0
    """Matrix work inside the optimizer (Muon, Shampoo); element-wise updates are not FLOPs here."""
    hardware_flop: float = 0
    """All that ran: recomputation, what fused attention recomputes inside its backward, and other roles included."""
    by_role: Mapping[str, float] = field(default_factory=dict)
    """Hardware FLOPs of passes without gradients, by role: no model work, and in neither `by_dtype` nor `growth`."""
    by_dtype: Mapping[str, float] = field(default_factory=dict)
    """Model FLOPs by the dtype of the operation (not of the weights)."""
    hardware_by_dtype: Mapping[str, float] = field(default_factory=dict)
    """Hardware FLOPs by the dtype of the operation."""
    by_op: Mapping[str, float] = field(default_factory=dict)
    """Model FLOPs by operator."""
    by_module: Mapping[str, float] = field(default_factory=dict)
    """Model FLOPs by the path of the innermost module that ran them; "" is the root or no module."""
    growth: Growth = field(default_factory=dict)
    """What FLOPs grow with: of "exact", "full" and "hardware", and, under the convention, of "forward" and "recompute",
    each by dtype, and there by field of `Workload`."""
    workload: Workload | None = None
    """What it was counted for, where that is known."""
    needs: Needs | None = None
    """How a batch of the model is read, where that is known."""
    coverage: float | None = 1.0
    """Counted work over the work that is known to have happened; None when nothing tells."""
    uncounted: Mapping[str, int] = field(default_factory=dict)
    """Operators that do matrix work and have no formula, with their number of calls."""
    method: str = "observed"
    """How it was obtained: observed, meta, fake, real, estimate, profiler, with what fell back."""
    convention: Convention = "exact"
    """What counts as a model FLOP."""
    left_out: tuple[str, ...] = ()
    """What the numbers do not hold, one sentence each."""

    @classmethod
    def of(cls, phases: Mapping[str, float], growth: Growth, convention: Convention, **others: Any) -> FlopCount:
        """From FLOPs by phase under the convention, and what they grow with."""
        own = {name: {dtype: dict(parts) for dtype, parts in by.items()} for name, by in growth.items()}
        totals = {name: {dtype: sum(parts.values()) for dtype, parts in by.items()} for name, by in own.items()}
        return cls(
            forward_flop=phases.get("forward", 0.0),
            backward_flop=phases.get("backward", 0.0),
            recompute_flop=phases.get("recompute", 0.0),
            optimizer_flop=phases.get("optimizer", 0.0),
            hardware_flop=sum(totals["hardware"].values()) + sum(others.get("by_role", {}).values()),
            by_dtype=totals[convention],
            hardware_by_dtype=totals["hardware"],
            growth=own,
            convention=convention,
            **others,
        )

    @property
    def model_flop(self) -> float:
        """What the mathematics needs: forward and backward, no recomputation. The numerator of MFU."""
        return self.forward_flop + self.backward_flop

    @property
    def formula(self) -> str | None:
        """The model's FLOPs in what they grow with: '28311552*tokens + 3072*pairs_causal'; None where nobody knows."""
        amounts: dict[str, float] = defaultdict(float)
        for parts in self.growth.get(self.convention, {}).values():
            for name, flop in parts.items():
                amounts[name] += flop / getattr(self.workload, name, 0) if getattr(self.workload, name, 0) else 0
        return " + ".join(f"{flop:.10g}*{name}" for name, flop in amounts.items()) or None

    def at(
        self,
        batch: Workload | Mapping[str, Any] | tuple[Any, ...] | None = None,
        *,
        lengths: Sequence[int] | None = None,
    ) -> FlopCount:
        """The same model's count for another batch: each part grows with what it was counted to grow with.

        Takes tens of microseconds: for micro-batches that are to take equally long, say.

        Args:
            batch: What the model would be called with, (batch size, length), or a workload.
            lengths: In its place: of texts, each for itself, padded or packed into one row.

        Raises:
            CountError: What parts grow with is not known, as of a profiler's count, or the batch has another kind of
                input, of which this count says nothing.
        """
        from flopmeter.flops.workload import Workload, workload_of

        if (batch is None) is (lengths is None):
            raise TypeError("either a batch or the lengths of its texts")
        before, needs = self.workload, self.needs
        if before is None or needs is None or "forward" not in self.growth:
            raise CountError("this count does not say what its parts grow with")
        if lengths is not None:
            after = Workload.of_lengths(lengths, needs=needs)
        elif isinstance(batch, Workload):
            after = batch
        elif isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(size, int) for size in batch):
            after = Workload.of_lengths([batch[1]] * batch[0], needs=needs)
        else:
            after = workload_of(batch, needs)
        for kind in ("tokens", "decoder_tokens", "values", "patches"):
            if getattr(after, kind) and not getattr(before, kind):
                raise CountError(f"the batch has {kind}, the one that was counted had none")
        growth = {
            name: {
                dtype: {own: flop * getattr(after, own) / getattr(before, own) for own, flop in parts.items()}
                for dtype, parts in by.items()
            }
            for name, by in self.growth.items()
        }
        sums = {name: sum(sum(parts.values()) for parts in by.values()) for name, by in growth.items()}
        # Phases are not in one proportion: frozen weights have half a backward pass, attention all of it.
        phases = {name: sums[name] for name in ("forward", "recompute")}
        phases |= {"backward": sums[self.convention] - sums["forward"], "optimizer": self.optimizer_flop}
        told = {name: getattr(self, name) for name in ("coverage", "uncounted", "left_out", "needs")}
        method = f"{self.method}, for another batch"
        return FlopCount.of(phases, growth, self.convention, workload=after, method=method, **told)

    def __add__(self, other: FlopCount) -> FlopCount:
        """Both taken together; what is no number is the first one's, and the lesser coverage stands for both."""
        sums = {name: plus(getattr(self, name), getattr(other, name)) for name in (*_NUMBERS, "uncounted")}
        known = [count.coverage for count in (self, other) if count.coverage is not None]
        left_out = tuple(dict.fromkeys((*self.left_out, *other.left_out)))
        both = self.workload + other.workload if self.workload is not None and other.workload is not None else None
        coverage = min(known) if len(known) == 2 else None
        return replace(self, **sums, workload=both, coverage=coverage, left_out=left_out)


_NUMBERS = (
    *("forward_flop", "backward_flop", "recompute_flop", "optimizer_flop", "hardware_flop"),
    *("by_dtype", "hardware_by_dtype", "by_op", "by_module", "by_role", "growth"),
)


def plus(one: Any, other: Any) -> Any:
    """The sum of two numbers, or of two mappings name by name."""
    if not isinstance(one, Mapping):
        return one + other
    return {**one, **{name: plus(one[name], part) if name in one else part for name, part in other.items()}}
