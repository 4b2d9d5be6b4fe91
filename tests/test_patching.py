"""Whatever takes the place of a function of torch's must go without a trace, and never take somebody else's with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

from flopmeter.hook_hiding import replace_attribute, surround_backward


def test_the_original_comes_back() -> None:
    owner = SimpleNamespace(run="original")
    undo = replace_attribute(owner, "run", "ours")
    assert owner.run == "ours"
    undo()
    assert owner.run == "original"


def test_what_somebody_else_has_put_there_meanwhile_stays() -> None:
    owner = SimpleNamespace(run="original")
    undo = replace_attribute(owner, "run", "ours")
    owner.run = "theirs"
    undo()
    assert owner.run == "theirs"


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_whoever_of_us_goes_last_puts_back_what_was_there_before_all(order: tuple[int, ...]) -> None:
    owner = SimpleNamespace(run="original")
    undos = [replace_attribute(owner, "run", object()) for _ in range(3)]
    for place in order:
        undos[place]()
    assert owner.run == "original"


class Passes:
    """Notes of each backward pass whether it builds a graph, and that it ended."""

    def __init__(self) -> None:
        self.seen: list[bool | str] = []

    @contextmanager
    def __call__(self, builds_graph: bool) -> Iterator[None]:
        self.seen.append(builds_graph)
        try:
            yield
        finally:
            self.seen.append("end")


def test_every_backward_pass_is_surrounded_and_tells_whether_it_builds_a_graph() -> None:
    engine, passes = torch.autograd._engine_run_backward, Passes()
    x = torch.ones(2, requires_grad=True)
    undo = surround_backward(passes)
    x.square().sum().backward()
    torch.autograd.grad(x.square().sum(), x, create_graph=True)
    undo()
    x.sum().backward()
    assert passes.seen == [False, "end", True, "end"]
    assert torch.autograd._engine_run_backward is engine


def fail(gradient: torch.Tensor) -> None:
    raise StopIteration("the user's own")


def test_an_error_in_a_backward_pass_goes_through_as_it_is() -> None:
    passes = Passes()
    x = torch.ones(2, requires_grad=True)
    y = x.sum()
    y.register_hook(fail)
    undo = surround_backward(passes)
    try:
        with pytest.raises(StopIteration, match="the user's own"):
            y.backward()
    finally:
        undo()
    assert passes.seen == [False, "end"]
