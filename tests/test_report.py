"""What do the formats say of a report, and what can a hostile record do to them?"""

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
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from torch import nn

import report_runs as runs
from flopmeter.diagnosis import diagnose
from flopmeter.errors import ConfigError
from flopmeter.record import Run, load_run
from flopmeter.report import available_formats, leave_report, render, report_of, write_report
from flopmeter.report._model import Line, Report
from flopmeter.report._model import _larger as larger_part
from flopmeter.report._page import data_of, document, safe_json
from flopmeter.report._terminal import show, spark_line
from flopmeter.report._texts import run_line, tables
from flopmeter.text import amount, clean, number, percent, points, seconds
from flopmeter.traces import load_any
from flopmeter.waterfall import LABELS, Part, Waterfall
from made_traces import MadeTrace

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(runs.write_run(tmp_path_factory.mktemp("runs") / "mine", runs.ordinary_lines()))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(runs.write_run(tmp_path_factory.mktemp("runs") / "hostile", runs.hostile_lines()))


def report_on(folder: Path, *lines: dict[str, Any]) -> Report:
    return report_of(load_run(runs.write_run(folder, lines)))


def shown(report: Report, **settings: Any) -> str:
    """What a terminal shows."""
    stream = io.StringIO()
    show(report, Console(file=stream, width=160, markup=False, highlight=False, **settings))
    return stream.getvalue()


def rendered(report: Report, name: str) -> str:
    """Without the signs that only keep words together, or that Markdown needs."""
    text = shown(report) if name == "terminal" else render(report, name)
    return text.replace("&nbsp;", " ").replace("\\", "").replace("&#39;", "'")


def test_a_number_that_is_none_is_unknown_and_never_zero() -> None:
    assert number("7") is number(True) is number(math.nan) is number(math.inf) is number(10**400) is None
    assert percent(None) == seconds(None) == amount(None, "FLOP") == points(None) == "unknown"


def test_numbers_are_written_in_the_unit_that_suits_them() -> None:
    told = ["0 s", "20 µs", "12.3 ms", "3.21 s", "10 min", "2 h 30 min"]
    assert [seconds(value) for value in (0, 2e-5, 0.0123, 3.21, 600, 9000)] == told
    assert amount(20.5e9, "FLOP") == "20.5 GFLOP"
    assert percent(0.12345) == "12.3 %"
    assert percent(-0.0001) == "0.0 %"


def test_a_text_is_one_line_of_bounded_length_without_control_characters() -> None:
    assert clean("a\x1b[31m\n b\u202e\ud800") == "a [31m b"
    assert len(clean("x" * 10_000_000)) == 200


def test_every_format_renders_a_report_into_text(ordinary: Run) -> None:
    assert available_formats() == ["html", "json", "md"]
    for name in available_formats():
        plugin = import_module(f"flopmeter.report.{name}")
        assert list(inspect.signature(plugin.render).parameters) == ["report"]
        assert plugin.__doc__
        assert len(render(report_of(ordinary), name)) > 200


@pytest.mark.parametrize("name", ["html", "md", "terminal"])
def test_every_format_tells_the_same(ordinary: Run, name: str) -> None:
    text = rendered(report_of(ordinary), name)
    assert "40.0 %" in text  # MFU
    assert "of 100 TFLOP/s fp32" in text
    assert "counted" in text
    assert "44.0 %" in text  # HFU
    assert "2,000" in text  # tokens per second
    assert "Fix this first" in text
    assert "Training stands still for 18.2 % of the time" in text  # 2 of 11 seconds
    assert re.search(r"\+\d+ %", text)  # what the fix is worth
    assert "async_save" in text
    assert "The steps wait for data" in text or "the steps wait for data" in text
    assert "Recomputation" in text


def test_json_is_the_report_as_it_is(ordinary: Run) -> None:
    told = json.loads(render(report_of(ordinary), "json"))
    assert told == json.loads(json.dumps(msgspec.to_builtins(report_of(ordinary)), allow_nan=False))
    assert told["number"]["mfu"] == pytest.approx(runs.MFU)


def with_parts(report: Report, **shares: float) -> Report:
    """The report with other parts of ten seconds."""
    made = {"seconds": 0.0, "how": "made", "uncertainty_s": 0.0}
    parts = tuple(Part(name=name, label=LABELS[name], share=share, **made) for name, share in shares.items())
    fall = Waterfall(wall_s=10.0, mfu=shares.get("ideal"), parts=parts, num_steps=10)
    return msgspec.structs.replace(report, waterfall=fall)


