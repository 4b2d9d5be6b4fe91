"""Whatever lies in a file or comes over the network: a reader answers in a line, at once, and in little memory."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from flopmeter.cli import main

STARTED_AT = 1_700_000_000.0
HEADER = {
    "kind": "header", "schema": 2, "run_id": "a1", "started_at": STARTED_AT, "host": "node7", "model": "GPT",
    "num_parameters": 1000, "device": "cpu", "mode": "smart", "convention": "exact", "world_size": 1,
    "peak": {"fp32": {"device": "Test CPU", "flop_per_s": 1e12, "source": "measured", "note": ""}},
    "versions": {"flopmeter": "0.1.0", "torch": "2.13.0"},
}  # fmt: skip
SHARES = ("data_wait", "forward", "backward", "optimizer")


def lines_of_a_run(num_steps: int = 60) -> list[dict[str, Any]]:
    """A run with every kind of line that a reader looks into."""
    lines = [dict(HEADER)]
    for step in range(1, num_steps + 1):
        metrics = {
            "training/loss": 2.0 + 1 / step, "perf/step_time": 0.1 + step % 7 / 1000, "perf/mfu": 0.3, "perf/hfu": 0.33,
            "perf/model_flop": 3e10, "perf/tokens_per_second": 1e4, "perf/steps_per_second": 10.0,
            **{f"perf/{name}_share": 0.25 for name in SHARES},
        }  # fmt: skip
        lines.append({"kind": "step", "step": step, "time": STARTED_AT + step / 10, "metrics": metrics})
    more: list[dict[str, Any]] = [
        {"event": "pause", "name": "eval", "duration_s": 0.5},
        {"event": "warning", "message": "something"},
        {"event": "count", "model_flop": 3e10, "forward_flop": 1e10, "backward_flop": 2e10, "recompute_flop": 0.0,
         "hardware_flop": 3e10, "by_dtype": {"fp32": 3e10}, "by_op": {"mm": 3e10}, "by_module": {"layers.0": 3e10},
         "coverage": 1.0, "uncounted": {}, "method": "observed", "convention": "exact", "left_out": []},
        {"event": "gc", "num_collections": 3, "total_s": 0.1, "longest_s": 0.05, "num_steps": 50},
        {"event": "profile", "step_s": 0.1, "typical_step_s": 0.1, "forward_s": 0.03, "backward_s": 0.05},
        {"event": "evaluation", "step": 10, "metrics": {"eval/loss": 1.0}},
        {"event": "metrics", "step": 10, "metrics": {"dataset/web/loss": 1.0}},
    ]  # fmt: skip
    lines += [{"kind": "event", "time": STARTED_AT + 6, "after_step": 30, **event} for event in more]
    lines.append({"kind": "summary", "time": STARTED_AT + 7, "num_steps": num_steps, "metrics": {"perf/mfu": 0.3}})
    return lines


def write(folder: Path, lines: list[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "run.jsonl").write_text("\n".join(texts) + "\n")
    return folder


Answer = tuple[int, str, str]
Ask = Callable[..., Answer]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """The command, in this process: exit code, stdout, stderr. An exception that comes out is a traceback."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["flopmeter", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def assert_sound(answer: Answer) -> None:
    """An answer, or one line that says what is wrong with the file."""
    code, _, err = answer
    assert "this is a bug" not in err
    assert code in (0, 1, 2)
    if code:
        assert re.fullmatch(r"flopmeter: error: .+\n", err)


# A mistake of ours

BROKEN = """
import flopmeter.diagnosis, flopmeter.report._model
def fail(*_, **__): raise ZeroDivisionError("a part that nobody\\nforesaw")
flopmeter.diagnosis.diagnose = flopmeter.report._model.diagnose = fail
from flopmeter.cli import main
main()
"""


@pytest.mark.parametrize("is_debugged", [False, True])
def test_a_mistake_of_ours_is_one_line_that_says_so(tmp_path: Path, is_debugged: bool) -> None:
    run = write(tmp_path, lines_of_a_run())
    debug = ["--debug"] if is_debugged else []
    arguments = [sys.executable, "-c", BROKEN, *debug, "report", str(run), "--json"]
    answer = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    *before, last = answer.stderr.splitlines()
    assert answer.returncode == 1
    assert last.startswith("flopmeter: this is a bug: ZeroDivisionError: a part that nobody foresaw; ")
    assert "--debug" in last
    assert any("Traceback" in line for line in before) == is_debugged
    assert is_debugged or not before


