"""From the operators of a step to its FLOP count, under a convention, and to what each part of it grows with.

Every call names the field of the workload that its FLOPs grow with, three times: as exact FLOPs (tokens, pairs that the
mask lets through), as full ones (padding and all pairs), and as what the kernel ran. `prediction` scales them by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Literal, NamedTuple

from flopmeter.flops.flop_count import Convention, FlopCount, new_growth
from flopmeter.flops.formulas import Work
from flopmeter.flops.frames import Batch, Frame, FrameTracker
from flopmeter.flops.pairs import Pairs
from flopmeter.flops.token_rows import Text
from flopmeter.flops.workload import PROCESSED, Workload

WorkPhase = Literal["forward", "backward", "recompute", "optimizer", "side"]


class Call(NamedTuple):
    """One operator that did matrix work."""

    phase: WorkPhase
    frame: Frame
    op: str
    dtype: str
    is_attention: bool
    """A fused attention operator; attention made of plain products is told by `pairs`."""
    work: Work | Callable[[], Work]
    """A function where integers have to be read from the device first."""
    pairs: Pairs | None
    """Which share of the pairs counts, where a mask decides."""
    text: Text | None
    """The text whose tokens are proven to be among its rows."""
    num_rows: int = 0
    """Rows of another product: what it works on one by one."""
    sizes: tuple[int, int, int] = (0, 0, 0)
    """Samples, queries and keys of a fused attention operator; no samples where sequences lie end to end."""
    role: str = ""
    """Whose pass without gradients this is; only in the phase "side"."""
    is_asked: bool = True
    """Whether torch's checkpointing has asked for a recomputation."""
    function: int = -1
    """The autograd node of the program's own function, or of a checkpoint, in whose forward pass this ran with
    gradients off. If the node runs backward, it is training."""


UNKNOWN_MASK = "Some attention masks had no values: all their pairs are counted ({:.1%} of the model's FLOPs)."
DENSE = "No softmax or mask was found where tokens meet tokens: all pairs are counted ({:.1%} of the model's FLOPs)."
LOOSE = (
    "Rows were made of a padded text and more, or of its places: padding among them is a guess ({:.1%} of the FLOPs)."
)
UNASKED = "Forward work was done again in the backward pass, not by torch's checkpointing ({:.1%} of all FLOPs)."
MISSING = "No product was seen in {} ({} modules with a weight matrix): these are counted by their shapes."
BY_SHAPES = "by shapes"
WORTH_SAYING = 5e-4
MAX_NAMED = 5
_MAIN = ("tokens", "decoder_tokens", "values", "patches", "samples")
"""What rows of an unknown kind grow with: the first of these that the batch has."""


def tally(
    calls: Sequence[Call],
    frames: FrameTracker,
    uncounted: Mapping[str, int],
    convention: Convention,
    uncounted_flop: float = 0.0,
) -> FlopCount:
    """Add up the calls. Passes without gradients are no training: they are listed apart, by role.

    A module with a weight matrix in which no product was seen is counted by what that needs, and lowers the coverage.
    """
    missing = _unseen(calls, frames.needed)
    reader = _Reader(frames)
    phases, by_op, by_module, by_role, forward_by_path = (defaultdict[str, float](float) for _ in range(5))
    growth = new_growth()
    dense = unasked = loose = 0.0
    for call in (*calls, *_by_shapes(calls, missing)):
        work = call.work if isinstance(call.work, Work) else call.work()
        if call.phase == "side":
            by_role[call.role] += work.hardware
            continue
        flop, names = reader.read(call, work)
        own = flop[convention]
        phases[call.phase] += own
        growth["hardware"][call.dtype]["once" if call.phase == "optimizer" else names["hardware"]] += work.hardware
        if call.phase in ("forward", "recompute"):
            growth[call.phase][call.dtype][names[convention]] += own
        if call.phase == "recompute" and not call.is_asked:
            unasked += work.hardware
        if call.phase == "forward" and reader.is_guess(call):
            loose += own
        if call.phase == "forward" and call.op != BY_SHAPES:
            forward_by_path[call.frame.path] += work.full
        if call.phase in ("forward", "backward"):
            by_op[call.op] += own
            by_module[call.frame.path] += own
            dense += own if call.pairs is not None and call.pairs.is_dense and not call.pairs.is_attention else 0
            for name in ("exact", "full"):
                growth[name][call.dtype][names[name]] += flop[name]
    modules = list(dict.fromkeys(frame.path or "the model" for frame in missing))
    count = FlopCount.of(
        phases,
        growth,
        convention,
        by_op=dict(by_op),
        by_module=dict(by_module),
        by_role=dict(by_role),
        workload=reader.total,
        needs=frames.needs,
        coverage=_coverage(forward_by_path, frames.needed, uncounted_flop),
        method=f"observed, {len(modules)} modules by the shapes of their weights" if modules else "observed",
        uncounted=dict(uncounted),
    )
    model, run = count.model_flop or 1, count.hardware_flop or 1
    said = {
        UNKNOWN_MASK: reader.unknown_mask / model,
        DENSE: dense / model if convention == "exact" else 0,
        LOOSE: loose / (count.forward_flop or 1) if convention == "exact" else 0,
        UNASKED: unasked / run,
    }
    left_out = [sentence.format(share) for sentence, share in said.items() if share >= WORTH_SAYING]
    left_out += [MISSING.format(", ".join(modules[:MAX_NAMED]), len(modules))] if modules else []
    return replace(count, left_out=tuple(left_out))


