"""The thread that owns all output: the run file and the sinks. The training thread only hands lines over.

Whatever a sink does (raise, hang, dawdle), the others go on and the training never waits: each sink has a thread and a
bounded queue of its own, and what does not fit is counted and reported. Whatever touches the run's folder runs on this
thread, also at the start and at the end, and is waited for only so long: a disk may hang for ever.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from flopmeter.monitor.digest import BASICS, Delivery
from flopmeter.record import RunWriter
from flopmeter.sinks import Sink, SinkContext, choice_of, open_sink, takes_every_step

logger = logging.getLogger("flopmeter")

MAX_QUEUED_STEPS = 10_000
MAX_QUEUED_LOGS = 1_000
FREE_LOGS = 500
"""Logs that a sink gets whatever they cost: short runs are logged as asked."""
STEPS_AT_ONCE, BREATH_S = 64, 1e-4
"""Steps digested before the interpreter is left to the training thread, and for how long: with no time between, this
thread has it again before the other one is awake. Not fewer: each change of hands takes several system calls."""
WAKE_S = 0.5
"""One step by itself costs twice as much to digest as one of many: code and data are cold each time. Not longer: ranks
tell each other of intervals as they are digested, and `latest` knows no others."""
_BASICS = frozenset(BASICS)
FIRST_SAMPLE_S, SAMPLE_S = 0.5, 10.0
HAND_OVER_S = 0.005
"""What a step waits at most for this thread to take its turn, when `flush_every` is exceeded twice."""
COMES_ROUND_S = 0.1
"""What this thread is given, after somebody has waited in vain, to show that it goes on."""
CLOSE_TIMEOUT_S = 10.0
"""What the disk is given at the end, and each sink: W&B takes a few seconds to open on a busy machine."""
PAGES_TIMEOUT_S = 60.0
"""What is given at the end to whatever is made of the record, once the disk has shown that it works."""
LARGEST_STEP = 1 << 62
MAX_KNOWN_BAD = 1000


_T = TypeVar("_T")


class SinkThread:
    """Runs one sink, so that a sink that hangs holds up nobody else.

    Args:
        cpu_share: Share of one core that the sink's logs may take; beyond it, logs that are only basics are thinned.
            None sends them all.
    """

    def __init__(self, name: str, context: SinkContext, cpu_share: float | None = None) -> None:
        self.name = name
        self.takes_every_step = takes_every_step(name)
        self.num_thinned = 0
        """Basics that were left out to keep to the share of the CPU."""
        self.cpu_s = 0.0
        self._num_refused = self._num_swallowed = 0  # each counted by one thread
        self._context = context
        self._cpu_share = cpu_share
        self._started_s = time.monotonic()
        self._num_put = 0
        self._num_taken = 0
        self._queue: SimpleQueue[list[tuple[int, Mapping[str, float]]] | None] = SimpleQueue()
        self._sink: Sink | None = None
        self._thread = threading.Thread(target=self._run, name=f"flopmeter-{name}", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Logs that the sink should have got and did not: it was behind by too much, or is switched off."""
        return self._num_refused + self._num_swallowed

    def log(self, logs: list[tuple[int, Mapping[str, float]]]) -> None:
        """Hand over; drops when the sink is behind by too much."""
        taken = logs[: max(0, MAX_QUEUED_LOGS - (self._num_put - self._num_taken))]
        self._num_refused += len(logs) - len(taken)
        self._num_put += len(taken)
        self._queue.put(taken)

    def has_time_for(self, metrics: Mapping[str, float]) -> bool:
        """Whether a log fits the sink's share of the CPU; one that holds more than basics always does."""
        if self._cpu_share is None or self._num_put < FREE_LOGS or not metrics.keys() <= _BASICS:
            return True
        cost_s = self.cpu_s / max(1, self._num_taken)
        fits = (self._num_put + 1) * cost_s <= self._cpu_share * (time.monotonic() - self._started_s)
        self.num_thinned += not fits
        return fits

    def end(self) -> None:
        """Nothing more will come: finish."""
        self._queue.put(None)

    def close(self, timeout_s: float) -> bool:
        """Let the sink finish; False when it does not in time, and is then left behind.

        A sink that asks for more time (its attribute `close_s`), as an upload does, is given that.
        """
        self.end()
        self._thread.join(max(timeout_s, float(getattr(self._sink, "close_s", 0.0))))
        return not self._thread.is_alive()

    def _run(self) -> None:
        sink: Sink | None = None
        try:
            sink = self._sink = open_sink(self.name, self._context)
            choose = choice_of(self.name, self._context.config)
            opening_s = time.thread_time()
            while (logs := self._queue.get()) is not None:
                for step, metrics in logs:
                    if chosen := choose(metrics):
                        sink.log(step, chosen)
                    self._num_taken += 1
                self.cpu_s = time.thread_time() - opening_s
        except Exception as error:  # noqa: BLE001 - a broken sink is switched off; the run goes on
            logger.warning("the sink %s is switched off: %s: %s", self.name, type(error).__name__, error)
            self._swallow()
        if sink is not None:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001
                logger.warning("the sink %s did not close: %s: %s", self.name, type(error).__name__, error)

    def _swallow(self) -> None:
        while (logs := self._queue.get()) is not None:
            self._num_swallowed += len(logs)
            self._num_taken += len(logs)


