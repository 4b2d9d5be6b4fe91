from __future__ import annotations

import math

import pytest

from flopmeter.metrics import Step, Window, summarise, utilisation


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


def test_a_window_gives_the_rates_of_the_whole_stretch_not_the_mean_of_rates() -> None:
    window = Window()
    window.add(Step(step_s=1.0, tokens=100, samples=1, model_flop={"bf16": 10.0}))
    window.add(Step(step_s=3.0, tokens=100, samples=1, model_flop={"bf16": 10.0}))
    result = window.compute({"bf16": 10.0})
    assert result["perf/tokens_per_second"] == pytest.approx(50.0)  # 200 tokens in 4 s, not (100 + 33.3) / 2
    assert result["perf/steps_per_second"] == pytest.approx(0.5)
    assert result["perf/step_time"] == pytest.approx(2.0)
    assert result["perf/mfu"] == pytest.approx(20 / (10 * 4))
    assert result["perf/mfu_percent"] == pytest.approx(100 * result["perf/mfu"])
    assert result["perf/model_flop"] == pytest.approx(10.0)


def test_phase_shares_add_up_to_one_and_the_rest_is_other() -> None:
    window = Window()
    window.add(Step(step_s=4.0, phase_s={"data_wait": 1.0, "forward": 1.0}))
    result = window.compute({})
    assert result["perf/data_wait_share"] == pytest.approx(0.25)
    assert result["perf/other_share"] == pytest.approx(0.5)
    assert sum(value for key, value in result.items() if key.endswith("_share")) == pytest.approx(1.0)


def test_a_number_that_one_step_does_not_know_is_left_out() -> None:
    window = Window()
    window.add(Step(step_s=1.0, tokens=10, model_flop={"bf16": 1.0}))
    window.add(Step(step_s=1.0))
    result = window.compute({"bf16": 1.0})
    assert result.keys() & {"perf/mfu", "perf/tokens_per_second", "perf/model_flop"} == set()


def test_hfu_uses_what_ran_and_mfu_what_was_needed() -> None:
    window = Window()
    window.add(Step(step_s=1.0, model_flop={"bf16": 3.0}, hardware_flop={"bf16": 4.0}))
    result = window.compute({"bf16": 10.0})
    assert (result["perf/mfu"], result["perf/hfu"]) == (pytest.approx(0.3), pytest.approx(0.4))


def test_processed_mfu_counts_padding_as_work() -> None:
    window = Window()
    window.add(Step(step_s=1.0, model_flop={"bf16": 3.0}, processed_flop={"bf16": 5.0}))
    assert window.compute({"bf16": 10.0})["perf/mfu_processed"] == pytest.approx(0.5)


def test_an_empty_window_says_nothing() -> None:
    assert Window().compute({"bf16": 1.0}) == {}


def test_several_devices_add_their_peaks() -> None:
    window = Window()
    window.add(Step(step_s=1.0, model_flop={"bf16": 10.0}))
    assert window.compute({"bf16": 10.0}, num_devices=4)["perf/mfu"] == pytest.approx(0.25)


def test_a_summary_weighs_by_time_and_leaves_out_marked_steps() -> None:
    columns = {"perf/step_time": [100.0, 1.0, 3.0], "perf/mfu": [0.0, 0.8, 0.4]}
    result = summarise(columns, steady=[1, 2])
    assert result["perf/mfu"] == pytest.approx((0.8 * 1 + 0.4 * 3) / 4)
    assert result["step_time_median_s"] == pytest.approx(2.0)
    assert result["steady_steps"] == 2


def test_a_summary_skips_steps_that_do_not_know_a_value() -> None:
    columns = {"perf/step_time": [1.0, 1.0], "perf/mfu": [math.nan, 0.5], "perf/hfu": [math.nan, math.nan]}
    result = summarise(columns, steady=[0, 1])
    assert result["perf/mfu"] == pytest.approx(0.5)
    assert "perf/hfu" not in result


def test_a_run_without_steady_steps_has_no_summary() -> None:
    assert summarise({"perf/step_time": [1.0]}, steady=[]) == {}


def test_the_95th_percentile_is_the_smallest_value_that_95_percent_do_not_exceed() -> None:
    columns = {"perf/step_time": [float(i) for i in range(1, 101)]}
    assert summarise(columns, range(100))["step_time_p95_s"] == 95.0
