"""How often does a part of the model run? Rows and query-key pairs as functions of the workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flopmeter.flops.flop_count import Convention
from flopmeter.flops.frames import Driver
from flopmeter.flops.workload import PatchWindow, Workload, pairs

Source = Literal["tokens", "decoder", "samples", "dense", "patches", "anything"]
"""tokens, decoder: text. samples: pooled. dense: images, recordings, vectors. patches: images cut up beforehand.
anything: tokens where there are any, else samples."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the matrix that reaches a layer."""

    source: Source
    """What of the workload they are made of."""
    per: float = 1
    """How much of the source makes one row: values of a patch, patches that are merged."""
    extra: int = 0
    """Rows that each image has on top: class and register tokens."""

    @property
    def is_text(self) -> bool:
        """Whether a row is a token."""
        return self.source in ("tokens", "decoder")

    @property
    def driver(self) -> Driver:
        """What of a batch they grow with."""
        return "token" if self.is_text else "patch" if self.source == "patches" else "sample"

    def of(self, work: Workload, convention: Convention) -> float:
        """Rows of this workload; `exact` leaves padding out."""
        is_exact = convention == "exact"
        if self.source == "tokens" or (self.source == "anything" and work.tokens):
            return work.tokens if is_exact else work.tokens_processed
        if self.source == "decoder":
            return work.decoder_tokens if is_exact else work.decoder_tokens_processed
        if self.source == "dense":
            values = work.values if is_exact else work.values + work.values_padding
            return values / self.per + self.extra * work.images
        return (work.patches if self.source == "patches" else work.samples) / self.per


@dataclass(frozen=True, slots=True)
class Pairs:
    """Query-key pairs of self-attention."""

    rows: Rows
    """What attends."""
    causal: bool = False
    """Whether a row sees only what came before it, and itself."""
    window: int = 0
    """Keys that a row sees to one side, itself included; 0 for all."""
    patch_window: PatchWindow | None = None
    """Windows of image patches."""

    @property
    def driver(self) -> Driver:
        """What of a batch they grow with."""
        if not self.rows.is_text:
            return "patch_pair" if self.rows.source == "patches" else "sample"
        return "other_pair" if self.window else "causal_pair" if self.causal else "full_pair"

    def of(self, work: Workload, convention: Convention) -> float:
        """Pairs of this workload; `full` takes all pairs of a row of text."""
        if self.rows.source == "tokens":
            return work.pairs_processed if convention == "full" else self._visible(work)
        if self.rows.source == "decoder":
            return work.decoder_pairs_processed if convention == "full" else work.decoder_pairs_causal
        if self.rows.source == "patches":
            return self._patch_pairs(work)
        return self._dense_pairs(work, convention)

    def _visible(self, work: Workload) -> float:
        seen: float = work.pairs_causal
        if self.window:
            seen = work.pairs_window if work.window == self.window else _as_if_equally_long(work, self.window)
        return seen if self.causal else 2 * seen - work.tokens

    def _patch_pairs(self, work: Workload) -> float:
        if self.patch_window is None:
            return work.patch_pairs / self.rows.per**2
        if self.patch_window == work.patch_window:
            return work.patch_pairs_window
        return work.patches * (self.patch_window.merge * self.patch_window.cells) ** 2  # no window is cut

    def _dense_pairs(self, work: Workload, convention: Convention) -> float:
        # (n + extra)^2, summed over the images by its three parts
        per, extra = self.rows.per, self.rows.extra
        squares = work.values_squared if convention == "exact" else work.values_squared + work.values_squared_padding
        squared = squares / per**2 + (2 * self.rows.of(work, convention) - extra * work.images) * extra
        if self.window:
            return min(squared, self.rows.of(work, convention) * self.window)
        return (squared + self.rows.of(work, convention)) / 2 if self.causal and convention == "exact" else squared


@dataclass(frozen=True, slots=True)
class CrossPairs:
    """Pairs of a decoder's query and an encoder's key."""

    queries: Rows
    """The decoder's rows."""
    keys: Rows
    """The encoder's rows."""
    driver: ClassVar[Driver] = "other_pair"
    """What of a batch they grow with: neither causal nor full pairs of one text."""

    def of(self, work: Workload, convention: Convention) -> float:
        """Pairs of this workload. Recordings and images of a batch are equally long."""
        if self.keys.is_text:
            return work.cross_pairs if convention == "exact" else work.cross_pairs_processed
        return self.queries.of(work, convention) * self.keys.of(work, convention) / max(work.images, 1)


Amount = Rows | Pairs | CrossPairs


def _as_if_equally_long(work: Workload, window: int) -> float:
    """Window pairs that nobody counted: exact where all sequences have one length, and told from its two sums."""
    if not work.tokens:
        return 0
    length = max(round(2 * work.pairs_causal / work.tokens - 1), 1)
    return work.tokens / length * pairs(length, causal=True, window=window)
