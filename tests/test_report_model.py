"""What a report says: every value derived from the made run by hand."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import report_runs as runs
from flopmeter.record import Header, Run, load_run
from flopmeter.report._model import MAX_BUCKETS, Report, report_of, timeline_of


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(runs.write_run(tmp_path_factory.mktemp("runs") / "mine", runs.ordinary_lines()))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(runs.write_run(tmp_path_factory.mktemp("runs") / "hostile", runs.hostile_lines()))


def report_on(folder: Path, *lines: dict[str, Any]) -> Report:
    return report_of(load_run(runs.write_run(folder, lines)))


def test_the_number_is_that_of_the_steady_steps(ordinary: Run) -> None:
    number = report_of(ordinary).number
    assert number.mfu == pytest.approx(runs.MFU)
    assert number.certainty == "counted"
    assert number.hfu == pytest.approx(1.1 * runs.MFU)
    assert number.tokens_per_second == pytest.approx(1000 / runs.STEP_S)
    assert number.step_median_s == runs.STEP_S
    assert number.num_steady == 20 - 3
    assert number.end_to_end is number.goodput is None  # a pause of 2 s does not fit between steps that follow at once


def test_end_to_end_is_mfu_times_goodput(tmp_path: Path) -> None:
    steps = [runs.step(place) for place in range(1, 21)]  # 10 s of steps after 5 s of starting up
    number = report_on(tmp_path, runs.header(started_at=995.0), runs.peak(), *steps).number
    assert number.goodput == pytest.approx(10 / 15)
    assert number.end_to_end == pytest.approx(runs.MFU * 10 / 15)


def test_the_waterfall_is_the_runs_own(ordinary: Run) -> None:
    assert report_of(ordinary).waterfall == ordinary.waterfall()


def test_warm_up_pauses_and_measured_steps_are_marked(ordinary: Run) -> None:
    timeline = report_of(ordinary).timeline
    assert timeline.warmup == [(1, 2)]
    assert timeline.measured == [3]
    assert timeline.pauses == [(10, "checkpoint", 2.0)]


def test_a_short_run_is_drawn_step_by_step(ordinary: Run) -> None:
    lines = {line.name: line for line in report_of(ordinary).timeline.lines}
    assert list(lines) == ["MFU", "Step time"]
    assert lines["MFU"].step == list(range(1, 21))
    assert lines["MFU"].mean == pytest.approx([runs.MFU] * 20)
    assert lines["MFU"].low == lines["MFU"].high == []


def test_a_million_steps_are_two_thousand_buckets_that_keep_every_outlier() -> None:
    step_s = array("d", [0.1]) * 1_000_000
    step_s[123_456], step_s[654_321] = 9.0, 0.001
    run = Run(path=Path("run.jsonl"), step=array("q", range(1_000_000)), columns={"perf/step_time": step_s})
    run.time, run.headers = array("d", range(1_000_000)), [Header()]
    (line,) = timeline_of(run).lines
    assert len(line.step) == len(line.mean) == len(line.low) == len(line.high) == MAX_BUCKETS
    assert line.step[:3] == [0, 500, 1000]  # a million steps in 2,000 buckets
    assert line.high[123_456 // 500] == 9.0
    assert line.low[654_321 // 500] == 0.001
    assert line.mean[123_456 // 500] == pytest.approx((499 * 0.1 + 9.0) / 500, rel=1e-5)


def test_a_bucket_without_a_value_is_empty_and_no_zero() -> None:
    values = array("d", [1.0] * 3000 + [math.nan] * 3000)
    run = Run(path=Path("run.jsonl"), step=array("q", range(6000)), columns={"training/loss": values})
    run.time, run.headers = array("d", range(6000)), [Header()]
    (line,) = timeline_of(run).lines
    assert line.mean == line.low == line.high == [1.0] * 1000 + [None] * 1000


def test_memory_and_power_stand_at_the_step_that_ran_when_they_were_sampled(tmp_path: Path) -> None:
    # Step n ends at 1000 + n / 2: 1001.2 s lies in step 3.
    sampled = runs.event("resources", metrics={"resource/gpu_memory_bytes": 7e9, "resource/gpu_power_w": 300.0})
    steps = [runs.step(place) for place in range(1, 6)]
    timeline = report_on(tmp_path, runs.header(), *steps, {**sampled, "time": 1001.2}).timeline
    told = {line.name: (line.unit, line.step, line.mean) for line in timeline.lines}
    assert told["Memory"] == ("B", [3], [7e9])
    assert told["Power"] == ("W", [3], [300.0])


def test_a_restart_goes_back_in_the_line(tmp_path: Path) -> None:
    second = runs.header(started_at=1003.0)
    steps = [runs.step(place) for place in (1, 2, 3)]
    timeline = report_on(tmp_path, runs.header(), *steps, second, runs.step(2), runs.step(3)).timeline
    assert timeline.lines[0].step == [1, 2, 3, 2, 3]
    assert timeline.num_restarts == 1


def test_a_window_holds_its_own_steps_only(ordinary: Run) -> None:
    report = report_of(ordinary, 10, 15)
    assert report.about.window == (11, 15)
    assert report.number.num_steady == 5
    assert report.timeline.lines[0].step == [11, 12, 13, 14, 15]
    assert report.timeline.pauses == []


def test_phases_are_shares_of_the_step_time_and_what_no_step_has_is_none(ordinary: Run) -> None:
    phases = report_of(ordinary).phases
    assert phases is not None
    # 0.1, 0.3, 0.5, 0.08 and 0.02 of half a second; nothing was copied to a device.
    expected = {"data_wait": 0.05, "forward": 0.15, "backward": 0.25, "optimizer": 0.04, "other": 0.01}
    assert phases.steady_s == pytest.approx(expected)


def test_waiting_for_other_ranks_is_taken_out_of_the_backward_pass(tmp_path: Path) -> None:
    steps = [runs.step(place, **{"perf/exposed_communication_share": 0.2}) for place in range(1, 6)]
    phases = report_on(tmp_path, runs.header(), *steps).phases
    assert phases is not None
    assert phases.steady_s["exposed_communication"] == pytest.approx(0.1)  # 0.2 of half a second
    assert phases.steady_s["backward"] == pytest.approx(0.15)  # 0.5 less 0.2 of it
    assert list(phases.steady_s).index("exposed_communication") == list(phases.steady_s).index("backward") + 1


def test_time_by_operator_names_rate_and_share_of_the_peak(tmp_path: Path) -> None:
    top = [["aten::mm", 0.3, 7], ["aten::add_", 0.1, 40], ["bad", "NaN", 1], "worse"]
    profile = runs.event("profile", 3, device="cpu", step_s=0.5, matmul_s=0.4, top=top)
    lines = [runs.header(), runs.peak(), *(runs.step(place) for place in range(1, 6)), runs.count(3), profile]
    operators = report_on(tmp_path, *lines).operators
    assert operators is not None
    mm, add = operators.rows
    assert (mm.name, mm.calls, add.name) == ("aten::mm", 7, "aten::add_")
    assert (mm.share, add.share) == (pytest.approx(0.6), pytest.approx(0.2))
    assert mm.flop_per_s == pytest.approx(0.75 * runs.MODEL_FLOP / 0.3)  # three quarters of the FLOPs are mm's
    assert mm.of_peak == pytest.approx(0.75 * runs.MODEL_FLOP / 0.3 / runs.PEAK_FLOP_PER_S)
    assert add.flop_per_s is None
    assert operators.matmuls is not None
    assert operators.matmuls.of_peak == pytest.approx(runs.MODEL_FLOP / 0.4 / runs.PEAK_FLOP_PER_S)


def test_the_flops_of_a_part_of_the_matmuls_are_no_speed_of_all(tmp_path: Path) -> None:
    profile = runs.event("profile", 3, device="cuda", step_s=0.5, matmul_s=0.4, top=[["gemm", 0.3, 7]])
    lines = [runs.header(), runs.peak(), runs.step(1), runs.count(1, coverage=0.015), profile]
    report = report_on(tmp_path, *lines)
    assert report.operators is not None
    assert report.operators.matmuls is not None
    assert report.operators.matmuls.share == pytest.approx(0.8)
    assert report.operators.matmuls.flop_per_s is None
    assert report.method.is_partial


def test_a_utilisation_above_the_peak_is_impossible_and_not_good(tmp_path: Path) -> None:
    lines = [runs.header(), runs.peak(flop_per_s=0.95 * runs.MFU * runs.PEAK_FLOP_PER_S)]
    steps = [runs.step(place, **{"perf/mfu": 1 / 0.95}) for place in range(1, 6)]
    assert report_on(tmp_path, *lines, *steps).number.standing == "impossible"


def test_a_remark_is_made_once(tmp_path: Path) -> None:
    told = [runs.event("warning", place, message="a kernel has no launch") for place in (1, 2)]
    count = runs.count(1, left_out=["a kernel has no launch", "masks count in full"])
    remarks = report_on(tmp_path, runs.header(), runs.step(1), *told, count).method.remarks
    assert remarks == ["a kernel has no launch", "masks count in full"]


def test_equal_layers_are_one_row(tmp_path: Path) -> None:
    layers = {f"layers.{place}.{name}": flop for place in range(32) for name, flop in (("mlp", 2.0), ("norm", 1.0))}
    count = runs.count(1, by_module={**layers, "head": 4.0}, model_flop=100.0)
    work = report_on(tmp_path, runs.header(), runs.step(1), count).work
    assert work is not None
    assert [(row.name, row.depth, row.flop) for row in work.modules] == [
        ("model", 0, 100.0),
        ("layers.0 ... layers.31 (32 x)", 1, 96.0),
        ("mlp", 2, 64.0),
        ("norm", 2, 32.0),
        ("head", 1, 4.0),
    ]


def test_modules_too_small_to_see_are_one_row(tmp_path: Path) -> None:
    many = {f"part{place}": 1.0 for place in range(1000)} | {"head": 9000.0}
    work = report_on(tmp_path, runs.header(), runs.step(1), runs.count(1, by_module=many)).work
    assert work is not None
    rows = [(row.name, row.depth, row.flop) for row in work.modules]
    assert rows == [("model", 0, 10_000.0), ("head", 1, 9000.0), ("(itself and small parts)", 1, 1000.0)]


LAYERS, HIDDEN, LENGTH, BATCH, VOCAB = 2, 64, 128, 4, 1000
WEIGHTS = LAYERS * 12 * HIDDEN**2 + VOCAB * HIDDEN  # attention 4 h^2, an MLP of 8 h^2, the head
PARAMETERS = WEIGHTS + VOCAB * HIDDEN + 640  # the embedding and norms
TOKENS = BATCH * LENGTH
TOKEN_FLOP = 6 * WEIGHTS * TOKENS
PAIR_FLOP = 12 * LAYERS * HIDDEN * BATCH * LENGTH * (LENGTH + 1) / 2


def decoder_lines(ranks: int = 1, **changes: Any) -> list[dict[str, Any]]:
    """Rank 0 counts its own step; the rows are the job's."""
    model_flop = TOKEN_FLOP + PAIR_FLOP
    flop = {"model_flop": model_flop, "forward_flop": model_flop / 3, "backward_flop": model_flop * 2 / 3}
    growth = {"exact": {"float32": {"tokens": TOKEN_FLOP, "pairs_causal": PAIR_FLOP}}}
    metrics = {
        "perf/model_flop": ranks * model_flop,
        "perf/tokens_per_second": ranks * TOKENS / runs.STEP_S,
        "perf/tokens_processed_per_second": ranks * TOKENS / runs.STEP_S,
        "perf/samples_per_second": ranks * BATCH / runs.STEP_S,
    }
    fields = {**flop, "growth": growth, **changes.pop("count", {})}
    header = runs.header(num_parameters=changes.pop("parameters", PARAMETERS), world_size=ranks)
    lines = [runs.step(place, marks=["observed"] if place == 1 else [], **metrics | changes) for place in (1, 2, 3)]
    return [header, runs.peak(), *lines, runs.count(1, **fields)]


