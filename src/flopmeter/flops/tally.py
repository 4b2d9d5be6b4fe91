"""From the operators of a step to its FLOP count, under a convention, and to what each part of it grows with.

Every call names the field of the workload that its FLOPs grow with, three times: as exact FLOPs (tokens, pairs that the
mask lets through), as full ones (padding and all pairs), and as what the kernel ran. `prediction` scales them by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from flopmeter.flops.flop_count import Convention, FlopCount, new_growth
from flopmeter.flops.formulas import Work
from flopmeter.flops.workload import PROCESSED, Workload

if TYPE_CHECKING:
    from flopmeter.flops.frames import Batch, Frame, FrameTracker
    from flopmeter.flops.observation import Call

UNKNOWN_MASK = "Some attention masks had no values to look at: all their pairs are counted."
_ROWS = {"token": "tokens", "patch": "patches", "value": "values", "sample": "samples"}
_MAIN = ("tokens", "decoder_tokens", "values", "patches", "samples")
"""What rows of an unknown kind grow with: the first of these that the batch has."""


def tally(
    calls: Iterable[Call], frames: FrameTracker, uncounted: Mapping[str, int], convention: Convention
) -> FlopCount:
    """Add up the calls. Evaluation between training steps is left out."""
    reader = _Reader(frames)
    phases: dict[str, float] = defaultdict(float)
    by_op: dict[str, float] = defaultdict(float)
    by_module: dict[str, float] = defaultdict(float)
    growth = new_growth()
    forward_by_path: dict[str, float] = defaultdict(float)
    for call in calls:
        if call.phase == "evaluation":
            continue
        work = call.work if isinstance(call.work, Work) else call.work()
        flop, names = reader.read(call, work)
        own = flop[convention]
        phases[call.phase] += own
        growth["hardware"][call.dtype]["once" if call.phase == "optimizer" else names["hardware"]] += work.hardware
        if call.phase == "forward":
            forward_by_path[call.frame.path] += work.full
        if call.phase in ("forward", "backward"):
            by_op[call.op] += own
            by_module[call.frame.path] += own
            for name in ("exact", "full"):
                growth[name][call.dtype][names[name]] += flop[name]
    return FlopCount.of(
        phases,
        growth,
        convention,
        by_op=dict(by_op),
        by_module=dict(by_module),
        workload=reader.total,
        coverage=_coverage(forward_by_path, frames.needed),
        uncounted=dict(uncounted),
        left_out=(UNKNOWN_MASK,) if reader.met_unknown_mask else (),
    )


class _Reader:
    """Reads what the step left on the device, once per batch."""

    def __init__(self, frames: FrameTracker) -> None:
        self._real_shares: dict[int, float] = {}
        self._workloads = {id(batch.late): batch.workload() for batch in frames.batches}
        own = [batch for batch in frames.batches if not batch.is_evaluation] or frames.batches
        parts = [self._workloads[id(batch.late)] for batch in own]
        self.total = reduce(add, parts) if parts else Workload()
        self.met_unknown_mask = False

    def read(self, call: Call, work: Work) -> tuple[dict[str, float], dict[str, str]]:
        """What a call counts, exact and in full, and what that and the kernel's work grow with."""
        pairs = call.pairs
        if call.is_attention or (pairs is not None and pairs.is_attention):
            full, share = work.full * (pairs.needed if pairs is not None else 1.0), self._share(call, work)
            return {"exact": full * share, "full": full}, self._pair_fields(call, work, share)
        batch = _own_text(call)
        workload = self._workload(batch)
        name = _ROWS[call.frame.driver]
        if name == "tokens" and batch.memory is not None:
            name = "decoder_tokens"
        elif (name == "patches" and not workload.patches) or (batch.storage and not workload.tokens):
            name = "values"  # images that are cut inside, or what a decoder hears
        name = self._known(name, workload)
        processed = PROCESSED.get(name, name)
        share = self._real_share(batch) if call.frame.driver == "token" else 1.0
        fields = {"exact": name, "full": processed, "hardware": processed}
        return {"exact": work.exact * share, "full": work.full}, fields

    def _workload(self, batch: Batch) -> Workload:
        return self._workloads.get(id(batch.late), self.total) if batch.late is not None else self.total

    def _known(self, name: str, workload: Workload) -> str:
        """The field, or another where the batch has nothing of it."""
        if getattr(workload, name):
            return name
        return next((other for other in _MAIN if getattr(workload, other)), "once")

    def _share(self, call: Call, work: Work) -> float:
        if call.pairs is None or not call.pairs.is_attention:
            return work.exact / work.full if work.full else 1.0
        if call.pairs.share is None:
            self.met_unknown_mask = True
            return 1.0
        return float(call.pairs.share)

    def _real_share(self, batch: Batch) -> float:
        is_real, key = batch.token_is_real, id(batch)
        if is_real is None or not is_real.numel():
            return 1.0
        if key not in self._real_shares:
            self._real_shares[key] = int(is_real.sum()) / is_real.numel()
        return self._real_shares[key]

    def _pair_fields(self, call: Call, work: Work, share: float) -> dict[str, str]:
        """Which pairs these are, judged by how many there are."""
        batch, workload = call.frame.batch, self._workload(call.frame.batch)
        groups, queries, keys = _sizes(call)
        if call.frame.driver == "token" and batch.length:
            if not groups and call.is_attention:  # sequences end to end: each is by itself, in every count
                is_cut = workload.pairs_window > 0 and call.frame.slides is not False
                exact = "pairs_full" if work.exact == work.full else "pairs_window" if is_cut else "pairs_causal"
                exact = exact if getattr(workload, exact) else "tokens"
                return {"exact": exact, "full": "pairs_full" if workload.pairs_full else "tokens", "hardware": exact}
            exact = self._text_pairs(call, workload, share * (groups or batch.samples) * queries * keys)
            processed = f"{exact.partition('pairs')[0]}pairs_processed" if "pairs" in exact else PROCESSED[exact]
            hardware = processed
            if call.is_attention and exact.endswith(("pairs_causal", "pairs_window")):
                skips = exact == "pairs_window" and work.exact < work.full
                hardware = exact if skips else f"{exact.partition('pairs')[0]}pairs_run"
            return {"exact": exact, "full": processed, "hardware": hardware}
        if call.frame.driver == "patch" and workload.patches:
            is_cut = bool(call.frame.slides) and workload.patch_pairs_window > 0
            return dict.fromkeys(("exact", "full", "hardware"), "patch_pairs_window" if is_cut else "patch_pairs")
        is_whole = call.frame.driver == "patch" or (call.frame.driver == "value" and groups in (0, batch.samples))
        exact = self._known("values_squared" if is_whole else _ROWS[call.frame.driver], workload)
        processed = PROCESSED.get(exact, exact)
        return {"exact": exact, "full": processed, "hardware": processed}

    def _text_pairs(self, call: Call, workload: Workload, number: float) -> str:
        batch, prefix = call.frame.batch, ""
        _, queries, keys = _sizes(call)
        names = ["pairs_causal", "pairs_full"]
        if batch.memory is not None and workload.decoder_tokens:
            prefix, names = "decoder_", ["decoder_pairs_causal", "decoder_pairs_full"]
            if keys == batch.memory.length:
                names = ["cross_pairs"] if keys != batch.length else [*names, "cross_pairs"]
        elif workload.window and call.frame.slides is not False:
            names = ["pairs_window", "pairs_window_full", *names]
        names = [name for name in names if getattr(workload, name)]
        is_text = queries in (batch.length, batch.samples * (batch.length or 1))
        if not names or not is_text:  # chunks of it, or rows of another kind
            return self._known(f"{prefix}tokens", workload) if workload.tokens or workload.decoder_tokens else "samples"
        return min(names, key=lambda name: abs(number / getattr(workload, name) - 1))


