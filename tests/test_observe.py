"""The observed step in the situations that training code makes: every expected number is derived by hand."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopmeter import count_flops, load_run, watch
from flopmeter.errors import CountError
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.formulas import _registry, formula
from flopmeter.flops.observe import ObservedStep, observe
from flopmeter.flops.pairs import sum_dtype
from flopmeter.flops.profiled import ProfiledStep

ROWS, WIDTH = 4, 8
UNIT = 2 * ROWS * WIDTH * WIDTH
"""One square layer, one direction."""


class Stack(nn.Module):
    """Square linear layers without bias: every product costs one UNIT."""

    def __init__(self, num_layers: int = 2, checkpointing: str | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant").relu()
            else:
                x = layer(x).relu()
        return x


def rows(requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=requires_grad)


def units(count: FlopCount) -> dict[str, float]:
    """The phases in multiples of one layer's product."""
    phases = {name: getattr(count, f"{name}_flop") / UNIT for name in ("forward", "backward", "recompute", "optimizer")}
    return {name: value for name, value in phases.items() if value}


def test_the_first_layers_input_needs_no_gradient() -> None:
    model = Stack(2)
    with observe(model) as step:
        model(rows()).sum().backward()
    assert units(step.result()) == {"forward": 2, "backward": 3}
    assert step.result().coverage == 1.0
    assert step.result().uncounted == {}


