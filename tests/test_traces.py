"""Where the time of a trace went, how many FLOPs it did, and how it looks as a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flopmeter.devices.kernels import is_tf32, short_name
from flopmeter.errors import RecordError, TraceError
from flopmeter.profiling.recorded import Activity
from flopmeter.traces import load_any, load_trace
from flopmeter.traces.rank import RankTrace
from made_traces import ENGINE, MadeTrace

US = 1e-6
TF32_GEMM = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4>(Params)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"


def only(trace: MadeTrace, folder: Path, peak_flop_per_s: float | None = None) -> RankTrace:
    return load_trace(trace.write(folder), peak_flop_per_s=peak_flop_per_s).ranks[0]


@pytest.mark.parametrize(
    ("category", "name", "args"),
    [
        ("mtia_ccp_events", "fc_forward", {}),
        ("hpu_op", "gemm", {}),
        ("cuda_runtime", "cudaLaunchKernel", {"correlation": 1}),  # CUPTI was taken: calls and no kernel
        ("privateuse1_runtime", "npuLaunchKernel", {"correlation": 1}),
    ],
)
def test_an_accelerator_without_readable_kernels_is_not_taken_for_a_cpu(
    tmp_path: Path, category: str, name: str, args: dict[str, int]
) -> None:
    made = MadeTrace(device=None)
    made.step(0, 0, 1000)
    made.op("aten::mm", 100, 50, dims=[[8, 8], [8, 8]])
    assert only(made, tmp_path).is_cpu
    made.add(category, name, 120, 5, **args)
    with pytest.raises(TraceError, match=name if args else category):
        only(made, tmp_path)


# What the device did at each instant.


def test_compute_hides_communication_and_both_hide_copies(tmp_path: Path) -> None:
    made = MadeTrace()
    made.step(3, 0, 1000)
    made.kernel(ADD, 100, 200, launch=10)  # 100 to 300
    made.kernel(NCCL, 200, 300, launch=20)  # 200 to 500: the first 100 are hidden
    made.copy("Memcpy HtoD (Pinned -> Device)", 450, 150, launch=30)  # 450 to 600: the first 50 are hidden
    time = only(made, tmp_path).times[0]
    assert time.number == 3
    assert time.step_s == pytest.approx(1000 * US)
    assert time.compute_s == pytest.approx(200 * US)
    assert time.communication_s == pytest.approx(300 * US)
    assert time.exposed_communication_s == pytest.approx(200 * US)
    assert time.copy_s == pytest.approx(100 * US)
    assert time.idle_s == pytest.approx(500 * US)
    assert time.busy_s == pytest.approx(500 * US)


def test_two_kernels_at_once_count_their_time_once(tmp_path: Path) -> None:
    made = MadeTrace()
    made.step(0, 0, 100)
    made.kernel(ADD, 10, 40, launch=1)  # 10 to 50
    made.kernel(TF32_GEMM, 30, 40, launch=2)  # 30 to 70: a product goes first, so the other is charged 20
    time = only(made, tmp_path).times[0]
    assert time.compute_s == pytest.approx(60 * US)
    assert time.activity_s[Activity.MATMUL] == pytest.approx(40 * US)
    assert time.activity_s[Activity.OTHER_COMPUTE] == pytest.approx(20 * US)


def test_a_gap_is_told_by_when_the_next_kernel_was_launched(tmp_path: Path) -> None:
    made = MadeTrace()
    made.step(0, 0, 600)
    made.kernel(ADD, 0, 100, launch=0)
    made.fetch(150, 100)
    made.kernel(ADD, 310, 90, launch=300)  # idle 100 to 310; of that 100 in the loader, 110 until it was launched
    made.kernel(ADD, 500, 100, launch=305)  # idle 400 to 500 although it was launched before 400
    time = only(made, tmp_path).times[0]
    assert time.data_wait_s == pytest.approx(100 * US)
    assert time.launch_gap_s == pytest.approx(110 * US)
    assert time.other_idle_s == pytest.approx(100 * US)
    assert time.idle_s == pytest.approx(310 * US)


def test_a_wait_for_data_behind_which_the_device_works_is_not_lost(tmp_path: Path) -> None:
    made = MadeTrace()
    made.step(0, 0, 200)
    made.fetch(20, 100)
    made.kernel(ADD, 10, 190, launch=5)
    assert only(made, tmp_path).times[0].data_wait_s == 0


# Steps on the device.


def test_a_step_ends_when_the_device_has_done_what_it_launched(tmp_path: Path) -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.step(2, 100, 100)
    made.kernel(ADD, 50, 300, launch=10)
    made.kernel(ADD, 350, 280, launch=110)
    first, second = only(made, tmp_path).times
    assert (first.step_s, second.step_s) == (pytest.approx(350 * US), pytest.approx(280 * US))
    assert (first.busy_s, second.busy_s) == (pytest.approx(300 * US), pytest.approx(280 * US))


def test_what_was_launched_before_the_first_step_is_not_part_of_it(tmp_path: Path) -> None:
    made = MadeTrace()
    made.kernel(ADD, 0, 400, launch=None)  # a step that was not recorded
    made.step(1, 100, 100)
    made.kernel(ADD, 410, 90, launch=150)
    (time,) = only(made, tmp_path).times
    assert time.step_s == pytest.approx(100 * US)  # 400 to 500
    assert time.busy_s == pytest.approx(90 * US)


def test_a_last_step_that_launches_nothing_is_none(tmp_path: Path) -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.kernel(ADD, 10, 50, launch=5)
    made.step(2, 100, 5)
    assert [time.number for time in only(made, tmp_path).times] == [1]


def test_a_trace_without_steps_is_one_from_the_first_kernel_to_the_last(tmp_path: Path) -> None:
    made = MadeTrace()
    made.kernel(ADD, 1000, 100, launch=900)
    made.kernel(ADD, 1500, 100, launch=1450)
    rank = only(made, tmp_path)
    assert rank.times[0].step_s == pytest.approx(600 * US)
    assert any("no ProfilerStep" in note for note in rank.notes)


# Phases.


def training_step(made: MadeTrace, start: float = 0.0) -> None:
    """A step of 1000: forward, backward with one recomputed product, optimizer; kernels follow their launch by 5."""
    made.step(4, start, 1000)
    made.op("aten::linear", start + 100, 50, [[3, 4], [5, 4], [5]], ["", "", ""], makes_node=True)
    made.op("aten::addmm", start + 110, 30, [[5], [3, 4], [4, 5], [], []], ["", "", "", "1", "1"], makes_node=True)
    made.kernel(TF32_GEMM, start + 120, 100, launch=start + 115)
    made.node("CheckpointBackward", start + 300, 50)
    made.op("aten::addmm", start + 305, 20, [[5], [3, 4], [4, 5], [], []], tid=ENGINE, makes_node=True)
    made.kernel(TF32_GEMM, start + 315, 60, launch=start + 310, tid=ENGINE)
    made.node("AddmmBackward0", start + 400, 50)
    made.op("aten::mm", start + 405, 20, [[4, 3], [3, 5]], ["", ""], tid=ENGINE)
    made.kernel(TF32_GEMM, start + 415, 200, launch=start + 410, tid=ENGINE)
    made.add("user_annotation", "Optimizer.step#AdamW.step", start + 700, 100)
    made.op("aten::_fused_adamw_", start + 710, 20)
    made.kernel("void multi_tensor_apply_kernel<FusedAdam>(int)", start + 720, 80, launch=start + 715)
    made.kernel(ADD, start + 900, 50, launch=start + 895)


def test_the_phases_of_a_step_are_told_from_torchs_own_marks(tmp_path: Path) -> None:
    made = MadeTrace()
    training_step(made)
    time = only(made, tmp_path).times[0]
    seconds = {work: time.activity_s[work] / US for work in Activity}
    assert seconds[Activity.MATMUL] == pytest.approx(300)
    assert seconds[Activity.RECOMPUTE] == pytest.approx(60)
    assert seconds[Activity.OPTIMIZER] == pytest.approx(80)
    assert seconds[Activity.OTHER_COMPUTE] == pytest.approx(50)
    # An idle stretch belongs to the phase of the kernel that ends it: 120 before the forward kernel, 95 + 40 before
    # the backward ones, 105 before the optimizer's, 100 before the last, and 50 at the end, which no kernel ends.
    phases = {name: seconds / US for name, seconds in time.phase_s.items() if seconds}
    assert phases == {
        "forward": pytest.approx(220),
        "backward": pytest.approx(95 + 60 + 40 + 200),
        "optimizer": pytest.approx(105 + 80),
        "other": pytest.approx(100 + 50 + 50),
    }
    assert math.fsum(time.phase_s.values()) == pytest.approx(time.step_s)


# FLOPs.


def test_flops_come_from_shapes_and_nested_operators_count_once(tmp_path: Path) -> None:
    made = MadeTrace()
    training_step(made)
    rank = only(made, tmp_path)
    product = 2 * 3 * 4 * 5  # forward 3x4 by 4x5, backward 4x3 by 3x5
    assert rank.flops[0].by_phase == {"forward": product, "recompute": product, "backward": product}
    assert rank.flops[0].model == {"tf32": 2 * product}
    assert rank.flops[0].hardware == {"tf32": 3 * product}
    assert rank.counting.coverage == 1.0


def test_mfu_is_model_flops_over_the_peak_of_the_format_that_the_kernels_used(tmp_path: Path) -> None:
    made = MadeTrace()
    training_step(made)
    rank = only(made, tmp_path)
    assert rank.peaks["tf32"].flop_per_s == 156e12  # devices.toml, an A100
    assert rank.mfu(rank.flops[0].model, rank.times[0].step_s) == pytest.approx(240 / (156e12 * 1000 * US))


def one_op(made: MadeTrace, name: str, dims: list[object], values: list[str] | None, kernel: str, dtype: str) -> None:
    made.step(0, 0, 100)
    made.op(name, 10, 20, dims, values, dtype)
    made.kernel(kernel, 20, 50, launch=15)


@pytest.mark.parametrize(
    ("name", "dims", "values", "flop"),
    [
        ("aten::mm", [[6, 7], [7, 8]], None, 2 * 6 * 7 * 8),
        ("aten::bmm", [[2, 3, 4], [2, 4, 5]], None, 2 * 2 * 3 * 4 * 5),
        ("aten::addmm", [[5], [3, 4], [4, 5], [], []], None, 2 * 3 * 4 * 5),
        # 8x8 with padding 1, stride 2 and 3 taps gives 4x4 outputs; each needs 3*3*3 multiply-adds for 4 channels.
        (
            "aten::conv2d",
            [[2, 3, 8, 8], [4, 3, 3, 3], [4], [], [], [], []],
            ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "1"],
            2 * 2 * 4 * 4 * 4 * 27,
        ),
        # Of both gradients, one product each, with the size of the forward one.
        (
            "aten::convolution_backward",
            [[2, 4, 4, 4], [2, 3, 8, 8], [4, 3, 3, 3], [], [], [], [], [], [], [], []],
            ["", "", "", "[4]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, True]"],
            2 * (2 * 2 * 4 * 4 * 4 * 27),
        ),
        # 4 queries see 1 + 2 + 3 + 4 keys; scores and values, 8 channels each, in 2 sequences.
        (
            "aten::_scaled_dot_product_flash_attention",
            [[2, 1, 4, 8], [2, 1, 4, 8], [2, 1, 4, 8], [], [], [], []],
            ["", "", "", "0.", "True", "False", ""],
            2 * 2 * 2 * 10 * 8,
        ),
    ],
)
def test_flops_of_an_operator(
    tmp_path: Path, name: str, dims: list[object], values: list[str] | None, flop: int
) -> None:
    made = MadeTrace()
    one_op(made, name, dims, values, "sm80_xmma_gemm_bf16bf16", "c10::BFloat16")
    assert only(made, tmp_path).flops[0].model == {"bf16": flop}


def test_fp32_products_on_ordinary_cores_are_held_against_the_fp32_peak(tmp_path: Path) -> None:
    made = MadeTrace()
    one_op(made, "aten::mm", [[6, 7], [7, 8]], None, "ampere_sgemm_32x32_sliced1x4_tn", "float")
    rank = only(made, tmp_path)
    assert list(rank.flops[0].model) == ["fp32"]
    assert rank.peaks["fp32"].flop_per_s == 19.5e12
    assert rank.facts["tf32"] is False


def test_an_operator_that_launched_nothing_did_nothing(tmp_path: Path) -> None:
    made = MadeTrace()
    one_op(made, "aten::mm", [[6, 7], [7, 8]], None, TF32_GEMM, "float")
    made.op("aten::mm", 60, 5, [[6, 7], [7, 8]])  # where checkpointing stopped a recomputation
    assert only(made, tmp_path).flops[0].hardware == {"tf32": 2 * 6 * 7 * 8}


def test_mfu_is_none_when_matrix_kernels_ran_that_no_recorded_operator_launched(tmp_path: Path) -> None:
    made = MadeTrace()
    one_op(made, "aten::mm", [[6, 7], [7, 8]], None, TF32_GEMM, "float")
    made.kernel(TF32_GEMM, 75, 20, launch=72)  # 20 of 70 microseconds
    rank = only(made, tmp_path)
    assert rank.counting.coverage == pytest.approx(50 / 70)
    assert rank.mfu(rank.flops[0].model, 1.0) is None
    assert "71.4 %" in rank.mfu_reason


def test_mfu_is_none_without_shapes_and_the_reason_names_the_setting(tmp_path: Path) -> None:
    made = MadeTrace()
    made.step(0, 0, 100)
    made.op("aten::mm", 10, 20)
    made.kernel(TF32_GEMM, 20, 50, launch=15)
    assert "record_shapes=True" in only(made, tmp_path).mfu_reason


def test_mfu_is_none_on_an_unknown_device_unless_its_peak_is_given(tmp_path: Path) -> None:
    made = MadeTrace(device="NVIDIA Z900")
    one_op(made, "aten::mm", [[6, 7], [7, 8]], None, TF32_GEMM, "float")
    assert "Z900" in only(made, tmp_path).mfu_reason
    rank = only(made, tmp_path, peak_flop_per_s=1e9)
    assert rank.mfu(rank.flops[0].model, 100 * US) == pytest.approx(672 / (1e9 * 100 * US))


def test_facts_name_waits_for_the_device_and_attention_spelled_out(tmp_path: Path) -> None:
    made = MadeTrace()
    training_step(made)
    made.op("aten::_softmax", 200, 5, [[2, 4, 128, 128], [], []], ["", "-1", "False"])
    made.add("cuda_runtime", "cudaStreamSynchronize", 850, 10, correlation=99)
    facts = only(made, tmp_path).facts
    assert facts["host_syncs"] == {"cudaStreamSynchronize": 1}
    assert facts["eager_attention"] == {"calls": 1, "length": 128, "modules": []}
    assert facts["optimizer"] == "fused"
    assert facts["num_ops"] == 5


def test_names_are_shortened_to_what_tells_kernels_apart() -> None:
    assert short_name(ADD) == "vectorized_elementwise_kernel<CUDAFunctor_add>"
    assert short_name("Memcpy HtoD (Pinned -> Device)") == "Memcpy HtoD"
    assert is_tf32(TF32_GEMM)
    assert not is_tf32("volta_sgemm_64x64_nt")


# A CPU, where operators are the work: a real trace.


def test_a_real_cpu_trace_gives_the_flops_of_both_passes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        for number in range(2):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                model(torch.randn(16, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    path = tmp_path / "cpu.json"
    profiler.export_chrome_trace(str(path))
    rank = load_trace(path, peak_flop_per_s=1e10).ranks[0]
    first, second = 2 * 16 * 64 * 32, 2 * 16 * 32 * 8
    # The first layer has no gradient of its input.
    expected = {"forward": first + second, "backward": first + 2 * second}
    assert [flop.by_phase for flop in rank.flops] == [expected, expected]
    for time, flop in zip(rank.times, rank.flops, strict=True):
        assert rank.mfu(flop.model, time.step_s) == pytest.approx(sum(expected.values()) / (1e10 * time.step_s))
        assert all(time.phase_s[phase] > 0 for phase in ("forward", "backward", "optimizer"))
        assert time.busy_s + time.idle_s == pytest.approx(time.step_s)
        assert 0 < time.activity_s[Activity.MATMUL] < time.compute_s


# As a run.


def test_a_trace_is_a_run_with_a_waterfall(tmp_path: Path) -> None:
    made = MadeTrace(rank=0, world_size=1)
    training_step(made)
    made.kernel(NCCL, 960, 30, launch=955)
    run = load_any(made.write(tmp_path))
    assert list(run.step) == [4]
    assert run.header.device == "NVIDIA A100-SXM4-80GB"
    assert run.column("perf/step_time")[0] == pytest.approx(1000 * US)
    assert run.column("perf/mfu")[0] == pytest.approx(240 / (156e12 * 1000 * US))
    assert run.column("perf/hfu")[0] == pytest.approx(360 / (156e12 * 1000 * US))
    assert run.column("perf/exposed_communication_share")[0] == pytest.approx(0.03)
    (profile,) = [event for event in run.events if event["event"] == "profile"]
    expected_us = {"matmul_s": 300, "recompute_s": 60, "non_matmul_s": 50, "optimizer_s": 80, "communication_s": 30}
    assert {key: profile[key] / US for key in expected_us} == pytest.approx(expected_us)
    assert profile["gap_s"] == pytest.approx((120 + 95 + 40 + 105 + 100 + 10) * US)
    parts = run.waterfall().parts
    assert math.fsum(part.seconds for part in parts) == pytest.approx(1000 * US)
    assert {part.name: part.seconds / US for part in parts}["recompute"] == pytest.approx(60)


def test_ranks_make_one_job_and_the_slow_one_is_named(tmp_path: Path) -> None:
    paths = []
    for number, length in enumerate((300, 500)):
        made = MadeTrace(rank=number, world_size=4)
        made.step(7, 0, 1000)
        made.op("aten::mm", 10, 20, [[6, 7], [7, 8]])
        made.kernel(TF32_GEMM, 20, length, launch=15)
        made.kernel(NCCL, 20 + length, 600 - length, launch=16)
        paths.append(made.write(tmp_path, f"rank{number}.json.gz"))
    run = load_trace(reversed(paths)).as_run()
    assert run.header.world_size == 4
    assert run.column("perf/model_flop")[0] == 2 * 672
    assert run.column("perf/mfu")[0] == pytest.approx(2 * 672 / (2 * 156e12 * 1000 * US))
    (ranks,) = [event for event in run.events if event["event"] == "ranks"]
    assert ranks["missing"] == [2, 3]
    assert ranks["stats"]["own_s"]["argmax"] == 1
    assert ranks["stats"]["blocked_s"]["max"] == pytest.approx(300 * US)
    assert ranks["own_s_by_rank"] == [pytest.approx(700 * US), pytest.approx(900 * US), None, None]


def test_files_that_are_not_one_job_are_refused(tmp_path: Path) -> None:
    same, other = MadeTrace(rank=0, world_size=2), MadeTrace(rank=1, world_size=2)
    training_step(same)
    other.step(900, 0, 100)
    other.kernel(ADD, 10, 20, launch=5)
    first, second = same.write(tmp_path, "a.json"), other.write(tmp_path, "b.json")
    with pytest.raises(TraceError, match="another rank"):
        load_trace([first, first])
    with pytest.raises(TraceError, match="no step in common"):
        load_trace([first, second])


def test_load_any_tells_runs_from_traces(tmp_path: Path) -> None:
    run_file = tmp_path / "run.jsonl"
    lines = [{"kind": "header", "schema": 2}, {"kind": "step", "step": 1, "time": 1.0, "metrics": {}}]
    run_file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert list(load_any(tmp_path).step) == [1]
    assert list(load_any(run_file).step) == [1]
    made = MadeTrace()
    training_step(made)
    compact = tmp_path / "compact.json"
    compact.write_text(made.text(indent=None))
    for path in (made.write(tmp_path), made.write(tmp_path, "made.json.gz"), compact):
        assert list(load_any(path).step) == [4]
    with pytest.raises(RecordError, match="cannot read"):
        load_any(tmp_path / "absent")
