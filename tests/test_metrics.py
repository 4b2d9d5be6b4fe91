from __future__ import annotations

import math
from array import array

import pytest

from flopmeter.metrics import Means, certainty, derive, summarise, utilisation


def test_utilisation_is_flop_over_peak_times_wall_time() -> None:
    assert utilisation({"bf16": 50.0}, {"bf16": 100.0}, wall_s=2.0) == pytest.approx(0.25)


def test_mixed_precision_holds_each_dtype_against_its_own_peak() -> None:
    # 50 of 100 per second in bf16 is 0.5 s of ideal time, 10 of 20 in fp32 is another 0.5 s: 1 s of 2 s.
    assert utilisation({"bf16": 50.0, "fp32": 10.0}, {"bf16": 100.0, "fp32": 20.0}, wall_s=2.0) == pytest.approx(0.5)


def test_utilisation_is_none_when_a_peak_is_unknown() -> None:
    assert utilisation({"bf16": 50.0, "fp8": 1.0}, {"bf16": 100.0}, wall_s=1.0) is None


def test_a_dtype_that_did_no_work_needs_no_peak() -> None:
    assert utilisation({"bf16": 50.0, "fp8": 0.0}, {"bf16": 100.0}, wall_s=1.0) == pytest.approx(0.5)


def test_work_that_is_next_to_nothing_needs_no_peak() -> None:
    # A rotary embedding in fp32, on a device whose maker states no fp32 peak.
    assert utilisation({"bf16": 1e6, "fp32": 99.0}, {"bf16": 2e6}, wall_s=1.0) == pytest.approx(0.5)
    assert utilisation({"bf16": 1e6, "fp32": 101.0}, {"bf16": 2e6}, wall_s=1.0) is None
    assert utilisation({"fp32": 99.0}, {"bf16": 2e6}, wall_s=1.0) is None


def test_utilisation_above_one_is_not_clipped() -> None:
    assert utilisation({"bf16": 300.0}, {"bf16": 100.0}, wall_s=1.0) == pytest.approx(3.0)


@pytest.mark.parametrize("wall_s", [0.0, -1.0])
def test_no_time_gives_no_utilisation(wall_s: float) -> None:
    assert utilisation({"bf16": 1.0}, {"bf16": 1.0}, wall_s) is None


def test_rates_are_those_of_the_whole_stretch_not_the_mean_of_rates() -> None:
    steps = [{"ns": ns, "tokens": 100, "samples": 1, "model_flop": {"bf16": 10.0}} for ns in (10**9, 3 * 10**9)]
    result = derive(steps, {"bf16": 10.0})
    assert result["perf/tokens_per_second"] == pytest.approx(50.0)  # 200 tokens in 4 s, not (100 + 33.3) / 2
    assert result["perf/samples_per_second"] == pytest.approx(0.5)
    assert result["perf/steps_per_second"] == pytest.approx(0.5)
    assert result["perf/step_time"] == pytest.approx(2.0)
    assert result["perf/mfu"] == pytest.approx(20 / (10 * 4))
    assert result["perf/mfu_percent"] == pytest.approx(100 * result["perf/mfu"])
    assert result["perf/model_flop"] == pytest.approx(10.0)


def test_phase_shares_add_up_to_one_and_the_rest_is_other() -> None:
    result = derive([{"ns": 4, "data_wait_ns": 1, "forward_ns": 1}], {})
    assert result["perf/data_wait_share"] == pytest.approx(0.25)
    assert result["perf/other_share"] == pytest.approx(0.5)
    assert sum(value for key, value in result.items() if key.endswith("_share")) == pytest.approx(1.0)


def test_the_wait_for_other_ranks_is_a_part_of_the_backward_pass() -> None:
    result = derive([{"ns": 4, "backward_ns": 2, "exposed_communication_ns": 1}], {})
    assert result["perf/exposed_communication_share"] == pytest.approx(0.25)
    assert (result["perf/backward_share"], result["perf/other_share"]) == (pytest.approx(0.5), pytest.approx(0.5))


def test_a_number_that_one_step_does_not_know_is_left_out() -> None:
    result = derive([{"ns": 1, "tokens": 10, "model_flop": {"bf16": 1.0}}, {"ns": 1}], {"bf16": 1.0})
    assert result.keys() & {"perf/mfu", "perf/tokens_per_second", "perf/model_flop"} == set()


