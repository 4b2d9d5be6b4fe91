"""Real traces of real GPUs against HolisticTraceAnalysis 0.5.0, whose figures for these files are written down here.

HTA's window goes from the first kernel to the last, without the kernels that the last step launched, and it moves the
start of each kernel up to a whole microsecond and its end down to one. `benchmarks/traces.py` runs HTA itself.
"""

from __future__ import annotations

import gzip
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from flopmeter.traces import load_trace
from test_trace_files import damage, survives

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "traces.py"
NCCL, LOW, V100, ALEXNET = (
    f"{name}.json.gz" for name in ("a100_nccl_6steps", "a100_low_busy_5steps", "v100_single_5steps", "alexnet_a100")
)
HTA = {
    NCCL: {"idle": 0.162, "compute": 0.612, "other": 0.226, "overlap": 0.470},
    LOW: {"idle": 0.694, "compute": 0.142, "other": 0.164},
    V100: {"idle": 0.026, "compute": 0.968, "other": 0.006},
}
ROUNDING = 0.001
"""They are known to a tenth of a percent."""


def real(name: str) -> Path:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"the real traces are not here ({path.name} beside the repository, in shared/traces)")
    return path


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return importlib.import_module("traces")


@pytest.mark.parametrize("name", HTA)
def test_shares_in_htas_window_are_htas(name: str, benchmark: ModuleType) -> None:
    found = benchmark.their_way(real(name))
    assert {key: found[key] for key in HTA[name]} == pytest.approx(HTA[name], abs=ROUNDING)


@pytest.mark.parametrize("name", [NCCL, V100])
def test_our_own_windows_differ_from_htas_by_the_edges_only(name: str) -> None:
    """Ours hold the last step and the host's time before the first kernel: of 5 or 6 steps, a few percent of one."""
    times = load_trace(real(name)).ranks[0].times
    whole_s = sum(time.step_s for time in times)
    assert sum(time.compute_s for time in times) / whole_s == pytest.approx(HTA[name]["compute"], abs=0.02)
    assert sum(time.idle_s for time in times) / whole_s == pytest.approx(HTA[name]["idle"], abs=0.02)


@pytest.mark.parametrize(("name", "first", "stop"), [(NCCL, 1009, 1015), (LOW, 550, 555), (V100, 101, 106)])
def test_steps_follow_each_other_and_their_parts_add_up(name: str, first: int, stop: int) -> None:
    rank = load_trace(real(name)).ranks[0]
    assert [time.number for time in rank.times] == list(range(first, stop))
    for before, time in zip(rank.times, rank.times[1:], strict=False):
        assert (time.end_us - before.end_us) * 1e-6 == pytest.approx(time.step_s)
    for time in rank.times:
        parts = time.compute_s + time.exposed_communication_s + time.copy_s + time.idle_s
        assert parts == pytest.approx(time.step_s)
        assert time.launch_gap_s + time.data_wait_s + time.other_idle_s == pytest.approx(time.idle_s)
        assert sum(time.phase_s.values()) == pytest.approx(time.step_s)


def test_an_asynchronous_gpus_steps_take_as_long_as_the_device_needs() -> None:
    """The host enqueues the V100's first step in 35 ms and is held up by a full queue in the third: 96 ms."""
    times = load_trace(real(V100)).ranks[0].times
    assert [time.step_s for time in times[1:]] == pytest.approx([0.0956] * 4, rel=0.005)


def test_flops_and_mfu_come_from_the_shapes_of_an_a100_trace() -> None:
    rank = load_trace(real(NCCL)).ranks[0]
    assert rank.device == "NVIDIA A100-PG509-200"
    assert (rank.rank, rank.world_size) == (3, 8)
    assert rank.mfu_reason == ""
    assert rank.counting.coverage == pytest.approx(1.0)
    # Each step has the same shapes; every gradient of a product is two products, save where an input needs none.
    flop = rank.flops[0].by_phase
    assert all(step.by_phase == flop for step in rank.flops)
    assert 1.9 < flop["backward"] / flop["forward"] <= 2.0
    # The count by an independent route: the raw file, mm, addmm and bmm alone, no rule about nesting.
    assert sum(flop.values()) == pytest.approx(_products_flop(real(NCCL)) / 6, rel=1e-9)
    peaks = {dtype: peak.flop_per_s for dtype, peak in rank.peaks.items()}
    assert peaks == {"tf32": 156e12, "fp32": 19.5e12}
    assert rank.facts["tf32"] is True


def _products_flop(path: Path) -> float:
    """2mkn of every recorded mm, addmm and bmm: in eager training the innermost operators of all products."""
    import json

    total = 0.0
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if event.get("name") in ("aten::mm", "aten::bmm", "aten::addmm"):
            left, right = event["args"]["Input Dims"][event["name"] == "aten::addmm" :][:2]
            batch = left[0] if len(left) == 3 else 1
            total += 2 * batch * left[-2] * left[-1] * right[-1]
    return total


def test_mfu_is_none_where_cuda_graphs_hide_the_products() -> None:
    rank = load_trace(real(LOW)).ranks[0]
    assert (rank.counting.coverage or 1.0) < 0.05
    assert "only 1.5 %" in rank.mfu_reason
    assert all(rank.mfu(flop.model, 1.0) is None for flop in rank.flops)


def test_a_trace_without_shapes_or_steps_still_gives_its_split() -> None:
    rank = load_trace(real(ALEXNET)).ranks[0]
    assert "record_shapes" in rank.mfu_reason
    assert len(rank.times) == 1
    assert rank.times[0].idle_s / rank.times[0].step_s > 0.99  # 13 s of loading libraries around 65 ms of work


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_real_trace_gives_a_partial_result_or_our_error(seed: int, tmp_path: Path) -> None:
    data = gzip.decompress(real(ALEXNET).read_bytes())
    path = tmp_path / "fuzzed.json"
    path.write_bytes(damage(data, seed, num_bytes=1 + seed))
    survives(path)
    path.write_bytes(damage(real(ALEXNET).read_bytes(), seed, num_bytes=1))
    survives(path)
