"""A real step under torch's profiler: the FLOPs of every operator it recorded, derived here by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

from flopmeter.errors import CountError
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.profiled import COMPILED, ProfiledStep, profile_flops
from flopmeter.profiling.recorded import UNSEEN_MASKS


def profiled(step: Callable[[], Any]) -> ProfiledStep:
    with ProfiledStep() as recorded:
        step()
    return recorded


def counted(step: Callable[[], Any]) -> FlopCount:
    return profiled(step).result()


def layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def test_a_linear_layer_costs_one_product_forward_and_two_backward() -> None:
    layer, x = nn.Linear(5, 7), torch.ones(3, 5, requires_grad=True)
    count = counted(lambda: layer(x).sum().backward())
    product = 2 * 3 * 5 * 7
    assert (count.forward_flop, count.backward_flop) == (product, 2 * product)
    assert count.by_dtype == {"float32": 3 * product}
    assert count.by_op == {"aten::addmm": product, "aten::mm": 2 * product}
    assert (count.method, count.hardware_flop, count.uncounted) == ("profiler", 3 * product, {})


def test_a_range_of_the_user_that_is_named_like_an_operator_is_not_reported_as_uncounted() -> None:
    def step() -> None:
        with torch.profiler.record_function("my::matmul"):
            torch.ones(2).add(1)

    assert counted(step).uncounted == {}


def test_gradients_that_nobody_wants_are_not_counted() -> None:
    layer, x = nn.Linear(5, 7), torch.ones(3, 5)
    assert counted(lambda: layer(x).sum().backward()).backward_flop == 2 * 3 * 5 * 7


@pytest.mark.parametrize(
    ("layer", "shape", "flop"),
    [
        # Output positions x weights that meet each of them, times two.
        (nn.Conv1d(4, 6, 3, groups=2), (2, 4, 10), 2 * (2 * 8) * (6 * 2 * 3)),
        (nn.Conv2d(3, 5, 3, padding="same"), (1, 3, 6, 6), 2 * 36 * (5 * 3 * 9)),
        (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4), 2 * 27 * (3 * 2 * 8)),
        (nn.ConvTranspose2d(3, 5, 2), (1, 3, 4, 4), 2 * 16 * (3 * 5 * 4)),
    ],
    ids=["grouped 1-D", "2-D, padding by name", "3-D", "transposed"],
)
def test_convolutions_count_with_both_their_gradients(layer: nn.Module, shape: tuple[int, ...], flop: int) -> None:
    x = torch.ones(shape, requires_grad=True)
    recorded = profiled(lambda: layer(x).sum().backward())
    assert recorded.result().forward_flop == flop
    assert recorded.result().backward_flop == 2 * flop


def test_an_lstm_counts_every_weight_once_forward_and_twice_backward() -> None:
    layer, x = nn.LSTM(5, 7), torch.ones(4, 2, 5)
    flop = 2 * (4 * 2) * (4 * 7 * 5 + 4 * 7 * 7)
    count = counted(lambda: layer(x)[0].sum().backward())
    assert (count.forward_flop, count.backward_flop) == (flop, 2 * flop)


def test_the_experts_of_a_grouped_product_count() -> None:
    tokens, weights = torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(2, 16, 32, dtype=torch.bfloat16)
    ends = torch.tensor([6, 16], dtype=torch.int32)
    count = counted(lambda: F.grouped_mm(tokens, weights, offs=ends))
    assert count.by_dtype == {"bfloat16": 2 * 16 * 16 * 32}


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=["fused", "math"])
def test_causal_attention_counts_the_same_whichever_kernel_runs(backend: SDPBackend) -> None:
    q, k, v = (torch.ones(2, 3, 8, 4, requires_grad=True) for _ in range(3))

    def attend() -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    recorded = profiled(attend)
    exact, full = recorded.result("exact"), recorded.result("full")
    head = 2 * 3 * 2 * 4  # samples, heads, and a multiply-add per channel, for each pair
    assert (exact.forward_flop, exact.backward_flop) == (2 * head * 36, 4 * head * 36)
    assert (full.forward_flop, full.backward_flop) == (2 * head * 64, 4 * head * 64)
    assert UNSEEN_MASKS in exact.left_out
    assert UNSEEN_MASKS not in full.left_out


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_recomputation_is_told_apart_and_what_it_left_early_is_not_counted(is_reentrant: bool) -> None:
    model, x = layers(5, 7, 4), torch.ones(3, 5, requires_grad=True)
    count = counted(lambda: checkpoint.checkpoint(model, x, use_reentrant=is_reentrant).sum().backward())
    first, second = 2 * 3 * 5 * 7, 2 * 3 * 7 * 4
    assert (count.forward_flop, count.backward_flop) == (first + second, 2 * (first + second))
    # Non-reentrant checkpointing stops inside the second product, when its operands are known.
    assert count.recompute_flop == first + (second if is_reentrant else 0)


def test_recomputed_attention_counts_because_its_results_are_needed() -> None:
    q = torch.ones(1, 2, 8, 4, requires_grad=True)

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    count = counted(lambda: checkpoint.checkpoint(attend, q, use_reentrant=False).sum().backward())
    assert count.recompute_flop == count.forward_flop == 2 * (2 * 2 * 64 * 4)


def test_a_gradient_of_a_gradient_is_backward_work_and_no_recomputation() -> None:
    layer, x = nn.Linear(5, 7, bias=False), torch.ones(3, 5, requires_grad=True)

    def penalise() -> None:
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        gradient.sum().backward()

    count = counted(penalise)
    product = 2 * 3 * 5 * 7
    # First order: the input's gradient. Second order: through that product to its two operands, and through the
    # forward product to the weight and the input, which is a leaf that wants its gradient.
    assert (count.forward_flop, count.recompute_flop) == (product, 0)
    assert count.backward_flop == (1 + 2 + 2) * product


class Squaring(torch.optim.Optimizer):
    """An optimizer that does matrix work, as Muon does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad @ parameter.grad.T


