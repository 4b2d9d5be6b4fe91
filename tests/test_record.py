from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flopmeter.errors import RecordError
from flopmeter.metrics import ROW_NAMES
from flopmeter.record import Run, RunWriter, load_run, write_training_log
from flopmeter.record import reader as reader_module
from flopmeter.record.reader import Rows, look_at
from flopmeter.record.writer import encode, without_names
from flopmeter.schema import SCHEMA_VERSION

HEADER = {"kind": "header", "schema": 2, "run_id": "a", "started_at": 100.0, "model": "GPT", "world_size": 1}


def step_line(step: int, /, **metrics: Any) -> dict[str, Any]:
    return {"kind": "step", "step": step, "time": 100.0 + step, "metrics": metrics}


def write_lines(path: Path, *lines: dict[str, Any] | bytes) -> Path:
    data = b"".join(line if isinstance(line, bytes) else encode(line) for line in lines)
    path.write_bytes(data)
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.jsonl")
    writer.write(HEADER)
    writer.write(step_line(1, **{"training/loss": 2.5}) | {"marks": ["warmup"]})
    writer.write(step_line(2, **{"training/loss": 2.0, "perf/mfu": 0.4}))
    writer.write({"kind": "event", "event": "pause", "name": "eval", "duration_s": 3.0})
    writer.write({"kind": "summary", "metrics": {"perf/mfu": 0.4}})
    writer.close()
    run = load_run(tmp_path)
    assert run.header.model == "GPT"
    assert list(run.step) == [1, 2]
    assert list(run.column("training/loss")) == [2.5, 2.0]
    assert math.isnan(run.column("perf/mfu")[0])
    assert run.column("perf/mfu")[1] == 0.4
    assert run.steady() == [1]
    assert run.events[0]["name"] == "eval"
    assert run.summary is not None
    assert run.skipped == []


def test_events_are_found_by_name_in_file_order_and_the_newest_peak_of_a_dtype_counts(tmp_path: Path) -> None:
    header = HEADER | {"peak": {"bf16": {"flop_per_s": 1.0}, "fp16": {"flop_per_s": 2.0}, "fp8": "unsound"}}
    peaks = [{"kind": "event", "event": "peak", "dtype": "bf16", "flop_per_s": rate} for rate in (3.0, 4.0)]
    pause = {"kind": "event", "event": "pause"}
    run = load_run(write_lines(tmp_path / "run.jsonl", header, peaks[0], pause, peaks[1]))
    assert run.named("peak") == peaks
    assert run.last("peak") == peaks[1]
    assert (run.named("gc"), run.last("gc")) == ([], {})
    assert run.peaks == {"bf16": peaks[1], "fp16": {"flop_per_s": 2.0}}


def test_a_metric_that_no_step_has_is_all_nan(tmp_path: Path) -> None:
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, step_line(1)))
    assert len(run.column("perf/mfu")) == 1
    assert math.isnan(run.column("perf/mfu")[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_survive_as_strict_json(tmp_path: Path, value: float) -> None:
    line = encode(step_line(1, **{"training/loss": value}))
    json.loads(line, parse_constant=pytest.fail)
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, line))
    read = run.column("training/loss")[0]
    assert math.isnan(read) if math.isnan(value) else read == value


def test_bare_nan_from_another_writer_is_understood(tmp_path: Path) -> None:
    raw = b'{"kind":"step","step":1,"time":1,"metrics":{"training/loss":NaN,"perf/mfu":-Infinity}}\n'
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, raw))
    assert math.isnan(run.column("training/loss")[0])
    assert run.column("perf/mfu")[0] == -math.inf


def test_a_torn_last_line_is_skipped_and_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "run.jsonl", HEADER, step_line(1), encode(step_line(2))[:-9])
    run = load_run(path)
    assert list(run.step) == [1]
    assert run.skipped == ["skipped line 3: cut off in mid-line"]


def test_a_restart_after_a_torn_line_loses_only_that_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "run.jsonl", HEADER, step_line(1), encode(step_line(2))[:-9])
    writer = RunWriter(path)
    writer.write(HEADER | {"run_id": "b", "started_at": 200.0})
    writer.write(step_line(2))
    writer.close()
    run = load_run(path)
    assert [header.run_id for header in run.headers] == ["a", "b"]
    assert list(run.step) == [1, 2]
    assert run.skipped == ["skipped line 3: not JSON"]


def test_a_summary_before_a_restart_does_not_close_the_run(tmp_path: Path) -> None:
    summary = {"kind": "summary", "metrics": {}}
    assert load_run(write_lines(tmp_path / "run.jsonl", HEADER, summary, HEADER)).summary is None


