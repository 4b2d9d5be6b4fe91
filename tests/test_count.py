"""Counting beside the training run: the number is right by hand, and nothing of the run is changed by it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopmeter.errors import CountError
from flopmeter.flops.count import MAX_REAL_ELEMENTS, count_flops, unwrap
from flopmeter.flops.on_shapes import only_shapes

ROWS, WIDTH = 4, 8
UNIT = 2 * ROWS * WIDTH * WIDTH
"""One square linear layer, one direction."""


def mlp(num_layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))


def rows(num_rows: int = ROWS, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(num_rows, WIDTH, requires_grad=requires_grad)


class ConvNet(nn.Module):
    """Everything that keeps a state: batch norm, dropout, random numbers of Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 5)
        self.drop.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + 1e-3 * random.random() + 1e-3 * float(np.random.rand())
        x = F.dropout(self.drop(self.norm(self.conv(x)).relu()), 0.5) * scale
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


def transformers_model(model_type: str, **numbers: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="builds a transformers model from its config")
    config = transformers.AutoConfig.for_model(model_type, **numbers)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    return model


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 96}
MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "conv net": lambda: (ConvNet(), {"x": torch.randn(2, 3, 8, 8)}),
    "llama": lambda: (transformers_model("llama", num_hidden_layers=2, num_key_value_heads=2, **SIZES), tokens()),
    "gpt2": lambda: (transformers_model("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=96), tokens()),
    "mixtral": lambda: (
        transformers_model("mixtral", num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4, **SIZES),
        tokens(),
    ),
}


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * 12).reshape(2, 12) + 3
    return {"input_ids": ids, "labels": ids}


