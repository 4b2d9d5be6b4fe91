from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from flopmeter.errors import RecordError
from flopmeter.record import Run, load_run
from flopmeter.record.reader import MAX_LINES_WITHOUT_HEADER
from flopmeter.record.writer import encode
from flopmeter.serve import _Views, ago, make_app, trend
from flopmeter.serve import runs as runs_module
from flopmeter.serve import tail as tail_module
from flopmeter.serve.guard import is_loopback
from flopmeter.serve.runs import TAIL_BYTES, Glance, Runs, glance_at
from flopmeter.serve.tail import Tail
from made_runs import HEADER, STARTED_AT, run_lines, step_line, write_run

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")


@contextmanager
def serving(root: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A real server process, and the address that it printed."""
    command = [sys.executable, "-m", "flopmeter", "serve", str(root), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stderr.read()
        yield found[0], process
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
        process.stderr.close()


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers = response.status, response.headers
        self.text = response.read().decode().replace("&nbsp;", " ")


def ask(address: str, path: str = "/", method: str = "GET", **headers: str) -> Answer:
    """A request as it is, with nothing tidied up on the way; `_` in a header's name stands for `-`."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return Answer(connection.getresponse())
    finally:
        connection.close()


# Reading on


def whole(run: Run) -> dict[str, Any]:
    """Everything that was read, in a form in which NaN equals NaN."""
    return {
        "headers": run.headers,
        "step": list(run.step),
        "columns": {key: [str(value) for value in column] for key, column in run.columns.items()},
        "marks": run.marks,
        "events": run.events,
        "summary": run.summary,
    }


def read_on(tail: Tail) -> dict[str, Any]:
    with tail.run() as (run, _):
        return whole(run)


def revision(tail: Tail) -> str:
    with tail.run() as (_, text):
        return text


def test_a_file_that_arrives_in_pieces_of_any_size_is_the_same_run(tmp_path: Path) -> None:
    lines = run_lines([0.1, 0.2, 0.3])
    lines.insert(3, {"kind": "event", "event": "pause", "name": "eval", "duration_s": 1.0})
    data = b"".join(encode(line) for line in lines) + b"not json\n" + encode(HEADER | {"run_id": "b2"})
    path = tmp_path / "run.jsonl"
    path.write_bytes(data[:400])
    tail = Tail(path)
    for end in range(400, len(data) + 37, 37):
        with path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(data[file.tell() : end])
        read_on(tail)
    expected = load_run(path)
    assert read_on(tail) == whole(expected)
    with tail.run() as (run, _):
        assert run.skipped == expected.skipped == ["skipped line 8: not JSON"]


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each piece had that was read; the places that are compared are no such piece."""
    found, pread = [], os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        data = pread(descriptor, size, offset)
        found.append(len(data) if size == tail_module.CHUNK_BYTES else 0)
        return data

    monkeypatch.setattr(tail_module.os, "pread", counted)
    return found


def test_no_byte_is_read_twice(tmp_path: Path, read_bytes: list[int]) -> None:
    path = write_run(tmp_path, run_lines([0.1] * 50, is_finished=False))
    tail = Tail(path)
    for number in range(51, 100):
        with path.open("ab") as file:
            file.write(encode(step_line(number, 0.1, STARTED_AT + number)))
        assert len(read_on(tail)["step"]) == number
        read_on(tail)
    assert sum(read_bytes) == path.stat().st_size


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    line = encode(step_line(3, 0.1, STARTED_AT + 3))
    path = write_run(tmp_path, [*run_lines([0.1, 0.1], is_finished=False), line[:30]])
    tail = Tail(path)
    assert read_on(tail)["step"] == [1, 2]
    with path.open("ab") as file:
        file.write(line[30:])
    assert read_on(tail)["step"] == [1, 2, 3]


def test_the_revision_changes_with_the_run_and_only_then(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_lines([0.1], is_finished=False))
    tail = Tail(path)
    first = revision(tail)
    assert revision(tail) == first
    with path.open("ab") as file:
        file.write(encode(step_line(2, 0.1, STARTED_AT)))
    assert revision(tail) != first


@pytest.mark.parametrize("how", ["replaced", "cut short", "rewritten", "rewritten, longer"])
def test_a_file_that_is_not_the_same_any_more_is_read_anew(tmp_path: Path, how: str) -> None:
    path = write_run(tmp_path, run_lines([0.1] * 20))
    tail = Tail(path)
    assert len(read_on(tail)["step"]) == 20
    num = {"replaced": 20, "cut short": 5, "rewritten": 20, "rewritten, longer": 40}[how]
    data = b"".join(encode(line) for line in run_lines([0.2] * num, run_id="other"))
    if how == "replaced":
        other = tmp_path / "new"
        other.write_bytes(data)
        os.replace(other, path)
    else:
        path.write_bytes(data)
    assert read_on(tail) == whole(load_run(path))
    assert read_on(tail)["headers"][0].run_id == "other"


def test_a_restart_that_appends_to_the_file_is_followed(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_lines([0.1] * 3))
    tail = Tail(path)
    assert read_on(tail)["summary"] is not None
    with path.open("ab") as file:
        file.write(encode(HEADER | {"run_id": "b2"}))
    now = read_on(tail)
    assert [header.run_id for header in now["headers"]] == ["a1", "b2"]
    assert now["summary"] is None


def test_an_overlong_line_is_skipped_and_what_follows_is_read(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_lines([0.1], is_finished=False))
    tail = Tail(path)
    read_on(tail)
    with path.open("ab") as file:
        file.write(b'{"kind":"event","x":"' + b"y" * (10 << 20))
    read_on(tail)
    with path.open("ab") as file:
        file.write(b'"}\n' + encode(step_line(2, 0.1, STARTED_AT)))
    with tail.run() as (run, _):
        assert list(run.step) == [1, 2]
        assert run.skipped == ["skipped line 4: longer than 4 MB"]


@pytest.mark.parametrize(
    "lines",
    [[], [b"x\n" * (MAX_LINES_WITHOUT_HEADER + 1)], [HEADER | {"schema": 99}], [b"\xff\x00" * 100]],
    ids=["empty", "foreign", "another schema", "binary"],
)
def test_what_is_no_run_is_refused_every_time(tmp_path: Path, lines: list[Any]) -> None:
    tail = Tail(write_run(tmp_path, lines))
    for _ in range(2):
        with pytest.raises(RecordError):
            read_on(tail)


def test_a_run_file_that_comes_and_goes(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "run.jsonl")
    with pytest.raises(RecordError, match="No such file"):
        read_on(tail)
    path = write_run(tmp_path, run_lines([0.1]))
    assert read_on(tail)["step"] == [1]
    path.unlink()
    with pytest.raises(RecordError):
        read_on(tail)


def test_a_pipe_or_a_link_in_the_place_of_a_run_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.jsonl")
    with pytest.raises(RecordError):
        read_on(Tail(tmp_path / "run.jsonl"))
    real = write_run(tmp_path / "real", run_lines([0.1]))
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(RecordError):
        read_on(Tail(tmp_path / "link"))


# The folder


def titles(root: Path) -> list[str]:
    runs = Runs(root)
    return sorted(str(path.parent.relative_to(runs.root)) for path in runs.paths().values())


def test_runs_are_found_below_the_folder(tmp_path: Path) -> None:
    for name in (".", "a", "a/b/c", ".hidden/x"):
        write_run(tmp_path / name, run_lines([0.1]))
    (tmp_path / "empty").mkdir()
    assert titles(tmp_path) == [".", "a", "a/b/c"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside", run_lines([0.1]))
    root = tmp_path / "root"
    write_run(root / "mine", run_lines([0.1]))
    (root / "folder").symlink_to(outside.parent)
    (root / "loop").symlink_to(root)
    (root / "file").mkdir()
    (root / "file" / "run.jsonl").symlink_to(outside)
    assert titles(root) == ["mine"]


def test_a_run_that_is_replaced_by_a_link_after_it_was_found_is_not_read(tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside", run_lines([0.1]))
    root = tmp_path / "root"
    inside = write_run(root / "mine" / "deep", run_lines([0.1]))
    runs = Runs(root)
    (name,) = runs.paths()
    inside.unlink()
    inside.parent.rmdir()
    inside.parent.symlink_to(outside.parent)
    with pytest.raises(RecordError):
        read_on(runs.open(name))
    assert runs.glances()[0].state == "unreadable"


@pytest.mark.parametrize("name", ["", ".", "..", "../outside", "/etc/passwd", "mine", "mine/run.jsonl", "\x00"])
def test_a_path_is_no_name_of_a_run(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "mine", run_lines([0.1]))
    with pytest.raises(RecordError, match="no such run"):
        Runs(tmp_path).find(name)


def test_the_search_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write_run(tmp_path / f"run{number}", run_lines([0.1]))
    write_run(tmp_path / "1/2/3/4/5/6/7", run_lines([0.1]))
    runs = Runs(tmp_path)
    assert len(runs.paths()) == 5
    assert runs.is_cut
    monkeypatch.setattr(runs_module, "MAX_RUNS", 3)
    assert len(Runs(tmp_path).paths()) == 3


def test_only_a_few_runs_are_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "MAX_OPEN_RUNS", 2)
    for number in range(4):
        write_run(tmp_path / f"run{number}", run_lines([0.1]))
    shelf = Runs(tmp_path)
    first, second, third, _ = shelf.paths()
    kept = shelf.open(first)
    shelf.open(second)
    assert shelf.open(first) is kept
    shelf.open(third)
    assert shelf.open(first) is kept
    assert len(shelf._open) == 2


def test_what_was_made_of_a_run_is_made_again_only_when_it_changed(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_lines([0.1], is_finished=False))
    shelf = Runs(tmp_path)
    (name,) = shelf.paths()
    made: list[int] = []

    def count(run: Run) -> int:
        made.append(len(run))
        return len(run)

    for _ in range(3):
        shelf.open(name).made(count)
    assert made == [1]
    with path.open("ab") as file:
        file.write(encode(step_line(2, 0.1, STARTED_AT)))
    assert shelf.open(name).made(count)[1] == 2


def test_a_long_file_is_read_while_the_browser_is_told_how_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: list[int]
) -> None:
    path = write_run(tmp_path, run_lines([0.1] * 30))
    monkeypatch.setattr(tail_module, "LONG_BYTES", 1000)
    monkeypatch.setattr(tail_module, "PATIENCE_S", 0.01)
    shelf = Runs(tmp_path)
    (name,) = shelf.paths()
    opened, may_read = shelf.open(name), threading.Event()

    def look() -> None:
        may_read.wait(60)
        read_on(opened)

    assert opened.is_busy(look)
    assert opened.is_busy(look)
    assert opened.progress() == (0, path.stat().st_size)
    may_read.set()
    while opened.is_busy(look):
        continue
    assert opened.progress() == (path.stat().st_size, path.stat().st_size)
    assert sum(read_bytes) == path.stat().st_size


def test_a_short_file_and_a_long_one_that_is_no_run_keep_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, [b"no run\n" * 500])
    shelf = Runs(tmp_path)
    (name,) = shelf.paths()
    opened = shelf.open(name)
    assert not opened.is_busy(lambda: read_on(opened))
    monkeypatch.setattr(tail_module, "LONG_BYTES", 1000)
    while opened.is_busy(lambda: read_on(opened)):
        continue
    with pytest.raises(RecordError, match="no header"):
        read_on(opened)


# At a glance


def look(path: Path, age_s: float = 0.0) -> Glance:
    return glance_at(path, path.parent, "n", "t", path.stat().st_mtime + age_s)


def test_a_glance_at_a_long_file_reads_only_its_ends(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_lines([0.1] * 900 + [0.2] * 300, is_finished=False))
    assert path.stat().st_size > 3 * TAIL_BYTES
    glance = look(path)
    assert glance.state == "running"
    assert glance.last_step == 1200
    # Only the last steps are seen: 4e10 FLOP in 0.2 s of a peak of 1e12 FLOP/s.
    assert glance.mfu == pytest.approx(4e10 / 0.2 / 1e12)
    assert glance.is_recent
    assert glance.what == "GPT · Test CPU"
    assert len(glance.recent_mfu) == 60


def test_the_summary_of_a_finished_run_speaks_for_all_of_it(tmp_path: Path) -> None:
    lines = run_lines([0.1] * 10)
    lines[-1] |= {"metrics": {"perf/mfu": 0.123, "step_time_median_s": 7.0}}
    glance = look(write_run(tmp_path, lines))
    assert (glance.state, glance.mfu, glance.step_s) == ("finished", 0.123, 7.0)
    assert not glance.is_recent


@pytest.mark.parametrize(("step_s", "age_s", "state"), [(1, 30, "running"), (1, 70, "silent"), (60, 300, "running")])
def test_silence_is_told_after_a_minute_or_ten_steps(tmp_path: Path, step_s: float, age_s: float, state: str) -> None:
    assert look(write_run(tmp_path, run_lines([step_s] * 3, is_finished=False)), age_s).state == state


@pytest.mark.parametrize("lines", [[], [b"\x00\xff\n"], [HEADER | {"schema": 1}]])
def test_a_file_that_is_no_run_is_listed_as_unreadable(tmp_path: Path, lines: list[Any]) -> None:
    glance = look(write_run(tmp_path, lines))
    assert glance.state == "unreadable"
    assert glance.problem
    assert str(tmp_path) not in glance.problem


def test_a_run_that_has_only_begun_has_no_numbers_yet(tmp_path: Path) -> None:
    glance = look(write_run(tmp_path, [HEADER]))
    assert (glance.state, glance.mfu, glance.last_step, glance.recent_mfu) == ("running", None, None, ())


def test_the_small_chart_begins_at_zero() -> None:
    assert trend([0.5, None, 1.0]) == ("2.0,15.5 118.0,3.0", "MFU of the last 2 steps: 50.0 % to 100.0 %")
    assert trend([None, 0.5]) == trend([0.0, 0.0]) == ("", "")


@pytest.mark.parametrize(
    ("age_s", "text"),
    [(-5, "now"), (3, "now"), (59, "50 s ago"), (61, "1 min ago"), (7300, "2 h ago"), (1e6, "11 d ago")],
)
def test_ages_are_told_in_one_unit(age_s: float, text: str) -> None:
    assert ago(age_s) == text


# The server

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served") / "runs"
    write_run(root / "before", run_lines([0.10] * 40, 0.3))
    write_run(root / "after", run_lines([0.08] * 40, started_at=STARTED_AT + 9))
    write_run(root / "<b>bold", run_lines([0.1] * 30, model=HOSTILE, host=HOSTILE, device="x" * (3 << 20)))
    write_run(root / "broken", [b"nothing\n"])
    write_run(root / "newer", [HEADER | {"schema": 99}])
    (root / "secret.txt").write_text("inside secret")
    (root.parent / "secret.txt").write_text("outside secret")
    write_run(root.parent / "outside", run_lines([0.1], model="OutsideModel"))
    (root / "link").symlink_to(root.parent / "outside")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[str]:
    with serving(root) as (address, _):
        yield address


@pytest.fixture(scope="module")
def names(server: str) -> dict[str, str]:
    """The name under which each run is served."""
    found = re.findall(r'href="/run/(\w+)">([^<]+)<', ask(server).text)
    return {title: name for name, title in found}


def test_the_list_has_every_run_with_its_numbers(server: str, names: dict[str, str]) -> None:
    text = ask(server).text
    assert set(names) == {"before", "after", "&lt;b&gt;bold"}
    assert "40.0 %" in text
    assert "50.0 %" in text
    assert "it is not a flopmeter run file" in text
    assert "5 runs, 0 running" in text


def test_a_run_has_a_page_and_news(server: str, names: dict[str, str]) -> None:
    page = ask(server, f"/run/{names['before']}")
    assert page.status == 200
    assert "40.0 %" in page.text
    news = json.loads(ask(server, f"/run/{names['before']}/news").text)
    assert news["state"] == "finished"
    assert "40.0" in news["body"]
    assert [line["name"] for line in news["data"]["lines"]] == ["MFU", "Step time", "Loss"]
    same = json.loads(ask(server, f"/run/{names['before']}/news?revision={news['revision']}").text)
    assert same == {name: news[name] for name in ("revision", "state", "text", "again_s")}


def test_runs_are_compared_with_the_oldest_as_the_baseline(server: str, names: dict[str, str]) -> None:
    both = f"run={names['after']}&run={names['before']}"
    page = ask(server, f"/compare?{both}").text
    assert "after is better than before" in page
    swapped = ask(server, f"/compare?{both}&baseline={names['after']}").text
    assert "before is worse than after" in swapped


@pytest.mark.parametrize("query", ["", "?run=a", "?run=a&run=a", "?" + "&".join(f"run={n}" for n in range(9))])
def test_a_comparison_needs_two_to_eight_runs(server: str, query: str) -> None:
    assert ask(server, f"/compare{query}").status == 400


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt",
        "/../secret.txt",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/run/..%2f..%2fsecret.txt",
        "/run/../secret.txt",
        "/run//etc/passwd",
        "/run/%2fetc%2fpasswd",
        "/run/before",
        "/run/before/run.jsonl",
        "/run/..",
        "/run/%00",
        "/run/%ff%fe",
        "/run/" + "a" * 5000,
        "/run/0000000000000000",
        "/run/0000000000000000/news",
        "/compare?run=../secret.txt&run=/etc/passwd",
        "/assets/../secret.txt",
        "/assets/page.html",
        "//etc/passwd",
        "/%",
    ],
)
def test_no_path_leads_out_of_what_is_served(server: str, path: str) -> None:
    answer = ask(server, path)
    assert answer.status == 404
    assert "secret" not in answer.text
    assert "root:" not in answer.text
    assert "Traceback" not in answer.text


def test_a_run_behind_a_link_is_not_served(server: str) -> None:
    assert "OutsideModel" not in ask(server).text


@pytest.mark.parametrize("path", ["/", "/news", "/run/{before}", "/nothing"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NONSENSE"])
def test_only_reading_is_answered(server: str, names: dict[str, str], method: str, path: str) -> None:
    answer = ask(server, path.format(before=names["before"]), method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


def test_head_has_the_headers_and_no_body(server: str) -> None:
    answer = ask(server, "/", "HEAD")
    assert answer.status == 200
    assert answer.text == ""


@pytest.mark.parametrize("path", ["/", "/news", "/nothing", "/compare"])
def test_every_answer_carries_the_rules_for_the_browser(server: str, path: str) -> None:
    headers = ask(server, path).headers
    policy = dict(rule.strip().partition(" ")[::2] for rule in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert re.fullmatch("'sha256-[A-Za-z0-9+/]+='", policy["script-src"])  # our one script, and nothing else
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert headers["Server"] == "flopmeter"
    assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("LOCALHOST", 200),
        ("[::1]:{port}", 200),
        ("evil.example", 421),
        ("evil.example:{port}", 421),
        ("127.0.0.1.evil.example", 421),
        ("192.168.1.5", 421),
        ("localhost@evil.example", 421),
        ("[", 421),
        ("", 421),
    ],
)
def test_a_foreign_host_name_is_refused(server: str, host: str, status: int) -> None:
    assert ask(server, "/", Host=host.format(port=urlsplit(server).port)).status == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "{own}"}, 200),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "image"}, 403),
        ({"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}, 200),
        ({"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"}, 200),
    ],
)
def test_other_sites_cannot_fetch_but_may_link(server: str, headers: dict[str, str], status: int) -> None:
    own = server.rstrip("/")
    assert ask(server, "/news", **{name: value.format(own=own) for name, value in headers.items()}).status == status


def test_hostile_names_are_shown_as_text(server: str, names: dict[str, str]) -> None:
    for path in ("/", f"/run/{names['&lt;b&gt;bold']}", f"/compare?run={names['&lt;b&gt;bold']}&run={names['before']}"):
        text = ask(server, path).text
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        assert "<b>bold" not in text
        assert len(text) < 1 << 20


@pytest.mark.parametrize("which", ["broken", "newer"])
def test_a_bad_run_gives_a_line_without_a_traceback_or_the_servers_paths(server: str, root: Path, which: str) -> None:
    name = next(name for name, path in Runs(root).paths().items() if path.parent.name == which)
    for path in (f"/run/{name}", f"/run/{name}/news"):
        answer = ask(server, path)
        assert answer.status == 404
        assert "Traceback" not in answer.text
        assert str(root) not in answer.text


def test_a_record_that_we_stumble_over_does_not_end_the_server(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    from starlette.requests import Request

    def stumble(request: Request) -> Any:
        raise ZeroDivisionError

    scope = {"type": "http", "method": "GET", "path": "/run/a\nb", "query_string": b"", "headers": []}
    answer = _Views(Runs(root)).safe(stumble)(Request(scope))
    assert answer.status_code == 500
    assert b"flopmeter cannot read the record (ZeroDivisionError)" in bytes(answer.body)
    assert caplog.text.count("\n") == 1


# The token


@pytest.fixture(scope="module")
def open_server(root: Path) -> Iterator[str]:
    with serving(root, "--host", "0.0.0.0") as (address, _):
        yield address


def token_of(address: str) -> str:
    return urlsplit(address).query.removeprefix("token=")


def test_another_host_needs_a_token(open_server: str) -> None:
    assert len(token_of(open_server)) >= 32
    for path in ("/", "/news", "/nothing", "/?token=", "/?token=wrong", "/?token=" + "x" * 5000):
        answer = ask(open_server, path)
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert "before" not in answer.text
        assert token_of(open_server) not in answer.text


def test_the_token_in_the_address_becomes_a_cookie(open_server: str) -> None:
    token = token_of(open_server)
    answer = ask(open_server, f"/?token={token}")
    assert answer.status == 200
    assert "before" not in answer.text
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    pair = cookie.partition(";")[0]
    assert "before" in ask(open_server, "/", Cookie=pair).text
    assert ask(open_server, "/", Cookie=pair[:-1]).status == 401
    assert ask(open_server, "/", Cookie="other=" + token).status == 401


@pytest.mark.parametrize(
    ("pattern", "status"),
    [("Bearer {}", 200), ("bearer {}", 200), ("Bearer {}x", 401), ("Basic {}", 401), ("{}", 401), ("Bearer ", 401)],
)
def test_the_token_may_come_as_a_bearer(open_server: str, pattern: str, status: int) -> None:
    assert ask(open_server, "/", Authorization=pattern.format(token_of(open_server))).status == status


def test_an_open_server_answers_under_addresses_and_its_own_names_only(open_server: str) -> None:
    bearer = f"Bearer {token_of(open_server)}"
    for host, status in {"10.1.2.3": 200, socket.gethostname(): 200, "localhost": 200, "evil.example": 421}.items():
        assert ask(open_server, "/", Host=host, Authorization=bearer).status == status


def test_a_token_can_be_asked_for_at_home_too(root: Path) -> None:
    with serving(root, "--token") as (address, _):
        assert ask(address).status == 401
        assert ask(address, "/", Authorization=f"Bearer {token_of(address)}").status == 200


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_only_loopback_addresses_need_no_token(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


# The command


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flopmeter", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = run_serve(str(tmp_path), "--port", str(port))
    assert answer.returncode == 1
    cure = "stop what uses it, or take another with --port (0 takes a free one)"
    assert answer.stderr == f"flopmeter: error: port {port} is in use: {cure}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-folder",), "is not a folder"),
        ((".", "--host", "no.such.host.invalid"), "there is no address"),
        ((".", "--host", "192.0.2.1"), "cannot listen at 192.0.2.1"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    answer = run_serve(*arguments)
    assert answer.returncode == 1
    assert message in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("library", ["starlette.applications", "uvicorn"])
def test_a_library_that_is_missing_is_named_before_anything_is_served(tmp_path: Path, library: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; sys.argv = ['flopmeter', 'serve', {str(tmp_path)!r}]\n"
    code += "from flopmeter.cli import _run; sys.exit(_run())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 1
    assert answer.stdout == ""
    name = library.partition(".")[0]
    assert f"needs {name}, which is not installed: run pip install " in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_an_application_for_a_server_of_ones_own_refuses_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is not a folder"):
        make_app(tmp_path / "missing")


def test_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, process):
        assert ask(address).status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
        assert process.stderr is not None
        assert process.stderr.read() in ("", "flopmeter: error: stopped\n")


def test_a_run_that_begins_while_the_server_is_up_shows_up(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, _):
        assert "No runs here yet" in ask(address).text
        write_run(tmp_path / "new", run_lines([0.1] * 3))
        deadline = time.monotonic() + 60
        while "/run/" not in ask(address).text:
            assert time.monotonic() < deadline, "the run did not show up"
            time.sleep(0.2)


def test_serving_needs_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path, run_lines([0.1] * 30))
    code = (
        "import sys; from pathlib import Path; from flopmeter.serve import Runs, list_part, make_app, run_part\n"
        "make_app(Path(sys.argv[1]))\n"
        "runs = Runs(Path(sys.argv[1]))\n"
        "list_part('x', runs.glances(), False); runs.open(*runs.paths()).made(run_part)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
