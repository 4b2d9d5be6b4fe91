"""Offline runs are read back from wandb's file through its own messages, online ones from what a server receives."""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flopmeter.config import MonitorConfig
from flopmeter.errors import MissingLibraryError
from flopmeter.schema import METRICS
from flopmeter.sinks import Sink, SinkContext, open_sink

KEYS = [metric.key.replace("<name>", "org/web.en") for metric in METRICS]
HEADER = {"kind": "header", "model": "GPT", "device": "cpu", "versions": {"torch": "2.13.0"}}
NOT_OURS = {"_step", "_timestamp", "_runtime"}


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """wandb as on a machine that never heard of it, with a session of its own."""
    library = pytest.importorskip("wandb", reason="needs flopmeter[wandb]")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    library.teardown()
    yield library
    library.teardown()


def sink_of(**settings: Any) -> Sink:
    config = MonitorConfig.load({"wandb": {"enabled": True, **settings}})
    return open_sink("wandb", SinkContext(config=config, output_dir=Path("unused"), header=HEADER))


def records(folder: Path, kind: str) -> list[Any]:
    """The messages of one kind in a run's file, framed like a LevelDB log: parts of records in 32 KiB blocks."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its process writes the last records after the run is finished
    (path,) = folder.rglob("*.wandb")
    data, position, message, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, part = struct.unpack("<IHB", data[position : position + 7])
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(message)
            found += [getattr(record, kind)] if record.WhichOneof("record_type") == kind else []
            message = b""
    return found


def history(folder: Path) -> list[dict[str, float]]:
    return [
        {item.nested_key[0]: json.loads(item.value_json) for item in row.item if item.nested_key[0] not in NOT_OURS}
        for row in records(folder, "history")
    ]


def column(rows: list[dict[str, float]], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]


def test_every_key_of_the_schema_and_no_other_comes_back_charted_over_the_step(wandb: Any, tmp_path: Path) -> None:
    sink = sink_of(mode="offline", metrics="all")
    first = {key: index + 0.25 for index, key in enumerate(KEYS)} | {"global_step": 7}
    sink.log(7, first)
    sink.log(8, {"training/loss": 1.5})
    sink.close()
    assert wandb.run is None
    assert history(tmp_path) == [first, {"training/loss": 1.5, "global_step": 8}]
    charts = [(metric.name, metric.step_metric) for metric in records(tmp_path, "metric")]
    assert sorted(charts) == sorted((key, "global_step") for key in KEYS if key != "global_step")


def test_a_key_that_looks_like_a_pattern_is_logged_all_the_same(wandb: Any, tmp_path: Path) -> None:
    sink = sink_of(mode="offline")
    sink.log(1, {"dataset/c4*/loss": 2.0, "dataset/c4*": 3.0})
    sink.close()
    assert history(tmp_path) == [{"dataset/c4*/loss": 2.0, "dataset/c4*": 3.0, "global_step": 1}]


def test_nan_and_infinity_are_logged(wandb: Any, tmp_path: Path) -> None:
    sink = sink_of(mode="offline")
    sink.log(1, {"training/loss": math.nan, "training/grad_norm": math.inf})
    sink.close()
    (row,) = history(tmp_path)
    assert math.isnan(row["training/loss"])
    assert row["training/grad_norm"] == math.inf


def test_dataset_metrics_stay_at_home_when_the_settings_say_so(wandb: Any, tmp_path: Path) -> None:
    sink = sink_of(mode="offline", log_dataset_metrics=False)
    sink.log(1, {"training/loss": 2.0, "dataset/web/loss": 3.0})
    sink.log(2, {"dataset/web/loss": 3.0})
    sink.close()
    assert history(tmp_path) == [{"training/loss": 2.0, "global_step": 1}]


def test_the_settings_and_the_header_reach_the_run(wandb: Any, tmp_path: Path) -> None:
    sink = sink_of(mode="offline", project="mine", run_name="first", tags=["a", "b"], notes="n", config={"lr": 0.1})
    sink.close()
    run = records(tmp_path, "run")[0]
    assert (run.project, run.display_name, list(run.tags), run.notes) == ("mine", "first", ["a", "b"], "n")
    assert {item.key: json.loads(item.value_json) for item in run.config.update if item.key == "lr"} == {"lr": 0.1}
    updates = {
        item.key: json.loads(item.value_json) for config in records(tmp_path, "config") for item in config.update
    }
    assert updates["flopmeter"] == {**HEADER, "rank": 0}


def test_reduced_logging_sends_half_of_the_basics_and_details_every_hundred_steps(
    wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, float]] = []
    for is_reduced in (False, True):
        sink = sink_of(mode="offline", reduced_logging=is_reduced)
        monkeypatch.setattr(type(wandb.run), "log", lambda run, row, **_: sent.append(row))
        sent.clear()
        for step in range(1, 401):
            details = {"perf/mfu": 0.4, "training/grad_norm": 1.0} if step % 50 == 0 else {}
            sink.log(step, {"global_step": step, "training/loss": 2.0, **details})
            if step % 50 == 0:
                sink.log(step, {"dataset/code/loss": 1.0})
        sink.log(400, {"my/own": 3.0})
        basics, details, datasets = (
            sum(key in row for row in sent) for key in ("training/loss", "perf/mfu", "dataset/code/loss")
        )
        assert (basics, details, datasets) == ((200, 4, 4) if is_reduced else (400, 8, 8))
        assert sum("my/own" in row for row in sent) == 1
        sink.close()


def test_the_environment_says_the_mode_and_the_time_limits(wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "77")
    sink = sink_of()
    settings = wandb.run.settings
    sink.close()
    assert (settings.mode, settings.init_timeout, settings.finish_timeout) == ("offline", 77, 60)


def test_a_disabled_run_takes_everything_and_keeps_nothing(wandb: Any, tmp_path: Path) -> None:
    sink = sink_of(mode="disabled")
    for step in range(3):
        sink.log(step, {"training/loss": 2.0})
    sink.close()
    assert list(tmp_path.rglob("*.wandb")) == []


def test_steps_that_go_backwards_lose_nothing(wandb: Any, tmp_path: Path) -> None:
    steps = [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7]
    sink = sink_of(mode="offline")
    for index, step in enumerate(steps):
        sink.log(step, {"training/loss": float(index)})
        sink.log(step, {"perf/mfu": float(index)})
    sink.close()
    rows = history(tmp_path)
    assert column(rows, "global_step") == [step for step in steps for _ in range(2)]
    assert column(rows, "training/loss") == column(rows, "perf/mfu") == [float(index) for index in range(12)]


class TestARunThatIsAlreadyOpen:
    @pytest.fixture
    def run(self, wandb: Any) -> Any:
        return wandb.init(mode="offline", config={"lr": 0.1})

    def test_is_joined_and_never_finished(self, wandb: Any, run: Any, tmp_path: Path) -> None:
        sink = sink_of(project="not asked for")
        sink.log(1, {"training/loss": 2.0})
        sink.close()
        assert wandb.run is run
        run.log({"mine": 1.0})
        run.finish()
        assert history(tmp_path) == [{"training/loss": 2.0, "global_step": 1, "mine": 1.0}]
        assert [metric.name for metric in records(tmp_path, "metric")] == ["training/loss"]  # its own charts stay
        assert run.config["lr"] == 0.1
        assert run.config["flopmeter"]["model"] == "GPT"

    @pytest.mark.parametrize("lag", [0, 1, 25])
    def test_keeps_every_row_that_its_owner_logs_by_step(self, run: Any, tmp_path: Path, lag: int) -> None:
        """Our rows come `lag` steps late and all at once, with evaluations in between, as a background thread's do."""
        sink = sink_of()
        for step in range(100):
            run.log({"mine": float(step)}, step=step)
            if step % max(lag, 1) == 0:
                for late in range(max(step - lag, 0), step + 1):
                    sink.log(late, {"training/loss": float(late)})
                sink.log(step, {"eval/loss": 1.0})
        run.finish()
        rows = history(tmp_path)
        assert column(rows, "mine") == [float(step) for step in range(100)]
        assert all(row["training/loss"] == row["global_step"] for row in rows if "training/loss" in row)

    def test_keeps_the_rows_after_a_first_burst_of_ours(self, run: Any, tmp_path: Path) -> None:
        for step in range(6):
            run.log({"mine": float(step)}, step=step)
        sink = sink_of()
        for step in range(6):
            sink.log(step, {"training/loss": float(step)})
        for step in range(6, 12):
            run.log({"mine": float(step)}, step=step)
        run.finish()
        assert column(history(tmp_path), "mine") == [float(step) for step in range(12)]

    def test_keeps_every_row_of_both_when_its_owner_logs_without_a_step(self, run: Any, tmp_path: Path) -> None:
        sink = sink_of()
        for step in range(100):
            sink.log(step, {"training/loss": float(step)})
            run.log({"mine": float(step)})
            run.log({"mine too": float(step)})
        run.finish()
        rows = history(tmp_path)
        for key in ("mine", "mine too", "training/loss"):
            assert column(rows, key) == [float(step) for step in range(100)]

    def test_that_its_owner_never_logs_to_gets_every_row_of_ours(self, run: Any, tmp_path: Path) -> None:
        sink = sink_of()
        for step in [*range(50), *range(20, 70)]:
            sink.log(step, {"training/loss": float(step)})
        run.finish()
        assert column(history(tmp_path), "global_step") == [*range(50), *range(20, 70)]

    def test_may_be_a_disabled_one(self, wandb: Any, run: Any) -> None:
        run.finish()
        disabled = wandb.init(mode="disabled")
        sink = sink_of()
        for step in (0, 1, 0):
            sink.log(step, {"training/loss": 2.0})
        sink.close()
        assert wandb.run is disabled

    def test_that_its_owner_finishes_early_is_an_error_and_no_hang(self, wandb: Any, run: Any) -> None:
        sink = sink_of()
        run.finish()
        with pytest.raises(wandb.errors.UsageError, match="finished"):
            sink.log(1, {"training/loss": 2.0})
        sink.close()


