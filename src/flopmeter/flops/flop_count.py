"""The result of counting: how many FLOPs, of which kind, where, and how sure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Convention = Literal["exact", "full"]
"""exact: attended pairs and tokens that are not padding. full: all pairs and all tokens (PaLM's way)."""


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
    """All that ran: recomputation, and what fused attention recomputes inside its backward, included."""
    by_dtype: Mapping[str, float] = field(default_factory=dict)
    """Model FLOPs by the dtype of the operation (not of the weights)."""
    hardware_by_dtype: Mapping[str, float] = field(default_factory=dict)
    """Hardware FLOPs by the dtype of the operation."""
    by_op: Mapping[str, float] = field(default_factory=dict)
    """Model FLOPs by operator."""
    by_module: Mapping[str, float] = field(default_factory=dict)
    """Model FLOPs by the path of the innermost module that ran them; "" is the root or no module."""
    growth: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Model FLOPs by dtype, and there by what they grow with: tokens, pairs, patches, samples."""
    coverage: float | None = 1.0
    """Counted work over the work that is known to have happened; None when nothing tells."""
    uncounted: Mapping[str, int] = field(default_factory=dict)
    """Operators that do matrix work and have no formula, with their number of calls."""
    formula: str | None = None
    """The model's FLOPs as an expression in batch size B and length S, where it is known."""
    method: str = "observed"
    """How it was obtained: observed, meta, fake, real, estimate, profiler, with what fell back."""
    convention: Convention = "exact"
    """What counts as a model FLOP."""
    left_out: tuple[str, ...] = ()
    """What the numbers do not hold, one sentence each."""

    @property
    def model_flop(self) -> float:
        """What the mathematics needs: forward and backward, no recomputation. The numerator of MFU."""
        return self.forward_flop + self.backward_flop
