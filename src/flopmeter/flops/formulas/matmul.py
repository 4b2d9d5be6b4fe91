"""How many FLOPs does a product of matrices or vectors need: dense, sparse, in groups, in low precision?

All count 2mkn (see `multiply_add_flop`): the dtype changes the peak, not the work. All leave out what surrounds the
product: bias, `beta * self`, scaling, activation, (de)quantisation.

An outer product is element-wise work, except in `addr`, where it is fused with an addition. `einsum` has no formula:
what it is lowered to has. Products with weights that are packed for inference (`_weight_int4pack_mm` and the like) have
none either, nor has 2:4 sparsity: hardly anybody trains through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import prod
from typing import Any

from flopmeter.flops.formulas import Spec, entries, formula, linear_flop, multiply_add_flop, tensors


@formula(
    "aten::mm aten::bmm aten::_int_mm aten::_scaled_mm aten::_scaled_mm_v2 left right",
    """aten::addmm aten::addmm_ aten::_addmm_activation aten::baddbmm aten::baddbmm_ aten::addbmm aten::addbmm_
    added left right""",
)
def product(left: Spec, right: Spec, **others: Any) -> int:
    """2mkn for each matrix of the batch: each stored value of one operand meets every column (row) of the other.

    An fp4 element ("float4_e2m1fn_x2") holds two values along k.
    """
    *_, rows, _ = left.shape
    *_, _, columns = right.shape
    values_per_entry = 2 if left.dtype.endswith("_x2") else 1
    if right.nnz is None:
        return multiply_add_flop(left.dtype) * values_per_entry * entries(left) * columns
    if left.nnz is None:
        return multiply_add_flop(left.dtype) * entries(right) * rows
    raise ValueError("the work of a product of two sparse matrices depends on where their entries lie")


@formula("aten::mv aten::dot aten::vdot matrix", "aten::addmv aten::addmv_ added matrix")
def with_vector(matrix: Spec, **_: Any) -> int:
    """2mk with a vector, 2k of two vectors."""
    return multiply_add_flop(matrix.dtype) * entries(matrix)


@formula("aten::linalg_solve_triangular matrix columns")
def triangular_solve(matrix: Spec, columns: Spec, **_: Any) -> int:
    """n^2 k for k columns: half a product, and a division for each row (LAPACK Working Note 41, appendix C)."""
    return multiply_add_flop(matrix.dtype) * entries(columns) * matrix.shape[-1] // 2


@formula("aten::_trilinear one two three expand_one expand_two expand_three")
def trilinear(one: Spec, two: Spec, three: Spec, **expand: Sequence[int]) -> int:
    """A multiply-add for each entry of the product of the three (nn.Bilinear), whatever is summed up afterwards."""
    sizes: list[list[int]] = []
    for operand, axes in zip((one, two, three), expand.values(), strict=False):
        entries(operand)  # refuses one whose shape is lost
        sizes.append(list(operand.shape))
        for axis in sorted(axes):
            sizes[-1].insert(axis, 1)
    num_entries: int = prod(max(entry) for entry in zip(*sizes, strict=True))
    return multiply_add_flop(one.dtype) * num_entries


@formula("aten::addr aten::addr_ added left right")
def addr(left: Spec, right: Spec, **_: Any) -> int:
    """2mn: one multiply-add for each entry of the matrix."""
    return multiply_add_flop(left.dtype) * entries(left) * entries(right)


@formula("aten::linear input weight", composite=True)
@formula("mkl::_mkl_linear input packed weight")
def linear(input: Spec, weight: Spec, **_: Any) -> int:
    """Every weight meets every token once. MKL's packed weight is opaque: the plain copy's shape counts."""
    return linear_flop(input, weight)


@formula("mkldnn::_linear_pointwise")
def linear_pointwise(input: Spec, *operands: Any) -> int:
    """The overloads differ: (X, W, B, attr, ...) and, with a second operand to fuse, (X, other, W, B, attr)."""
    return linear_flop(input, operands[0] if isinstance(operands[2], str) else operands[1])


@formula("aten::linear_backward input grad_output weight output_mask")
def linear_backward(input: Spec, weight: Spec, output_mask: Sequence[bool], **_: Any) -> int:
    """One product for the input's gradient and one for the weight's, as asked; leaves out the bias's, a sum."""
    return linear_flop(input, weight) * sum(map(bool, output_mask[:2]))


@formula("aten::matmul aten::linalg_matmul left right", composite=True)
def matmul(left: Spec, right: Spec, **others: Any) -> int:
    """2mkn for each matrix of the broadcast batch; a vector is a row on the left, a column on the right."""
    *left_batch, rows, inner = (1, *left.shape)  # before a matrix, the 1 is a batch of one
    *right_batch, _, columns = right.shape if len(right.shape) > 1 else (*right.shape, 1)
    axes = zip_longest(reversed(left_batch), reversed(right_batch), fillvalue=1)
    batch = prod(right if left == 1 else left for left, right in axes)
    return multiply_add_flop(left.dtype) * batch * rows * inner * columns


@formula("aten::matmul_backward grad left right mask")
def matmul_backward(left: Spec, right: Spec, mask: Sequence[bool], **_: Any) -> int:
    """A product for each gradient that is asked."""
    return matmul(left, right) * sum(map(bool, mask))


@formula("aten::_foreach_mm lefts rights")
def foreach_mm(lefts: Sequence[Spec], rights: Sequence[Spec], **_: Any) -> int:
    """2mkn for each pair of matrices."""
    return sum(product(left, right) for left, right in zip(tensors(lefts), tensors(rights), strict=True))


@formula("inductor::_mm_plus_mm a b c d")
def mm_plus_mm(a: Spec, b: Spec, c: Spec, d: Spec, **_: Any) -> int:
    """Two products; leaves out their sum."""
    return product(a, b) + product(c, d)


@formula("aten::_sparse_mm sparse dense", composite=True)
@formula("aten::_sparse_addmm added sparse dense", "aten::_sparse_mm_reduce_impl sparse dense")
def sparse_mm(sparse: Spec, dense: Spec, **_: Any) -> int:
    """2 x stored values x columns; a mean, minimum or maximum counts like the sum. Traces do not tell nnz."""
    if sparse.nnz is None:
        raise ValueError("the number of stored values is unknown")
    return product(sparse, dense)


@formula(
    "aten::_grouped_mm transformers::grouped_mm_fallback left right offs",
    "aten::_scaled_grouped_mm left right scale_a scale_b offs",
    "aten::_scaled_grouped_mm_v2 left right scale_a recipe_a swizzle_a scale_b recipe_b swizzle_b offs",
    values=("offs",),
)
def grouped_mm(left: Spec, right: Spec, offs: Spec | None = None, **others: Any) -> int:
    """2mkn summed over groups of unequal size (mixtures of experts).

    The operands are 2-D where the groups lie side by side along one dimension, 3-D where they are stacked; `offs` holds
    the end of each group along the ragged dimension. Rows after the last end are not computed and do not count, if the
    values of `offs` are known; else all rows count. The backward of `grouped_mm_fallback` dispatches plain `mm`.
    """
    *groups, rows, inner = left.shape
    *other_groups, _, columns = right.shape
    if groups and other_groups:
        return product(left, right)
    sizes = [rows, inner, columns]
    if offs is not None and offs.values:
        ragged = 0 if other_groups else 2 if groups else 1
        sizes[ragged] = offs.values[-1]
    return multiply_add_flop(left.dtype) * (2 if left.dtype.endswith("_x2") else 1) * prod(sizes)
