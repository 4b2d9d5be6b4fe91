"""What would other people's counting rules call this run's MFU?

The rules of `conventions` need the matmul weights P, the parameters N and the width of attention. A counted step tells
them: FLOPs that grow with tokens are 6P a token, those that grow with causal pairs 12LHd a pair. Both must come out as
whole numbers for the step's tokens and sequences, and the backward pass must cost twice the forward pass; else the
model is frozen in parts, padded, packed, or no plain decoder, and no figure is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from flopmeter.columns import mapping
from flopmeter.conventions import CONVENTIONS, NAMED, Architecture
from flopmeter.metrics import COUNTS
from flopmeter.record import Run
from flopmeter.text import number

TOLERANCE = 1e-6
MOST_PARAMETERS = 2.5
"""Times the matmul weights. Above, the model has experts: a token passes through some of its weights alone."""


class NoRuleError(Exception):
    """The run is not one that the published rules describe; the text says why."""


class OtherName(Struct, frozen=True, kw_only=True):
    """The run's MFU under the counting rule of a paper or framework."""

    name: str
    short_name: str
    """Whose rule it is, in a word; empty for rules that nobody is known by."""
    mfu: float
    formula: str
    meaning: str
    used_by: str


def elsewhere(run: Run, mfu: float | None) -> tuple[tuple[OtherName, ...], str]:
    """The run's MFU under the named conventions; or none, and why."""
    try:
        if mfu is None:
            raise NoRuleError("the run's MFU is unknown")
        arch, seq = _decoder(run)
    except NoRuleError as reason:
        return (), str(reason)
    exact = CONVENTIONS["exact"].model_flop_per_token(arch, seq)
    return tuple(
        OtherName(
            name=name,
            short_name=_SHORT_NAMES.get(name, ""),
            mfu=mfu * CONVENTIONS[name].model_flop_per_token(arch, seq) / exact,
            **{key: getattr(CONVENTIONS[name], key) for key in ("formula", "meaning", "used_by")},
        )
        for name in NAMED
    ), ""


_SHORT_NAMES = {"palm": "PaLM", "6p_full": "torchtitan", "6p_causal": "Megatron", "6n": "6N"}


def _decoder(run: Run) -> tuple[Architecture, int]:
    """The decoder that a counted step shows, and its sequence length."""
    count = run.last("count")
    if not count:
        raise NoRuleError("no step was counted")
    if count.get("convention") != "exact":
        raise NoRuleError("the run counts under the convention full")
    forward, backward = number(count.get("forward_flop")), number(count.get("backward_flop"))
    if not forward or not backward or abs(backward / forward - 2) > 0.01:
        raise NoRuleError(
            "the backward pass does not cost twice the forward pass, as where parts of the model are frozen"
        )
    tokens, samples, scale = _workload(run, count)
    growth = _growth(count.get("growth"))
    seq = _whole(tokens / samples, "sequences differ in length, or are padded")
    pairs = samples * seq * (seq + 1) / 2
    weights = _whole(scale * growth.get("tokens", 0.0) / (6 * tokens), "the work per token is not 6 FLOPs a weight")
    width = _whole(scale * growth.get("pairs_causal", 0.0) / (12 * pairs), "attention is not plain and causal")
    params = run.header.num_parameters
    if not (weights and width and params > 0):
        raise NoRuleError("a decoder's weights and attention cannot be told from the count")
    # A decoder holds its matmul weights, at most as many in an embedding, and a little more.
    if not weights <= params <= MOST_PARAMETERS * weights:
        raise NoRuleError("the parameters on record are a part of the model, or more than a token passes through")
    # One head as wide as all of them: the rules ask for the product of layers, heads and channels only.
    arch = Architecture(
        layers=1, hidden=1, heads=1, ffn=1, vocab=1, head_dim=width, params=params, matmul_params=weights
    )
    return arch, seq


def _growth(growth: Any) -> dict[str, float]:
    """FLOPs by what they grow with, over all dtypes; only tokens and causal pairs are in the rules."""
    totals: dict[str, float] = {}
    for drivers in mapping(mapping(growth).get("exact")).values():
        for driver, value in mapping(drivers).items():
            totals[driver] = totals.get(driver, 0.0) + (number(value) or 0.0)
    others = sorted(driver for driver, flop in totals.items() if flop and driver not in ("tokens", "pairs_causal"))
    if others:
        raise NoRuleError(f"the model has work that the rules do not describe ({', '.join(others)[:80]})")
    return totals


def _workload(run: Run, count: Mapping[str, Any]) -> tuple[int, int, float]:
    """Tokens and samples of the counted step, of all ranks, and how many times rank 0's FLOPs they stand for."""
    flop, step_s = run.column("perf/model_flop"), run.column("perf/step_time")
    rates = [run.column(f"perf/{name}_per_second") for name in COUNTS]
    model_flop, is_one_rank = number(count.get("model_flop")), run.header.world_size == 1
    for place in sorted(run.marks, reverse=True):
        scale = flop[place] / model_flop if model_flop else 0.0
        if abs(scale - 1) < TOLERANCE if is_one_rank else run.step[place] == count.get("after_step") and scale > 0:
            tokens, processed, samples = (rate[place] * step_s[place] for rate in rates)
            if abs(processed - tokens) > TOLERANCE * tokens:
                raise NoRuleError("the batches are padded")
            counted = _whole(tokens, "tokens are unknown"), _whole(samples, "samples are unknown")
            if all(counted):
                return *counted, scale
    raise NoRuleError("the counted step's tokens and samples are not in the record")


def _whole(value: float, otherwise: str) -> int:
    if not 0 <= value < 1e15 or abs(value - round(value)) > TOLERANCE * max(value, 1.0):
        raise NoRuleError(otherwise)
    return round(value)
