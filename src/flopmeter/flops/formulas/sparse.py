"""How many FLOPs does a product with a sparse matrix need?

One multiply-add for each stored value and each column that it meets. The number of stored values is `Spec.nnz`; where
it is unknown (profiler traces), and where the result depends on where the entries lie (sparse by sparse), there is no
count. `mm`, `addmm`, `bmm` and `mv` take sparse operands too: see `matmul`. In 2:4 sparsity only the kept half counts.
"""

from __future__ import annotations

from typing import Any

from flopmeter.flops.formulas import Spec, formula
from flopmeter.flops.formulas._product import linear_flop, matmul_flop, multiply_add_flop


def _stored(matrix: Spec) -> int:
    if matrix.nnz is None:
        raise ValueError("the number of stored values is unknown")
    return matrix.nnz


@formula("aten::_sparse_addmm")
def sparse_addmm(self: Spec, mat1: Spec, mat2: Spec, **options: Any) -> int:
    """2 x stored values x columns; leaves out the addition of `self`."""
    return sparse_mm(mat1, mat2)


@formula("aten::_sparse_mm", composite=True)
def sparse_mm(sparse: Spec, dense: Spec, *rest: Any, **options: Any) -> int:
    """2 x stored values x columns."""
    _stored(sparse)
    return matmul_flop(sparse, dense)


@formula("aten::_sparse_mm_reduce_impl")
def sparse_mm_reduce(self: Spec, other: Spec, *rest: Any, **options: Any) -> int:
    """2 x stored values x columns; a mean, minimum or maximum counts like the sum."""
    return sparse_mm(self, other)


@formula("aten::sparse_sampled_addmm")
def sparse_sampled_addmm(self: Spec, mat1: Spec, mat2: Spec, **options: Any) -> int:
    """2k for each stored value of `self`, the only entries that are computed; leaves out the addition."""
    return multiply_add_flop(self.dtype) * _stored(self) * mat1.shape[-1]


@formula("aten::_sparse_semi_structured_mm")
def semi_structured_mm(mat1: Spec, mat1_meta: Spec, mat2: Spec, **options: Any) -> int:
    """2 x kept values x columns; `mat1` is stored at half its width."""
    return matmul_flop(mat1, mat2)


@formula("aten::_sparse_semi_structured_addmm")
def semi_structured_addmm(input: Spec, mat1: Spec, mat1_meta: Spec, mat2: Spec, **options: Any) -> int:
    """2 x kept values x columns; leaves out the addition of `input`."""
    return matmul_flop(mat1, mat2)


@formula("aten::_sparse_semi_structured_linear")
def semi_structured_linear(input: Spec, weight: Spec, meta: Spec, **options: Any) -> int:
    """2 x tokens x kept weights; leaves out bias and activation."""
    return linear_flop(input, weight)


@formula("aten::_cslt_sparse_mm")
def cslt_sparse_mm(compressed_A: Spec, dense_B: Spec, *rest: Any, **options: Any) -> int:  # noqa: N803
    """2 x kept values x columns; half of k is kept (the compressed matrix also holds the positions)."""
    inner, columns = dense_B.shape
    return compressed_A.shape[0] * inner * columns
