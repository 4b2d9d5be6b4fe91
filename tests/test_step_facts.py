"""Does an observed step tell the habits of the training code: syncs, spelled-out attention, odd sizes, optimizer?"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopmeter.flops.observe import observe
from flopmeter.step_facts import MAX_LOOKS, facts_of, odd_sizes

LENGTH, WIDTH, HEADS = 12, 32, 4


class Attention(nn.Module):
    """Self-attention, spelled out or through SDPA."""

    def __init__(self, *, is_eager: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.is_eager, self.dropout = is_eager, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.is_eager:
            mixed = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        return mixed.transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.first, self.second = Attention(**kwargs), Attention(**kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def facts(net: nn.Module, optimizer: torch.optim.Optimizer | None = None, num_reads: int = 0) -> dict[str, Any]:
    with observe(net) as observed:
        loss = net(torch.randn(2, LENGTH, WIDTH))
        loss.backward()
        for _ in range(num_reads):
            loss.item()
        if optimizer is not None:
            optimizer.step()
    return facts_of(observed, observed.result())


def test_attention_that_is_spelled_out_is_found_with_its_length_and_modules() -> None:
    assert facts(Net(is_eager=True))["eager_attention"] == {
        "calls": 2, "length": LENGTH, "modules": ["first", "second"]
    }  # fmt: skip


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_through_sdpa_is_not_eager_whatever_kernel_it_takes(dropout: float) -> None:
    # With dropout torch has no fused kernel on a CPU, and computes it with plain products of its own.
    assert "eager_attention" not in facts(Net(is_eager=False, dropout=dropout))


def test_reading_values_is_counted_with_the_line_that_does_it() -> None:
    found = facts(Net(is_eager=False), num_reads=3)
    lines, first = inspect.getsourcelines(facts)
    line = first + next(i for i, text in enumerate(lines) if ".item()" in text)
    assert found["host_syncs"] == {"aten::_local_scalar_dense": 3}
    assert found["host_sync_places"] == [f"test_step_facts.py:{line}"]


def test_a_long_loop_of_reads_is_counted_to_the_end_without_looking_up_each() -> None:
    assert facts(Net(is_eager=False), num_reads=MAX_LOOKS + 50)["host_syncs"] == {
        "aten::_local_scalar_dense": MAX_LOOKS + 50
    }


def test_an_optimizer_that_reads_its_own_step_count_waits_for_nobody() -> None:
    net = Net(is_eager=False)
    assert facts(net, torch.optim.AdamW(net.parameters(), foreach=False))["host_syncs"] == {}


@pytest.mark.parametrize(
    ("kind", "settings"), [("fused", {"fused": True}), ("foreach", {"foreach": True}), ("for-loop", {"foreach": False})]
)
def test_the_kind_of_optimizer_is_told_by_what_it_runs(kind: str, settings: dict[str, bool]) -> None:
    net = Net(is_eager=False)
    found = facts(net, torch.optim.AdamW(net.parameters(), **settings))
    assert found["optimizer"] == kind
    assert found["num_parameter_tensors"] == 4  # two layers with weight and bias
    assert 0 < found["num_optimizer_ops"] < found["num_ops"]


def test_a_step_without_optimizer_says_nothing_of_one() -> None:
    found = facts(Net(is_eager=False))
    assert (found["optimizer"], found["num_optimizer_ops"]) == (None, 0)


def test_every_operator_is_counted_once() -> None:
    net = nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4)
    with observe(net) as observed:
        x.add(1).mul(2)
    assert observed.facts is not None
    assert observed.facts.num_ops == 2


def test_large_odd_sizes_are_listed_and_small_ones_are_not() -> None:
    net = nn.Sequential(nn.Linear(256, 1003), nn.Linear(1003, 10), nn.Linear(10, 2), nn.Embedding(50257, 8))
    assert odd_sizes([net]) == [
        {"module": "0", "dimension": "out_features", "size": 1003},
        {"module": "1", "dimension": "in_features", "size": 1003},
    ]


def test_the_rest_of_the_facts_is_there() -> None:
    found = facts(Net(is_eager=False))
    # Per sample and layer: a product of 12 x 32 by 32 x 96, forward and twice backward but for the first layer's input.
    linear = 2 * (2 * LENGTH) * WIDTH * 3 * WIDTH
    assert found["matmul_dtypes"]["float32"] >= 5 * linear
    assert (found["is_compiled"], found["num_recompiles"], found["tf32"]) == (False, None, None)
