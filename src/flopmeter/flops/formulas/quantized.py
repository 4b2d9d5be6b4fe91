"""How many FLOPs does a product of low-precision matrices need?

The same 2mkn as in full precision: the dtype changes the peak, not the work. All leave out scaling, (de)quantisation
and bias. Products whose packed weight hides its shape (`quantized::linear`) have no formula.
"""

from __future__ import annotations

from typing import Any

from flopmeter.flops.formulas import Spec, formula
from flopmeter.flops.formulas._product import entries, linear_flop, matmul_flop


@formula("aten::_int_mm")
def int_mm(self: Spec, mat2: Spec, **options: Any) -> int:
    """2mkn in int8."""
    return matmul_flop(self, mat2)


@formula("aten::_scaled_mm", "aten::_scaled_mm_v2")
def scaled_mm(self: Spec, mat2: Spec, *rest: Any, **options: Any) -> int:
    """2mkn in fp8 or fp4; an fp4 element ("float4_e2m1fn_x2") holds two values along k."""
    return matmul_flop(self, mat2) * (2 if self.dtype.endswith("_x2") else 1)


@formula("aten::_weight_int8pack_mm")
def weight_int8pack_mm(self: Spec, mat2: Spec, scales: Spec) -> int:
    """2mkn; the weight is n x k."""
    return linear_flop(self, mat2)


@formula("aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu")
def weight_int4pack_mm(self: Spec, mat2: Spec, qGroupSize: int, qScaleAndZeros: Spec) -> int:  # noqa: N803
    """2mkn; n is read from the (groups, n, 2) scales, because the weight is packed differently on each device."""
    return 2 * entries(self) * qScaleAndZeros.shape[-2]


@formula("aten::_weight_int4pack_mm_with_scales_and_zeros")
def weight_int4pack_mm_with_zeros(self: Spec, mat2: Spec, *rest: Any) -> int:
    """2mkn; the packed weight has n rows."""
    return 2 * entries(self) * mat2.shape[0]


@formula("aten::_dyn_quant_matmul_4bit")
def dyn_quant_matmul_4bit(
    inp: Spec, packed_weights: Spec, block_size: int, in_features: int, out_features: int, **options: Any
) -> int:
    """2mkn; leaves out the quantisation of the activations."""
    return 2 * entries(inp) * out_features


@formula("aten::_mixed_dtypes_linear")
def mixed_dtypes_linear(input: Spec, weight: Spec, scale: Spec, **options: Any) -> int:
    """2mkn; n is read from the scales, because an int4 weight is packed."""
    return 2 * entries(input) * scale.shape[-1]