def test_matrix_work_of_the_optimizer_is_counted_apart() -> None:
    layer = nn.Linear(5, 7, bias=False)
    optimizer = Squaring(layer.parameters())

    def step() -> None:
        layer(torch.ones(3, 5)).sum().backward()
        optimizer.step()

    count = counted(step)
    assert count.optimizer_flop == 2 * 7 * 5 * 7
    assert count.model_flop == 2 * (2 * 3 * 5 * 7)


def test_a_step_can_be_profiled_from_one_optimizer_hook_to_the_next() -> None:
    layer, recorded = nn.Linear(5, 7, bias=False), ProfiledStep()
    optimizer = Squaring(layer.parameters())
    switches = iter([recorded.start, recorded.stop])
    optimizer.register_step_post_hook(lambda *_: next(switches)())
    for _ in range(2):
        layer(torch.ones(3, 5)).sum().backward()
        optimizer.step()
    count = recorded.result()
    assert (count.forward_flop, count.backward_flop, count.optimizer_flop) == (210, 210, 2 * 7 * 5 * 7)


def test_a_compiled_model_is_counted_and_not_compiled_again() -> None:
    compilations: list[int] = []

    def compile_nothing(graph: Any, _: Any) -> Any:
        compilations.append(1)
        return make_boxed_func(graph.forward)

    model, x = layers(5, 7, 3), torch.ones(4, 5)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compile_nothing))
    compiled(x).sum().backward()
    num_compilations = len(compilations)
    count = counted(lambda: compiled(x).sum().backward())
    compiled(x).sum().backward()
    assert len(compilations) == num_compilations > 0
    first, second = 2 * 4 * 5 * 7, 2 * 4 * 7 * 3
    assert (count.forward_flop, count.backward_flop) == (first + second, first + 2 * second)
    assert COMPILED in count.left_out


def test_work_without_gradients_is_counted_and_said() -> None:
    layer, x = nn.Linear(5, 7), torch.ones(3, 5)

    def evaluate() -> None:
        with torch.no_grad():
            layer(x)

    count = counted(evaluate)
    assert count.forward_flop == 210
    assert any(sentence.startswith("210 FLOP ran forward with gradients off") for sentence in count.left_out)
    assert not any("gradients off" in sentence for sentence in counted(lambda: layer(x)).left_out)


