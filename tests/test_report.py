from __future__ import annotations

import base64
import hashlib
import inspect
import io
import json
import math
import re
import subprocess
import sys
from array import array
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import report_runs as runs
from flopmeter.errors import ConfigError
from flopmeter.record import Run, load_run
from flopmeter.report import _thin, available_formats, leave_report, render, render_facts, write_report
from flopmeter.report._charts import CHARTS, figures_of
from flopmeter.report._facts import facts_of
from flopmeter.report._page import page, safe_json
from flopmeter.report._sentences import SECTIONS, run_line
from flopmeter.report._series import MAX_POINTS, series_of
from flopmeter.report._terminal import show, spark_line
from flopmeter.text import amount, clean, number, percent, points, seconds
from flopmeter.traces import load_any
from made_traces import MadeTrace

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(runs.write_run(tmp_path_factory.mktemp("runs") / "mine", runs.ordinary_lines()))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(runs.write_run(tmp_path_factory.mktemp("runs") / "hostile", runs.hostile_lines()))


def run_of(folder: Path, *lines: dict[str, Any]) -> Run:
    return load_run(runs.write_run(folder, lines))


def test_a_number_that_is_none_is_unknown_and_never_zero() -> None:
    assert number("7") is number(True) is number(math.nan) is number(math.inf) is number(10**400) is None
    assert percent(None) == seconds(None) == amount(None, "FLOP") == points(None) == "unknown"


def test_figures_are_written_in_the_unit_that_suits_them() -> None:
    assert [seconds(value) for value in (0, 2e-5, 0.0123, 3.21, 600, 9000)] == [
        "0 s",
        "20 µs",
        "12.3 ms",
        "3.21 s",
        "10 min",
        "2 h 30 min",
    ]
    assert amount(20.5e9, "FLOP") == "20.5 GFLOP"
    assert percent(0.12345) == "12.3 %"
    assert percent(-0.0001) == "0.0 %"


def test_a_text_is_one_line_of_bounded_length_without_control_characters() -> None:
    assert clean("a\x1b[31m\n b\u202e\ud800") == "a [31m b"
    assert len(clean("x" * 10_000_000)) == 200


@settings(max_examples=60)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=400), st.integers(2, 50))
def test_thinning_keeps_the_smallest_and_the_largest_value(values: list[float], max_points: int) -> None:
    kept = _thin.extremes(array("d", values), max_points)
    finite = [value for value in values if math.isfinite(value)]
    assert len(kept) <= max(max_points, 1)
    assert kept == sorted(set(kept))
    if finite and max_points <= len(values):
        shown = [values[place] for place in kept if math.isfinite(values[place])]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_a_stretch_without_values_breaks_the_line() -> None:
    values = array("d", [1.0] * 50 + [math.nan] * 50)
    kept = _thin.extremes(values, 20)
    assert any(math.isnan(values[place]) for place in kept)


def test_a_million_steps_make_a_line_of_a_few_thousand_points_with_every_outlier() -> None:
    step_s = array("d", [0.1]) * 1_000_000
    step_s[123_456], step_s[654_321] = 9.0, 0.001
    run = Run(path=Path("run.jsonl"), step=array("q", range(1_000_000)), columns={"perf/step_time": step_s})
    run.time = array("d", range(1_000_000))
    line = series_of_checked(run)["step_s"]
    assert len(line["value"]) <= MAX_POINTS
    assert (123_456, 9.0) in zip(line["step"], line["value"], strict=True)
    assert (654_321, 0.001) in zip(line["step"], line["value"], strict=True)
    assert len(json.dumps(CHARTS["timeline"].figure({"series": series_of(run)}))) < 500_000


def series_of_checked(run: Run) -> dict[str, Any]:
    from flopmeter.record import Header

    run.headers = [Header()]
    return series_of(run)


def test_the_headline_is_that_of_the_steady_steps(ordinary: Run) -> None:
    headline = facts_of(ordinary)["headline"]
    assert headline["mfu"] == pytest.approx(runs.MFU)
    assert headline["hfu"] == pytest.approx(1.1 * runs.MFU)
    assert headline["tokens_per_second"] == pytest.approx(1000 / runs.STEP_S)
    assert headline["step_median_s"] == runs.STEP_S
    assert headline["num_steady"] == 20 - 3


