"""Do the exclusive seconds of a profiled step come out as one works them out by hand on made-up ranges?"""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from flopmeter.profiling import profiler_guard
from flopmeter.profiling.profiler_guard import SampledStep, why_not
from flopmeter.profiling.recorded import PARTS, Activity, Cover, Kernel, Marks, Range, reduce_cpu, reduce_cuda, segments
from flopmeter.traces import load_trace

MS = 1_000_000
"""Ranges below are in milliseconds: readable, and exact once divided by 1e9."""


def at(name: str, start: int, end: int, thread: int = 1, **more: int) -> Range:
    return Range(name, start * MS, end * MS, thread, **more)


def node(name: str, start: int, end: int, thread: int = 1) -> Range:
    return Range(name, start * MS, end * MS, thread, is_node=True)


def marks(forward: tuple[int, int] = (10, 50), backward: tuple[int, int] = (60, 100), step: int = 130) -> Marks:
    return Marks(
        step=(0, step * MS),
        forward=[(forward[0] * MS, forward[1] * MS)],
        backward=[(backward[0] * MS, backward[1] * MS)],
        graph_building=[],
    )


def in_ms(profile: dict[str, Any]) -> dict[str, int]:
    return {kind: round(1000 * spent_s) for kind in PARTS if (spent_s := profile[f"{kind}_s"])}


def test_each_moment_of_a_thread_belongs_to_the_innermost_operator() -> None:
    ranges = [at("aten::linear", 10, 30), at("aten::t", 12, 14), at("aten::addmm", 14, 28), at("aten::relu", 35, 45)]
    profile = reduce_cpu(ranges, marks())
    assert profile is not None
    # linear's own 10-12 and 28-30 and addmm's 14: matrix work; t and relu: 2 + 10. Forward reaches to backward's start
    # at 60, backward to 100, and nothing ran in 30-35, 45-60 and 60-100.
    assert in_ms(profile) == {"matmul": 18, "non_matmul": 12, "gap": 5 + 15 + 40}
    assert profile["num_ops"] == 2
    assert profile["top"][0] == ["aten::addmm", 0.014, 1]


def test_backward_on_its_own_thread_leaves_no_gap_on_the_waiting_one() -> None:
    nodes = [node("AddmmBackward0", 62, 98, thread=7), at("aten::mm", 65, 95, thread=7)]
    profile = reduce_cpu([at("aten::addmm", 10, 60), *nodes], marks())
    assert profile is not None
    # The node's own 62-65 and 95-98 is the engine at work, between operators.
    assert in_ms(profile) == {"matmul": 50 + 30, "gap": 2 + 3 + 3 + 2}


def test_two_threads_at_once_count_once_and_matrix_work_goes_first() -> None:
    ranges = [at("aten::mm", 10, 30), at("aten::relu", 20, 40, thread=2)]
    profile = reduce_cpu(ranges, marks(forward=(10, 40), backward=(40, 40)))
    assert profile is not None
    assert in_ms(profile) == {"matmul": 20, "non_matmul": 10}


def test_operators_with_gradients_on_inside_a_node_are_recomputation_with_the_time_between_them() -> None:
    ranges = [
        node("GeluBackward0", 60, 100),
        at("aten::addmm", 62, 70, sequence_nr=5),
        at("aten::gelu", 74, 80, sequence_nr=6),
        at("aten::gelu_backward", 85, 95),
    ]
    profile = reduce_cpu(ranges, marks(forward=(10, 10), backward=(60, 100)))
    assert profile is not None
    # 62 to 80 in one piece; then 10 of gradient work; the rest of 60-100 is gap, as is 10-60, which ran nothing.
    assert in_ms(profile) == {"recompute": 18, "non_matmul": 10, "gap": 2 + 5 + 5 + 50}


def test_a_nested_backward_pass_inside_a_recomputing_node_is_backward() -> None:
    ranges = [
        node("CheckpointFunctionBackward", 60, 100),
        at("aten::addmm", 60, 70, sequence_nr=5),
        node("AddmmBackward0", 72, 90),
        at("aten::mm", 72, 90),
    ]
    profile = reduce_cpu(ranges, marks(forward=(60, 60)))
    assert profile is not None
    assert in_ms(profile) == {"recompute": 10, "matmul": 18, "gap": 2 + 10}


