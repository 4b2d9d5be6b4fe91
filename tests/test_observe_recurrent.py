"""Recurrent layers in an observed step: every matrix for every token, and no gradient that nobody wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.formulas import Spec, Work, find
from flopmeter.flops.observe import observe

SAMPLES, STEPS, FEATURES, UNITS = 3, 5, 6, 4
TOKENS = SAMPLES * STEPS
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def counted(model: nn.Module, *inputs: Any) -> FlopCount:
    with observe(model) as step:
        out = model(*inputs)[0]
        (out if isinstance(out, torch.Tensor) else out.data).sum().backward()
    return step.result()


def data(requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(SAMPLES, STEPS, FEATURES, requires_grad=requires_grad)


def needed(
    gates: int, *, tokens: int = TOKENS, first_tokens: int = SAMPLES, input_grad: bool = False, state_grad: bool = False
) -> tuple[int, int]:
    """One layer, forward and backward: 2 x rows x outputs x inputs for each product."""
    to_gates, from_state = 2 * gates * UNITS * FEATURES, 2 * gates * UNITS * UNITS
    forward = tokens * (to_gates + from_state)
    weights = tokens * (to_gates + from_state)
    # The gradient goes from every step to the state before it; before the first is nobody, unless the caller is.
    states = (tokens if state_grad else tokens - first_tokens) * from_state
    return forward, weights + states + input_grad * tokens * to_gates


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("input_grad", [False, True], ids=["data", "activations"])
@pytest.mark.parametrize("state_grad", [False, True], ids=["zeros", "learned state"])
def test_only_wanted_gradients_count(name: str, input_grad: bool, state_grad: bool) -> None:
    layer = getattr(nn, name)(FEATURES, UNITS, batch_first=True)
    state: Any = torch.zeros(1, SAMPLES, UNITS, requires_grad=state_grad)
    count = counted(layer, data(input_grad), (state, torch.zeros_like(state)) if name == "LSTM" else state)
    assert (count.forward_flop, count.backward_flop) == needed(
        GATES[name], input_grad=input_grad, state_grad=state_grad
    )


@pytest.mark.parametrize("name", GATES)
def test_packed_sequences_count_the_tokens_that_are_there(name: str) -> None:
    lengths = [5, 3, 2]
    layer = getattr(nn, name)(FEATURES, UNITS, batch_first=True)
    count = counted(layer, pack_padded_sequence(data(), lengths, batch_first=True))
    assert (count.forward_flop, count.backward_flop) == needed(GATES[name], tokens=sum(lengths))


def test_two_layers_both_ways_by_hand() -> None:
    layers = nn.LSTM(FEATURES, UNITS, 2, batch_first=True, bidirectional=True)
    count = counted(layers, data())
    rows = 4 * UNITS
    lower, upper, state = 2 * rows * FEATURES, 2 * rows * 2 * UNITS, 2 * rows * UNITS
    forward = 2 * TOKENS * (lower + upper + 2 * state)
    to_states = 4 * (TOKENS - SAMPLES) * state
    assert count.forward_flop == forward
    assert count.backward_flop == forward + to_states + 2 * TOKENS * upper
    assert count.hardware_flop == 3 * forward  # the operator computes them all


def test_frozen_weights_want_none() -> None:
    layer = nn.LSTM(FEATURES, UNITS, batch_first=True).requires_grad_(False)
    rows = 4 * UNITS
    count = counted(layer, data(requires_grad=True))
    assert count.backward_flop == TOKENS * 2 * rows * FEATURES + (TOKENS - SAMPLES) * 2 * rows * UNITS


PARAMS = [Spec((16, 6)), Spec((16, 4)), Spec((16,)), Spec((16,))]


@pytest.mark.parametrize("is_wanted", [(True, True), (False, True), (True, False), (False, False)])
def test_operators_of_other_devices_leave_out_the_same(is_wanted: tuple[bool, bool]) -> None:
    """15 tokens of 6 features in 3 sequences, one layer of 4 units: cuDNN is asked by a mask."""
    everything = 2 * 2 * 15 * 16 * (6 + 4)
    wants_input, wants_state = is_wanted
    left = everything - (not wants_input) * 2 * 15 * 16 * 6 - (not wants_state) * 2 * 3 * 16 * 4
    x, state = Spec((3, 5, 6)), Spec((1, 3, 4))
    mask = [wants_input, wants_state, wants_state, True]
    asked: Callable[..., Work] | None = find("aten::_cudnn_rnn_backward")
    assert asked is not None
    after = [None] * 4 + [2, 4, 0, 1, True, 0.0, True, False, [], None, Spec((1,))]
    assert asked(x, PARAMS, 4, Spec((1,)), state, None, *after, mask) == Work(left, left, everything)