def test_a_part_of_the_time_that_rounds_to_nothing_is_shown_nowhere(ordinary: Run) -> None:
    report = with_parts(report_of(ordinary), ideal=0.5, host_to_device=0.0004, optimizer=0.0006)
    for name in ("html", "md", "terminal"):
        text = rendered(report, name).partition('id="data"')[0]
        assert "Host to device" not in text
        assert "Optimizer" in text


def test_a_much_larger_part_without_a_fix_is_told_beside_the_fix(ordinary: Run) -> None:
    found = diagnose(ordinary)
    assert (found.findings[0].rule, found.findings[0].lost) == ("checkpoint_pause", pytest.approx(2 / 11))

    def larger(**shares: float) -> str | None:
        fall = with_parts(report_of(ordinary), **shares).waterfall
        part = larger_part(msgspec.structs.replace(found, waterfall=fall))
        return part and part.name

    assert larger(ideal=0.5, unexplained=0.4) == "unexplained"  # more than twice as much
    assert larger(ideal=0.5, unexplained=0.3) is None
    assert larger(ideal=0.5, pauses=0.5) is None  # that is the part that the fix is for
    report = msgspec.structs.replace(report_of(ordinary), larger=ordinary.waterfall().parts[-1])
    for name in ("html", "terminal"):
        assert "where no fix is known" in rendered(report, name)


def test_what_was_tried_stands_beside_the_fix_and_in_a_table(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path, runs.ordinary_lines())
    gain = {"low": 0.28, "expected": 0.31, "high": 0.34}
    row = {"names": ["bf16"], "what": "bf16 <autocast>", "gain": gain, "outcome": "faster", "code": "with autocast():"}
    failed = {"names": ["compile"], "what": "compile", "outcome": "failed", "reason": "it crashed"}
    tried = {"program": ["train.py"], "headline": "bf16 brings +31 %", "rows": [row, failed], "is_whole": True}
    (folder / "try.json").write_text(json.dumps(tried))
    report = report_of(load_run(folder))
    assert tables(report)["tried"].rows == (
        ("bf16 <autocast>", "+31 % (+28 to +34 %)", "with autocast():"),
        ("compile", "it crashed", ""),
    )
    for name in ("html", "terminal"):
        assert "brings +31 %" in rendered(report, name)
    for name in ("html", "md"):
        assert "Tried on this program" in rendered(report, name)
        assert "<autocast>" not in render(report, name).replace("\\<", "")
    (folder / "try.json").write_text("[1, 2]")
    assert report_of(load_run(folder)).tried is None


def test_a_run_that_has_only_begun_gets_no_verdict(tmp_path: Path) -> None:
    lines = [runs.header(), runs.peak(), *(runs.step(place) for place in range(1, 6))]
    report = report_on(tmp_path, *lines)
    assert report.is_early
    assert report.fix is None
    for name in ("html", "md", "terminal"):
        assert "Too early to judge: 5 steady steps so far." in rendered(report, name)
    finished = report_on(tmp_path, *lines, {"kind": "summary", "time": 1003.0, "num_steps": 5, "metrics": {}})
    assert not finished.is_early


def test_end_to_end_is_shown_as_the_product_of_mfu_and_goodput(tmp_path: Path) -> None:
    steps = [runs.step(place) for place in range(1, 21)]  # 10 s of steps after 5 s of starting up: two thirds
    report = report_on(tmp_path, runs.header(started_at=995.0), runs.peak(), *steps)
    for name in ("html", "md", "terminal"):
        assert "x goodput 66.7 % = 26.7 % end to end" in rendered(report, name)


def test_a_run_without_a_step_has_a_report_all_the_same(tmp_path: Path) -> None:
    report = report_on(tmp_path, runs.header(), runs.peak())
    for name in ("html", "md", "terminal"):
        text = rendered(report, name)
        assert "MFU" in text
        assert "unknown" in text
        assert "no steps" in text
        assert "95 % below" not in text


