"""The contract that every rule keeps, and what becomes of their findings."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopmeter.diagnosis import RULES, Diagnosis, Finding, Gain, diagnose, explain
from flopmeter.errors import ConfigError
from planned_runs import EVENT_KEYS, HOSTILE, START_S, STEPS, Plan, event, record

HEALTHY = Plan()

NAMES = {
    "data_stall",
    "cpu_preprocessing",
    "kernel_launch",
    "exposed_communication",
    "straggler",
    "eager_attention",
    "fp32_matmul",
    "padding_waste",
    "recompute",
    "optimizer_heavy",
    "host_sync",
    "gc_pause",
    "checkpoint_pause",
    "eval_pause",
    "slow_sag",
    "ragged_shapes",
    "memory_bound",
    "impossible_mfu",
    "healthy",
    "undetermined",
}


def test_the_rules_are_the_files_of_their_folder() -> None:
    assert set(RULES) >= NAMES


@pytest.mark.parametrize("name", RULES)
def test_a_rule_explains_itself(name: str) -> None:
    text = explain(name)
    first, *rest = text.split("\n")
    assert first.endswith(".")
    assert len(first) <= 116
    for section in ("How we know.", "What to do."):
        assert sum(line.startswith(section) for line in rest) == 1
    assert RULES[name].is_last_resort or any(line.startswith(("The gain ", "No gain")) for line in rest)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_explains_only_rules_that_exist(name: str) -> None:
    assert set(RULES[name].explains) <= set(RULES) - {name}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_finds_nothing_or_says_what_is_missing_in_a_bare_run(tmp_path: Path, name: str) -> None:
    """Steps with a duration and nothing else."""
    lines: list[dict[str, Any]] = [{"kind": "header", "schema": 2}]
    lines += [{"kind": "step", "step": n, "metrics": {"perf/step_time": 0.1}} for n in range(3)]
    result = diagnose(record(tmp_path, lines))
    found = {finding.rule for finding in result.findings}
    assert found <= {rule.name for rule in RULES.values() if rule.is_last_resort}
    assert len(result.not_checked.get(name, "it could look")) > 10


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_cannot_look_is_listed_with_its_reason(tmp_path: Path, name: str) -> None:
    result = diagnose(record(tmp_path, [{"kind": "header", "schema": 2}]))
    assert result.not_checked[name] == "no step of the window has a duration"
    assert result.findings == ()
    assert result.headline == "MFU is unknown; nothing could be judged: no step of the window has a duration."


def test_a_healthy_run_has_one_finding_and_it_says_so(tmp_path: Path) -> None:
    result = diagnose(HEALTHY.run(tmp_path))
    assert [finding.rule for finding in result.findings] == ["healthy"]
    assert result.findings[0].evidence[-1] == "matmuls run at 71.4 % of the peak while they run"  # 50 of 70 ms
    assert result.mfu == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("ideal_s", "standing"),
    [(0.051, "good"), (0.049, "fair"), (0.021, "fair"), (0.019, "low"), (0.011, "low"), (0.009, "very low")],
)
def test_the_headline_says_where_the_run_stands(tmp_path: Path, ideal_s: float, standing: str) -> None:
    result = diagnose(HEALTHY.but(ideal_s=ideal_s).run(tmp_path))  # steps of 100 ms
    assert result.standing == standing
    assert result.headline.startswith(f"MFU over the wall time is {ideal_s * 1000:.1f} %, {standing}: ")


def test_the_headline_names_the_first_cause_and_its_gain(tmp_path: Path) -> None:
    # 150 ms a step of which 51 are waiting: without 95 % of them 150/(150 - 48.45) = 1.477 times as fast.
    result = diagnose(HEALTHY.but(data_wait_s=0.051).run(tmp_path))
    assert result.headline == (
        "MFU over the wall time is 33.3 %, fair: the steps wait for data for 34.0 % of the time; without that it would "
        "run about 47.7 % faster. The rest of the time: matmuls below peak 13.3 %, other operators 13.3 %."
    )


def test_the_largest_part_is_named_before_a_small_finding(tmp_path: Path) -> None:
    # Steps of 112: 13 waiting for data against 40 of matmuls beyond the 30 of ideal, which are what the run is about.
    result = diagnose(HEALTHY.but(ideal_s=0.030, data_wait_s=0.013).run(tmp_path))
    assert result.findings[0].rule == "data_stall"
    assert result.headline.startswith(
        "MFU over the wall time is 26.8 %, fair: matmuls run at 42.9 % of the peak, which costs 35.7 % of the time. "
        "What can be mended: the steps wait for data for 11.6 % of the time; without that"
    )


def test_a_cause_of_less_than_a_tenth_is_not_the_first(tmp_path: Path) -> None:
    # Steps of 108, 9 of them waiting for data: without 95 % of it 108/(108 - 8.55) = 1.086 times as fast.
    result = diagnose(HEALTHY.but(data_wait_s=0.009).run(tmp_path))
    assert [finding.rule for finding in result.findings] == ["healthy", "data_stall"]
    assert result.headline == (
        "MFU over the wall time is 46.3 %, fair; no known cause of lost time stands out; the largest that was found: "
        "the steps wait for data for 8.3 % of the time; without that it would run about 8.6 % faster. "
        "The rest of the time: matmuls below peak 18.5 %, other operators 18.5 %."
    )


@pytest.mark.parametrize(
    ("cpu_share", "wait_s", "first"),
    [(0.05, 0.0175, "data_stall"), (0.95, 0.0169, "healthy"), (0.95, 0.0181, "cpu_preprocessing")],
)
def test_work_that_somebody_wants_must_cost_more_to_be_the_first(
    tmp_path: Path, cpu_share: float, wait_s: float, first: str
) -> None:
    # Beside 99 ms a wait of 17.5 is 15.02 %, one of 16.9 is 14.6 %, one of 18.1 is 15.5 %.
    plan = HEALTHY.but(data_wait_s=wait_s, metrics={"perf/data_wait_cpu_share": cpu_share})
    assert diagnose(plan.run(tmp_path)).findings[0].rule == first
    if first == "data_stall":  # a loader that waits does nothing that anybody wants
        plan = plan.but(data_wait_s=0.0112)  # 10.2 %
        assert diagnose(plan.run(tmp_path)).findings[0].rule == first


def test_what_chance_may_hide_is_undetermined_and_not_healthy(tmp_path: Path) -> None:
    # 20 of 100 ms move memory. A thread off its core for 40 ms of them, 10 at a time, leaves 2 sqrt(4 x 0.2 x 0.8) of
    # 10 ms to chance, which is 16. One off it for 0.4 ms leaves 1.6, and 21.6 are no finding.
    found = diagnose(HEALTHY.but(waited_s=0.040).run(tmp_path))
    assert found.findings[0].rule == "undetermined"
    assert "what the operators spend is undetermined: the thread was kept from its core" in found.headline
    assert diagnose(HEALTHY.but(waited_s=0.0004).run(tmp_path)).findings[0].rule == "healthy"


def test_the_rest_of_the_time_does_not_repeat_what_the_finding_consists_of(tmp_path: Path) -> None:
    # Steps of 300, 181 of them matmuls below peak, which a batch too small for its 500 operators may be.
    result = diagnose(HEALTHY.but(non_matmul_s=0.220).run(tmp_path))
    assert result.findings[0].rule == "memory_bound"
    assert result.headline.endswith("faster. The rest of the time: matmuls below peak 6.7 %.")


def starved(**changes: Any) -> Plan:
    """The training thread has no core for 60 % of the time."""
    metrics = {"resource/process_cpu_cores": 0.4, "resource/cpu_wait_share": 0.6}
    return HEALTHY.but(events=(event("resources", START_S + 2, metrics=metrics),), ideal_s=0.020, **changes)


def test_a_process_kept_from_its_core_is_told_before_the_programs_own_cause(tmp_path: Path) -> None:
    # Steps of 150, 51 of them waiting for data: 40 of 100 that it needs are 40 %.
    result = diagnose(starved(data_wait_s=0.051).run(tmp_path))
    assert [finding.rule for finding in result.findings] == ["cpu_contention", "data_stall"]
    assert result.headline.startswith(
        "MFU over the wall time is 13.3 %, low: the process gets 40.0 % of the CPU time that it needs, which costs "
        "60.0 % of the time; without that it would run about 2.3 times as fast. Apart from that, the steps wait for "
        "data for 34.0 % of the time; without that it would run about 47.7 % faster."
    )


def test_beside_a_process_kept_from_its_core_a_program_without_a_fault_is_healthy(tmp_path: Path) -> None:
    result = diagnose(starved().run(tmp_path))
    assert [finding.rule for finding in result.findings] == ["cpu_contention", "healthy"]
    assert ". Apart from that, no known cause of lost time stands out" in result.headline


def test_most_untold_time_leads_even_beside_a_finding(tmp_path: Path) -> None:
    # Steps of 1000: 151 waiting for data, and 794 that no step was sampled to explain.
    plan = HEALTHY.but(num_profiles=0, matmul_s=0.820, data_wait_s=0.151)
    result = diagnose(plan.run(tmp_path))
    assert [finding.rule for finding in result.findings] == ["undetermined", "data_stall"]


def test_a_loop_whose_passes_were_not_seen_is_not_told_that_its_own_code_takes_the_time(tmp_path: Path) -> None:
    # Steps of 0 + 0 + 300 + 5 + 1 ms: layers that are called by their forward() show no pass.
    plan = HEALTHY.but(ideal_s=None, matmul_s=0.0, non_matmul_s=0.0, gap_s=0.0, other_s=0.300, num_profiles=0)
    found = diagnose(plan.run(tmp_path)).findings[0]
    assert found.rule == "undetermined"
    assert found.title == "where the time went is undetermined: no pass of a model was seen"
    assert found.advice[0] == "call the model, not its forward(); or name it: watch(model)"


def test_a_third_of_what_is_untold_leads_and_the_untold_is_told_before_it(tmp_path: Path) -> None:
    # Steps of 1000: 260 waiting for data, and 685 that no step was sampled to explain.
    plan = HEALTHY.but(num_profiles=0, matmul_s=0.711, data_wait_s=0.260)
    result = diagnose(plan.run(tmp_path))
    assert [finding.rule for finding in result.findings] == ["data_stall"]
    words = "68.5 % of the time is unexplained (too few steps were sampled; train longer). What can be mended: the "
    assert words in result.headline


def test_a_gain_beyond_twice_the_speed_is_told_as_a_multiple(tmp_path: Path) -> None:
    # 99 ms of work beside 901 of waiting: without 95 % of the wait 1000/(1000 - 855.95) = 6.9 times as fast.
    result = diagnose(HEALTHY.but(data_wait_s=0.901).run(tmp_path))
    assert result.headline.endswith("; without that it would run about 6.9 times as fast.")


@pytest.mark.parametrize(("num_steps", "ending"), [(1, " (from 1 step only)."), (9, " (from 9 steps only)."), (10, "")])
def test_the_headline_of_few_steps_says_so(tmp_path: Path, num_steps: int, ending: str) -> None:
    result = diagnose(HEALTHY.but(num_steps=num_steps, data_wait_s=0.051).run(tmp_path))
    assert f"47.7 % faster{ending or '.'} The rest of the time: " in result.headline  # as above


def test_the_headline_does_not_give_a_cause_as_the_reason_of_an_unknown_mfu(tmp_path: Path) -> None:
    result = diagnose(HEALTHY.but(ideal_s=None, data_wait_s=0.1).run(tmp_path))
    assert result.headline.startswith("MFU is unknown; the steps wait for data")


def test_too_few_steps_to_be_sampled_are_no_healthy_run(tmp_path: Path) -> None:
    # 1000 ms a step: 50 ideal, 5 optimizer, 1 data wait; nobody looked into the other 944.
    plan = HEALTHY.but(num_steps=12, num_profiles=0, matmul_s=0.970)
    result = diagnose(plan.run(tmp_path))
    assert [finding.rule for finding in result.findings] == ["undetermined"]
    assert result.headline == (
        "MFU over the wall time is 5.0 %, very low; where the time went is undetermined: too few steps were sampled; "
        "train longer."
    )
    assert "healthy" not in str(result)


def test_without_a_steady_step_the_headline_and_the_tile_agree_that_mfu_is_unknown(tmp_path: Path) -> None:
    step = {"kind": "step", "step": 1, "marks": ["warmup"], "metrics": {"perf/step_time": 0.1, "perf/mfu": 0.0004}}
    result = diagnose(record(tmp_path, [{"kind": "header", "schema": 2}, step]))
    assert (result.standing, result.mfu) == ("unknown", None)
    assert result.headline.startswith("MFU is unknown; where the time went is undetermined: too few steps were sampled")


def test_an_unknown_mfu_still_gets_a_diagnosis(tmp_path: Path) -> None:
    result = diagnose(HEALTHY.but(ideal_s=None, data_wait_s=0.1).run(tmp_path))
    assert (result.standing, result.mfu) == ("unknown", None)
    assert result.findings[0].rule == "data_stall"
    assert result.not_checked["padding_waste"] == "no step has perf/mfu"


def test_findings_are_ordered_by_expected_gain(tmp_path: Path) -> None:
    plan = HEALTHY.but(data_wait_s=0.040, recompute_s=0.060, pauses=(("checkpoint", 0.5),))
    found = diagnose(plan.run(tmp_path)).findings
    gains = [finding.gain.expected for finding in found if finding.gain]
    assert [finding.rule for finding in found] == ["recompute", "data_stall", "checkpoint_pause"]
    assert gains == sorted(gains, reverse=True)


def test_a_doubt_about_all_figures_comes_first(tmp_path: Path) -> None:
    found = diagnose(HEALTHY.but(ideal_s=0.150, data_wait_s=0.040).run(tmp_path)).findings
    assert [finding.rule for finding in found] == ["impossible_mfu", "data_stall"]


def test_a_cause_takes_its_symptoms_finding_away(tmp_path: Path) -> None:
    top = (("aten::_softmax", 0.030, 12), ("aten::masked_fill", 0.020, 12))
    plan = HEALTHY.but(non_matmul_s=0.120, top=top)
    assert [finding.rule for finding in diagnose(plan.run(tmp_path)).findings] == ["memory_bound"]
    attention = {"calls": 12, "length": 512, "modules": ["blocks.0"]}
    plan = plan.but(facts={"eager_attention": attention})
    assert [finding.rule for finding in diagnose(plan.run(tmp_path)).findings] == ["eager_attention"]


def test_a_finding_too_small_to_lead_takes_no_larger_one_away(tmp_path: Path) -> None:
    # Steps of 200: 120 move memory, of which 8 are the scores'.
    attention = {"calls": 12, "length": 512, "modules": ["blocks.0"]}
    plan = HEALTHY.but(non_matmul_s=0.120, top=(("aten::_softmax", 0.008, 12),), facts={"eager_attention": attention})
    found = diagnose(plan.run(tmp_path))
    assert [finding.rule for finding in found.findings] == ["memory_bound", "eager_attention"]
    assert not found.symptoms


def test_a_window_is_judged_by_itself(tmp_path: Path) -> None:
    run = HEALTHY.but(pauses=(("checkpoint", 2.0),)).run(tmp_path)
    assert diagnose(run).findings[0].rule == "checkpoint_pause"
    assert diagnose(run, 0, 15).findings[0].rule == "healthy"


def test_the_gain_of_saved_seconds_is_the_ratio_of_the_times() -> None:
    gain = Gain.of_saving(10.0, 1.0, 2.0, 5.0)
    assert (gain.low, gain.expected, gain.high) == pytest.approx((10 / 9 - 1, 10 / 8 - 1, 1.0))
    assert Gain.of_saving(10.0, 0.0, 10.0, 99.0).high == pytest.approx(19)  # 95 % is the most that is believed


def test_an_unknown_rule_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'data_stall'"):
        explain("data_stal")


FACTS_KEYS = st.sampled_from(
    [
        "num_optimizer_ops",
        "num_parameter_tensors",
        "host_syncs",
        "host_sync_places",
        "eager_attention",
        "odd_sizes",
        "matmul_dtypes",
        "tf32",
        "optimizer",
        "num_recompiles",
        "num_shapes",
        "by_module",
        "by_dtype",
        "verdict",
        "rank",
        "phase",
        "extra_s",
        "cause",
        "since_step",
        "flop_per_s",
        "metrics",
    ]
)
EVENT_NAMES = st.sampled_from(
    ["profile", "facts", "gc", "regime", "ranks", "straggler", "resources", "count", "peak", "device_time", "pause"]
)
ANY_EVENT = st.tuples(
    EVENT_NAMES,
    st.dictionaries(st.one_of(FACTS_KEYS, EVENT_KEYS), HOSTILE, max_size=12),
    st.sampled_from([{}, {"time": START_S}, {"cause": "slow_peer"}]),
).map(lambda made: {**made[1], **made[2], "kind": "event", "event": made[0]})
HEADERS = st.dictionaries(st.sampled_from(["device", "world_size", "model"]), HOSTILE, max_size=3)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(st.one_of(STEPS, ANY_EVENT), max_size=12), header=HEADERS)
def test_whatever_the_record_holds_no_rule_fails(tmp_path: Path, lines: list[Any], header: dict[str, Any]) -> None:
    run = record(tmp_path, [{"kind": "header", "schema": 2, **header}, *HEALTHY.but(num_steps=2).lines()[1:], *lines])
    result = diagnose(run)
    assert not [reason for reason in result.not_checked.values() if "failed" in reason]
    check_finite(result)


def check_finite(result: Diagnosis) -> None:
    for finding in result.findings:
        assert isinstance(finding, Finding)
        assert math.isfinite(finding.lost)
        if finding.gain is not None:
            assert 0 <= finding.gain.low <= finding.gain.expected <= finding.gain.high < math.inf


def flopmeter(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flopmeter", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_the_command_shows_the_fix_the_parts_and_what_it_is_worth(tmp_path: Path) -> None:
    HEALTHY.but(data_wait_s=0.051, facts=None).run(tmp_path)
    answer = flopmeter("report", str(tmp_path), COLUMNS="160")
    assert answer.returncode == 0, answer.stderr
    assert "Fix this first: The steps wait for data" in answer.stdout
    assert "Waiting for data" in answer.stdout
    assert "data_wait" not in answer.stdout
    assert "34.0 %" in answer.stdout
    assert "+48 % steps per second (+20 to +52 %)" in answer.stdout  # 150/(150 - 25.5) = 1.205, and 150/99
    assert "skipped checks" in answer.stdout
    assert "eager_attention" in json.loads(flopmeter("report", str(tmp_path), "--json").stdout)["not_checked"]


def test_the_command_says_once_that_a_run_without_steps_cannot_be_judged(tmp_path: Path) -> None:
    record(tmp_path, [{"kind": "header", "schema": 2}, {"kind": "summary", "time": 1.0}])
    answer = flopmeter("report", str(tmp_path), COLUMNS="160")
    assert "Nothing could be judged: no step of the window has a duration." in answer.stdout
    assert "skipped" not in answer.stdout


def test_the_command_gives_json_with_every_part(tmp_path: Path) -> None:
    HEALTHY.run(tmp_path)
    answer = json.loads(flopmeter("report", str(tmp_path), "--json").stdout)
    assert answer["waterfall"]["mfu"] == pytest.approx(0.5)
    assert {part["name"] for part in answer["waterfall"]["parts"]} >= {"ideal", "launch_gaps", "unexplained"}
    assert answer["findings"][0]["rule"] == "healthy"


def test_names_from_a_hostile_record_do_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    syncs = {"aten::_local_scalar_dense\x1b[31m\ud800": 400}
    top = (("aten::_local_scalar_dense", 0.02, 400),)
    plan = HEALTHY.but(facts={"host_syncs": syncs, "host_sync_places": ["train\x07.py:3"]}, top=top)
    plan.run(tmp_path)
    answer = flopmeter("report", str(tmp_path), PYTHONIOENCODING="ascii")
    assert answer.returncode == 0, answer.stderr
    assert "host_sync" in answer.stdout
    assert "\x1b" not in answer.stdout
    assert "\x07" not in answer.stdout


def test_a_diagnosis_needs_no_torch(tmp_path: Path) -> None:
    path = HEALTHY.run(tmp_path).path
    code = (
        "import sys; from flopmeter import load_run; from flopmeter.diagnosis import diagnose; "
        f"diagnose(load_run({str(path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_truncated_run_file_is_judged_by_what_is_left(tmp_path: Path) -> None:
    path = HEALTHY.but(data_wait_s=0.05).run(tmp_path).path
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    answer = json.loads(flopmeter("report", str(path), "--json").stdout)
    assert answer["findings"][0]["rule"] == "data_stall"
    assert answer["not_checked"]["memory_bound"] == "no step was sampled by the profiler"


def test_an_event_of_an_unknown_kind_changes_nothing(tmp_path: Path) -> None:
    plain, odd = HEALTHY, HEALTHY.but(events=(event("of the future", START_S, matmul_s=9.0),))
    assert diagnose(odd.run(tmp_path)).findings == diagnose(plain.run(tmp_path)).findings
