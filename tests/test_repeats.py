"""Products that a custom autograd function makes a second time are recomputation, not gradient work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopmeter.flops.observe import observe

ROWS, WIDTH, OUT = 6, 4, 10
PRODUCT = 2 * ROWS * WIDTH * OUT


class Plain(torch.autograd.Function):
    """A linear layer that keeps what it needs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight.T).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        out = grad.expand(x.shape[0], weight.shape[0])
        return out @ weight, out.T @ x


class Chunked(Plain):
    """One that makes its product again, as chunked losses do."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        out = grad * torch.ones_like(x @ weight.T)
        return out @ weight, out.T @ x


class Model(nn.Module):
    def __init__(self, function: type[Plain], out: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(out, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("out", [OUT, WIDTH], ids=["oblong", "square"])
@pytest.mark.parametrize(("function", "repeats"), [(Plain, 0), (Chunked, 1)])
def test_only_what_is_made_twice_is_recomputation(function: type[Plain], repeats: int, out: int) -> None:
    model, product = Model(function, out), 2 * ROWS * WIDTH * out
    with observe(model) as observed:
        model(torch.ones(ROWS, WIDTH, requires_grad=True)).backward()
    count = observed.result()
    assert (count.forward_flop, count.backward_flop) == (product, 2 * product)
    assert count.recompute_flop == repeats * product
    assert count.hardware_flop == (3 + repeats) * product


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_repeat_inside_of_a_checkpoint_is_recomputation_too(reentrant: bool) -> None:
    model = Model(Chunked, OUT)
    with observe(model) as observed:
        loss = checkpoint(model, torch.ones(ROWS, WIDTH, requires_grad=True), use_reentrant=reentrant)
        (2 * loss).backward()
    count = observed.result()
    # The checkpoint's second run and the function's own one.
    assert (count.forward_flop, count.backward_flop, count.recompute_flop) == (PRODUCT, 2 * PRODUCT, 2 * PRODUCT)


def test_a_reference_pass_without_gradients_does_not_hide_a_repeat() -> None:
    model, reference = Model(Chunked, OUT), Model(Chunked, OUT)
    with observe(model) as observed:
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        loss = model(x)
        with torch.no_grad():
            expected = reference(x)
        (loss - expected).backward()
    count = observed.result()
    assert (count.forward_flop, count.backward_flop, count.recompute_flop) == (PRODUCT, 2 * PRODUCT, PRODUCT)
    assert count.by_role == {"no_grad": PRODUCT}
