"""Where does a model attend, how wide are its scores, and which pairs does it let through?

The sizes of the projections around attention tell its work without knowing the heads: queries leave their projection
with heads x dim channels, and the mixed values enter the output projection with as many as they have. Grouped keys and
values change neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from flopmeter.flops.estimate.leaves import linear_sizes
from flopmeter.flops.workload import PatchWindow

Role = Literal["q", "k", "v", "kv", "qkv"]

_ROLES: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("qkv", re.compile(r"qkv|query_key_value|c_attn|att_proj")),
    ("kv", re.compile(r"kv|key_value")),
    ("q", re.compile(r"(^|_)w?q($|_)|query|^q\d*$")),
    ("k", re.compile(r"(^|_)w?k($|_)|key")),
    ("v", re.compile(r"(^|_)w?v($|_)|value")),
)
_CROSS = re.compile(r"cross|encdec|enc_dec|encoder_att|multihead_attn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The projections of one attention module."""

    roles: dict[str, Role]
    """What each linear before the scores makes, by its name; the others come after them."""
    score_width: int
    """heads x query dim: multiply-adds of one score over all heads."""
    value_width: int
    """heads x value dim."""
    has_packed_weight: bool = False
    """nn.MultiheadAttention: the projections are parameters of the module itself."""


def read_attention(module: nn.Module) -> Attention | None:
    """The attention that this module does with its own linears; None when it does none that we recognise."""
    if isinstance(module, nn.MultiheadAttention):
        return Attention(roles={}, score_width=module.embed_dim, value_width=module.embed_dim, has_packed_weight=True)
    linears = {name: sizes for name, child in module.named_children() if (sizes := linear_sizes(child))}
    is_named = "att" in type(module).__name__.lower()
    roles = {name: role for name in linears if (role := _role(name, is_named))}
    found = set(roles.values())
    if "qkv" not in found and not ("q" in found and found & {"k", "kv"}):
        return None
    if any(isinstance(child, nn.Conv1d) for child in module.children()):
        return None  # a recurrent mixer (Mamba, DeltaNet) with queries and keys: no pairs
    return _widths(module, linears, roles)


def _role(name: str, is_named: bool) -> Role | None:
    lowered = name.lower()
    if is_named and lowered == "in_proj":
        return "qkv"
    return next((role for role, pattern in _ROLES if pattern.search(lowered)), None)


def _widths(module: nn.Module, linears: dict[str, tuple[int, int]], roles: dict[str, Role]) -> Attention:
    names = list(linears)
    later = names[max(names.index(name) for name in roles) + 1 :] or names[: min(names.index(name) for name in roles)]
    queries = [linears[name][1] for name, role in roles.items() if role == "q"]
    fused = [linears[name][1] // 3 for name, role in roles.items() if role == "qkv"]
    values = linears[later[0]][0] if later else (queries or fused)[-1]
    scores = queries[-1] if queries else values
    if scores == 2 * values and not hasattr(module, "v_head_dim"):
        scores = values  # the other half of the query projection is a gate
    return Attention(roles=roles, score_width=scores, value_width=values)


def is_cross(path: str, module: nn.Module) -> bool:
    """Whether keys and values come from an encoder, by the names of the module, its parent and its class."""
    names = (*path.split(".")[-2:], type(module).__name__)
    return any(_CROSS.search(name.lower()) for name in names)


def is_causal(module: nn.Module) -> bool | None:
    """What the module says of itself; None when it is silent."""
    names = ("is_causal", "causal", "is_decoder")
    return next((said for name in names if isinstance(said := getattr(module, name, None), bool)), None)


def layer_type(module: nn.Module, config: Any, layer: int | None) -> str:
    """What the config calls the attention of this layer ("sliding_attention"), "" when it does not tell."""
    kinds = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", layer)
    if isinstance(kinds, (list, tuple)) and isinstance(index, int) and 0 <= index < len(kinds):
        return str(kinds[index])
    return ""


def window_of(module: nn.Module, config: Any, layer: int | None) -> int:
    """Keys that a token of this layer sees, itself included; 0 for all of them."""
    kind = layer_type(module, config, layer)
    slides = "sliding" in kind if kind else getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if slides else None
    window = getattr(module, "sliding_window", window)
    return window if isinstance(window, int) else 0


def patch_window_of(config: Any, layer: int | None) -> PatchWindow | None:
    """Windows of this block of a vision tower, None where it attends over a whole frame."""
    whole = getattr(config, "fullatt_block_indexes", None)
    side, patch, merge = (getattr(config, name, None) for name in ("window_size", "patch_size", "spatial_merge_size"))
    if not isinstance(whole, (list, tuple)) or layer in whole:
        return None
    if not (isinstance(side, int) and isinstance(patch, int) and isinstance(merge, int)):
        return None
    return PatchWindow(merge=merge, cells=side // patch // merge)