class DataParallel(nn.DataParallel):
    """As on a machine with two GPUs: each half of the batch goes through the model on a thread of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.device_ids = [0, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.cat(list(pool.map(self.module, x.chunk(2))))


def test_a_forward_pass_on_other_threads_is_counted_by_its_twin() -> None:
    model = DataParallel(Stack(2))
    with observe(model) as step:
        model(rows()).sum().backward()
    count = step.result()
    assert units(count) == {"forward": 2, "backward": 3}
    assert count.hardware_flop == 5 * UNIT
    assert count.coverage == 3 / 5  # what was seen: the backward pass


def test_a_forward_pass_that_nobody_saw_is_no_count() -> None:
    model = Stack(2)
    with observe(model) as step:
        with ThreadPoolExecutor(1) as pool:
            out = pool.submit(model, rows()).result()
        out.sum().backward()
    with pytest.raises(CountError, match="forward pass was not seen"):
        step.result()


def test_frozen_layers_cost_only_the_gradients_that_pass_through_them() -> None:
    model = Stack(3)
    model.layers[0].requires_grad_(False)
    model.layers[2].requires_grad_(False)
    with observe(model) as step:
        model(rows()).sum().backward()
    # Weight of the middle layer, and the way to it through the last.
    assert units(step.result()) == {"forward": 3, "backward": 2}


def test_gradient_accumulation_adds_its_micro_batches() -> None:
    model, optimizer = Stack(2), torch.optim.SGD(Stack(2).parameters(), lr=0.1)
    with observe(model) as step:
        for _ in range(4):
            model(rows()).sum().backward()
        optimizer.step()
    assert units(step.result()) == {"forward": 8, "backward": 12}


def test_evaluation_in_between_is_no_training() -> None:
    model = Stack(2)
    with observe(model) as step:
        with torch.no_grad():
            model(rows())
        model(rows()).sum().backward()
        with torch.inference_mode():
            model.eval()(rows())
    assert units(step.result()) == {"forward": 2, "backward": 3}


def test_a_frozen_part_inside_the_model_under_no_grad_is_training_all_the_same() -> None:
    class Frozen(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.layers[0](x)
            return self.layers[1](x)

    model = Frozen()
    with observe(model) as step:
        model(rows()).sum().backward()
    assert units(step.result()) == {"forward": 2, "backward": 1}


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
def test_checkpointing_is_recomputation_and_not_model_flop(kind: str) -> None:
    model = Stack(2, checkpointing=kind)
    with observe(model) as step:
        model(rows(requires_grad=True)).sum().backward()
    # A single product saves nothing that needs running it again, so non-reentrant checkpointing stops before it.
    recompute = {"recompute": 2} if kind == "reentrant" else {}
    assert units(step.result()) == {"forward": 2, "backward": 4} | recompute


def test_non_reentrant_checkpointing_runs_again_all_but_the_last_product() -> None:
    model = Stack(3)
    with observe(model) as step:
        checkpoint(model, rows(requires_grad=True), use_reentrant=False).sum().backward()
    # relu saves its own result, so the last product is needed again too.
    assert units(step.result()) == {"forward": 3, "backward": 6, "recompute": 3}


def test_a_gradient_penalty_is_gradient_work() -> None:
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), rows(requires_grad=True)
    with observe(model) as step:
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    # y = xW', then g = 2yW by a product of its own; its backward: dg W' and y'dg, then through y: x'dy and dy W.
    assert units(step.result()) == {"forward": 1, "backward": 1 + 2 + 2}


def test_several_models_and_several_backward_passes() -> None:
    generator, critic = Stack(1), Stack(1)
    with observe(generator, critic) as step:
        critic(generator(rows()).detach()).sum().backward()
        critic(generator(rows())).sum().backward()
    assert units(step.result()) == {"forward": 4, "backward": 1 + 3}


def test_autocast_counts_by_the_dtype_of_the_operation() -> None:
    model = Stack(2)
    with observe(model) as step, torch.autocast("cpu", torch.bfloat16):
        model(rows()).float().sum().backward()
    assert step.result().by_dtype == {"bfloat16": 5 * UNIT}


def test_matrix_work_of_the_optimizer_is_told_apart() -> None:
    class Muonlike(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad @ parameter.grad.T)

    model = Stack(1)
    optimizer = Muonlike(model.parameters(), lr=0.1)
    with observe(model) as step:
        model(rows()).sum().backward()
        optimizer.step()
    count = step.result()
    assert count.optimizer_flop == 2 * WIDTH**3
    assert count.model_flop == 2 * UNIT
    assert count.hardware_flop == 2 * UNIT + 2 * WIDTH**3


def test_torch_func_is_counted() -> None:
    model = Stack(1)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    with observe(model) as step:
        torch.func.grad(loss)(parameters, rows())
    assert step.result().model_flop == 2 * UNIT


def test_work_is_named_by_the_module_that_did_it_forward_and_backward() -> None:
    model = Stack(2)
    with observe(model) as step:
        model(rows()).sum().backward()
    assert step.result().by_module == {"layers.0": 2 * UNIT, "layers.1": 3 * UNIT}


def test_work_outside_of_any_module_is_counted() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with observe() as step:
        (rows() @ weight).sum().backward()
    assert units(step.result()) == {"forward": 1, "backward": 1}


HEADS, LENGTH, HEAD_DIM, SAMPLES = 2, 6, 4, 3


class Attention(nn.Module):
    """Causal attention without projections, three ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.kind == "fused":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.kind == "math":
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.kind == "mask":
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = q @ k.transpose(-1, -2) / HEAD_DIM**0.5
        blocked = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        if self.kind == "masked_fill":
            scores = scores.masked_fill(blocked, float("-inf"))
        elif self.kind == "where":
            scores = torch.where(blocked, torch.finfo(scores.dtype).min, scores)
        else:
            scores = scores + torch.zeros(LENGTH, LENGTH).masked_fill(blocked, -1e4)
        if self.kind == "sink":  # a learned column takes part in the softmax and is then dropped
            sink = torch.zeros(*scores.shape[:-1], 1)
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("kind", ["fused", "math", "mask", "masked_fill", "where", "additive", "sink"])
def test_causal_attention_counts_the_same_whatever_the_kernel(kind: str) -> None:
    model = Attention(kind)
    q, k, v = (torch.randn(SAMPLES, HEADS, LENGTH, HEAD_DIM, requires_grad=True) for _ in range(3))
    with observe(model) as step:
        model(q, k, v).sum().backward()
    pairs = SAMPLES * HEADS * LENGTH * (LENGTH + 1) // 2
    exact, full = step.result("exact"), step.result("full")
    # Two products forward and four backward, each one multiply-add per pair and head dimension.
    assert (exact.forward_flop, exact.backward_flop) == pytest.approx((4 * HEAD_DIM * pairs, 8 * HEAD_DIM * pairs))
    all_pairs = SAMPLES * HEADS * LENGTH**2
    assert (full.forward_flop, full.backward_flop) == (4 * HEAD_DIM * all_pairs, 8 * HEAD_DIM * all_pairs)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masks", ["causal", "padding", "both"])