# Absurd numbers in run files

ABSURD = (
    1e308, -1e308, 5e-324, -5e-324, 1e-200, 1e200, 10**400, -(10**400), 2**63, 0, -1, 1e18, None, True, "x", "", [], {},
    [1e308] * 3, {"a": 1e308}, "NaN", "Infinity", float("nan"), float("inf"), -float("inf"), "\x00\ud800", [[[]]],
)  # fmt: skip
STEP_KEYS = ("perf/mfu", "perf/step_time", "perf/model_flop", "perf/forward_share", "perf/tokens_per_second")


def changed_everywhere(key: str, value: Any) -> list[Any]:
    lines = lines_of_a_run()
    for line in lines:
        if line.get("kind", "step") == "step":
            line["metrics"][key] = value
    return lines


@pytest.mark.parametrize("key", STEP_KEYS)
@pytest.mark.parametrize("value", [1e308, 5e-324, 10**400])
def test_steps_with_absurd_numbers_are_read(tmp_path: Path, ask: Ask, key: str, value: Any) -> None:
    sound = write(tmp_path / "sound", lines_of_a_run())
    absurd = write(tmp_path / "absurd", changed_everywhere(key, value))
    for arguments in (
        ("report", absurd, "-o", tmp_path / "page.html"),
        ("report", absurd, "--json"),
        ("report", absurd, "--format", "md"),
        ("compare", sound, absurd),
        ("compare", absurd, sound, "--json"),
    ):
        answer = ask(*arguments)
        assert_sound(answer)
        assert answer[0] == 0


def test_a_run_of_the_smallest_numbers_there_are_is_compared(tmp_path: Path, ask: Ask) -> None:
    lines = lines_of_a_run()
    for line in lines:
        if line.get("kind", "step") == "step":
            line["metrics"] = dict.fromkeys(line["metrics"], 5e-324)
    tiny, sound = write(tmp_path / "tiny", lines), write(tmp_path / "sound", lines_of_a_run())
    for runs in ((tiny, sound), (sound, tiny), (tiny, write(tmp_path / "other", lines))):
        assert_sound(ask("compare", *runs))


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e308])
def test_a_header_with_absurd_sizes_is_read(tmp_path: Path, ask: Ask, value: Any) -> None:
    header = {**HEADER, "num_parameters": value, "world_size": value, "started_at": value}
    run = write(tmp_path, [header, *lines_of_a_run()[1:]])
    for arguments in (("report", run, "-o", tmp_path / "page.html"), ("report", run, "--format", "md")):
        answer = ask(*arguments)
        assert_sound(answer)
        assert answer[0] == 0


def mutated(source: random.Random) -> list[Any]:
    """A run file with some of its values, lines or bytes replaced."""
    lines: list[Any] = lines_of_a_run(source.choice((0, 1, 2, 25, 60)))
    for _ in range(source.choice((1, 2, 8))):
        line = lines[source.randrange(len(lines))]
        places: list[tuple[Any, Any]] = []
        waiting = [line] if isinstance(line, dict) else []
        while waiting:
            here = waiting.pop()
            for key, value in here.items():
                places.append((here, key))
                if isinstance(value, dict):
                    waiting.append(value)
        if places:
            here, key = source.choice(places)
            here[key] = source.choice(ABSURD)
    if source.random() < 0.3:
        key, value = source.choice([*STEP_KEYS, "new"]), source.choice(ABSURD)
        for line in lines:
            if line.get("kind") == "step" and isinstance(line.get("metrics"), dict):
                line["metrics"][key] = value
    if source.random() < 0.2:
        source.shuffle(lines)
    texts = [json.dumps(line) for line in lines]
    if source.random() < 0.2:
        texts[source.randrange(len(texts))] = "[" * 100_000
    if source.random() < 0.2:
        texts.append('{"kind": "event", "event": "count", "by_module": ' + '{"a":' * 900 + "1" + "}" * 900 + "}")
    return texts