class Server(ThreadingHTTPServer):
    """As much of a W&B server as a run needs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.rows: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def settings(self) -> dict[str, Any]:
        """`quiet` saves wandb's question who is logged in; the limit keeps a failing test from waiting for ever."""
        url = f"http://127.0.0.1:{self.server_port}"
        return {"base_url": url, "api_key": "0" * 40, "quiet": True, "finish_timeout": 10}

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Answers(BaseHTTPRequestHandler):
    server: Server  # speaks HTTP/1.0: no connection outlives its answer, so a stopped server is gone at once

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            answer = {"data": self.answer_query(json.loads(body))}
        elif self.path.endswith("/file_stream"):
            lines = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.server.rows += [json.loads(line) for line in lines]
        payload = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def answer_query(self, query: dict[str, Any]) -> dict[str, Any]:
        if query["operationName"] == "UpsertBucket":
            project = {"id": "p", "name": "mine", "entity": {"id": "e", "name": "us"}}
            bucket = {"id": "b", "name": query["variables"]["name"], "displayName": "first", "config": "{}"}
            return {"upsertBucket": {"bucket": {**bucket, "project": project}, "inserted": True}}
        if query["operationName"] == "CreateRunFiles":
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        return {}

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def test_an_online_run_sends_the_same_keys_to_the_server(wandb: Any, server: Server) -> None:
    sink = sink_of(project="mine", entity="us", settings=server.settings)
    for step in range(3):
        sink.log(step, dict.fromkeys(KEYS, 0.5))
    sink.close()
    assert [row["global_step"] for row in server.rows] == [0, 1, 2]
    assert all(row.keys() - NOT_OURS == set(KEYS) for row in server.rows)


