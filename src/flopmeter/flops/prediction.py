"""How many FLOPs does this step need, when only some steps are counted?

A counted step names each part of its work by the field of the workload that it grows with (`FlopCount.growth`). Another
step takes `flop * after[field] / before[field]` of each. The next counted step tests this, and the error is published.
A field that was 0 in the counted step is unknown, not 0: that part is taken from the estimate (`leaves`) until a step
that has it is counted.

Hardware FLOPs grow with what the device is handed, padding included, in the same way.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from math import gcd, isclose, lcm
from statistics import fmean
from typing import NamedTuple

from flopmeter.devices import normalise_dtype
from flopmeter.flops.estimate import UNIT
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.workload import PROCESSED, Workload

MAX_KNOWN = 256
MAX_SHAPES, MAX_COUNTS = 32, 8
"""Counts that are kept: the latest ones of each workload, so that a model that changes for good is followed."""
SAME, SAME_UNSEEN = 0.01, 0.005
"""Counts of one workload, or of steps whose batch nobody saw, that differ by no more are of the same work."""
KINDS = ("tokens", "decoder_tokens", "values", "patches")
"""Fields that tell which kinds of input a step had."""

Line = tuple[str, str, float, float]
"""A part of the work: its dtype, the field that it grows with, its FLOPs, and the field's amount in that step."""


class StepFlop(NamedTuple):
    """FLOPs of one step by dtype, under the names of the peak table."""

    model: Mapping[str, float]
    hardware: Mapping[str, float]
    processed: Mapping[str, float]
    """Model FLOPs if padding counted as work."""


class Law(NamedTuple):
    """What follows from one count for other batches."""

    model: tuple[Line, ...]
    hardware: tuple[Line, ...]
    processed: tuple[Line, ...]
    kinds: frozenset[str]

    @classmethod
    def of(cls, count: FlopCount, before: Workload, dtype: str | None = None) -> Law:
        """Args: dtype: What autocast turns every product into; None where the count knows."""
        model = list(_lines(count.growth.get(count.convention) or _unnamed(count, count.by_dtype), before, dtype))
        run = _lines(count.growth.get("hardware") or _unnamed(count, count.hardware_by_dtype), before, dtype)
        processed = [(name, PROCESSED.get(field, field), *rest) for name, field, *rest in model]
        return cls(tuple(model), tuple(run), tuple(processed), kinds_of(before))  # type: ignore[arg-type]

    def at(self, after: Workload) -> StepFlop:
        """FLOPs of a step with this workload."""
        return StepFlop(_scaled(self.model, after), _scaled(self.hardware, after), _scaled(self.processed, after))


def kinds_of(workload: Workload) -> frozenset[str]:
    """Which kinds of input there are."""
    return frozenset([kind for kind in KINDS if getattr(workload, kind)])


def _kind_of(field: str) -> str:
    words = (("patch", "patches"), ("value", "values"), ("decoder", "decoder_tokens"), ("cross", "decoder_tokens"))
    return next((kind for word, kind in words if word in field), "tokens")


def _scaled(lines: Iterable[Line], after: Workload) -> dict[str, float]:
    found: dict[str, float] = {}
    for dtype, field, flop, before in lines:
        found[dtype] = found.get(dtype, 0.0) + flop * getattr(after, field) / before
    return found


def _lines(growth: Mapping[str, Mapping[str, float]], before: Workload, dtype: str | None) -> Iterable[Line]:
    for own, parts in growth.items():
        for field, flop in parts.items():
            amount = getattr(before, field, 0)
            name = field if amount else next((name for name in (*KINDS, "samples") if getattr(before, name)), "once")
            yield normalise_dtype(dtype or own), name, flop, amount or getattr(before, name)


