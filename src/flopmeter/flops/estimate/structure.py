"""What does a module say about how it is used: its input, its experts, how often it is called, what is done again?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Literal

from torch import nn

from flopmeter.flops.arguments import Reads
from flopmeter.flops.estimate.amounts import Source
from flopmeter.flops.estimate.leaves import is_embedding, read_leaf, shape_of
from flopmeter.torch_compat import Convolution

_TOP_K = (
    "top_k",
    "num_experts_per_tok",
    "num_selected_experts",
    "experts_per_token",
    "moe_top_k",
    "moe_topk",
    "n_activated_experts",
)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DENSE_INPUTS = ("pixel", "input_features", "input_values", "image", "video", "audio", "waveform", "spectrogram")
_TOWER_WORDS = ("vision", "visual", "image", "audio", "speech")
_TOKEN_WORDS = ("token", "cls", "class", "register")
_NO_TOKEN_WORDS = ("mask", "pos")
_TURNING = frozenset(
    {"permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "rearrange", "t", "T", "mT"}
)


def input_of(module: nn.Module) -> Source | None:
    """What a module is called with, by the names in its forward signature; None where they do not tell."""
    names = _parameter_names(type(module).forward)
    if not names:
        return None
    if names[0] == "input_ids":
        return "tokens"
    if any(name.startswith(("grid_thw", "image_grid", "grid_hw")) for name in names):
        return "patches"
    return "dense" if names[0].startswith(_DENSE_INPUTS) else None


def starts_with_values(root: nn.Module) -> bool:
    """Whether its first product is a convolution over something else than looked-up tokens: labels may be those."""
    first = next((module for module in root.modules() if (leaf := read_leaf(module)) and leaf.products), None)
    if not isinstance(first, Convolution):
        return False
    widths = {embedding_width(module) for module in root.modules() if is_embedding(module)}
    return not widths & {first.in_channels, first.kernel_size[-1]}


def reads_of(root: nn.Module, attends: bool) -> Reads:
    """What a model takes when no name tells: what its first product is done with."""
    if starts_with_values(root):
        return "values"
    is_ordered = attends or any(isinstance(module, (nn.RNNBase, nn.RNNCellBase)) for module in root.modules())
    if any(is_embedding(module) for module in root.modules()):
        return "text" if is_ordered else "ids"
    return "sequence" if is_ordered else "values"


def is_sequence_first(root: nn.Module) -> bool:
    """Whether a sequence comes before the batch: torch's own recurrent and transformer layers say so.

    Models whose code turns dimensions around, or has convolutions before them, are taken as batch first.
    """
    said: list[bool] = []
    for module in root.modules():
        if isinstance(module, Convolution) or _turns(type(module).forward):
            return False
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            module = module.self_attn
        elif not isinstance(module, nn.RNNBase) and module is not root:
            continue
        if isinstance(own := getattr(module, "batch_first", None), bool):
            said.append(own)
    return bool(said) and not any(said)


@lru_cache(maxsize=4096)
def _turns(forward: Callable[..., Any]) -> bool:
    code = getattr(forward, "__code__", None)
    is_torch = getattr(forward, "__module__", "").startswith("torch.")
    return not is_torch and code is not None and not _TURNING.isdisjoint(code.co_names)


@lru_cache(maxsize=4096)
def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def is_tower(name: str, module: nn.Module) -> bool:
    """Whether a part of the model sees or hears by itself, judged by its name and by having layers."""
    if not any(word in name for word in _TOWER_WORDS):
        return False
    return any(isinstance(part, nn.ModuleList) for part in module.modules())


def first_width(module: nn.Module) -> int:
    """Width that a module's first product wants to be given; 0 when there is none."""
    leaf = read_leaf(module)
    if leaf is not None and leaf.products:
        return leaf.inputs
    if is_embedding(module):
        return 0
    for child in module.children():
        if width := first_width(child):
            return width
    return 0


def extra_tokens(module: nn.Module, width: int) -> int:
    """Class and register tokens that a module keeps as parameters, (1, k, width) or (width,)."""
    total = 0
    for name, parameter in module.named_parameters(recurse=False):
        if any(word in name for word in _NO_TOKEN_WORDS) or not any(word in name for word in _TOKEN_WORDS):
            continue
        shape = shape_of(parameter)
        if shape[-1] == width:
            total += shape[-2] if len(shape) > 1 else 1
    return total


def stacked_experts(name: str, module: nn.Module, config: Any) -> list[nn.Parameter]:
    """Parameters of (experts, a, b), all experts in one."""
    stacked = [p for p in module._parameters.values() if p is not None and len(shape_of(p)) == 3]
    if not stacked:
        return []
    num_experts = _first_int((module, config), _NUM_EXPERTS)
    is_named = "expert" in name or "expert" in type(module).__name__.lower()
    return [p for p in stacked if is_named or (num_experts and shape_of(p)[0] == num_experts)]


def is_expert_list(name: str, module: nn.Module) -> bool:
    """A list of expert MLPs, of which a token passes the top k."""
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1
    return is_list and "expert" in name and "shared" not in name


def top_k(owners: Iterable[nn.Module], config: Any) -> int | None:
    """Experts per token: as the modules around them say, or the router beside them, or the config."""
    for owner in owners:
        if found := _first_int((owner, *owner.children()), _TOP_K):
            return found
    return _first_int((config,), _TOP_K)


def calls_of_stack(module: nn.Module, config: Any) -> float:
    """How often each item of a stack is called: more than once where layers share their weights in groups."""
    layers, groups = (getattr(config, name, None) for name in ("num_hidden_layers", "num_hidden_groups"))
    if isinstance(module, nn.ModuleList) and isinstance(layers, int) and groups == len(module):
        return layers / len(module)
    return 1


def reruns(module: nn.Module, is_layer: bool) -> Literal["nothing", "all", "all but the last product"]:
    """What activation checkpointing does again: the non-reentrant kind stops before the product that nothing needs."""
    if type(module).__name__ == "CheckpointWrapper":
        return "all"
    function = getattr(module, "_gradient_checkpointing_func", None)
    if not is_layer or function is None or not getattr(module, "gradient_checkpointing", False):
        return "nothing"
    is_reentrant = getattr(function, "keywords", {}).get("use_reentrant", True)
    return "all" if is_reentrant else "all but the last product"


def is_encoder_decoder(module: nn.Module, config: Any) -> bool:
    """Whether the child `decoder` reads text of its own and attends to what `encoder` made."""
    says_so = getattr(config, "is_encoder_decoder", False) or isinstance(module, nn.Transformer)
    return bool(says_so) and "encoder" in module._modules


def embedding_width(module: nn.Module) -> int:
    """Channels that a look-up gives."""
    weight = module._parameters["weight"]
    assert weight is not None
    return shape_of(weight)[-1]


def is_position_like(name: str) -> bool:
    """Parameters that are added or concatenated, never multiplied with."""
    return any(word in name for word in (*_TOKEN_WORDS, *_NO_TOKEN_WORDS, "embed", "bias", "norm", "scale", "lora_"))


def _first_int(holders: Iterable[Any], names: Iterable[str]) -> int | None:
    for holder in holders:
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
