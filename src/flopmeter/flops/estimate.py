"""How many FLOPs will a step take, before any step was counted?

    estimate_flops(model, (8, 2048)).model_flop

One count on shapes, within two seconds and little memory. Where that fails (sharded or quantised weights, kernels that
know no shapes, Python loops over time) the leaves of the module tree are read: every matrix once for each row that its
part of the model is given, attention by its projections, backward by what is trained. Products written out in forward
code are left out there. Where most weights belong to no leaf that is known, a rule of thumb is left. `method` says
which it was.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flopmeter.devices import product_dtype, tf32_families
from flopmeter.errors import CountError
from flopmeter.flops.count import call_arguments, count_call
from flopmeter.flops.flop_count import Convention, FlopCount, new_growth
from flopmeter.flops.workload import PROCESSED, Workload, WorkloadReader, needs_of, parameter_names, unwrap, workload_of
from flopmeter.torch_compat import Convolution

MAX_S, MAX_BYTES, MAX_OPERATORS = 2.0, 200 << 20, 300_000
LEAVES = "estimate (leaves of the module tree)"
RULE_OF_THUMB = "estimate (rule of thumb, low confidence)"
MAX_UNREAD_SHARE = 0.5
"""With more of its weights unread than this, a model's structure counts as unknown."""
_ONES: dict[str, Any] = {field.name: 1 for field in fields(Workload) if "padding" not in field.name}
UNIT = Workload(**_ONES | {"window": 0, "patch_window": None, "shape": ()})
"""What the leaves are read for: one of each."""

_POOLED = re.compile(r"(^|\.)(pooler|classifier|score|seq_relationship|cls_head)(\.|$)")
_TOWER = re.compile(r"vision|visual|image|audio|speech")
_TOP_K = ("num_experts_per_tok", "top_k", "num_selected_experts", "experts_per_token", "moe_top_k", "moe_topk")
_FUSED = re.compile(r"qkv|query_key_value|c_attn|att_proj|^in_proj$", re.IGNORECASE)
_QUERY = re.compile(r"(^|_)w?q($|_(?!a_|k))|^query|^q\d*$")
_PROJECTION = re.compile(r"(^|_)w?[qkv]($|_)|kv|query|key|value", re.IGNORECASE)
_ADDED = ("embed", "token", "cls", "class", "register", "mask", "pos", "bias", "norm", "scale")
"""Parameters that are looked up, added or concatenated, never multiplied with."""


def estimate_flops(
    model: nn.Module,
    batch: Mapping[str, Any] | tuple[Any, ...],
    training: bool = True,
    convention: Convention = "exact",
) -> FlopCount:
    """Estimate the FLOPs of one step.

    Args:
        batch: What the model is called with, or (batch size, length).
        training: Forward and backward; False for the forward pass alone.

    Raises:
        CountError: The model has no parameters, or nothing tells what it is called with.
    """
    target = unwrap(model)
    args, kwargs = call_arguments(target, batch)
    return estimate_call(target, args, kwargs, training, convention)


def estimate_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, convention: Convention
) -> FlopCount:
    """`estimate_flops` for the call `model(*args, **kwargs)`."""
    try:
        count = count_call(model, args, kwargs, training, convention, may_run=False, limit=Limit())
        return replace(count, method=f"estimate (counted on {count.method})")
    except CountError as error:
        why = f"It could not be counted on shapes: {error}"
    reader = WorkloadReader(needs_of(model), models=[model])
    return read_leaves(model, training, convention, workload_of(reader.bind(args, kwargs), reader.needs), (why,))


class Limit:
    """Ends a count on shapes that takes too long, or too much memory. Called after each operator."""

    def __init__(self) -> None:
        self._end_s = 0.0
        self._num_operators = 0
        self._start_bytes = _resident_bytes()

    def __call__(self) -> None:
        self._num_operators += 1
        if self._num_operators == 1:  # torch has loaded what it needs for shapes by now
            self._end_s = time.thread_time() + MAX_S
        if self._num_operators % 64:
            return
        if time.thread_time() > self._end_s or self._num_operators > MAX_OPERATORS:
            raise CountError(f"the count on shapes takes more than {MAX_S:g} s")
        if _resident_bytes() - self._start_bytes > MAX_BYTES:
            raise CountError(f"the count on shapes takes more than {MAX_BYTES >> 20} MB")


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except (OSError, ValueError, IndexError):  # no Linux
        return 0


