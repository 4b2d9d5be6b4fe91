"""What is done at the end of which step: a record on every one, the rest when it is due."""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flopmeter import load_run, watch
from flopmeter.config import MonitorConfig
from flopmeter.dataset_metrics import DatasetMetrics
from flopmeter.flops.workload import Needs, Seen, WorkloadReader, resolve
from flopmeter.monitor.digest import dataset_values
from flopmeter.monitor.effort import Effort
from flopmeter.monitor.recorder import IN_STEP, Recorder
from flopmeter.monitor.schedule import WARMUP_STEPS
from flopmeter.monitor.step_record import NOTHING, StepRecord
from flopmeter.schema import PHASES
from flopmeter.timing import FORWARD, PhaseClock, split
from flopmeter.timing.late import LateNumber
from simulated_device import UNKNOWN, Host, Queue


class Loop:
    """Steps of a loop that nobody runs: their records are kept."""

    def __init__(self, details_every: int = 50) -> None:
        self.records: list[StepRecord] = []
        self.failures: list[str] = []
        config = MonitorConfig.load({"monitoring": {"mfu_calculation_mode": "estimate"}})
        clock = PhaseClock()
        self.effort = Effort(config, None, clock, lambda *_, **__: None, lambda: 0.0)
        self.datasets = DatasetMetrics(1)
        self.recorder = Recorder(
            clock,
            self.effort,
            self.datasets,
            details_every,
            self.records,  # type: ignore[arg-type]
            on_failure=self.note_failure,
            event=lambda *_, **__: None,
        )

    def note_failure(self, where: str, error: Exception) -> None:
        self.failures.append(f"{where}: {error}")

    def train(self, num_steps: int, **values: Any) -> None:
        for _ in range(num_steps):
            self.recorder.on_forward((), {})
            self.recorder.on_optimizer()
            self.recorder.on_optimizer_end()
            if values:
                self.recorder.tell({**values})


def test_the_first_steps_are_marked_as_warm_up() -> None:
    loop = Loop()
    loop.train(10)
    loop.recorder.flush()
    assert [record.marks for record in loop.records] == [("warmup",)] * WARMUP_STEPS + [()] * (10 - WARMUP_STEPS)
    assert [record.index for record in loop.records] == list(range(10))


def test_what_came_together_by_dataset_goes_with_every_so_manieth_step() -> None:
    loop = Loop(details_every=4)
    for _ in range(10):
        loop.datasets.update("web", torch.tensor(2.0))
        loop.train(1)
    loop.recorder.flush()
    assert [record.index + 1 for record in loop.records if record.datasets is not None] == [4, 8]


def test_a_step_waits_for_what_the_loop_says_of_it_until_the_next_one_ends() -> None:
    loop = Loop()
    loop.train(1)
    assert loop.records == []
    loop.recorder.tell({"step": 1})
    assert [record.values["step"] for record in loop.records] == [1]
    loop.train(2)
    assert [record.values for record in loop.records[1:]] == [NOTHING]


def test_what_is_said_before_the_optimizer_steps_belongs_to_the_running_step() -> None:
    loop = Loop()
    loop.recorder.tell({"step": 1})
    loop.train(1)
    loop.recorder.flush()
    assert [record.values["step"] for record in loop.records] == [1]