@pytest.mark.parametrize("seed", range(5))
def test_whatever_a_run_file_holds_every_reader_ends_in_an_answer_or_a_line(
    tmp_path: Path, ask: Ask, seed: int
) -> None:
    source = random.Random(seed)
    sound = write(tmp_path / "sound", lines_of_a_run())
    for number in range(6):
        run = write(tmp_path / str(number), mutated(source))
        assert_sound(ask("report", run, "--json"))
        assert_sound(ask("report", run, "-o", tmp_path / "page.html"))
        assert_sound(ask("compare", *source.sample((sound, run), 2)))


# Files that are none

READERS = [
    ("report", "{file}", "--json"), ("report", "{file}", "{file}"), ("compare", "{file}", "{file}"),
    ("mfu", "--model", "{file}", "--seq", "8", "--gpus", "1", "--tokens-per-second", "1", "--peak-flop-per-s", "1e12"),
    ("count", "{file}"),
]  # fmt: skip


def little_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))


def no_files(folder: Path) -> dict[str, Path]:
    """What is not an ordinary file, and an ordinary one of 100 GB that holds nothing."""
    found = {name: folder / name for name in ("a pipe", "a pipe in a folder", "a device", "a folder", "run.jsonl")}
    os.mkfifo(found["a pipe"])
    found["a device"].symlink_to("/dev/zero")
    for name in ("run.jsonl", "config.json"):
        for kind, make in (("a pipe in a folder", os.mkfifo), ("a folder", os.mkdir)):
            found[kind].mkdir(exist_ok=True)
            make(found[kind] / name)
    with found["run.jsonl"].open("wb") as file:
        file.truncate(100 << 30)
    return found


EACH = """
import contextlib, io, json, sys
from flopmeter.cli import main
for line in json.loads(sys.argv[1]):
    sys.argv[1:] = line
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([line[0], code, err.getvalue()]), flush=True)
"""


def test_what_is_no_ordinary_file_is_refused_at_once(tmp_path: Path) -> None:
    """In a process of its own: on a pipe a reader would wait for ever, and from a hole read for minutes."""
    arguments = [
        [text.format(file=path) for text in reader]
        for kind, path in no_files(tmp_path).items()
        for reader in READERS
        if (kind, reader[0]) != ("run.jsonl", "trace")  # a trace may be so long: 32 GB are read before it is refused
    ]
    answer = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        preexec_fn=little_memory,
    )
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [name for name, _, _ in found] == [line[0] for line in arguments], answer.stderr
    for (_, code, err), line in zip(found, arguments, strict=True):
        assert code in (1, 2), line
        assert re.fullmatch(r"flopmeter: error: .+\n", err), (line, err)
        assert len(err) < 600


# Sizes and configs

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


def config(folder: Path, text: str) -> Path:
    path = folder / "config.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 100_000, id="nested lists"),
        pytest.param('{"a":' * 100_000, id="nested objects"),
        pytest.param(json.dumps({**LLAMA, "num_hidden_layers": 10**6}), id="a million layers"),
        pytest.param(json.dumps({**LLAMA, "num_hidden_layers": 10**300}), id="10^300 layers"),
        pytest.param(json.dumps({"model_type": "gpt2", "n_layer": 10**5}), id="layers by another name"),
        pytest.param(json.dumps({**LLAMA, "hidden_size": 10**300}), id="10^300 wide"),
        pytest.param(json.dumps({**LLAMA, "num_attention_heads": 0}), id="no heads"),
    ],
)
def test_a_config_beyond_reason_is_refused_in_a_line(tmp_path: Path, ask: Ask, text: str) -> None:
    path = config(tmp_path, text)
    for arguments in (("count", path), ("mfu", "--model", path, *MFU)):
        answer = ask(*arguments)
        assert_sound(answer)
        assert answer[0] != 0 or "million" in text or arguments[0] == "mfu"
        assert len(answer[2]) < 600


MFU = ("--seq", "8", "--gpus", "1", "--tokens-per-second", "1", "--peak-flop-per-s", "1e12")


@pytest.mark.parametrize("architectures", [[1, None], ["__doc__"], ["AutoConfig"], [["LlamaForCausalLM"]], {"a": 1}])
def test_architectures_that_name_no_model_are_passed_over(tmp_path: Path, ask: Ask, architectures: Any) -> None:
    answer = ask("count", config(tmp_path, json.dumps({**LLAMA, "architectures": architectures})), "--seq", 16)
    assert_sound(answer)


