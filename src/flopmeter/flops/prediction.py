"""How many FLOPs does this step need, when only some steps are counted?

A counted step names each part of its work by the field of the workload that it grows with (`FlopCount.growth`). Another
step takes `flop * after[field] / before[field]` of each. A field that was 0 in the counted step is unknown, not 0: that
part is taken from the estimate (`leaves`) until a step that has it is counted.

Every further count tests this law, for what had changed since the count that predicted it: the batch, a length, a side
of an image, the share of padding. A step in which only such things have changed is known; any other is predicted, and
`StepFlop.error` says by how much the law has been off so far. Where it was off, a step is predicted from the count of
the nearest shape, so that with each shape that is counted there is less to predict.

Hardware FLOPs grow with what the device is handed, padding included, in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import log
from statistics import fmean
from typing import Any, NamedTuple
from zlib import crc32

from torch import nn

from flopmeter.devices import dtype_name, tf32_families
from flopmeter.flops.estimate import UNIT
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.workload import PROCESSED, Shape, Workload

MAX_KNOWN = 256
MAX_SHAPES, FEW_SHAPES = 1024, 8
"""Shapes whose counts are kept where the law fails, and where it holds."""
MAX_COUNTS = 8
"""Counts of one shape that are kept where they differ: the latest, to follow a model that changes for good."""
SAME, SAME_UNSEEN = 0.01, 0.005
"""Counts of one shape, or of steps whose batch nobody saw, that differ by no more are of the same work."""
EXACT = 5e-4
"""A prediction that is off by no more proves the law for what had changed; by more it disproves it."""
OFF = 0.005
"""What a run says of a law that is off by more."""
MIN_TESTS = 4
"""Of each thing that changes: some are passed by luck, as where all sides so far were multiples of a window."""
MIN_REPEATS = 3
"""Further counts of counted shapes that must agree where the law fails: layers dropped at random agree by luck, too."""
NUM_ERRORS = 16
"""The latest tests, whose largest error is shown."""
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
    law: Law | None = None
    """What gives them for any workload; None where they follow from this step alone."""
    error: float | None = None
    """How far off predictions like this one have been so far, as a share: 0 where the step's shape was counted, or the
    law is proven for all that differs from one that was. None where nothing was tested yet."""


class Law(NamedTuple):
    """What follows from one count for other batches."""

    model: tuple[Line, ...]
    hardware: tuple[Line, ...]
    processed: tuple[Line, ...]
    kinds: frozenset[str]
    """Of input that the counted step had."""
    other: tuple[Line, ...] = ()
    """Model FLOPs under the other convention, for a run that is read under it."""
    is_estimate: bool = False
    """Whether a part of it was never counted."""

    @classmethod
    def of(cls, count: FlopCount, before: Workload, dtype: str | None = None) -> Law:
        """Args: dtype: What autocast turns every product into; None where the count knows."""
        model = list(_lines(count.growth.get(count.convention) or _unnamed(count, count.by_dtype), before, dtype))
        run = _lines(count.growth.get("hardware") or _unnamed(count, count.hardware_by_dtype), before, dtype)
        processed = [(name, PROCESSED.get(field, field), *rest) for name, field, *rest in model]
        others = _lines(count.growth.get("full" if count.convention == "exact" else "exact", {}), before, dtype)
        lines = tuple(model), tuple(run), tuple(processed)
        return cls(*lines, kinds_of(before), tuple(others))  # type: ignore[arg-type]

    def at(self, after: Workload, error: float | None = None) -> StepFlop:
        """FLOPs of a step with this workload."""
        model, hardware = _scaled(self.model, after), _scaled(self.hardware, after)
        return StepFlop(model, hardware, _scaled(self.processed, after), self, error)

    @staticmethod
    def mean(laws: Sequence[Law]) -> Law:
        """What to expect where counts differ, as with layers dropped at random."""
        parts: dict[str, Any] = {
            name: tuple((dtype, own, flop / len(laws), n) for law in laws for dtype, own, flop, n in getattr(law, name))
            for name in ("model", "hardware", "processed", "other")
        }
        return laws[-1]._replace(**parts)


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
            yield dtype_name(dtype or own), name, flop, amount or getattr(before, name)


def _unnamed(count: FlopCount, by_dtype: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """A profiler's count does not say what its parts grow with: attention with pairs, all else with the input."""
    total = sum(count.by_op.values())
    share = sum(flop for op, flop in count.by_op.items() if "attention" in op or "attn" in op) / total if total else 0
    return {dtype: {"pairs_causal": flop * share, "": flop * (1 - share)} for dtype, flop in by_dtype.items()}