def test_the_waterfall_is_the_runs_own(ordinary: Run) -> None:
    fall, told = ordinary.waterfall(), facts_of(ordinary)["waterfall"]
    assert [(part["name"], part["seconds"], part["share"]) for part in told["parts"]] == [
        (part.name, part.seconds, part.share) for part in fall.parts
    ]
    assert told["mfu"] == fall.mfu


def test_warm_up_pauses_and_measured_steps_are_marked(ordinary: Run) -> None:
    marks = facts_of(ordinary)["series"]["marks"]
    assert marks["warmup"] == [[1, 2]]
    assert marks["measured"] == [3]
    assert marks["pauses"] == [{"step": 10, "name": "checkpoint", "duration_s": 2.0}]


def test_the_phases_of_a_steady_step_are_its_shares_of_the_step_time(ordinary: Run) -> None:
    # 0.1, 0, 0.3, 0.5, 0.08 and 0.02 of half a second.
    steady_s = facts_of(ordinary)["phases"]["steady_s"]
    expected = {"data_wait": 0.05, "host_to_device": 0, "forward": 0.15, "backward": 0.25, "optimizer": 0.04}
    assert steady_s == pytest.approx({**expected, "other": 0.01})


def test_the_modules_of_a_tree_add_up_to_their_parents(ordinary: Run) -> None:
    nodes = {node["id"]: node for node in facts_of(ordinary)["work"]["by_module"]}
    assert nodes["model"]["flop"] == runs.MODEL_FLOP
    assert nodes["model/layers/0"]["flop"] == 0.75 * runs.MODEL_FLOP
    assert nodes["model/layers/0"]["parent"] == "model/layers"
    for name in nodes:
        children = [node["flop"] for node in nodes.values() if node["parent"] == name]
        assert not children or sum(children) == pytest.approx(nodes[name]["flop"])


def test_a_treemap_hides_what_is_too_small_to_read(ordinary: Run) -> None:
    assert figures_of(facts_of(ordinary))["modules"]["layout"]["uniformtext"] == {"minsize": 10, "mode": "hide"}


def test_modules_too_small_to_see_are_merged(tmp_path: Path) -> None:
    many = {f"layers.{place}": 1.0 for place in range(10_000)} | {"head": 90_000.0, "layers.big": 10_000.0}
    run = run_of(tmp_path, runs.header(), runs.step(1), runs.count(1, by_module=many, model_flop=110_000.0))
    nodes = {node["id"]: node["flop"] for node in facts_of(run)["work"]["by_module"]}
    assert nodes == {
        "model": 110_000,
        "model/head": 90_000,
        "model/layers": 20_000,
        "model/layers/big": 10_000,
        "model/layers/·rest": 10_000,
    }


def test_a_restart_breaks_the_line_where_it_goes_back(tmp_path: Path) -> None:
    second = runs.header(started_at=1003.0)
    run = run_of(tmp_path, runs.header(), runs.step(1), runs.step(2), runs.step(3), second, runs.step(2), runs.step(3))
    assert facts_of(run)["series"]["mfu"]["step"] == [1, 2, 3, None, 2, 3]


def test_a_run_without_a_step_has_a_report_all_the_same(tmp_path: Path) -> None:
    run = run_of(tmp_path, runs.header())
    for name in available_formats():
        assert "unknown" in render(run, name) or name == "json"


def test_an_unknown_peak_leaves_mfu_unknown_and_the_time_split_told(tmp_path: Path) -> None:
    keys = ("perf/step_time", "perf/data_wait_share", "perf/forward_share", "perf/backward_share")
    lines = [runs.step(place) for place in range(1, 9)]
    for line in lines:
        line["metrics"] = {key: line["metrics"][key] for key in keys}
    facts = facts_of(run_of(tmp_path, runs.header(), *lines))
    assert facts["headline"]["mfu"] is None
    assert facts["waterfall"]["mfu"] is None
    figure = figures_of(facts)["waterfall"]
    assert "Observed MFU" not in figure["layout"]["yaxis"]["ticktext"]