class Worker:
    """Turns what the training thread hands over into lines and logs, at its own pace.

    Args:
        digest: Makes the run file's line of an item, and says what the sinks get of it.
        header: The run file's first line.
        queue: What the training thread hands over: steps for `digest`, or finished lines.
        end_batch: Called behind some steps that were digested one after the other. Must not raise.
        sample: Gives the machine's state; called now and then. Must not raise.
        sink_cpu_share: Share of one core that the logs of a sink may take; None sends all that are due.
    """

    def __init__(
        self,
        writer: RunWriter,
        sink_names: Iterable[str],
        context: SinkContext,
        digest: Callable[[Any], Delivery],
        header: Mapping[str, Any],
        queue: deque[Any],
        *,
        flush_every: int,
        flush_s: float,
        end_batch: Callable[[], None] = lambda: None,
        sample: Callable[[], Mapping[str, float]] | None = None,
        sink_cpu_share: float | None = None,
    ) -> None:
        self.num_dropped = 0
        """Items lost because the queue was full."""
        self.cpu_s = 0.0
        """CPU time of this thread: it holds the interpreter while it works."""
        self.writer = writer
        self._sinks: list[SinkThread] = []
        self._digest, self._end_batch = digest, end_batch
        self._flush_every = flush_every
        self._flush_s = flush_s
        self._sample = sample
        self._started_s = time.monotonic()
        self._next_sample_s = self._started_s + FIRST_SAMPLE_S
        self.queue = queue
        queue.appendleft(header)
        self._last_step = 0
        self.used: deque[Any] | None = None
        """Takes steps that hold memory which only the training thread may free."""
        self._wake = threading.Event()
        self._is_closing = False
        self._jobs: deque[Callable[[], None]] = deque()
        self._then: Callable[[], None] | None = None
        self._is_written = threading.Event()
        self._stuck_since_s = 0.0
        """When somebody began to wait in vain, if this thread has not come round since; else 0."""
        self._num_in_hand = 0
        """Items taken from the queue that are not on disk yet."""
        self._is_writing = False
        self._num_unrecorded = 0
        self._bad_keys: set[str] = set()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="flopmeter", daemon=True)
        self._thread.start()
        for name in sink_names:
            try:
                self._sinks.append(SinkThread(name, context, sink_cpu_share))
            except RuntimeError as error:  # the process may have no more threads
                logger.warning("the sink %s is switched off: %s", name, error)

    def catch_up(self) -> None:
        """Called by the training thread when steps wait, to keep them few; it never waits for the disk.

        Where they are short, this worker's thread may not have had the interpreter for many of them: then it is left to
        it for a moment, unless it is the disk that takes the time.
        """
        num_queued = len(self.queue)
        while len(self.queue) > MAX_QUEUED_STEPS:
            self.queue.pop()
            self.num_dropped += 1
        if num_queued < self._flush_every:
            return
        self._wake.set()
        end_s = time.monotonic() + HAND_OVER_S
        while len(self.queue) + self._num_in_hand >= 2 * self._flush_every and time.monotonic() < end_s:
            if self._is_writing or self._stuck_since_s or not self._thread.is_alive():
                return
            time.sleep(BREATH_S)

    @property
    def own_cpu_s(self) -> float:
        """CPU time of all threads of ours."""
        return self.cpu_s + sum(sink.cpu_s for sink in self._sinks)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is on disk; False when it takes too long."""
        return self.ask(lambda: True, timeout_s) is True

    def ask(self, job: Callable[[], _T], timeout_s: float) -> _T | None:
        """Have something done on this thread once all that was handed over is on disk, and give its answer.

        None when it takes too long; then it may still be done later, and nobody is kept waiting again until this
        thread has come round. What the job raises is raised here.
        """
        if os.getpid() != self._pid:
            return None
        end_s = time.monotonic() + COMES_ROUND_S
        while self._stuck_since_s:
            if time.monotonic() > end_s:
                return None
            time.sleep(BREATH_S)
        answers: list[_T] = []
        errors: list[Exception] = []
        is_done = threading.Event()

        def run() -> None:
            try:
                answers.append(job())
            except Exception as error:  # noqa: BLE001 - whoever asked gets it
                errors.append(error)
            finally:
                is_done.set()

        if self._thread.is_alive():
            self._jobs.append(run)
            self._wake.set()
        else:  # it has closed the record
            threading.Thread(target=run, name="flopmeter", daemon=True).start()
        start_s = time.monotonic()
        if not is_done.wait(timeout_s):
            self._stuck_since_s = start_s
            return None
        if errors:
            raise errors[0]
        return answers[0]

    def close(self, last: Iterable[Any] = (), then: Callable[[], None] | None = None, timeout_s: float = 0.0) -> bool:
        """Write everything, then the `last` lines, and let the sinks go; says whether the record is on disk.

        Bounded in time; safe to call twice.

        Args:
            then: Done on this thread once the record is closed; not at all where the disk hangs.
            timeout_s: All that there is, for the record alone: the process is about to die. 0: as long as is usual.
        """
        if self._is_closing or os.getpid() != self._pid:
            return self._is_written.is_set()
        if self.num_dropped:
            message = f"{self.num_dropped} lines lost: steps came faster than they could be written"
            logger.warning("%s", message)
            self.queue.append({"kind": "event", "event": "warning", "time": time.time(), "message": message})
        if self._num_unrecorded > 1:
            logger.warning("%d steps were not recorded", self._num_unrecorded)
        self.queue.extend(last)
        self._then = then
        self._is_closing = True
        self._wake.set()
        patience_s = timeout_s or CLOSE_TIMEOUT_S
        if self._stuck_since_s:  # nobody waits longer than that for one disk
            patience_s -= time.monotonic() - self._stuck_since_s
        is_written = self._is_written.wait(max(0.0, patience_s))
        if timeout_s:
            return is_written
        for sink in self._sinks:
            sink.end()
        if is_written:
            self._thread.join(PAGES_TIMEOUT_S)
        else:
            self._then = None
            logger.warning("the run file %s: the disk does not answer, its end is left behind", self.writer.path)
        for sink in self._sinks:
            if not sink.close(CLOSE_TIMEOUT_S):
                logger.warning("the sink %s does not answer and is left behind", sink.name)
            if sink.num_dropped:
                logger.warning("the sink %s missed %d logs", sink.name, sink.num_dropped)
            if sink.num_thinned:
                logger.info("the sink %s got no basics of %d steps: too dear", sink.name, sink.num_thinned)
        return is_written

    def _run(self) -> None:
        num_unflushed, last_flush_s = 0, time.monotonic()
        while True:
            is_closing = self._is_closing
            now_s = time.monotonic()
            if now_s >= self._next_sample_s or (is_closing and now_s - self._started_s > FIRST_SAMPLE_S):
                # Two samples make a rate: a short run needs them early, and every run one at its end.
                self._next_sample_s = math.inf if is_closing else now_s + min(SAMPLE_S, now_s - self._started_s)
                self._take_sample()
            num_unflushed += self._work()
            now_s = time.monotonic()
            is_full = num_unflushed >= self._flush_every or now_s - last_flush_s >= self._flush_s
            is_asked = bool(self._jobs)
            if (num_unflushed and is_full) or is_closing or is_asked:
                self._is_writing = True
                self.writer.flush()
                self._is_writing = False
                num_unflushed, last_flush_s = 0, now_s
                self._num_in_hand = 0
            self.cpu_s = time.thread_time()
            self._stuck_since_s = 0.0
            while self._jobs and not self.queue:
                self._jobs.popleft()()
            if is_closing and not self.queue:
                self._end()
                return
            is_behind = len(self.queue) >= self._flush_every  # short steps fill the queue faster than we wake
            if not (is_behind or is_asked or is_closing):
                self._wake.wait(WAKE_S)
                self._wake.clear()

    def _end(self) -> None:
        self.writer.close()
        self._is_written.set()
        if self._then is not None:
            try:
                self._then()
            except Exception as error:  # noqa: BLE001 - the record is whole; the reason is logged
                logger.warning("closing the run: %s: %s", type(error).__name__, error)

    def _deliver(self, item: Any, logs: dict[str, list[tuple[int, Mapping[str, float]]]]) -> Delivery | None:
        """Write an item, and collect what is due to the sinks that do not show every step."""
        if isinstance(item, Mapping):
            self.writer.write(item)
            return None
        delivery = self._digest(item)
        for line in delivery.before:
            self.writer.write(line)
        self.writer.write(delivery.line)
        if not self._sinks:
            return None
        with suppress(Exception):  # a step that the user numbered with something else: the last one does
            if abs(step := int(delivery.step)) < LARGEST_STEP:
                self._last_step = step
        metrics: Mapping[str, float] | None = None
        for sink in self._sinks:
            if not sink.takes_every_step and sink.name not in delivery.skipped_sinks:
                if metrics is None:
                    metrics = self._numbers(delivery.metrics() if delivery.metrics is not None else None)
                if metrics and sink.has_time_for(metrics):
                    logs.setdefault(sink.name, []).append((self._last_step, metrics))
        return delivery if delivery.all_metrics is not None else None

    def _numbers(self, metrics: Mapping[str, Any] | None) -> Mapping[str, float]:
        """The door to all sinks: what is no number, or has no name, stays outside, with one warning."""
        if not metrics or all(
            type(value) is float and type(key) is str and key.isascii() for key, value in metrics.items()
        ):
            return metrics or {}
        numbers: dict[str, float] = {}
        for key, value in metrics.items():
            try:
                if isinstance(value, (str, bytes)):
                    raise TypeError
                number = float(value)
                # What cannot be encoded would end a sink as well.
                numbers[key if key.isascii() else key.encode(errors="replace").decode()] = (
                    value if type(value) is int else number
                )
            except Exception:  # noqa: BLE001 - a thing of the user's: whatever it raises, it is no number
                self._refuse(repr(key)[:80] if isinstance(key, str) else type(key).__name__, type(value).__name__)
        return numbers

    def _refuse(self, key: str, kind: str) -> None:
        if key not in self._bad_keys and len(self._bad_keys) < MAX_KNOWN_BAD:
            self._bad_keys.add(key)
            logger.warning("%s is not sent to the sinks: a metric is a number with a name, this is %s", key, kind)

    def _take_sample(self) -> None:
        """Memory, power and the workers' CPU time, at a slow rate."""
        metrics = self._sample() if self._sample is not None else {}
        if metrics:
            self.writer.write({"kind": "event", "event": "resources", "time": time.time(), "metrics": metrics})
            for sink in self._sinks:
                if not sink.takes_every_step and not self._is_closing:  # what is logged last is a step
                    sink.log([(self._last_step, metrics)])

    def _work(self) -> int:
        """Digest what is queued; an item that cannot be digested costs only itself."""
        num_lines = 0
        logs: dict[str, list[tuple[int, Mapping[str, float]]]] = {}
        newest: Delivery | None = None
        while self.queue and num_lines < self._flush_every:
            if num_lines and len(self.queue) + self._num_in_hand < 2 * self._flush_every:  # else it waits for us
                time.sleep(BREATH_S)
            num_items = min(STEPS_AT_ONCE, len(self.queue), self._flush_every - num_lines)
            self._num_in_hand += num_items
            items = [self.queue.popleft() for _ in range(num_items)]
            for item in items:
                try:
                    newest = self._deliver(item, logs) or newest
                except Exception as error:  # noqa: BLE001 - one bad step must not end the record
                    self._num_unrecorded += 1
                    if self._num_unrecorded == 1:
                        message = f"a step was not recorded: {type(error).__name__}: {error}"
                        logger.warning("%s", message)
                        self.writer.write({"kind": "event", "event": "warning", "message": message})
            self._end_batch()
            num_lines += num_items
            if self.used is not None and (lent := [item for item in items if getattr(item, "has_copies", False)]):
                self.used.append(lent)
                del lent
            del item, items  # together: whenever a tensor dies, whoever waits for the interpreter wakes up for nothing
        for sink in self._sinks:
            if sink.name in logs:
                sink.log(logs[sink.name])
        if newest is not None and newest.all_metrics is not None and any(sink.takes_every_step for sink in self._sinks):
            try:
                shown = self._numbers(newest.all_metrics())
            except Exception as error:  # noqa: BLE001 - as above
                logger.warning("a step was not shown: %s: %s", type(error).__name__, error)
                return num_lines
            for sink in self._sinks:
                if sink.takes_every_step and shown:  # who shows the present wants the newest
                    sink.log([(self._last_step, shown)])
        return num_lines
