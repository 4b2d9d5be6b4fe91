"""How many FLOPs does a convolution need, forward and backward?

One multiply-add for each output position, kernel tap, input channel of the group and output channel (the GEMM that
cuDNN lowers it to: Chetlur et al., arXiv:1410.0759, section 3). That is positions x elements of the weight: groups only
change the weight's shape. A transposed convolution does the same for each input position. Taps that fall on padding
count, as in every counter we know, as do those that a transposed convolution's padding crops. Winograd and FFT kernels
execute fewer FLOPs: hardware counts leave that out, as all formulas here leave out bias and fused point-wise work. A
complex convolution arrives as three real ones, and counts so.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from flopmeter.flops.formulas import Spec, entries, formula, multiply_add_flop


def _batch_flop(tensor: Spec, weight: Spec) -> int:
    """One filter application in each sample; an input without batch dimension is a batch of one."""
    if len(weight.shape) < 3:
        raise ValueError("a convolution's weight has at least three dimensions")
    batch = tensor.shape[0] if len(tensor.shape) == len(weight.shape) else 1
    return multiply_add_flop(tensor.dtype) * batch * entries(weight)


@formula("""aten::cudnn_convolution_transpose aten::miopen_convolution_transpose aten::slow_conv_transpose2d
    aten::slow_conv_transpose3d mkldnn::_convolution_transpose_pointwise input weight""")
@formula("aten::conv_transpose1d aten::conv_transpose2d aten::conv_transpose3d input weight", composite=True)
def everywhere(input: Spec, weight: Spec, **_: Any) -> int:
    """One filter application at each position of `input`."""
    return _batch_flop(input, weight) * prod(input.shape[2 - len(weight.shape) :])


@formula(
    """aten::convolution aten::_convolution aten::convolution_overrideable
    input weight bias stride padding dilation transposed""",
    "aten::cudnn_convolution input weight padding stride dilation",
    """aten::mkldnn_convolution aten::miopen_convolution aten::miopen_depthwise_convolution
    input weight bias padding stride dilation""",
    "aten::cudnn_convolution_relu aten::miopen_convolution_relu input weight bias stride padding dilation",
    """aten::cudnn_convolution_add_relu aten::miopen_convolution_add_relu
    input weight z alpha bias stride padding dilation""",
    "aten::_slow_conv2d_forward aten::slow_conv3d_forward input weight kernel_size bias stride padding",
    """aten::slow_conv_dilated2d aten::slow_conv_dilated3d aten::_conv_depthwise2d aten::conv_depthwise3d
    input weight kernel_size bias stride padding dilation""",
    "mkldnn::_convolution_pointwise_ other input weight bias padding stride dilation",
)
@formula(
    "aten::conv1d aten::conv2d aten::conv3d aten::_convolution_mode input weight bias stride padding dilation",
    composite=True,
)
def convolution(
    input: Spec,
    weight: Spec,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,),
    dilation: Sequence[int] = (1,),
    transposed: bool = False,
    **_: Any,
) -> int:
    """Output positions (input positions if transposed) x elements of the weight; `padding` may be "same" or "valid"."""
    if transposed or padding == "same":  # torch allows "same" with stride 1 only: the output has the input's size
        return everywhere(input, weight)
    flop = _batch_flop(input, weight)
    kernel = weight.shape[2:]
    settings = [
        list(values) * len(kernel) if len(values) == 1 else values
        for values in (stride, (0,) if padding == "valid" else padding, dilation)
    ]
    for size, taps, step, pad, gap in zip(input.shape[-len(kernel) :], kernel, *settings, strict=True):
        flop *= (size + 2 * pad - gap * (taps - 1) - 1) // step + 1
    return flop


@formula(
    """aten::convolution_backward grad_output input weight bias_sizes
    stride padding dilation transposed output_padding groups output_mask""",
    """aten::convolution_backward_overrideable grad_output input weight
    stride padding dilation transposed output_padding groups output_mask""",
)
def convolution_backward(
    grad_output: Spec, input: Spec, weight: Spec, transposed: bool, output_mask: Sequence[bool], **_: Any
) -> int:
    """The forward's work once for the input's gradient and once for the weight's, as asked; the bias's is a sum."""
    return everywhere(input if transposed else grad_output, weight) * sum(map(bool, output_mask[:2]))


@formula("mkldnn::_convolution_pointwise")
def convolution_pointwise(input: Spec, *operands: Any) -> int:
    """The overloads: (X, W, B, padding, ...) and, with a second operand to fuse, (X, other, W, B, padding, ...)."""
    if operands[2] is None or isinstance(operands[2], Spec):
        operands = operands[1:]
    weight, _, padding, stride, dilation, *_ = operands
    return convolution(input, weight, stride, padding, dilation)
