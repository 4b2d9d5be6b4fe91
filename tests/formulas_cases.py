"""One call or more of every operator but attention's that has a formula, with the FLOPs that brute force gives."""

from __future__ import annotations

from flopmeter.flops.formulas import Spec, Work
from formulas_bruteforce import convolution_taps, transposed_taps, tuples
from formulas_calls import Case, case


def _matmul_cases() -> list[Case]:
    one = 2 * tuples(3, 4, 5)
    batch = 2 * tuples(2, 3, 4, 5)
    return [
        case("aten::mm", one, self=(3, 4), mat2=(4, 5)),
        case("aten::mm", one, "out", self=(3, 4), mat2=(4, 5), out=(3, 5)),
        case("aten::mm", one, "dtype", self=(3, 4), mat2=(4, 5)),
        case("aten::mm", 4 * one, self=Spec((3, 4), "complex64"), mat2=Spec((4, 5), "complex64")),
        case("aten::bmm", batch, self=(2, 3, 4), mat2=(2, 4, 5)),
        *(case(f"aten::{op}", one, mat1=(3, 4), mat2=(4, 5)) for op in ("addmm", "addmm_", "_addmm_activation")),
        *(
            case(f"aten::{op}", batch, batch1=(2, 3, 4), batch2=(2, 4, 5))
            for op in ("baddbmm", "baddbmm_", "addbmm", "addbmm_")
        ),
        case("aten::mv", 2 * tuples(3, 4), self=(3, 4), vec=(4,)),
        *(case(f"aten::{op}", 2 * tuples(3, 4), mat=(3, 4), vec=(4,)) for op in ("addmv", "addmv_")),
        case("aten::dot", 2 * 7, self=(7,), tensor=(7,)),
        case("aten::vdot", 8 * 7, self=Spec((7,), "complex128"), other=Spec((7,), "complex128")),
        *(case(f"aten::{op}", 2 * tuples(3, 4), vec1=(3,), vec2=(4,)) for op in ("addr", "addr_")),
        # In row i, i - 1 multiply-adds and a division for each column: 2 (0 + 1 + 2 + 3) + 4 = 16 for 4 rows.
        case("aten::linalg_solve_triangular", 2 * 16 * 3, self=(2, 4, 4), B=(2, 4, 3)),
        case("aten::linear", batch, input=(2, 3, 4), weight=(5, 4)),
        case("aten::linear_backward", batch, self=(2, 3, 4), weight=(5, 4), output_mask=[False, True, True]),
        case("aten::linear_backward", 2 * batch, self=(2, 3, 4), weight=(5, 4), output_mask=[True, True, False]),
        case("aten::matmul", 2 * tuples(7, 2, 3, 4, 5), self=(7, 1, 3, 4), other=(2, 4, 5)),
        case("aten::matmul", 2 * tuples(7, 2, 3, 4, 5), self=(2, 3, 4), other=(7, 1, 4, 5)),
        *(case(f"aten::{op}", batch, self=(2, 1, 3, 4), other=(1, 4, 5)) for op in ("matmul", "linalg_matmul")),
        case("aten::matmul", 2 * tuples(3, 4), self=(3, 4), other=(4,)),
        case("aten::matmul", 2 * tuples(4, 5), self=(4,), other=(4, 5)),
        case("aten::matmul", 2 * 4, self=(4,), other=(4,)),
        case(
            "aten::matmul_backward", 2 * 2 * tuples(3, 4, 5), grad=(3, 5), self=(3, 4), other=(4, 5), mask=[True, True]
        ),
        case(
            "aten::_trilinear",
            2 * tuples(7, 8, 9, 10),
            i1=(7, 8),
            i2=(10, 8, 9),
            i3=(7, 9),
            expand1=[1, 3],
            expand2=[0],
            expand3=[1, 2],
            sumdim=[2, 3],
        ),
        case("aten::_foreach_mm", one + batch, self=[Spec((3, 4)), Spec((6, 4))], mat2=[Spec((4, 5)), Spec((4, 5))]),
        case("inductor::_mm_plus_mm", one + 2 * tuples(3, 2, 5), a=(3, 4), b=(4, 5), c=(3, 2), d=(2, 5)),
        case("mkl::_mkl_linear", batch, X=(2, 3, 4), ORI_W=(5, 4)),
        case("mkldnn::_linear_pointwise", batch, X=(2, 3, 4), W=(5, 4), attr="relu"),
        case("mkldnn::_linear_pointwise", batch, "binary", X=(2, 3, 4), other=(2, 3, 5), W=(5, 4), attr="add"),
    ]


