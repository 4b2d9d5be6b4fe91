from __future__ import annotations

import torch
from torch import nn

from flopmeter.flops.prediction import training_state


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gradient_checkpointing = False


def make_model() -> nn.Sequential:
    return nn.Sequential(Layer(), nn.Dropout(0.5), Layer())


def test_two_models_that_are_trained_alike_have_the_same_state() -> None:
    assert training_state([make_model()]) == training_state([make_model()])


def test_freezing_one_parameter_is_another_state_and_which_one_matters() -> None:
    model = make_model()
    states = {training_state([model])}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        states.add(training_state([model]))
        parameter.requires_grad_(True)
    assert len(states) == 1 + len(list(model.parameters()))


def test_checkpointing_is_another_state() -> None:
    model = make_model()
    before = training_state([model])
    model[2].gradient_checkpointing = True
    assert training_state([model]) != before
    model[2].gradient_checkpointing = False
    assert training_state([model]) == before


def test_evaluation_alone_is_no_other_state() -> None:
    model = make_model()
    before = training_state([model])
    assert training_state([model.eval()]) == before


def test_a_module_more_is_another_state() -> None:
    model = make_model()
    before = training_state([model])
    model.append(nn.ReLU())
    assert training_state([model]) != before
    assert training_state([torch.nn.Sequential()]) != training_state([])