def test_multihead_attention_counts_the_same_whether_or_not_it_returns_its_weights(
    masks: str, need_weights: bool
) -> None:
    """For the weights torch adds the mask inside the product of queries and keys, by baddbmm."""
    lengths = [LENGTH, 4, 1]
    model = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if masks != "padding" else None
    padding = torch.arange(LENGTH) >= torch.tensor(lengths)[:, None] if masks != "causal" else None
    with observe(model) as step:
        model(x, x, x, attn_mask=causal, key_padding_mask=padding, need_weights=need_weights)[0].sum().backward()
    pairs = {
        "causal": SAMPLES * LENGTH * (LENGTH + 1) // 2,
        "padding": sum(n * n for n in lengths),
        "both": sum(n * (n + 1) // 2 for n in lengths),
    }[masks]
    tokens = SAMPLES * LENGTH if masks == "causal" else sum(lengths)
    # Four projections of every token, and two products of a head's width for every pair and head; none for padding.
    projections = 4 * 2 * tokens * WIDTH * WIDTH
    found = step.result()
    assert found.forward_flop == pytest.approx(projections + 4 * WIDTH * pairs)
    assert found.backward_flop == pytest.approx(2 * (projections + 4 * WIDTH * pairs))


def test_what_baddbmm_multiplies_by_zero_is_no_mask() -> None:
    q, k, v = (torch.randn(SAMPLES, LENGTH, HEAD_DIM) for _ in range(3))
    scratch = torch.full((SAMPLES, LENGTH, LENGTH), float("-inf"))
    with observe() as step:
        torch.baddbmm(scratch, q, k.transpose(1, 2), beta=0).softmax(-1).bmm(v)
    assert step.result().forward_flop == 4 * HEAD_DIM * SAMPLES * LENGTH**2


def test_a_softmax_that_is_no_attention_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Softmax(-1), nn.Linear(WIDTH, WIDTH, bias=False))
    with observe(model) as step:
        model(rows()).sum().backward()
    assert units(step.result()) == {"forward": 2, "backward": 3}


def test_padding_shrinks_exact_and_not_full() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, WIDTH)
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
            self.pooler = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.layer(self.embedding(input_ids))
            return self.pooler(hidden[:, 0]).sum()

    model = Tagger()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    with observe(model) as step:
        model(torch.zeros(2, 5, dtype=torch.long), attention_mask=mask).backward()
    token, sample = 2 * WIDTH * WIDTH, 2 * 2 * WIDTH * WIDTH
    assert step.result("full").forward_flop == 10 * token + sample
    assert step.result("exact").forward_flop == pytest.approx(7 * token + sample)
    growth = step.result("exact").growth
    assert growth["exact"] == {"float32": {"tokens": pytest.approx(21 * token), "samples": 3 * sample}}
    assert growth["full"] == growth["hardware"] == {"float32": {"tokens_processed": 30 * token, "samples": 3 * sample}}


@pytest.fixture
def custom_op() -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    library = torch.library.Library("flopmeter_test", "DEF")
    library.define("twice_mm(Tensor a, Tensor b) -> Tensor")
    library.impl("twice_mm", lambda a, b: 2 * a.mm(b), "CPU")
    yield torch.ops.flopmeter_test.twice_mm
    library._destroy()
    _registry.pop("flopmeter_test::twice_mm", None)


def test_an_operator_without_a_formula_is_named(custom_op: Callable[..., torch.Tensor]) -> None:
    with observe() as step:
        custom_op(rows(), torch.randn(WIDTH, WIDTH))
    assert step.result().uncounted == {"flopmeter_test::twice_mm": 1}


SOLVERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "linalg_inv_ex": torch.linalg.inv, "linalg_qr": torch.linalg.qr, "_linalg_svd": torch.linalg.svd,
    "_linalg_eigh": torch.linalg.eigh, "linalg_cholesky_ex": torch.linalg.cholesky, "linalg_lu": torch.linalg.lu,
    "_linalg_solve_ex": lambda x: torch.linalg.solve(x, x), "linalg_lstsq": lambda x: torch.linalg.lstsq(x, x),
    "_linalg_det": torch.linalg.det, "cholesky_inverse": torch.cholesky_inverse, "geqrf": torch.geqrf,
}  # fmt: skip


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_and_decompositions_are_named_as_uncounted(name: str) -> None:
    with observe() as step:
        SOLVERS[name](torch.eye(WIDTH))
    assert step.result().uncounted == {f"aten::{name}": 1}


def test_the_norm_of_clipped_gradients_is_nothing_uncounted() -> None:
    model = Stack(1)
    with observe(model) as step:
        model(rows()).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.linalg.cross(torch.ones(1, 3), torch.ones(1, 3))
    assert step.result().uncounted == {}