@pytest.mark.parametrize("name", ["md", "txt", "html"])
def test_hardware_counters_stand_beside_hfu(tmp_path: Path, name: str) -> None:
    readings = [runs.event("counters", reader="dcgmi", tensor_active=share, dram_active=None) for share in (0.3, 0.5)]
    run = run_of(tmp_path, runs.header(), *(runs.step(place) for place in range(1, 9)), *readings)
    page = render(run, name).replace("&nbsp;", " ")
    assert "dcgmi: tensor pipes busy 40.0 %; HFU by counting" in page  # the mean of 30 and 50 %
    assert "memory busy" not in page


def test_a_cpus_counters_give_the_rate_between_the_first_and_the_last_reading(tmp_path: Path) -> None:
    readings = [{**runs.event("counters", reader="perf_event", flop=flop), "time": time_s}
                for time_s, flop in ((100.0, 1e9), (110.0, 4e9), (120.0, 9e9))]  # fmt: skip
    counters = facts_of(run_of(tmp_path, runs.header(), runs.step(1), *readings))["counters"]
    assert counters["flop_per_s"] == pytest.approx(4e8)  # 8e9 in 20 s


def test_the_bars_of_the_waterfall_lead_from_100_to_the_observed_mfu(ordinary: Run) -> None:
    facts = facts_of(ordinary)
    figure = figures_of(facts)["waterfall"]
    bars = figure["data"][0]
    assert (bars["base"][0], bars["x"][0]) == (0, 100)
    level = 100.0
    for base, length in zip(bars["base"][1:-1], bars["x"][1:-1], strict=True):
        assert base + length == pytest.approx(level)
        level = base
    assert level == pytest.approx(bars["x"][-1])
    assert bars["x"][-1] == pytest.approx(100 * facts["waterfall"]["mfu"])


LAYERS, HIDDEN, LENGTH, BATCH, VOCAB = 2, 64, 128, 4, 1000
WEIGHTS = LAYERS * 12 * HIDDEN**2 + VOCAB * HIDDEN  # attention 4 h^2, an MLP of 8 h^2, the head
PARAMETERS = WEIGHTS + VOCAB * HIDDEN + 640  # the embedding and norms
TOKENS = BATCH * LENGTH
TOKEN_FLOP = 6 * WEIGHTS * TOKENS
PAIR_FLOP = 12 * LAYERS * HIDDEN * BATCH * LENGTH * (LENGTH + 1) / 2


def decoder_lines(**changes: Any) -> list[dict[str, Any]]:
    model_flop = TOKEN_FLOP + PAIR_FLOP
    flop = {"model_flop": model_flop, "forward_flop": model_flop / 3, "backward_flop": model_flop * 2 / 3}
    growth = {"exact": {"float32": {"tokens": TOKEN_FLOP, "pairs_causal": PAIR_FLOP}}}
    metrics = {
        "perf/model_flop": model_flop,
        "perf/tokens_per_second": TOKENS / runs.STEP_S,
        "perf/tokens_processed_per_second": TOKENS / runs.STEP_S,
        "perf/samples_per_second": BATCH / runs.STEP_S,
    }
    fields = {**flop, "growth": growth, **changes.pop("count", {})}
    lines = [runs.step(place, marks=["observed"] if place == 1 else [], **metrics | changes) for place in (1, 2, 3)]
    return [runs.header(num_parameters=PARAMETERS), runs.peak(), *lines, runs.count(1, **fields)]


