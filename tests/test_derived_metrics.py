"""Is what a reader derives from a recorded run what was known live, and does it follow when the peaks change?"""

from __future__ import annotations

import csv
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flopmeter.sinks
from flopmeter import Run, TrainingMonitor, load_run, watch
from flopmeter.monitor import digest

SINK = """
import csv
import json


class Sink:
    def __init__(self, context):
        self.file = (context.output_dir / "live.jsonl").open("a")

    def log(self, step, metrics):
        print(json.dumps([step, dict(metrics)]), file=self.file, flush=True)

    def close(self):
        self.file.close()
"""
EVERY_STEP = {"sinks": ["kept"], "detail_every": 1, "profile_steps": False, "report": False}
DERIVED = {"perf/step_time", "perf/steps_per_second", "perf/forward_share", "perf/other_share", "perf/model_flop"}
DERIVED |= {"perf/mfu", "perf/hfu", "perf/mfu_processed", "perf/mfu_percent", "perf/goodput", "global_step"}


class Net(nn.Module):
    """A head in another precision than the body, where asked."""

    def __init__(self, is_mixed: bool = False) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(32, 50)
        self.is_mixed = is_mixed

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embed(input_ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_mixed):
            hidden = self.inner(hidden).relu()
        return self.head(hidden.float())  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def a_sink_that_keeps_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The metrics of each step as they are known live go to `live.jsonl`."""
    (tmp_path / "sinks").mkdir()
    (tmp_path / "sinks" / "kept.py").write_text(SINK)
    monkeypatch.setattr(flopmeter.sinks, "__path__", [*flopmeter.sinks.__path__, str(tmp_path / "sinks")])
    yield
    sys.modules.pop("flopmeter.sinks.kept", None)


def train(
    folder: Path,
    num_steps: int = 12,
    *,
    padding: int = 0,
    is_mixed: bool = False,
    at_the_end: list[dict[str, float]] | None = None,
    **config: Any,
) -> dict[str, float]:
    torch.manual_seed(0)
    model = Net(is_mixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer, output_dir=folder, config={"monitoring": {**EVERY_STEP, **config}})
    for step in range(num_steps):
        mask = torch.ones(4, 8 + step % 3, dtype=torch.long)
        mask[:, mask.shape[1] - padding :] = 0
        model(torch.randint(0, 50, mask.shape), attention_mask=mask).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            pause(monitor)
    if at_the_end is not None:
        at_the_end.append(monitor.latest(10.0))
    return monitor.finish_training()


def pause(monitor: TrainingMonitor) -> None:
    with monitor.pause("evaluation"):
        sum(range(100_000))


def live(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """What the sink was sent of each step; events with metrics, as of the ranks, have no such key."""
    logs = map(json.loads, (folder / "live.jsonl").read_text().splitlines())
    return [(step, metrics) for step, metrics in logs if "global_step" in metrics]


def check_against_live(folder: Path) -> Run:
    """Every metric of every step is derived as it was shown live; of marked steps only their own were."""
    run, shown = load_run(folder), live(folder)
    assert [step for step, _ in shown] == list(run.step)
    for place, (_, metrics) in enumerate(shown):
        assert {key: run.columns[key][place] for key in metrics} == pytest.approx(metrics, rel=1e-9), place
        more = {key for key, column in run.columns.items() if key not in metrics and not math.isnan(column[place])}
        assert place in run.marks or not more, place
    assert len(run.steady()) > 0
    return run


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


def rewritten(folder: Path, lines: list[dict[str, Any]]) -> Run:
    folder.mkdir()
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_run(folder)


@pytest.mark.parametrize(
    "options",
    [{}, {"padding": 2}, {"is_mixed": True}, {"patches": False}, {"mfu_calculation_mode": "estimate"}],
    ids=["plain", "padded", "two dtypes", "without patches", "estimated"],
)
def test_what_is_derived_from_the_record_is_what_was_known_live(tmp_path: Path, options: dict[str, Any]) -> None:
    train(tmp_path, **options)
    run = check_against_live(tmp_path)
    assert set(run.columns) >= DERIVED
    assert max(run.column("perf/goodput")[4:]) < 1.0  # the pauses are not in it
    if "padding" in options:
        padded = zip(run.column("perf/mfu"), run.column("perf/mfu_processed"), strict=True)
        assert all(mfu < 0.99 * processed for mfu, processed in padded)
    if "patches" in options:
        assert not {"perf/data_wait_share", "perf/host_to_device_share", "perf/backward_share"} & set(run.columns)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_every_place_that_shows_a_metric_shows_the_same_number(tmp_path: Path, is_mixed: bool) -> None:
    """A sink's aggregates, `latest()`, the summary and training_log.json, worked out here from the steps of `load_run`.

    Rates and shares of many steps are those of the whole stretch: weighted by step time, without marked steps.
    """
    taken: list[dict[str, float]] = []
    returned = train(tmp_path, 24, padding=2, is_mixed=is_mixed, detail_every=6, at_the_end=taken)
    run = load_run(tmp_path)
    step_s, steady = run.column("perf/step_time"), run.steady()

    def over(places: list[int], key: str) -> float:
        values = run.columns[key]
        if key in ("perf/step_time", "perf/model_flop"):
            return sum(values[place] for place in places) / len(places)
        if key == "perf/steps_per_second":
            return len(places) / sum(step_s[place] for place in places)
        return sum(values[place] * step_s[place] for place in places) / sum(step_s[place] for place in places)

    derived = DERIVED - {"perf/goodput", "global_step"}
    details = [(step, metrics) for step, metrics in live(tmp_path) if "perf/mfu" in metrics]
    assert len(details) >= 3
    since = 0
    for step, metrics in details:
        places = [place for place in steady if since < run.step[place] <= step]
        assert {key: metrics[key] for key in derived} == pytest.approx({key: over(places, key) for key in derived})
        since = step
    assert taken[0].keys() >= derived
    ended = list(steady)[:-1]  # the last step ended with the run
    assert taken[0] == pytest.approx({key: over(ended, key) for key in taken[0]})
    assert run.summary is not None
    for summary in (run.summary["metrics"], returned, run.sum_up()):
        known = [key for key in derived & summary.keys() if key != "perf/steps_per_second"]
        assert {"perf/mfu", "perf/hfu", "perf/mfu_processed", "perf/forward_share"} <= set(known)
        assert {key: summary[key] for key in known} == pytest.approx({key: over(list(steady), key) for key in known})
        assert summary["step_time_median_s"] == statistics.median(step_s[place] for place in steady)
    logs = json.loads((tmp_path / "training_log.json").read_text())["step_logs"]
    for place, log in enumerate(logs):
        values = {key: column[place] for key, column in run.columns.items() if math.isfinite(column[place])}
        assert {key: value for key, value in log.items() if key != "step"} == values


def test_a_row_holds_no_derived_value_and_few_bytes(tmp_path: Path) -> None:
    train(tmp_path, padding=2, detail_every=1000)
    lines = lines_of(tmp_path)
    rows = [line for line in lines if line.get("kind", "step") == "step"]
    # Law, eight times of a step, and of four texts of 8 tokens with 2 of padding: samples, tokens, with padding, causal
    # pairs of texts of 6, pairs of rows of 8, and as many that run.
    assert rows[0]["row"][8:] == [4, 24, 32, 4 * 21, 4 * 64, 4 * 64]
    assert all(row.keys() <= {"step", "time", "row", "loop", "marks", "metrics"} for row in rows)
    assert all(not DERIVED & row.get("metrics", {}).keys() for row in rows)
    sizes = [len(line) for line in (tmp_path / "run.jsonl").read_text().splitlines() if '"row":' in line]
    assert sum(sizes) / len(sizes) < 160


def test_the_first_count_serves_the_steps_before_it(tmp_path: Path) -> None:
    train(tmp_path)
    header, *lines = lines_of(tmp_path)
    (counted,) = (line for line in lines if line.get("kind") == "law" and not line["is_estimate"])
    estimated = counted | {"law": 9, "is_estimate": True, "exact": {"fp32": {"tokens": 1.0}}}
    for line in [line for line in lines if line.get("kind", "step") == "step"][:5]:
        line["row"][0] = 9
    # Two linear layers (16 x 32 and 32 x 50), forward and twice that in the backward pass, on four texts of 8, 9, 10.
    a_token = 3 * 2 * (16 * 32 + 32 * 50)
    run = rewritten(tmp_path / "served", [header, estimated, *lines])
    assert list(run.column("perf/model_flop")[:6]) == [a_token * 4 * length for length in (8, 9, 10, 8, 9, 10)]
    changed = {"state": counted["state"] + 1}, {"kinds": ["tokens", "patches"]}  # of which there is no count
    for place, other in enumerate(changed):
        run = rewritten(tmp_path / f"other {place}", [header, estimated | other, *lines])
        assert list(run.column("perf/model_flop")[:6]) == [4 * 8, 4 * 9, 4 * 10, 4 * 8, 4 * 9, a_token * 4 * 10]


def test_a_run_can_be_read_under_the_other_convention(tmp_path: Path) -> None:
    train(tmp_path / "exact", padding=2)
    train(tmp_path / "full", padding=2, convention="full")
    exact, full = load_run(tmp_path / "exact"), load_run(tmp_path / "full")
    for run, other, name in ((exact, full, "full"), (full, exact, "exact")):
        read = run.derived({}, name)
        assert read.header.convention == name
        assert list(read.column("perf/model_flop")) == pytest.approx(list(other.column("perf/model_flop")))
        ratio = read.column("perf/mfu")[-1] / run.column("perf/mfu")[-1]
        assert ratio == pytest.approx(other.column("perf/model_flop")[-1] / run.column("perf/model_flop")[-1])
        assert list(read.column("perf/hfu")) == pytest.approx(list(run.column("perf/hfu")))
        again = read.derived({}, run.header.convention)
        assert list(again.column("perf/mfu")) == pytest.approx(list(run.column("perf/mfu")))


def test_a_step_of_a_law_that_is_not_in_the_file_has_no_flops(tmp_path: Path) -> None:
    train(tmp_path)
    run = rewritten(tmp_path / "torn", [line for line in lines_of(tmp_path) if line.get("kind") != "law"])
    assert not {"perf/mfu", "perf/model_flop"} & set(run.columns)
    assert list(run.column("perf/tokens_per_second")) == pytest.approx(
        list(load_run(tmp_path).column("perf/tokens_per_second"))
    )


def test_whoever_reads_only_the_end_of_a_long_file_finds_the_laws_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "REPEAT_EVERY", 60)
    train(tmp_path, 130, sinks=[])
    lines = lines_of(tmp_path)
    end = [lines[0], *lines[-100:]]
    whole, part = load_run(tmp_path), rewritten(tmp_path / "end", end)
    assert part.column("perf/mfu") == whole.column("perf/mfu")[-len(part) :]


def test_a_restarted_run_has_the_goodput_of_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, num_steps in enumerate((5, 6)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        train(tmp_path, num_steps)
    run = check_against_live(tmp_path)
    assert len(run.headers) == 2
    assert [math.isnan(value) for value in run.column("perf/goodput")] == [place in (0, 5) for place in range(11)]


def test_a_peak_that_becomes_known_later_serves_the_steps_before_it(tmp_path: Path) -> None:
    train(tmp_path, is_mixed=True)
    before, lines = load_run(tmp_path), lines_of(tmp_path)
    stated = lines[0].pop("peak") | {line["dtype"]: line for line in lines if line.get("event") == "peak"}
    assert set(stated) == {"fp32", "bf16"}
    rest = [line for line in lines if line.get("event") != "peak"]
    without = rewritten(tmp_path / "without", rest)
    assert "perf/mfu" not in without.columns
    late = [{"kind": "event", "event": "peak", **peak, "dtype": dtype} for dtype, peak in stated.items()]
    run = rewritten(tmp_path / "late", [*rest[:-1], *late, rest[-1]])
    assert list(run.column("perf/mfu")) == pytest.approx(list(before.column("perf/mfu")))


def test_devices_and_starts_are_held_against_their_own_peaks(tmp_path: Path) -> None:
    train(tmp_path, 4)
    header, *lines = lines_of(tmp_path)
    steps = [line for line in lines if line.get("kind", "step") == "step"]
    laws = [line for line in lines if line.get("kind") == "law"]
    usual, rate = list(load_run(tmp_path).column("perf/mfu")), header["peak"]["fp32"]["flop_per_s"]

    def peak(factor: float) -> dict[str, Any]:
        return {"kind": "event", "event": "peak", "dtype": "fp32", "device": "another", "flop_per_s": factor * rate}

    moved = {"kind": "event", "event": "device", "device": "another"}
    run = rewritten(tmp_path / "moved", [header, *laws, *steps[:2], moved, *steps[2:], peak(2.0)])
    assert list(run.column("perf/mfu")) == pytest.approx([*usual[:2], usual[2] / 2, usual[3] / 2])
    unknown = rewritten(tmp_path / "unknown", [header, *laws, *steps[:2], moved, *steps[2:]])
    assert list(unknown.column("perf/mfu")) == pytest.approx([*usual[:2], math.nan, math.nan], nan_ok=True)
    job = {"kind": "job", "flop": 1, "tokens": 1, "samples": 3, "devices": 4}
    run = rewritten(tmp_path / "of four", [header, *laws, steps[0], job, steps[1]])
    assert list(run.amount("samples")) == pytest.approx([4, 12])
    assert list(run.column("perf/mfu")) == pytest.approx([usual[0], usual[1] / 4])
    restarted = header | {"peak": {"fp32": peak(4.0)}}
    run = rewritten(tmp_path / "restarted", [header, *laws, *steps[:2], restarted, *laws, *steps[2:]])
    assert list(run.column("perf/mfu")) == pytest.approx([*usual[:2], usual[2] / 4, usual[3] / 4])
    assert run.peaks["fp32"]["flop_per_s"] == 4 * rate


def test_a_run_can_be_held_against_other_peaks_afterwards(tmp_path: Path) -> None:
    train(tmp_path)
    run = load_run(tmp_path)
    rate = run.peaks["fp32"]["flop_per_s"]
    other = run.derived({"fp32": 2 * rate})
    of_peaks = {"perf/mfu", "perf/hfu", "perf/mfu_processed", "perf/mfu_percent"}
    for key in of_peaks:
        assert list(other.column(key)) == pytest.approx([value / 2 for value in run.column(key)])
    for key in run.columns.keys() - of_peaks:
        assert list(other.columns[key]) == pytest.approx(list(run.columns[key]), nan_ok=True)
    assert (other.peaks["fp32"]["flop_per_s"], other.peaks["fp32"]["source"]) == (2 * rate, "user")
    assert run.peaks["fp32"]["source"] != "user"  # the run itself is as it was
    assert run.summary is not None
    assert other.summary is not None
    assert other.summary["metrics"]["perf/mfu"] == pytest.approx(run.summary["metrics"]["perf/mfu"] / 2)
    assert other.waterfall().mfu == pytest.approx(run.waterfall().mfu / 2)  # type: ignore[operator]
    assert other.derived({"fp32": rate}).column("perf/mfu") == run.column("perf/mfu")


def test_each_dtype_of_a_mixed_run_is_held_against_its_own_peak(tmp_path: Path) -> None:
    train(tmp_path, is_mixed=True)
    run = load_run(tmp_path)
    assert "perf/mfu" not in run.derived({"bf16": math.inf}).columns  # that is none
    # With no limit for the one, what is left of MFU is the other's part.
    parts = [run.derived({dtype: 1e99}).column("perf/mfu")[-1] for dtype in ("bf16", "fp32")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(run.column("perf/mfu")[-1])


def test_a_step_whose_flops_are_not_in_the_record_has_no_mfu_of_other_peaks(tmp_path: Path) -> None:
    written = {"perf/step_time": 0.5, "perf/mfu": 0.25, "perf/tokens_per_second": 10.0}
    lines = [{"kind": "header", "schema": 2}, {"kind": "step", "step": 1, "time": 1.0, "metrics": written}]
    run = rewritten(tmp_path / "old", lines)
    assert {key: column[0] for key, column in run.columns.items()} == written
    assert {key: column[0] for key, column in run.derived({"bf16": 1e15}).columns.items()} == {
        "perf/step_time": 0.5,
        "perf/tokens_per_second": 10.0,
    }


JOB = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import flopmeter.sinks
from flopmeter import watch

folder = Path(sys.argv[1])
flopmeter.sinks.__path__.append(str(folder / "sinks"))
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = {"monitoring": {"sinks": ["kept"], "detail_every": 1, "profile_steps": False, "report": False,
                         "peak_flop_per_s": 1e11, "distributed": {"statistics_every": 5, "statistics_s": 0.01}}}
monitor = watch(model, optimizer, output_dir=folder, config=config)
for _ in range(30):
    model(torch.ones(4 + 4 * torch.distributed.get_rank(), 32)).sum().backward()
    optimizer.step()
monitor.finish_training()
torch.distributed.destroy_process_group()
"""


