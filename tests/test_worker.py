"""The background thread: whatever a sink or the disk does, nothing blocks and nothing grows without bound."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flopmeter import sinks
from flopmeter.config import MonitorConfig
from flopmeter.monitor import worker as worker_module
from flopmeter.monitor.digest import Delivery
from flopmeter.monitor.worker import Worker
from flopmeter.record import RunWriter, load_run
from flopmeter.sinks import SinkContext
from interrupted import every_moment

HEADER = {"kind": "header", "schema": 2}


def digest(item: Any) -> Delivery:
    line: dict[str, Any] = {"kind": "step", "step": int(item), "metrics": {"x": float(item)}}
    metrics: dict[str, float] = line["metrics"]
    return Delivery(line, item, lambda: metrics, (lambda: metrics) if item % 2 == 0 else None)


def test_steps_that_hold_copies_are_handed_back_and_no_others(tmp_path: Path) -> None:
    class Item(int):
        has_copies = False

    class Lent(Item):
        has_copies = True

    context = SinkContext(config=MonitorConfig(), output_dir=tmp_path)
    worker = Worker(
        RunWriter(tmp_path / "run.jsonl"), (), context, digest, HEADER, deque(), flush_every=200, flush_s=5.0
    )
    worker.used = deque()
    for item in (Item(1), Lent(2), Item(3), Lent(4)):
        worker.queue.append(item)
    worker.close()
    assert [item for items in worker.used for item in items] == [2, 4]


class Recorder:
    """A sink that remembers what it got."""

    def __init__(self, context: SinkContext) -> None:
        self.logs: list[tuple[int, Mapping[str, float]]] = []
        self.is_closed = False
        opened.append(self)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logs.append((step, metrics))

    def close(self) -> None:
        self.is_closed = True


opened: list[Recorder] = []


@pytest.fixture(autouse=True)
def extra_sinks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, type], None]:
    """Lets a test put a sink of its own into the folder of sinks."""
    names = sinks.available_sinks()

    def add(name: str, sink: type) -> None:
        module = ModuleType(f"flopmeter.sinks.{name}")
        module.Sink = sink  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        names.append(name)

    monkeypatch.setattr(sinks, "available_sinks", lambda: names)
    monkeypatch.setattr(worker_module, "CLOSE_TIMEOUT_S", 0.6)
    opened.clear()
    return add


def make(tmp_path: Path, *names: str, flush_every: int = 200) -> Worker:
    context = SinkContext(config=MonitorConfig(), output_dir=tmp_path)
    return Worker(
        RunWriter(tmp_path / "run.jsonl"),
        names,
        context,
        digest,
        HEADER,
        deque(),
        flush_every=flush_every,
        flush_s=60.0,
    )


def test_what_is_handed_over_reaches_the_disk_and_the_sinks(
    tmp_path: Path, extra_sinks: Callable[[str, type], None]
) -> None:
    extra_sinks("recorder", Recorder)
    worker = make(tmp_path, "recorder")
    for item in (1, 2, 3, 4):
        worker.queue.append(item)
    worker.close([{"kind": "summary"}])
    run = load_run(tmp_path)
    assert list(run.step) == [1, 2, 3, 4]
    assert run.summary is not None
    assert opened[0].logs == [(2, {"x": 2.0}), (4, {"x": 4.0})]
    assert opened[0].is_closed


def test_draining_puts_all_of_it_on_disk_now(tmp_path: Path) -> None:
    worker = make(tmp_path)
    for item in range(50):
        worker.queue.append(item)
    assert worker.drain(5.0)
    assert len(load_run(tmp_path)) == 50
    worker.close()


class Broken(Recorder):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError("planted")


class Unopenable(Recorder):
    def __init__(self, context: SinkContext) -> None:
        raise ConnectionError("planted")


@pytest.mark.parametrize("kind", [Broken, Unopenable])
def test_a_sink_that_raises_is_switched_off_and_the_others_go_on(
    tmp_path: Path, extra_sinks: Callable[[str, type], None], kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    extra_sinks("recorder", Recorder)
    extra_sinks("bad", kind)
    with caplog.at_level(logging.WARNING):
        worker = make(tmp_path, "bad", "recorder")
        for item in range(20):
            worker.queue.append(item)
        worker.close()
    good = next(sink for sink in opened if type(sink) is Recorder)
    assert len(good.logs) == 10
    assert len(load_run(tmp_path)) == 20
    assert sum("the sink bad is switched off" in record.message for record in caplog.records) == 1


def test_a_sink_that_hangs_holds_up_nobody_and_is_left_behind(
    tmp_path: Path, extra_sinks: Callable[[str, type], None], caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    class Hanging(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            release.wait(60)

    extra_sinks("recorder", Recorder)
    extra_sinks("hanging", Hanging)
    with caplog.at_level(logging.WARNING):
        worker = make(tmp_path, "hanging", "recorder")
        start_s = time.monotonic()
        for item in range(20):
            worker.queue.append(item)
        assert worker.drain(5.0)
        worker.close()
    assert time.monotonic() - start_s < 30  # not the 60 s that the sink hangs for
    good = next(sink for sink in opened if type(sink) is Recorder)
    assert len(good.logs) == 10
    assert len(load_run(tmp_path)) == 20
    assert "does not answer" in caplog.text
    release.set()


def test_a_sink_that_is_too_slow_loses_logs_and_they_are_counted(
    tmp_path: Path, extra_sinks: Callable[[str, type], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MAX_QUEUED_LOGS", 5)
    release = threading.Event()

    class Slow(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            release.wait(60)

    extra_sinks("slow", Slow)
    worker = make(tmp_path, "slow")
    for item in range(100):
        worker.queue.append(item)
    assert worker.drain(5.0)
    # 50 logs: one in the sink's hands, five in its queue, and one more that may have been taken meanwhile.
    assert worker._sinks[0].num_dropped in (43, 44, 45)
    release.set()
    worker.close()


def test_logs_dropped_by_two_threads_at_once_are_all_counted(
    tmp_path: Path, extra_sinks: Callable[[str, type], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MAX_QUEUED_LOGS", 0)
    extra_sinks("recorder", Recorder)
    threads: list[worker_module.SinkThread] = []

    def make_call() -> tuple[Callable[[], None], Callable[[], None]]:
        sink = worker_module.SinkThread("recorder", SinkContext(config=MonitorConfig(), output_dir=tmp_path))
        assert sink.close(5.0)
        sink._num_put = 2
        sink._queue.put([(1, {}), (2, {})])
        sink._queue.put(None)
        threads.append(sink)
        return sink._swallow, lambda: sink.log([(3, {})])

    nums = [threads[-1].num_dropped for _ in every_moment(make_call)]
    assert len(nums) > 10
    assert set(nums) == {3}


def test_the_queue_of_the_training_thread_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "MAX_QUEUED_STEPS", 10)
    worker = make(tmp_path)
    worker._is_closing = True  # the thread ends: nobody empties the queue
    worker._wake.set()
    worker._thread.join()
    worker.queue.extend(range(100))
    worker.catch_up()
    assert worker.num_dropped == 90
    assert list(worker.queue) == list(range(10))


def has_written(tmp_path: Path, num_steps: int) -> bool:
    end_s = time.monotonic() + 30
    while len(load_run(tmp_path)) < num_steps:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def test_it_works_at_once_where_as_many_steps_wait_as_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "WAKE_S", 3600.0)
    worker = make(tmp_path, flush_every=10)
    assert worker.drain(5.0)
    worker.queue.extend(range(9))
    worker.catch_up()
    assert not worker._wake.is_set()  # ten steps may be lost: it is in no hurry
    worker.queue.append(9)
    worker.catch_up()
    assert has_written(tmp_path, 10)
    worker.close()


def test_it_works_by_itself_where_nobody_calls_it(tmp_path: Path) -> None:
    worker = make(tmp_path, flush_every=10)
    assert worker.drain(5.0)
    worker.queue.extend(range(10))
    assert has_written(tmp_path, 10)
    worker.close()


def test_a_thread_that_is_behind_does_not_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(tmp_path, flush_every=10)
    rests: list[float] = []
    rest = worker._wake.wait
    monkeypatch.setattr(worker._wake, "wait", lambda timeout_s: rests.append(timeout_s) or rest(timeout_s))
    worker.queue.extend(range(1000))
    worker.catch_up()
    end_s = time.monotonic() + 60
    while worker.queue and time.monotonic() < end_s:
        time.sleep(0.01)
    # Ten at a time would be a hundred rests, or forty steps a second: the queue of a fast loop would overflow.
    assert len(rests) < 10
    worker.close()
    assert list(load_run(tmp_path).step) == list(range(1000))


def test_the_record_says_how_many_lines_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "MAX_QUEUED_STEPS", 0)
    worker = make(tmp_path)
    assert worker.drain(5.0)
    monkeypatch.setattr(worker, "queue", deque(range(3)))  # which nobody empties
    worker.catch_up()
    worker.close()
    assert [event["message"] for event in load_run(tmp_path).events] == [
        "3 lines lost: steps came faster than they could be written"
    ]
    assert "3 lines lost" in caplog.text


def test_an_item_that_cannot_be_digested_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        for item in (1, "nonsense", 2):
            worker.queue.append(item)
        worker.close()
    assert list(load_run(tmp_path).step) == [1, 2]
    assert "a step was not recorded" in caplog.text


def test_steps_that_are_digested_together_die_together(tmp_path: Path) -> None:
    happened: list[str] = []

    class Mortal(int):
        def __del__(self) -> None:
            happened.append("dead")

        def __mod__(self, other: int) -> int:  # the digest asks whether it is even
            happened.append("digested")
            return int(self) % other

    worker = make(tmp_path)
    worker.drain(5.0)
    worker.queue.extend([Mortal(1), Mortal(2), Mortal(3)])  # at once: the thread cannot come in between
    assert worker.drain(5.0)
    assert happened == ["digested"] * 3 + ["dead"] * 3
    worker.close()


def test_no_more_lines_than_the_settings_say_wait_for_the_disk(tmp_path: Path) -> None:
    worker = make(tmp_path, flush_every=10)
    worker.drain(5.0)
    lines: list[int] = []
    flush = worker.writer.flush

    def note_and_flush() -> bool:
        lines.append(worker.writer._pending.count(b"\n"))
        return flush()

    worker.writer.flush = note_and_flush  # type: ignore[method-assign]
    worker.queue.extend(range(95))
    assert worker.drain(5.0)
    worker.close()
    assert sum(lines) == 95
    assert max(lines) == 10


def test_closing_twice_is_fine_and_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    worker = make(tmp_path)
    worker.close()
    worker.close()
    assert threading.active_count() == before


class Busy(Recorder):
    """A sink whose every log takes a millisecond of CPU."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        end_s = time.thread_time() + 0.001
        while time.thread_time() < end_s:
            continue
        super().log(step, metrics)


