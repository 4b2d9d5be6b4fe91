"""The estimate: a count on shapes where that can be had, else the leaves of the module tree, else a rule of thumb."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter import load_run, watch
from flopmeter.demo import GPT, GPTConfig
from flopmeter.errors import CountError
from flopmeter.flops import estimate
from flopmeter.flops.count import count_flops
from flopmeter.flops.estimate import LEAVES, RULE_OF_THUMB, estimate_flops, read_leaves
from flopmeter.flops.workload import Workload, needs_of, workload_of
from flopmeter.record import Run

L, H, FFN, V = 3, 64, 144, 320


def gpt() -> GPT:
    return GPT(GPTConfig(num_layers=L, hidden=H, num_heads=4, length=128, vocabulary=V))


def leaves(model: nn.Module, batch: Any, **options: Any) -> Any:
    return read_leaves(model, workload=workload_of(batch, needs_of(model)), **options)


@pytest.fixture(autouse=True)
def machine_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "MAX_S", 60.0)


@pytest.mark.parametrize("convention", ["exact", "full"])
def test_the_estimate_is_a_count_on_shapes_where_that_can_be_had(convention: Any) -> None:
    found, counted = (f(gpt(), (2, 40), convention=convention) for f in (estimate_flops, count_flops))
    assert found.model_flop == counted.model_flop
    assert found.method == "estimate (counted on meta)"
    inner = gpt()
    for model in (nn.DataParallel(inner), torch.compile(inner, backend="eager")):
        assert estimate_flops(model, (2, 40)).model_flop == estimate_flops(inner, (2, 40)).model_flop


def test_it_is_in_the_dtype_of_the_weights_or_of_autocast() -> None:
    assert set(estimate_flops(gpt().to(torch.float16), (2, 10)).by_dtype) == {"float16"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert set(estimate_flops(gpt(), (2, 10)).by_dtype) == {"bfloat16"}


class Stubbed(nn.Module):
    """As DeepSpeed leaves a model whose parameters lie on all ranks: each is empty here, and knows its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(V, H), nn.Linear(H, FFN, bias=False)
        for parameter in self.parameters():
            parameter.ds_shape = parameter.shape
            parameter.data = torch.empty(0)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.embedding(input_ids))
        return out


def test_where_parameters_have_no_shapes_here_the_leaves_are_read_and_it_is_said() -> None:
    found = estimate_flops(Stubbed(), {"input_ids": torch.zeros(2, 10, dtype=torch.long)})
    assert found.forward_flop == 2 * 20 * H * FFN
    assert found.model_flop == 3 * found.forward_flop
    assert found.method == LEAVES
    assert any("could not be counted on shapes" in sentence for sentence in found.left_out)


class Looping(nn.Module):
    """Python over time: on shapes it takes as many operators as on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(H, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = self.body(x)
        return x


@pytest.mark.parametrize(("name", "value"), [("MAX_S", -1.0), ("MAX_OPERATORS", 100), ("MAX_BYTES", -(1 << 40))])
def test_a_count_on_shapes_that_takes_too_much_is_given_up(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    monkeypatch.setattr(estimate, name, value)
    found = estimate_flops(Looping(), {"x": torch.zeros(5, H)})
    assert found.method == LEAVES
    assert found.forward_flop == 2 * 5 * H * H  # once: what the code does with a layer is not seen
    assert any("takes more than" in sentence for sentence in found.left_out)


def test_leaves_follow_padding_and_freezing() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(V, H), "attention": nn.Linear(H, FFN), "head": nn.Linear(FFN, V)})
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "attention_mask": mask}
    found, full = leaves(model, batch), leaves(model, batch, convention="full")
    assert (found.forward_flop, full.forward_flop) == (2 * 5 * (H + V) * FFN, 2 * 8 * (H + V) * FFN)
    assert found.hardware_flop == full.model_flop == 3 * full.forward_flop
    model.embedding.requires_grad_(False)  # the first product owes its input nothing
    assert found.model_flop - leaves(model, batch).model_flop == 2 * 5 * H * FFN
    model.attention.requires_grad_(False)
    assert leaves(model, batch).backward_flop == 2 * 5 * FFN * V


def test_of_a_list_of_experts_a_token_passes_the_top_k() -> None:
    layer = nn.ModuleDict(
        {
            "gate": nn.Linear(H, 6),
            "experts": nn.ModuleList(nn.Sequential(nn.Linear(H, FFN), nn.Linear(FFN, H)) for _ in range(6)),
            "shared_expert": nn.Linear(H, H),
        }
    )
    model = nn.ModuleDict({"embedding": nn.Embedding(V, H), "attention": layer})
    model.config = SimpleNamespace(num_experts_per_tok=2)
    assert leaves(model, torch.zeros(1, 7, dtype=torch.long)).forward_flop == pytest.approx(
        2 * 7 * (6 * H + 2 * (2 * H * FFN) + H * H)
    )


def test_tied_weights_are_work_where_they_are_a_head_but_a_second_name_is_not() -> None:
    model, batch = gpt(), torch.zeros(2, 10, dtype=torch.long)
    before = leaves(model, batch).model_flop
    model.head.weight = model.token_embedding.weight
    model.layers = model.blocks
    assert leaves(model, batch).model_flop == before


def test_convolutions_of_images_are_read_by_their_strides() -> None:
    """16 x 16 pixels: a stride of 2 leaves 8 x 8 positions; the transposed one works at those and makes 16 x 16."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1, groups=4), nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 2, 1)
    )
    first, *others = 27 * 8 * 64, 9 * 2 * 8 * 64, 4 * 8 * 4 * 64, 4 * 2 * 256
    found = leaves(model, {"x": torch.zeros(5, 3, 16, 16)})
    assert found.forward_flop == 2 * 5 * (first + sum(others))
    assert found.backward_flop == 2 * 5 * (first + 2 * sum(others))


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers_by_hand(kind: type[nn.RNNBase], gates: int) -> None:
    model = nn.Sequential(nn.Embedding(V, H), kind(H, 32, num_layers=2, batch_first=True))
    weights = gates * 32 * (H + 32) + gates * 32 * (32 + 32)
    assert leaves(model, torch.zeros(3, 20, dtype=torch.long)).forward_flop == 2 * 60 * weights