def test_the_run_is_told_under_the_conventions_of_others(tmp_path: Path) -> None:
    rows = facts_of(run_of(tmp_path, *decoder_lines()))["method"]["elsewhere"]["rows"]
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
    assert {row["name"]: row["mfu"] for row in rows} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"count": {"backward_flop": 1e12, "forward_flop": 1e12}}, "frozen"),
        ({"perf/tokens_processed_per_second": 2 * TOKENS / runs.STEP_S}, "padded"),
        ({"perf/samples_per_second": (BATCH + 1) / runs.STEP_S}, "length"),
        ({"count": {"convention": "full"}}, "full"),
        ({"count": {"growth": {"exact": {"float32": {"tokens": TOKEN_FLOP, "patches": 1e9}}}}}, "patch"),
        ({"perf/model_flop": 1.0}, "not in the record"),
    ],
)
def test_a_run_that_the_rules_do_not_describe_gets_no_such_figure(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    told = facts_of(run_of(tmp_path, *decoder_lines(**changes)))["method"]["elsewhere"]
    assert reason in told["reason"]
    assert {row["mfu"] for row in told["rows"]} == {None}


def test_the_heat_map_keeps_the_slow_rank_of_a_thousand(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [runs.header(world_size=1024)]
    for place in range(1, 501):
        own_s = [0.4] * 1024
        own_s[700] = 0.9 if place == 250 else 0.4
        stats = {"own_s": {"min": 0.4, "mean": 0.4, "max": max(own_s), "argmax": 700}}
        lines += [runs.step(place), runs.event("ranks", place, world_size=1024, own_s_by_rank=own_s, stats=stats)]
    straggler = {"rank": 700, "host": "node-88", "phase": "forward", "extra_s": 0.5, "since_step": 250}
    facts = facts_of(run_of(tmp_path, *lines, runs.event("straggler", 250, cause="slow_peer", **straggler)))
    columns = facts["ranks"]["own_s"]
    assert len(columns) * len(columns[0]) <= 150_000
    assert {len(column) for column in columns} == {1024}
    assert sum(column[700] == 0.9 for column in columns) == 1
    figure = figures_of(facts)["ranks"]
    assert figure["data"][1]["y"] == [700]
    assert len(render_facts(facts, "html")) < 8e6


def test_every_chart_has_a_section_a_table_and_words_for_its_figure(ordinary: Run) -> None:
    facts = facts_of(ordinary)
    for name, chart in CHARTS.items():
        assert chart.SECTION in SECTIONS, name
        assert chart.__doc__
        assert {len(row) for row in chart.table(facts)["rows"]} <= {len(chart.table(facts)["columns"])}
        assert not hasattr(chart, "figure") or len(chart.describe(facts)) > 10


def test_every_format_renders_facts_into_text(ordinary: Run) -> None:
    assert available_formats() == ["html", "json", "md", "txt"]
    for name in available_formats():
        plugin = import_module(f"flopmeter.report.{name}")
        assert list(inspect.signature(plugin.render).parameters) == ["facts"]
        assert plugin.__doc__
        assert len(render(ordinary, name)) > 200


@pytest.mark.parametrize("name", ["html", "md", "txt"])
def test_every_format_tells_the_same_figures(ordinary: Run, name: str) -> None:
    text = render(ordinary, name).replace("&nbsp;", " ").replace("\\", "")
    assert "40.0 %" in text  # MFU
    assert "44.0 %" in text  # HFU
    assert "2,000" in text  # tokens per second
    assert "100 TFLOP/s fp32" in text


def test_json_is_the_facts_as_they_are(ordinary: Run) -> None:
    assert json.loads(render(ordinary, "json")) == json.loads(json.dumps(facts_of(ordinary), allow_nan=False))


def test_markdown_cannot_be_broken_out_of(hostile: Run) -> None:
    text = render(hostile, "md")
    assert "<script" not in text.replace("\\<", "")
    assert re.search(r"(?<!\\)<", text) is None
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("| Part")}
    assert widths == {6}


def test_plain_text_has_no_control_characters(hostile: Run) -> None:
    assert all(character.isprintable() or character == "\n" for character in render(hostile, "txt"))


def test_an_unknown_format_is_refused_with_the_known_ones(ordinary: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no report format 'pdf'; there are: html, json, md, txt"):
        write_report(ordinary, tmp_path / "report.pdf")


def test_a_page_holds_only_our_two_scripts_and_its_policy_names_them(ordinary: Run) -> None:
    text = render(ordinary, "html")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    allowed = re.findall(r"sha256-([^&']*)", policy[1].replace("&#39;", "'"))
    assert len(scripts) == 2
    assert digests == allowed
    assert "default-src" in policy[1]
    assert "unsafe-eval" not in policy[1]


def test_a_page_refers_to_nothing_outside_itself(ordinary: Run) -> None:
    text = re.sub(r"<script.*?</script>", "", render(ordinary, "html"), flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="([^"#][^"]*)"', text) == ["data:,"]
    assert "url(" not in text
    assert "@import" not in text


def test_names_of_the_run_are_escaped_and_cut(hostile: Run) -> None:
    text = render(hostile, "html")
    body = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "<script>window" not in text
    assert "<img" not in body
    assert "&lt;script&gt;" in body
    assert len(text) < 8e6
    assert "x" * 1000 not in body


def test_embedded_json_cannot_end_its_element() -> None:
    assert json.loads(safe_json({"a": "</script><!--&"})) == {"a": "</script><!--&"}
    assert "<" not in safe_json("</script>")
    with pytest.raises(ValueError, match="Out of range"):
        safe_json(math.nan)


def test_hostile_numbers_are_unknown_in_every_format(hostile: Run) -> None:
    facts = facts_of(hostile)
    json.dumps([facts, figures_of(facts)], allow_nan=False)
    assert facts["datasets"][0]["loss"] is None
    for name in available_formats():
        assert not re.search(r"\b(nan|inf)\b", render_facts(facts, name).split("<script>")[0], re.IGNORECASE)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_FIELDS = [
    "by_module",
    "by_op",
    "by_dtype",
    "growth",
    "model_flop",
    "forward_flop",
    "left_out",
    "uncounted",
    "name",
    "duration_s",
    "own_s_by_rank",
    "stats",
    "world_size",
    "missing",
    "rank",
    "host",
    "since_step",
    "from_mfu",
    "to_mfu",
    "message",
    "dtype",
    "flop_per_s",
    "after_step",
]


@settings(max_examples=30)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"event": st.sampled_from(["count", "ranks", "straggler", "pause", "regime", "peak", "warning"])},
            optional=dict.fromkeys(_FIELDS, _ANYTHING),
        ),
        max_size=6,
    )
)
def test_no_event_can_break_the_facts(ordinary: Run, events: list[dict[str, Any]]) -> None:
    from flopmeter.report._elsewhere import elsewhere
    from flopmeter.report._facts import _peaks, _warnings
    from flopmeter.report._ranks import ranks_of
    from flopmeter.report._work import work_of

    run = Run(path=ordinary.path, headers=ordinary.headers, step=ordinary.step, time=ordinary.time)
    run.columns, run.marks, run.events = ordinary.columns, ordinary.marks, events
    parts = [series_of(run), work_of(run), ranks_of(run), elsewhere(run, 0.4), _peaks(run), _warnings(run)]
    json.dumps(parts, allow_nan=False)


