"""Threads, forks and the user's own profiler: nothing of ours disturbs them, or is left behind by them."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, IterableDataset

from flopmeter import load_run, watch

SETTINGS = {"sinks": [], "report": False, "peak_flop_per_s": 1e12}
CONFIG = {"monitoring": SETTINGS}

PRELUDE = """
import ctypes, json, os, sys, threading, time
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from flopmeter import load_run, watch

torch.set_num_threads(1)
mode, out = sys.argv[1:3]
monitoring = {"sinks": [], "report": False, "peak_flop_per_s": 1e12, "mfu_calculation_mode": mode}
if mode == "profiler":
    monitoring["flops_profile_freq"] = 1

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.inside = lambda: None

    def forward(self, batch):
        self.inside()
        return self.layer(batch)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def state():
    return [torch._C._len_torch_dispatch_stack(), torch._C._autograd._profiler_enabled()]

def step():
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def elsewhere(action):
    # The loop waits for what another thread does.
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()

def wait_for_measurement(action, wants):
    # Steps until one is measured in the wanted way; in its forward pass the action is run, once.
    done = []
    def inside():
        if not done and torch.is_grad_enabled() and wants(*state()):
            done.append(True)
            action()
    model.inside = inside
    for _ in range(5000):
        step()
        if done:
            return
        time.sleep(0.001)  # the background thread decides when the first step is sampled
    raise SystemExit("no step was measured")

