"""How many FLOPs does a convolution need, forward and backward?

One multiply-add for each output position, kernel tap, input channel of the group and output channel (the GEMM that
cuDNN lowers it to: Chetlur et al., arXiv:1410.0759, section 3). That is positions x elements of the weight: groups only
change the weight's shape. A transposed convolution does the same for each input position. Taps that fall on padding
count, as in every counter we know. Winograd and FFT kernels execute fewer FLOPs: hardware counts leave that out, as all
formulas here leave out bias and fused point-wise work. A complex convolution arrives as three real ones, and counts so.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from flopmeter.flops.formulas import Spec, formula
from flopmeter.flops.formulas._product import entries, multiply_add_flop


def _rank(weight: Spec) -> int:
    rank = len(weight.shape) - 2
    if rank < 1:
        raise ValueError("a convolution's weight has at least three dimensions")
    return rank


def _per_position_flop(tensor: Spec, weight: Spec) -> int:
    """One batch of filter applications at a single position; an input without batch dimension is a batch of one."""
    batch = tensor.shape[0] if len(tensor.shape) == len(weight.shape) else 1
    return multiply_add_flop(tensor.dtype) * batch * entries(weight)


def _dense_flop(tensor: Spec, weight: Spec) -> int:
    """One filter application at each position of `tensor`: an output's, or a transposed convolution's input's."""
    return _per_position_flop(tensor, weight) * prod(tensor.shape[-_rank(weight) :])


def _forward_flop(
    input: Spec,
    weight: Spec,
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
) -> int:
    rank = _rank(weight)
    sizes = input.shape[-rank:]
    if padding == "same":  # torch allows it with stride 1 only: the output has the input's size
        return _dense_flop(input, weight)
    pads = [0] if padding == "valid" else padding
    steps, pads, gaps = (_per_axis(values, rank) for values in (stride, pads, dilation))
    flop = _per_position_flop(input, weight)
    for size, kernel, step, pad, gap in zip(sizes, weight.shape[2:], steps, pads, gaps, strict=True):
        flop *= (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
    return flop


def _per_axis(values: Any, rank: int) -> list[int]:
    return list(values) * rank if len(values) == 1 else list(values)


@formula("aten::convolution", "aten::_convolution", "aten::convolution_overrideable")
def convolution(
    input: Spec,
    weight: Spec,
    bias: Spec | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    *rest: Any,
    **options: Any,
) -> int:
    """Output positions (input positions if transposed) x elements of the weight; leaves out the bias."""
    return _dense_flop(input, weight) if transposed else _forward_flop(input, weight, stride, padding, dilation)


@formula("aten::convolution_backward")
def convolution_backward(
    grad_output: Spec,
    input: Spec,
    weight: Spec,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    **options: Any,
) -> int:
    """The forward's work once for the input's gradient and once for the weight's, as asked by `output_mask`.

    Leaves out the bias's gradient, a sum.
    """
    return _dense_flop(input if transposed else grad_output, weight) * sum(map(bool, output_mask[:2]))


@formula("aten::convolution_backward_overrideable")
def convolution_backward_overrideable(
    grad_output: Spec,
    input: Spec,
    weight: Spec,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    **options: Any,
) -> int:
    """As `convolution_backward`."""
    return _dense_flop(input if transposed else grad_output, weight) * sum(map(bool, output_mask[:2]))


@formula("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::_convolution_mode", composite=True)
def conv(
    input: Spec,
    weight: Spec,
    bias: Spec | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,),
    dilation: Sequence[int] = (1,),
    *rest: Any,
    **options: Any,
) -> int:
    """Output positions x elements of the weight; leaves out the bias. `padding` may be "same" or "valid"."""
    return _forward_flop(input, weight, stride, padding, dilation)


@formula("aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d", composite=True)
def conv_transpose(input: Spec, weight: Spec, *rest: Any, **options: Any) -> int:
    """Input positions x elements of the weight, taps that the padding crops included; leaves out the bias."""
    return _dense_flop(input, weight)


