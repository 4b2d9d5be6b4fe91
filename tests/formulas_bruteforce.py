"""Counts multiply-adds one by one, and runs real operators while asking the formulas what they cost.

Nothing here uses flopmeter's arithmetic: the counters enumerate index tuples, and their loops follow the definitions of
the operators.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter.flops.formulas import Spec, Work, find


def tuples(*sizes: int) -> int:
    """How many index tuples there are, by visiting each."""
    return sum(1 for _ in product(*map(range, sizes)))


def windows(size: int, kernel: int, stride: int, padding: int, dilation: int) -> list[int]:
    """Where a dilated kernel can start on the padded axis."""
    padded = size + 2 * padding
    return [start for start in range(0, padded, stride) if start + dilation * (kernel - 1) < padded]


def convolution_taps(
    batch: int,
    sizes: Sequence[int],
    weight: Sequence[int],
    groups: int = 1,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
) -> int:
    """Multiply-adds: batch, output channel, position, input channel of its group, kernel tap.

    Args:
        weight: (output channels, input channels of a group, *kernel)
    """
    channels_out, channels_in, *kernel = weight
    rank = len(kernel)
    axes = zip(sizes, kernel, stride or [1] * rank, padding or [0] * rank, dilation or [1] * rank, strict=True)
    positions = [windows(*axis) for axis in axes]
    taps = 0
    for _, channel_out, _ in product(range(batch), range(channels_out), product(*positions)):
        group = channel_out // (channels_out // groups)
        taps += tuples(len(range(group * channels_in, (group + 1) * channels_in)), *kernel)
    return taps


def transposed_taps(batch: int, sizes: Sequence[int], weight: Sequence[int]) -> int:
    """Multiply-adds: batch, input channel, position, output channel of its group, kernel tap.

    Args:
        weight: (input channels, output channels of a group, *kernel)
    """
    channels_in, channels_out, *kernel = weight
    places = product(range(batch), range(channels_in), *map(range, sizes))
    return sum(tuples(channels_out, *kernel) for _ in places)


def visible_pairs(num_queries: int, num_keys: int, is_visible: Callable[[int, int], bool]) -> int:
    return sum(is_visible(query, key) for query, key in product(range(num_queries), range(num_keys)))


def everything(query: int, key: int) -> bool:
    return True


def causal(query: int, key: int) -> bool:
    return key <= query


def band(num_queries: int, num_keys: int, left: int, right: int) -> Callable[[int, int], bool]:
    """FlashAttention's window: aligned with the last key, a negative bound is none."""
    shift = num_keys - num_queries

    def is_visible(query: int, key: int) -> bool:
        return (left < 0 or key >= query + shift - left) and (right < 0 or key <= query + shift + right)

    return is_visible


def forward_work(heads: int, full: int, exact: int, dim: int, dim_v: int) -> Work:
    """Scores take `dim` multiply-adds for each pair, the weighted sum of the values `dim_v`."""
    per_pair = 2 * (tuples(dim) + tuples(dim_v))
    return Work(heads * full * per_pair, heads * exact * per_pair, heads * exact * per_pair)


def backward_work(heads: int, full: int, exact: int, dim: int, dim_v: int) -> Work:
    """dV and dP take `dim_v` each, dQ and dK `dim` each; the scores once more only for the hardware."""
    per_pair = 2 * (2 * dim_v + 2 * dim)
    return Work(heads * full * per_pair, heads * exact * per_pair, heads * exact * (per_pair + 2 * dim))


def radix2_fft(values: list[complex]) -> tuple[list[complex], int]:
    """The transform of a power of two points, and its FLOPs: a butterfly is one complex product and two sums, 10."""
    if len(values) == 1:
        return values, 0
    even, flop_even = radix2_fft(values[::2])
    odd, flop_odd = radix2_fft(values[1::2])
    flop = flop_even + flop_odd
    low, high = [], []
    for index, (a, b) in enumerate(zip(even, odd, strict=True)):
        turned = cmath.exp(-2j * cmath.pi * index / len(values)) * b
        low.append(a + turned)
        high.append(a - turned)
        flop += 6 + 2 + 2
    return low + high, flop


def to_spec(value: Any, with_values: bool = False) -> Any:
    """Every tensor in an argument as its Spec."""
    if isinstance(value, (list, tuple)):
        return type(value)(to_spec(item, with_values) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    nnz = None
    if value.layout == torch.sparse_coo:
        nnz = value._values().numel()
    elif value.layout != torch.strided:
        nnz = value.values().numel()
    values = None
    if with_values and not value.is_floating_point():
        values = tuple(value.flatten().tolist())
    return Spec(tuple(value.shape), str(value.dtype).removeprefix("torch."), values, nnz)


class Observer(TorchDispatchMode):
    """Runs every operator and asks its formula what it costs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Work]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        formula = find(name)
        if formula is not None:
            names = [argument.name for argument in func._schema.arguments]
            specs = [to_spec(value, key in formula.values) for key, value in zip(names, args, strict=False)]
            options = {key: to_spec(value, key in formula.values) for key, value in kwargs.items()}
            self.calls.append((name, formula(*specs, **options)))
        return func(*args, **kwargs)

    def ops(self) -> set[str]:
        return {name for name, _ in self.calls}

    def total(self, field: str = "exact") -> int:
        return sum(getattr(work, field) for _, work in self.calls)


def observe(run: Callable[[], Any]) -> Observer:
    observer = Observer()
    with observer:
        run()
    return observer


def observe_training(run: Callable[[], torch.Tensor]) -> tuple[Observer, Observer]:
    """Forward and backward apart; the loss is chosen so that the gradient that flows in is a dense tensor."""
    forward, backward = Observer(), Observer()
    with forward:
        out = run()
    gradient = torch.ones_like(out)
    with backward:
        out.backward(gradient)
    return forward, backward