class Script(Loop):
    """A loop in letters: f a forward pass, s a step of the optimizer, and numbers that it says."""

    def run(self, script: str) -> list[int | None]:
        for word in script.split():
            if word == "f":
                self.recorder.on_forward((), {})
            elif word == "s":
                self.recorder.on_optimizer()
                self.recorder.on_optimizer_end()
            else:
                self.recorder.tell({"step": int(word)})
        self.recorder.flush()
        assert [record.index for record in self.records] == list(range(len(self.records)))
        return [record.values.get("step") for record in self.records]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param("f s 1  f s 2  f s 3", [1, 2, 3], id="after the step"),
        pytest.param("f 1 s  f 2 s  f 3 s", [1, 2, 3], id="before the step"),
        pytest.param("f s 1  f s 2  f 3  f s 4  f s 5", [1, 2, 4, 5], id="after, the third skipped"),
        pytest.param("f 1  f s 2  f s 3", [2, 3], id="after, the first skipped"),
        pytest.param("f s 1  f 2  f 3  f s 4  f s 5", [1, 4, 5], id="after, two skipped in a row"),
        pytest.param("f s 1  f s 2  f 3", [1, 2], id="after, the last skipped"),
        pytest.param("f 1 s  f 2 s  f 3  f 4 s  f 5 s", [1, 2, 4, 5], id="before, the third skipped"),
        pytest.param("f 1  f 2  f s 3  f 4  f 5  f s 6  f s 7", [3, 6, 7], id="after every micro-batch"),
        pytest.param("f 1  f 2  f 3 s  f 4  f 5  f 6 s", [3, 6], id="after every backward pass"),
        pytest.param("f s  f s 2  f s  f s 4", [None, 2, None, 4], id="after, every other step"),
        pytest.param("f s  f 2 s  f s  f 4 s", [None, 2, None, 4], id="before, every other step"),
        pytest.param("f s f 1  f s f 2  f s f 3", [1, 2, 3], id="after, with a forward pass between"),
        pytest.param("f s f 1  f s f 2  f f s f 3", [1, 2, 3], id="the same, with a skipped step"),
        pytest.param("f s 1 1  f s 2 2  f s 3 3", [1, 2, 3], id="twice"),
    ],
)
def test_what_is_said_stands_with_the_step_that_it_is_of(script: str, said: list[int | None]) -> None:
    loop = Script()
    assert loop.run(script) == said
    assert loop.failures == []