WANTS = {"observed": lambda modes, profiler: modes, "profiled": lambda modes, profiler: profiler}
"""
KINDS = {"observed": ("smart", "observed"), "profiled": ("profiler", "profiled"), "sampled": ("smart", "profiled")}
"""What is measured: the mode in which it is, and what tells it from the others."""


def run(mode: str, out: Path, script: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which may crash or hang."""
    command = [sys.executable, "-c", PRELUDE + dedent(script), mode, str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def answer(mode: str, out: Path, script: str) -> Any:
    done = run(mode, out, script)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pause_and_an_evaluation_on_another_thread_leave_a_measured_step_alone(kind: str, tmp_path: Path) -> None:
    mode, wanted = KINDS[kind]
    during, after, finished = answer(
        mode,
        tmp_path,
        f"""
        monitor = watch(model, optimizer, None, out, {{"monitoring": monitoring}})
        states = []
        def disturb():
            with monitor.pause("checkpoint"), torch.no_grad():
                pass
            with torch.no_grad():
                model(torch.ones(2, 8))
        def inside():
            elsewhere(disturb)
            states.append(state())
        wait_for_measurement(inside, WANTS["{wanted}"])
        model.inside = lambda: states.append(state())
        step()
        step()
        model.inside = lambda: None
        monitor.finish_training()
        print(json.dumps([states[0], min(states[1:]), state()]))
        """,
    )
    assert finished == [0, False]
    if mode == "smart":
        assert after == [0, False]
    assert during == ([1, False] if kind == "observed" else [0, True])  # it goes on, on its own thread
    loaded = load_run(tmp_path)
    assert [event["name"] for event in loaded.named("pause") if event["name"] != "flopmeter"] == []
    beside = [event for event in loaded.events if event.get("name") == "checkpoint"]
    assert len(beside) == 1
    assert "another thread" in beside[0]["message"]
    mark = "observed" if kind == "observed" else "profiled"
    assert any(mark in marks for marks in loaded.marks.values())
    if kind != "sampled":  # 4 x 8 products of 8, forward and for the weights
        assert {count["model_flop"] for count in loaded.named("count")} == {2.0 * 4 * 8 * 8 * 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_finished_by_another_thread_in_a_measured_step_leaves_nothing_behind(
    kind: str, tmp_path: Path
) -> None:
    mode, wanted = KINDS[kind]
    state, num_hooks, is_as_before = answer(
        mode,
        tmp_path,
        f"""
        names = ("backward", "_engine_run_backward")
        before = [getattr(torch.autograd, name) for name in names] + [dict(vars(torch.autograd.profiler.profile))]
        monitor = watch(model, optimizer, None, out, {{"monitoring": monitoring}})
        wait_for_measurement(lambda: elsewhere(monitor.finish_training), WANTS["{wanted}"])
        step()
        hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
        hooks += [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
        after = [getattr(torch.autograd, name) for name in names] + [dict(vars(torch.autograd.profiler.profile))]
        print(json.dumps([state(), sum(hooks), after == before]))
        """,
    )
    assert (state, num_hooks, is_as_before) == ([0, False], 0, True)


def test_a_training_thread_that_ends_in_a_measured_step_leaves_no_hooks(tmp_path: Path) -> None:
    # After three steps the fourth is to be observed: the thread ends before it.
    num_hooks, num_steps, is_as_before = answer(
        "smart",
        tmp_path,
        """
        before = torch.autograd.backward, torch.autograd._engine_run_backward
        monitor = watch(model, optimizer, None, out, {"monitoring": monitoring})
        elsewhere(lambda: [step() for _ in range(3)])
        monitor.finish_training()
        step()
        hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
        after = torch.autograd.backward, torch.autograd._engine_run_backward
        print(json.dumps([sum(hooks), monitor.num_steps, after == before]))
        """,
    )
    assert (num_hooks, num_steps, is_as_before) == (0, 3, True)


@pytest.mark.parametrize("mode", ["profiler", "smart"])
def test_steps_on_changing_threads_count_and_none_is_measured(mode: str, tmp_path: Path) -> None:
    num_steps, states = answer(
        mode,
        tmp_path,
        """
        monitor = watch(model, optimizer, None, out, {"monitoring": monitoring})
        states, go, done = [], [threading.Semaphore(0) for _ in range(3)], threading.Semaphore(0)
        def worker(number):  # as a pool's: it lives on between its steps
            while go[number].acquire():
                if number_of_steps[0] >= 60:
                    return
                step()
                states.append(state())
                done.release()
        number_of_steps = [0]
        threads = [threading.Thread(target=worker, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for index in range(60):
            go[index % 3].release()
            done.acquire()
            number_of_steps[0] += 1
        for semaphore in go:
            semaphore.release()
        for thread in threads:
            thread.join()
        monitor.finish_training()
        print(json.dumps([monitor.num_steps, [max(s[0] for s in states[6:]), any(s[1] for s in states)]]))
        """,
    )
    assert num_steps == 60
    assert states == [0, False]
    loaded = load_run(tmp_path)
    assert {mark for marks in loaded.marks.values() for mark in marks} == {"warmup"}
    assert all(share > 0 for share in loaded.column("perf/backward_share"))
    assert "changing threads" in str(loaded.named("warning"))


@pytest.mark.parametrize("kind", ["profiled", "sampled"])
def test_a_profiler_on_a_thread_that_the_loop_waits_for_comes_out_whole_beside_a_profiled_step(
    kind: str, tmp_path: Path
) -> None:
    theirs, state, on_main = answer(
        KINDS[kind][0],
        tmp_path,
        """
        def num_products(session):
            return sum(event.name == "aten::mm" for event in session.events())
        monitor = watch(model, optimizer, None, out, {"monitoring": monitoring})
        sessions = []
        def theirs():
            with profile(activities=[ProfilerActivity.CPU]) as session:
                for _ in range(3):
                    torch.ones(4, 4).mm(torch.ones(4, 4))
            sessions.append(session)
        wait_for_measurement(lambda: elsewhere(theirs), WANTS["profiled"])
        step()
        between = state()
        with profile(activities=[ProfilerActivity.CPU]) as session:
            torch.ones(4, 4).mm(torch.ones(4, 4))
        step()
        monitor.finish_training()
        print(json.dumps([num_products(sessions[0]), between, num_products(session)]))
        """,
    )
    assert (theirs, state, on_main) == (3, [0, False], 1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and the C library's exit handlers")
def test_a_child_that_is_forked_after_a_profiled_step_runs_the_exit_handlers_of_its_parent(tmp_path: Path) -> None:
    # Each handler removes a folder: one from before the profile, one from after it, and one of the child's own.
    codes, left = answer(
        "profiler",
        tmp_path / "run",
        """
        libc = ctypes.CDLL(None)
        names = []
        def at_exit(name):
            path = os.path.join(os.path.dirname(out), name).encode()
            os.mkdir(path)
            names.append(path)
            libc.__cxa_atexit(libc.rmdir, ctypes.c_char_p(path), None)
        at_exit("before")
        monitor = watch(model, optimizer, None, out, {"monitoring": monitoring})
        wait_for_measurement(lambda: None, WANTS["profiled"])
        step()
        monitor.finish_training()
        at_exit("after")
        codes = []
        for code in (0, 3):
            child = os.fork()
            if not child:
                at_exit(f"child {code}")
                step()
                sys.exit(code)
            for _ in range(300):
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    codes.append(os.waitstatus_to_exitcode(status))
                    break
                time.sleep(0.1)
            else:
                os.kill(child, 9)
                codes.append("hangs")
            if code == 0:
                left = [name for name in os.listdir(os.path.dirname(out)) if name != "run"]
                for path in names:
                    os.makedirs(path, exist_ok=True)
        print(json.dumps([codes, left]))
        """,
    )
    assert (codes, left) == ([0, 3], [])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), 0.1)


BATCHES = [torch.ones(4, 8) for _ in range(6)]


def test_no_profile_begins_while_a_range_of_the_last_one_is_open(tmp_path: Path) -> None:
    """Torch would write the end of that range, here the optimizer's or the program's, into memory that it has freed."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {**SETTINGS, "mfu_calculation_mode": "profiler", "flops_profile_freq": 1}
    is_profiled = []
    around: torch.profiler.record_function | None = None
    with watch(model, optimizer, output_dir=tmp_path, config={"monitoring": settings}):
        for step in range(60):
            is_profiled.append(torch.autograd._profiler_enabled())
            if is_profiled[-1] and around is None and step > 30:
                around = torch.profiler.record_function("epoch")
                around.__enter__()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    profiled = [step for step, yes in enumerate(is_profiled) if yes]
    assert len(profiled) > 5
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(profiled))
    assert around is not None
    assert sum(step > 30 for step in profiled) == 1
    around.__exit__(None, None, None)
    warnings = [str(event.get("message")) for event in load_run(tmp_path).events if event["event"] == "warning"]
    assert any("inside a record_function" in message for message in warnings)


@pytest.mark.parametrize("mode", ["smart", "profiler", "estimate", "hybrid"])
def test_torchs_profiler_is_not_patched_after_runs_that_end_in_another_order_than_they_began(
    mode: str, tmp_path: Path
) -> None:
    before = dict(vars(torch.autograd.profiler.profile))
    config = {"monitoring": {**SETTINGS, "mfu_calculation_mode": mode}}
    (first, one), (second, other) = made(), made()
    monitors = [watch(first, one, None, tmp_path / "1", config), watch(second, other, None, tmp_path / "2", config)]
    train(first, one, BATCHES)
    train(second, other, BATCHES)
    for monitor in monitors:
        monitor.finish_training()
    assert dict(vars(torch.autograd.profiler.profile)) == before


def test_no_step_is_observed_beside_the_users_profiler_and_one_that_is_gives_way(tmp_path: Path) -> None:
    model, optimizer = made()
    monitor = watch(model, optimizer, None, tmp_path / "run", CONFIG)
    with profile(activities=[ProfilerActivity.CPU]) as session:
        train(model, optimizer, BATCHES)
    monitor.finish_training()
    names = {event.name for event in session.events()}
    assert "aten::addmm" in names
    assert not any("DispatchMode" in name for name in names)

    started: list[profile] = []

    def start(*_: Any) -> None:
        if torch._C._len_torch_dispatch_stack() and not started:
            started.append(profile(activities=[ProfilerActivity.CPU]))
            started[0].start()

    monitor = watch(model, optimizer, None, tmp_path / "other", CONFIG)
    handle = model.register_forward_pre_hook(start)
    train(model, optimizer, BATCHES)
    handle.remove()
    started[0].stop()
    monitor.finish_training()
    names = {event.name for event in started[0].events()}
    assert "aten::addmm" in names
    assert not any("DispatchMode" in name for name in names)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(24, 8))


class Wrapper:
    """As Accelerate's and others': keeps a loader and does something with each batch."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self.inner:
            yield batch * 2


class Pipeline(Wrapper):
    """As webdataset's: a list of stages, of which the first is the loader."""

    def __init__(self, inner: Any) -> None:
        self.stages = [inner, None]

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.stages[0]


class Own:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(BATCHES)


TIMED: dict[str, Callable[[], Any]] = {
    "loader of a stream": lambda: DataLoader(Stream(), 4),
    "wrapper": lambda: Wrapper(DataLoader(torch.ones(24, 8), 4)),
    "wrapper of a wrapper": lambda: Wrapper(Wrapper(DataLoader(Stream(), 4))),
    "pipeline": lambda: Pipeline(DataLoader(torch.ones(24, 8), 4)),
}
UNTIMED: dict[str, Callable[[], Any]] = {
    "list": lambda: BATCHES,
    "generator": lambda: (batch for batch in BATCHES),
    "object": Own,
}


@pytest.mark.parametrize("kind", [*TIMED, *UNTIMED])
def test_the_wait_for_any_loader_is_timed_or_it_is_said_how(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = made()
    loader = (TIMED | UNTIMED)[kind]()
    monitor = watch(model, optimizer, loader, tmp_path, CONFIG)
    train(model, optimizer, loader)
    monitor.finish_training()
    loaded = load_run(tmp_path)
    assert len(loaded) == 6
    messages = [event["message"] for event in loaded.named("warning") if "monitor.batches" in event["message"]]
    if kind in TIMED:
        assert all(share > 0 for share in loaded.column("perf/data_wait_share"))
        assert messages == []
    else:
        assert len(messages) == 1
        assert [record.getMessage() for record in caplog.records].count(messages[0]) == 1


def test_batches_that_the_monitor_hands_out_are_timed_without_a_word(tmp_path: Path) -> None:
    model, optimizer = made()
    monitor = watch(model, optimizer, BATCHES, tmp_path, CONFIG)
    train(model, optimizer, monitor.batches(BATCHES))
    monitor.finish_training()
    loaded = load_run(tmp_path)
    assert all(share > 0 for share in loaded.column("perf/data_wait_share"))
    assert not any("monitor.batches" in event["message"] for event in loaded.named("warning"))


def test_a_training_on_another_thread_than_watch_was_called_on_is_timed_in_all_phases(tmp_path: Path) -> None:
    model, optimizer = made()
    loader = DataLoader(torch.ones(24, 8), 4)
    monitor = watch(model, optimizer, loader, tmp_path, CONFIG)
    thread = threading.Thread(target=train, args=(model, optimizer, loader))
    thread.start()
    thread.join()
    monitor.finish_training()
    loaded = load_run(tmp_path)
    for phase in ("data_wait", "forward", "backward", "optimizer"):
        assert all(share > 0 for share in loaded.column(f"perf/{phase}_share")), phase
    assert any("observed" in marks for marks in loaded.marks.values())


def test_batches_that_a_prefetching_thread_fetches_are_said_not_to_be_timed(tmp_path: Path) -> None:
    model, optimizer = made()
    loader = DataLoader(torch.ones(24, 8), 4)
    monitor = watch(model, optimizer, loader, tmp_path, CONFIG)
    iterator = iter(loader)

    def prefetched() -> Iterator[torch.Tensor]:
        for _ in range(6):
            fetched: list[torch.Tensor] = []
            thread = threading.Thread(target=lambda: fetched.append(next(iterator)))  # noqa: B023 - joined below
            thread.start()
            thread.join()
            yield fetched[0]

    train(model, optimizer, prefetched())
    monitor.finish_training()
    loaded = load_run(tmp_path)
    assert sum("monitor.batches" in event["message"] for event in loaded.named("warning")) == 1
    assert all(share > 0 for share in loaded.column("perf/backward_share"))


def test_copies_of_the_model_on_threads_of_their_own_do_not_disturb_the_step(tmp_path: Path) -> None:
    # As nn.DataParallel around a watched model: each thread has half of the batch, at the same time.
    model, optimizer = made()
    monitor = watch(model, optimizer, None, tmp_path, CONFIG)
    for _ in range(20):
        outs: list[torch.Tensor] = []
        both = threading.Barrier(2)

        def forward(both: threading.Barrier = both, outs: list[torch.Tensor] = outs) -> None:
            both.wait(60)
            outs.append(model(torch.ones(2, 8)))
            both.wait(60)

        threads = [threading.Thread(target=forward) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cat(outs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.finish_training()
    assert torch._C._len_torch_dispatch_stack() == 0
    loaded = load_run(tmp_path)
    assert len(loaded) == 20
    assert all(share > 0 for share in list(loaded.column("perf/backward_share"))[1:])
    samples = [
        rate * step_s
        for rate, step_s in zip(loaded.column("perf/samples_per_second"), loaded.column("perf/step_time"), strict=True)
    ]
    assert all(math.isclose(number, 4, rel_tol=1e-6) for number in samples)
    assert "are not timed" in str(loaded.named("warning"))


AT_EXIT = """
import sys, time
import torch.distributed as dist
from flopmeter.distributed.exchange import Exchange, Greeting, Mailbox

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

class Busy(Mailbox):  # for a while it asks again and again, as over a slow network: most of the time is inside torch
    has_asked = False
    def has(self, names):
        self.has_asked = True
        end_s = time.monotonic() + 2.0
        while time.monotonic() < end_s:
            super().has(names)
        return False

mailbox = Busy(store, "here")
nothing = lambda *_: None
exchange = Exchange(1, 2, Greeting(host="", device="", digest=""), lambda: mailbox, on_joined=nothing,
                    on_packets=nothing, on_plan=nothing, on_off=nothing, join_s=60.0)
exchange.start()
while not mailbox.has_asked:
    time.sleep(0.01)
if sys.argv[1] == "closed":
    exchange.close(0.0, b"")
    assert exchange._thread.is_alive()
print("done")
"""


@pytest.mark.parametrize("ending", ["closed", "forgotten"])
def test_a_process_that_ends_while_it_talks_to_a_store_is_not_aborted(ending: str) -> None:
    answer = subprocess.run([sys.executable, "-c", AT_EXIT, ending], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "done\n", "")