def test_bad_lines_in_the_middle_are_counted_not_fatal(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "run.jsonl", HEADER, b"rubbish\n", b"[1]\n", b'{"kind":"other"}\n', b'{"kind":"step"}\n', b"x\n"
    )
    assert load_run(path).skipped == [
        "skipped line 2 and 1 more: not JSON",
        "skipped line 3 and 1 more: of no known kind",
        "skipped line 5: a step without number or metrics",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no header line"),
        (b"\x89PNG\r\n\x1a\n" * 50, "has no header line"),
        (b'{"step": 1}\n', "has no header line"),
        (
            encode({"kind": "header", "schema": 1}),
            "has run-file schema 1; this flopmeter reads 2: flopmeter 0.1 reads it",
        ),
        (
            encode({"kind": "header", "schema": 3}),
            "has run-file schema 3; this flopmeter reads 2: use the flopmeter that",
        ),
        (encode({"kind": "header"}), "has run-file schema None"),
    ],
)
def test_a_foreign_file_is_one_line_of_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "run.jsonl").write_bytes(content)
    with pytest.raises(RecordError, match=message) as caught:
        load_run(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line_of_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot read the run file .*nothing.jsonl: No such file"):
        load_run(tmp_path / "nothing.jsonl")


def test_a_path_with_a_null_byte_is_one_line_of_error() -> None:
    with pytest.raises(RecordError, match="null"):
        load_run("a\0b")


def test_an_overlong_line_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_LINE_BYTES", 1 << 20)
    long = b'{"kind":"step","step":1,"metrics":{},"x":"' + b"y" * (3 << 20) + b'"}\n'
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, long, step_line(2)))
    assert list(run.step) == [2]
    assert run.skipped == ["skipped line 2: longer than 1 MB"]


def test_too_many_different_metrics_cannot_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_COLUMNS", 3)
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, step_line(1, a=1, b=2, c=3, d=4)))
    assert set(run.columns) == {"a", "b", "c"}
    assert "beyond the first 3" in run.skipped[0]


def test_a_header_field_of_the_wrong_type_gets_its_default(tmp_path: Path) -> None:
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER | {"model": ["x"], "world_size": "many"}))
    assert run.header.model == ""
    assert run.header.world_size == 1


def test_a_row_is_read_by_the_names_in_its_own_files_header(tmp_path: Path) -> None:
    """Other versions have other phases and fields: by position alone, a share of time would be a count of tokens."""
    old = HEADER | {"rows": ["law", "ns", "samples", "gone_ns"], "loop": ["training/epoch"]}
    new = HEADER | {"rows": ["law", "ns", "data_wait_ns"], "run_id": "b"}
    lines = [
        {"kind": "step", "step": step, "time": 100.0 + step, "row": [0, 2e9, 5, 7], "loop": [3]} for step in (1, 2)
    ]
    run = load_run(write_lines(tmp_path / "run.jsonl", old, lines[0], new, lines[1]))
    assert (run.column("perf/step_time")[0], run.column("perf/samples_per_second")[0]) == (2.0, 2.5)
    assert (run.column("training/epoch")[0], run.column("training/loss")[1]) == (3.0, 3.0)
    assert run.column("perf/data_wait_share")[1] == 5 / 2e9


@pytest.mark.parametrize("rows", [["ns", "law"], [], ["law", 3]])
def test_rows_that_do_not_begin_with_their_law_are_refused(tmp_path: Path, rows: list[Any]) -> None:
    with pytest.raises(RecordError, match="rows that this flopmeter cannot read"):
        load_run(write_lines(tmp_path / "run.jsonl", HEADER, step_line(1, a=1), HEADER | {"rows": rows}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
line_like = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["header", "step", "event", "summary"]) | json_values,
        "schema": st.just(SCHEMA_VERSION) | json_values,
        "rows": st.just(["law", "ns"]) | json_values,
        "loop": json_values,
        "row": json_values,
        "step": json_values,
        "time": json_values,
        "metrics": json_values,
        "marks": json_values,
        "model": json_values,
    },
)
raw_lines = st.binary(max_size=40) | line_like.map(lambda value: json.dumps(value).encode())


