"""FLOPs as a formula: derived by hand, and none where there is none."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopmeter.flops.side_count import count_flops
from flopmeter.flops.symbolic import Formula, formula


def llama(**more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="builds a transformers model from its config")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = transformers.AutoConfig.for_model("mistral", num_key_value_heads=2, vocab_size=1000, **sizes, **more)
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


MATMUL_PARAMETERS = 2 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96) + 1000 * 64


def test_a_decoders_formula_is_six_p_and_its_pairs() -> None:
    found = formula(llama(sliding_window=None))

    # 6 P for each token and 12 FLOP for each pair, layer and channel; S(S + 1)/2 pairs.
    assert found is not None
    assert found.evaluate(3, 777) == 3 * (6 * MATMUL_PARAMETERS * 777 + 12 * 2 * 64 * 777 * 778 // 2)
    assert found.coefficients[1, 2] == 12 * 2 * 64 / 2
    # 768 S (S + 1) + 6 P S, with 6 P / 768 = 948.
    assert 6 * MATMUL_PARAMETERS == 768 * 948
    assert found.expression == "768*B*S*(S + 949)"
    assert found.lengths == (3, 1040)


def test_the_full_convention_has_all_pairs() -> None:
    found = formula(llama(sliding_window=None), convention="full")

    assert found is not None
    assert found.evaluate(2, 100) == 2 * (6 * MATMUL_PARAMETERS * 100 + 12 * 2 * 64 * 100**2)


def test_a_forward_pass_is_a_third() -> None:
    model = llama(sliding_window=None)
    both, forward = formula(model), formula(model, training=False)

    assert both is not None
    assert forward is not None
    assert {power: 3 * c for power, c in forward.coefficients.items()} == both.coefficients


def test_a_sliding_window_has_no_formula_in_the_exact_convention() -> None:
    long, short = llama(sliding_window=700), llama(sliding_window=8)

    assert formula(long) is formula(short) is None
    assert formula(long, convention="full") is not None


def test_a_formula_must_meet_the_points_it_will_be_used_for() -> None:
    class Clipped(nn.Module):
        """Of a long text only the end is read."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner = nn.Embedding(10, 8), nn.Linear(8, 8, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(self.embed(ids[:, -3000:]))

    model = Clipped()

    found = formula(model)
    assert found is not None
    assert found.expression == "384*B*S"  # 2 x 8 x 8, three times: the embedding's output needs its gradient
    assert formula(model, check_at=[(1, 4096)]) is None


def test_a_strided_convolution_has_no_formula() -> None:
    assert formula(nn.Sequential(nn.Conv1d(3, 4, 3, stride=3, padding=1))) is None


def test_a_convolution_that_keeps_the_length_has_one() -> None:
    found = formula(nn.Sequential(nn.Conv1d(3, 4, 3, padding=1, bias=False)))

    # 3 taps x 3 channels to 4, forward and the weight's gradient.
    assert found is not None
    assert found.expression == f"{2 * 2 * 3 * 3 * 4}*B*S"


def test_every_pair_in_a_batch_gives_a_square_of_the_batch_size() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            pooled = self.embed(ids).mean(1)
            return F.cross_entropy(pooled @ pooled.t().clone(), torch.arange(len(ids)))

    found = formula(Contrast())

    # B x 8 by 8 x B, and a gradient for either side.
    assert found is not None
    assert found.expression == f"{3 * 2 * 8}*B^2"
    assert found.evaluate(7, 5) == count_flops(Contrast(), (7, 5)).model_flop


def test_a_model_without_matrix_work_has_the_formula_zero() -> None:
    found = formula(nn.Sequential(nn.Embedding(10, 4)))

    assert found is not None
    assert (found.expression, found.evaluate(3, 5)) == ("0", 0)


def test_a_model_that_takes_one_length_only_has_no_formula() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(10, 4), nn.Parameter(torch.zeros(12, 4))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed(ids) + self.positions

    assert formula(Fixed()) is None


def test_a_model_that_must_be_run_for_real_has_no_formula() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            return out if out.sum().item() < 1e9 else -out

    assert formula(Looking()) is None


@pytest.mark.parametrize(
    ("coefficients", "expression"),
    [
        ({(1, 1): 6, (1, 2): 4}, "2*B*S*(2*S + 3)"),
        ({(1, 0): 5}, "5*B"),
        ({(1, 0): 1, (2, 0): 1}, "B*(B + 1)"),
        ({(0, 0): 7}, "7"),
        ({(0, 0): 7, (0, 1): 3}, "3*S + 7"),
        ({(1, 2): 1, (1, 1): 1, (1, 0): 0}, "B*S*(S + 1)"),
        ({(1, 1): Fraction(3, 2), (1, 2): Fraction(1, 2)}, "1/2*B*S*(S + 3)"),
        ({(2, 1): 8, (1, 2): 4, (1, 0): -4}, "4*B*(S^2 + 2*B*S - 1)"),
    ],
)
def test_an_expression_has_what_is_common_in_front(coefficients: dict[Any, Any], expression: str) -> None:
    found = Formula(coefficients={power: Fraction(c) for power, c in coefficients.items()}, lengths=(1, 1))

    assert found.expression == expression
    python = expression.replace("^", "**")
    for b, s in ((1, 1), (3, 7), (2, 100)):
        assert found.evaluate(b, s) == eval(python, {"B": b, "S": s})