class _Reader:
    """Reads what the step left on the device, once per batch."""

    def __init__(self, frames: FrameTracker) -> None:
        self._workloads = {id(batch.late): batch.workload() for batch in frames.batches}
        own = [batch for batch in frames.batches if not batch.is_evaluation] or frames.batches
        parts = [self._workloads[id(batch.late)] for batch in own]
        self.total = reduce(add, parts) if parts else Workload()
        self.unknown_mask = 0.0

    def read(self, call: Call, work: Work) -> tuple[dict[str, float], dict[str, str]]:
        """What a call counts, exact and in full, and what that and the kernel's work grow with."""
        pairs = call.pairs
        if call.is_attention or (pairs is not None and pairs.is_attention):
            full, share = work.full * (pairs.needed if pairs is not None else 1.0), self._share(call, work)
            return {"exact": full * share, "full": full}, self._pair_fields(call, work, share)
        workload = self._workload(call.frame.batch)
        if call.text is not None:
            name = self._known("samples" if call.text.is_pooled else f"{call.text.prefix}tokens", workload)
            fields = {"exact": name, "full": PROCESSED.get(name, name), "hardware": PROCESSED.get(name, name)}
            return {"exact": work.exact * call.text.real_share(), "full": work.full}, fields
        name = self._other_rows(call, workload)
        return {"exact": work.exact, "full": work.full}, dict.fromkeys(("exact", "full", "hardware"), name)

    def is_guess(self, call: Call) -> bool:
        """Whether padding may be among the rows, and nobody knows how much."""
        text, length = call.text, call.frame.batch.length or 0
        if text is not None:
            return text.is_loose and text.real_share() < 1
        workload = self._workload(call.frame.batch)
        is_padded = workload.tokens < workload.tokens_processed
        return bool(is_padded and call.frame.driver == "token" and length and call.num_rows % length == 0)

    def _other_rows(self, call: Call, workload: Workload) -> str:
        """What rows grow with that are not proven to be a text's: judged by their number."""
        kind, rows = call.frame.driver, call.num_rows
        if kind == "patch":
            return self._known("patches" if workload.patches else "values", workload)
        if kind in ("value", "sample"):
            name = self._known(f"{kind}s", workload)
            return PROCESSED.get(name, name)
        if workload.tokens and rows in (workload.tokens, workload.decoder_tokens):
            return "tokens" if rows == workload.tokens else "decoder_tokens"  # padding was taken out
        names = ("tokens_processed", "values_processed", "patches", "samples")
        return next((name for name in names if getattr(workload, name)), "once")

    def _workload(self, batch: Batch) -> Workload:
        return self._workloads.get(id(batch.late), self.total) if batch.late is not None else self.total

    def _known(self, name: str, workload: Workload) -> str:
        """The field, or another where the batch has nothing of it."""
        if getattr(workload, name, 0):
            return name
        return next((other for other in _MAIN if getattr(workload, other)), "once")

    def _share(self, call: Call, work: Work) -> float:
        if call.pairs is None or not call.pairs.is_attention:
            return work.exact / work.full if work.full else 1.0
        if call.pairs.share is None:
            self.unknown_mask += work.full if call.phase != "recompute" else 0
            return 1.0
        return float(call.pairs.share)

    def _pair_fields(self, call: Call, work: Work, share: float) -> dict[str, str]:
        """Which pairs these are, judged by the texts that meet, and by how many there are."""
        batch, workload = call.frame.batch, self._workload(call.frame.batch)
        groups, queries, keys = _sizes(call)
        asking, asked = (call.pairs.queries, call.pairs.keys) if call.pairs is not None else (None, None)
        is_unpadded = not groups and call.is_attention and call.frame.driver == "token" and batch.length
        if is_unpadded:  # sequences end to end: each is by itself, in every count
            is_cut = workload.pairs_window > 0 and call.frame.slides is not False
            exact = "pairs_full" if work.exact == work.full else "pairs_window" if is_cut else "pairs_causal"
            exact = exact if getattr(workload, exact) else "tokens"
            return {"exact": exact, "full": "pairs_full" if workload.pairs_full else "tokens", "hardware": exact}
        if asking is not None and asked is not None:
            number = share * (groups or batch.samples) * queries * keys
            exact = self._text_pairs(call, asking, asked, workload, number)
            prefix, is_pairs, _ = exact.partition("pairs")
            processed = f"{prefix}pairs_processed" if is_pairs else PROCESSED.get(exact, exact)
            hardware = processed
            if call.is_attention and exact.endswith(("pairs_causal", "pairs_window")):
                skips = exact == "pairs_window" and work.exact < work.full
                hardware = exact if skips else f"{exact.partition('pairs')[0]}pairs_run"
            return {"exact": exact, "full": processed, "hardware": hardware}
        text = asking or asked
        if text is not None:
            exact = self._known(f"{text.prefix}tokens", workload)
        elif call.frame.driver == "patch" and workload.patches:
            exact = "patch_pairs_window" if call.frame.slides and workload.patch_pairs_window else "patch_pairs"
        elif call.frame.driver == "token":
            exact = self._other_rows(call, workload)
        else:
            is_whole = call.frame.driver == "patch" or (call.frame.driver == "value" and groups in (0, batch.samples))
            exact = self._known("values_squared" if is_whole else f"{call.frame.driver}s", workload)
        processed = PROCESSED.get(exact, exact)
        return {"exact": exact, "full": processed, "hardware": processed}

    def _text_pairs(self, call: Call, asking: Text, asked: Text, workload: Workload, number: float) -> str:
        prefix, (_, queries, keys) = asking.prefix, _sizes(call)
        names = [f"{prefix}pairs_causal", f"{prefix}pairs_full"]
        if asking.prefix != asked.prefix:
            names = ["cross_pairs"]
        elif workload.window and call.frame.slides is not False and not prefix:
            names = ["pairs_window", "pairs_window_full", *names]
        names = [name for name in names if getattr(workload, name, 0)]
        if not names or queries != asking.length or keys != asked.length:  # chunks of it
            return self._known(f"{prefix}tokens", workload)
        return min(names, key=lambda name: abs(number / getattr(workload, name) - 1))