@given(lines=st.lists(raw_lines, max_size=8), has_header=st.booleans())
def test_no_file_makes_the_reader_raise_anything_but_its_own_error(
    tmp_path: Path, lines: list[bytes], has_header: bool
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes((encode(HEADER) if has_header else b"") + b"\n".join(lines))
    try:
        run = load_run(path)
    except RecordError:
        assert not has_header or b'"header"' in b"".join(lines)  # a second header may be of another schema
    else:
        assert all(len(column) == len(run) for column in run.columns.values())
        assert len(run.time) == len(run)
        write_training_log(run, tmp_path / "training_log.json")
        json.loads((tmp_path / "training_log.json").read_text(), parse_constant=pytest.fail)


SENSIBLE = st.one_of(st.floats(-1e99, 1e99), st.sampled_from([float("inf"), -float("inf")]))


@given(metrics=st.dictionaries(st.text(max_size=10), SENSIBLE, max_size=5))
def test_every_metric_survives_the_round_trip(
    metrics: dict[str, float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    run = load_run(write_lines(path, HEADER, step_line(7) | {"metrics": metrics}))
    assert {key: column[0] for key, column in run.columns.items()} == metrics


def test_deep_nesting_and_huge_numbers_do_no_harm(tmp_path: Path) -> None:
    huge = b'{"kind":"step","step":1,"time":1e999,"metrics":{"a":' + b"9" * 400 + b"}}\n"
    endless = b'{"kind":"step","step":1,"metrics":{"a":' + b"9" * 5000 + b"}}\n"
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, b"[" * 100_000 + b"\n", huge, endless))
    assert math.isnan(run.column("a")[0])
    assert len(run.skipped) == 1


def test_things_that_json_does_not_know_are_written_as_text() -> None:
    assert json.loads(encode({"path": Path("x"), "deep": {"nan": [math.nan]}})) == {
        "path": "x",
        "deep": {"nan": ["NaN"]},
    }


def _raise_oserror(code: int) -> Callable[..., int]:
    def write(fd: int, data: bytes) -> int:
        raise OSError(code, os.strerror(code))

    return write


def test_a_full_disk_gives_one_warning_and_the_record_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RunWriter(tmp_path / "run.jsonl")
    writer.write(HEADER)
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(os, "write", _raise_oserror(errno.ENOSPC))
        assert not writer.flush()
        writer.write(step_line(1))
        assert not writer.flush()
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text
    writer.close()
    assert list(load_run(tmp_path).step) == [1]


def test_a_disk_that_takes_half_a_line_does_not_tear_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path / "run.jsonl")
    writer.write(HEADER)
    writer.write(step_line(1))
    real_write, calls = os.write, iter([5])

    def short_write(fd: int, data: bytes) -> int:
        for length in calls:
            return real_write(fd, bytes(data[:length]))
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as full:
        full.setattr(os, "write", short_write)
        assert not writer.flush()
    writer.close()
    run = load_run(tmp_path)
    assert list(run.step) == [1]
    assert run.skipped == []


def test_a_disk_that_stays_full_costs_bounded_memory_and_the_loss_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "run.jsonl", max_pending_bytes=2000)
    writer.write(HEADER)
    with monkeypatch.context() as full:
        full.setattr(os, "write", _raise_oserror(errno.ENOSPC))
        for step in range(1000):
            writer.write(step_line(step))
            writer.flush()
    num_dropped = writer.num_dropped
    assert num_dropped > 900
    writer.flush()
    writer.close()
    run = load_run(tmp_path)
    assert len(run) == 1000 - num_dropped
    assert f"{num_dropped} lines lost" in run.events[0]["message"]


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = RunWriter(tmp_path / "file" / "run.jsonl")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            writer.write(HEADER)
            assert not writer.flush()
        writer.close()
    assert len(caplog.records) == 1


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.jsonl")
    writer.write(HEADER)
    writer.close()
    writer.close()
    assert len(load_run(tmp_path).headers) == 1


KILLED = """
import sys
from pathlib import Path
from flopmeter.record import RunWriter
writer = RunWriter(Path(sys.argv[1]))
writer.write({"kind": "header", "schema": 2})
for step in range(10**9):
    writer.write({"kind": "step", "step": step, "time": 0.0, "metrics": {"training/loss": 1.0 / (step + 1)}})
    if step % 7 == 0:
        writer.flush()
        print(step, flush=True)
"""


def test_kill_9_leaves_a_sound_record_up_to_the_last_flush(tmp_path: Path) -> None:
    for attempt in range(5):
        path = tmp_path / f"{attempt}.jsonl"
        with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(10 + 97 * attempt):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            told = [int(line) for line in process.stdout.read().split()]
        run = load_run(path)
        assert list(run.step) == list(range(len(run)))
        assert len(run) >= (told[-1] + 1 if told else 0)


def make_run(tmp_path: Path) -> Run:
    return load_run(
        write_lines(
            tmp_path / "run.jsonl",
            HEADER,
            step_line(1, **{"training/loss": 2.0}),
            step_line(2, **{"training/loss": math.nan}),
            {"kind": "event", "event": "epoch", "epoch": 0, "avg_loss": 2.0, "elapsed_time": 2.0},
            HEADER | {"started_at": 500.0},
            {"kind": "step", "step": 2, "time": 510.0, "metrics": {}},
        )
    )