def _by_ratio(counted: Mapping[str, float], now: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
    """What was counted, by how much the estimates of now and then differ."""
    total, before = sum(now.values()), sum(then.values())
    return {dtype: flop * total / before for dtype, flop in counted.items()} if before else dict(now)


class Counted(NamedTuple):
    """What was counted of one shape."""

    law: Law
    workload: Workload
    laws: tuple[Law, ...]
    """One for each count, where they differ."""
    contents: tuple[float, ...]


def changed(after: Workload, before: Workload) -> frozenset[str]:
    """What is not as it was in another step: sizes of what the model was given, by name and dimension."""
    own, others = after.shape, before.shape
    found = {"calls"} if len(own) != len(others) else set()
    for place, call in enumerate(own if own != others else ()):
        sizes = {name: rest for name, *rest in call}
        known = {name: rest for name, *rest in others[min(place, len(others) - 1)]} if others else {}
        for name in sizes.keys() | known.keys():
            now, then = sizes.get(name), known.get(name)
            if now is None or then is None or len(now) != len(then):
                found.add(name)
            else:
                found |= {f"{name}.{n}" for n, (a, b) in enumerate(zip(now, then, strict=True)) if a != b}
    return frozenset(found)


def _contents(workload: Workload) -> tuple[float, ...]:
    """What the shapes do not tell: shares of padding, packed documents, sizes of images that come in patches."""
    is_full = workload.tokens == workload.tokens_processed and not workload.values_padding
    is_one_text = 2 * workload.pairs_causal == workload.pairs_processed + workload.tokens_processed
    if is_full and is_one_text and not (workload.decoder_tokens or workload.patches):
        return ()  # as most are
    shares = [getattr(workload, own) / (getattr(workload, of) or 1) for own, of in PROCESSED.items()]
    return (*shares, workload.patches / (workload.samples or 1), workload.patch_pairs / (workload.patches or 1))


def _distance(after: Workload, before: Workload) -> float:
    """How unlike two shapes are: all sizes, by their ratios."""
    sizes = [[size for call in workload.shape for _, *rest in call for size in rest] for workload in (after, before)]
    return sum(abs(log((a or 0.5) / (b or 0.5))) for a, b in zip_longest(*sizes, fillvalue=0))


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
        """By how much counts of the last counted shape differ, as a share of their mean; 0 where they agree."""
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
        # All of these are replaced, not changed: another thread may be reading.
        self._counted: dict[Shape, Counted] = {}
        self._nearest: dict[Shape, tuple[Counted, frozenset[str]]] = {}
        self._known: dict[tuple[Workload, Shape], StepFlop | None] = {}
        self._passed: Mapping[str, int] = {}
        """By what had changed: tests that the law has passed since it last failed one."""
        self._proven: frozenset[str] = frozenset()
        self._tested: frozenset[str] = frozenset()
        self._disproven: tuple[frozenset[str], ...] = ()
        self._errors: tuple[float, ...] = ()
        self._num_repeats = 0
        """Further steps of a counted shape that had as much: asked for only where the law fails."""
        self._optimizer: Mapping[str, float] = {}
        self._unseen_counts: list[float] = []
        self._differ = False

    def learn(self, count: FlopCount, workload: Workload) -> float | None:
        """Take a counted step; gives the relative error of what the counts before it had predicted, if any had."""
        predicted, error = self._predict(workload), None
        if predicted and count.model_flop and (self._counted or not self._is_calibrated):
            error = self.error = sum(predicted.model.values()) / count.model_flop - 1
            if self._counted and predicted.law is not None and not predicted.law.is_estimate:
                self._note_test(self._changed(workload), abs(error))
            elif not self._is_calibrated:
                self._errors = (*self._errors, abs(error))[-NUM_ERRORS:]
        estimated = sum(self._estimate().at(workload).model.values()) if self.estimate is not None else 0.0
        self.calibration = count.model_flop / estimated if estimated else None
        if self._is_calibrated:
            shape, laws = workload.shape, [Law.of(self._without_odd_work(count, workload), workload)]
            before = self._counted.get(shape)
            if before is not None and (len(before.laws) > 1 or abs(error or 0) > SAME):
                laws = [*before.laws, *laws][-MAX_COUNTS:]
            flop = [sum(law.at(workload).model.values()) for law in laws]
            difference = (max(flop) - min(flop)) / fmean(flop) if any(flop) else 0.0
            self.difference = difference if difference > SAME else 0.0
            others = [item for item in self._counted.items() if item[0] != shape]
            kept = others[1 - (MAX_SHAPES if self._disproven else FEW_SHAPES) :]
            newest = Counted(Law.mean(laws), workload, tuple(laws), _contents(workload))
            self._counted = {**dict(kept), shape: newest}  # the newest last
        self._nearest, self._known = {}, {}
        self.has_count, self._before, self.missing = True, None, frozenset()
        return error

    def _without_odd_work(self, count: FlopCount, workload: Workload) -> FlopCount:
        """An optimizer's products stand for other steps once two counts in a row have them, as much as both have."""
        hardware = count.growth.get("hardware", {})
        now = {dtype: parts["once"] for dtype, parts in hardware.items() if "once" in parts}
        if not workload.samples or not (now or self._optimizer):
            return count
        before, self._optimizer = self._optimizer, now
        kept = {
            dtype: {**parts, "once": min(now.get(dtype, 0.0), before.get(dtype, 0.0))}
            for dtype, parts in hardware.items()
        }
        return replace(count, growth={**count.growth, "hardware": kept})

    def _note_test(self, what: frozenset[str], error: float) -> None:
        self._errors = (*self._errors, error)[-NUM_ERRORS:]
        self._tested |= what
        if error > EXACT:
            self._passed = {name: number for name, number in self._passed.items() if name not in what}
            self._disproven = (*[own for own in self._disproven if not what <= own], what)[-MAX_KNOWN:]
        elif not what:
            self._num_repeats += 1
        elif not any(own <= what for own in self._disproven):
            # What has failed once is not proven again, but for the batch alone: a size may have passed by luck.
            is_batch = len(what) == 1 and next(iter(what)).endswith(".0")
            passed = what if is_batch else what.difference(*self._disproven)
            self._passed = {**self._passed, **{name: self._passed.get(name, 0) + 1 for name in passed}}
        self._proven = frozenset(name for name, number in self._passed.items() if number >= MIN_TESTS)

    def _is_proven(self, what: frozenset[str]) -> bool:
        if not what and self._disproven and self._num_repeats < MIN_REPEATS:
            return False
        return what <= self._proven and not any(own <= what for own in self._disproven)

    def is_known(self, shape: Shape) -> bool:
        """Whether nothing could be learnt from a step of this shape: it was counted, or the law is proven for it."""
        return bool(self._counted) and self._is_proven(self._fitting(Workload(shape=shape))[1])

    def learn_unseen(self, count: FlopCount) -> bool:
        """A step was counted in which the model itself was not called; gives whether such steps differ from now on."""
        self.has_count, before = True, self.unseen
        is_tested = bool(self._unseen_counts)
        self._unseen_counts = [*self._unseen_counts[:1], count.model_flop]  # the first and the last
        least, most = min(self._unseen_counts), max(self._unseen_counts)
        self._differ = self._differ or most > (1 + SAME_UNSEEN) * least
        law = Law.of(replace(count, growth={}, by_op={}), Workload())
        self.unseen = None if self._differ else law.at(Workload(), most / least - 1 if is_tested else None)
        return self._differ and before is not None

    def predict(self, workload: Workload) -> StepFlop | None:
        """The FLOPs of a step with this workload; None where nothing tells."""
        by_workload, key = self._known, (workload, workload.shape)
        known = by_workload.get(key)  # a count that comes meanwhile must not find what was foretold without it
        if known is None:
            if len(by_workload) >= MAX_KNOWN:
                by_workload.clear()
            known = by_workload[key] = self._predict(workload)
        return known

    def _fitting(self, workload: Workload) -> tuple[Counted, frozenset[str]]:
        """The count to predict a step from, and what has changed in its shape since."""
        own = self._counted.get(workload.shape)
        if own is not None:
            return own, frozenset()
        nearest, key = self._nearest, workload.shape
        found = nearest.get(key)
        if found is None:
            # The newest count with these kinds of input and no others, or with all of them, or of any kind: the law
            # is proven from there, or the count that is most alike is taken.
            kinds, counted = kinds_of(workload), list(self._counted.values())
            fitting = (
                [own for own in counted if own.law.kinds == kinds] or [own for own in counted if kinds <= own.law.kinds]
            ) or counted
            own = fitting[-1]
            found = own, changed(workload, own.workload)
            if not self._is_proven(found[1]):
                pairs = [(own, changed(workload, own.workload)) for own in reversed(fitting)]
                is_proven, proven = self._is_proven, self._proven
                found = min(
                    pairs, key=lambda p: (not is_proven(p[1]), len(p[1] - proven), _distance(workload, p[0].workload))
                )
            if len(nearest) >= MAX_SHAPES:
                nearest.clear()
            nearest[key] = found
        return found

    def _changed(self, workload: Workload) -> frozenset[str]:
        own, what = self._fitting(workload)
        if "contents" in self._proven and not self._disproven:
            return what
        return what | {"contents"} if _contents(workload) != own.contents else what

    def _predict(self, workload: Workload) -> StepFlop | None:
        kinds = kinds_of(workload)
        law = self._fitting(workload)[0].law if self._counted else None
        if law is not None and kinds <= law.kinds:
            what = self._changed(workload)
            so_far = max(self._errors) if self._errors and what <= self._tested else 0.0
            error = 0.0 if self._is_proven(what) else so_far or None  # too few tests that agree prove nothing
            return law.at(workload, error)
        if self.estimate is None:
            self.missing = kinds
            return None
        estimate = self._estimate()
        if law is None:
            found = estimate.at(workload, max(self._errors) if self._errors else None)
            if not any(found.model.values()):
                return None  # there is nothing that it knows of
            before = self._before
            counted = before.predict(workload) if before is not None else None
            if before is None or before.estimate is None or counted is None:
                return found
            then = before._estimate().at(workload)
            model, hardware, processed = map(_by_ratio, counted[:3], found[:3], then[:3])
            return StepFlop(model, hardware, processed)
        missing = self.missing = kinds - law.kinds
        own = next(iter({line[0] for line in law.model}), "fp32")
        own_lines, run, padded = (
            known + tuple((own, *line[1:]) for line in more if _kind_of(line[1]) in missing)
            for known, more in zip(law[:3], estimate[:3], strict=True)
        )
        return Law(own_lines, run, padded, kinds, is_estimate=True).at(workload)

    def _estimate(self) -> Law:
        assert self.estimate is not None
        return Law.of(self.estimate, UNIT, self.dtype)._replace(is_estimate=True)


def training_state(models: Iterable[nn.Module]) -> int:
    """Is the model still trained as it was when a step was counted? One number tells, in a fraction of a millisecond.

    It changes when parameters are frozen or unfrozen, when activation checkpointing is switched, when modules come or
    go, and when torch is told to use TF32 or not to; it is the same in every process that trains the same model in the
    same way. Left out: what forward code decides by flags of its own.

    To be called between two steps: an evaluation, and a loop that freezes one network while it trains another, put
    things back before a step is over.
    """
    modules = list(models)
    first = next((parameter for module in modules for parameter in module.parameters()), None)
    in_tf32 = " ".join(sorted(tf32_families(None if first is None else first.device)))
    flags: list[int] = []
    for module in modules:
        own = vars(module)  # asking a module for an attribute that it lacks costs microseconds, and there are hundreds
        # transformers and diffusers, timm, many others; outside of training transformers recomputes nothing
        if own.get("gradient_checkpointing") or own.get("grad_checkpointing") or own.get("use_checkpoint"):
            flags.append(2 + own["training"])
        for parameter in own["_parameters"].values():
            if parameter is not None:
                flags.append(parameter.requires_grad)
        flags.append(4)
        if own["_modules"]:
            modules += [child for child in own["_modules"].values() if child is not None]
    return crc32(bytes(flags), crc32(in_tf32.encode()))