def read_leaves(
    model: nn.Module,
    training: bool = True,
    convention: Convention = "exact",
    workload: Workload = UNIT,
    left_out: tuple[str, ...] = (),
) -> FlopCount:
    """What the module tree says of a step with this workload; nothing is called.

    Raises:
        CountError: The model has no parameters.
    """
    model = unwrap(model)
    num_parameters = sum(prod(_shape(p)) for p in model.parameters())
    if not num_parameters:
        raise CountError(f"{type(model).__name__} has no parameters: there is nothing to estimate its FLOPs from")
    told = "What is neither a product with a weight of a layer nor its attention is left out."
    method, lines = LEAVES, list[Line]()
    try:
        num_unread = _read_tree(model, lines)
    except Exception as error:  # noqa: BLE001 - attributes of a user's model may raise anything; the reason is told
        num_unread, left_out = (
            num_parameters,
            (*left_out, f"Its modules cannot be read: {type(error).__name__}: {error}"),
        )
    if not lines or num_unread > MAX_UNREAD_SHARE * num_parameters:
        config = getattr(model, "config", None)
        factor = 2.5 if any(hasattr(config, name) for name in ("vision_config", "audio_config")) else 2.0
        told = f"{factor:g} FLOPs a parameter and token, three times that in training."
        field = "tokens" if _is_text(model) else "samples"
        method, lines = RULE_OF_THUMB, [(_dtype(model), field, factor * num_parameters, 2, 0)]
    phases, growth = defaultdict[str, float](float), new_growth()
    for dtype, field, forward, num_grads, num_reruns in lines:
        processed = PROCESSED.get(field, field)
        parts = {"forward": forward, "backward": training * num_grads * forward}
        again = training * num_reruns * forward
        rows, run = getattr(workload, field), getattr(workload, processed)
        own, own_rows = (field, rows) if convention == "exact" else (processed, run)
        for name, part in {**parts, "recompute": again}.items():
            phases[name] += part * own_rows
            if name in growth:
                growth[name][dtype][own] += part * own_rows
        growth["exact"][dtype][field] += sum(parts.values()) * rows
        growth["full"][dtype][processed] += sum(parts.values()) * run
        growth["hardware"][dtype][processed] += (sum(parts.values()) + again) * run
    others = {"workload": workload, "needs": needs_of(model), "method": method, "left_out": (*left_out, told)}
    return FlopCount.of(phases, growth, convention, coverage=None, **others)


Line = tuple[str, str, float, int, int]
"""A product: its dtype, the field that its rows grow with, FLOPs of one unit of it, gradients, reruns."""