def test_the_training_log_is_one_ordinary_json_document(tmp_path: Path) -> None:
    write_training_log(make_run(tmp_path), tmp_path / "training_log.json")
    log = json.loads((tmp_path / "training_log.json").read_text(), parse_constant=pytest.fail)
    assert log["step_logs"] == [{"step": 1, "training/loss": 2.0}, {"step": 2}, {"step": 2}]
    assert log["epoch_logs"] == [{"epoch": 0, "avg_loss": 2.0, "elapsed_time": 2.0}]
    assert log["total_training_time"] == pytest.approx(2.0 + 10.0)  # 100 to 102, then 500 to 510


def test_a_start_without_a_step_takes_no_training_time(tmp_path: Path) -> None:
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER | {"started_at": 500.0}))
    write_training_log(run, tmp_path / "training_log.json")
    assert json.loads((tmp_path / "training_log.json").read_text())["total_training_time"] == 0.0


def test_the_training_log_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "training_log.json"
    path.write_text("old")
    write_training_log(make_run(tmp_path), path)
    assert json.loads(path.read_text())["run"]["model"] == "GPT"
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_run_is_readable_while_it_grows(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.jsonl")
    writer.write(HEADER)
    writer.flush()
    for step in range(3):
        writer.write(step_line(step) | {"time": time.time()})
        writer.flush()
        assert len(load_run(tmp_path)) == step + 1
    writer.close()


def test_a_disk_that_is_really_full_lets_the_record_resume_when_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False, stderr=subprocess.DEVNULL
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        (disk / "ballast").write_bytes(b"x" * 60_000)
        writer = RunWriter(disk / "run.jsonl")
        writer.write(HEADER)
        with caplog.at_level(logging.WARNING):
            for step in range(500):
                writer.write(step_line(step, x=float(step)))
                writer.flush()
        assert len(caplog.records) == 1
        assert "No space left" in caplog.text
        (disk / "ballast").unlink()
        writer.close()
        run = load_run(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert list(run.step) == list(range(500))
    assert run.skipped == []


_VALUES = st.one_of(st.floats(), st.integers(), st.booleans(), st.none(), st.sampled_from(["NaN", "-Infinity", "x"]))


@settings(max_examples=100)
@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), _VALUES, max_size=6), max_size=30))
def test_columns_hold_every_value_at_its_step_whatever_keys_the_steps_have(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    run = load_run(
        write_lines(tmp_path / "run.jsonl", HEADER, *(step_line(place, **row) for place, row in enumerate(rows)))
    )
    words = {"NaN": math.nan, "-Infinity": -math.inf, "x": math.nan}
    for key in {key for row in rows for key in row}:
        for place, row in enumerate(rows):
            value = row.get(key)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            expected = float(value) if is_number else words.get(str(value), math.nan)  # type: ignore[arg-type]
            expected = math.nan if 1e100 <= abs(expected) < math.inf else expected
            assert run.column(key)[place] == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def usual_lines(num: int) -> list[dict[str, Any]]:
    return [step_line(number, a=float(number), b=0.5) for number in range(num)]


UNUSUAL = {
    "a bool": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":true,"b":2}}',
    "null": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":null,"b":2}}',
    "a word": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":"-Infinity","b":"x"}}',
    "bare NaN": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":NaN,"b":2}}',
    "a list": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":[1],"b":2}}',
    "no number": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":' + b"9" * 400 + b',"b":18446744073709551617}}',
    "another order": b'{"metrics":{"b":2,"a":1},"time":1.0,"step":9,"kind":"step"}',
    "fewer keys": b'{"kind":"step","step":9,"time":1.0,"metrics":{"b":2}}',
    "no keys": b'{"kind":"step","step":9,"time":1.0,"metrics":{}}',
    "more keys": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":1,"b":2,"c":3}}',
    "a key twice": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":1,"a":3},"metrics":{"b":2,"b":4}}',
    "an escaped key": b'{"kind":"step","step":9,"time":1.0,"metrics":{"\\u0061":1,"b":2}}',
    "an unknown field": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":1},"new":{"b":[2]}}',
    "an unknown field that is no text": b'{"kind":"step","step":9,"metrics":{"a":1},"new":"\xff"}',
    "a whole float as number": b'{"kind":"step","step":9.0,"time":1.0,"metrics":{"a":1}}',
    "a bool as number": b'{"kind":"step","step":true,"time":1.0,"metrics":{"a":1}}',
    "a huge number": b'{"kind":"step","step":4611686018427387904,"time":1.0,"metrics":{"a":1}}',
    "no time": b'{"kind":"step","step":9,"metrics":{"a":1}}',
    "a time in words": b'{"kind":"step","step":9,"time":"Infinity","metrics":{"a":1}}',
    "marks": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":1},"marks":["observed",1]}',
    "odd marks": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":1},"marks":"observed"}',
    "metrics that are none": b'{"kind":"step","step":9,"time":1.0,"metrics":[["a",1]]}',
    "another kind": b'{"kind":"event","event":"pause","step":9,"time":1.0,"metrics":{"a":1}}',
    "two kinds": b'{"kind":"step","kind":"event","step":9,"time":1.0,"metrics":{"a":1}}',
    "half a line": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":1}',
    "too much": b'{"kind":"step","step":9,"time":1.0,"metrics":{"a":1}}}',
    "a blank line": b"  ",
}


@pytest.mark.parametrize("raw", UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_line_says_the_same_after_a_hundred_usual_ones(tmp_path: Path, raw: bytes) -> None:
    alone = load_run(write_lines(tmp_path / "alone.jsonl", HEADER, raw + b"\n"))
    among = load_run(
        write_lines(tmp_path / "among.jsonl", HEADER, *usual_lines(100), raw + b"\n", *usual_lines(100)[-1:])
    )
    assert list(among.step) == [*range(100), *alone.step, 99]
    assert repr(list(among.time)[100:-1]) == repr(list(alone.time))
    assert {place - 100: marks for place, marks in among.marks.items()} == alone.marks
    assert among.events == alone.events
    assert [text.replace("line 102", "line 2") for text in among.skipped] == alone.skipped
    for key in {*alone.columns, "a", "b"}:
        assert repr(list(among.column(key))[100:-1]) == repr(list(alone.column(key)))
    assert list(among.column("a"))[:100] == [float(number) for number in range(100)]
    assert (among.column("a")[-1], among.column("b")[-1]) == (99.0, 0.5)


def test_columns_are_equally_long_and_hold_nothing_that_still_waits_once_dealt() -> None:
    columns: dict[str, Any] = {}
    rows = Rows(columns, max_columns=4096)
    for number in range(10):
        rows.add({"a": number})
    rows.deal()
    rows.add({"b": 1.0})
    rows.deal()
    rows.deal()
    assert list(columns["a"])[:10] == list(range(10))
    assert math.isnan(columns["a"][10])
    assert [math.isnan(value) for value in columns["b"]] == [True] * 10 + [False]


@given(key=st.text(st.characters(), max_size=6))
@example(key='<a b="c">')
@example(key="\\")
@example(key="\n\0")
@example(key="\ud800")
@example(key="")
@example(key="step")
def test_any_text_may_be_the_key_of_a_metric_in_every_line(tmp_path: Path, key: str) -> None:
    lines = [json.dumps(step_line(number, **{key: number, "another": 0.5})).encode() + b"\n" for number in range(20)]
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, *lines))
    assert list(run.column(key)) == list(range(20))
    assert run.skipped == []


