"""What is model work, what is recomputation, and what is neither: by units of one square product, counted by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopmeter import load_run, watch
from flopmeter.flops.count import count_flops
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.observation import role
from flopmeter.flops.observe import observe
from flopmeter.goodput import goodput
from flopmeter.monitor.hooks import _follow_trainer
from flopmeter.totals import totals

ROWS, WIDTH = 4, 8
UNIT = 2 * ROWS * WIDTH * WIDTH


class Product(torch.autograd.Function):
    """A product as fused and quantised layers make it: forward and backward run with gradients off."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Fused(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.first, self.second = (kind(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).relu()  # type: ignore[no-any-return]


def rows(requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=requires_grad)


def units(count: FlopCount) -> dict[str, float]:
    phases = {name: getattr(count, f"{name}_flop") / UNIT for name in ("forward", "backward", "recompute", "optimizer")}
    return {name: value for name, value in phases.items() if value}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [nn.Linear, Fused])
@pytest.mark.parametrize("is_watched", [True, False], ids=["watched", "called outside of any module"])
def test_a_checkpoint_runs_its_part_again_whatever_is_in_it(
    kind: type[nn.Linear], reentrant: bool, is_watched: bool
) -> None:
    model = Stack(kind)
    with observe(model if is_watched else nn.Identity()) as step:
        checkpoint(model, rows(), use_reentrant=reentrant).sum().backward()
    assert units(step.result()) == {"forward": 2, "backward": 4, "recompute": 2}
    assert step.result().left_out == ()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_in_a_checkpoint_runs_a_third_time(reentrant: bool) -> None:
    model = Stack()

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: model.first(y).relu(), x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    with observe(model) as step:
        checkpoint(lambda x: model.second(inner(x)).relu(), rows(), use_reentrant=reentrant).sum().backward()
    # Both layers again for the outer one; the inner layer once more for its own gradient.
    assert units(step.result()) == {"forward": 2, "backward": 4, "recompute": 3}


