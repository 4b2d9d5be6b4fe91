from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from flopmeter import cli
from flopmeter.compare import Change, Comparison, Row, Symptom, compare, names_of
from flopmeter.compare.condition import UnknownFigureError, parse_condition
from flopmeter.compare.noise import CONFIDENCE, MIN_STEPS, Ratio, block_length, interval, redraw
from flopmeter.compare.predictions import check_prediction
from flopmeter.compare.quantities import NAMES, QUANTITIES, figures_of, ratios_of
from flopmeter.diagnosis import Finding, Gain
from flopmeter.errors import ConfigError
from flopmeter.record import Run
from flopmeter.report import _compare as words
from flopmeter.report._compare import comparison_document
from flopmeter.report._model import timeline_of
from made_runs import MODEL_FLOP, PEAK_FLOP_PER_S, TOKENS, make_run, noisy, run_lines, write_run
from planned_runs import START_S, Plan, event


class Answer(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def flopmeter(*arguments: str) -> Answer:
    """The command, as its entry point runs it."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["flopmeter", "compare", *arguments])
        patch.setenv("COLUMNS", "120")
        code = cli._run()
    return Answer(code, out.getvalue(), err.getvalue())


def wandering(num: int, correlation: float, seed: int) -> list[float]:
    return noisy(100.0, num, seed, correlation, spread=0.02)


# Noise


def test_the_interval_is_as_wide_as_theory_says_for_independent_steps() -> None:
    # The mean of n values with standard deviation s has the standard error s / sqrt(n); 99 % lie within 2.576 of them.
    n, s = 400, 2.0
    values = wandering(n, 0.0, seed=1)
    draws = redraw(Ratio(values, [1.0] * n), "seed")
    assert draws is not None
    low, high = interval(draws)
    assert high - low == pytest.approx(2 * 2.576 * s / math.sqrt(n), rel=0.25)


def test_the_interval_is_wider_when_steps_hang_together() -> None:
    # A first-order process with correlation c has a mean whose variance is (1 + c) / (1 - c) times as large: here 9.
    n, s, c = 1000, 2.0, 0.8
    draws = redraw(Ratio(wandering(n, c, seed=3), [1.0] * n), "seed")
    assert draws is not None
    low, high = interval(draws)
    assert high - low == pytest.approx(2 * 2.576 * s * math.sqrt((1 + c) / (1 - c) / n), rel=0.35)


@pytest.mark.parametrize(("num", "correlation"), [(60, 0.0), (300, 0.6), (1500, 0.8)])
def test_the_interval_holds_the_truth_about_as_often_as_it_claims(num: int, correlation: float) -> None:
    trials = 60
    drawn = [redraw(Ratio(wandering(num, correlation, seed), [1.0] * num), str(seed)) for seed in range(trials)]
    intervals = [interval(draws) for draws in drawn if draws is not None]
    misses = sum(not low <= 100.0 <= high for low, high in intervals)
    # At the claimed 0.99 more than five misses of 60 come by chance once in ten thousand times; at half the width,
    # which drawing single steps would give for the correlated ones, about twelve are expected.
    assert CONFIDENCE == 0.99
    assert misses <= 5
    assert len(intervals) >= trials - 6


def test_blocks_grow_with_the_memory_of_the_series() -> None:
    lengths = [block_length(wandering(800, correlation, seed=2)) for correlation in (0.0, 0.6, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] == math.ceil(800 ** (1 / 3))
    assert lengths[-1] > 2 * lengths[0]


def test_the_same_steps_and_seed_give_the_same_draws() -> None:
    ratio = Ratio(wandering(100, 0.5, seed=4), [1.0] * 100)
    assert redraw(ratio, "a") == redraw(ratio, "a")
    assert redraw(ratio, "a") != redraw(ratio, "b")


@pytest.mark.parametrize("num", [0, 1, MIN_STEPS - 1])
def test_too_few_steps_give_no_draws(num: int) -> None:
    assert redraw(Ratio([1.0] * num, [1.0] * num), "seed") is None


def test_steps_that_are_all_equal_have_no_noise() -> None:
    draws = redraw(Ratio([0.5] * 50, [1.0] * 50), "seed")
    assert draws is not None
    assert interval(draws) == (0.5, 0.5)


def test_a_million_steps_cost_no_more_draws_than_a_thousand() -> None:
    source = random.Random(0)
    values = [source.random() for _ in range(200_000)]
    draws = redraw(Ratio(values, [1.0] * len(values)), "seed")
    assert draws is not None
    low, high = interval(draws)
    # Uniform numbers have the standard deviation sqrt(1 / 12).
    assert high - low == pytest.approx(2 * 2.576 * math.sqrt(1 / 12 / len(values)), rel=0.25)


# Figures


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A baseline, a run that is 20 % faster, and the baseline once more with other noise."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        make_run(folder / "before", noisy(0.100, 300, 1, 0.5), 0.30),
        make_run(folder / "after", noisy(0.080, 300, 2, 0.5), 0.05, device="cuda", versions={"torch": "2.14.0"}),
        make_run(folder / "again", noisy(0.100, 300, 3, 0.5), 0.30),
    ]


@pytest.fixture(scope="module")
def comparison(three: list[Run]) -> Comparison:
    return compare(three)


def test_figures_are_those_of_the_whole_stretch(tmp_path: Path) -> None:
    # Two steps of 0.1 s and one of 0.2 s: rates are totals over totals, not means of rates.
    run = make_run(tmp_path, [0.1, 0.1, 0.2])
    figures = figures_of(run, ratios_of(run))
    assert figures["step_time"] == pytest.approx(0.4 / 3)
    assert figures["steps_per_second"] == pytest.approx(3 / 0.4)
    assert figures["tokens_per_second"] == pytest.approx(3 * TOKENS / 0.4)
    assert figures["mfu"] == pytest.approx(3 * MODEL_FLOP / 0.4 / PEAK_FLOP_PER_S)
    assert figures["step_time_median"] == pytest.approx(0.1)
    assert figures["model_flop"] == pytest.approx(MODEL_FLOP)
    assert figures["samples_per_second"] is None


def test_marked_steps_are_left_out(tmp_path: Path) -> None:
    lines = run_lines([9.0, 0.1, 0.1])
    lines[2] |= {"marks": ["warmup"]}
    write_run(tmp_path / "a", lines)
    run = make_run(tmp_path / "b", [0.1, 0.1])
    assert figures_of(run, ratios_of(run))["mfu"] == pytest.approx(
        compare([make_run(tmp_path / "b", [0.1, 0.1]), _load(tmp_path / "a")]).row("mfu").values[1]
    )


def _load(folder: Path) -> Run:
    from flopmeter.record import load_run

    return load_run(folder)


def test_a_real_difference_is_beyond_noise_and_its_interval_holds_the_truth(comparison: Comparison) -> None:
    change = comparison.row("mfu").changes[1]
    assert change is not None
    assert change.is_beyond_noise
    assert change.is_better
    # 0.100 s against 0.080 s at the same work: 25 % more.
    assert change.low < 0.25 < change.high  # type: ignore[operator]
    slower = comparison.row("step_time").changes[1]
    assert slower is not None
    assert slower.is_better
    assert slower.low < -0.2 < slower.high  # type: ignore[operator]


def test_other_noise_about_the_same_mean_is_not_beyond_noise(comparison: Comparison) -> None:
    for name in ("mfu", "hfu", "step_time", "tokens_per_second"):
        change = comparison.row(name).changes[2]
        assert change is not None
        assert change.is_beyond_noise is False
    assert words.verdict_text(comparison.row("mfu").changes[2]) == "within noise"


def test_a_change_that_is_written_as_nothing_is_neither_better_nor_worse(tmp_path: Path) -> None:
    """Steps that differ by a hundred-thousandth, and never by more: beyond noise, and of no interest."""
    runs = [make_run(tmp_path / name, [step_s] * 200) for name, step_s in (("a", 0.1), ("b", 0.099999))]
    change = compare(runs).row("mfu").changes[1]
    assert change is not None
    assert change.low is not None
    assert change.low > 0
    assert (change.is_beyond_noise, change.is_better) == (False, None)
    assert words.verdict_text(change) == ""
    assert words.change_text(compare(runs).row("mfu").quantity, change) == "0.0 %"


def test_a_share_changes_by_points_and_less_waiting_is_better(comparison: Comparison) -> None:
    change = comparison.row("data_wait_share").changes[1]
    assert change is not None
    assert change.value == pytest.approx(0.05 - 0.30)
    assert change.is_better
    assert comparison.row("forward_share").changes[1].is_better is None  # type: ignore[union-attr]


def test_the_baseline_is_the_first_run(comparison: Comparison) -> None:
    assert comparison.names == ("before", "after", "again")
    assert all(row.changes[0] is None for row in comparison.rows)


def test_settings_that_differ_are_named_and_equal_ones_are_not(comparison: Comparison) -> None:
    assert comparison.settings["device"] == ("cpu", "cuda", "cpu")
    assert comparison.settings["torch version"] == ("2.13.0", "2.14.0", "2.13.0")
    assert "model" not in comparison.settings


def test_the_waterfalls_parts_are_beside_each_other(comparison: Comparison) -> None:
    assert comparison.parts["data_wait"][:2] == pytest.approx((0.30, 0.05))
    assert comparison.parts["ideal"][0] == pytest.approx(comparison.row("mfu").values[0], rel=0.02)


def test_a_run_with_few_steps_is_compared_but_not_judged(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", [0.1] * 5), make_run(tmp_path / "b", [0.05] * 5)]
    result = compare(runs)
    change = result.row("mfu").changes[1]
    assert change is not None
    assert change.value == pytest.approx(1.0)
    assert change.is_beyond_noise is None
    assert "Too few steps" in words.headline(result, 1)
    assert any(f"{MIN_STEPS} are needed" in note for note in result.notes)


def test_unknown_figures_are_none_and_never_zero(tmp_path: Path) -> None:
    lines = run_lines([0.1] * 30)
    for line in lines[2:-1]:
        del line["metrics"]["perf/mfu"]
    write_run(tmp_path / "b", lines)
    row = compare([make_run(tmp_path / "a", [0.1] * 30), _load(tmp_path / "b")]).row("mfu")
    assert row.values[1] is None
    assert row.changes[1] is None


def test_runs_that_do_other_work_are_named_as_such(tmp_path: Path) -> None:
    lines = run_lines([0.1] * 30)
    for line in lines[2:-1]:
        line["metrics"]["perf/model_flop"] = 2 * MODEL_FLOP
    lines[1] = lines[1] | {"flop_per_s": 3 * PEAK_FLOP_PER_S}
    write_run(tmp_path / "b", lines)
    notes = compare([make_run(tmp_path / "a", [0.1] * 30), _load(tmp_path / "b")]).notes
    assert any("2 times the work" in note for note in notes)
    assert any("another peak" in note for note in notes)


@pytest.mark.parametrize("num", [0, 1, 51])
def test_two_to_fifty_runs_can_be_compared(tmp_path: Path, num: int) -> None:
    run = make_run(tmp_path, [0.1])
    with pytest.raises(ConfigError, match="2 to 50 runs"):
        compare([run] * num)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/a/run.jsonl", "x/b/run.jsonl"], ["a", "b"]),
        (["x/a/run.jsonl", "y/a/run.jsonl"], ["x/a", "y/a"]),
        (["x/trace.json", "x/a/run.jsonl"], ["trace.json", "a"]),
        (["x/a/run.jsonl", "x/a/run.jsonl"], ["a (1)", "a (2)"]),
        (["run.jsonl", "a/run.jsonl"], ["run.jsonl", "a"]),
    ],
)
def test_runs_are_named_by_as_little_as_tells_them_apart(paths: list[str], names: list[str]) -> None:
    assert names_of([Path(path) for path in paths]) == names


def test_a_hostile_record_is_compared_without_an_error(tmp_path: Path) -> None:
    lines: list[Any] = run_lines([0.1] * 30)
    lines[0] |= {"model": "<script>" + "x" * 100_000, "versions": {"a": [1], "b" * 1000: None}}
    lines.insert(5, {"kind": "event", "event": "facts", "matmul_dtypes": "none", "optimizer": {"a": 1}})
    lines.insert(5, {"kind": "event", "event": "peak", "dtype": 3, "flop_per_s": "fast"})
    for place, value in enumerate(("NaN", "Infinity", -1.0, 1e308, 0.0), start=10):
        lines[place]["metrics"] |= dict.fromkeys(lines[place]["metrics"], value)
    write_run(tmp_path / "b", lines)
    runs = [make_run(tmp_path / "a", [0.1] * 30), _load(tmp_path / "b")]
    result = compare(runs)
    json.dumps(result.as_dict(), allow_nan=False)
    page = comparison_document(result, [timeline_of(run) for run in runs])
    assert "<script>xxx" not in page
    assert len(page) < 400_000


def test_a_finding_that_another_one_explains_is_neither_new_nor_gone(tmp_path: Path) -> None:
    # Both runs wait a fifth of 125 ms for communication. In the first a straggler, who is named, explains it.
    slow = event("straggler", START_S + 1, extra_s=0.02, cause="slow_peer", rank=1, phase="forward_s", host="h")
    plan = Plan(header={"world_size": 2}, exposed_s=0.025)
    first, second = plan.but(events=(slow,)).run(tmp_path / "a"), plan.run(tmp_path / "b")
    for runs, rules in (((first, second), ("straggler",)), ((second, first), None)):
        result = compare(runs)
        waiting = next(symptom for symptom in result.symptoms if symptom.rule == "exposed_communication")
        assert waiting.lost == pytest.approx((0.2, 0.2))
        prediction = result.predictions[1]
        assert prediction is None if rules is None else prediction is not None and prediction.rules == rules


# Predictions


def finding(rule: str, low: float, expected: float, high: float) -> Finding:
    gain = Gain(low=low, expected=expected, high=high)
    return Finding(rule=rule, title=rule, lost=0.1, evidence=(), advice=(), gain=gain)


def measured(value: float, low: float, high: float) -> Change:
    return Change(value=value, low=low, high=high, is_beyond_noise=not low <= 0 <= high, is_better=value > 0)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (measured(0.20, 0.18, 0.22), "came true"),
        (measured(0.05, 0.04, 0.06), "less than predicted"),
        (measured(0.05, 0.00, 0.12), "within noise of it"),
        (measured(0.50, 0.45, 0.55), "more than predicted"),
        (None, "unknown"),
    ],
)
def test_a_promise_is_held_against_the_measured_gain(change: Change | None, verdict: str) -> None:
    result = check_prediction([finding("data_stall", 0.10, 0.20, 0.30)], [], "MFU", change)
    assert result is not None
    assert result.verdict == verdict


def test_a_finding_that_stayed_promises_nothing() -> None:
    stayed = finding("data_stall", 0.10, 0.20, 0.30)
    assert check_prediction([stayed], [stayed], "MFU", measured(0.2, 0.1, 0.3)) is None


def test_the_gains_of_several_cures_multiply() -> None:
    before = [finding("data_stall", 0.1, 0.2, 0.3), finding("eager", 0.0, 0.5, 1.0), finding("kept", 1, 2, 3)]
    result = check_prediction(before, before[2:], "MFU", measured(0.8, 0.7, 0.9))
    assert result is not None
    assert result.rules == ("data_stall", "eager")
    assert (result.low, result.expected, result.high) == pytest.approx((1.1 - 1, 1.2 * 1.5 - 1, 1.3 * 2 - 1))
    assert result.verdict == "came true"


def test_a_data_stall_that_is_mended_keeps_its_promise(tmp_path: Path) -> None:
    # 0.10 s of which 0.04 s wait for data, against 0.06 s with no wait: 1 / 0.6 - 1 = 67 % faster, as the waiting says.
    before = make_run(tmp_path / "before", noisy(0.10, 200, 5, spread=0.01), 0.4)
    after = make_run(tmp_path / "after", noisy(0.06, 200, 6, spread=0.01), 0.0)
    result = compare([before, after])
    symptom = next(symptom for symptom in result.symptoms if symptom.lost[0] is not None)
    assert symptom.lost[0] == pytest.approx(0.4, abs=0.02)
    assert symptom.lost[1] is None
    prediction = result.predictions[1]
    assert prediction is not None
    assert prediction.measured == pytest.approx(1 / 0.6 - 1, abs=0.03)
    assert prediction.verdict == "came true"
    told = words.prediction_text(result, 1)
    assert told.startswith("Fixed in after: data stall. Predicted +")
    assert told.endswith(" by MFU over wall time: came true.")


def test_a_cure_is_not_judged_by_a_run_of_another_model(tmp_path: Path) -> None:
    before = make_run(tmp_path / "before", noisy(0.10, 200, 5, spread=0.01), 0.4)
    after = make_run(tmp_path / "after", noisy(0.06, 200, 6, spread=0.01), 0.0, model="Other")
    result = compare([before, after])
    prediction = result.predictions[1]
    assert prediction is not None
    assert (prediction.measured, prediction.verdict) == (None, "unknown")
    assert "cannot be checked" in words.prediction_text(result, 1)


@pytest.mark.parametrize(
    ("before", "after", "fate"), [(0.1, None, "gone"), (None, 0.1, "new"), (0.1, 0.2, "stayed"), (None, None, "")]
)
def test_findings_come_go_and_stay(three: list[Run], before: float | None, after: float | None, fate: str) -> None:
    symptom = Symptom(rule="data_stall", title="it waits", lost=(before, after, None), gains=(None, None, None))
    result = msgspec.structs.replace(compare(three), symptoms=(symptom,))
    section = next(section for section in words.sections(result) if section.title == "Findings: time lost")
    _, _, (baseline, cell, _) = section.rows[0]
    assert (baseline.verdict, cell.verdict) == ("", fate)


def test_traces_are_compared_like_runs() -> None:
    traces = Path(__file__).resolve().parents[2] / "shared" / "traces"
    names = ("a100_low_busy_5steps", "v100_single_5steps")
    if not traces.is_dir():
        pytest.skip("the shared traces are not here")
    answer = flopmeter(*(str(traces / f"{name}.json.gz") for name in names), "--json")
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout)
    (row,) = (row for row in result["rows"] if row["quantity"]["name"] == "step_time")
    assert all(value > 0 for value in row["values"])
    assert row["changes"][1]["is_beyond_noise"] is None
    assert "device" in result["settings"]


# Conditions

RUN = {"mfu": 0.30, "hfu": 0.40, "step_time": 2.0, "goodput": None}
BASELINE = {"mfu": 0.40, "hfu": 0.40, "step_time": 1.0, "goodput": 0.5}


@pytest.mark.parametrize(
    ("text", "is_met"),
    [
        ("mfu < 0.95 * baseline", True),
        ("mfu < 0.74 * baseline", False),
        ("mfu <= 0.3", True),
        ("mfu > 0.3", False),
        ("mfu >= baseline.mfu - 0.11", True),
        ("step_time / baseline > 1.5", True),
        ("1.5 * baseline.step_time < step_time", True),
        ("-mfu == -0.3", True),
        ("+mfu != 0.3", False),
        ("(mfu + hfu) / 2 < baseline.hfu", True),
    ],
)
def test_a_condition_is_judged(text: str, is_met: bool) -> None:
    condition = parse_condition(text, tuple(RUN))
    assert condition.holds(*condition.sides(RUN, BASELINE)) is is_met


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mfu",
        "mfu <",
        "mfu < 1 < 2",
        "mfu ** 2 < 1",
        "mfu < True",
        "mfu < '1'",
        "mfu < 1j",
        "mfu in baseline",
        "mfu < 1 and hfu < 1",
        "not mfu < 1",
        "__import__('os').system('true') < 1",
        "mfu.real < 1",
        "baseline.mfu.real < 1",
        "baseline['mfu'] < 1",
        "(lambda: 1)() < 1",
        "[mfu][0] < 1",
        "(mfu := 1) < 2",
        "mfu < 1 # " + "x" * 400,
        "(" * 250 + "mfu" + ")" * 20 + " < 1",
        "mfu < 1\x00",
        "mfu + hfu < baseline",
        "1 < baseline",
        "mfo < 1",
        "baseline.mfo < mfu",
    ],
)
def test_what_is_not_of_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_condition(text, tuple(RUN))


def test_a_misspelt_figure_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean 'step_time'"):
        parse_condition("step_tim < 1", tuple(RUN))


@pytest.mark.parametrize("text", ["goodput < 1", "mfu / (step_time - 2) < 1"])
def test_a_condition_on_what_is_unknown_is_neither_met_nor_not(text: str) -> None:
    with pytest.raises(UnknownFigureError):
        parse_condition(text, tuple(RUN)).sides(RUN, BASELINE)


@pytest.mark.parametrize(
    ("text", "value", "interval", "verdict"),
    [
        ("mfu < 0.95 * baseline", 0.36, (-0.12, -0.08), "fails"),  # 0.352 to 0.368, all below 0.38
        ("mfu < 0.95 * baseline", 0.37, (-0.16, 0.01), "within noise"),  # up to 0.404
        ("mfu < 0.95 * baseline", 0.39, (-0.06, 0.01), "passes"),  # down to 0.376, and measured above it
        ("0.95 * baseline.mfu > mfu", 0.37, (-0.16, 0.01), "within noise"),
        ("mfu < 0.38", 0.37, (-0.16, 0.01), "fails"),  # nothing is compared with the baseline
        ("mfu < 0.95 * baseline", 0.37, (None, None), "fails"),  # few steps: the value decides
        ("data_wait_share > baseline + 0.02", 0.13, (0.021, 0.04), "fails"),  # points: 0.121 to 0.14, above 0.12
        ("data_wait_share > baseline + 0.02", 0.13, (0.019, 0.04), "within noise"),
    ],
)
def test_a_run_fails_only_where_noise_cannot_have_made_it(
    text: str, value: float, interval: tuple[float | None, float | None], verdict: str
) -> None:
    name = "mfu" if "mfu" in text else "data_wait_share"
    before = {"mfu": 0.4, "data_wait_share": 0.1}[name]
    quantity = next(quantity for quantity in QUANTITIES if quantity.name == name)
    low, high = interval
    change = Change(value=0.0, low=low, high=high, is_beyond_noise=None, is_better=None)
    row = Row(quantity=quantity, values=(before, value), changes=(None, change))
    empty = dict.fromkeys(("paths", "symptoms", "predictions", "notes"), ())
    comparison = Comparison(names=("old", "new"), rows=(row,), parts={}, settings={}, **empty)
    assert parse_condition(text, NAMES).judge(comparison, 1).verdict == verdict


# The command


@pytest.fixture(scope="module")
def folders(three: list[Run]) -> list[str]:
    return [str(run.path.parent) for run in three]


def test_the_table_names_runs_figures_and_verdict(folders: list[str]) -> None:
    answer = flopmeter(*folders)
    assert answer.returncode == 0, answer.stderr
    assert "after is better than before, beyond noise" in answer.stdout
    assert "again is no different from before beyond noise" in answer.stdout
    for text in ("MFU", "Data wait", "Settings that differ", "2.14.0"):
        assert text in answer.stdout


def test_json_has_the_figures_and_no_nan(folders: list[str]) -> None:
    answer = flopmeter(*folders, "--json")
    result = json.loads(answer.stdout, parse_constant=lambda text: pytest.fail(text))
    assert result["names"] == ["before", "after", "again"]
    row = next(row for row in result["rows"] if row["quantity"]["name"] == "mfu")
    assert row["changes"][1]["is_beyond_noise"] is True
    assert result["confidence"] == CONFIDENCE


@pytest.mark.parametrize(
    ("conditions", "exit_code", "line"),
    [
        (["mfu < 0.95 * baseline"], 0, ""),
        (["mfu > 1.1 * baseline"], 1, "after fails: mfu > 1.1 * baseline ("),
        (["mfu < 0.1", "step_time < 0.09"], 1, "after fails: step_time < 0.09 ("),
        (["samples_per_second < 1"], 1, "cannot be checked for after: samples_per_second of the run is unknown"),
        (["mfu << 3"], 2, "--fail-if: 'mfu << 3' needs one comparison"),
        (["mfv < 3"], 2, "did you mean 'mfu'?"),
    ],
)
def test_fail_if_sets_the_exit_code_with_one_line(
    folders: list[str], conditions: list[str], exit_code: int, line: str
) -> None:
    options = [option for text in conditions for option in ("--fail-if", text)]
    answer = flopmeter(*folders[:2], *options, "--json")
    assert answer.returncode == exit_code
    assert line in answer.stderr
    assert answer.stderr.count("\n") == (exit_code > 0)


def test_what_noise_may_have_made_is_said_and_fails_nobody(folders: list[str]) -> None:
    # `again` has the noise of another draw about the same mean: one of the two is true of the measured values.
    told = [flopmeter(folders[0], folders[2], "--fail-if", f"mfu {sign} baseline", "--json") for sign in "<>"]
    assert [answer.returncode for answer in told] == [0, 0]
    verdicts = {json.loads(answer.stdout)["conditions"][0]["verdict"] for answer in told}
    assert verdicts == {"within noise", "passes"}
    assert sum("within noise: not failed" in answer.stderr for answer in told) == 1


def test_markdown_is_a_table_that_a_pull_request_can_show(folders: list[str]) -> None:
    answer = flopmeter(*folders[:2], "--format", "md", "--fail-if", "mfu > 1.1 * baseline")
    assert answer.returncode == 1  # and yet the comment can be written
    headline, *rest = answer.stdout.splitlines()
    assert headline.startswith("**after is better than before, beyond noise")
    rows = [line for line in rest if line.startswith("|")]
    tables = {row.replace("\\|", "").count("|") for row in rows}
    assert tables == {5}  # four columns in both
    assert any(row.startswith(r"| mfu \> 1.1 \* baseline | after | ") and "fails" in row for row in rows)
    assert any(row.startswith("| MFU | ") and row.endswith(" better |") for row in rows)


def test_every_figure_can_be_named_in_a_condition(three: list[Run]) -> None:
    assert set(NAMES) == set(figures_of(three[0], ratios_of(three[0])))
    for name in NAMES:
        parse_condition(f"{name} < baseline", NAMES)


@pytest.mark.parametrize("make", [lambda f: [f[0]], lambda f: [f[0], "no-such-run"], lambda f: [f[0], os.devnull]])
def test_wrong_runs_are_one_line(folders: list[str], make: Callable[[list[str]], list[str]]) -> None:
    answer = flopmeter(*make(folders))
    assert answer.returncode in (1, 2)
    assert answer.stderr.startswith("flopmeter: error: ")
    assert answer.stderr.count("\n") == 1


def test_the_page_is_written_whole_and_a_place_that_cannot_be_written_is_one_line(
    folders: list[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert flopmeter(*folders, "-o", str(page)).returncode == 0
    text = page.read_text()
    assert "after is better than before" in text
    assert "http://" not in text.partition("<script>")[0]
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    answer = flopmeter(*folders, "-o", str(tmp_path / "missing" / "page.html"))
    assert answer.returncode == 1
    assert "cannot write" in answer.stderr


def test_comparing_needs_no_torch(folders: list[str]) -> None:
    code = (
        "import sys; sys.argv = ['flopmeter', 'compare', *sys.argv[1:]]\n"
        "from flopmeter.cli import _run\n"
        "assert _run() == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *folders]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
