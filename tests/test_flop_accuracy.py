"""Every row of the accuracy benchmark: counted within 0.1 % of the hand formulas, and nothing changed by counting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the rows are models of transformers, built from configs")
pytest.importorskip("peft", reason="the LoRA rows need peft")

from flopmeter.flops.observe import observe
from rows import ROWS

TOLERANCE = 1e-3
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the models' own libraries


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch adds up gathered weights in any order when it has two threads: two plain runs differ then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def snapshot(case: Any) -> dict[str, torch.Tensor]:
    """All that a step leaves behind in the model, and the random state."""
    left = {f"state {name}": tensor for name, tensor in case.model.state_dict().items()}
    left |= {f"grad {name}": p.grad for name, p in case.model.named_parameters() if p.grad is not None}
    return {name: tensor.clone() for name, tensor in left.items()} | {"rng": torch.get_rng_state()}


def hooks(case: Any) -> list[tuple[int, int, bool]]:
    """Of each module; some models put hooks of their own at their first call."""
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in case.model.modules()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.endswith("compiled_non_reentrant")) for name in ROWS]
)
def test_a_row_is_counted_right_and_left_as_it_was(name: str) -> None:
    row = ROWS[name]
    plain = row.build()
    torch.manual_seed(0)
    plain.step()
    expected = snapshot(plain)

    case = row.build()
    torch.manual_seed(0)
    with observe(case.model) as step:
        case.step()
    actual = snapshot(case)
    assert actual.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(actual[key], expected[key])] == []
    assert hooks(case) == hooks(plain)

    for convention in ("exact", "full"):
        count, truth = step.result(convention), getattr(row.truth, convention)
        for part in ("forward_flop", "model_flop", "recompute_flop"):
            assert getattr(count, part) == pytest.approx(getattr(truth, part), rel=TOLERANCE), (convention, part)
    assert count.coverage == 1.0
    assert count.uncounted == {}