@pytest.mark.parametrize(
    "sizes",
    [("--seq", 10**12), ("--seq", 10**300), ("--seq", 10**9), ("--batch", 10**9), ("--batch", 10**6, "--seq", 10**6)],
)
def test_a_batch_that_no_memory_holds_is_refused_before_it_is_made(tmp_path: Path, ask: Ask, sizes: Any) -> None:
    answer = ask("count", config(tmp_path, json.dumps(LLAMA)), *sizes)
    assert_sound(answer)
    assert answer[0] in (1, 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ask("count", config(tmp_path, json.dumps(LLAMA)), *sizes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # kB


@pytest.mark.parametrize(
    "change",
    [
        ("--seq", 10**300), ("--seq", 10**400), ("--gpus", 10**400), ("--gpus", 0), ("--tokens-per-second", "1e308"),
        ("--tokens-per-second", "nan"), ("--peak-flop-per-s", "1e308"), ("--peak-flop-per-s", "inf"),
    ],
)  # fmt: skip
def test_sizes_beyond_reason_are_refused_by_mfu(tmp_path: Path, ask: Ask, change: tuple[str, Any]) -> None:
    options = dict(zip(MFU[::2], MFU[1::2], strict=True)) | {change[0]: change[1]}
    answer = ask("mfu", "--model", "llama-3.1-8b", *(text for option in options.items() for text in option), "--json")
    assert_sound(answer)
    if answer[0] == 0:
        json.loads(answer[1], parse_constant=pytest.fail)


# The server

SERVER = """
import os, sys
outside, armed = sys.argv.pop(), sys.argv.pop()
def swap(event, arguments):
    # Called before the file is opened: nothing can be nearer to the moment.
    if event == "open" and "mine" in os.path.abspath(str(arguments[0])).split(os.sep) and os.path.exists(armed):
        os.remove(armed)
        os.rename("mine", ".moved")
        os.symlink(outside, "mine")
sys.addaudithook(swap)
from flopmeter.cli import main
main()
"""


@contextmanager
def serving(root: Path, *arguments: str) -> Iterator[str]:
    program = [sys.executable, *(arguments or ("-m", "flopmeter")), "serve", str(root), "--port", "0"]
    extra = [str(root.parent / "armed"), str(root.parent / "outside")] if arguments else []
    with subprocess.Popen([*program, *extra], stdout=subprocess.PIPE, text=True, cwd=root) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://[^/]+:(\d+)/", server.stdout.readline())
            assert found is not None
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            server.terminate()
            server.wait(30)


def get(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_idle_connections_lock_nobody_out_and_end(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "mine", lines_of_a_run())
    with serving(tmp_path / "runs") as address:
        port = int(address.rpartition(":")[2])
        idle = []
        try:
            for number in range(230):
                connection = socket.create_connection(("127.0.0.1", port), timeout=30)
                idle.append(connection)
                if number % 2:
                    connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: ")
            status, text = get(address)
            assert status == 200
            assert "mine" in text
            # A second request that stays half after a whole one is no better than a first.
            last = idle[-1]
            last.sendall(b"x\r\n\r\n")
            assert last.recv(1 << 20).startswith(b"HTTP/1.1 200")
            last.sendall(b"GET / HTTP/1.1\r\n")
            for connection in idle:  # closed by the server; a connection that it keeps fails here by its timeout
                with suppress(ConnectionResetError):
                    while connection.recv(1 << 20):
                        pass
        finally:
            for connection in idle:
                connection.close()
        assert get(address)[0] == 200


def test_a_folder_that_is_swapped_for_a_link_while_it_is_read_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "mine" / "deep", lines_of_a_run())
    outside = [{**HEADER, "model": "OutsideModel"}, *lines_of_a_run()[1:]]
    write(tmp_path / "outside" / "deep", outside)
    root = tmp_path / "runs"
    with serving(root, "-c", SERVER) as address:
        (name,) = re.findall(r'href="/run/(\w+)"', get(address)[1])
        (tmp_path / "armed").touch()
        status, text = get(f"{address}/run/{name}")
        assert not (tmp_path / "armed").exists()
        assert "OutsideModel" not in text
        assert status == 404
        assert "OutsideModel" not in get(address)[1]
