"""How many FLOPs does a product of two tensors take, and how many do the products of attention?

A multiply-add is 2 FLOP, so an m x k by k x n product takes 2mkn (Golub and Van Loan, Matrix Computations, section
1.1). A complex multiply-add is 4 real multiplications and 4 real additions: 8 FLOP.
"""

from __future__ import annotations

from math import prod
from typing import Any

from flopmeter.flops.formulas import Spec, Work


def multiply_add_flop(dtype: str) -> int:
    return 8 if dtype.startswith("complex") else 2


def entries(tensor: Spec) -> int:
    """Values that a tensor stores; only a tensor whose shape a trace has lost is refused."""
    if not tensor.shape:
        raise ValueError("the shape of an operand is unknown")
    return prod(tensor.shape) if tensor.nnz is None else tensor.nnz


def tensors(values: Any) -> list[Spec]:
    """The members of a tensor list; older traces lose them and show a list as one tensor without shape."""
    if isinstance(values, Spec) or not all(isinstance(value, Spec) for value in values):
        raise ValueError("the shapes in a list of tensors are unknown")
    return list(values)


def linear_flop(tokens: Spec, *weights: Spec) -> int:
    """Every weight meets every token once; the last dimension of `tokens` is the features'."""
    *rows, _ = tokens.shape
    return multiply_add_flop(tokens.dtype) * prod(rows) * sum(entries(weight) for weight in weights)


def attention_work(full: int, exact: int, dim: int, dim_v: int, is_backward: bool) -> Work:
    """FLOPs over so many pairs of all heads. A fused backward computes all gradients, wanted or not."""
    if is_backward:
        return Work(4 * full * (dim + dim_v), 4 * exact * (dim + dim_v), exact * (6 * dim + 4 * dim_v))
    return Work(2 * full * (dim + dim_v), 2 * exact * (dim + dim_v), 2 * exact * (dim + dim_v))