def test_a_formula_of_the_users_counts_it(custom_op: Callable[..., torch.Tensor]) -> None:
    @formula("flopmeter_test::twice_mm")
    def twice_mm(a: Any, b: Any) -> int:
        return int(2 * a.shape[0] * a.shape[1] * b.shape[1])

    with observe() as step:
        custom_op(rows(), torch.randn(WIDTH, WIDTH))
    assert step.result().uncounted == {}
    assert step.result().forward_flop == UNIT


def test_a_module_whose_work_was_not_seen_lowers_the_coverage() -> None:
    class Opaque(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.detach().numpy() @ self.weight.detach().numpy().T)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Opaque(WIDTH, WIDTH, bias=False))
    with observe(model) as step:
        model(rows())
    assert step.result().coverage == pytest.approx(0.5)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("watch", [True, False])
def test_observing_changes_no_number(watch: bool) -> None:
    def run(watched: bool) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 2))
        optimizer, losses = torch.optim.Adam(model.parameters()), []
        for _ in range(3):
            with observe(model) if watched else nullcontext():
                loss = model(torch.randn(2, 3, 6, 6)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, state_of(model), torch.get_rng_state()

    losses, state, rng = run(watch)
    plain_losses, plain_state, plain_rng = run(False)
    assert losses == plain_losses
    assert all(torch.equal(state[name], plain_state[name]) for name in plain_state)
    assert torch.equal(rng, plain_rng)


def test_hooks_and_patches_are_gone_afterwards() -> None:
    model = Stack(2)
    engine = torch.autograd._engine_run_backward
    handle = model.layers[0].register_forward_hook(lambda *_: None)
    with observe(model) as step:
        model(rows()).sum().backward()
    assert torch.autograd._engine_run_backward is engine
    assert len(model.layers[0]._forward_hooks) == 1
    handle.remove()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert step.result().model_flop == 5 * UNIT


def test_an_exception_inside_leaves_nothing_behind() -> None:
    model = Stack(2)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), observe(model):
        model(torch.randn(ROWS, WIDTH + 1))
    assert all(not module._forward_hooks for module in model.modules())
    with observe(model) as step:
        model(rows())
    assert units(step.result()) == {"forward": 2}


def test_a_model_copied_during_the_step_does_not_report() -> None:
    model = Stack(1)
    with observe(model) as step:
        twin = copy.deepcopy(model)
        model(rows()).sum().backward()
    twin(rows())
    assert units(step.result()) == {"forward": 1, "backward": 1}