class Unreadable(nn.Module):
    """Multiplies with parameters of its own: nothing in the tree says how."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(4, 4, 32)), nn.Parameter(torch.zeros(32, 2, 2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a kernel that knows no shapes")


@pytest.mark.parametrize(("config", "coefficient"), [(None, 2.0), (SimpleNamespace(vision_config={}), 2.5)])
def test_a_model_that_cannot_be_read_gets_the_rule_of_thumb_and_says_so(config: Any, coefficient: float) -> None:
    model = Unreadable()
    model.config = config
    found = estimate_flops(model, {"input_ids": torch.zeros(2, 8, dtype=torch.long)})
    assert found.forward_flop == coefficient * 640 * 16
    assert found.model_flop == 3 * found.forward_flop
    assert found.method == RULE_OF_THUMB
    assert any("a kernel that knows no shapes" in sentence for sentence in found.left_out)


def test_a_model_without_parameters_is_an_error() -> None:
    with pytest.raises(CountError, match="no parameters"):
        read_leaves(nn.ReLU(), workload=Workload(samples=1))


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.transpose(0, 1))[0]
        return out


class Passing(Turning):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)[0]
        return out


@pytest.mark.parametrize(
    ("make", "reads", "is_sequence_first"),
    [
        (lambda: nn.LSTM(4, 4), "sequence", True),
        (lambda: nn.GRU(4, 4, batch_first=True), "sequence", False),
        (lambda: nn.TransformerEncoderLayer(4, 2, 4), "sequence", True),
        (lambda: nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), "sequence", False),
        (lambda: nn.MultiheadAttention(4, 2), "sequence", True),
        (Passing, "sequence", True),
        (Turning, "sequence", False),
        (lambda: nn.Sequential(nn.Embedding(9, 4), Passing()), "text", True),
        (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), Passing()), "values", False),
        (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Conv1d(4, 4, 3)), "ids", False),  # over words
        (lambda: nn.Sequential(nn.Embedding(9, 8), nn.Conv1d(4, 4, 3)), "values", False),  # a label's table
        (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), "ids", False),
        (lambda: nn.Linear(4, 4), "values", False),
    ],
)
def test_a_model_says_what_it_reads(make: Callable[[], nn.Module], reads: str, is_sequence_first: bool) -> None:
    needs = needs_of(make())
    assert (needs.reads, needs.is_sequence_first) == (reads, is_sequence_first)


def watched(folder: Path, model: nn.Module, batches: list[dict[str, torch.Tensor]], *, patches: bool = True) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {"mfu_calculation_mode": "estimate", "peak_flop_per_s": 1e12, "sinks": [], "report": False}
    config = {"monitoring": {**settings, "patches": patches}}
    monitor = watch(model, optimizer, output_dir=folder, config=config)
    for batch in batches:
        model(**batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.finish_training()
    return load_run(folder)


def ids(rows: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def test_estimate_mode_counts_the_first_call_on_shapes_and_never_measures_a_step(tmp_path: Path) -> None:
    model, batches = gpt(), [ids(2, 40), ids(2, 40), ids(3, 100), ids(1, 7)]
    expected = [count_flops(model, batch).model_flop for batch in batches]
    run = watched(tmp_path, model, batches)
    assert list(run.column("perf/model_flop")) == pytest.approx(expected)
    assert [event["method"] for event in run.named("count")] == ["estimate (counted on meta)"]
    assert not any("observed" in marks for marks in run.marks.values())


def test_estimate_mode_reads_the_leaves_of_a_model_that_shapes_do_not_tell_of(tmp_path: Path) -> None:
    class Peeking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(H, FFN, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.body(x)
            return out if out.sum().item() < 1e9 else -out

    run = watched(tmp_path, Peeking(), [{"x": torch.zeros(rows, H)} for rows in (4, 4, 9)])
    assert list(run.column("perf/model_flop")) == [2 * 2 * rows * H * FFN for rows in (4, 4, 9)]
    assert [event["method"] for event in run.named("count")] == [LEAVES]


def test_where_nothing_of_torch_may_be_replaced_the_model_is_not_counted_on_shapes(tmp_path: Path) -> None:
    model, calls = gpt(), []
    model.head.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    expected = count_flops(model, ids(2, 40)).model_flop
    run = watched(tmp_path, model, [ids(2, 40)] * 3, patches=False)
    assert len(calls) == 3  # the steps' own
    assert list(run.named("count")) == []
    assert list(run.column("perf/model_flop")) == pytest.approx([expected] * 3)