def test_a_reader_says_of_each_line_whether_it_is_sound() -> None:
    reader = reader_module.RunReader(Path("run.jsonl"))
    assert reader.take(b'{"kind": "header", "schema": 2}')
    assert reader.take(b'{"kind": "step", "step": 1, "time": 2.0, "metrics": {"a": 1.0}}')
    assert not reader.take(b"no JSON at all")


@pytest.mark.parametrize("has_header", [False, True])
def test_a_file_without_a_header_is_hopeless_after_a_thousand_lines(has_header: bool) -> None:
    reader = reader_module.RunReader(Path("run.jsonl"))
    if has_header:
        reader.take(b'{"kind": "header", "schema": 2}')
    for _ in range(reader_module.MAX_LINES_WITHOUT_HEADER - 1):
        reader.take(b"{}")
    assert not reader.is_hopeless
    reader.take(b"{}")
    assert reader.is_hopeless is not has_header


def test_a_writer_makes_the_folders_that_are_missing_and_takes_those_that_exist(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "run.jsonl"
    for number in (1, 2):
        writer = RunWriter(path)
        writer.write(HEADER | {"number": number})
        writer.close()
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [1, 2]


# Bounds


@pytest.mark.parametrize("num_bytes_more", [-1, 0, 1, 2])
def test_the_longest_line_is_read_a_longer_one_skipped_and_the_next_one_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes_more: int
) -> None:
    long, following = encode(step_line(1) | {"note": "x" * 500}), encode(step_line(2))
    monkeypatch.setattr(reader_module, "MAX_LINE_BYTES", len(long) - num_bytes_more)
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, long, following))
    assert list(run.step) == ([1, 2] if num_bytes_more <= 0 else [2])
    assert run.skipped == ([] if num_bytes_more <= 0 else ["skipped line 2: longer than 0 MB"])