def test_gradients_of_gradients_are_not_taken_for_recomputation() -> None:
    ranges = [node("MmBackward0", 60, 100), at("aten::mm", 60, 100, sequence_nr=5)]
    both = marks(forward=(60, 60))
    profile = reduce_cpu(ranges, both._replace(graph_building=both.backward))
    assert profile is not None
    assert in_ms(profile) == {"matmul": 40}


def test_the_optimizer_counts_as_a_whole_and_clipping_before_it_too() -> None:
    ranges = [
        at("aten::mm", 10, 60),
        at("aten::_foreach_norm", 102, 107),
        at("Optimizer.step#AdamW.step", 110, 125),
        at("aten::mul_", 112, 115),
        at("Optimizer.zero_grad#AdamW.zero_grad", 126, 128),
    ]
    profile = reduce_cpu(ranges, marks(backward=(60, 60)))
    assert profile is not None
    assert in_ms(profile) == {"matmul": 50, "optimizer": 5 + 15 + 2}


def test_what_the_data_loader_does_is_in_no_part() -> None:
    ranges = [
        at("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 9),
        at("aten::stack", 2, 8, sequence_nr=3),
        at("aten::mm", 10, 60),
    ]
    profile = reduce_cpu(ranges, marks(backward=(60, 60)))
    assert profile is not None
    assert in_ms(profile) == {"matmul": 50}
    assert profile["num_ops"] == 1


def test_communication_counts_where_no_operator_hides_it() -> None:
    ranges = [at("aten::mm", 60, 80), at("gloo:all_reduce", 70, 95, thread=-1)]
    profile = reduce_cpu(ranges, marks(forward=(60, 60)))
    assert profile is not None
    assert in_ms(profile) == {"matmul": 20, "communication": 15, "gap": 5}


def test_the_own_time_of_a_compiled_graph_is_no_gap() -> None:
    ranges = [at("Torch-Compiled Region: 0/0", 10, 60), at("## Call CompiledFxGraph abc ##", 12, 58)]
    profile = reduce_cpu([*ranges, at("aten::mm", 20, 40)], marks(backward=(60, 60)))
    assert profile is not None
    assert in_ms(profile) == {"matmul": 20, "non_matmul": 8 + 18, "gap": 2 + 2}


def test_no_operator_means_no_data() -> None:
    assert reduce_cpu([], marks()) is None


def test_micro_batches_leave_out_what_lies_between_them() -> None:
    spans = Marks(step=(0, 100), forward=[(10, 20), (50, 60)], backward=[(25, 40), (60, 80)], graph_building=[])
    windows = spans.windows()
    assert (windows.starts, windows.ends) == ([10, 50], [40, 80])


def cuda_ranges() -> list[Range]:
    return [
        at("aten::mm", 10, 11, correlation_id=1),
        at("aten::gelu", 12, 13, correlation_id=2),
        at("Optimizer.step#AdamW.step", 110, 120),
        at("aten::_fused_adamw_", 111, 112, correlation_id=3),
    ]


def kernel(name: str, start: int, end: int, launch: int, op: int, stream: int = 7) -> Kernel:
    return Kernel(name, start * MS, end * MS, stream, launch, op)


def test_kernels_are_split_by_the_operator_that_launched_them_and_idle_time_is_a_gap() -> None:
    kernels = [
        kernel("ampere_sgemm_128x64", 20, 40, 101, 1),
        kernel("elementwise_kernel", 45, 55, 102, 2),
        kernel("multi_tensor_apply_kernel", 115, 125, 103, 3),
        kernel("Memcpy HtoD (Pinned -> Device)", 14, 18, 104, 0),
        kernel("Memcpy HtoD (Pinned -> Device)", 38, 44, 105, 0, stream=9),
    ]
    launches = {101: 10 * MS, 102: 12 * MS, 103: 111 * MS, 104: 9 * MS, 105: 9 * MS}
    profile = reduce_cuda(cuda_ranges(), kernels, marks()._replace(launches=launches))
    assert profile is not None
    # From 14 to 125 the device was idle in 18-20, 44-45 and 55-115; the product hid two milliseconds of a copy.
    assert in_ms(profile) == {"matmul": 20, "non_matmul": 10, "optimizer": 10, "copy": 8, "gap": 63}
    assert (profile["device"], profile["num_ops"]) == ("cuda", 5)


def test_what_a_prefetcher_does_while_the_step_before_still_computes_is_no_part_of_this_one() -> None:
    # As in a real trace: the next batch is copied and prepared at once, on streams of its own, while the stream that
    # computes comes to this step 150 ms later. Until then it was busy, though nothing of that is recorded.
    kernels = [
        kernel("Memcpy HtoD (Pinned -> Device)", 11, 15, 101, 0, stream=25),
        kernel("permute_2D_lengths_kernel", 13, 14, 102, 0, stream=27),
        kernel("Memcpy HtoD (Pinned -> Device)", 158, 166, 103, 0, stream=25),
        kernel("ampere_sgemm", 160, 190, 104, 1),
        kernel("elementwise_kernel", 195, 200, 105, 2),
    ]
    launches = dict.fromkeys(range(101, 106), 10 * MS)
    profile = reduce_cuda(cuda_ranges(), kernels, marks()._replace(launches=launches))
    assert profile is not None
    assert in_ms(profile) == {"matmul": 30, "non_matmul": 5, "gap": 5}


def test_only_exposed_communication_counts_on_a_device() -> None:
    kernels = [
        kernel("ampere_sgemm", 20, 40, 101, 1),
        kernel("ncclDevKernel_AllReduce_Sum_f32", 30, 70, 105, 9, stream=20),
    ]
    profile = reduce_cuda(cuda_ranges(), kernels, marks()._replace(launches={101: 10 * MS, 105: 30 * MS}))
    assert profile is not None
    assert in_ms(profile) == {"matmul": 20, "communication": 30}


def test_kernels_of_the_step_before_are_not_this_ones() -> None:
    kernels = [kernel("late_gemm", 0, 15, 99, 98), kernel("ampere_sgemm", 20, 40, 101, 1)]
    launches = {99: -5 * MS, 101: 10 * MS}
    profile = reduce_cuda(cuda_ranges(), kernels, marks()._replace(launches=launches))
    assert profile is not None
    assert in_ms(profile) == {"matmul": 20}


def test_a_kernel_that_nobody_is_known_to_have_launched_is_left_out() -> None:
    kernels = [kernel("mystery", 20, 40, 77, 0), kernel("ampere_sgemm", 50, 60, 101, 1)]
    profile = reduce_cuda(cuda_ranges(), kernels, marks()._replace(launches={101: 10 * MS}))
    assert profile is not None
    assert in_ms(profile) == {"matmul": 10}


def test_idle_time_while_the_host_waits_for_data_is_no_launch_gap() -> None:
    kernels = [kernel("ampere_sgemm", 20, 40, 101, 1), kernel("elementwise", 80, 90, 102, 2)]
    waiting = at("enumerate(DataLoader)#Iter.__next__", 50, 75)
    launches = {101: 10 * MS, 102: 12 * MS}
    profile = reduce_cuda([*cuda_ranges(), waiting], kernels, marks()._replace(launches=launches))
    assert profile is not None
    assert in_ms(profile) == {"matmul": 20, "non_matmul": 10, "gap": 10 + 5}


def test_no_kernels_mean_no_data_never_an_idle_device() -> None:
    assert reduce_cuda(cuda_ranges(), [], marks()) is None


def test_time_is_shared_out_by_precedence() -> None:
    rows = segments([2, 4], [5, 6], [Activity.HOST_COPY, Activity.MATMUL], (0, 10))
    idle, copy, product = Activity.IDLE, Activity.HOST_COPY, Activity.MATMUL
    found = [(row.start, row.end, row.activity) for row in rows]
    assert found == [(0, 2, idle), (2, 4, copy), (4, 5, product), (5, 6, product), (6, 10, idle)]


def test_stretches_are_joined_and_asked_for_instants_and_overlaps() -> None:
    cover = Cover([(5, 8), (0, 3), (2, 4), (4, 4), (9, 9)])
    assert (cover.starts, cover.ends) == ([0, 5], [4, 8])
    assert [cover.holds(at) for at in (0, 3, 4, 5, 8)] == [True, True, False, True, False]
    assert (cover.overlap(3, 6), cover.overlap(8, 20), cover.overlap(-5, 20)) == (2, 0, 7)


class Net(nn.Module):
    """Two wide layers, so that most of the step is products; the middle may be checkpointed."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return x


def sampled(net: nn.Module, *, names_model: bool = True, keep_at: Path | None = None) -> SampledStep:
    optimizer = torch.optim.AdamW(net.parameters())
    batches = iter(DataLoader(torch.randn(1024, 256), batch_size=256))
    step = SampledStep(net if names_model else None, "cpu", keep_at)
    for number in range(2):
        batch = next(batches)
        if number:
            step.start()
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    step.stop()
    return step


@pytest.mark.parametrize("names_model", [True, False])
def test_a_real_step_is_split_into_parts_that_fit_into_it(names_model: bool) -> None:
    profile = sampled(Net(), names_model=names_model).profile
    assert profile is not None
    assert all(profile[f"{kind}_s"] > 0 for kind in ("matmul", "non_matmul", "optimizer", "gap"))
    assert (profile["recompute_s"], profile["communication_s"]) == (0, 0)
    calls = {name: number for name, _, number in profile["top"]}
    assert calls["aten::addmm"] == 4  # one product forward in each layer
    assert calls["aten::mm"] == 7  # two gradients in each but the first, whose input needs none


def test_a_kept_trace_is_a_kineto_file_that_our_reader_opens(tmp_path: Path) -> None:
    step = sampled(Net(), keep_at=tmp_path / "trace.json")
    assert step.profile is not None
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    calls = Counter(event["name"] for event in events if event.get("ph") == "X")
    assert (calls["aten::addmm"], calls["aten::mm"]) == (4, 7)
    fall = load_trace(tmp_path / "trace.json").as_run().waterfall()
    assert fall.seconds("optimizer")
    assert fall.wall_s > 0


def test_a_trace_that_cannot_be_kept_costs_nothing_else(tmp_path: Path) -> None:
    assert sampled(Net(), keep_at=tmp_path / "absent" / "trace.json").profile is not None


def test_what_a_step_does_without_gradients_is_none_of_its_parts() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    step = SampledStep(net, "cpu")
    step.start()
    with torch.no_grad():
        net(torch.randn(256, 256))
    net(torch.randn(256, 256)).square().mean().backward()
    optimizer.step()
    step.stop()
    assert step.profile is not None
    assert {name: number for name, _, number in step.profile["top"]}["aten::addmm"] == 4


def test_a_real_checkpointed_step_shows_its_recomputation() -> None:
    profile = sampled(Net(is_checkpointed=True)).profile
    assert profile is not None
    assert profile["recompute_s"] > 0
    assert {name: number for name, _, number in profile["top"]}["aten::addmm"] == 8


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_compiled_model_is_sampled_without_compiling_it_again(is_in_place: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    net = Net()
    if is_in_place:
        net.compile(backend=backend)
    profile = sampled(net if is_in_place else torch.compile(net, backend=backend)).profile
    assert profile is not None
    assert profile["matmul_s"] > 0
    assert len(graphs) == 1


def test_the_fields_are_those_of_the_run_file() -> None:
    profile = reduce_cpu([at("aten::mm", 10, 60)], marks(backward=(60, 60)))
    assert profile is not None
    assert profile == {
        "device": "cpu", "matmul_s": 0.05, "recompute_s": 0.0, "non_matmul_s": 0.0, "optimizer_s": 0.0, "copy_s": 0.0,
        "communication_s": 0.0, "gap_s": 0.0, "num_ops": 1, "top": [["aten::mm", 0.05, 1]],
    }  # fmt: skip


def test_sampling_leaves_no_hook_and_no_patch_behind() -> None:
    net, engine = Net(), torch.autograd._engine_run_backward
    sampled(net)
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    assert torch.autograd._engine_run_backward is engine


def test_no_step_is_sampled_beside_another_profiler() -> None:
    with torch.profiler.profile():
        assert "another profiler" in (why_not("cpu") or "")
    assert why_not("cpu") is None
    assert "xpu" in (why_not("xpu") or "")


def test_memory_is_given_back_with_garbage_collection_off() -> None:
    net, unwatch = Net(), profiler_guard.watch()  # as a run does, which then searches for no session under way
    gc.disable()
    try:
        sampled(net)
        before_kb = _resident_kb()
        for _ in range(25):
            sampled(net)
        # A session that kept its 400 events at 1.5 KB each would leave 0.6 MB: 15 MB in all.
        assert _resident_kb() - before_kb < 9_000
    finally:
        gc.enable()
        unwatch()


def _resident_kb() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("the kernel does not tell the resident memory here")
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS"))