def train(model: nn.Module, batch: dict[str, Any], num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        out = model(**batch)
        loss = out.square().mean() if isinstance(out, torch.Tensor) else out.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def state(model: nn.Module) -> dict[str, Any]:
    """All that a step leaves behind, by value; hooks and flags too."""
    tensors = {**model.state_dict(), **{f"{name}.grad": p.grad for name, p in model.named_parameters()}}
    return {
        "tensors": {name: None if t is None else t.clone() for name, t in tensors.items()},
        "objects": [(id(p), id(p.grad)) for p in model.parameters()] + [id(b) for b in model.buffers()],
        "hooks": [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in model.modules()],
        "flags": [m.training for m in model.modules()] + [p.requires_grad for p in model.parameters()],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
    }


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    torch.testing.assert_close(after["tensors"], before["tensors"], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(after["random"][0], before["random"][0], rtol=0, atol=0)
    rest = ("objects", "hooks", "flags")
    return [key for key in rest if before[key] != after[key]] + (
        [] if before["random"][1:] == after["random"][1:] else ["random"]
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_counting_between_two_steps_changes_nothing_bit_for_bit(name: str, training: bool) -> None:
    def losses(count: bool) -> list[float]:
        seed()
        model, batch = MODELS[name]()
        called: list[nn.Module] = []
        model.register_forward_hook(lambda module, *_: called.append(module))
        first = train(model, batch, 1)
        if count:
            before, copied = state(model), copy.deepcopy(batch)
            count_flops(model, batch, training=training)
            assert differing(before, state(model)) == []
            torch.testing.assert_close(batch, copied, rtol=0, atol=0)
        assert len(called) == 1
        return first + train(model, batch, 2)

    assert losses(count=True) == losses(count=False)


@pytest.fixture(scope="module")
def benchmark_rows() -> dict[str, Any]:
    """The models of benchmarks/flop_accuracy.py with their true FLOPs, by hand formula."""
    pytest.importorskip("transformers", reason="the rows are models of transformers, built from configs")
    pytest.importorskip("peft", reason="the LoRA rows need peft")
    from rows import ROWS

    # A gradient penalty is a step of its own, and what a compiled model recomputes is the compiler's choice.
    return {name: row for name, row in ROWS.items() if name != "gradient_penalty" and "compiled" not in name}


@pytest.mark.filterwarnings("ignore")  # warnings of the models' own libraries
def test_every_benchmark_model_is_counted_right_without_a_step_and_left_as_it_was(
    benchmark_rows: dict[str, Any],
) -> None:
    wrong = {}
    for name, row in benchmark_rows.items():
        case = row.build()
        case.step()
        before = state(case.model)
        for convention in ("exact", "full"):
            truth, count = getattr(row.truth, convention), count_flops(case.model, case.batch, convention=convention)
            counted = (count.forward_flop, count.model_flop, count.recompute_flop)
            if counted != pytest.approx((truth.forward_flop, truth.model_flop, truth.recompute_flop), rel=1e-9):
                wrong[name, convention] = (counted, truth)
        assert (name, differing(before, state(case.model))) == (name, [])
    assert wrong == {}


def test_a_failed_count_changes_nothing_either() -> None:
    class Broken(ConvNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("no\nsuch thing")

    seed()
    model = Broken()
    model.register_forward_hook(lambda *_: None)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = state(model)

    with pytest.raises(CountError, match="FLOPs of Broken cannot be counted: meta: ValueError: no such thing"):
        count_flops(model, {"x": torch.randn(2, 3, 8, 8)})
    after = state(model)
    after["random"] = before["random"]  # randn above
    assert differing(before, after) == []


def test_a_real_fallback_changes_nothing_either() -> None:
    class Looking(ConvNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out if out.sum().item() < 1e9 else -out

    seed()
    model, x = Looking(), torch.randn(2, 3, 8, 8, requires_grad=True)
    train(model, {"x": x}, 1)
    x.grad = None
    before = state(model)

    assert count_flops(model, {"x": x}).method == "real"
    assert differing(before, state(model)) == []
    assert x.grad is None


def test_the_gradients_of_a_linear_layer_are_two_products_and_of_the_first_one() -> None:
    count = count_flops(mlp(3), rows())

    assert count.forward_flop == 3 * UNIT
    assert count.backward_flop == 5 * UNIT
    assert count.hardware_flop == count.model_flop == 8 * UNIT
    assert (count.method, count.coverage, count.uncounted, count.left_out) == ("meta", 1.0, {}, ())
    assert count.by_module == {"0": 2 * UNIT, "1": 3 * UNIT, "2": 3 * UNIT}
    assert count.by_dtype == {"float32": 8 * UNIT}


def test_an_input_that_wants_a_gradient_gets_it_counted() -> None:
    assert count_flops(mlp(3), rows(requires_grad=True)).backward_flop == 6 * UNIT


def test_a_forward_pass_alone_has_no_backward() -> None:
    count = count_flops(mlp(3), rows(), training=False)

    assert (count.forward_flop, count.backward_flop) == (3 * UNIT, 0)


@pytest.mark.parametrize(
    "batch", [rows(), (rows(),), [rows()], {"input": rows()}], ids=["tensor", "tuple", "list", "dict"]
)
def test_a_batch_may_be_a_tensor_positions_or_names(batch: Any) -> None:
    assert count_flops(mlp(), batch).forward_flop == 2 * UNIT


def test_a_batch_of_another_kind_is_refused() -> None:
    with pytest.raises(CountError, match="not str"):
        count_flops(mlp(), "8 x 2048")  # type: ignore[arg-type]


def test_a_batch_that_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(CountError, match="Sequential cannot be counted: meta: RuntimeError"):
        count_flops(mlp(), torch.randn(ROWS, WIDTH + 1))


def test_tokens_outside_of_the_vocabulary_are_refused_as_they_would_be_for_real() -> None:
    model = nn.Sequential(nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH))

    with pytest.raises(CountError, match="from 10 to 10 do not fit a table of 10 rows"):
        count_flops(model, torch.full((1, 4), 10))
    with pytest.raises(CountError, match="from -1 to -1"):
        count_flops(model, torch.full((1, 4), -1))


def test_an_empty_batch_takes_no_flops() -> None:
    count = count_flops(mlp(), rows(0))

    assert (count.model_flop, count.method) == (0, "meta")


def test_a_model_without_trainable_parameters_has_no_backward() -> None:
    count = count_flops(mlp().requires_grad_(False), rows())

    assert (count.forward_flop, count.backward_flop) == (2 * UNIT, 0)


def test_a_model_of_integers_takes_no_flops_and_the_count_says_so() -> None:
    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.int32), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    count = count_flops(Integers(), rows().int())

    assert (count.hardware_flop, count.by_dtype) == (0, {})
    assert count.left_out == ("Products of integers are no floating-point operations: aten::mm.",)


def test_frozen_parts_cost_only_what_passes_through_them() -> None:
    model = mlp(3)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)

    # The middle layer's weight, and the way to it through the last.
    assert count_flops(model, rows()).backward_flop == 2 * UNIT


def test_tied_weights_cost_as_often_as_they_are_used() -> None:
    model = mlp(3)
    model[2].weight = model[0].weight

    assert count_flops(model, rows()).backward_flop == 5 * UNIT


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_counting_works_where_gradients_are_off(around: Callable[[], Any]) -> None:
    model, x = mlp(3), rows()
    with around():
        count = count_flops(model, x)
        is_on = torch.is_grad_enabled()

    assert (count.backward_flop, is_on) == (5 * UNIT, False)


def test_under_autocast_the_dtype_is_that_of_the_operation() -> None:
    model, x = mlp(3), rows()
    with torch.autocast("cpu", torch.bfloat16):
        count = count_flops(model, x)

    assert count.by_dtype == {"bfloat16": 8 * UNIT}


@pytest.fixture
def one_process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_wrappers_are_taken_off(one_process_group: None) -> None:
    model = mlp(3)
    wrapped = {
        "compiled": torch.compile(model, backend="eager"),
        "data parallel": nn.parallel.DistributedDataParallel(model),
        "both": torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
    }

    assert {name: unwrap(outer) is model for name, outer in wrapped.items()} == dict.fromkeys(wrapped, True)
    assert {count_flops(outer, rows()).model_flop for outer in wrapped.values()} == {8 * UNIT}


def test_a_compiled_model_is_still_compiled_afterwards() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seen.append("graph")
            return graph.forward(*args)

        return run

    class Compiled(nn.Module):  # dynamo passes over a bare Sequential
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Compiled()
    model.compile(backend=backend)
    x = rows()
    model(x)
    count = count_flops(model, x)
    assert (count.model_flop, seen) == (5 * UNIT, ["graph"])
    model(x)
    assert seen == ["graph", "graph"]


@torch.library.custom_op("flopmeter_test::mystery", mutates_args=())
def mystery(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


mystery.register_fake(torch.empty_like)


def test_an_operator_without_a_formula_is_named() -> None:
    class Mystery(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mystery(mystery(self.inner(x)))

    count = count_flops(Mystery(), rows(), training=False)

    assert count.uncounted == {"flopmeter_test::mystery": 2}
    assert count.forward_flop == UNIT


@torch.library.custom_op("flopmeter_test::by_shapes", mutates_args=())
def by_shapes(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right


@torch.library.custom_op("flopmeter_test::by_tensors", mutates_args=())
def by_tensors(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right


by_shapes.register_fake(lambda left, right: left.new_empty(left.shape[0], right.shape[1]))
by_tensors.register_fake(lambda left, right: left.new_empty(left.shape[0], right.shape[1]))


def test_formulas_that_a_library_has_registered_with_torch_are_used_and_said() -> None:
    from torch.utils import flop_counter

    ops = torch.ops.flopmeter_test

    @flop_counter.register_flop_formula(ops.by_shapes)
    def of_shapes(left: Any, right: Any, *_: Any, out_shape: Any = None, **others: Any) -> int:
        return 2 * left[0] * right[0] * right[1]

    @flop_counter.register_flop_formula(ops.by_tensors, get_raw=True)
    def of_tensors(left: Any, right: Any, *_: Any, out_val: Any = None, **others: Any) -> int:
        return 2 * left.shape[0] * right.shape[0] * right.shape[1]

    class Library(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return by_tensors(by_shapes(x, self.weight), self.weight)

    try:
        count = count_flops(Library(), rows(), training=False)
    finally:
        for op in (ops.by_shapes, ops.by_tensors):
            flop_counter.flop_registry.pop(op)
    assert (count.forward_flop, count.uncounted, count.coverage) == (2 * UNIT, {}, 1.0)
    assert count.by_op == {"flopmeter_test::by_shapes": UNIT, "flopmeter_test::by_tensors": UNIT}
    assert count.method == (
        "meta, flopmeter_test::by_shapes by its library's formula, flopmeter_test::by_tensors by its library's formula"
    )
    assert count_flops(Library(), rows(), training=False).uncounted.keys() == count.by_op.keys()


class Looking(nn.Module):
    """Looks at a value that depends on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        return out if out.sum().item() < 1e9 else -out


def test_a_model_that_looks_at_activations_is_run_for_real_and_says_so() -> None:
    count = count_flops(Looking(), rows())

    assert (count.method, count.model_flop) == ("real", 8 * UNIT)
    assert count.left_out == (
        "Could not be counted as meta: RuntimeError: Tensor.item() cannot be called on meta tensors",
    )


def test_a_batch_that_is_too_large_to_be_run_for_real_is_refused() -> None:
    with pytest.raises(CountError, match="which takes a smaller batch"):
        count_flops(Looking(), rows(2 * 256 * MAX_REAL_ELEMENTS // WIDTH))


def test_a_model_without_weights_that_looks_at_them_cannot_be_counted() -> None:
    with torch.device("meta"):
        model = Looking()

    with pytest.raises(CountError, match=r"Looking cannot be counted: meta: RuntimeError: Tensor\.item\(\)"):
        count_flops(model, rows())


class Attention(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.qkv, self.is_causal = nn.Linear(WIDTH, 3 * WIDTH, bias=False), is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)


@pytest.mark.parametrize(
    ("is_causal", "convention", "num_pairs"), [(True, "exact", 5 * 6 // 2), (True, "full", 25), (False, "exact", 25)]
)
def test_causal_attention_is_half_in_one_convention_and_full_in_the_other(
    is_causal: bool, convention: Any, num_pairs: int
) -> None:
    samples, length = 3, 5
    count = count_flops(Attention(is_causal), torch.randn(samples, length, WIDTH), convention=convention)

    # Scores and their product with the values: 2 FLOP for each pair and channel, twice; again twice in backward.
    scores = 2 * 2 * num_pairs * WIDTH * samples
    projection = 2 * samples * length * WIDTH * 3 * WIDTH
    assert count.forward_flop == projection + scores
    assert count.backward_flop == projection + 2 * scores
    assert count.convention == convention


def test_an_explicit_mask_keeps_its_values_and_is_counted() -> None:
    class Masked(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, device=x.device).triu(1)
            query, key, value = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.device))

    x = torch.randn(3, 5, WIDTH)

    assert count_flops(Masked(True), x).model_flop == count_flops(Attention(True), x).model_flop


def test_values_are_not_believed_after_something_without_values_was_written_into_them() -> None:
    class Routed(nn.Module):
        """Each row goes to the expert that a layer picks; experts that received nothing are left out."""

        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(mlp(1) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = self.router(x).argmax(-1)
            received = torch.zeros(2, dtype=torch.long, device=x.device)
            received.scatter_add_(0, chosen, torch.ones_like(chosen))
            parts = zip(self.experts, x[chosen.argsort()].split(received.tolist()), strict=True)
            return torch.cat([expert(part) for expert, part in parts])

    count = count_flops(Routed(), rows(), training=False)

    assert count.method == "real"
    assert count.forward_flop == UNIT + 2 * ROWS * WIDTH * 2


def test_a_repeated_call_on_shapes_gives_what_the_first_one_gave() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            w = self.weight
            numbers = [w * 2, w * 2.0, w.int() * 2, w.int() * 2.0, w.int() * True, w.t() * 2, w + x, w + x[0]]
            several = [*torch.std_mean(w, 0), *w.max(0), *w.split(2), *w.unbind()]
            return [*numbers, *several, w[x[:, 0] > 2], w[:, [0, 1]], torch.cat([w, x]), w.cumsum(0), w.softmax(-1)]

    def layouts(model: nn.Module) -> list[Any]:
        x = torch.tensor([[1.0], [3.0], [2.0], [4.0]]).expand(4, 6)
        return [(t.shape, t.stride(), t.dtype) for t in model(x)]

    real, empty = Calls(), Calls().to("meta")
    with only_shapes():
        assert [layouts(empty), layouts(empty)] == [layouts(real)] * 2