def test_by_default_a_line_may_have_four_megabytes(tmp_path: Path) -> None:
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, encode({"kind": "event", "x": "y" * (4 << 20)})))
    assert run.skipped == ["skipped line 2: longer than 4 MB"]


def test_empty_lines_are_no_fault(tmp_path: Path) -> None:
    run = load_run(write_lines(tmp_path / "run.jsonl", b"\n", HEADER, b" \t\n", step_line(1), b"\n", b"x\n", b"y\n"))
    assert list(run.step) == [1]
    assert run.skipped == ["skipped line 6 and 1 more: not JSON"]
    reader = reader_module.RunReader(Path("run.jsonl"))
    assert reader.take(b"")


@pytest.mark.parametrize(("step", "is_sound"), [((1 << 62) - 1, True), (1 << 62, False), (-(1 << 62), False)])
def test_a_step_number_has_a_bound(tmp_path: Path, step: int, is_sound: bool) -> None:
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, step_line(step)))
    assert list(run.step) == ([step] if is_sound else [])
    assert run.skipped == ([] if is_sound else ["skipped line 2: a step without number or metrics"])


def test_events_beyond_the_most_are_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_EVENTS", 2)
    events = [{"kind": "event", "event": "note", "number": number} for number in range(4)]
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, *events))
    assert [event["number"] for event in run.events] == [0, 1]
    assert run.skipped == ["skipped line 4 and 1 more: an event beyond the first 2"]


def test_a_schema_that_is_no_number_is_foreign_however_long_it_is(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=f"schema {'x' * 40};"):
        load_run(write_lines(tmp_path / "run.jsonl", HEADER | {"schema": "x" * 99}))
    with pytest.raises(RecordError, match="schema True;"):
        load_run(write_lines(tmp_path / "run.jsonl", HEADER | {"schema": True}))


def test_true_is_neither_a_number_nor_a_size(tmp_path: Path) -> None:
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER | {"world_size": True}, step_line(1, a=True, b=2)))
    assert run.header.world_size == 1
    assert run.header.world_size is not True
    assert math.isnan(run.column("a")[0])
    assert list(run.column("b")) == [2.0]


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:0", "cuda:0"), (7, "the first one")], ids=["a name", "something else"]
)
def test_an_event_may_name_the_device_that_the_model_was_moved_to(tmp_path: Path, device: Any, expected: str) -> None:
    moved = {"kind": "event", "event": "device", "device": device}
    other = {"kind": "event", "event": "note", "device": "none of these"}
    before, start = HEADER | {"device": "before", "model": "other"}, HEADER | {"device": "the first one"}
    run = load_run(write_lines(tmp_path / "run.jsonl", before, start, moved, other))
    assert [(header.model, header.device) for header in run.headers] == [("other", "before"), ("GPT", expected)]


def test_usual_lines_are_read_at_once_and_one_that_is_too_long_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_module.RunReader(Path("run.jsonl"))
    usual = [step_line(number, a=float(number)) for number in range(9)]
    for line in (HEADER, *usual):
        assert reader.take(encode(line))
    monkeypatch.setattr(reader_module, "_parse", pytest.fail)
    assert reader.take(encode(step_line(9, a=9.0)))
    monkeypatch.setattr(reader_module, "MAX_LINE_BYTES", 100)
    assert not reader.take(encode(step_line(10, a=10.0)).replace(b",", b"," + b" " * 100))
    reader.settle()
    assert list(reader.run.column("a")) == list(range(10))


def test_a_header_behind_a_thousand_foreign_lines_is_not_looked_for(tmp_path: Path) -> None:
    foreign = b"{}\n" * reader_module.MAX_LINES_WITHOUT_HEADER
    with pytest.raises(RecordError, match="no header line"):
        load_run(write_lines(tmp_path / "run.jsonl", foreign, HEADER))
    assert len(load_run(write_lines(tmp_path / "run.jsonl", foreign[3:], HEADER)).headers) == 1


def test_the_name_of_a_failure_is_cut(tmp_path: Path) -> None:
    summary = {"kind": "summary", "failure": "x" * 999}
    assert load_run(write_lines(tmp_path / "run.jsonl", HEADER, summary)).failure == "x" * 200
    assert load_run(write_lines(tmp_path / "run.jsonl", HEADER, {"kind": "summary"})).failure is None
    assert load_run(write_lines(tmp_path / "run.jsonl", HEADER)).failure is None


def test_marks_that_are_none_leave_a_step_as_it_is(tmp_path: Path) -> None:
    lines = [step_line(number) | {"marks": marks} for number, marks in enumerate(([], "warmup", ["observed", 3]))]
    run = load_run(write_lines(tmp_path / "run.jsonl", HEADER, *lines))
    assert run.marks == {2: ("observed", "3")}