def _low_precision_cases() -> list[Case]:
    one = 2 * tuples(3, 4, 8)
    # Groups of 2, 1 and 2 rows; the sixth row belongs to none.
    grouped = 2 * sum(tuples(rows, 4, 5) for rows in (2, 1, 2))
    ends = Spec((3,), "int32", values=(2, 3, 5))
    scaled = "aten::_scaled_grouped_mm"
    return [
        case("aten::_int_mm", one, self=(3, 4), mat2=(4, 8)),
        case("aten::_scaled_mm", one, self=Spec((3, 4), "float8_e4m3fn"), mat2=(4, 8)),
        case("aten::_scaled_mm_v2", one, self=Spec((3, 2), "float4_e2m1fn_x2"), mat2=(2, 8)),
        case("aten::_grouped_mm", grouped, self=(6, 4), mat2=(3, 4, 5), offs=ends),
        case("aten::_grouped_mm", 2 * tuples(6, 4, 5), self=(6, 4), mat2=(3, 4, 5), offs=(3,)),
        case("aten::_grouped_mm", grouped, self=(3, 5, 4), mat2=(4, 6), offs=ends),
        case("aten::_grouped_mm", grouped, self=(4, 6), mat2=(6, 5), offs=ends),
        case("aten::_grouped_mm", 3 * 2 * tuples(6, 4, 5), self=(3, 6, 4), mat2=(3, 4, 5)),
        case("transformers::grouped_mm_fallback", grouped, input=(6, 4), weight=(3, 4, 5), offs=ends),
        case(scaled, grouped, self=Spec((6, 4), "float8_e4m3fn"), mat2=(3, 4, 5), offs=ends),
        case(f"{scaled}_v2", grouped, self=Spec((6, 2), "float4_e2m1fn_x2"), mat2=(3, 2, 5), offs=ends),
    ]


