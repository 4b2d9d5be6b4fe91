"""From the operators of a step to its FLOP count, under a convention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.formulas import Work

if TYPE_CHECKING:
    from flopmeter.flops.frames import Batch, Driver, Frame
    from flopmeter.flops.observation import Call

UNKNOWN_MASK = "Some attention masks had no values to look at: all their pairs are counted."
_SAME_SHARE = 1e-9


def tally(
    calls: Iterable[Call], needed: Iterable[Frame], uncounted: Mapping[str, int], convention: Convention
) -> FlopCount:
    """Add up the calls. Evaluation between training steps is left out."""
    reader = _Reader(convention)
    phases: dict[str, float] = defaultdict(float)
    hardware_by_dtype: dict[str, float] = defaultdict(float)
    by_op: dict[str, float] = defaultdict(float)
    by_module: dict[str, float] = defaultdict(float)
    growth: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    forward_by_path: dict[str, float] = defaultdict(float)
    for call in calls:
        if call.phase == "evaluation":
            continue
        work = call.work if isinstance(call.work, Work) else call.work()
        flop, driver = reader.read(call, work)
        phases[call.phase] += flop
        hardware_by_dtype[call.dtype] += work.hardware
        if call.phase == "forward":
            forward_by_path[call.frame.path] += work.full
        if call.phase in ("forward", "backward"):
            by_op[call.op] += flop
            by_module[call.frame.path] += flop
            growth[call.dtype][driver] += flop
    return FlopCount(
        forward_flop=phases["forward"],
        backward_flop=phases["backward"],
        recompute_flop=phases["recompute"],
        optimizer_flop=phases["optimizer"],
        hardware_flop=sum(hardware_by_dtype.values()),
        by_dtype={dtype: sum(parts.values()) for dtype, parts in growth.items()},
        hardware_by_dtype=dict(hardware_by_dtype),
        by_op=dict(by_op),
        by_module=dict(by_module),
        growth={dtype: dict(parts) for dtype, parts in growth.items()},
        coverage=_coverage(forward_by_path, needed),
        uncounted=dict(uncounted),
        convention=convention,
        left_out=(UNKNOWN_MASK,) if reader.met_unknown_mask else (),
    )


class _Reader:
    """Reads what the step left on the device, once per batch."""

    def __init__(self, convention: Convention) -> None:
        self._convention = convention
        self._lengths: dict[int, list[int]] = {}
        self.met_unknown_mask = False

    def read(self, call: Call, work: Work) -> tuple[float, Driver]:
        """What a call counts under the convention, and what that grows with."""
        pairs = call.pairs
        by_mask = pairs is not None and pairs.is_attention
        needed = pairs.needed if pairs is not None else 1.0
        if not by_mask and not call.is_attention:
            share = self._real_share(call.frame.batch) if call.frame.driver == "token" else 1.0
            return work.exact * share if self._convention == "exact" else work.full, call.frame.driver
        share = self._share(call, work)
        driver = self._pair_driver(call.frame, share)
        return work.full * needed * (share if self._convention == "exact" else 1.0), driver

    def _share(self, call: Call, work: Work) -> float:
        if call.pairs is None or not call.pairs.is_attention:
            return work.exact / work.full if work.full else 1.0
        if call.pairs.share is None:
            self.met_unknown_mask = True
            return 1.0
        return float(call.pairs.share)

    def _real_share(self, batch: Batch) -> float:
        lengths = self._lengths_of(batch)
        return sum(lengths) / (len(lengths) * batch.length) if batch.length and lengths else 1.0

    def _lengths_of(self, batch: Batch) -> list[int]:
        key = id(batch)
        if key not in self._lengths:
            self._lengths[key] = batch.lengths()
        return self._lengths[key]

    def _pair_driver(self, frame: Frame, share: float) -> Driver:
        """Which kind of pairs these are, told by how many there are."""
        if frame.driver != "token":
            return "patch_pair" if frame.driver == "patch" else "sample"
        lengths, length = self._lengths_of(frame.batch), frame.batch.length or 1
        processed = len(lengths) * length**2
        if abs(share - sum(n * (n + 1) for n in lengths) / 2 / processed) < _SAME_SHARE:
            return "causal_pair"
        return "full_pair" if abs(share - sum(n * n for n in lengths) / processed) < _SAME_SHARE else "other_pair"


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
