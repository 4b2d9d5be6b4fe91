"""The waterfall of runs in which every second was planned: each must turn up in its own part and in no other."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopmeter.record import Run
from flopmeter.waterfall import PART_NAMES, Waterfall, waterfall
from planned_runs import EVENTS, START_S, STEPS, Plan, event, record

HEALTHY = Plan(exposed_s=0.0, num_ops=10_000)
"""At 5 microseconds an operator, recording a step costs up to 50 ms."""

PLANTS: dict[str, str] = {
    "recompute_s": "recompute",
    "matmul_s": "matmul_below_peak",
    "non_matmul_s": "non_matmul",
    "optimizer_s": "optimizer",
    "exposed_s": "exposed_communication",
    "gap_s": "launch_gaps",
    "data_wait_s": "data_wait",
    "host_to_device_s": "own_code",
    "other_s": "own_code",
}


def seconds_of(result: Waterfall) -> dict[str, float]:
    assert math.fsum(part.seconds for part in result.parts) == pytest.approx(result.wall_s, rel=1e-12)
    assert math.fsum(part.share for part in result.parts) == pytest.approx(1, rel=1e-9)
    return {part.name: part.seconds for part in result.parts}


def test_every_planned_second_turns_up_in_its_part(tmp_path: Path) -> None:
    # 40 steps of 70 + 20 + 4 + 5 + 1 = 100 ms, of which 50 ms are ideal.
    result = HEALTHY.run(tmp_path).waterfall()
    assert result.wall_s == pytest.approx(4.0)
    assert seconds_of(result) == pytest.approx(
        {
            "ideal": 2.0,
            "recompute": 0.0,
            "matmul_below_peak": 40 * 0.020,
            "non_matmul": 40 * 0.020,
            "optimizer": 40 * 0.005,
            "exposed_communication": 0.0,
            "launch_gaps": 40 * 0.004,
            "data_wait": 40 * 0.001,
            "own_code": 0.0,
            "pauses": 0.0,
            "unexplained": 0.0,
        },
        abs=1e-9,
    )
    assert [part.name for part in result.parts] == [name for name in PART_NAMES if result.seconds(name) is not None]
    assert all(part.how for part in result.parts)


def test_the_share_of_the_ideal_is_the_mfu_over_wall_time(tmp_path: Path) -> None:
    result = HEALTHY.but(pauses=(("evaluation", 4.0),)).run(tmp_path).waterfall()
    assert result.mfu == result.share("ideal") == pytest.approx(2.0 / 8.0)
    assert result.num_steps == 40


@pytest.mark.parametrize("planted_s", [0.002, 0.05, 0.4])
@pytest.mark.parametrize("sampling_s", [0.0, 0.03])
@pytest.mark.parametrize("cause", PLANTS)
def test_planted_time_raises_its_own_part_and_no_other(
    tmp_path: Path, cause: str, planted_s: float, sampling_s: float
) -> None:
    before = seconds_of(HEALTHY.but(sampling_s=sampling_s).run(tmp_path).waterfall())
    planted = HEALTHY.but(sampling_s=sampling_s, **{cause: getattr(HEALTHY, cause) + planted_s})
    after = seconds_of(planted.run(tmp_path).waterfall())
    for name in before:
        rise_s = (after[name] - before[name]) / 40
        assert rise_s == pytest.approx(planted_s if name == PLANTS[cause] else 0.0, abs=0.1 * planted_s)


@pytest.mark.parametrize("name", ["checkpoint", "evaluation", "anything"])
def test_a_planted_pause_raises_pauses_and_nothing_else(tmp_path: Path, name: str) -> None:
    before = seconds_of(HEALTHY.run(tmp_path).waterfall())
    after = seconds_of(HEALTHY.but(pauses=((name, 2.5),)).run(tmp_path).waterfall())
    assert after == pytest.approx(before | {"pauses": 2.5}, abs=1e-9)


def test_what_sampling_costs_is_taken_off_the_gaps(tmp_path: Path) -> None:
    result = HEALTHY.but(sampling_s=0.03).run(tmp_path).waterfall()
    gaps = next(part for part in result.parts if part.name == "launch_gaps")
    assert gaps.seconds == pytest.approx(40 * 0.004)
    assert gaps.uncertainty_s == pytest.approx(40 * 0.03)
    assert "30 ms a step taken off as the cost of sampling" in gaps.how
    assert result.seconds("unexplained") == pytest.approx(0, abs=1e-9)


def test_a_sampled_step_that_was_slow_by_chance_is_scaled_as_a_whole(tmp_path: Path) -> None:
    # Without operators to record, all of 150 % of the computing must be chance: two thirds of each part remain.
    slow = HEALTHY.but(matmul_s=0.105, non_matmul_s=0.030, gap_s=0.006, num_ops=0).profile(START_S + 4)
    found = seconds_of(HEALTHY.but(num_profiles=0, events=(slow,)).run(tmp_path).waterfall())
    assert found == pytest.approx(seconds_of(HEALTHY.run(tmp_path).waterfall()), abs=1e-9)


def test_recording_comes_off_the_gaps_first_and_chance_off_the_rest(tmp_path: Path) -> None:
    # 1000 operators beside the update cost 5 of 9 ms of gaps; 140 + 40 + 4 ms are left, and are scaled to the usual 94.
    profile = HEALTHY.but(matmul_s=0.140, non_matmul_s=0.040, gap_s=0.009, num_ops=1001).profile(START_S + 4)
    found = seconds_of(HEALTHY.but(num_profiles=0, events=(profile,)).run(tmp_path).waterfall())
    assert found["launch_gaps"] == pytest.approx(40 * 0.004 * 94 / 184)
    assert found["non_matmul"] == pytest.approx(40 * 0.040 * 94 / 184)
    assert found["matmul_below_peak"] + found["ideal"] == pytest.approx(40 * 0.140 * 94 / 184)


def test_a_sampled_step_that_was_fast_leaves_the_rest_unexplained(tmp_path: Path) -> None:
    # It shows 60 + 20 + 4 ms where ordinary steps take 94 ms: 10 ms a step are not accounted for, and are not hidden.
    profile = HEALTHY.but(matmul_s=0.060).profile(START_S + 4)
    found = seconds_of(HEALTHY.but(num_profiles=0, events=(profile,)).run(tmp_path).waterfall())
    assert found["unexplained"] == pytest.approx(40 * 0.010)
    assert found["matmul_below_peak"] == pytest.approx(40 * 0.010)


def test_matmul_faster_than_the_peak_is_below_zero_and_not_clipped(tmp_path: Path) -> None:
    found = seconds_of(HEALTHY.but(ideal_s=0.090).run(tmp_path).waterfall())
    assert found["matmul_below_peak"] == pytest.approx(40 * (0.070 - 0.090))


def test_without_a_sampled_step_forward_and_backward_are_unexplained(tmp_path: Path) -> None:
    result = HEALTHY.but(num_profiles=0).run(tmp_path).waterfall()
    found = seconds_of(result)
    assert {"matmul_below_peak", "non_matmul", "launch_gaps"}.isdisjoint(found)
    assert found["unexplained"] == pytest.approx(40 * (0.094 - 0.050))
    assert "no step was sampled" in result.note


def test_without_a_sampled_step_recomputation_is_what_was_counted_as_such(tmp_path: Path) -> None:
    # Of steps of 100 ms at an MFU of 0.50. HFU holds padding and masked pairs, too: it says nothing of recomputation.
    plan = HEALTHY.but(num_profiles=0, metrics={"perf/hfu": 0.62})
    assert plan.run(tmp_path).waterfall().seconds("recompute") is None
    for again, planned_s in ((0.0, 0.0), (2e8, 0.010)):
        counted = event("count", START_S + 1, model_flop=1e9, recompute_flop=again)
        assert plan.but(events=(counted,)).run(tmp_path).waterfall().seconds("recompute") == pytest.approx(
            40 * planned_s
        )


def test_with_an_unknown_mfu_the_time_is_split_all_the_same(tmp_path: Path) -> None:
    result = HEALTHY.but(ideal_s=None).run(tmp_path).waterfall()
    found = seconds_of(result)
    assert result.mfu is None
    assert "ideal" not in found
    assert found["matmul_below_peak"] == pytest.approx(40 * 0.070)
    assert "MFU is unknown: the device's peak is" in result.note


def test_with_unknown_flops_the_note_says_so(tmp_path: Path) -> None:
    plan = HEALTHY.but(ideal_s=None, metrics={"perf/model_flop": "NaN"})
    assert "the FLOPs of a step are not in the record" in plan.run(tmp_path).waterfall().note


def marked_run(
    folder: Path, durations_s: list[float], marks: dict[int, list[str]], ideals_s: list[float] | None = None
) -> Run:
    """Steps with an ideal of 0.1 s each, or of what is given; then FLOPs at a peak of 1 TFLOP/s are known, too."""
    lines: list[dict[str, Any]] = [{"kind": "header", "schema": 2, "started_at": START_S}]
    now_s = START_S
    for place, step_s in enumerate(durations_s):
        now_s += step_s
        ideal_s = ideals_s[place] if ideals_s else 0.1
        metrics = {"perf/step_time": step_s, "perf/mfu": ideal_s / step_s, "perf/data_wait_share": 0.01 / step_s}
        if ideals_s:
            metrics["perf/model_flop"] = ideal_s * 1e12
        line: dict[str, Any] = {"kind": "step", "step": place, "time": now_s, "metrics": metrics}
        lines.append(line | ({"marks": marks[place]} if place in marks else {}))
    return record(folder, lines)


def test_the_run_is_split_from_the_end_of_warm_up(tmp_path: Path) -> None:
    run = marked_run(tmp_path, [9.0, 8.0, 0.2, 0.2, 0.2], {0: ["warmup"], 1: ["warmup"]})
    assert run.waterfall().wall_s == pytest.approx(0.6)
    assert run.waterfall(start=0).wall_s == pytest.approx(17.6)


@pytest.mark.parametrize(("num_steps", "words"), [(1, "only 1 ordinary step,"), (3, "only 3 ordinary steps,")])
def test_few_steps_are_counted_in_the_note(tmp_path: Path, num_steps: int, words: str) -> None:
    assert words in marked_run(tmp_path, [0.2] * num_steps, {}).waterfall().note


def test_what_measured_steps_took_longer_is_a_pause(tmp_path: Path) -> None:
    # Four ordinary steps of 200 ms; the observed and the profiled one took 300 + 500 ms more than that.
    run = marked_run(tmp_path, [0.2, 0.2, 0.5, 0.2, 0.7, 0.2], {2: ["observed"], 4: ["profiled"]})
    result = run.waterfall()
    found = seconds_of(result)
    assert result.wall_s == pytest.approx(2.0)
    assert found["pauses"] == pytest.approx(0.8)
    assert found["ideal"] == pytest.approx(6 * 0.1)
    assert found["data_wait"] == pytest.approx(6 * 0.01)
    assert "measuring 800 ms" in next(part.how for part in result.parts if part.name == "pauses")


BIG_S, SMALL_S, BIG_IDEAL_S, SMALL_IDEAL_S = 0.4, 0.1, 0.2, 0.02


def test_a_measured_step_has_its_own_flop_and_is_held_against_steps_of_its_own_work(tmp_path: Path) -> None:
    # Four big and four small steps; two more small ones were measured and took 50 ms longer for it.
    durations_s = [BIG_S, SMALL_S] * 4 + [0.15, 0.15]
    ideals_s = [BIG_IDEAL_S, SMALL_IDEAL_S] * 4 + [SMALL_IDEAL_S] * 2
    run = marked_run(tmp_path, durations_s, {8: ["observed"], 9: ["profiled"]}, ideals_s)
    result = run.waterfall()
    found = seconds_of(result)
    assert found["ideal"] == pytest.approx(4 * BIG_IDEAL_S + 6 * SMALL_IDEAL_S)
    assert found["pauses"] == pytest.approx(2 * 0.05)
    flop = math.fsum(run.column("perf/model_flop"))
    assert result.mfu == pytest.approx(flop / 1e12 / math.fsum(durations_s))
    assert "like the others" not in result.parts[0].how


def test_a_measured_step_that_did_less_than_any_other_makes_measuring_no_gain(tmp_path: Path) -> None:
    run = marked_run(tmp_path, [BIG_S] * 8 + [0.05], {8: ["observed"]}, [BIG_IDEAL_S] * 8 + [0.001])
    found = seconds_of(run.waterfall())
    assert found["pauses"] == 0
    assert found["ideal"] == pytest.approx(8 * BIG_IDEAL_S + 0.001)


def test_a_measured_step_without_flop_is_taken_to_be_like_the_others(tmp_path: Path) -> None:
    run = marked_run(tmp_path, [0.2] * 4 + [0.5], {4: ["observed"]})
    run.columns["perf/mfu"][4] = math.nan
    result = run.waterfall()
    assert seconds_of(result)["ideal"] == pytest.approx(5 * 0.1)
    assert "1 of 5 steps taken to be like the others" in result.parts[0].how


def test_a_window_of_marked_steps_only_is_split_and_says_so(tmp_path: Path) -> None:
    result = marked_run(tmp_path, [0.2, 0.4], {0: ["profiled"], 1: ["profiled"]}).waterfall()
    assert seconds_of(result)["data_wait"] == pytest.approx(0.02)
    assert "none is ordinary" in result.note


@pytest.mark.parametrize("mark", ["warmup", "observed", "profiled"])
def test_without_an_ordinary_step_mfu_is_unknown_as_it_is_among_the_steady_ones(tmp_path: Path, mark: str) -> None:
    run = marked_run(tmp_path, [0.2, 0.4], {0: [mark], 1: [mark]})
    result = run.waterfall()
    assert run.steady() == []
    assert (result.mfu, "ideal" in seconds_of(result)) == (None, False)
    assert result.note.startswith("MFU is unknown: too few steps")


def test_a_window_holds_its_own_steps_pauses_and_samples(tmp_path: Path) -> None:
    # Steps of 100 ms; a pause of 3 s stands between the 20th and the 21st.
    run = HEALTHY.but(pauses=(("evaluation", 3.0),)).run(tmp_path)
    assert run.waterfall(0, 20).wall_s == pytest.approx(2.0)
    assert run.waterfall(20, 40).wall_s == pytest.approx(2.0)
    assert run.waterfall(19, 21).wall_s == pytest.approx(3.2)
    assert run.waterfall(5, 10).seconds("non_matmul") == pytest.approx(5 * 0.020)


def test_a_pause_before_the_first_step_or_after_the_last_is_not_in_the_window(tmp_path: Path) -> None:
    outside = (
        event("pause", START_S - 1, name="evaluation", duration_s=5.0),
        event("pause", START_S + 10, name="checkpoint", duration_s=5.0),
    )
    assert HEALTHY.but(events=outside).run(tmp_path).waterfall().wall_s == pytest.approx(4.0)


def test_a_window_uses_the_sampled_steps_inside_it(tmp_path: Path) -> None:
    early, late = (HEALTHY.but(non_matmul_s=s).profile(START_S + t) for s, t in ((0.010, 1.0), (0.018, 3.0)))
    run = HEALTHY.but(num_profiles=0, events=(early, late)).run(tmp_path)
    assert run.waterfall(0, 20).seconds("non_matmul") == pytest.approx(20 * 0.010)
    assert run.waterfall(20, 39).seconds("non_matmul") == pytest.approx(19 * 0.018)
    assert run.waterfall(12, 18).seconds("non_matmul") == pytest.approx(6 * 0.010)  # none inside: the one before


def test_of_several_sampled_steps_the_median_counts(tmp_path: Path) -> None:
    odd = HEALTHY.but(non_matmul_s=0.0, matmul_s=0.010).profile(START_S + 4)
    result = HEALTHY.but(num_profiles=2, events=(odd,)).run(tmp_path).waterfall()
    assert result.seconds("non_matmul") == pytest.approx(40 * 0.020)
    assert "3 sampled steps" in next(part.how for part in result.parts if part.name == "non_matmul")


def test_garbage_collected_in_every_step_is_a_pause_and_no_gap(tmp_path: Path) -> None:
    # 20 ms in each of the 40 steps; it interrupts the interpreter, so the sampled step shows it as a gap.
    collected = event("gc", START_S + 4, duration_s=0.8, num=40, longest_s=0.021)
    found = seconds_of(HEALTHY.but(gap_s=0.024, events=(collected,)).run(tmp_path).waterfall())
    assert found["pauses"] == pytest.approx(0.8)
    assert found["launch_gaps"] == pytest.approx(40 * 0.004)
    assert found["unexplained"] == pytest.approx(0, abs=1e-9)


def test_garbage_collected_by_the_loops_own_code_is_a_pause_and_no_gap(tmp_path: Path) -> None:
    # 20 ms after each of the 40 steps, where no phase runs and no profile looks.
    collected = event("gc", START_S + 4, duration_s=0.8, num=40, longest_s=0.021)
    found = seconds_of(HEALTHY.but(other_s=0.020, sampling_s=0.003, events=(collected,)).run(tmp_path).waterfall())
    assert found["pauses"] == pytest.approx(0.8)
    assert found["launch_gaps"] == pytest.approx(40 * 0.004)
    assert found["unexplained"] == pytest.approx(0, abs=1e-9)


def test_what_the_loop_does_between_forward_and_backward_is_not_taken_for_the_cost_of_sampling(tmp_path: Path) -> None:
    # 20 ms of the loop's own code between the passes: outside the phases, and a gap to the profile, which costs 3 ms.
    plan = HEALTHY.but(other_s=0.020, sampling_s=0.003, num_profiles=0)
    seen = plan.profile(START_S + 4)
    found = seconds_of(plan.but(events=({**seen, "gap_s": 0.004 + 0.020 + 0.003},)).run(tmp_path).waterfall())
    assert found["launch_gaps"] == pytest.approx(40 * 0.004)
    assert found["own_code"] == pytest.approx(40 * 0.020)
    assert found["unexplained"] == pytest.approx(0, abs=1e-9)


def test_rare_collections_are_not_taken_off_the_gaps(tmp_path: Path) -> None:
    # Two of the 40 steps are 400 ms longer; the sampled one has none of it.
    collected = event("gc", START_S + 4, duration_s=0.8, num=2, longest_s=0.4)
    lines = HEALTHY.but(events=(collected,)).lines()
    for line in [line for line in lines if line.get("kind", "step") == "step"][:2]:
        shares = {key: value * 0.1 / 0.5 for key, value in line["metrics"].items() if key.endswith(("share", "mfu"))}
        line["metrics"] |= shares | {
            "perf/step_time": 0.5,
            "perf/forward_share": 0.4 / 0.5 + shares["perf/forward_share"],
        }
    found = seconds_of(record(tmp_path, lines).waterfall())
    assert found["pauses"] == pytest.approx(0.8)
    assert found["launch_gaps"] == pytest.approx(40 * 0.004)
    assert found["unexplained"] == pytest.approx(0, abs=1e-9)


def test_on_a_gpu_only_the_wait_that_left_it_idle_is_lost(tmp_path: Path) -> None:
    # The host sat 1 ms in the loader in each step; the device lost 0.2 ms a step.
    idle = event(
        "device_time",
        START_S + 2,
        num_steps=10,
        device_s={"optimizer": 0.006, "data_wait": 0.0002},
    )
    found = seconds_of(HEALTHY.but(device="cuda", events=(idle,)).run(tmp_path).waterfall())
    assert found["data_wait"] == pytest.approx(40 * 0.0002)


def test_on_a_gpu_the_idle_time_of_the_update_is_counted_once(tmp_path: Path) -> None:
    # Marks say 6 ms from the first to the last of the update, the sampled step 5 ms of kernels: 1 ms is a gap.
    marks = event("device_time", START_S + 2, num_steps=10, device_s={"optimizer": 0.006})
    found = seconds_of(HEALTHY.but(device="cuda", events=(marks,)).run(tmp_path).waterfall())
    assert found["optimizer"] == pytest.approx(40 * 0.005)


def test_on_a_gpu_the_cost_of_tracing_comes_off_the_gaps_alone(tmp_path: Path) -> None:
    # A step of 100 ms, of which kernels run for 70 + 20 + 5 ms. Traced, the host needs 28 ms more, the kernels none;
    # five microseconds for each of 100 operators would be 0.5 ms.
    plan = HEALTHY.but(device="cuda", sampling_s=0.028, num_ops=100)
    found = seconds_of(plan.run(tmp_path).waterfall())
    assert found["matmul_below_peak"] == pytest.approx(40 * 0.020)
    assert found["non_matmul"] == pytest.approx(40 * 0.020)
    assert found["launch_gaps"] == pytest.approx(40 * 0.004)
    assert found["unexplained"] == pytest.approx(0, abs=1e-9)


def test_on_a_gpu_communication_is_exposed_where_the_device_has_nothing_else_to_do(tmp_path: Path) -> None:
    marks = event("device_time", START_S + 2, num_steps=10, device_s={"backward": 0.05, "communication": 0.004})
    found = seconds_of(HEALTHY.but(device="cuda", exposed_s=None, events=(marks,)).run(tmp_path).waterfall())
    assert found["exposed_communication"] == pytest.approx(40 * 0.004)


def test_on_a_gpu_without_marks_the_optimizer_is_what_the_kernels_took(tmp_path: Path) -> None:
    # The host hands the update over in 1 ms; the sampled step shows 5 ms of kernels.
    plan = HEALTHY.but(device="cuda", metrics={"perf/optimizer_share": 0.01})
    found = seconds_of(plan.run(tmp_path).waterfall())
    assert found["optimizer"] == pytest.approx(40 * 0.005)
    assert found["unexplained"] == pytest.approx(0, abs=1e-9)


def test_steps_that_do_not_know_a_value_are_taken_to_be_like_the_others(tmp_path: Path) -> None:
    lines = HEALTHY.lines()
    for line in [line for line in lines if line.get("kind", "step") == "step"][:10]:
        del line["metrics"]["perf/mfu"]
    result = record(tmp_path, lines).waterfall()
    assert result.mfu == pytest.approx(0.5)
    assert "10 of 40 steps taken to be like the others" in result.parts[0].how


@pytest.mark.parametrize("metrics", [{}, {"perf/step_time": "NaN"}, {"perf/step_time": -1.0}, {"perf/step_time": 1e30}])
def test_a_run_without_durations_has_no_waterfall(tmp_path: Path, metrics: dict[str, Any]) -> None:
    lines = [{"kind": "header", "schema": 2}, {"kind": "step", "step": 1, "metrics": metrics}]
    result = record(tmp_path, lines).waterfall()
    assert (result.wall_s, result.mfu, result.parts) == (0.0, None, ())
    assert result.note == "no step of the window has a duration"


PLACES = st.none() | st.integers(-9, 9)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(st.one_of(STEPS, EVENTS), max_size=12), start=PLACES, stop=PLACES)
def test_whatever_the_record_holds_the_parts_add_up(
    tmp_path: Path, lines: list[Any], start: int | None, stop: int | None
) -> None:
    sound = {"kind": "step", "step": 1, "time": START_S, "metrics": Plan().step_metrics()}
    run = record(tmp_path, [{"kind": "header", "schema": 2}, sound, *lines])
    result = waterfall(run, start, stop)
    assert all(math.isfinite(part.seconds) and math.isfinite(part.share) for part in result.parts)
    assert math.fsum(part.seconds for part in result.parts) == pytest.approx(result.wall_s, rel=1e-6, abs=1e-3)


def test_a_waterfall_needs_no_torch(tmp_path: Path) -> None:
    path = HEALTHY.run(tmp_path).path
    code = (
        f"import sys; from flopmeter import load_run; load_run({str(path)!r}).waterfall(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_passes_without_gradients_between_the_steps_are_no_pauses(tmp_path: Path) -> None:
    # 40 steps of 100 ms, and a second of rollouts: a fifth of 5 s.
    fall = (
        Plan()
        .but(pauses=(("no_grad", 1.0), ("eval", 0.5)), metrics={"perf/no_grad_share": 0.0})
        .run(tmp_path)
        .waterfall()
    )
    assert fall.seconds("no_grad") == pytest.approx(1.0)
    assert fall.seconds("pauses") == pytest.approx(0.5)


@pytest.mark.parametrize(("cpu_wait", "stretch"), [(0.09, 1.0), (0.5, 2.0)])
def test_a_sampled_step_is_stretched_as_waits_for_a_core_stretch_the_others(
    tmp_path: Path, cpu_wait: float, stretch: float
) -> None:
    # Ordinary steps compute for 94 ms (70 + 20 + 4); the sampled one took half of that: 35 + 10 + 2.
    profile = Plan(matmul_s=0.035, non_matmul_s=0.010, gap_s=0.002).profile(START_S + 3)
    waits = event("resources", START_S + 2, metrics={"resource/cpu_wait_share": cpu_wait})
    fall = Plan(num_profiles=0, events=(profile, waits)).run(tmp_path).waterfall()
    assert fall.seconds("non_matmul") == pytest.approx(40 * 0.010 * stretch)
    assert fall.seconds("launch_gaps") == pytest.approx(40 * 0.002 * stretch)
    assert fall.seconds("unexplained") == pytest.approx(40 * 0.047 * (2 - stretch), abs=1e-9)


def test_a_wait_for_a_core_that_hit_one_kind_of_work_is_told_by_the_other_sampled_steps(tmp_path: Path) -> None:
    # Waits stretch ordinary steps to 70 + 20 + 10 ms. Sampled ones compute for a twentieth of that, 3.5 + 1 + 0.5, and
    # a wait of 20 ms falls into the products of the first, the other operators of the second, the gaps of the third.
    plan = HEALTHY.but(gap_s=0.010, num_profiles=0)
    sampled = plan.but(matmul_s=0.0035, non_matmul_s=0.001, gap_s=0.0005, waited_s=0.020)
    hit = [sampled.but(matmul_s=0.0235), sampled.but(non_matmul_s=0.021), sampled.but(gap_s=0.0205)]
    waits = event("resources", START_S + 2, metrics={"resource/cpu_wait_share": 0.8})
    run = plan.but(events=(*(each.profile(START_S + 3) for each in hit), waits)).run(tmp_path)
    found = seconds_of(run.waterfall())
    names = ("matmul_below_peak", "non_matmul", "launch_gaps", "unexplained")
    assert [found[name] for name in names] == pytest.approx([40 * 0.020, 40 * 0.020, 40 * 0.010, 0.0])