def _convolution_cases() -> list[Case]:
    image, weight, settings = (2, 4, 7, 6), (6, 2, 3, 2), {"stride": [2, 1], "padding": [1, 0], "dilation": [1, 2]}
    taps = 2 * convolution_taps(2, (7, 6), weight, groups=2, **settings)
    plain = 2 * convolution_taps(2, (7, 6), weight, groups=2)
    volume, kernel = (1, 2, 4, 5, 3), (3, 2, 2, 3, 1)
    volume_taps = 2 * convolution_taps(1, (4, 5, 3), kernel, padding=[1, 1, 1])
    grown = 2 * transposed_taps(2, (7, 6), (4, 3, 3, 2))
    grown_volume = 2 * transposed_taps(1, (4, 5, 3), (2, 3, 2, 3, 1))
    # Any shape of the right number of positions does for the gradient of the output.
    positions = taps // (2 * 2 * tuples(*weight))
    gradients = {"grad_output": (2, 6, positions, 1), "input": image, "weight": weight}
    backward = "aten::convolution_backward"
    at = {"self": image, "weight": weight, **settings}
    pads = [1, 1, 1]
    return [
        *(
            case(f"aten::{op}", taps, input=image, weight=weight, groups=2, **settings)
            for op in ("convolution", "_convolution", "convolution_overrideable", "conv2d")
        ),
        case("aten::convolution", grown, input=image, weight=(4, 3, 3, 2), transposed=True, **settings),
        case("aten::conv2d", plain, input=image, weight=weight, groups=2),
        case("aten::conv2d", plain // 2, input=image[1:], weight=weight, groups=2),
        case("aten::conv2d", plain, "padding", input=image, weight=weight, padding="valid", stride=[1, 1]),
        case("aten::_convolution_mode", 2 * 2 * tuples(7, 6, *weight), input=image, weight=weight, padding="same"),
        case(
            "aten::conv1d",
            2 * convolution_taps(2, [7], (6, 4, 3), padding=[1]),
            input=image[:3],
            weight=(6, 4, 3),
            padding=[1],
        ),
        case("aten::conv3d", volume_taps, input=volume, weight=kernel, padding=pads),
        case("aten::conv_transpose1d", 2 * transposed_taps(2, [7], (4, 3, 3)), input=image[:3], weight=(4, 3, 3)),
        case("aten::conv_transpose2d", grown, "input", input=image, weight=(4, 3, 3, 2), **settings),
        case("aten::conv_transpose3d", grown_volume, "input", input=volume, weight=(2, 3, 2, 3, 1)),
        case(backward, 2 * taps, **gradients, output_mask=[True, True, True], groups=2),
        case(backward, taps, **gradients, output_mask=[False, True, False]),
        case(backward, 0, **gradients, output_mask=[False, False, True]),
        case(backward, grown, input=image, weight=(4, 3, 3, 2), transposed=True, output_mask=[True, False, False]),
        case(f"{backward}_overrideable", taps, **gradients, output_mask=[True, False, True]),
        case(f"{backward}_overrideable", 2 * taps, **gradients, output_mask=[True, True, False]),
        *(
            case(f"aten::{op}", taps, **at)
            for op in (
                "cudnn_convolution",
                "cudnn_convolution_relu",
                "cudnn_convolution_add_relu",
                "miopen_convolution",
                "miopen_convolution_relu",
                "miopen_convolution_add_relu",
                "miopen_depthwise_convolution",
                "mkldnn_convolution",
                "slow_conv_dilated2d",
                "_conv_depthwise2d",
            )
        ),
        *(
            case(f"aten::{op}", grown, self=image, weight=(4, 3, 3, 2))
            for op in ("cudnn_convolution_transpose", "miopen_convolution_transpose", "slow_conv_transpose2d")
        ),
        case("aten::slow_conv_transpose3d", grown_volume, self=volume, weight=(2, 3, 2, 3, 1)),
        case("aten::_slow_conv2d_forward", plain, self=image, weight=weight, padding=[0, 0]),
        *(
            case(f"aten::{op}", volume_taps, self=volume, weight=kernel, padding=pads)
            for op in ("slow_conv3d_forward", "slow_conv_dilated3d", "conv_depthwise3d")
        ),
        case("aten::conv3d", 2 * convolution_taps(1, (4, 5, 3), kernel), input=volume, weight=kernel),
        case("aten::slow_conv_dilated3d", 2 * convolution_taps(1, (4, 5, 3), kernel), self=volume, weight=kernel),
        case("mkldnn::_convolution_pointwise", taps, X=image, W=weight, **settings),
        case("mkldnn::_convolution_pointwise", taps, "binary", X=image, other=(9,), W=weight, B=(6,), **settings),
        case("mkldnn::_convolution_pointwise", taps, "binary", X=image, other=(9,), W=weight, **settings),
        case("mkldnn::_convolution_pointwise_", taps, "binary", other=(9,), X=image, W=weight, **settings),
        case("mkldnn::_convolution_transpose_pointwise", grown, X=image, W=(4, 3, 3, 2)),
    ]


def _recurrent_cases() -> list[Case]:
    """Six tokens of 3 features into two layers of 4 units, both ways, four gates (LSTM)."""
    first, second, hidden = Spec((16, 3)), Spec((16, 8)), Spec((16, 4))
    bias = Spec((16,))
    params = [first, hidden, bias, bias] * 2 + [second, hidden, bias, bias] * 2
    layer = 2 * (tuples(6, 16, 3) + tuples(6, 16, 4))
    stack = 2 * layer + 2 * 2 * (tuples(6, 16, 8) + tuples(6, 16, 4))
    weight_only = [False, False, False, True]
    # Nobody wants the gradients of the six tokens, nor from each of four first steps the one of three initial states.
    unwanted = 2 * 2 * tuples(6, 16, 3) + 4 * 2 * tuples(3, 16, 4)
    weights_alone = Work(2 * stack - unwanted, 2 * stack - unwanted, 2 * stack)
    layers = {"input": (2, 3, 3), "weight": params, "hx": (4, 3, 4), "bidirectional": True}
    states = [Spec((4, 3, 4)), Spec((4, 3, 4))]
    projected = [Spec((16, 3)), Spec((16, 2)), Spec((2, 4))]
    projection = 2 * (tuples(6, 16, 3) + tuples(6, 16, 2) + tuples(6, 2, 4))
    cell = 2 * (tuples(3, 16, 3) + tuples(3, 16, 4))
    return [
        case("aten::mkldnn_rnn_layer", layer, input=(2, 3, 3), weight0=first, weight1=hidden),
        case("aten::mkldnn_rnn_layer_backward", 2 * layer, input=(2, 3, 3), weight1=first, weight2=hidden, hx_=(3, 4)),
        case("aten::_cudnn_rnn", stack, input=(2, 3, 3), weight=params),
        case("aten::_cudnn_rnn", projection, input=(2, 3, 3), weight=projected),
        case("aten::miopen_rnn", stack, input=(6, 3), weight=params),
        case("aten::_cudnn_rnn_backward", weights_alone, output_mask=weight_only, **layers),
        case("aten::_cudnn_rnn_backward", 2 * stack, output_mask=[True] * 4, **layers),
        case("aten::miopen_rnn_backward", stack, output_mask=[True, True, True, False], **layers),
        case("aten::lstm", stack, "input", input=(2, 3, 3), hx=states, params=params),
        case("aten::lstm", stack, "data", data=(6, 3), hx=states, params=params),
        *(
            case(f"aten::{op}", stack, "input", input=(2, 3, 3), params=params)
            for op in ("gru", "rnn_tanh", "rnn_relu")
        ),
        *(case(f"aten::{op}", stack, "data", data=(6, 3), params=params) for op in ("gru", "rnn_tanh", "rnn_relu")),
        case("aten::lstm_cell", cell, input=(3, 3), hx=states, w_ih=(16, 3), w_hh=(16, 4)),
        *(
            case(f"aten::{op}", cell, input=(3, 3), w_ih=(16, 3), w_hh=(16, 4))
            for op in ("gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
        ),
    ]


def _transform_and_sparse_cases() -> list[Case]:
    """5 N log2 N: 3 x 32 points, 5 levels. Sparse: 3 stored values in 4 x 6, by 5 columns."""
    stored = Spec((4, 6), nnz=3)
    product = 2 * tuples(3, 5)
    return [
        case("aten::_fft_c2c", 5 * 96 * 5, self=(3, 4, 8), dim=[1, 2]),
        case("aten::_fft_c2c", 0, self=(3, 1), dim=[1]),
        case("aten::_fft_r2c", 0, self=(3, 0), dim=[1]),
        case("aten::_fft_r2c", 5 * 96 * 5 // 2, self=(3, 4, 8), dim=[1, 2]),
        case("aten::_fft_c2r", 5 * 96 * 5 // 2, self=(3, 4, 5), dim=[1, -1], last_dim_size=8),
        case("aten::mm", product, self=stored, mat2=(6, 5)),
        case("aten::mm", product, self=(5, 4), mat2=stored),
        case("aten::_sparse_mm", product, sparse=stored, dense=(6, 5)),
        case("aten::_sparse_addmm", product, mat1=stored, mat2=(6, 5)),
        case("aten::_sparse_mm_reduce_impl", product, self=stored, other=(6, 5)),
    ]


def other_cases() -> list[Case]:
    return [
        *_matmul_cases(),
        *_low_precision_cases(),
        *_convolution_cases(),
        *_recurrent_cases(),
        *_transform_and_sparse_cases(),
    ]