def test_the_record_of_a_job_of_two_ranks_gives_the_whole_jobs_metrics(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "job.py"), str(tmp_path)], check=True, timeout=120, env=environment)
    run = check_against_live(tmp_path)
    assert run.header.world_size == 2
    assert list(run.amount("samples"))[:1] == pytest.approx([8.0])  # until the ranks have spoken: twice rank 0's four
    halved = run.derived({"fp32": 2e11}).column("perf/mfu")
    assert list(halved) == pytest.approx([mfu / 2 for mfu in run.column("perf/mfu")])


def test_numbers_that_cannot_be_ones_are_unknown_and_harm_nobody(tmp_path: Path) -> None:
    train(tmp_path, 4)
    lines = lines_of(tmp_path)
    laws = [line for line in lines if line.get("kind") == "law"]
    usual = next(line for line in lines if line.get("kind", "step") == "step")
    assert len(usual["row"]) >= 10
    bad: list[Any] = [0, -1, 5e-324, 1e308, "NaN", "Infinity", "-Infinity", None, True, [1], "x", 10**400]
    pairs = [(place, value) for place in range(len(usual["row"])) for value in bad]
    damaged = [usual | {"step": 10 + number, "row": [*usual["row"][:place], value, *usual["row"][place + 1 :]]}
               for number, (place, value) in enumerate(pairs)]  # fmt: skip
    damaged += [usual | {"row": row} for row in ([], [1], usual["row"] + [1] * 100)]
    odd_laws = [{"kind": "law", "law": law, "exact": parts} for law, parts in enumerate(bad, start=5)]
    odd_laws += [{"kind": "law", "law": 30, "exact": {"fp32": {"tokens": value, "x": 1}}} for value in bad]
    odd_laws += [{"kind": "law", "law": value} for value in bad]
    odd_laws += [{"kind": "job", name: value} for name in ("flop", "devices") for value in bad]
    odd = usual | {"metrics": {".model_flop": 1, ".device_ns/x": 2, ".mine": 3, ".ns": 10**9, "mine": 4}}
    peaks: list[Any] = [0, -1, "x", None, math.inf, 1e308, True]
    events = [{"kind": "event", "event": "peak", "dtype": f"odd{place}", "flop_per_s": peak}
              for place, peak in enumerate(peaks)]  # fmt: skip
    run = rewritten(tmp_path / "damaged", [lines[0], *odd_laws, *laws, *events, *damaged, odd, usual])
    assert len(run) == len(damaged) + 2
    assert all(len(column) == len(run) for column in run.columns.values())
    assert all(not 1e100 <= abs(value) < math.inf for column in run.columns.values() for value in column)
    assert (run.column(".mine")[-2], run.column("mine")[-2]) == (3.0, 4.0)
    assert run.column("perf/mfu")[-1] == load_run(tmp_path).column("perf/mfu")[0]
    assert set(run.derived({"fp32": 1.0}).columns) == set(run.columns)


