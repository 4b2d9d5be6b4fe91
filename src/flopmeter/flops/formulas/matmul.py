"""How many FLOPs does a dense product of matrices or vectors need?

All count 2mkn (see `_product`) and leave out what surrounds the product: bias, `beta * self`, scaling, activation.
An operand may be sparse (`Spec.nnz`); then only its stored values count. An outer product is element-wise work, except
in `addr`, where it is fused with an addition. `einsum` has no formula: what it is lowered to has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import prod
from typing import Any

from flopmeter.flops.formulas import Spec, formula
from flopmeter.flops.formulas._product import entries, linear_flop, matmul_flop, multiply_add_flop, tensors


@formula("aten::mm", "aten::bmm")
def mm(self: Spec, mat2: Spec, *rest: Any, **options: Any) -> int:
    """2mkn for each matrix of the batch."""
    return matmul_flop(self, mat2)


@formula("aten::addmm", "aten::addmm_", "aten::_addmm_activation")
def addmm(self: Spec, mat1: Spec, mat2: Spec, *rest: Any, **options: Any) -> int:
    """2mkn; leaves out the addition of `self` and the activation."""
    return matmul_flop(mat1, mat2)


@formula("aten::baddbmm", "aten::baddbmm_", "aten::addbmm", "aten::addbmm_")
def baddbmm(self: Spec, batch1: Spec, batch2: Spec, *rest: Any, **options: Any) -> int:
    """2mkn for each matrix of the batch; leaves out the additions to `self` and over the batch."""
    return matmul_flop(batch1, batch2)


@formula("aten::mv")
def mv(self: Spec, vec: Spec, **options: Any) -> int:
    """2mk."""
    return multiply_add_flop(self.dtype) * entries(self)


@formula("aten::addmv", "aten::addmv_")
def addmv(self: Spec, mat: Spec, vec: Spec, **options: Any) -> int:
    """2mk; leaves out the addition of `self`."""
    return multiply_add_flop(mat.dtype) * entries(mat)


@formula("aten::dot", "aten::vdot")
def dot(self: Spec, *rest: Any, **options: Any) -> int:
    """2k."""
    return multiply_add_flop(self.dtype) * entries(self)


@formula("aten::addr", "aten::addr_")
def addr(self: Spec, vec1: Spec, vec2: Spec, **options: Any) -> int:
    """2mn: one multiply-add for each entry of the matrix."""
    return multiply_add_flop(vec1.dtype) * entries(vec1) * entries(vec2)


@formula("aten::linear", composite=True)
def linear(input: Spec, weight: Spec, *rest: Any, **options: Any) -> int:
    """Every weight meets every token once; leaves out the bias."""
    return linear_flop(input, weight)


@formula("aten::linear_backward")
def linear_backward(self: Spec, grad_output: Spec, weight: Spec, output_mask: Sequence[bool], **options: Any) -> int:
    """One product for the input's gradient and one for the weight's, as asked; leaves out the bias's, a sum."""
    return linear_flop(self, weight) * sum(map(bool, output_mask[:2]))


@formula("aten::matmul", "aten::linalg_matmul", composite=True)
def matmul(self: Spec, other: Spec, **options: Any) -> int:
    """2mkn for each matrix of the broadcast batch; a vector is a row on the left, a column on the right."""
    *left_batch, rows, inner = (1, *self.shape)  # before a matrix, the 1 is a batch of one
    *right_batch, _, columns = other.shape if len(other.shape) > 1 else (*other.shape, 1)
    axes = zip_longest(reversed(left_batch), reversed(right_batch), fillvalue=1)
    batch = prod(right if left == 1 else left for left, right in axes)
    return multiply_add_flop(self.dtype) * batch * rows * inner * columns


@formula("aten::_foreach_mm")
def foreach_mm(self: Sequence[Spec], mat2: Sequence[Spec], **options: Any) -> int:
    """2mkn for each pair of matrices."""
    return sum(matmul_flop(left, right) for left, right in zip(tensors(self), tensors(mat2), strict=True))


@formula("inductor::_mm_plus_mm")
def mm_plus_mm(a: Spec, b: Spec, c: Spec, d: Spec, *rest: Any) -> int:
    """Two products; leaves out their sum."""
    return matmul_flop(a, b) + matmul_flop(c, d)


@formula("mkl::_mkl_linear")
def mkl_linear(X: Spec, MKL_W: Spec, ORI_W: Spec, *rest: Any) -> int:  # noqa: N803 - the operator's own names
    """Every weight meets every token once (the plain copy's shape: the packed one is opaque); leaves out the bias."""
    return linear_flop(X, ORI_W)


@formula("mkldnn::_linear_pointwise")
def linear_pointwise(X: Spec, *operands: Any) -> int:  # noqa: N803
    """Every weight meets every token once; leaves out bias and fused point-wise work.

    The overloads differ: (X, W, B, attr, ...) and, with a second operand to fuse, (X, other, W, B, attr).
    """
    is_unary = isinstance(operands[2], str)
    return linear_flop(X, operands[0] if is_unary else operands[1])
