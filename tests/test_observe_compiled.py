"""Compiled models: they are counted right, and they still run compiled code afterwards."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from flopmeter import watch
from flopmeter.flops.observe import observe

SAMPLES, LENGTH, WIDTH, HEADS = 2, 8, 16, 2

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning", "ignore:.*:UserWarning"
)


class Block(nn.Module):
    """Four projections and causal attention, fused or by hand."""

    def __init__(self, is_eager: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_eager = is_eager

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.is_eager:
            blocked = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-1, -2)).masked_fill(blocked, float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


TOKEN_FLOP = 2 * SAMPLES * LENGTH * 4 * WIDTH * WIDTH
PAIR_FLOP = 4 * WIDTH * SAMPLES * LENGTH * (LENGTH + 1) // 2
FORWARD = TOKEN_FLOP + PAIR_FLOP
BACKWARD = 2 * FORWARD


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class CountingBackend:
    """A compiler back end that runs the graph as it is and counts its calls: compiled code in use is seen by it."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        self.num_graphs += 1

        def run(*args: torch.Tensor) -> object:
            self.num_calls += 1
            return graph(*args)

        return run


def train(model: nn.Module, num_steps: int) -> list[float]:
    torch.manual_seed(0)
    losses = []
    for _ in range(num_steps):
        loss = model(torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
def test_a_compiled_model_runs_its_compiled_code_during_and_after_the_count(way: str) -> None:
    backend = CountingBackend()
    model: nn.Module = Block()
    if way == "torch.compile":
        model = torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[assignment]
    else:
        model.compile(backend=backend, fullgraph=True)
    train(model, 2)
    with observe(model) as step:
        train(model, 1)
    assert (backend.num_graphs, backend.num_calls) == (1, 3)
    assert step.result().model_flop == FORWARD + BACKWARD
    train(model, 2)
    assert (backend.num_graphs, backend.num_calls) == (1, 5)


@pytest.mark.parametrize("is_eager", [False, True], ids=["fused", "eager"])
def test_inductor_is_counted_in_full_with_either_attention(is_eager: bool) -> None:
    model = torch.compile(Block(is_eager))
    train(model, 2)
    with observe(model) as step:
        train(model, 1)
    count = step.result()
    assert (count.forward_flop, count.backward_flop) == pytest.approx((FORWARD, BACKWARD))
    assert count.coverage == 1.0
    assert count.method.startswith("observed, split by the uncompiled twin")


def test_work_that_never_reaches_the_dispatcher_lowers_coverage_and_the_twin_counts() -> None:
    with torch._inductor.config.patch(cpp_wrapper=True):
        model = torch.compile(Block())
        train(model, 2)
        with observe(model) as step:
            train(model, 1)
    count = step.result()
    assert count.coverage is not None
    assert count.coverage < 0.97
    assert (count.forward_flop, count.backward_flop) == pytest.approx((FORWARD, BACKWARD))


class Casting(nn.Module):
    """Casts within its forward pass, as Accelerate has it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.block(x)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_compiled_model_under_autocast_is_counted_in_the_dtype_that_ran(where: str) -> None:
    model = torch.compile(Casting() if where == "inside" else Block(), backend="aot_eager")
    x = torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
            loss = model(x).float().square().mean()
        loss.backward()  # and the count below comes after the loop has left autocast

    step()
    with observe(model) as observed:
        step()
    count = observed.result()
    assert count.by_dtype == {"bfloat16": pytest.approx(FORWARD + BACKWARD)}
    assert {dtype: sum(parts.values()) for dtype, parts in count.growth["exact"].items()} == count.by_dtype


def test_a_twin_that_counts_for_hidden_work_does_so_under_the_autocast_of_the_call() -> None:
    with torch._inductor.config.patch(cpp_wrapper=True):
        model = torch.compile(Block())
        for _ in range(2):
            with observe(model) as step:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True)).float().square().mean()
                loss.backward()
    count = step.result()
    assert count.coverage is not None
    assert count.coverage < 0.97
    assert count.by_dtype == {"bfloat16": pytest.approx(FORWARD + BACKWARD)}


def test_nothing_is_kept_of_what_runs_while_a_cuda_graph_is_made() -> None:
    """Torch ends the user's step with an error over a tensor that lives on in the graph's memory."""
    from torch._inductor import cudagraph_trees

    query = torch.ones(1, HEADS, LENGTH, WIDTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    with observe(nn.Identity()) as observed:
        with cudagraph_trees.graph_capture_lock:  # held by torch while it warms up and while it records
            made = mask.clone()
            F.scaled_dot_product_attention(query, query, query, attn_mask=made)
            kept = weakref.ref(made)
            del made
        assert kept() is None
        assert observed.calls == []
        F.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    assert observed.calls


def watched(folder: Path, model: nn.Module, num_steps: int, compiled_from: int) -> list[dict[str, Any]]:
    """What the record says of a run whose optimizer steps in compiled code from a step on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    compiled = torch.compile(optimizer.step, backend="eager")
    settings = {"peak_flop_per_s": 1e12, "sinks": [], "report": False, "profile_steps": False}
    monitor = watch(model, optimizer, output_dir=folder, config={"monitoring": settings})
    for index in range(num_steps):
        model(torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True)).sum().backward()
        (compiled if index >= compiled_from else optimizer.step)()
        optimizer.zero_grad()
    monitor.finish_training()
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["model as it is", "model compiled too"])
@pytest.mark.parametrize("compiled_from", [0, 3], ids=["always", "when the measured step ends"])
def test_a_compiled_optimizer_step_neither_breaks_nor_hides_the_measured_step(
    tmp_path: Path, is_compiled: bool, compiled_from: int
) -> None:
    model: nn.Module = Block()
    if is_compiled:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    before = torch._C._dispatch_tls_local_include_set()
    lines = watched(tmp_path, model, num_steps=6, compiled_from=compiled_from)
    counts = [line["model_flop"] for line in lines if line.get("event") == "count"]
    assert counts == [FORWARD + BACKWARD]
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._dispatch_tls_local_include_set().raw_repr() == before.raw_repr()
