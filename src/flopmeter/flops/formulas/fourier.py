"""How many FLOPs does a fast Fourier transform need?

By the convention of FFTW's benchmarks (Frigo and Johnson, Proc. IEEE 93(2), 2005): 5 N log2 N for a complex transform
of N points, all transformed dimensions together, and half of that for a real one. It is the operation count of the
radix-2 algorithm, used for every N; what a library executes differs. Symbolic sizes become numbers here (a logarithm).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod
from typing import Any

from flopmeter.flops.formulas import Spec, formula
from flopmeter.flops.formulas._product import entries


def _fft_flop(num_values: int, length: int, per_value: float) -> int:
    """Args: num_values: points of all transforms together; length: points of one."""
    return round(per_value * num_values * log2(max(length, 1)))


def _length(tensor: Spec, dim: Sequence[int]) -> int:
    return prod(tensor.shape[axis] for axis in dim)


@formula("aten::_fft_c2c")
def fft_c2c(self: Spec, dim: Sequence[int], *rest: Any, **options: Any) -> int:
    """5 N log2 N for each transform."""
    return _fft_flop(entries(self), _length(self, dim), 5)


@formula("aten::_fft_r2c")
def fft_r2c(self: Spec, dim: Sequence[int], *rest: Any, **options: Any) -> int:
    """2.5 N log2 N for each transform of N real points."""
    return _fft_flop(entries(self), _length(self, dim), 2.5)


@formula("aten::_fft_c2r")
def fft_c2r(self: Spec, dim: Sequence[int], normalization: int, last_dim_size: int, **options: Any) -> int:
    """2.5 N log2 N for each transform to N real points."""
    shape = list(self.shape)
    shape[dim[-1]] = last_dim_size
    return fft_r2c(self._replace(shape=tuple(shape)), dim)