def test_a_report_appears_whole_or_not_at_all(ordinary: Run, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    assert write_report(ordinary, tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(OSError, match="No such file"):
        write_report(ordinary, tmp_path / "missing" / "report.html")


def test_the_ending_of_the_file_decides_the_format(ordinary: Run, tmp_path: Path) -> None:
    assert json.loads(write_report(ordinary, tmp_path / "facts.json").read_text(encoding="utf-8"))["version"] == 1
    assert write_report(ordinary, tmp_path / "notes.md").read_text(encoding="utf-8").startswith("# mine")


def test_a_run_of_very_many_steps_does_not_make_its_end_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = load_run(runs.write_run(tmp_path, runs.ordinary_lines()))
    monkeypatch.setattr("flopmeter.report.MAX_STEPS_AT_END", 19)
    with caplog.at_level("INFO", "flopmeter"):
        assert leave_report(run) is None
    assert "flopmeter report" in caplog.text
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_written_at_the_end_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = load_run(runs.write_run(tmp_path, runs.ordinary_lines()))
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    assert leave_report(run) is None
    assert caplog.text.count("no report") == 1


def test_without_plotly_the_page_names_the_cure_and_the_end_of_a_run_is_silent(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path, runs.ordinary_lines())
    code = (
        "import sys; sys.modules['plotly'] = None; sys.modules['plotly.offline'] = None\n"
        "from flopmeter.record import load_run\n"
        "from flopmeter.report import leave_report, write_report\n"
        f"run = load_run({str(folder)!r})\n"
        "print(leave_report(run))\n"
        "write_report(run, run.path.parent)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.stdout == "None\n"
    assert answer.stderr.strip().splitlines()[-1] == (
        "flopmeter.errors.MissingLibraryError: the HTML report needs plotly, which is not installed: "
        "run pip install plotly"
    )


def test_reading_and_reporting_never_import_torch(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path, runs.ordinary_lines())
    code = (
        "import sys; from flopmeter.record import load_run; from flopmeter.report import write_report\n"
        f"write_report(load_run({str(folder)!r}), {str(folder)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_training_run_leaves_its_report_beside_the_run_file(tmp_path: Path, is_wanted: bool) -> None:
    from flopmeter import TrainingMonitor

    model = nn.Linear(8, 8)
    settings = {"monitoring": {"sinks": [], "report": is_wanted}}
    with TrainingMonitor(tmp_path, settings, model=model) as monitor:
        for place in range(3):
            loss = model(torch.ones(2, 8)).sum()
            loss.backward()
            monitor.log_step(place, loss=loss)
    assert (tmp_path / "report.html").exists() is is_wanted


def test_the_sparkline_rises_with_mfu() -> None:
    line = {"typical": [0.0, 0.25, 0.5, 0.75, 1.0]}
    assert spark_line(line) == "▁▃▅▇█"
    assert spark_line(None) == ""


def test_a_terminal_shows_verdict_figures_bars_and_no_markup_of_the_run(hostile: Run) -> None:
    facts = facts_of(hostile)
    facts["run"]["name"] = "[bold red]name[/]"
    stream = io.StringIO()
    show(facts, Console(file=stream, width=100, force_terminal=True, markup=False, highlight=False))
    assert "[bold red]name[/]" in stream.getvalue()
    assert "From 100 % of peak" in stream.getvalue()


def test_that_no_cause_is_known_is_no_numbered_help(tmp_path: Path) -> None:
    quick = {"perf/data_wait_share": 0.0, "perf/mfu": 0.1, "perf/hfu": 0.1}
    facts = facts_of(run_of(tmp_path, runs.header(), *(runs.step(number, **quick) for number in range(1, 6))))
    assert [(finding["rule"], finding["is_cause"]) for finding in facts["findings"]] == [("undetermined", False)]
    text, markdown, html = (render_facts(facts, name) for name in ("txt", "md", "html"))
    assert "\n  where the time went is undetermined: " in text
    assert "\nWhere the time went is undetermined: " in markdown
    assert "1. " not in text + markdown
    assert '<ul class="findings">' in html
    assert '<ol class="findings">' not in html
    assert "Most useful first" not in html


def flopmeter(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flopmeter", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize(("num_steps", "words"), [(1, " · 1 step in "), (2000, " · 2,000 steps in ")])
def test_the_line_about_the_run_counts_its_steps(ordinary: Run, num_steps: int, words: str) -> None:
    assert words in run_line({**facts_of(ordinary)["run"], "num_steps": num_steps})


def test_the_command_writes_the_page_beside_the_run(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path, runs.ordinary_lines())
    answer = flopmeter(folder)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f"Report: {folder / 'report.html'}\n"
    assert (folder / "report.html").stat().st_size > 1e6


def test_the_report_of_a_trace_is_left_here_under_its_name(tmp_path: Path) -> None:
    """A trace may lie among other people's data, beside others whose reports would replace each other."""
    data, here = tmp_path / "data", tmp_path / "here"
    data.mkdir()
    here.mkdir()
    made = MadeTrace()
    made.step(0, 0, 100)
    made.kernel("ampere_sgemm_32x32", 30, 60, launch=10)
    trace = made.write(data, "rank.0.json.gz")
    command = [sys.executable, "-m", "flopmeter", "report", str(trace)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert answer.stdout == "Report: rank.0-report.html\n", answer.stderr
    assert (here / "rank.0-report.html").stat().st_size > 1e6
    assert list(data.iterdir()) == [trace]


def test_the_command_prints_other_formats(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path, runs.ordinary_lines())
    assert json.loads(flopmeter(folder, "--format", "json").stdout)["headline"]["mfu"] == pytest.approx(runs.MFU)
    assert flopmeter(folder / "run.jsonl", "--format", "txt").stdout.splitlines()[0] == folder.name
    assert flopmeter(folder, "--json").stdout == flopmeter(folder, "--format", "json").stdout
    assert not (folder / "report.html").exists()


def test_a_run_without_a_step_says_so_and_gives_no_median(tmp_path: Path) -> None:
    facts = facts_of(run_of(tmp_path, runs.header()))
    text, markdown, html = (render_facts(facts, name) for name in ("txt", "md", "html"))
    assert "  step time   no steps\n" in text
    assert "| no steps |" in markdown
    assert "<small>no steps</small>" in html
    assert "95 % below" not in text + markdown + html.partition("<script")[0].replace("&nbsp;", " ")


def test_markdown_says_which_mfu_stands_in_its_table(ordinary: Run) -> None:
    assert "| MFU in steady steps | HFU |" in render(ordinary, "md")


def test_a_small_mfu_keeps_two_digits_in_every_format(tmp_path: Path) -> None:
    small = {"perf/mfu": 0.0024, "perf/hfu": 0.0024}
    facts = facts_of(run_of(tmp_path, runs.header(), *(runs.step(number, **small) for number in range(1, 20))))
    for name in ("txt", "md", "html"):
        assert "0.24 %" in render_facts(facts, name).replace("&nbsp;", " ")
    assert "is 0.24 %, very low" in facts["headline"]["verdict"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["{here}/nothing"], 1, "cannot read"),
        (["{here}", "--format", "pdf"], 2, "there is no report format 'pdf'"),
        (["{here}", "--json", "--format", "md"], 2, "--json and --format md contradict each other"),
        (["{here}", "-o", "{here}/none/report.html"], 1, "cannot write the report"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    tmp_path: Path, arguments: list[str], exit_code: int, message: str
) -> None:
    folder = runs.write_run(tmp_path, runs.ordinary_lines())
    answer = flopmeter(*(text.format(here=folder) for text in arguments))
    assert answer.returncode == exit_code
    assert answer.stderr.startswith("flopmeter: error: ")
    assert message in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_a_page_of_any_body_has_its_title_escaped() -> None:
    text = page("<b>title</b>", "<button id='theme'></button>", {})
    assert "<title>&lt;b&gt;title&lt;/b&gt;</title>" in text


def test_a_count_that_does_not_tell_modules_apart_has_a_report_all_the_same(tmp_path: Path) -> None:
    steps = (runs.step(number) for number in range(1, 9))
    lines = [runs.header(), runs.peak(), runs.count(2, by_module={}), *steps]
    facts = facts_of(load_run(runs.write_run(tmp_path, lines)))
    assert facts["work"]["by_module"] == []
    assert "<html" in render_facts(facts, "html")


def test_bars_of_phases_are_as_wide_as_their_steps_and_repeated_steps_do_not_add_up() -> None:
    # Steps 10 and 20 each by itself, 30 to 40 in one bar, then a restart that repeats 20: bars 10, 10, 20, 10 wide.
    phases = {
        "step": [[10, 10], [20, 20], [30, 40], [20, 20]],
        "seconds": {"forward": [0.1, 0.2, 0.3, 0.4], "backward": [0.5, None, 0.5, 0.5], "other": [0.1] * 4},
    }
    figure = CHARTS["phases"].figure({"phases": phases})
    assert figure is not None
    assert figure["layout"]["barmode"] == "overlay"
    forward, backward, other = figure["data"]
    assert forward["x"] == [10, 20, 35, 20]
    gaps = [width / wide for width, wide in zip(forward["width"], (10, 10, 20, 10), strict=True)]
    assert gaps == pytest.approx([gaps[0]] * 4)
    assert 0.8 < gaps[0] <= 1
    assert forward["base"] == [0, 0, 0, 0]
    assert backward["base"] == pytest.approx([100, 200, 300, 400])
    assert other["base"] == pytest.approx([600, 200, 800, 900])


def test_a_phase_that_nobody_chose_a_colour_for_is_drawn_all_the_same() -> None:
    phases = {"step": [[1, 2]], "seconds": {"decode_image": [0.25]}, "steady_s": {"decode_image": 0.25}}
    (bar,) = CHARTS["phases"].figure({"phases": phases})["data"]
    assert (bar["name"], bar["y"], bar["marker"]["color"]) == ("Decode image", [250.0], "@grey")
    assert CHARTS["phases"].table({"phases": phases})["rows"] == [["Decode image", "250 ms", "100.0 %"]]


def test_a_run_without_a_step_is_not_said_to_have_no_cause_of_lost_time(tmp_path: Path) -> None:
    page = render(load_run(runs.write_run(tmp_path, [runs.header(), runs.peak()])))
    assert "Nothing could be judged." in page
    assert "No known cause of lost time was found" not in page
    assert "unknown of the wall time" not in page


def test_the_report_of_a_trace_calls_it_a_trace(tmp_path: Path) -> None:
    made = MadeTrace()
    made.step(0, 0, 100)
    made.kernel("ampere_sgemm_32x32", 30, 60, launch=10)
    page = render(load_any(made.write(tmp_path, "trace.json")))
    assert "not finished" not in page
    assert "from the shapes in the trace" in page
    assert "the run file" not in page