def test_batched_by_vmap_a_product_counts_for_the_whole_batch() -> None:
    a, b = torch.ones(6, 3, 5), torch.ones(6, 5, 7)
    assert counted(lambda: torch.func.vmap(torch.mm)(a, b)).forward_flop == 6 * 2 * 3 * 5 * 7


def test_a_sharded_product_counts_what_this_rank_computes() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        tokens = distribute_tensor(torch.ones(3, 5), mesh, [Replicate()], src_data_rank=None)
        columns = distribute_tensor(torch.ones(5, 8), mesh, [Shard(1)], src_data_rank=None)
        torch.mm(tokens, columns)  # the first call tries the operator on fake tensors
        count = counted(lambda: torch.mm(tokens, columns))
    finally:
        dist.destroy_process_group()
    assert count.forward_flop == 2 * 3 * 5 * 4


@torch.library.custom_op("flopmeter_test_profiled::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


def test_an_operator_without_a_formula_is_named() -> None:
    assert counted(lambda: opaque(torch.ones(2))).uncounted == {"flopmeter_test_profiled::opaque": 1}


def test_the_profilers_own_sum_stands_beside_ours() -> None:
    product, convolution = nn.Linear(5, 7, bias=False), nn.Conv1d(4, 6, 3)
    plain = profiled(lambda: product(torch.ones(3, 5)))
    assert plain.profiler_flop == plain.result().forward_flop == 210
    missed = profiled(lambda: convolution(torch.ones(2, 4, 10)))
    assert missed.profiler_flop == 0 < missed.result().forward_flop
    assert "torch.profiler's own sum for this step is 0 FLOP." in missed.result().left_out


def test_the_step_computes_what_it_would_have_computed() -> None:
    def train(wrap: Callable[[Callable[[], Any]], Any]) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        wrap(lambda: model(torch.randn(6, 5)).sum().backward())
        return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers(), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(train(lambda step: step()), train(profiled), strict=True))


def test_nothing_of_ours_stays_in_torch() -> None:
    before = (torch.autograd._engine_run_backward, checkpoint._StopRecomputationError)
    with ProfiledStep():
        assert torch.autograd._engine_run_backward is not before[0]
    assert (torch.autograd._engine_run_backward, checkpoint._StopRecomputationError) == before


def test_without_a_step_there_is_no_result() -> None:
    with pytest.raises(CountError, match="nothing was profiled"):
        ProfiledStep().result()


def test_a_step_that_the_users_profiler_cut_short_has_no_result() -> None:
    recorded = ProfiledStep()
    recorded.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        torch.ones(2).add(1)
    recorded.stop()
    assert sum(event.name == "aten::add" for event in theirs.events()) == 1
    with pytest.raises(CountError, match="cut short"):
        recorded.result()


def test_sixty_profiled_steps_leave_no_memory_behind_even_without_garbage_collection() -> None:
    script = """
import gc, os, torch
from torch import nn
from flopmeter.flops.profiled import ProfiledStep

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(60)))

def profile():
    with ProfiledStep() as recorded:
        model(torch.ones(2, 8)).sum().backward()
    return recorded.result()

gc.disable()
for _ in range(5):
    profile()
before = resident_mb()
for _ in range(60):
    profile()
print(resident_mb() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert float(done.stdout) < 30


class Norm(nn.Module):
    """Something with everything that a measurement could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.layer(x)))
        return out


def test_a_model_is_profiled_without_being_changed() -> None:
    model = Norm()
    model.drop.eval()
    model.layer.weight.grad = torch.ones(7, 5)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags, random = [module.training for module in model.modules()], torch.get_rng_state()
    count = profile_flops(model, (torch.ones(3, 5),))
    assert (count.forward_flop, count.backward_flop) == (210, 210)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model.layer.weight.grad, torch.ones(7, 5))
    assert model.norm.weight.grad is None
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random)
    assert calls == []


def test_a_model_without_weights_in_memory_cannot_be_profiled() -> None:
    with pytest.raises(CountError, match="meta"):
        profile_flops(nn.Linear(5, 7, device="meta"), (torch.ones(3, 5),))