class Timed(Loop):
    """A loop in letters, each of which takes a second.

    w: waits for data. x: in vain, as at the end of an epoch. f: a forward pass. n, e: one without gradients, in
    training and in evaluation mode. b: a backward pass. s: a step of the optimizer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_optimizer: bool = True) -> None:
        super().__init__()
        self.now_ns = 1_000_000_000
        self.events: list[tuple[str, dict[str, Any]]] = []
        recorder = self.recorder
        monkeypatch.setattr("flopmeter.monitor.recorder.perf_counter_ns", lambda: self.now_ns)
        monkeypatch.setattr(recorder.clock, "_now_ns", lambda: self.now_ns)
        monkeypatch.setattr(recorder, "_event", lambda event, **fields: self.events.append((event, fields)))
        recorder.has_optimizer = has_optimizer
        recorder.clock.start()
        self.calls = {
            "w": (recorder.on_wait, recorder.on_batch),
            "x": (recorder.on_wait, recorder.on_no_batch),
            "f": (lambda: recorder.on_forward((), {}), recorder.on_forward_end),
            "n": (lambda: recorder.on_evaluation(is_training=True), recorder.on_evaluation_end),
            "e": (lambda: recorder.on_evaluation(is_training=False), recorder.on_evaluation_end),
            "b": (lambda: recorder.on_backward(None), recorder.on_backward_end),
            "s": (recorder.on_optimizer, self.end_step),
        }
        self.has_optimizer = has_optimizer

    def end_step(self) -> None:
        if self.has_optimizer:
            self.recorder.on_optimizer_end()
        else:  # the loop tells by `log_step`
            self.recorder.end(self.now_ns)

    def do(self, script: str) -> None:
        for letter in script.replace(" ", ""):
            begin, end = self.calls[letter]
            begin()
            self.now_ns += 1_000_000_000
            end()

    def run(self, script: str) -> list[int]:
        """Seconds of each step so far."""
        self.do(script)
        self.recorder.flush()
        return [split(record.clock).step_ns // 1_000_000_000 for record in self.records]

    @property
    def num_pauses(self) -> int:
        return len([name for name, _ in self.events if name == "pause"])

    @property
    def roles(self) -> dict[str, float]:
        """Seconds by role."""
        found: dict[str, float] = {}
        for fields in (fields for _, fields in self.events if fields.get("is_role")):
            found[fields["name"]] = found.get(fields["name"], 0.0) + fields["duration_s"]
        return found

    @property
    def warnings(self) -> list[str]:
        return [fields["message"] for name, fields in self.events if name == "warning"]


@pytest.mark.parametrize(
    ("step", "seconds"),
    [
        pytest.param("n f b s", 4, id="self-conditioning"),
        pytest.param("e f b s", 4, id="the same in evaluation mode"),
        pytest.param("w n f b s", 5, id="with a loader"),
        pytest.param("n n n f b s", 6, id="a rollout"),
        pytest.param("f n b s", 4, id="a target network"),
        pytest.param("n f n b s", 5, id="both"),
        pytest.param("n f b n f b s", 7, id="with accumulation"),
    ],
)
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_forward_passes_without_gradients_in_every_step_belong_to_it(
    monkeypatch: pytest.MonkeyPatch, step: str, seconds: int, has_optimizer: bool
) -> None:
    loop = Timed(monkeypatch, has_optimizer=has_optimizer)
    times = loop.run(step * 10)
    assert times[WARMUP_STEPS - 1 :] == [seconds] * (11 - WARMUP_STEPS)
    assert loop.num_pauses <= WARMUP_STEPS
    assert loop.warnings == [IN_STEP]


def test_a_forward_pass_without_gradients_in_the_middle_of_a_step_is_no_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Timed(monkeypatch)
    assert loop.run("fbs fnbs fbs fbs fbnfbs fbs")[1:] == [4, 3, 3, 6, 3]
    assert loop.num_pauses == 0


def test_one_in_every_other_step_is_a_habit_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Timed(monkeypatch)  # self-conditioning is done with half of the batches
    assert loop.run("fbs nfbs fbs nfbs" + "fbs nfbs" * 4)[4:] == [3, 4] * 4
    assert loop.num_pauses == 2


@pytest.mark.parametrize("evaluation", ["eeee", "nnnn", "e"])
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_what_comes_every_few_steps_is_an_evaluation(
    monkeypatch: pytest.MonkeyPatch, evaluation: str, has_optimizer: bool
) -> None:
    loop = Timed(monkeypatch, has_optimizer=has_optimizer)
    assert loop.run(("fbs" * 3 + evaluation) * 5 + "fbs") == [3] * 16
    assert loop.num_pauses == 5
    assert loop.warnings == []


def test_an_evaluation_every_other_step_is_one_in_evaluation_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Timed(monkeypatch)
    assert loop.run("ee fbs fbs" * 6) == [3] * 12
    assert loop.num_pauses == 5  # the first one is start-up


def test_an_evaluation_is_told_from_the_steps_own_passes_by_the_models_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Timed(monkeypatch)
    assert loop.run("nfbs" * 5 + "eee" + "nfbs" * 5)[2:] == [4] * 8
    pauses = [fields["duration_s"] for name, fields in loop.events if name == "pause"]
    assert pauses[-1] == 3.0


def test_a_pass_without_gradients_that_is_the_steps_is_a_phase_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Timed(monkeypatch)
    loop.run("wnfbs" * 6)
    phases = dict(zip(PHASES, split(loop.records[-1].clock).phase_ns, strict=True))
    assert {name: ns / 1e9 for name, ns in phases.items() if ns} == {
        "data_wait": 1, "no_grad": 1, "forward": 1, "backward": 1, "optimizer": 1,
    }  # fmt: skip


def test_a_stretch_of_passes_in_training_mode_is_no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Timed(monkeypatch)
    assert loop.run("fbs" * 3 + "nnn" + "fbs" * 3 + "eee" + "fbs") == [3] * 7
    loop.recorder.tell_roles()
    assert loop.roles == {"no_grad": 3.0}
    assert [fields["name"] for name, fields in loop.events if name == "pause" and "is_role" not in fields] == ["eval"]


def test_roles_are_no_step_time_and_one_inside_another_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Timed(monkeypatch)

    def rollout() -> None:
        with loop.recorder.role("rollout"):
            loop.do("nn")
            with loop.recorder.role("reward"):
                loop.do("w")
            loop.do("n")

    for _ in range(4):
        rollout()
        loop.do("fbs fb")
        rollout()
        loop.do("s")
    assert loop.run("") == [3] * 8
    loop.recorder.tell_roles()
    assert loop.roles == {"rollout": 8 * 3.0, "reward": 8 * 1.0}
    assert not loop.warnings


@pytest.mark.parametrize("training", ["fbs", "bs"])
def test_what_has_gradients_is_training_whatever_role_it_is_in(monkeypatch: pytest.MonkeyPatch, training: str) -> None:
    loop = Timed(monkeypatch)
    loop.do("fbs")
    for _ in range(3):
        with loop.recorder.role("update"):
            loop.do("n" + training)
    assert loop.run("")[1:] == [len(training)] * 3
    loop.recorder.tell_roles()
    assert loop.roles == {"update": 3.0}
    assert loop.recorder.num_pauses == 0


def test_a_pause_keeps_its_time_from_roles_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Timed(monkeypatch)
    loop.do("fbs ee")
    with loop.recorder.role("generation"):
        loop.do("nn")
    assert loop.run("fbs") == [3, 3]
    loop.recorder.tell_roles()
    assert (loop.roles, loop.num_pauses) == ({}, 1)


def test_what_is_said_before_a_pass_without_gradients_is_still_of_the_running_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Timed(monkeypatch)
    loop.do("fbs f")
    loop.recorder.tell({"step": 2})
    loop.run("nbs")
    assert [record.values.get("step") for record in loop.records] == [None, 2]


@pytest.mark.parametrize(
    ("script", "seconds", "pauses"),
    [
        pytest.param("wewewe wfbs", 4, [6], id="in the middle of an epoch"),
        pytest.param("x wewewex wfbs", 5, [7], id="all of it"),  # the epoch's own end takes a second
        pytest.param("x" + "we" * 1500 + "x wfbs", 5, [3001], id="a long one"),
        pytest.param("weww wfbs", 4, [4], id="of batches that are left out"),
        pytest.param("wewe wnwn wfbs", 4, [8], id="in both modes"),
        pytest.param("wewex wewex wfbs", 4, [5, 5], id="twice in a row"),
    ],
)
def test_an_evaluation_over_the_loader_that_is_trained_on_is_one_pause(
    monkeypatch: pytest.MonkeyPatch, script: str, seconds: int, pauses: list[int]
) -> None:
    loop = Timed(monkeypatch)
    assert loop.run("wfbs" * 4 + script + "wfbs") == [4] * 4 + [seconds, 4]
    assert [fields["duration_s"] for name, fields in loop.events if name == "pause"] == pauses


def test_in_a_pause_that_was_told_nothing_is_a_habit(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Timed(monkeypatch)
    for _ in range(6):
        loop.do("fbs")
        loop.recorder.num_pauses = 1
        loop.do("eee")
        loop.recorder.num_pauses = 0
    assert loop.events == []
    assert loop.run("fbs eee fbs")[-1] == 3


def test_what_is_replaced_gives_its_slot_back() -> None:
    loop, free = Loop(), list[tuple[torch.Tensor, Any]]()
    numbers = [LateNumber(torch.tensor(float(value)), None, free) for value in range(6)]
    for loss in numbers:
        loop.recorder.on_forward((), {})
        loop.recorder.tell({"step": 1, "loss": loss})
    loop.recorder.on_optimizer_end()
    loop.recorder.tell({"step": 1, "loss": 6.0})
    assert [record.values["loss"] for record in loop.records] == [6.0]
    assert [slot.item() for slot, _ in free] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


class Text(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (self.embedding(input_ids).sum(-1) * attention_mask).sum()


def test_steps_that_wait_for_the_background_are_out_of_the_garbage_collectors_sight(tmp_path: Path) -> None:
    model, ids = Text(), torch.ones(2, 3, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records: deque[Any] = deque()
    with watch(model, optimizer, output_dir=tmp_path) as monitor:
        monitor.run.start_now()
        monitor.recorder._queue = records
        for step in range(1, 21):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            loss.backward()
            optimizer.step()
            monitor.log_step(step, 0, loss, loss.detach(), 1e-3)
        gc.collect()  # a tuple of numbers is let go of when it is first looked at
        steady = list(records)[WARMUP_STEPS:]
        assert len(steady) == 20 - WARMUP_STEPS
        parts = [part for record in steady for part in (record, record.clock, record.values, record.seen, *record.seen)]
        assert [part for part in parts if gc.is_tracked(part)] == []


class Event:
    """An event that the device has not passed yet."""

    has_passed = False

    def query(self) -> bool:
        return self.has_passed


def test_records_keep_their_order_while_the_device_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    loop, event = Loop(), Event()
    loop.train(1, step=1, loss=LateNumber(torch.zeros(()), event, []))
    loop.train(1, step=2)
    assert loop.records == []
    event.has_passed = True
    loop.train(1, step=3)
    assert [record.values["step"] for record in loop.records] == [1, 2, 3]


class Ahead(Loop):
    """A host that is ahead of its device, which takes a second for each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, details_every: int = 50) -> None:
        super().__init__(details_every)
        self.queue = Queue(monkeypatch)
        self.recorder.read_batches(WorkloadReader(Needs(), self.recorder.copies))

    def step(self, length: int) -> None:
        ids = torch.zeros(2, 8, dtype=torch.long)
        mask = (torch.arange(8) < length).long().repeat(2, 1)
        mask.numpy()  # shared from here on: summed at once and copied, as a mask on a GPU is
        self.recorder.on_forward((), {"input_ids": ids, "attention_mask": mask})
        self.queue.device.stream.launch(1.0)
        self.recorder.on_optimizer_end()

    def tokens(self) -> list[int | None]:
        found = [resolve(record.seen) for record in self.records]
        return [workload and workload.tokens for workload in found]