def _read_tree(root: nn.Module, lines: list[Line]) -> int:
    """Walk the modules in their order; gives how many weights belong to nothing that is known."""
    modules, rows = dict(root.named_modules()), _Rows(root)
    config: Any = getattr(root, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    top_k = next((k for name in _TOP_K if isinstance(k := getattr(text, name, None), int)), 1)
    is_rerun = any(getattr(m, "gradient_checkpointing", False) and m.training for m in modules.values())
    num_unread, needs_grad, seen = 0, False, set[int]()
    for path, module in modules.items():
        kind = type(module).__name__.lower()
        is_table, is_conv = isinstance(module, nn.EmbeddingBag) or "embed" in kind, isinstance(module, Convolution)
        inside = [name for name in rows.lists if path.startswith(name)]
        experts = next((name for name in inside if name.endswith("experts.")), "")
        own = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in own.items():
            shape, sizes = _shape(parameter), _linear_sizes(module) if name == "weight" else None
            if (len(shape) < 2 and not sizes) or is_table or any(word in name for word in _ADDED):
                continue
            if id(parameter) in seen and "head" not in path:
                continue  # the same weight under a second name; a tied head multiplies with it all the same
            seen.add(id(parameter))
            if is_conv:
                flop = 2 * prod(shape) / (prod(module.stride) if module.transposed else 1)
            elif len(shape) == 3 and "expert" in f"{path}.{kind}":
                flop = 2.0 * top_k * prod(shape[1:])
            elif sizes or (len(shape) == 2 and "norm" not in kind):
                flop = 2.0 * prod(sizes or shape) * (top_k / rows.lists[experts] if experts else 1)
            else:
                num_unread += prod(shape)
                continue
            field, per = rows.of(path, module, sizes[0] if sizes else shape[1])
            dtype = _dtype_of(parameter, "convolution" if is_conv else "matmul") or _dtype(root)
            again = int(is_rerun and bool(inside))
            lines.append((dtype, field, flop / per, parameter.requires_grad + needs_grad, again))
            needs_grad = needs_grad or parameter.requires_grad
        needs_grad = needs_grad or any(p.requires_grad for p in own.values())
        if width := _attention_width(module):
            is_trained = needs_grad or any(p.requires_grad for p in module.parameters())
            field, per = rows.pairs(path, module)
            lines.append((_dtype(root), field, 2 * width / per, 2 * is_trained, int(is_rerun and bool(inside))))
    return num_unread


def _attention_width(module: nn.Module) -> int:
    """Multiply-adds for each pair that a module's queries and keys make; 0 where it has none, or a recurrence of them.

    Queries leave their projection with heads x dim channels, the mixed values enter the output projection with theirs.
    """
    if isinstance(module, nn.MultiheadAttention):
        return 2 * int(module.embed_dim)
    sizes = {name: own for name, child in module._modules.items() if child and (own := _linear_sizes(child))}
    queries, fused = ([name for name in sizes if pattern.search(name)] for pattern in (_QUERY, _FUSED))
    if not (queries or fused) or any(isinstance(child, nn.Conv1d) for child in module.children()):
        return 0
    others = [name for name in sizes if name not in fused and not _PROJECTION.search(name)]
    value: int = sizes[others[-1]][0] if others else sizes[(queries or fused)[-1]][1] // (1 if queries else 3)
    return value + (sizes[queries[-1]][1] if queries else value)


class _Rows:
    """What the rows of a layer grow with, and how much of it makes one row."""

    def __init__(self, root: nn.Module) -> None:
        self._needs = needs_of(root)
        tables = [m for m in root.modules() if isinstance(m, nn.Embedding)]
        sizes = [own for m in root.modules() if (own := _linear_sizes(m))]
        self._config = getattr(root, "config", None)
        self._predicts_tokens = any(own[1] == table.num_embeddings for table in tables for own in sizes)
        modules, vision = dict(root.named_modules()), getattr(getattr(root, "config", None), "vision_config", None)
        self.lists = {f"{path}.": len(m) for path, m in modules.items() if isinstance(m, nn.ModuleList)}
        self._is_text = _is_text(root)
        towers = [m for path, m in modules.items() if _TOWER.search(path.rpartition(".")[2])]
        self._has_patches = any("grid_thw" in parameter_names(m) for m in towers)
        self._merged = getattr(vision, "spatial_merge_size", 1) ** 2
        self._convolves = any(isinstance(m, Convolution) for m in modules.values())
        self._per: dict[str, float] = {}
        """Values that make a row, by the tower that is given them."""

    def of(self, path: str, module: nn.Module, width: int) -> tuple[str, float]:
        """Of one layer, in the order of the layers."""
        tower = next((part for part in path.split(".") if _TOWER.search(part)), "")
        if self._is_text and not tower:
            is_decoder = self._needs.has_decoder and not re.search(r"(^|\.)encoder(\.|$)", path)
            return "samples" if _POOLED.search(path) else "decoder_tokens" if is_decoder else "tokens", 1
        if self._is_text and self._has_patches:
            return "patches", self._merged if "merger" in path else 1
        per = self._per.setdefault(tower, module.in_channels if isinstance(module, Convolution) else width)
        if isinstance(module, Convolution):
            stride = 1 / prod(module.stride) if module.transposed else prod(module.stride)
            per = self._per[tower] = per * stride
        elif self._convolves and not any(path.startswith(name) for name in self.lists):
            return "samples", 1  # a head, after all positions were pooled
        return "values", per

    def pairs(self, path: str, module: nn.Module) -> tuple[str, float]:
        """What the pairs of an attention grow with, and how much of it makes one pair."""
        field, per = self.of(path, module, 0)
        if not field.endswith("tokens"):
            block = re.search(r"blocks\.(\d+)\.", path)
            is_cut = self._needs.patch_window and block and int(block[1]) not in self._needs.whole_blocks
            names = {"patches": "patch_pairs_window" if is_cut else "patch_pairs", "values": "values_squared"}
            return names.get(field, field), per**2
        said = [getattr(module, name, None) for name in ("is_causal", "causal", "is_decoder")]
        is_torchs = isinstance(module, nn.MultiheadAttention)
        is_causal = next((own for own in said if isinstance(own, bool)), self._predicts_tokens and not is_torchs)
        prefix, name = field.removesuffix("tokens"), "pairs_causal" if is_causal else "pairs_full"
        if prefix and re.search(r"cross|encdec|encoder_att|multihead_attn", path.lower()):
            return "cross_pairs", 1
        kinds, layer = getattr(self._config, "layer_types", None), getattr(module, "layer_idx", None)
        slides = not kinds or not isinstance(layer, int) or "sliding" in kinds[layer]
        return "pairs_window" if self._needs.window and slides else f"{prefix}{name}", 1


def _is_text(model: nn.Module) -> bool:
    return "input_ids" in parameter_names(model) or needs_of(model).reads in ("text", "sequence")


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The whole parameter's shape, also where DeepSpeed has left only a stub of it here."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer under any name: LoRA's, quantised, Conv1D."""
    own = vars(module)
    inputs, outputs = own.get("in_features", own.get("nx")), own.get("out_features", own.get("nf"))
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


def _dtype(model: nn.Module) -> str:
    return next((name for p in model.parameters() if (name := _dtype_of(p))), "float32")


def _dtype_of(parameter: torch.Tensor, family: str = "matmul") -> str:
    """What products with it run in; empty for the storage types of quantised weights."""
    if not parameter.dtype.is_floating_point:
        return ""
    return product_dtype(str(parameter.dtype).removeprefix("torch."), family, tf32_families(parameter.device))
