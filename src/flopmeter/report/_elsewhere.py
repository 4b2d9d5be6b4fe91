"""What would other people's counting rules call this run's MFU?

The rules of `conventions` need the matmul weights P, the parameters N and the width of attention. A counted step tells
them: FLOPs that grow with tokens are 6P a token, those that grow with causal pairs 12LHd a pair. Both must come out as
whole numbers for the step's tokens and sequences, and the backward pass must cost twice the forward pass; else the
model is frozen in parts, padded, packed, or no plain decoder, and no figure is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flopmeter.conventions import CONVENTIONS, NAMED, Architecture
from flopmeter.metrics import COUNTS
from flopmeter.record import Run
from flopmeter.text import number

TOLERANCE = 1e-6


class NoRuleError(Exception):
    """The run is not one that the published rules describe; the text says why."""


def elsewhere(run: Run, mfu: float | None) -> dict[str, Any]:
    """The run's MFU under the named conventions, or why there is none."""
    rows = [
        {"name": name, **{key: getattr(CONVENTIONS[name], key) for key in ("formula", "meaning", "used_by")}}
        for name in NAMED
    ]
    try:
        if mfu is None:
            raise NoRuleError("the run's MFU is unknown")
        arch, seq = _decoder(run)
    except NoRuleError as reason:
        return {"reason": str(reason), "rows": [{**row, "mfu": None} for row in rows]}
    exact = CONVENTIONS["exact"].model_flop_per_token(arch, seq)
    ratios = [CONVENTIONS[row["name"]].model_flop_per_token(arch, seq) / exact for row in rows]
    return {"reason": "", "rows": [{**row, "mfu": mfu * ratio} for row, ratio in zip(rows, ratios, strict=True)]}


def _decoder(run: Run) -> tuple[Architecture, int]:
    """The decoder that a counted step shows, and its sequence length."""
    count = run.last("count")
    if not count:
        raise NoRuleError("no step was counted")
    if count.get("convention") != "exact":
        raise NoRuleError("the run counts under the convention full")
    if run.header.world_size != 1:
        raise NoRuleError("the rules are applied to runs of one rank only")
    forward, backward = number(count.get("forward_flop")), number(count.get("backward_flop"))
    if not forward or not backward or abs(backward / forward - 2) > 0.01:
        raise NoRuleError(
            "the backward pass does not cost twice the forward pass, as where parts of the model are frozen"
        )
    tokens, samples = _workload(run, number(count.get("model_flop")))
    growth = _growth(count.get("growth"))
    seq = _whole(tokens / samples, "sequences differ in length, or are padded")
    pairs = samples * seq * (seq + 1) / 2
    weights = _whole(growth.get("tokens", 0.0) / (6 * tokens), "the work per token is not 6 FLOPs a weight")
    width = _whole(growth.get("pairs_causal", 0.0) / (12 * pairs), "attention is not plain and causal")
    params = run.header.num_parameters
    if not (weights and width and params > 0):
        raise NoRuleError("a decoder's weights and attention cannot be told from the count")
    # One head as wide as all of them: the rules ask for the product of layers, heads and channels only.
    arch = Architecture(
        layers=1, hidden=1, heads=1, ffn=1, vocab=1, head_dim=width, params=params, matmul_params=weights
    )
    return arch, seq


def _growth(growth: Any) -> dict[str, float]:
    """FLOPs by what they grow with, over all dtypes; only tokens and causal pairs are in the rules."""
    totals: dict[str, float] = {}
    exact = growth.get("exact") if isinstance(growth, Mapping) else None
    for drivers in exact.values() if isinstance(exact, Mapping) else ():
        for driver, value in drivers.items() if isinstance(drivers, Mapping) else ():
            totals[driver] = totals.get(driver, 0.0) + (number(value) or 0.0)
    others = sorted(driver for driver, flop in totals.items() if flop and driver not in ("tokens", "pairs_causal"))
    if others:
        raise NoRuleError(f"the model has work that the rules do not describe ({', '.join(others)[:80]})")
    return totals


def _workload(run: Run, model_flop: float | None) -> tuple[int, int]:
    """Tokens and samples of a measured step that did just the counted work."""
    flop, amounts = run.column("perf/model_flop"), [run.amount(name) for name in COUNTS]
    for place in sorted(run.marks, reverse=True):
        if model_flop and abs(flop[place] / model_flop - 1) < TOLERANCE:
            tokens, processed, samples = (amount[place] for amount in amounts)
            if abs(processed - tokens) > TOLERANCE * tokens:
                raise NoRuleError("the batches are padded")
            counted = _whole(tokens, "tokens are unknown"), _whole(samples, "samples are unknown")
            if all(counted):
                return counted
    raise NoRuleError("the counted step's tokens and samples are not in the record")


def _whole(value: float, otherwise: str) -> int:
    if not 0 <= value < 1e15 or abs(value - round(value)) > TOLERANCE * max(value, 1.0):
        raise NoRuleError(otherwise)
    return round(value)
