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

from flopmeter.flops.formulas import Spec, Work, formula, linear_flop, tensors


def _matrices(weights: Any) -> list[Spec]:
    matrices = [weight for weight in tensors(weights) if len(weight.shape) == 2]
    if not matrices:
        raise ValueError("the shapes of the weights are unknown")
    return matrices


@formula("aten::mkldnn_rnn_layer input of_input of_state")
@formula(
    "aten::lstm_cell aten::gru_cell aten::rnn_tanh_cell aten::rnn_relu_cell input hx of_input of_state",
    composite=True,
)
def one_layer(input: Spec, of_input: Spec, of_state: Spec, **_: Any) -> int:
    """One layer in one direction, or a cell: weights of the input and of the state x tokens."""
    return linear_flop(input, of_input, of_state)


@formula("aten::mkldnn_rnn_layer_backward input of_input of_state bias_0 bias_1 hx")
def mkldnn_rnn_layer_backward(
    input: Spec, of_input: Spec, of_state: Spec, hx: Spec, wanted: Sequence[bool] | None = None, **others: Any
) -> Work:
    """Twice the forward, of which only what somebody wants is needed: the operator returns every gradient."""
    wants_input, wants_first, wants_hidden, _, _, wants_state = wanted[:6] if wanted else (True,) * 6
    first, hidden = linear_flop(input, of_input), linear_flop(input, of_state)
    through_states = hidden if wants_state else hidden - linear_flop(hx, of_state)
    needed = first * (wants_input + wants_first) + hidden * wants_hidden + through_states
    return Work(full=needed, exact=needed, hardware=2 * (first + hidden))


@formula("aten::_cudnn_rnn aten::miopen_rnn input weights")
def layers(input: Spec, weights: Sequence[Spec], **_: Any) -> int:
    """All layers and directions: weights x tokens."""
    return linear_flop(input, *_matrices(weights))


@formula("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu", composite=True)
def rnn(input: Spec, *arguments: Any) -> int:
    """The overloads differ: (input, hx, params, has_biases, ...) and, packed, (data, batch_sizes, hx, params, ...)."""
    is_packed = isinstance(arguments[2], Sequence)
    return layers(input, arguments[2] if is_packed else arguments[1])


@formula(
    """aten::_cudnn_rnn_backward input weights stride buffer hx cx output grad_output grad_hy grad_cy mode hidden_size
    proj_size num_layers batch_first dropout train bidirectional batch_sizes dropout_state reserve output_mask""",
    """aten::miopen_rnn_backward input weights stride buffer hx cx output grad_output grad_hy grad_cy mode hidden_size
    num_layers batch_first dropout train bidirectional batch_sizes dropout_state reserve output_mask""",
)
def layers_backward(
    input: Spec, weights: Sequence[Spec], hx: Spec, bidirectional: bool, output_mask: Sequence[bool], **others: Any
) -> Work:
    """Once for inputs and states, which the kernel always does, and once for the weights if their gradient is asked."""
    wants_input, wants_state, _, wants_weights = output_mask
    flop = layers(input, weights) * (2 if wants_weights else 1)
    needed = flop - _unwanted_flop(input, weights, hx, wants_input, wants_state, bidirectional)
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
