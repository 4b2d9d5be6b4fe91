"""How many FLOPs does a recurrent layer need, as one fused operator?

Every weight matrix meets every token once, in each layer, direction and gate, projections included (the GEMMs of
Appleyard et al., arXiv:1604.01946, section 3); packed sequences have fewer tokens, not other work. Backward needs the
same once for the gradients of inputs and states and once for the weights'. Left out: biases, gates and other point-wise
work. `_thnn_fused_lstm_cell` and its kin are point-wise and have no formula; where a layer is not fused (GRU and RNN on
a CPU, packed LSTM), its `linear`s and `mm`s are seen instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flopmeter.flops.formulas import Spec, formula
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
def mkldnn_rnn_layer_backward(input: Spec, weight1: Spec, weight2: Spec, *rest: Any, **options: Any) -> int:
    """Twice the forward: the operator returns every gradient, wanted or not."""
    return 2 * linear_flop(input, weight1, weight2)


@formula("aten::_cudnn_rnn", "aten::miopen_rnn")
def cudnn_rnn(input: Spec, weight: Sequence[Spec], *rest: Any, **options: Any) -> int:
    """All layers and directions: weights x tokens."""
    return linear_flop(input, *_matrices(weight))


@formula("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward")
def cudnn_rnn_backward(input: Spec, weight: Sequence[Spec], *rest: Any, **options: Any) -> int:
    """Once for inputs and states, which the chain always needs, and once for the weights if their gradient is asked.

    `output_mask` (input, hx, cx, weight) is the last argument.
    """
    output_mask = options.get("output_mask", rest[-1] if rest else ())
    return linear_flop(input, *_matrices(weight)) * (2 if output_mask[3] else 1)


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
    **options: Any,
) -> int:
    """Twice the forward: the operator returns every gradient."""
    return 2 * linear_flop(input, *_matrices(params))


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
