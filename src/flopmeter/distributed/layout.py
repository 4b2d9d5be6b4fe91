"""Which ranks do the same work, and which see the same tokens?

A token counts once, however many ranks work on it. Ranks along a tensor- or pipeline-parallel dimension of the device
mesh share their tokens, so only the one at coordinate 0 counts them. How a dimension is recognised, in this order:

1. by its name (tp, tensor, pp, pipeline, model, ...: shared; dp, fsdp, replicate, shard, ...: not);
2. FSDP2's own dimensions are data-parallel;
3. any other dimension is model-parallel when a parameter is sharded over it.

Context-parallel ranks (cp) count what they are given: torch's `context_parallel` cuts the sequence before the model is
called, so each rank sees its own slice. Where a loop hands every rank the whole sequence, or shares tokens in a way
that no mesh shows (Megatron's groups), `monitoring.distributed.data_parallel_size` says how many groups there are.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flopmeter.torch_compat import root_mesh

SHARED_NAMES = {"tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel", "pp", "pipe", "pipeline"}
OWN_NAMES = {
    "dp", "data", "data_parallel", "fsdp", "shard", "replicate", "dp_shard", "dp_replicate", "cp", "context", "ep",
    "expert",
}  # fmt: skip
MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """This rank's place in the job."""

    counts_tokens: bool
    """Whether its tokens are its own to count."""
    num_sharing: int
    """Ranks that work on the same tokens, itself included."""
    digest: str
    """The same on two ranks whose steps take the same FLOPs for the same batch, as far as shapes can tell."""
    is_uneven: bool
    """Whether the work depends on where a router sends tokens: then no rank's count holds for another."""
    num_split: int = 1
    """Parts that its parameters are split into and computed with: an estimate that reads whole shapes gives all."""
    note: str = ""
    """What makes the job's FLOPs less than certain."""


def layout_of(model: nn.Module | None, rank: int, world_size: int, data_parallel_size: int | None = None) -> Layout:
    """Read the model's parameters and their meshes; touches no process group and no device."""
    dims = list(_shared_dims(model)) if model is not None else []
    num_sharing = math.prod(dim.size for dim in dims)
    counts = all(dim.coordinate == 0 for dim in dims)
    if data_parallel_size is not None:
        num_sharing = max(1, world_size // data_parallel_size)
        counts = rank % num_sharing == 0
    names = [name for name, _ in model.named_parameters()] if model is not None else []
    return Layout(
        counts_tokens=counts,
        num_sharing=num_sharing,
        digest=_digest(model) if model is not None else "",
        is_uneven=any("expert" in name for name in names),
        num_split=math.prod(dim.size for dim in dims if dim.splits),
        note=_note(model) if dims and model is not None else "",
    )


@dataclass(frozen=True, slots=True)
class _Dim:
    name: str
    size: int
    coordinate: int
    splits: bool = False


def _shared_dims(model: nn.Module) -> Iterator[_Dim]:
    """Dimensions of the meshes along which ranks work on the same tokens."""
    seen: set[tuple[str, int]] = set()
    for parameter in model.parameters():
        mesh = mesh_of(parameter)
        for number, dim in enumerate(_dims(mesh) if mesh is not None else ()):
            key = (dim.name, number if not dim.name else -1)
            if key not in seen and dim.size > 1 and _is_shared(model, dim.name, number):
                seen.add(key)
                yield replace(dim, splits=True)
    # The mesh that a parameter's mesh was cut from also shows dimensions without a trace in the parameters (pp).
    first = next((mesh for p in model.parameters() if (mesh := mesh_of(p)) is not None), None)
    root = root_mesh(first) if first is not None else None
    for dim in _dims(root) if root is not None and root.mesh_dim_names else ():
        if (dim.name, -1) not in seen and dim.name in SHARED_NAMES and dim.size > 1:
            seen.add((dim.name, -1))
            yield dim


def _dims(mesh: Any) -> list[_Dim]:
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    coordinates = mesh.get_coordinate() or [0] * mesh.ndim
    return [_Dim(name, mesh.size(i), coordinates[i]) for i, name in enumerate(names)]


def _is_shared(model: nn.Module, name: str, number: int) -> bool:
    if name in SHARED_NAMES or name in OWN_NAMES:
        return name in SHARED_NAMES
    if number < _num_fsdp_dims(model):
        return False
    meshes = ((p, mesh_of(p)) for p in model.parameters())
    placed: list[Any] = [p for p, mesh in meshes if mesh is not None and mesh.ndim > number]
    return any(p.placements[number].is_shard() for p in placed)


def _num_fsdp_dims(model: nn.Module) -> int:
    """FSDP2's dimensions come first in a parameter's mesh. The names are private: without them there are none."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        group = getattr(state(), "_fsdp_param_group", None) if state is not None else None
        mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
        if mesh is not None:
            return int(mesh.ndim)
    return 0


def _digest(model: nn.Module) -> str:
    """FSDP2 gathers parameters before it computes: their whole shape counts; other shards are computed with as such."""
    has_fsdp = _num_fsdp_dims(model) > 0
    digest = hashlib.sha1(type(model).__name__.encode(), usedforsecurity=False)
    parameters: Iterator[tuple[str, Any]] = model.named_parameters()
    for name, parameter in parameters:
        shape: object = tuple(parameter.shape)
        if mesh_of(parameter) is not None:
            shape = (shape, str(parameter.placements)) if has_fsdp else tuple(parameter._local_tensor.shape)
        digest.update(f"{name} {shape} {parameter.dtype} {parameter.requires_grad}\n".encode())
    return digest.hexdigest()[:16]


def _note(model: nn.Module) -> str:
    """Matrices that every tensor-parallel rank holds in full may be work that is done more than once."""
    linears: dict[str, Any] = {
        path: module.weight for path, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    whole = [
        path
        for path, weight in linears.items()
        if mesh_of(weight) is None or not any(placement.is_shard() for placement in weight.placements)
    ]
    if not whole:
        return ""
    named = ", ".join(whole[:MAX_NAMED]) + (", ..." if len(whole) > MAX_NAMED else "")
    return (
        f"{len(whole)} of {len(linears)} linear layers are not split over the model-parallel ranks ({named}): if each "
        "of these ranks runs them on the whole batch, the job's FLOPs hold that work once per rank"
    )


def mesh_of(parameter: torch.Tensor) -> Any:
    """The device mesh that a parameter is spread over, or None. Importing DTensor takes as long as much of torch."""
    tensors = sys.modules.get("torch.distributed.tensor")
    is_spread = tensors is not None and isinstance(parameter, tensors.DTensor)
    return getattr(parameter, "device_mesh", None) if is_spread else None
