"""Attention writes the whole table of scores to memory, where a fused kernel would not.

How we know. An observed step saw a softmax over a length x length table between two batched matmuls, which is
attention spelled out. Its cost comes from the sampled step: softmax, masking, scaling and copying of the scores,
forward and backward. The batched matmuls are named beside them.

What to do. Call torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) instead of softmax(q @ k.T)
@ v; in transformers load the model with attn_implementation="sdpa" (or "flash_attention_2" on a GPU that has it).
Pass is_causal=True rather than a mask tensor where you can: a mask of your own may rule out the flash kernel. Only
code that reads the attention weights needs them spelled out.

The gain takes all work on the scores as saved and none of their matmuls (expected: a causal kernel skips the masked
half, but computes the scores once more in the backward pass), softmax and masking by half (low), or all work on the
scores and half of the matmuls (high).
"""

from __future__ import annotations

from flopmeter.columns import mapping
from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.text import percent

EXPLAINS = ("memory_bound",)
"""Reading and writing the scores is what the memory is busy with."""
MIN_SHARE = 0.03
"""Below, sequences are too short for it to matter."""
_SCORES = r"(?<!log_)softmax|masked_fill|::where|::tril|::triu"
_PASSES = r"::(mul|div|add|copy)_?$"
MAX_PASSES = 1.5
"""Scaling, adding the mask and copying take at most so many times as long as softmax and masking do; what exceeds that
is other code's."""
_PRODUCTS = r"::(bmm|baddbmm)"


def check(evidence: Evidence) -> Finding | None:
    """Look for attention that is spelled out."""
    seen = mapping(evidence.need_facts().get("eager_attention"))
    if not seen:
        return None
    scores_s = evidence.top_s(_SCORES) * evidence.num_steps
    passes_s = min(evidence.top_s(_PASSES) * evidence.num_steps, MAX_PASSES * scores_s)
    products_s = evidence.top_s(_PRODUCTS) * evidence.num_steps
    saved_s = scores_s + passes_s
    share = saved_s / evidence.wall_s
    if evidence.sampled is not None and share < MIN_SHARE:
        return None
    modules = seen.get("modules")
    places = ", ".join(str(name)[:60] for name in modules[:3]) if isinstance(modules, list) else ""
    return Finding(
        rule="eager_attention",
        title="attention is spelled out instead of fused"
        + (f", which costs {percent(share)} of the time" if evidence.sampled else ""),
        lost=share,
        evidence=(
            f"{str(seen.get('calls'))[:20]} softmaxes over {str(seen.get('length'))[:20]} x "
            f"{str(seen.get('length'))[:20]} scores in a step{': ' + places if places else ''}",
            f"scores {percent(share)}, their matmuls {percent(products_s / evidence.wall_s)} of the time"
            if evidence.sampled
            else "no step was sampled, so what it costs is not known",
        ),
        advice=(
            "call torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
            'in transformers: from_pretrained(..., attn_implementation="sdpa")',
        ),
        gain=evidence.gain(saved_s, low_s=scores_s / 2, high_s=saved_s + products_s / 2) if evidence.sampled else None,
    )
