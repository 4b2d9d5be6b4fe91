"""Reading trace files: in pieces, within bounds, and however damaged they are."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopmeter.errors import RecordError, TraceError
from flopmeter.record import load_run
from flopmeter.traces import events, load_any, load_trace
from flopmeter.traces.events import MAX_EVENT_BYTES, EventReader, TraceEvent, trace_text
from made_traces import MadeTrace

ADD = "void at::native::vectorized_elementwise_kernel<CUDAFunctor_add<float>>(int)"
NAMES = ["plain", "objects", 'looks like an end: }, {"ph" ], "traceEvents": [', 'escapes \\ " \u00e9 \u4e2d']
AWKWARD: list[dict[str, Any]] = [
    *({"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": 2.5, "tid": 3} for ts, name in enumerate(NAMES, 1)),
    {"ph": "f", "id": 7, "pid": "", "tid": "Spans", "ts": 5, "cat": "ac2g", "name": "ac2g", "bp": "e"},
]
AWKWARD[1]["args"] = {"list": [{"a": 1}, {"b": 2}]}


def read(*pieces: bytes) -> tuple[list[TraceEvent], EventReader]:
    reader = EventReader(pieces, "made.json")
    return [event for batch in reader for event in batch], reader


def made() -> MadeTrace:
    """Two steps of 100 with one product and one kernel each."""
    trace = MadeTrace(rank=0, world_size=1)
    for number in range(2):
        start = 100 * number
        trace.step(number, start, 100)
        trace.op("aten::mm", start + 5, 20, [[6, 7], [7, 8]], ["", ""])
        trace.kernel("ampere_sgemm_32x32", start + 30, 60, launch=start + 10)
    return trace


# Pieces.


@given(cuts=st.lists(st.integers(0, 2000), max_size=20), indent=st.sampled_from([None, 2]))
def test_events_do_not_depend_on_where_the_text_is_cut(cuts: list[int], indent: int | None) -> None:
    document = {"schemaVersion": 1, "traceEvents": AWKWARD, "deviceProperties": [{"id": 0}, {"id": 1}]}
    data = json.dumps(document, indent=indent, ensure_ascii=False).encode()
    bounds = [0, *sorted(cuts), len(data)]
    events, reader = read(*(data[a:b] for a, b in pairwise(bounds)))
    assert [event.name for event in events] == [event["name"] for event in AWKWARD]
    assert [event.ts for event in events] == [1, 2, 3, 4, 5]
    assert reader.problems == []
    assert reader.head.device_properties == [{"id": 0}, {"id": 1}]


def test_a_bare_list_of_events_is_a_trace_too() -> None:
    events, reader = read(b"\xef\xbb\xbf " + json.dumps(AWKWARD).encode())
    assert len(events) == len(AWKWARD)
    assert reader.problems == []


def test_an_event_with_broken_text_costs_no_other_event() -> None:
    good = json.dumps(AWKWARD[0]).encode()
    not_utf8 = good.replace(b"plain", b"pl\xff\xfen")
    not_a_number = good.replace(b"2.5", b"NaN")
    torn = good.replace(b'"ts": 1', b'"ts": :1')
    events, reader = read(b'{"traceEvents": [' + b", ".join([good, not_utf8, not_a_number, torn, good]) + b"]}")
    assert events[0].dur == 2.5
    assert events[-1].name == "plain"
    assert len(events) == 4
    assert reader.problems == ["1 stretches of it are damaged and left out"]


def test_gzip_members_are_joined_and_padding_is_ignored(tmp_path: Path) -> None:
    data = made().text().encode()
    path = tmp_path / "two.json.gz"
    path.write_bytes(gzip.compress(data[:500]) + gzip.compress(data[500:]) + b"\0" * 100)
    problems: list[str] = []
    assert b"".join(trace_text(path, problems)) == data
    assert problems == []


# Bounds.


def test_a_gzip_bomb_stops_at_the_bound_and_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "UNSUSPECTED_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (32 << 20)))  # a thousand times its size
    sizes: list[int] = []
    with pytest.raises(TraceError, match=r"holds more than 6\.\d+ MB of text in 3\d\.\d kB.*max_text_bytes"):
        sizes.extend(map(len, trace_text(path, [])))
    assert 0 < sum(sizes) < 8 << 20


def test_the_bound_can_be_stated(tmp_path: Path) -> None:
    path = made().write(tmp_path)
    with pytest.raises(TraceError, match="more than 1 kB"):
        load_trace(path, max_text_bytes=1024)
    assert load_trace(path, max_text_bytes=1 << 20).numbers == (0, 1)


def test_an_event_without_end_is_refused_with_the_bound() -> None:
    pieces = [b'{"traceEvents": [{"name": "', *([b"a" * (4 << 20)] * 5)]
    with pytest.raises(TraceError, match="more than 16 MB"):
        read(*pieces)
    assert MAX_EVENT_BYTES == 16 << 20


def test_nesting_without_end_is_skipped() -> None:
    deep = b'{"ph": "X", "args": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    events, reader = read(b'{"traceEvents": [' + deep + b", " + json.dumps(AWKWARD[0]).encode() + b"]}")
    assert [event.name for event in events][-1] == "plain"
    assert reader.num_damaged <= 1


# Damage.


def test_a_truncated_trace_gives_what_is_left_and_says_so(tmp_path: Path) -> None:
    whole = made().write(tmp_path, "whole.json.gz").read_bytes()
    text_bytes = gzip.decompress(whole)
    # Plain text, cut inside the second step's kernel.
    cut = tmp_path / "cut.json"
    cut.write_bytes(text_bytes[: text_bytes.rindex(b'"ampere_sgemm_32x32"')])
    trace = load_trace(cut)
    assert trace.numbers == (0,)
    assert any("cut off" in note for note in trace.notes)
    assert any("1 of its steps" in note for note in trace.notes)
    # Compressed, with its last bytes gone.
    torn = tmp_path / "torn.json.gz"
    torn.write_bytes(whole[:-12])
    assert any("cut off" in note for note in load_trace(torn).notes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a profiler trace"),
        (b"hello", "not a profiler trace"),
        (b'{"traceEvents": []}', "nothing to analyse"),
        (b'{"kind": "header"}', "not a profiler trace"),
        (b"\x1f\x8b garbage that is not deflate", "not a profiler trace|damaged"),
        (gzip.compress(b"\0" * 5000, mtime=0), "not a profiler trace"),
    ],
)
def test_what_is_no_trace_is_one_line_of_error(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file.json.gz"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=message) as caught:
        load_trace(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_errors_of_ours(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(TraceError, match="cannot read the trace"):
            load_trace(path)


def survives(path: Path) -> None:
    """Read it through everything that a user would see; anything but our own error escapes."""
    try:
        trace = load_trace(path)
    except TraceError:
        return
    trace.as_run().waterfall()


def damage(data: bytes, seed: int, num_bytes: int) -> bytes:
    """Other bytes at some places, now and then a stretch missing or repeated."""
    source = random.Random(seed)
    result = bytearray(data)
    for _ in range(num_bytes):
        place = source.randrange(len(result))
        kind = source.randrange(10)
        if kind == 0:
            del result[place : place + source.randrange(1, 200)]
        elif kind == 1:
            result[place:place] = result[place : place + source.randrange(1, 200)]
        else:
            result[place] = source.choice(b'{}[]",:0123456789.-eE\\ax\xff\x00')
        if not result:
            result = bytearray(b"[")
    return bytes(result)


def test_arguments_that_are_no_text_cost_their_operator_only(tmp_path: Path) -> None:
    path = tmp_path / "no_text.json"
    path.write_bytes(made().text().encode().replace(b'"float"', b'"flo\xff"'))
    trace = load_trace(path)
    assert trace.ranks[0].counting.uncounted
    assert trace.as_run().waterfall().parts


FUZZ = settings(max_examples=150)


@FUZZ
@given(seed=st.integers(0, 1 << 32), num_bytes=st.integers(1, 12))
def test_damaged_text_gives_a_partial_result_or_our_error(tmp_path: Path, seed: int, num_bytes: int) -> None:
    path = tmp_path / "fuzzed.json"
    path.write_bytes(damage(made().text().encode(), seed, num_bytes))
    survives(path)


@FUZZ
@given(seed=st.integers(0, 1 << 32), num_bytes=st.integers(1, 3))
def test_damaged_compressed_data_gives_a_partial_result_or_our_error(tmp_path: Path, seed: int, num_bytes: int) -> None:
    path = tmp_path / "fuzzed.json.gz"
    path.write_bytes(damage(gzip.compress(made().text().encode(), mtime=0), seed, num_bytes))
    survives(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(["ph", "cat", "name", "ts", "dur", "tid", "args"])
ARGS = st.sampled_from(["correlation", "device", "Sequence number", "Input Dims", "Input type", "Concrete Inputs"])


@FUZZ
@given(place=st.integers(0, 7), key=KEYS, arg=ARGS, value=VALUES, is_arg=st.booleans(), head=VALUES)
def test_any_value_in_any_place_is_survived(
    tmp_path: Path, place: int, key: str, arg: str, value: Any, is_arg: bool, head: Any
) -> None:
    trace = made()
    trace.events[place][key] = value
    if is_arg:
        trace.events[place]["args"] = {**trace.events[(place + 1) % 8].get("args", {}), arg: value}
    trace.head |= {"deviceProperties": head, "distributedInfo": head, "baseTimeNanoseconds": value}
    path = trace.write(tmp_path)
    survives(path)


# The command.


def flopmeter(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flopmeter", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_prints_the_number_and_the_kernels(tmp_path: Path) -> None:
    answer = flopmeter(made().write(tmp_path, "made.json.gz"), "-o", tmp_path / "page.html")
    assert answer.returncode == 0, answer.stderr
    assert "NVIDIA A100-SXM4-80GB" in answer.stdout
    assert "Time by kernel" in answer.stdout
    found = json.loads(flopmeter(tmp_path / "made.json.gz", "--json").stdout)
    assert found["work"]["model_flop"] == 2 * 6 * 7 * 8
    # Windows of 90 and 110 (30 to 90 and 130 to 190 busy, and the last ends with its annotation): 120 of 200 busy.
    idle = [part["share"] for part in found["waterfall"]["parts"] if part["name"] in ("launch_gaps", "queued_idle")]
    assert sum(idle) == pytest.approx(0.4)


def test_the_command_refuses_a_peak_in_another_unit(tmp_path: Path) -> None:
    answer = flopmeter(made().write(tmp_path), "--peak-flop-per-s", "312")
    assert answer.returncode == 2
    assert "--peak-flop-per-s is in FLOP/s: 312 TFLOP/s is 312e12" in answer.stderr


def test_the_command_takes_several_ranks_or_their_folder(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    files = []
    for rank in (0, 1):
        trace = made()
        trace.head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
        files.append(trace.write(data, f"rank{rank}.json"))
    for arguments in (files, [data]):
        answer = flopmeter(*arguments, "--json")
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout)["about"]["world_size"] == 2


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "no.json"
    path.write_text("nothing")
    answer = flopmeter(path)
    assert answer.returncode == 1
    assert answer.stderr.count("\n") == 1
    assert "neither a run file nor a profiler trace" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_reading_a_trace_imports_no_torch(tmp_path: Path) -> None:
    path = made().write(tmp_path)
    code = f"import sys, flopmeter.traces; flopmeter.traces.load_any({str(path)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_bomb_of_these_tests_is_one() -> None:
    assert len(zlib.compress(b" " * (1 << 20))) * 900 < 1 << 20


def test_the_benchmark_runs_and_ends_with_json(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "traces.py"
    command = [sys.executable, str(script), str(made().write(tmp_path)), "--short", "--hta-python", "none"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    (result,) = json.loads(answer.stdout.splitlines()[-1])["files"]
    # From the first kernel to the end of the last that an earlier step launched: one kernel, nothing else.
    assert result["shares"]["ours, their way"] == {"idle": 0.0, "compute": 1.0, "other": 0.0, "overlap": None}


@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02" * 50, b"hello"])
def test_a_file_of_no_known_kind_is_said_to_be_neither(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bin.dat").write_bytes(content)
    with pytest.raises(RecordError, match=r"bin\.dat is neither a run file nor a profiler trace"):
        load_any(tmp_path / "bin.dat")


def test_a_folder_of_runs_names_those_that_it_holds(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "run.jsonl").touch()
    with pytest.raises(RecordError, match=r"holds some \(run-0, .*, run-4 and 2 more\): name one, such as .*run-6$"):
        load_any(tmp_path)


def test_a_folder_without_any_run_says_which_file_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"holds no run \(no run\.jsonl\)$"):
        load_any(tmp_path)


@pytest.mark.parametrize("name", ["mien", "mine2"])
def test_a_misspelt_run_is_told_with_the_one_beside_it(tmp_path: Path, name: str) -> None:
    for other in ("mine", "something_else"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "run.jsonl").touch()
    for load in (load_any, load_run):
        with pytest.raises(RecordError, match=r"cannot read .*: No such file or directory; did you mean .*/mine\?$"):
            load(tmp_path / name)
    with pytest.raises(RecordError, match=r"No such file or directory$"):
        load_any(tmp_path / "xyz")


def test_what_is_neither_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Some text\n")
    (tmp_path / "pyproject.toml").write_text("[build-system]\n")
    for name in ("README.md", "pyproject.toml"):
        with pytest.raises(RecordError, match="neither a run file nor a profiler trace: ") as found:
            load_any(tmp_path / name)
        assert str(found.value).count(name) == 1


def test_a_run_given_as_a_trace_is_told_with_the_command_for_runs(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").touch()
    with pytest.raises(TraceError, match=f"is a run, not a trace: flopmeter report {tmp_path}$"):
        load_trace(tmp_path)