def test_a_path_that_is_not_there_names_the_run_that_was_likely_meant(tmp_path: Path) -> None:
    for name in ("tiny-gpt", "tiny-gpu-x"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "run.jsonl", HEADER)
    with pytest.raises(RecordError, match=r"; did you mean .*tiny-gpt\?$"):
        load_run(tmp_path / "tiny-gtp")
    with pytest.raises(RecordError, match=r"No such file or directory$"):
        load_run(tmp_path / "nothing like it")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match=r"holds no run \(no run.jsonl\)$"):
        load_run(tmp_path / "empty")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([HEADER, {"kind": "summary"}], "ended"),
        ([HEADER, {"kind": "summary"}, b"\n\n"], "ended"),
        ([HEADER, {"kind": "summary", "failure": "KeyboardInterrupt"}], "ended"),
        ([HEADER, {"kind": "summary", "failure": "RuntimeError"}], "running"),
        ([HEADER, {"kind": "summary"}, HEADER], "running"),
        ([HEADER, b'{"kind": "summ'], "running"),
        ([HEADER, b"\xff\xfe not text"], "running"),
        ([HEADER, b"[" * 100_000], "running"),
        ([HEADER | {"schema": 7}], "foreign"),
        ([b"[]"], "foreign"),
        ([], ""),
    ],
    ids=[
        "ended",
        "and empty lines",
        "Ctrl-C",
        "failed",
        "a further start",
        "torn",
        "not UTF-8",
        "nested",
        "schema",
        "no object",
        "empty",
    ],
)
def test_what_is_at_the_path_of_a_run_that_begins(
    tmp_path: Path, content: list[dict[str, Any] | bytes], expected: str
) -> None:
    found, started_at, last_step = look_at(write_lines(tmp_path / "run.jsonl", *content))
    assert (found, last_step) == (expected, None)
    assert started_at == (
        100.0 if expected and content[0] != b"[]" else pytest.approx(time.time(), abs=600) if expected else 0.0
    )
    assert look_at(tmp_path / "missing") == ("", 0.0, None)


def test_rows_are_dealt_out_when_enough_of_them_wait() -> None:
    columns: dict[str, Any] = {}
    rows = Rows(columns, max_columns=3)
    rows.add({"a": 0.0, "b": 0.5})  # 65536 rows of two values are what may wait
    for number in range(1, (1 << 16) - 1):
        rows.add({"a": float(number), "b": 0.5})
    assert len(columns["a"]) == 0
    rows.add({"a": -1.0, "b": 0.5})
    assert len(columns["a"]) == len(columns["b"]) == 1 << 16
    assert (columns["a"][0], columns["a"][2], columns["a"][-1], columns["b"][7]) == (0.0, 2.0, -1.0, 0.5)


def test_metrics_that_have_no_column_leave_the_others_in_place() -> None:
    columns: dict[str, Any] = {}
    rows = Rows(columns, max_columns=2)
    assert rows.add({"a": 1.0, "b": 2.0})
    assert not rows.add({"c": 3.0, "b": 4.0})
    assert rows.add({"a": None, "b": "-Infinity"})
    rows.deal()
    assert list(columns) == ["a", "b"]
    assert list(columns["b"]) == [2.0, 4.0, -math.inf]
    assert [math.isnan(value) for value in columns["a"]] == [False, True, True]


def test_what_may_wait_for_the_disk_has_a_bound_that_is_reached_and_not_passed(tmp_path: Path) -> None:
    line = encode(step_line(1))
    writer = RunWriter(tmp_path / "run.jsonl", max_pending_bytes=2 * len(line))
    for _ in range(4):
        writer.write(step_line(1))
    assert writer.num_dropped == 2
    writer.close()
    assert writer.num_dropped == 0
    assert (tmp_path / "run.jsonl").read_bytes() == 2 * line