def _own_text(call: Call) -> Batch:
    """The text whose rows a product has: within attention to a memory, some have the memory's."""
    batch, memory = call.frame.batch, call.frame.batch.memory
    if memory is None or not memory.length or not batch.length:
        return batch
    is_memorys = memory.samples * memory.length in call.sizes and batch.samples * batch.length not in call.sizes
    return memory if is_memorys else batch


def _sizes(call: Call) -> tuple[int, int, int]:
    """Samples, queries and keys."""
    if call.is_attention or call.pairs is None:
        groups, queries, keys = call.sizes
        return groups, queries, keys
    return call.pairs.num_groups, call.pairs.num_queries, call.pairs.num_keys


def _coverage(forward_by_path: Mapping[str, float], needed: Iterable[Frame]) -> float:
    """Counted forward work over what the modules' own weights say was needed."""
    wanted: dict[str, float] = defaultdict(float)
    for frame in needed:
        if not frame.batch.is_evaluation:
            wanted[frame.path] += frame.needed_flop
    missing = sum(max(0.0, flop - _counted_below(path, forward_by_path)) for path, flop in wanted.items())
    counted = sum(forward_by_path.values())
    return counted / (counted + missing) if counted + missing else 1.0


def _counted_below(path: str, forward_by_path: Mapping[str, float]) -> float:
    own = forward_by_path.get(path, 0.0)
    if own:
        return own
    return sum(flop for other, flop in forward_by_path.items() if other.startswith(f"{path}."))