@formula(
    "aten::cudnn_convolution_transpose",
    "aten::miopen_convolution_transpose",
    "aten::slow_conv_transpose2d",
    "aten::slow_conv_transpose3d",
)
def transposed_backend(self: Spec, weight: Spec, *rest: Any, **options: Any) -> int:
    """Input positions x elements of the weight; leaves out the bias."""
    return _dense_flop(self, weight)


@formula("aten::cudnn_convolution")
def cudnn_convolution(
    self: Spec,
    weight: Spec,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    *rest: Any,
    **options: Any,
) -> int:
    """Output positions x elements of the weight."""
    return _forward_flop(self, weight, stride, padding, dilation)


@formula("aten::mkldnn_convolution", "aten::miopen_convolution", "aten::miopen_depthwise_convolution")
def padding_first_backend(
    self: Spec,
    weight: Spec,
    bias: Spec | None,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    *rest: Any,
    **options: Any,
) -> int:
    """Output positions x elements of the weight; leaves out the bias."""
    return _forward_flop(self, weight, stride, padding, dilation)


@formula("aten::cudnn_convolution_relu", "aten::miopen_convolution_relu")
def fused_relu(
    self: Spec,
    weight: Spec,
    bias: Spec | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *rest: Any,
    **options: Any,
) -> int:
    """Output positions x elements of the weight; leaves out bias and activation."""
    return _forward_flop(self, weight, stride, padding, dilation)


@formula("aten::cudnn_convolution_add_relu", "aten::miopen_convolution_add_relu")
def fused_add_relu(
    self: Spec,
    weight: Spec,
    z: Spec,
    alpha: float | None,
    bias: Spec | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *rest: Any,
    **options: Any,
) -> int:
    """Output positions x elements of the weight; leaves out addition, bias and activation."""
    return _forward_flop(self, weight, stride, padding, dilation)


@formula(
    "aten::_slow_conv2d_forward",
    "aten::slow_conv3d_forward",
    "aten::slow_conv_dilated2d",
    "aten::slow_conv_dilated3d",
    "aten::_conv_depthwise2d",
    "aten::conv_depthwise3d",
)
def native_backend(
    self: Spec,
    weight: Spec,
    kernel_size: Sequence[int],
    bias: Spec | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    **options: Any,
) -> int:
    """Output positions x elements of the weight; leaves out the bias."""
    return _forward_flop(self, weight, stride, padding, dilation)


@formula("aten::conv_tbc")
def conv_tbc(self: Spec, weight: Spec, bias: Spec, pad: int = 0, **options: Any) -> int:
    """Output positions x elements of the weight, which is (taps, in, out); leaves out the bias."""
    length, batch, _ = self.shape
    return multiply_add_flop(self.dtype) * (length + 2 * pad - weight.shape[0] + 1) * batch * entries(weight)


@formula("mkldnn::_convolution_pointwise")
def convolution_pointwise(X: Spec, *operands: Any) -> int:  # noqa: N803 - the operator's own name
    """Output positions x elements of the weight; leaves out bias and fused point-wise work.

    The overloads differ: (X, W, B, padding, ...) and, with a second operand to fuse, (X, other, W, B, padding, ...).
    """
    if operands[2] is None or isinstance(operands[2], Spec):
        operands = operands[1:]
    weight, _, padding, stride, dilation, *_ = operands
    return _forward_flop(X, weight, stride, padding, dilation)


@formula("mkldnn::_convolution_pointwise_")
def convolution_pointwise_in_place(other: Spec, *operands: Any) -> int:
    """As `convolution_pointwise`, written into `other`."""
    return convolution_pointwise(*operands)


@formula("mkldnn::_convolution_transpose_pointwise")
def convolution_transpose_pointwise(X: Spec, W: Spec, *rest: Any) -> int:  # noqa: N803
    """Input positions x elements of the weight; leaves out bias and fused point-wise work."""
    return _dense_flop(X, W)