def test_a_sink_that_costs_too_much_gets_fewer_basics_and_all_the_details(
    tmp_path: Path, extra_sinks: Callable[[str, type], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "FREE_LOGS", 3)
    extra_sinks("busy", Busy)
    sink = worker_module.SinkThread("busy", SinkContext(config=MonitorConfig(), output_dir=tmp_path), cpu_share=1e-9)
    basics, details = {"global_step": 1, "training/loss": 1.0}, dict.fromkeys("abcdefgh", 1.0)
    others = ({"eval/loss": 1.0}, {"my/bleu": 3.0}, {"epoch/loss": 1.0, "training/epoch": 2.0})
    sink.log([(step, basics) for step in range(3)])  # the free ones; from here on the cost is known
    while sink._num_taken < 3 or not sink.cpu_s:
        time.sleep(0.001)
    assert not any(sink.has_time_for(basics) for _ in range(10))
    assert sink.num_thinned == 10
    assert sink.has_time_for(details)
    assert all(sink.has_time_for(log) for log in others)  # short, and no basics all the same
    assert (sink.num_thinned, sink.num_dropped) == (10, 0)
    assert sink.close(5.0)


def test_an_explicit_rate_is_never_thinned(tmp_path: Path, extra_sinks: Callable[[str, type], None]) -> None:
    extra_sinks("busy", Busy)
    sink = worker_module.SinkThread("busy", SinkContext(config=MonitorConfig(), output_dir=tmp_path), cpu_share=None)
    sink._num_put = sink._num_taken = 10_000
    assert sink.has_time_for({"training/loss": 1.0})
    assert sink.close(5.0)
