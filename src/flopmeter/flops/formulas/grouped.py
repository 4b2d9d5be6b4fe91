"""How many FLOPs does a product of matrices in groups of unequal size need (mixtures of experts)?

The operands are 2-D where the groups lie side by side along one dimension, 3-D where they are stacked; `offs` holds the
end of each group along the ragged dimension. Rows after the last end are not computed and do not count, if the values
of `offs` are known; else all rows count. All leave out bias and scaling.
"""

from __future__ import annotations

from math import prod
from typing import Any

from flopmeter.flops.formulas import Spec, formula
from flopmeter.flops.formulas._product import matmul_flop, multiply_add_flop


@formula("aten::_grouped_mm", values=("offs",))
def grouped_mm(self: Spec, mat2: Spec, offs: Spec | None = None, *rest: Any, **options: Any) -> int:
    """2mkn summed over the groups."""
    *groups, rows, inner = self.shape
    *other_groups, _, columns = mat2.shape
    if groups and other_groups:
        return matmul_flop(self, mat2)
    sizes = [rows, inner, columns]
    if offs is not None and offs.values:
        ragged = 0 if other_groups else 2 if groups else 1
        sizes[ragged] = offs.values[-1]
    return multiply_add_flop(self.dtype) * prod(sizes)


@formula("transformers::grouped_mm_fallback", values=("offs",))
def grouped_mm_fallback(input: Spec, weight: Spec, offs: Spec) -> int:
    """2mkn summed over the groups (forward only: its backward dispatches plain `mm`)."""
    return grouped_mm(input, weight, offs)


@formula("aten::_scaled_grouped_mm", values=("offs",))
def scaled_grouped_mm(
    self: Spec, mat2: Spec, scale_a: Spec, scale_b: Spec, offs: Spec | None = None, *rest: Any, **options: Any
) -> int:
    """2mkn summed over the groups, in fp8 or fp4."""
    return grouped_mm(self, mat2, offs) * (2 if self.dtype.endswith("_x2") else 1)


@formula("aten::_scaled_grouped_mm_v2", values=("offs",))
def scaled_grouped_mm_v2(
    self: Spec,
    mat2: Spec,
    scale_a: Any,
    recipe_a: Any,
    swizzle_a: Any,
    scale_b: Any,
    recipe_b: Any,
    swizzle_b: Any,
    offs: Spec | None = None,
    *rest: Any,
    **options: Any,
) -> int:
    """2mkn summed over the groups, in fp8 or fp4."""
    return scaled_grouped_mm(self, mat2, scale_a, scale_b, offs)