def test_without_a_word_of_the_loop_a_step_waits_for_its_lengths_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Ahead(monkeypatch)
    for length in (1, 2, 3, 4, 5):
        loop.step(length)
    assert loop.tokens() == [2]  # the first copy had nothing before it
    loop.queue.pass_s(2.0)  # the copies of the second and third step are there
    loop.step(6)
    assert loop.tokens() == [2, 4, 6]
    loop.queue.pass_s(10.0)
    loop.recorder.flush()
    assert loop.tokens() == [2, 4, 6, 8, 10, 12]
    assert loop.failures == []


def test_sums_by_dataset_are_read_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Ahead(monkeypatch, details_every=2)
    for loss in (1.0, 3.0, 5.0):
        loop.datasets.update("web", torch.tensor(loss))
        loop.step(1)
    assert [record.index for record in loop.records] == [0]
    loop.queue.pass_s(10.0)
    loop.recorder.flush()
    taken = loop.records[1].datasets
    assert taken is not None
    assert dataset_values(taken) == {"dataset/web/loss": 2.0, "dataset/web/samples": 2}  # (1 + 3) / 2


def test_what_never_comes_is_unknown_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopmeter.monitor.recorder.PATIENCE_S", 0.01)
    loop = Ahead(monkeypatch, details_every=2)
    slot = torch.tensor(UNKNOWN)
    for step in (1, 2):
        loop.datasets.update("web", torch.tensor(1.0))
        loop.step(3)
        loop.recorder.tell({"step": step, "loss": LateNumber(slot, Event(), []), "grad_norm": 0.5})
    loop.recorder.flush()
    assert loop.tokens() == [6, None]
    assert [(record.values["step"], record.values["grad_norm"]) for record in loop.records] == [(1, 0.5), (2, 0.5)]
    assert all(math.isnan(record.values["loss"]) for record in loop.records)
    taken = loop.records[1].datasets
    assert taken is not None
    assert dataset_values(taken) == {"dataset/web/samples": 2}