@pytest.mark.parametrize("ranks", [1, 64])
def test_the_number_is_told_under_the_names_of_others_for_jobs_of_many_ranks_too(tmp_path: Path, ranks: int) -> None:
    rows = report_on(tmp_path, *decoder_lines(ranks)).number.elsewhere
    width = LAYERS * HIDDEN
    by_hand = {  # FLOPs of a token: 6 a weight, 12 a channel and pair, all pairs being LENGTH a token
        "exact": 6 * WEIGHTS + 6 * width * (LENGTH + 1),
        "palm": 6 * PARAMETERS + 12 * width * LENGTH,
        "6p_full": 6 * WEIGHTS + 12 * width * LENGTH,
        "6p_causal": 6 * WEIGHTS + 6 * width * LENGTH,
        "6n": 6 * PARAMETERS,
    }
    assert by_hand["exact"] * TOKENS == TOKEN_FLOP + PAIR_FLOP
    expected = {name: runs.MFU * flop / by_hand["exact"] for name, flop in by_hand.items()}
    assert {row.name: row.mfu for row in rows} == pytest.approx(expected)
    assert [row.short_name for row in rows] == ["", "PaLM", "torchtitan", "Megatron", "6N"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"count": {"backward_flop": 1e12, "forward_flop": 1e12}}, "frozen"),
        ({"perf/tokens_processed_per_second": 2 * TOKENS / runs.STEP_S}, "padded"),
        ({"perf/samples_per_second": (BATCH + 1) / runs.STEP_S}, "length"),
        ({"count": {"convention": "full"}}, "full"),
        ({"count": {"growth": {"exact": {"float32": {"tokens": TOKEN_FLOP, "patches": 1e9}}}}}, "patch"),
        ({"perf/model_flop": 1.0}, "not in the record"),
        ({"parameters": WEIGHTS // 2}, "a part of the model"),  # of one rank of two that share its weights
        ({"parameters": 8 * WEIGHTS}, "more than a token passes through"),  # experts
    ],
)
def test_a_run_that_the_rules_do_not_describe_gets_no_such_number(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    number = report_on(tmp_path, *decoder_lines(**changes)).number
    assert reason in number.elsewhere_note
    assert number.elsewhere == ()


def test_the_slow_rank_of_a_thousand_is_kept(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [runs.header(world_size=1024)]
    for place in range(1, 501):
        own_s = [0.4] * 1024
        own_s[700] = 0.9 if place == 250 else 0.4
        stats = {"own_s": {"min": 0.4, "mean": 0.4, "max": max(own_s), "argmax": 700}}
        lines += [runs.step(place), runs.event("ranks", place, world_size=1024, own_s_by_rank=own_s, stats=stats)]
    straggler = {"rank": 700, "host": "node-88", "phase": "forward", "extra_s": 0.5, "since_step": 250}
    ranks = report_on(tmp_path, *lines, runs.event("straggler", 250, cause="slow_peer", **straggler)).ranks
    assert ranks is not None
    assert {len(column) for column in ranks.own_s} == {1024}
    assert len(ranks.own_s) * 1024 <= 40_000
    assert sum(column[700] == 0.9 for column in ranks.own_s) == 1
    assert [row.rank for row in ranks.stragglers] == [700]


def test_datasets_have_what_was_said_of_them_last(tmp_path: Path) -> None:
    steps = [runs.step(place, **{"dataset/web/loss": 4.0 / place, "dataset/web/samples": place}) for place in (1, 2)]
    (row,) = report_on(tmp_path, runs.header(), *steps).datasets
    assert (row.name, row.loss, row.samples, row.accuracy) == ("web", 2.0, 2.0, None)


def test_a_cpus_counters_give_the_rate_between_the_first_and_the_last_reading(tmp_path: Path) -> None:
    readings = [{**runs.event("counters", reader="perf_event", flop=flop), "time": time_s}
                for time_s, flop in ((100.0, 1e9), (110.0, 4e9), (120.0, 9e9))]  # fmt: skip
    counters = report_on(tmp_path, runs.header(), runs.step(1), *readings).counters
    assert counters is not None
    assert counters.flop_per_s == pytest.approx(4e8)  # 8e9 in 20 s


def test_a_run_without_a_peak_has_no_mfu_and_no_certainty_and_its_time_is_split_all_the_same(tmp_path: Path) -> None:
    keys = ("perf/step_time", "perf/data_wait_share", "perf/forward_share", "perf/backward_share")
    lines = [runs.step(place) for place in range(1, 9)]
    for line in lines:
        line["metrics"] = {key: line["metrics"][key] for key in keys}
    report = report_on(tmp_path, runs.header(), *lines)
    assert report.number.mfu is report.number.certainty is report.number.end_to_end is None
    assert report.waterfall.mfu is None
    assert report.waterfall.parts


def test_a_page_that_is_sent_on_does_not_tell_where_the_run_lies(ordinary: Run) -> None:
    about = report_of(ordinary).about
    assert (about.name, about.place) == ("mine", "mine")


def test_hostile_records_give_finite_numbers_and_short_texts(hostile: Run) -> None:
    told = msgspec.to_builtins(report_of(hostile))
    text = json.dumps(told, allow_nan=False)
    assert len(text) < 200_000
    assert "x" * 1000 not in text
    assert told["datasets"][0]["loss"] is None


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_FIELDS = (
    *("by_module", "by_op", "by_dtype", "growth", "model_flop", "forward_flop", "left_out", "uncounted", "name"),
    *("duration_s", "own_s_by_rank", "stats", "world_size", "missing", "rank", "host", "since_step", "from_mfu"),
    *("to_mfu", "message", "dtype", "flop_per_s", "after_step", "top", "step_s", "matmul_s", "device", "time"),
    *("metrics", "reader", "flop"),
)
_KINDS = ("count", "ranks", "straggler", "pause", "regime", "peak", "warning", "profile", "resources", "counters")


@settings(max_examples=60)
@given(
    st.lists(
        st.fixed_dictionaries({"event": st.sampled_from(_KINDS)}, optional=dict.fromkeys(_FIELDS, _ANYTHING)),
        max_size=6,
    )
)
@example(events=[{"event": "count", "by_dtype": {"float32": None}}])
def test_no_event_can_break_the_report(ordinary: Run, events: list[dict[str, Any]]) -> None:
    run = Run(path=ordinary.path, headers=ordinary.headers, step=ordinary.step, time=ordinary.time)
    run.columns, run.marks, run.events = ordinary.columns, ordinary.marks, events
    json.dumps(msgspec.to_builtins(report_of(run)), allow_nan=False)