def test_a_run_with_many_writers_has_no_counter_to_respect(wandb: Any, server: Server) -> None:
    run = wandb.init(project="mine", entity="us", mode="shared", settings=server.settings)
    sink = sink_of()
    for step in (0, 1, 2, 1, 2, 3):
        sink.log(step, {"training/loss": 0.5})
    sink.close()
    run.finish()
    assert [row["global_step"] for row in server.rows] == [0, 1, 2, 1, 2, 3]


def test_a_server_that_goes_away_does_not_hold_up_the_end(wandb: Any, server: Server, tmp_path: Path) -> None:
    sink = sink_of(project="mine", entity="us", settings={**server.settings, "finish_timeout": 1})
    server.stop()
    sink.log(1, {"training/loss": 2.0})
    sink.close()
    assert server.rows == []
    assert history(tmp_path) == [{"training/loss": 2.0, "global_step": 1}]


def test_without_a_network_the_run_is_kept_offline_with_one_warning(
    wandb: Any, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()  # its port now refuses
    with caplog.at_level(logging.WARNING, logger="flopmeter"):
        sink = sink_of(settings={**server.settings, "init_timeout": 1})
    sink.log(1, {"training/loss": 2.0})
    sink.close()
    (folder,) = tmp_path.rglob("offline-run-*")
    assert history(folder) == [{"training/loss": 2.0, "global_step": 1}]
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "flopmeter"]
    assert warning.startswith("wandb: ")
    assert warning.endswith(f"; the run stays offline: upload it with  wandb sync {folder}")
    assert "\n" not in warning


def test_a_wrong_setting_is_not_taken_for_a_missing_network(wandb: Any) -> None:
    with pytest.raises(wandb.errors.UsageError, match="project"):
        sink_of(mode="online", project="a/b")


NOBODY_LOGGED_IN = """
import logging, sys
from pathlib import Path
from flopmeter.config import MonitorConfig
from flopmeter.sinks import SinkContext, open_sink

logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
sink = open_sink("wandb", SinkContext(config=MonitorConfig.load({"wandb": True}), output_dir=Path("unused")))
sink.log(1, {"training/loss": 2.0})
sink.close()
"""


@pytest.mark.usefixtures("wandb")
def test_nobody_is_asked_for_a_key_at_the_terminal(tmp_path: Path) -> None:
    terminal, end = pytest.importorskip("pty", reason="no terminals to simulate here").openpty()
    done = subprocess.run(
        [sys.executable, "-c", NOBODY_LOGGED_IN],
        cwd=tmp_path, stdin=end, stdout=subprocess.PIPE, stderr=end, timeout=120, check=True, text=True,
    )  # fmt: skip
    os.close(end)
    os.close(terminal)
    assert "nobody is logged in here (run wandb login); the run stays offline" in done.stdout
    assert history(tmp_path) == [{"training/loss": 2.0, "global_step": 1}]


def test_the_example_in_the_docs_runs_and_keeps_both_sides_rows(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "logging.md").read_text("utf-8")
    section = page.partition("\n## Weights & Biases\n")[2].partition("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.setenv("WANDB_MODE", "offline")
    subprocess.run([sys.executable, "-c", example], cwd=tmp_path, timeout=120, check=True)
    rows = history(tmp_path)
    assert column(rows, "mine/step_squared") == [step**2 for step in range(120)]
    assert column(rows, "training/loss")
    assert column(rows, "perf/step_time")


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'flopmeter\[wandb\]'"):
        sink_of()