def test_that_no_cause_is_known_is_no_fix(tmp_path: Path) -> None:
    quick = {"perf/data_wait_share": 0.0, "perf/mfu": 0.1, "perf/hfu": 0.1}
    lines = [runs.header(), *(runs.step(number, **quick) for number in range(1, 16))]
    report = report_on(tmp_path, *lines)
    assert [(finding.rule, finding.is_cause) for finding in report.findings] == [("undetermined", False)]
    for name in ("html", "md", "terminal"):
        text = rendered(report, name)
        assert "Fix this first" not in text
        assert "Where the time went is undetermined: " in text
        assert "1. " not in text.partition('id="data"')[0]


def test_an_unknown_peak_leaves_mfu_unknown_and_the_time_split(tmp_path: Path) -> None:
    keys = ("perf/step_time", "perf/data_wait_share", "perf/forward_share", "perf/backward_share")
    lines = [runs.step(place) for place in range(1, 19)]
    for line in lines:
        line["metrics"] = {key: line["metrics"][key] for key in keys}
    report = report_on(tmp_path, runs.header(), *lines)
    for name in ("html", "md", "terminal"):
        text = rendered(report, name)
        assert "Waiting for data" in text
        assert "Useful work at peak" not in text


@pytest.mark.parametrize("name", ["md", "html"])
def test_hardware_counters_stand_beside_hfu(tmp_path: Path, name: str) -> None:
    readings = [runs.event("counters", reader="dcgmi", tensor_active=share, dram_active=None) for share in (0.3, 0.5)]
    report = report_on(tmp_path, runs.header(), *(runs.step(place) for place in range(1, 9)), *readings)
    assert "dcgmi: tensor pipes busy 40.0 %; HFU by counting" in rendered(report, name)  # the mean of 30 and 50 %
    assert "memory busy" not in rendered(report, name)


def test_a_small_mfu_keeps_two_digits_in_every_format(tmp_path: Path) -> None:
    small = {"perf/mfu": 0.0024, "perf/hfu": 0.0024}
    report = report_on(tmp_path, runs.header(), *(runs.step(number, **small) for number in range(1, 20)))
    for name in ("html", "md", "terminal"):
        assert "0.24 %" in rendered(report, name)


def test_the_time_by_operator_is_shown_and_columns_of_nothing_are_not(tmp_path: Path) -> None:
    profile = runs.event("profile", 3, device="cuda", step_s=0.5, top=[["flash_fwd_kernel", 0.2, 32], ["copy", 0.1, 2]])
    lines = [runs.header(), runs.peak(), *(runs.step(place) for place in range(1, 20)), runs.count(3), profile]
    table = tables(report_on(tmp_path, *lines))["operators"]
    assert table.title == "Time by kernel"
    assert table.columns == ("Name", "Time#", "Calls#", "Of the step#")  # kernels have no FLOPs of their own
    assert table.rows[0] == ("flash_fwd_kernel", "200 ms", "32", "40.0 %")
    assert table.shares[0] == pytest.approx(0.4)


def test_a_phase_that_nobody_chose_a_colour_for_is_shown_all_the_same(tmp_path: Path) -> None:
    steps = [runs.step(place) for place in range(1, 13)]
    report = report_on(tmp_path, runs.header(), runs.peak(), *steps)
    assert report.phases is not None
    phases = msgspec.structs.replace(
        report.phases, steady_s={"decode_image": 0.25}, seconds={"decode_image": [0.25] * 12}
    )
    report = msgspec.structs.replace(report, phases=phases)
    assert tables(report)["phases"].rows == (("Decode image", "250 ms", "100.0 %"),)
    assert "Decode image 100.0 %" in rendered(report, "html")


def test_equal_axes_are_sent_once(ordinary: Run) -> None:
    data = data_of(report_of(ordinary))
    assert len(data["axes"]) == 1
    assert [line["step"] for line in data["lines"]] == [0, 0]


def test_a_million_steps_make_a_page_of_less_than_one_and_a_half_megabytes() -> None:
    from array import array

    from flopmeter.record import Header

    num = 1_000_000
    values = array("d", [0.1 + 1e-7 * (place * 7919 % num) for place in range(num)])
    columns = dict.fromkeys(("perf/step_time", "perf/mfu", "training/loss", "perf/forward_share"), values)
    run = Run(path=Path("mine/run.jsonl"), step=array("q", range(num)), columns=columns, headers=[Header()])
    run.time = array("d", range(num))
    assert len(render(report_of(run))) < 1_500_000