def _sizes(call: Call) -> tuple[int, int, int]:
    """Samples, queries and keys."""
    if call.is_attention or call.pairs is None:
        return call.sizes
    return call.pairs.num_groups, call.pairs.num_queries, call.pairs.num_keys


def _unseen(calls: Iterable[Call], needed: Iterable[Frame]) -> list[Frame]:
    """Modules with a weight matrix in which no product was seen; none where the whole forward pass ran elsewhere."""
    phases = {call.phase for call in calls}
    if "backward" in phases and "forward" not in phases:
        return []
    seen: set[str] = set()
    for path in {call.frame.path for call in calls if call.phase == "forward"}:
        parts = path.split(".")
        seen |= {".".join(parts[:end]) for end in range(len(parts) + 1)}
    return [frame for frame in needed if frame.path not in seen and not frame.batch.is_evaluation]


def _by_shapes(calls: Sequence[Call], missing: Iterable[Frame]) -> Iterator[Call]:
    """The products that these modules need, in the forward pass, and in the backward pass if there is one."""
    goes_back = any(call.phase == "backward" for call in calls)
    for frame in missing:
        own = partial(
            Call, frame=frame, op=BY_SHAPES, dtype=frame.dtype, is_attention=False, pairs=None, text=frame.text
        )
        yield own(phase="forward", work=Work(*[frame.needed_flop] * 3))
        if goes_back and frame.num_gradients:
            yield own(phase="backward", work=Work(*[frame.needed_flop * frame.num_gradients] * 3))


def _coverage(forward_by_path: Mapping[str, float], needed: Iterable[Frame], uncounted_flop: float) -> float:
    """Counted forward work over what the modules' own weights, or uncounted operators, say was needed at the least."""
    wanted: dict[str, float] = defaultdict(float)
    for frame in needed:
        if not frame.batch.is_evaluation:
            wanted[frame.path] += frame.needed_flop
    missing = 0.0
    for path, flop in wanted.items():
        below = sum(own for other, own in forward_by_path.items() if other.startswith(f"{path}."))
        missing += max(0.0, flop - (forward_by_path.get(path) or below))
    counted, missing = sum(forward_by_path.values()), max(missing, uncounted_flop)
    return counted / (counted + missing) if counted + missing else 1.0