@pytest.mark.parametrize(("step_s", "waits_s"), [(0.1, 1.0), (2.0, 8.0), (60.0, 10.0)])
def test_the_last_numbers_are_waited_for_as_long_as_steps_take(
    step_s: float, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Host()
    monkeypatch.setattr("flopmeter.monitor.recorder.monotonic", lambda: clock.now_s)
    monkeypatch.setattr("flopmeter.monitor.recorder.sleep", clock.work)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    loop = Loop()
    values = {"step": 1, "loss": LateNumber(torch.zeros(()), Event(), [])}
    loop.recorder._pending.append(StepRecord(0, 0.0, (0, FORWARD, round(step_s * 1e9)), values=values))
    loop.recorder.flush()
    assert clock.now_s == pytest.approx(waits_s, abs=0.01)
    assert math.isnan(loop.records[0].values["loss"])


def test_a_device_that_fails_leaves_the_step_without_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Ahead(monkeypatch)
    loop.queue.device.fail_at_query = 1
    loop.step(3)
    loop.step(3)
    loop.recorder.flush()
    assert loop.tokens() == [None, None]
    assert loop.failures == []


def test_a_measured_step_learns_from_lengths_that_have_come_and_from_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopmeter.monitor.effort.COPIES_S", 0.01)
    loop, learnt = Ahead(monkeypatch), []

    class Source:
        is_measuring, kind, measures, is_choosy = True, "observed", False, False

        def note_call(self, args: Any, kwargs: Any) -> None:
            pass

        def is_changed(self) -> bool:
            return False

        def finish(self, seen: Callable[[], Sequence[Seen]]) -> None:
            workload = resolve(seen())
            learnt.append(workload and workload.tokens)

    loop.recorder.source = Source()  # type: ignore[assignment]
    for length, waits_s in ((3, 0.0), (4, 0.0), (5, 10.0)):
        loop.effort.is_measuring = True
        loop.step(length)
        loop.queue.pass_s(waits_s)
    loop.effort.is_measuring, loop.effort.next_look = True, 0
    loop.step(6)
    # The second and the third copy lie behind a step that the device has not done.
    assert learnt == [6, None, None, 12]
    assert loop.failures == []


def test_a_device_that_is_seconds_behind_is_waited_for_once_the_count_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, told = Ahead(monkeypatch), []
    host = loop.queue.device.host
    monkeypatch.setattr("flopmeter.timing.late.sleep", lambda _: loop.queue.pass_s(0.01))
    monkeypatch.setattr("flopmeter.timing.late.monotonic", lambda: host.now_s)

    class Source:
        is_measuring, kind, measures, is_choosy = True, "observed", False, False

        def note_call(self, args: Any, kwargs: Any) -> None:
            pass

        def is_changed(self) -> bool:
            return False

        def finish(self, seen: Callable[[], Sequence[Seen]]) -> None:
            told.append(host.now_s)
            workload = resolve(seen())
            told.append(workload and workload.tokens)
            told.append(host.now_s)

    loop.step(3)
    loop.step(4)
    loop.step(5)
    loop.recorder.source = Source()  # type: ignore[assignment]
    loop.effort.is_measuring, loop.effort.next_look = True, 0
    loop.step(6)  # behind three steps of a second each
    assert told == [0.0, 12, pytest.approx(3.0, abs=0.02)]
    assert loop.failures == []


def test_a_wish_of_the_background_is_seen_at_the_next_step() -> None:
    loop = Loop()
    loop.train(11)  # tried in vain after 3 and 11: an estimate measures nothing
    looks: list[int] = []
    loop.effort.begin_step = lambda source, model, num_steps, _: looks.append(num_steps)  # type: ignore[method-assign]
    loop.train(1)
    assert looks == []
    loop.effort._source = type("Unproven", (), {"lacks_proof": False, "lacks_kind": True})()
    loop.effort.note_steps([(11, 1.0)])  # digested: no counted step had what it was given
    loop.train(1)
    assert looks == [13]


def test_a_failure_is_told_and_does_not_come_out() -> None:
    loop = Loop()

    class Refusing(deque[Any]):
        def append(self, item: Any) -> None:
            raise OSError("planted")

    loop.recorder._queue = Refusing()
    loop.train(2)
    assert loop.failures == ["the end of a step: planted"]


def test_switched_off_it_makes_no_more_records() -> None:
    loop = Loop()
    loop.recorder.switch_off()
    loop.train(3)
    loop.recorder.flush()
    assert loop.records == []
    assert loop.recorder.num_steps == 0


@pytest.mark.parametrize("is_told_after", [False, True])
def test_a_mask_that_is_told_with_the_step_is_that_steps(tmp_path: Path, is_told_after: bool) -> None:
    model, ids = torch.nn.Embedding(4, 2), torch.ones(2, 8, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=tmp_path) as monitor:
        for step in range(1, 9):
            mask = (torch.arange(8) < step).long().expand(2, 8)
            model(ids).sum().backward()
            if is_told_after:
                optimizer.step()
            monitor.log_step(step, attention_mask=mask)
            if not is_told_after:
                optimizer.step()
    run = load_run(tmp_path)
    tokens = [
        rate * step_s
        for rate, step_s in zip(run.column("perf/tokens_per_second"), run.column("perf/step_time"), strict=True)
    ]
    assert tokens == pytest.approx([2.0 * step for step in range(1, 9)])