def test_a_part_without_gradients_in_a_checkpoint_is_run_again_too() -> None:
    model = Stack()

    def part(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = model.first(x)
        return (model.second(x) * scale).relu()

    with observe(model) as step:
        checkpoint(part, rows(), use_reentrant=True).sum().backward()
    assert units(step.result()) == {"forward": 2, "backward": 2, "recompute": 2}


class Reversible(torch.autograd.Function):
    """Keeps its input alone, and makes its graph in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module, *_: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        torch.autograd.backward(out, grad)
        return x.grad, None, *(None for _ in ctx.module.parameters())


@pytest.mark.parametrize("kind", [nn.Linear, Fused])
def test_what_is_run_again_without_a_checkpoint_is_said(kind: type[nn.Linear]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Reversible.apply(x, self.layer, *self.layer.parameters())  # type: ignore[no-any-return, no-untyped-call]

    model = Net()
    with observe(model) as step:
        model(rows()).sum().backward()
    assert units(step.result()) == {"forward": 1, "backward": 2, "recompute": 1}
    assert [sentence for sentence in step.result().left_out if "25.0%" in sentence]


def test_a_function_that_is_run_again_in_another_functions_backward_pass_is_told() -> None:
    class Again(Product):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
            with torch.enable_grad():
                out = Product.apply(x, weight)  # type: ignore[no-untyped-call]
            return torch.autograd.grad(out, (x, weight), grad)

    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    with observe(nn.ParameterList([weight])) as step:
        Again.apply(rows(), weight).sum().backward()  # type: ignore[no-untyped-call]
    assert units(step.result()) == {"forward": 1, "backward": 2, "recompute": 1}


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_gradient_inside_a_forward_pass_is_gradient_work(create_graph: bool) -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=create_graph)[0]

    model = Forces()
    with observe(model) as step:
        force = model(rows())
        if create_graph:
            force.square().sum().backward()
    # dx = dy W; its own backward: dy and dW, then x and W of the first product.
    assert units(step.result()) == {"forward": 1, "backward": 5 if create_graph else 1}


def test_passes_without_gradients_are_kept_apart_by_role() -> None:
    model, teacher, reference = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
    with observe(model) as step:
        with torch.no_grad():
            wanted = teacher(rows())
            with role("reference"):
                wanted = wanted + reference(rows())
            wanted @ wanted.t()  # a figure for the log
        (model(rows(False)) - wanted).sum().backward()
    count = step.result()
    assert units(count) == {"forward": 1, "backward": 1}
    logged = 2 * ROWS * ROWS * WIDTH
    assert count.by_role == {"no_grad": UNIT + logged, "reference": UNIT}
    assert count.hardware_flop == 4 * UNIT + logged
    assert sum(count.hardware_by_dtype.values()) == 2 * UNIT
    assert sum(sum(parts.values()) for parts in count.growth["hardware"].values()) == 2 * UNIT


def test_a_role_may_be_taken_into_model_work() -> None:
    model, teacher = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    with observe(model) as step:
        with torch.no_grad(), role("teacher", counts=True):
            wanted = teacher(rows())
        (model(rows(False)) - wanted).sum().backward()
    assert units(step.result()) == {"forward": 2, "backward": 1}
    assert step.result().by_role == {}


def test_counting_on_shapes_and_meta_models_in_the_loop_are_no_work() -> None:
    model, planned = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, device="meta")
    with observe(model) as step:
        model(rows(False)).sum().backward()
        assert count_flops(model, rows(False)).model_flop == 2 * UNIT
        planned(torch.empty(ROWS, WIDTH, device="meta")).sum().backward()
    assert units(step.result()) == {"forward": 1, "backward": 1}
    assert len(step.batches) == 1


def test_an_optimizer_that_keeps_gradients_on_is_no_model_work() -> None:
    class Preconditioned(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad @ parameter.grad.t() @ parameter.grad)

    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = Preconditioned(model.parameters(), lr=0.1)
    with observe(model) as step:
        model(rows(False)).sum().backward()
        optimizer.step()
    assert units(step.result()) == {"forward": 1, "backward": 1, "optimizer": 2 * 2 * WIDTH**3 / UNIT}


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "parts of a model": lambda model, x: model.second(model.first(x)),
    "parts by hand": lambda model, x: x @ model.first.weight @ model.second.weight,
    "the model in a function of torch's": lambda model, x: torch.func.functional_call(
        model, dict(model.named_parameters()), (x,)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_model_whose_forward_is_never_called_is_counted(name: str) -> None:
    model = Stack()
    with observe(model) as step:
        CALLS[name](model, rows(False)).sum().backward()
    assert units(step.result()) == {"forward": 2, "backward": 3}
    assert step.result().coverage == 1.0


def test_what_a_trainer_does_besides_training_is_told_by_its_methods_and_models() -> None:
    told: list[str] = []

    @contextmanager
    def role(name: str) -> Iterator[None]:
        told.append(name)
        yield
        told.append(f"/{name}")

    class Trainer:
        __module__ = "trl.trainer.grpo_trainer"

        def __init__(self) -> None:
            self.model, self.ref_model = nn.Linear(2, 2), nn.Linear(2, 2)

        def _generate(self, prompts: list[int]) -> list[int]:
            return [self._calculate_rewards(prompt) for prompt in prompts]

        def _calculate_rewards(self, prompt: int) -> int:
            return 2 * prompt

    trainer, before = Trainer(), dict(vars(Trainer))
    undo = _follow_trainer(trainer, role)
    assert trainer._generate([4]) == [8]
    assert told == ["generation", "reward", "/reward", "/generation"]
    trainer.ref_model(torch.ones(2))
    assert told[4:] == ["reference", "/reference"]
    with pytest.raises(RuntimeError):
        trainer.ref_model(torch.ones(3))
    assert told[6:] == ["reference", "/reference"]
    trainer.model(torch.ones(2))
    copied = deepcopy(trainer.ref_model)
    copied(torch.ones(2))
    for take_away in undo:
        take_away()
    trainer.ref_model(torch.ones(2))
    assert len(told) == 8
    assert dict(vars(Trainer)) == before


def test_a_loop_that_generates_has_generation_as_a_role_unasked(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=32, pad_token_id=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = transformers.GenerationMixin.generate
    monitor = watch(model, optimizer, output_dir=tmp_path, config={"monitoring": {"sinks": [], "report": False}})
    for _ in range(8):
        batch = torch.randint(1, 32, (2, 4))
        with monitor.role("rollout"):
            made = model.generate(batch, max_new_tokens=4, do_sample=False)
        model(input_ids=made, labels=made).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.finish_training()
    assert transformers.GenerationMixin.generate is before
    found = totals(load_run(tmp_path))
    assert [role.name for role in found.roles if role.seconds] == ["training", "generation", "rollout"]
    # One layer: q, k, v, o of 16 x 16 and three of 16 x 32; all 8 tokens of two rows, and 36 causal pairs each.
    tokens, pairs = 16, 72
    forward = 2 * tokens * (4 * 16 * 16 + 3 * 16 * 32) + 4 * pairs * 16 + 2 * tokens * 16 * 32
    assert load_run(tmp_path).last("count")["model_flop"] == 3 * forward


@pytest.mark.parametrize("has_joined", [True, False], ids=["the run has begun", "it begins with the first pass"])
def test_a_role_before_the_first_step_is_not_counted_twice(tmp_path: Path, has_joined: bool) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, output_dir=tmp_path, config={"monitoring": {"sinks": [], "report": False}})
    monitor.start_training(has_joined=has_joined)
    for step in range(4):
        with monitor.role("rollout"):
            time.sleep(0.0 if step else 0.3)
        model(rows(False)).sum().backward()
        optimizer.step()
    monitor.finish_training()
    run = load_run(tmp_path)
    spent = goodput(run)
    assert (spent.pause_s["rollout"] >= 0.3) is has_joined  # else it was over before the wall time began
    assert spent.other_s > -0.1  # what no part claims: -0.3 s if it were start-up as well
    assert sum(role.seconds for role in totals(run).roles) <= spent.wall_s