class Outside(torch.autograd.Function):
    """A product that never reaches the dispatcher, as a library's own kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return torch.from_numpy(grad.numpy() @ weight.numpy()), torch.from_numpy(grad.numpy().T @ x.numpy())


class Hidden(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Outside.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def test_a_layer_whose_product_is_not_seen_is_counted_by_its_shapes_and_named() -> None:
    pytest.importorskip("numpy")
    model = nn.Sequential(*(kind(WIDTH, WIDTH, bias=False) for kind in (nn.Linear, Hidden, nn.Linear)))
    with observe(model) as step:
        model(rows()).sum().backward()
    count = step.result()
    assert units(count) == {"forward": 3, "backward": 5}
    assert count.coverage == 2 / 3
    assert count.method == "observed, 1 modules by the shapes of their weights"
    assert [sentence for sentence in count.left_out if "No product was seen in 1 " in sentence]
    assert count.by_module == {"0": 2 * UNIT, "1": 3 * UNIT, "2": 3 * UNIT}


@pytest.mark.parametrize("kind", [None, "reentrant", "non_reentrant"])
@pytest.mark.parametrize("makes", [None, torch.empty_like, torch.zeros_like], ids=["alone", "empty", "zeros"])
def test_a_function_whose_result_no_operator_wrote_is_named(makes: Any, kind: str | None) -> None:
    pytest.importorskip("numpy")

    class Mixer(torch.autograd.Function):
        """A kernel without weights of its own, whose result is new memory or is written into torch's."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            mixed = x.detach().numpy() @ x.detach().numpy().T @ x.detach().numpy()
            if makes is None:
                return torch.from_numpy(mixed)
            out: torch.Tensor = makes(x)
            out.numpy()[:] = mixed
            return out.view(*x.shape)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    class Scaled(torch.autograd.Function):
        """What is written by operators, a part at a time, is nothing hidden."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(x)
            for row in range(len(x)):
                out[row] = 2 * x[row]
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def net(x: torch.Tensor) -> torch.Tensor:
        hidden = layers[1](Scaled.apply(layers[0](x)))  # type: ignore[no-untyped-call]
        return layers[2](Mixer.apply(hidden)) + layers[3](hidden)  # type: ignore[no-any-return, no-untyped-call]

    with observe(layers) as step:
        out = checkpoint(net, rows(True), use_reentrant=kind == "reentrant") if kind else net(rows(True))
        (2 * out).sum().backward()
    # The gradients of a checkpoint that is not reentrant stop its second run at the last product.
    again = {None: {}, "reentrant": {"recompute": 4}, "non_reentrant": {"recompute": 3}}[kind]
    assert units(step.result()) == {"forward": 4, "backward": 8, **again}
    # Named each time that gradients are on around it: a reentrant checkpoint's first run has none.
    assert step.result().uncounted == {"autograd.Function Mixer": 2 if kind == "non_reentrant" else 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_each_sequence_of_a_nested_tensor_is_counted_by_itself() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval().requires_grad_(False)
    encoder = nn.TransformerEncoder(layer, 1)
    is_padding = torch.arange(6) >= torch.tensor([6, 2])[:, None]
    with torch.no_grad(), observe() as step:
        encoder(torch.randn(2, 6, 8), src_key_padding_mask=is_padding)
    # Four projections and two feed-forward layers for each of 8 tokens, and two products over 6^2 + 2^2 pairs.
    assert step.result().forward_flop == 2 * 8 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 2 * 8 * (6 * 6 + 2 * 2)
    assert step.result().uncounted == {}


def test_an_operator_without_a_formula_lowers_the_coverage(custom_op: Callable[..., torch.Tensor]) -> None:
    with observe() as step:
        custom_op(rows(), torch.randn(WIDTH, WIDTH))
        rows() @ torch.randn(WIDTH, WIDTH)
    assert step.result().coverage == 0.5


@pytest.mark.parametrize("model", [nn.Embedding(5, 4), nn.LayerNorm(4)])
def test_a_model_without_a_product_takes_none(model: nn.Module) -> None:
    x = torch.ones(2, 4)
    with observe(model) as step:
        model(x.long() if isinstance(model, nn.Embedding) else x).sum().backward()
    assert (step.result().model_flop, step.result().coverage, step.result().left_out) == (0, 1.0, ())


def blocked(scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    scores = scores.clone()
    scores[..., ~kept] = -torch.inf
    return scores


SPELLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "exp over sum": lambda s, kept: (e := s.masked_fill(~kept, -torch.inf).exp()) / e.sum(-1, keepdim=True),
    "sigmoid times mask": lambda s, kept: s.sigmoid() * kept,
    "added -100": lambda s, kept: (s + torch.zeros(LENGTH, LENGTH).masked_fill(~kept, -100.0)).softmax(-1),
    "added -1000": lambda s, kept: (s + torch.zeros(LENGTH, LENGTH).masked_fill(~kept, -1000.0)).softmax(-1),
    "log_softmax": lambda s, kept: s.masked_fill(~kept, -torch.inf).log_softmax(-1).exp(),
    "maximum": lambda s, kept: torch.max(s + torch.zeros(LENGTH, LENGTH).masked_fill(~kept, -1e9), s.new_tensor(-1e9))
    .softmax(-1),
    "subtracted": lambda s, kept: (s - 1e9 * (~kept)).softmax(-1),
    "written by a mask of the last dimensions": lambda s, kept: blocked(s, kept).softmax(-1),
    "cut to a triangle": lambda s, kept: (e := s.exp().tril()) / e.sum(-1, keepdim=True),
    "added -100 on a bias": lambda s, kept: (s + torch.rand(LENGTH, LENGTH).masked_fill(~kept, -100.0)).softmax(-1),
    "probabilities times mask": lambda s, kept: (e := s.softmax(-1) * kept) / (e.sum(-1, keepdim=True) + 1e-9),
    "probabilities cut to a triangle": lambda s, kept: s.softmax(-1).tril(),
    "probabilities filled with 0": lambda s, kept: s.softmax(-1).masked_fill(~kept, 0.0),
    "probabilities or 0": lambda s, kept: torch.where(kept, s.softmax(-1), 0.0),
    "squared relu times mask": lambda s, kept: s.relu().square() * kept,
    "over the other dimension": lambda s, kept: s.mT.masked_fill(~kept.mT, -torch.inf).softmax(-2).mT,
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_causal_attention_is_found_however_it_is_spelled(name: str) -> None:
    q, k, v = (torch.randn(SAMPLES, HEADS, LENGTH, HEAD_DIM, requires_grad=True) for _ in range(3))
    kept = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    with observe() as step:
        (SPELLINGS[name](q @ k.mT, kept) @ v).sum().backward()
    pairs = SAMPLES * HEADS * LENGTH * (LENGTH + 1) // 2
    assert step.result().model_flop == pytest.approx(3 * 4 * HEAD_DIM * pairs)


def test_dropout_by_hand_is_no_mask() -> None:
    q, k, v = (torch.randn(SAMPLES, HEADS, LENGTH, HEAD_DIM, requires_grad=True) for _ in range(3))
    with observe() as step:
        probabilities = (q @ k.mT).softmax(-1)
        ((probabilities * (torch.rand_like(probabilities) > 0.5)) @ v).sum().backward()
    assert step.result().model_flop == 3 * 4 * HEAD_DIM * SAMPLES * HEADS * LENGTH * LENGTH


def test_scores_of_positions_belong_to_the_attention_that_they_are_added_to() -> None:
    q, k, v, r = (torch.randn(SAMPLES, HEADS, LENGTH, HEAD_DIM, requires_grad=True) for _ in range(4))
    kept = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    with observe() as step:
        scores = (q @ k.mT + q @ r.mT).masked_fill(~kept, -torch.inf)
        (scores.softmax(-1) @ v).sum().backward()
    pairs = SAMPLES * HEADS * LENGTH * (LENGTH + 1) // 2
    assert step.result().model_flop == pytest.approx(9 * 2 * HEAD_DIM * pairs)


def test_scores_that_were_written_over_count_all_pairs_and_say_so() -> None:
    q, k, v = (torch.randn(SAMPLES, HEADS, LENGTH, HEAD_DIM, requires_grad=True) for _ in range(3))
    with observe() as step:
        scores = q @ k.mT
        scores[..., 1:].copy_(torch.zeros(SAMPLES, HEADS, LENGTH, LENGTH - 1))
        (scores.softmax(-1) @ v).sum().backward()
    assert step.result().model_flop == 3 * 4 * HEAD_DIM * SAMPLES * HEADS * LENGTH * LENGTH
    assert "Some attention masks had no values" in step.result().left_out[0]


def test_zero_size_batches_cost_nothing() -> None:
    model = Stack(2)
    with observe(model) as step:
        model(torch.randn(0, WIDTH)).sum().backward()
    assert step.result().model_flop == 0
    assert step.result().coverage == 1.0


def test_a_users_own_mode_inside_the_step_keeps_its_results() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = Stack(2)
    with observe(model) as step, FlopCounterMode(display=False) as theirs:
        model(rows()).sum().backward()
    assert theirs.get_total_flops() == 5 * UNIT
    assert step.result().model_flop == 5 * UNIT


def test_what_was_observed_dies_without_a_garbage_collection() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gc.collect()
    gc.disable()
    try:
        step = ObservedStep([model])
        step.start()
        model(torch.ones(2, 4)).sum().backward()
        step.stop()
        step.result()
        alive = weakref.ref(step)
        del step
        assert alive() is None
    finally:
        gc.enable()


def test_pairs_are_added_up_in_what_the_device_has() -> None:
    assert sum_dtype(torch.device("mps")) == torch.float32  # which has no float64
    assert sum_dtype(torch.device("cuda", 0)) == sum_dtype(torch.device("cpu")) == torch.float64


class Histogram(nn.Module):
    """Beside its layer, products of integers, as counting with one-hot rows makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = (x > 0).long()
        return self.layer(x).sum() + 1e-3 * (ones.T @ ones).sum()


def test_products_of_integers_are_no_flops_and_stop_nothing(tmp_path: Path) -> None:
    net, x = Histogram(), torch.randn(8, 16)
    layer = 2 * 8 * 16 * 16
    with observe(net) as observed:
        net(x).backward()
    count = observed.result()
    with ProfiledStep() as profiled:
        net(x).backward()
    for found in (count, count_flops(net, x), profiled.result()):
        assert (found.by_dtype, found.hardware_flop) == (
            {"float32": 2 * layer},
            2 * layer,
        )  # the input wants no gradient
    assert "Products of integers are no floating-point operations: aten::mm." in count.left_out
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    config = {"monitoring": {"sinks": [], "report": False, "peak_flop_per_s": 1e12, "profile_steps": False}}
    with watch(net, optimizer, output_dir=tmp_path, config=config):
        for _ in range(12):
            net(x).backward()
            optimizer.step()
    run = load_run(tmp_path)
    assert run.column("perf/model_flop")[-1] == 2 * layer
    assert [event["message"] for event in run.named("warning")] == []
    assert run.named("count")
