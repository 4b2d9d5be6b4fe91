"""How many FLOPs does a recurrent layer need, as one fused operator?

Every weight matrix meets every token once, in each layer, direction and gate, projections included (the GEMMs of
Appleyard et al., arXiv:1604.01946, section 3); packed sequences have fewer tokens, not other work. Backward needs the
same once for the gradients of inputs and states and once for the weights', without the gradients that nobody wants (of
data, of an initial state of zeros, of frozen weights); the fused operators compute those too, which is hardware work.
Left out: biases, gates and other point-wise work. `_thnn_fused_lstm_cell` and its kin are point-wise and have no
formula; where a layer is not fused (GRU and RNN on a CPU, packed LSTM), its `linear`s and `mm`s are seen instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flopmeter.flops.formulas import Spec, Work, formula
from flopmeter.flops.formulas._product import linear_flop, tensors


def _matrices(weights: Sequence[Spec]) -> list[Spec]:
    matrices = [weight for weight in tensors(weights) if len(weight.shape) == 2]
    if not matrices:
        raise ValueError("the shapes of the weights are unknown")
    return matrices


@formula("aten::mkldnn_rnn_layer")
def mkldnn_rnn_layer(input: Spec, weight0: Spec, weight1: Spec, *rest: Any, **options: Any) -> int:
    """One layer in one direction: input weights and hidden weights x tokens."""
    return linear_flop(input, weight0, weight1)


@formula("aten::mkldnn_rnn_layer_backward")
def mkldnn_rnn_layer_backward(
    input: Spec,
    weight1: Spec,
    weight2: Spec,
    weight3: Spec,
    weight4: Spec,
    hx_: Spec,
    *rest: Any,
    wanted: Sequence[bool] | None = None,
    **options: Any,
) -> Work:
    """Twice the forward, of which only what somebody wants is needed: the operator returns every gradient."""
    wants_input, wants_first, wants_hidden, _, _, wants_state = wanted[:6] if wanted else (True,) * 6
    first, hidden = linear_flop(input, weight1), linear_flop(input, weight2)
    through_states = hidden if wants_state else hidden - linear_flop(hx_, weight2)
    needed = first * (wants_input + wants_first) + hidden * wants_hidden + through_states
    return Work(full=needed, exact=needed, hardware=2 * (first + hidden))


@formula("aten::_cudnn_rnn", "aten::miopen_rnn")
def cudnn_rnn(input: Spec, weight: Sequence[Spec], *rest: Any, **options: Any) -> int:
    """All layers and directions: weights x tokens."""
    return linear_flop(input, *_matrices(weight))


@formula("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward")
def cudnn_rnn_backward(
    input: Spec, weight: Sequence[Spec], weight_stride0: int, weight_buf: Spec, hx: Spec, *rest: Any, **options: Any
) -> Work:
    """Once for inputs and states, which the kernel always does, and once for the weights if their gradient is asked.

    `output_mask` (input, hx, cx, weight) is the last argument, and the last but four tells whether there is a way back.
    """
    wants_input, wants_state, _, wants_weights = rest[-1]
    flop = linear_flop(input, *_matrices(weight)) * (2 if wants_weights else 1)
    needed = flop - _unwanted_flop(input, weight, hx, wants_input, wants_state, is_both_ways=rest[-5])
    return Work(full=needed, exact=needed, hardware=flop)


def _unwanted_flop(
    input: Spec, weights: Sequence[Spec], hx: Spec, wants_input: bool, wants_state: bool, is_both_ways: bool
) -> int:
    """What goes to the input of the lowest layer, and from the first step of every layer to its initial state.

    Each layer and direction has matrices for its input, its state and, where there is one, its projection.
    """
    if wants_input and wants_state:
        return 0
    num_parts, *sequences = hx.shape
    matrices = _matrices(weights)
    per_part = len(matrices) // num_parts
    lowest = [matrices[part * per_part] for part in range(2 if is_both_ways else 1)]
    flop = 0 if wants_input else linear_flop(input, *lowest)
    if not wants_state:
        flop += linear_flop(Spec(tuple(sequences), input.dtype), *matrices[1::per_part])
    return flop


@formula("aten::_lstm_mps")
def lstm_mps(input: Spec, hx: Sequence[Spec], params: Sequence[Spec], *rest: Any, **options: Any) -> int:
    """All layers and directions: weights x tokens."""
    return linear_flop(input, *_matrices(params))


@formula("aten::lstm_mps_backward")
def lstm_mps_backward(
    grad_y: Spec | None,
    grad_hy: Spec | None,
    grad_cy: Spec | None,
    z_state: Spec,
    cell_state_fwd: Spec,
    input: Spec,
    layersOutputs: Spec,  # noqa: N803 - the operator's own name
    hx: Sequence[Spec],
    params: Sequence[Spec],
    *rest: Any,
    wanted: Sequence[bool] | None = None,
    **options: Any,
) -> Work:
    """Twice the forward, of which only what somebody wants is needed: the operator returns every gradient.

    The last argument but one tells whether there is a way back.
    """
    wants_input, wants_state, _, *wants_weights = wanted or (True,) * 4
    flop = linear_flop(input, *_matrices(params))
    unwanted = _unwanted_flop(input, params, hx[0], wants_input, wants_state, is_both_ways=rest[-2])
    needed = flop * (2 if any(wants_weights) else 1) - unwanted
    return Work(full=needed, exact=needed, hardware=2 * flop)


@formula("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu", composite=True)
def rnn(input: Spec, *arguments: Any) -> int:
    """All layers and directions: weights x tokens.

    The overloads differ: (input, hx, params, has_biases, ...) and, packed, (data, batch_sizes, hx, params, ...).
    """
    is_packed = isinstance(arguments[2], Sequence)
    return linear_flop(input, *_matrices(arguments[2] if is_packed else arguments[1]))


@formula("aten::lstm_cell", "aten::gru_cell", "aten::rnn_tanh_cell", "aten::rnn_relu_cell", composite=True)
def rnn_cell(input: Spec, hx: Any, w_ih: Spec, w_hh: Spec, *rest: Any) -> int:
    """Input weights and hidden weights x batch."""
    return linear_flop(input, w_ih, w_hh)
