"""Which matrix products does one module do for a row of its input? Told from its sizes, never by calling it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from flopmeter.flops.tf32 import MATMUL, product_dtype, tf32_families
from flopmeter.torch_compat import Convolution


class Product(NamedTuple):
    """One product with a weight."""

    flop: float
    """For one row that leaves the module."""
    is_trained: bool
    """Whether the weight wants a gradient."""
    dtype: str
    """Of the weight; "" for a quantised one, which is multiplied in the model's own dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A module that does its work itself, seen from outside."""

    inputs: int
    """Width of a row that enters; 0 where any will do."""
    outputs: int
    """Width of a row that leaves; 0 where it stays."""
    products: tuple[Product, ...] = ()
    """In the order in which the input passes them."""
    stride: float = 1
    """Rows that enter for each that leaves."""
    is_trained: bool = False
    """Whether any parameter, a bias included, makes the output depend on training."""


def read_leaf(module: nn.Module) -> Leaf | None:
    """The products of a module without parts of its own; None for a container, or for what does no product."""
    if isinstance(module, nn.RNNBase):
        return _recurrent(module)
    if isinstance(module, nn.Bilinear):
        return _leaf(module, module.in1_features, module.out_features, 2 * module.in2_features * _numel(module))
    if isinstance(module, Convolution):
        return _convolution(module)
    if "Pool" in type(module).__name__ and hasattr(module, "kernel_size"):
        return Leaf(inputs=0, outputs=0, stride=_pool_stride(module))
    sizes = linear_sizes(module)
    if sizes is None or (module._modules and any(True for child in module.children() for _ in child.parameters())):
        return None
    return _leaf(module, *sizes, 2 * sizes[0] * sizes[1])


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer under any name: LoRA's, quantised, Conv1D, a router, or one in a wrapper."""
    own = vars(module)  # asking a module for an attribute that it lacks costs microseconds, and there are thousands
    inputs, outputs = own.get("in_features", own.get("nx")), own.get("out_features", own.get("nf"))
    if isinstance(inputs, int) and isinstance(outputs, int):
        return inputs, outputs
    weight = module._parameters.get("weight")
    if weight is None:
        parts = [child for child in module.children() if child._parameters or child._modules]
        return linear_sizes(parts[0]) if len(parts) == 1 and not module._parameters else None
    if weight.dim() != 2 or is_embedding(module) or "norm" in type(module).__name__.lower():
        return None
    return weight.shape[1], weight.shape[0]


def is_embedding(module: nn.Module) -> bool:
    """A table to look up in: no product at all."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and "embed" in type(module).__name__.lower()


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """The whole parameter's shape, also where DeepSpeed has left only a stub of it here."""
    shape: Any = getattr(parameter, "ds_shape", parameter.shape)
    return tuple(shape)


def dtype_of(parameter: torch.Tensor, family: str = MATMUL) -> str:
    """What products with it run in, by their family of operators; "" for the storage types of quantised weights."""
    if not parameter.dtype.is_floating_point:
        return ""
    return product_dtype(str(parameter.dtype).removeprefix("torch."), family, tf32_families(parameter.device))


def has_trained(module: nn.Module) -> bool:
    """Whether a parameter of the module's own wants a gradient."""
    return any(parameter is not None and parameter.requires_grad for parameter in module._parameters.values())


def _leaf(module: nn.Module, inputs: int, outputs: int, flop: float, stride: float = 1, family: str = MATMUL) -> Leaf:
    weight = module._parameters.get("weight")
    dtype = dtype_of(weight, family) if weight is not None else ""
    product = Product(flop, weight is not None and weight.requires_grad, dtype)
    return Leaf(inputs=inputs, outputs=outputs, products=(product,), stride=stride, is_trained=has_trained(module))


def _convolution(conv: Convolution) -> Leaf:
    """All kernel taps at every output position; a transposed one has all taps at every input position."""
    stride, taps = prod(conv.stride), prod(conv.kernel_size)
    flop = 2 * conv.in_channels * conv.out_channels // conv.groups * taps
    if conv.transposed:
        return _leaf(conv, conv.in_channels, conv.out_channels, flop / stride, 1 / stride, "convolution")
    return _leaf(conv, conv.in_channels, conv.out_channels, flop, stride, "convolution")


def _recurrent(rnn: nn.RNNBase) -> Leaf:
    """Every weight once a step. Left out: the first step owes no gradient to its constant state."""
    weights = [parameter for parameter in rnn.parameters() if parameter.dim() == 2]
    products = tuple(Product(2 * w.numel(), w.requires_grad, dtype_of(w, "recurrent")) for w in weights)
    width = (rnn.proj_size or rnn.hidden_size) * (2 if rnn.bidirectional else 1)
    return Leaf(inputs=rnn.input_size, outputs=width, products=products, is_trained=has_trained(rnn))


def _pool_stride(pool: nn.Module) -> float:
    name, stride = type(pool).__name__, pool.stride
    num_sides = next((int(digit) for digit in "123" if f"{digit}d" in name), 1)
    return float(prod(stride) if isinstance(stride, tuple) else int(str(stride)) ** num_sides)


def _numel(bilinear: nn.Bilinear) -> int:
    return bilinear.in1_features * bilinear.out_features