def test_steps_of_different_dtypes_are_added_up_by_dtype() -> None:
    steps = [{"ns": 10**9, "model_flop": {dtype: 10.0}} for dtype in ("bf16", "fp32")]
    result = derive(steps, {"bf16": 100.0, "fp32": 20.0})
    assert result["perf/mfu"] == pytest.approx((10 / 100 + 10 / 20) / 2)
    assert "perf/mfu" not in derive(steps, {"bf16": 100.0})


def test_hfu_uses_what_ran_and_mfu_what_was_needed() -> None:
    result = derive([{"ns": 10**9, "model_flop": {"bf16": 3.0}, "hardware_flop": {"bf16": 4.0}}], {"bf16": 10.0})
    assert (result["perf/mfu"], result["perf/hfu"]) == (pytest.approx(0.3), pytest.approx(0.4))


def test_processed_mfu_counts_padding_as_work() -> None:
    step = {"ns": 10**9, "model_flop": {"bf16": 3.0}, "processed_flop": {"bf16": 5.0}}
    assert derive([step], {"bf16": 10.0})["perf/mfu_processed"] == pytest.approx(0.5)


def test_no_step_says_nothing_and_one_without_a_duration_no_rate() -> None:
    assert derive([], {"bf16": 1.0}) == {}
    assert derive([{"ns": 0, "tokens": 3, "model_flop": {"bf16": 3.0}}], {"bf16": 1.0}) == {
        "perf/step_time": 0.0,
        "perf/model_flop": 3.0,
    }


def test_several_devices_add_their_peaks() -> None:
    step = {"ns": 10**9, "device_ns": 4 * 10**9, "model_flop": {"bf16": 10.0}}
    assert derive([step], {"bf16": 10.0})["perf/mfu"] == pytest.approx(0.25)


def test_a_summary_weighs_by_time_and_leaves_out_marked_steps() -> None:
    columns = {"perf/step_time": array("d", [100.0, 1.0, 3.0]), "perf/mfu": array("d", [0.0, 0.8, 0.4])}
    result = summarise(columns, steady=[range(1, 3)])
    assert result["perf/mfu"] == pytest.approx((0.8 * 1 + 0.4 * 3) / 4)
    assert result["step_time_median_s"] == pytest.approx(2.0)
    assert result["steady_steps"] == 2


def test_a_summary_skips_steps_that_do_not_know_a_value() -> None:
    known = {"perf/step_time": [1.0, 1.0], "perf/mfu": [math.nan, 0.5], "perf/hfu": [math.nan, math.nan]}
    columns = {key: array("d", values) for key, values in known.items()}
    result = summarise(columns, steady=[range(2)])
    assert result["perf/mfu"] == pytest.approx(0.5)
    assert "perf/hfu" not in result


def test_a_run_without_steady_steps_has_no_summary() -> None:
    assert summarise({"perf/step_time": array("d", [1.0])}, steady=[]) == {}


def test_the_95th_percentile_is_the_smallest_value_that_95_percent_do_not_exceed() -> None:
    columns = {"perf/step_time": array("d", range(1, 101))}
    assert summarise(columns, [range(100)])["step_time_p95_s"] == 95.0


def test_running_means_are_those_of_all_steps_weighted_by_their_time() -> None:
    # 1 s at 50 % and 3 s at 10 %: (0.5 + 0.3) / 4 = 20 %; two steps in 4 s are 2 s each.
    means = Means("perf/mfu", "perf/hfu")
    means.add({"training/loss": 2.0})
    assert means.compute() == {}
    means.add({"perf/step_time": 1.0, "perf/mfu": 0.5})
    means.add({"perf/step_time": 3.0, "perf/mfu": 0.1})
    assert means.compute() == pytest.approx({"perf/step_time": 2.0, "perf/mfu": 0.2})


@pytest.mark.parametrize(
    ("summary", "word"),
    [
        ({}, None),
        ({"perf/mfu": 0.4}, "counted"),
        ({"perf/mfu": 0.4, "flop_doubt": 0.0004}, "counted"),
        ({"perf/mfu": 0.4, "flop_doubt": 0.021}, "predicted (error so far 2.1 %)"),
        ({"perf/mfu": 0.4, "flop_doubt": 1.0}, "predicted (not tested yet)"),
        ({"perf/mfu": 0.4, "flop_doubt": 0.3, "uncounted": 1.0}, "at least"),
    ],
)
def test_one_word_says_how_sure_an_mfu_is(summary: dict[str, float], word: str | None) -> None:
    assert certainty(summary) == word