def test_a_run_of_three_thousand_steps_makes_a_page_of_less_than_400_kb(tmp_path: Path) -> None:
    steps = [runs.step(n, **{"training/loss": 2 + 1 / n, "perf/mfu": 0.4 + n / 1e5}) for n in range(1, 3001)]
    assert len(render(report_on(tmp_path, runs.header(), runs.peak(), runs.count(3), *steps))) < 400_000


def test_a_page_of_a_thousand_ranks_is_bounded(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [runs.header(world_size=1024)]
    for place in range(1, 101):
        own_s = [0.4 + 0.001 * (rank * place % 7) for rank in range(1024)]
        lines += [runs.step(place), runs.event("ranks", place, world_size=1024, own_s_by_rank=own_s)]
    assert len(render(report_on(tmp_path, *lines))) < 800_000


def test_markdown_cannot_be_broken_out_of(hostile: Run) -> None:
    text = render(report_of(hostile), "md")
    assert "<script" not in text.replace("\\<", "")
    assert re.search(r"(?<!\\)<", text) is None
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_a_terminal_gets_no_control_characters_and_no_markup_of_the_run(hostile: Run) -> None:
    report = report_of(hostile)
    about = msgspec.structs.replace(report.about, name="[bold red]name[/]")
    text = shown(msgspec.structs.replace(report, about=about), color_system=None)
    assert "[bold red]name[/]" in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_terminal_of_ascii_gets_bars_of_ascii(ordinary: Run) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    show(report_of(ordinary), Console(file=stream, width=120, markup=False, highlight=False))
    stream.flush()
    assert b"####" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_an_unknown_format_is_refused_with_the_known_ones(ordinary: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no report format 'pdf'; there are: html, json, md"):
        write_report(ordinary, tmp_path / "report.pdf")


def test_a_page_holds_only_our_script_and_its_policy_names_it(ordinary: Run) -> None:
    text = render(report_of(ordinary), "html")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert digests == re.findall(r"sha256-([^&']*)", policy[1].replace("&#39;", "'"))
    assert len(scripts) == 1
    assert "default-src" in policy[1]
    assert "connect-src" not in policy[1]
    assert "unsafe-eval" not in policy[1]


def test_a_page_refers_to_nothing_outside_itself(ordinary: Run) -> None:
    text = re.sub(r"<script.*?</script>", "", render(report_of(ordinary), "html"), flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="([^"#][^"]*)"', text) == ["data:,"]
    assert "url(" not in text
    assert "@import" not in text


def test_names_of_the_run_are_escaped_and_cut(hostile: Run) -> None:
    text = render(report_of(hostile), "html")
    body = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "<script>window" not in text
    assert "<img" not in body
    assert "&lt;script&gt;" in body
    assert len(text) < 400_000
    assert "x" * 1000 not in body


def test_embedded_json_cannot_end_its_element() -> None:
    assert json.loads(safe_json({"a": "</script><!--&"})) == {"a": "</script><!--&"}
    assert "<" not in safe_json("</script>")
    with pytest.raises(ValueError, match="Out of range"):
        safe_json(math.nan)


def test_hostile_numbers_are_unknown_in_every_format(hostile: Run) -> None:
    report = report_of(hostile)
    json.dumps(data_of(report), allow_nan=False)
    for name in available_formats():
        assert not re.search(r"\b(nan|inf)\b", render(report, name).split("<script>")[0], re.IGNORECASE)


def test_a_page_of_any_body_has_its_title_escaped() -> None:
    text = document("<b>title</b>", "<button id='theme'></button>")
    assert "<title>&lt;b&gt;title&lt;/b&gt;</title>" in text


def test_a_report_appears_whole_or_not_at_all(ordinary: Run, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    assert write_report(ordinary, tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(OSError, match="No such file"):
        write_report(ordinary, tmp_path / "missing" / "report.html")


def test_the_ending_of_the_file_decides_the_format(ordinary: Run, tmp_path: Path) -> None:
    assert json.loads(write_report(ordinary, tmp_path / "facts.json").read_text(encoding="utf-8"))["version"] == 2
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
    line = Line(name="MFU", unit="1", step=[1, 2, 3, 4, 5], mean=[0.0, 0.25, 0.5, 0.75, 1.0], low=[], high=[])
    assert spark_line(line) == "▁▃▅▇█"
    assert spark_line(msgspec.structs.replace(line, mean=[None] * 5)) == ""


@pytest.mark.parametrize(("num_steps", "words"), [(1, " · 1 step in "), (2000, " · 2,000 steps in ")])
def test_the_line_about_the_run_counts_its_steps(ordinary: Run, num_steps: int, words: str) -> None:
    assert words in run_line(msgspec.structs.replace(report_of(ordinary).about, num_steps=num_steps))


def flopmeter(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flopmeter", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_the_command_shows_the_summary_and_writes_the_page_beside_the_run(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "mine", runs.ordinary_lines())
    answer = flopmeter(folder)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("mine\n")
    assert answer.stdout.endswith(f"Report: {folder / 'report.html'}\n")
    assert "Fix this first: Training stands still" in answer.stdout
    assert (folder / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")


def test_the_report_of_a_trace_is_left_here_under_its_name(tmp_path: Path) -> None:
    """A trace may lie among other people's data, beside others whose reports would replace each other."""
    data, here = tmp_path / "data", tmp_path / "here"
    data.mkdir()
    here.mkdir()
    made = MadeTrace()
    made.step(0, 0, 100)
    made.kernel("ampere_sgemm_32x32", 30, 60, launch=10)
    trace = made.write(data, "rank.0.json.gz")
    answer = flopmeter(trace, cwd=here)
    assert answer.stdout.endswith("Report: rank.0-report.html\n"), answer.stderr
    assert "ampere_sgemm_32x32" in answer.stdout
    assert "from the shapes in the trace" in (here / "rank.0-report.html").read_text(encoding="utf-8")
    assert list(data.iterdir()) == [trace]


def test_the_command_prints_other_formats(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "mine", runs.ordinary_lines())
    assert json.loads(flopmeter(folder, "--format", "json").stdout)["number"]["mfu"] == pytest.approx(runs.MFU)
    assert flopmeter(folder / "run.jsonl", "--format", "md").stdout.splitlines()[0] == "# mine"
    assert flopmeter(folder, "--json").stdout == flopmeter(folder, "--format", "json").stdout
    assert not (folder / "report.html").exists()


def test_a_window_holds_its_own_steps_and_does_not_replace_the_whole_runs_page(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path, runs.ordinary_lines(40))
    told = json.loads(flopmeter(folder, "--json", "--window", "11:21").stdout)
    assert told["about"]["window"] == [11, 20]
    assert told["waterfall"]["num_steps"] == 10
    assert "Report:" in flopmeter(folder, "--window", "11:21").stdout
    assert [file.name for file in sorted(folder.glob("*.html"))] == ["report-11-20.html"]


def test_findings_are_explained_one_or_all() -> None:
    assert flopmeter("--explain", "data_stall").stdout.startswith("data_stall\n\n")
    listed = json.loads(flopmeter("--explain", "all", "--json").stdout)
    assert {"data_stall", "straggler"} <= set(listed)
    assert "straggler" in flopmeter("--explain", "all").stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["{here}/nothing"], 1, "cannot read"),
        (["{here}", "--format", "pdf"], 2, "there is no report format 'pdf'"),
        (["{here}", "--json", "--format", "md"], 2, "--json and --format md contradict each other"),
        (["{here}", "-o", "{here}/none/report.html"], 1, "cannot write the report"),
        (["{here}", "--window", "x"], 2, "is not of the form A:B"),
        (["{here}", "--window", "100:200"], 2, "the run has no steps in 100:200; it has 1 to 20"),
        (["--explain", "data_stal"], 2, "did you mean 'data_stall'?"),
        ([], 2, "name a run or a trace"),
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


def test_a_count_that_does_not_tell_modules_apart_has_a_report_all_the_same(tmp_path: Path) -> None:
    steps = (runs.step(number) for number in range(1, 13))
    report = report_on(tmp_path, runs.header(), runs.peak(), runs.count(2, by_module={}), *steps)
    assert "modules" not in tables(report)
    assert "aten::bmm" in render(report, "html")


def test_the_report_of_a_trace_calls_it_a_trace(tmp_path: Path) -> None:
    made = MadeTrace()
    made.step(0, 0, 100)
    made.kernel("ampere_sgemm_32x32", 30, 60, launch=10)
    page = render(report_of(load_any(made.write(tmp_path, "trace.json"))))
    assert "not finished" not in page
    assert "from the trace" in page
    assert "the run file" not in page