def flopmeter_says(*arguments: str) -> str:
    command = [sys.executable, "-m", "flopmeter", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_the_command_reports_every_step_under_a_stated_peak_and_convention(tmp_path: Path) -> None:
    train(tmp_path, padding=2)
    run = load_run(tmp_path)
    options = ("--peak-flop-per-s", "1e12", "--convention", "full")
    names, *rows = csv.reader(flopmeter_says("report", str(tmp_path), "--format", "csv", *options).splitlines())
    objects = flopmeter_says("report", str(tmp_path), "--format", "jsonl", *options).splitlines()
    assert len(rows) == len(objects) == len(run)
    row, last = dict(zip(names, rows[-1], strict=True)), json.loads(objects[-1])
    # The last step has four texts of 10 tokens, padding included, all of which count as full.
    a_token = 3 * 2 * (16 * 32 + 32 * 50)
    assert float(row["perf/model_flop"]) == last["perf/model_flop"] == pytest.approx(a_token * 4 * 10)
    assert last["perf/mfu"] == pytest.approx(last["perf/model_flop"] / last["perf/step_time"] / 1e12)
    assert [row["step"], rows[0][names.index("marks")]] == [str(run.step[-1]), "warmup"]
    page = flopmeter_says("report", str(tmp_path), "--format", "md", *options)
    assert "stated when the run was read" in page
