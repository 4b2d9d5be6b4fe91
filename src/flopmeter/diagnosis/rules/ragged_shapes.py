"""Sizes that matmul units handle badly, or shapes that change so often that torch.compile keeps recompiling.

How we know. An observed step lists the modules whose sizes are no multiple of 8, and how many shapes the model was
given; torch.compile tells how often it compiled again. Odd sizes are judged on GPUs only: tensor cores work on tiles
of 8 to 64 numbers, and a vocabulary of 50257 makes the largest matmul of a small GPT run on the slow path. CPUs
hardly care.

What to do. Round sizes up: model.resize_token_embeddings(pad_to_multiple_of=64), hidden sizes and heads to multiples
of 64 (128 on Hopper). For shapes that change: pad lengths to a multiple (pad_to_multiple_of=64), drop the last,
smaller batch (drop_last=True), torch.compile(model, dynamic=True), or mark_dynamic the dimension. Beyond 8
recompilations torch.compile gives up on a function and runs it eagerly (torch._dynamo.config.recompile_limit).

The gain takes half of what the odd modules lose to matmuls below peak as saved (expected), none of it (low) or all of
it (high). What recompiling costs is not told from the record beyond pauses named compile.
"""

from __future__ import annotations

import math
from typing import Any

from flopmeter.columns import known, mapping
from flopmeter.diagnosis._evidence import MAX_COUNT, Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.text import percent

MIN_LOST = 0.02
"""Below, the odd modules are small."""
MIN_RECOMPILES = 8
"""torch's own limit (recompile_limit), after which it falls back to eager code."""


def check(evidence: Evidence) -> Finding | None:
    """Look for odd sizes and for recompilations."""
    facts = evidence.need_facts()
    odd = [item for item in _items(facts.get("odd_sizes")) if evidence.is_gpu]
    odd_s = _flop_share(evidence, odd) * max(evidence.seconds_or_zero("matmul_below_peak"), 0.0)
    compiled_s = evidence.pause_s("compile")
    num_recompiles = evidence.count_fact("num_recompiles") or 0.0
    lost_s = odd_s / 2 + compiled_s
    if num_recompiles < MIN_RECOMPILES and odd_s / 2 / evidence.wall_s < MIN_LOST:
        return None
    found = [f"{str(o.get('module'))[:60]}: {str(o.get('dimension'))[:20]} {str(o.get('size'))[:20]}" for o in odd[:4]]
    if num_recompiles:
        shapes = evidence.count_fact("num_shapes")
        found.append(f"compiled again {num_recompiles:.0f} times" + (f", for {shapes:.0f} shapes" if shapes else ""))
    what = "sizes that are no multiple of 8" if odd_s else "shapes that keep changing"
    return Finding(
        rule="ragged_shapes",
        title=f"{what} cost {percent(lost_s / evidence.wall_s)} of the time" if lost_s else f"{what} cost time",
        lost=lost_s / evidence.wall_s,
        evidence=tuple(found),
        advice=(
            "round vocabulary and hidden sizes up: resize_token_embeddings(pad_to_multiple_of=64)",
            "pad lengths to a multiple of 64, drop_last=True, torch.compile(model, dynamic=True)",
        ),
        gain=evidence.gain(lost_s, low_s=0.0, high_s=odd_s + compiled_s) if lost_s else None,
    )


def _items(value: Any) -> list[dict[str, Any]]:
    return [item for item in value[:10] if isinstance(item, dict)] if isinstance(value, list) else []


def _flop_share(evidence: Evidence, odd: list[dict[str, Any]]) -> float:
    """Share of the FLOPs that the odd modules do; all of them where no count names modules."""
    by_module = mapping(evidence.window.latest("count").get("by_module"))
    total = math.fsum(known(by_module.values(), MAX_COUNT))
    if not odd or not total:
        return float(bool(odd))
    names = {str(item.get("module")) for item in odd}
    return math.fsum(known((by_module.get(name) for name in names), MAX_COUNT)) / total
