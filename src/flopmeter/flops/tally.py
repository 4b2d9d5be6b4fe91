"""From the operators of a step to its FLOP count, under a convention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flopmeter.flops.flop_count import Convention, FlopCount

if TYPE_CHECKING:
    from flopmeter.flops.observe import Call


def tally(calls: Iterable[Call], uncounted: Mapping[str, int], convention: Convention) -> FlopCount:
    """Add up the calls. Evaluation between training steps is left out."""
    phases: dict[str, float] = defaultdict(float)
    by_dtype: dict[str, float] = defaultdict(float)
    hardware_by_dtype: dict[str, float] = defaultdict(float)
    by_op: dict[str, float] = defaultdict(float)
    by_module: dict[str, float] = defaultdict(float)
    pair_flop = 0.0
    for call in calls:
        if call.phase == "evaluation":
            continue
        flop = model_flop(call, convention)
        phases[call.phase] += flop
        hardware_by_dtype[call.dtype] += call.work.hardware
        if call.phase in ("forward", "backward"):
            by_dtype[call.dtype] += flop
            by_op[call.op] += flop
            by_module[call.frame.path] += flop
            if call.is_attention or (call.pairs is not None and call.pairs.is_attention):
                pair_flop += flop
    return FlopCount(
        forward_flop=phases["forward"],
        backward_flop=phases["backward"],
        recompute_flop=phases["recompute"],
        optimizer_flop=phases["optimizer"],
        hardware_flop=sum(hardware_by_dtype.values()),
        by_dtype=dict(by_dtype),
        hardware_by_dtype=dict(hardware_by_dtype),
        by_op=dict(by_op),
        by_module=dict(by_module),
        pair_flop=pair_flop,
        uncounted=dict(uncounted),
        convention=convention,
    )


def model_flop(call: Call, convention: Convention) -> float:
    """What this call counts under the convention."""
    if convention == "full":
        return call.work.full
    if call.pairs is not None and call.pairs.is_attention:
        return call.work.full * float(call.pairs.share)
    if not call.is_attention and call.frame.is_token_wise:
        return call.work.exact * float(call.frame.batch.real_share)
    return call.work.exact
