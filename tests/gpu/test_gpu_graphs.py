"""CUDA graphs and compiled code work with us installed, in every way that people make them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gpu_loop import IS_SIMULATED, Loop, Text, waits_allowed, watched
from torch import nn
from torch._dynamo.utils import counters

from flopmeter import load_run
from flopmeter.flops.observe import observe

pytestmark = pytest.mark.filterwarnings(  # the compiler's own
    "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning", "ignore:.*:UserWarning"
)


def test_a_forward_and_backward_pass_can_be_captured(tmp_path: Path) -> None:
    loop = Loop()
    with watched(loop, tmp_path) as monitor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loop.losses(12, monitor)  # numbers of ours are on their way when the capture begins
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with waits_allowed(), torch.cuda.graph(graph):
            loss = loop.model(loop.batch).square().mean()
            loss.backward()
        for _ in range(10):
            graph.replay()
            loop.optimizer.step()
    with waits_allowed():
        assert IS_SIMULATED or loss.isfinite().item()  # a simulated device computes no loss
    assert len(load_run(tmp_path)) >= 12


def test_a_whole_step_can_be_captured(tmp_path: Path) -> None:
    """Its replays are not seen: no code of the loop's runs in them."""
    loop = Loop()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-4)
    with watched(loop, tmp_path) as monitor:
        loop.losses(12, monitor)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with waits_allowed(), torch.cuda.graph(graph):
            loop.model(loop.batch).square().mean().backward()
            loop.optimizer.step()
        graph.replay()
    assert list(load_run(tmp_path).step) == list(range(1, 13))  # the captured one did not run


def test_a_step_can_be_captured_where_we_would_measure_it(tmp_path: Path) -> None:
    """Torch's recipe warms up for three steps, after which the fourth would be observed; its mask is on the device."""
    loop = Loop()
    with waits_allowed():
        model = loop.model = Text().cuda()
        loop.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        ids = torch.zeros(8, 128, dtype=torch.long, device="cuda")
        mask = torch.ones_like(ids)

    def step() -> None:
        model(input_ids=ids, attention_mask=mask).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=True)

    with watched(loop, tmp_path):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with waits_allowed(), torch.cuda.graph(graph):
            step()
        graph.replay()
        with waits_allowed():  # the next step that runs is observed instead, and its mask is read
            for _ in range(3):
                step()
    run = load_run(tmp_path)
    assert len(run) == 6
    assert [event["event"] for event in run.events].count("count") == 1


def test_make_graphed_callables_takes_a_watched_model(tmp_path: Path) -> None:
    loop = Loop()
    with watched(loop, tmp_path) as monitor:
        with waits_allowed():
            torch.cuda.make_graphed_callables(loop.model, (loop.batch,))
        loop.losses(20, monitor)
    assert len(load_run(tmp_path)) == 20


def train_compiled(mode: str, folder: Path | None) -> tuple[list[float], int]:
    """Losses of a compiled model, and how many graphs were made of it."""
    torch._dynamo.reset()
    counters.clear()
    loop = Loop()
    model = torch.compile(loop.model, mode=mode)
    losses = []
    with waits_allowed(), nullcontext() if folder is None else watched(loop, folder, model=model):  # compiling waits
        for _ in range(30):
            loss = model(loop.batch).square().mean()
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.item()))
    return losses, counters["stats"]["unique_graphs"]


@pytest.mark.values
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_has_the_losses_that_it_has_without_us(tmp_path: Path, mode: str) -> None:
    plain, _ = train_compiled(mode, None)
    ours, _ = train_compiled(mode, tmp_path)
    assert ours == pytest.approx(plain)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_stays_compiled(tmp_path: Path, mode: str) -> None:
    _, num_plain = train_compiled(mode, None)
    _, num_ours = train_compiled(mode, tmp_path)
    assert num_ours == num_plain
    assert load_run(tmp_path).column("perf/model_flop")[-1] == Loop().flop


class Masked(nn.Module):
    """Attention whose mask is made inside the compiled code, in the memory of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        query = self.project(x).unflatten(-1, (4, 16)).transpose(1, 2)
        is_real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        bias = torch.zeros_like(is_real, dtype=x.dtype).masked_fill(~is_real, -1e4)[:, None, None, :]
        return F.scaled_dot_product_attention(query, query, query, attn_mask=bias.expand(-1, 4, x.shape[1], -1)).sum()


def test_graphs_of_compiled_code_can_be_made_in_an_observed_step() -> None:
    """As on a batch of a new shape: compiled, warmed up and recorded, and torch finds no tensor of ours in between."""
    torch._dynamo.reset()
    with waits_allowed():
        model = torch.compile(Masked().cuda(), mode="reduce-overhead")
        x, lengths = torch.randn(2, 32, 64, device="cuda"), torch.tensor([20, 32], device="cuda")
        with observe(model) as observed:
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                model(x, lengths).backward()
                model.zero_grad(set_to_none=True)  # a gradient in a graph's memory must not be there at its next run
        assert observed.result().model_flop > 0