def test_a_line_longer_than_what_may_wait_is_dropped(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.jsonl", max_pending_bytes=100)
    writer.write({"x": "y" * 100})
    assert writer.num_dropped == 1


def test_the_file_may_be_read_by_all_and_written_by_its_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        RunWriter(tmp_path / "run.jsonl").close()
    finally:
        os.umask(before)
    assert (tmp_path / "run.jsonl").stat().st_mode & 0o777 == 0o644


def test_a_second_full_disk_gives_a_second_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RunWriter(tmp_path / "run.jsonl")
    for _ in range(2):
        writer.write(HEADER)
        with monkeypatch.context() as full:
            full.setattr(os, "write", _raise_oserror(errno.ENOSPC))
            assert not writer.flush()
            assert not writer.flush()
        assert writer.flush()
    writer.close()
    assert len(caplog.records) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_are_written_down_to_twenty_levels(value: float) -> None:
    def nested(depth: int, inner: Any) -> Any:
        return inner if depth == 0 else [nested(depth - 1, inner)]

    word = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    # The line is level 0 and its value level 1: twenty lists end at level 20, and what they hold lies on 21.
    assert json.loads(encode({"x": nested(20, value)})) == {"x": nested(20, word)}
    assert json.loads(encode({"x": nested(20, None), "y": value})) == {"x": nested(20, "..."), "y": word}
    assert json.loads(encode({"x": nested(19, None), "y": value})) == {"x": nested(19, None), "y": word}


def test_the_time_of_each_start_counts_from_it_to_its_last_step(tmp_path: Path) -> None:
    # 100 to 104; 200, at which a step ended that is the second start's, to 207; a third start without a step.
    times = (102.0, 104.0, 200.0, 207.0, 206.0)
    lines = [{"kind": "step", "step": place, "time": time_s, "metrics": {}} for place, time_s in enumerate(times)]
    starts = [HEADER | {"started_at": started_at} for started_at in (100.0, 200.0, 300.0)]
    run = load_run(write_lines(tmp_path / "run.jsonl", *starts, *lines))
    write_training_log(run, tmp_path / "training_log.json")
    text = (tmp_path / "training_log.json").read_text()
    assert json.loads(text)["total_training_time"] == 4.0 + 7.0
    assert text.startswith('{\n "run"')  # one blank an indent: it is read by people, too


def test_a_log_that_cannot_be_written_leaves_no_half_of_it(tmp_path: Path) -> None:
    (tmp_path / "training_log.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_training_log(make_run(tmp_path), tmp_path / "training_log.json")
    assert not list(tmp_path.glob("training_log.json.tmp"))


def test_what_the_loop_tells_is_written_without_names_and_read_with_them(tmp_path: Path) -> None:
    told = {"training/loss": 2.5, "training/lr": 0.1, "training/epoch": 3.0, "training/grad_norm": math.inf}
    some = {"training/epoch": 4.0, "training/grad_norm": 0.5}  # without a loss: by name, so that no place is empty
    lines = [{"kind": "header", "schema": SCHEMA_VERSION, "started_at": 1.0}]
    for number, metrics in enumerate((told, {**told, "mine": 7.0}, some, {}), start=1):
        lines.append({"kind": "step", "step": number, "time": 2.0 + number, "row": [0, 1000], "metrics": metrics})
    writer = RunWriter(tmp_path / "run.jsonl")
    for line in lines:
        writer.write(line)
    writer.close()
    first, second, third, _ = (json.loads(raw) for raw in (tmp_path / "run.jsonl").read_bytes().splitlines()[1:])
    assert first["loop"] == [2.5, 0.1, 3.0, "Infinity"]
    assert "metrics" not in first
    assert second["metrics"] == {"mine": 7.0}
    assert third["metrics"] == some
    run = load_run(tmp_path)
    columns = {key: run.column(key) for key in told}
    for place, expected in enumerate((told, told, some, {})):
        assert {key: column[place] for key, column in columns.items() if not math.isnan(column[place])} == expected


def test_a_step_of_a_text_model_with_all_that_its_loop_tells_takes_at_most_200_bytes() -> None:
    times_ns = [400123456, 1234567, 123456, 123456789, 246913578, 12345678, 0]
    row = [1, *times_ns, 2, 16384, 16384, 67112960, 134225920, 134225920]
    assert dict(zip(ROW_NAMES, row, strict=False))["pairs_run"] == 134225920
    told = {"training/loss": 2.345678, "training/lr": 0.0003, "training/epoch": 0, "training/grad_norm": 1.2345}
    line: dict[str, Any] = {"kind": "step", "step": 1_000_000, "time": 1795065115.969, "row": row, "metrics": told}
    assert len(encode(without_names(line))) <= 200  # so that a million of them take 200 MB
    del line["metrics"]
    assert len(encode(without_names(line))) <= 160  # without the loop's own numbers


def test_a_line_with_a_row_is_a_step_and_any_other_says_what_it_is(tmp_path: Path) -> None:
    step = {"kind": "step", "step": 7, "time": 2.0, "row": [0, 1000]}
    path = tmp_path / "run.jsonl"
    written = encode(without_names(step))
    assert json.loads(written) == {"step": 7, "time": 2.0, "row": [0, 1000]}
    path.write_bytes(
        encode(HEADER) + written + b'{"row": [0, 1e3], "step": 8, "new": 1}\n' + b'{"step": 9, "time": 3.0}\n'
    )
    run = load_run(path)
    assert list(run.step) == [7, 8]
    assert list(run.column("perf/step_time")) == [1e-6, 1e-6]
    assert run.skipped == ["skipped line 4: of no known kind"]