def _unnamed(count: FlopCount, by_dtype: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """A profiler's count does not say what its parts grow with: attention with pairs, all else with the input."""
    total = sum(count.by_op.values())
    share = sum(flop for op, flop in count.by_op.items() if "attention" in op or "attn" in op) / total if total else 0
    return {dtype: {"pairs_causal": flop * share, "": flop * (1 - share)} for dtype, flop in by_dtype.items()}


def _by_ratio(counted: Mapping[str, float], now: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
    """What was counted, by how much the estimates of now and then differ."""
    total, before = sum(now.values()), sum(then.values())
    return {dtype: flop * total / before for dtype, flop in counted.items()} if before else dict(now)


class Predictor:
    """FLOPs of any workload, from the steps that were counted while the model is trained in one way.

    Freezing a part of the model begins another. Safe to read from another thread.

    Args:
        estimate: What the leaves of the module tree say of one unit of everything, for steps before the first count.
        before: How it was trained until now: its counts serve, by how much the estimates differ, until one is made.
        is_calibrated: False keeps the estimate as it is, whatever is counted.
    """

    def __init__(
        self, estimate: FlopCount | None, before: Predictor | None = None, *, is_calibrated: bool = True
    ) -> None:
        self.estimate = estimate
        self.error: float | None = None
        """Relative error of the last prediction that a count tested."""
        self.calibration: float | None = None
        """FLOPs of the last counted step over the estimate of them: the calibration factor."""
        self.difference = 0.0
        """By how much counts of the last counted workload differ, as a share of their mean; 0 where they agree."""
        self.dtype: str | None = None
        """What autocast turns every product into, as long as nothing was counted; None for the weights' own."""
        self.has_count = False
        """Whether a step was counted, here or on rank 0."""
        self._before = before if before is not None and before.has_count else None
        self.is_told = False
        """Whether the run file says that this way of training has begun."""
        self.missing: frozenset[str] = frozenset()
        """Kinds of input that a step had and no counted one: its FLOPs are partly estimated."""
        self.unseen: StepFlop | None = None
        """FLOPs of a step whose batch nobody saw, as long as all counts of such steps agree."""
        self._is_calibrated = is_calibrated
        self._counts: OrderedDict[Workload, deque[FlopCount]] = OrderedDict()
        self._laws: dict[Workload, Law] = {}
        self._known: dict[Workload, StepFlop | None] = {}
        self._unseen_counts: list[float] = []
        self._differ = False

    def learn(self, count: FlopCount, workload: Workload) -> float | None:
        """Take a counted step; gives the relative error of what the counts before it had predicted."""
        predicted = self._predict(workload)
        is_tested = predicted is not None and count.model_flop and (self._laws or not self._is_calibrated)
        self.error = sum(predicted.model.values()) / count.model_flop - 1 if predicted and is_tested else self.error
        estimated = sum(self._estimate().at(workload).model.values()) if self.estimate is not None else 0.0
        self.calibration = count.model_flop / estimated if estimated else None
        if self._is_calibrated:
            law = Law.of(self._mean(count, workload), workload)
            laws = {known: own for known, own in self._laws.items() if known != workload}
            self._laws = {**dict(list(laws.items())[1 - MAX_SHAPES :]), workload: law}  # replaced, and the newest last
        # Replaced, not cleared: another thread may be reading.
        self._known = {known: law.at(known) for known, law in self._laws.items()}
        self.has_count, self._before, self.missing = True, None, frozenset()
        return self.error

    def _mean(self, count: FlopCount, workload: Workload) -> FlopCount:
        """What to expect of such a step: the mean where counts differ, as with layers dropped at random."""
        counts = self._counts.pop(workload, None) or deque(maxlen=MAX_COUNTS)
        counts.append(replace(count, by_module={}))
        self._counts[workload] = counts
        if len(self._counts) > MAX_SHAPES:
            self._counts.popitem(last=False)
        flop = [each.model_flop for each in counts]
        mean = fmean(flop)
        difference = (max(flop) - min(flop)) / mean if mean else 0.0
        self.difference = difference if difference > SAME else 0.0
        *others, last = counts
        return sum(others, last) * (1 / len(counts)) if self.difference else count

    def learn_unseen(self, count: FlopCount) -> bool:
        """A step was counted in which the model itself was not called; gives whether such steps differ from now on."""
        self.has_count, before = True, self.unseen
        self._unseen_counts = [*self._unseen_counts[:1], count.model_flop]  # the first and the last
        least, most = min(self._unseen_counts), max(self._unseen_counts)
        self._differ = self._differ or most > (1 + SAME_UNSEEN) * least
        self.unseen = None if self._differ else Law.of(replace(count, growth={}, by_op={}), Workload()).at(Workload())
        return self._differ and before is not None

    def predict(self, workload: Workload) -> StepFlop | None:
        """The FLOPs of a step with this workload; None where nothing tells."""
        by_workload = self._known  # a count that comes meanwhile must not find what was foretold without it
        known = by_workload.get(workload)
        if known is None:
            if len(by_workload) >= MAX_KNOWN:
                by_workload.clear()
            known = by_workload[workload] = self._predict(workload)
        return known

    def _predict(self, workload: Workload) -> StepFlop | None:
        kinds, laws = kinds_of(workload), list(self._laws.values())
        # The newest count with these kinds of input and no others, or with all of them, or of any kind.
        fitting = [law for law in laws if law.kinds == kinds] or [law for law in laws if kinds <= law.kinds] or laws
        law = self._laws.get(workload) or (fitting[-1] if fitting else None)
        if law is not None and kinds <= law.kinds:
            return law.at(workload)
        if self.estimate is None:
            self.missing = kinds
            return None
        estimate = self._estimate()
        if law is None:
            found = estimate.at(workload)
            if not any(found.model.values()):
                return None  # there is nothing that it knows of
            before = self._before
            counted = before.predict(workload) if before is not None else None
            if before is None or before.estimate is None or counted is None:
                return found
            return StepFlop(*map(_by_ratio, counted, found, before._estimate().at(workload)))
        missing = self.missing = kinds - law.kinds
        own = next(iter({line[0] for line in law.model}), "fp32")
        extra: list[tuple[Line, ...]] = [
            tuple((own, *line[1:]) for line in lines if _kind_of(line[1]) in missing)
            for lines in (estimate.model, estimate.hardware, estimate.processed)
        ]
        return Law(law.model + extra[0], law.hardware + extra[1], law.processed + extra[2], kinds).at(workload)

    def _estimate(self) -> Law:
        assert self.estimate is not None
        return Law.of(self.estimate, UNIT, self.dtype)


Sizes = tuple[int, int]
"""Batch size and length."""
_HALF, _ONE = Fraction(1, 2), Fraction(1)
_POWERS: Mapping[str, Mapping[Sizes, Fraction]] = {
    "once": {(0, 0): _ONE},
    "samples": {(1, 0): _ONE},
    **{key: {(1, 1): _ONE} for key in ("tokens", "tokens_processed", "decoder_tokens", "decoder_tokens_processed")},
    **{key: {(1, 2): _HALF, (1, 1): _HALF} for key in ("pairs_causal", "decoder_pairs_causal")},
    **{key: {(1, 2): _ONE} for key in ("pairs_full", "pairs_processed", "decoder_pairs_processed", "cross_pairs")},
}
"""Fields of a batch of B texts of S tokens each, by the powers of B and S. A sliding window makes no polynomial."""


def expression(count: FlopCount, sizes: Sizes, check: FlopCount, check_sizes: Sizes) -> str | None:
    """The model's FLOPs in batch size B and length S: '768*B*S*(S + 949)'; None where they are no such polynomial.

    Args:
        check: A count at other sizes, which the expression must meet.
    """
    total: dict[Sizes, Fraction] = {}
    per_sample = [getattr(own.workload, "values", 0) / size[0] for own, size in ((count, sizes), (check, check_sizes))]
    ratio = check_sizes[1] / sizes[1]  # an image of one size, a recording, a square of pixels
    power = next((n for n in (0, 1, 2) if isclose(per_sample[0] * ratio**n, per_sample[1], rel_tol=1e-9)), 0)
    values = {"values": {(1, power): _ONE}, "values_squared": {(1, 2 * power): _ONE}}
    for parts in count.growth[count.convention].values():
        for field, flop in parts.items():
            powers = _POWERS.get(field) or values.get(field.removesuffix("_processed"))
            if powers is None:
                return None
            amount = sum(c * sizes[0] ** b * sizes[1] ** s for (b, s), c in powers.items())
            for own, c in powers.items():
                total[own] = total.get(own, Fraction(0)) + c * Fraction(round(flop)) / amount
    found = {power: c for power, c in total.items() if c}
    at_check = sum(c * check_sizes[0] ** b * check_sizes[1] ** s for (b, s), c in found.items())
    return _polynomial(found) if isclose(at_check, check.model_flop, rel_tol=1e-9) else None


def _polynomial(coefficients: Mapping[Sizes, Fraction]) -> str:
    """As text, with what is common to all terms in front."""
    if not coefficients:
        return "0"

    def term(factor: Fraction, power: Sizes) -> str:
        letters = [name if n == 1 else f"{name}^{n}" for name, n in zip("BS", power, strict=True) if n]
        return "*".join([str(factor)] * (factor != 1 or not letters) + letters)

    low = min(b for b, _ in coefficients), min(s for _, s in coefficients)
    denominator = lcm(*(c.denominator for c in coefficients.values()))
    common = Fraction(gcd(*(int(c * denominator) for c in coefficients.values())), denominator)
    rest = {(b - low[0], s - low[1]): c / common for (b, s), c in coefficients.items()}
    inner = " + ".join(term(rest[power], power) for power in sorted(rest, key=lambda p: p[::-1], reverse=True))
    return term(common, low) if inner == "1" else f"{term(common, low)}*({inner})"
