"""How many FLOPs does a fast Fourier transform need?

By the convention of FFTW's benchmarks (Frigo and Johnson, Proc. IEEE 93(2), 2005): 5 N log2 N for a complex transform
of N points, all transformed dimensions together, and half of that for a real one. It is the operation count of the
radix-2 algorithm, used for every N; what a library executes differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod
from typing import Any

from flopmeter.flops.formulas import Spec, entries, formula


@formula("aten::_fft_c2c input dim")
def complex_transform(input: Spec, dim: Sequence[int], **_: Any) -> int:
    """5 N log2 N for each transform."""
    return _flop(5, input, dim)


@formula("aten::_fft_r2c input dim", "aten::_fft_c2r input dim normalization last_dim_size")
def real_transform(input: Spec, dim: Sequence[int], last_dim_size: int | None = None, **_: Any) -> int:
    """2.5 N log2 N for each transform of N real points, or to so many."""
    shape = list(input.shape)
    if last_dim_size is not None:
        shape[dim[-1]] = last_dim_size
    return _flop(2.5, input._replace(shape=tuple(shape)), dim)


def _flop(per_value: float, values: Spec, dim: Sequence[int]) -> int:
    length = prod(values.shape[axis] for axis in dim)
    return round(per_value * entries(values) * log2(max(length, 1)))
