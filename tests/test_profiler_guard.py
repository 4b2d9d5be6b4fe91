"""Our profiler session and the user's: theirs always comes out whole, and no order of events crashes the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch.autograd import profiler as torch_profiler

from flopmeter.errors import CountError
from flopmeter.profiling import profiler_guard
from flopmeter.profiling.profiler_guard import Recording

PRELUDE = """
import json, sys, threading, torch
from torch.profiler import ProfilerActivity, profile, schedule
from flopmeter.errors import CountError
from flopmeter.profiling import profiler_guard
from flopmeter.profiling.profiler_guard import Recording

layer = torch.nn.Linear(8, 8)

def step():
    layer(torch.ones(2, 8)).sum().backward()

def num_products(session):
    return sum(event.name() == "aten::addmm" for event in session.kineto_results.events())
"""


# Each script runs in a process of its own, because what is tested for is that it does not crash. All are forks of one
# that has imported torch, and has used nothing of it.
FORKS = """
import os
for line in sys.stdin:
    script, out, err = json.loads(line)
    child = os.fork()
    if not child:
        for number, path in ((0, os.devnull), (1, out), (2, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
        exec(script)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Run = Callable[[str], "subprocess.CompletedProcess[str]"]
OutputOf = Callable[[str], Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    if not hasattr(os, "fork"):
        pytest.skip("no forks here")
    folder = tmp_path_factory.mktemp("scripts")
    command, pipe = [sys.executable, "-c", PRELUDE + FORKS], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:

        def run(script: str) -> subprocess.CompletedProcess[str]:
            out, err = (folder / f"{len(list(folder.iterdir()))}{kind}" for kind in ("out", "err"))
            for path in (out, err):
                path.touch()
            assert server.stdin is not None
            assert server.stdout is not None
            print(json.dumps([dedent(script), str(out), str(err)]), file=server.stdin, flush=True)
            code = int(server.stdout.readline())
            return subprocess.CompletedProcess(script, code, out.read_text(), err.read_text())

        yield run
        server.communicate()


@pytest.fixture
def output_of(run: Run) -> OutputOf:
    def output_of(script: str) -> Any:
        done = run(script)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return output_of


def test_a_scheduled_profiler_keeps_its_events_whenever_ours_wants_to_run(output_of: OutputOf) -> None:
    # One cycle is 5 steps: 2 waited, 1 warmed up, 2 recorded. Ours starts at each of them, and runs for 1 or 3 steps.
    results = output_of(
        """
        results = []
        for offset in range(10):
            for length in (1, 3):
                theirs, ours, recording = [], "refused", Recording()
                plan = schedule(wait=2, warmup=1, active=2, repeat=2)
                ready = lambda done: theirs.append(num_products(done.profiler))
                with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=ready) as user:
                    for i in range(12):
                        if i == offset:
                            try:
                                recording.start()
                                ours = "started"
                            except CountError:
                                pass
                        step()
                        if i == offset + length - 1 and ours == "started":
                            recording.stop()
                            ours = "cut short" if recording.was_cut_short else "whole"
                        user.step()
                results.append((theirs, ours))
        print(json.dumps(results))
        """
    )
    assert [theirs for theirs, _ in results] == [[2, 2]] * 20
    # Steps 0, 1, 5 and 6 are free for one step; a longer recording meets their warm-up, except after their last cycle.
    assert [ours for _, ours in results[0::2]] == ["whole" if i in (0, 1, 5, 6) else "refused" for i in range(10)]
    assert [ours for _, ours in results[1::2]] == ["cut short" if i in (0, 1, 5, 6) else "refused" for i in range(10)]


def test_a_profiler_that_warmed_up_before_anyone_watched_is_found(output_of: OutputOf) -> None:
    theirs, ours = output_of(
        """
        theirs, ours = [], "started"
        plan = schedule(wait=0, warmup=1, active=1, repeat=1)
        ready = lambda done: theirs.append(num_products(done.profiler))
        with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=ready) as user:
            try:
                Recording().start()
            except CountError:
                ours = "refused"
            user.step()
            step()
            user.step()
        print(json.dumps([theirs, ours]))
        """
    )
    assert (theirs, ours) == ([1], "refused")


def test_a_profiler_on_another_thread_starts_at_once_and_ours_is_put_away_when_theirs_has_ended(
    output_of: OutputOf,
) -> None:
    theirs, ours, is_on, blocker, later = output_of(
        """
        recording, begun, go_on, theirs = Recording(), threading.Event(), threading.Event(), []
        recording.start()

        def record():
            with profile(activities=[ProfilerActivity.CPU]) as user:
                step()
                begun.set()
                go_on.wait(60)
            theirs.append(num_products(user.profiler))

        thread = threading.Thread(target=record)
        thread.start()
        assert begun.wait(60)
        step()
        ours = len(recording.stop())
        is_on = [torch._C._autograd._profiler_enabled()]
        go_on.set()
        thread.join()
        blocker = profiler_guard.blocker()
        is_on.append(torch._C._autograd._profiler_enabled())
        with profile(activities=[ProfilerActivity.CPU]) as user:
            step()
        print(json.dumps([theirs, ours, is_on, blocker, num_products(user.profiler)]))
        """
    )
    assert (theirs, ours, later) == ([1], 0, 1)
    assert is_on == [True, False]
    assert blocker == "the program profiles on another thread than the one that trains"


def test_nothing_of_torchs_stays_replaced_when_nobody_watches() -> None:
    before = vars(torch_profiler.profile).copy()
    ends = [profiler_guard.watch(), profiler_guard.watch()]
    assert vars(torch_profiler.profile) != before
    ends[0]()
    recording = Recording()
    recording.start()
    ends[1]()
    assert vars(torch_profiler.profile) != before
    recording.stop()
    assert vars(torch_profiler.profile) == before


def test_a_script_that_fails_while_we_record_ends_with_its_own_exit_code(run: Run) -> None:
    assert run("Recording().start(); step(); sys.exit(3)").returncode == 3


def test_workers_that_are_forked_while_we_record_do_their_work(output_of: OutputOf) -> None:
    batches = output_of(
        """
        recording = Recording()
        recording.start()
        loader = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2, num_workers=2)
        batches = [batch.tolist() for batch in loader]
        assert recording.stop()
        print(json.dumps(batches))
        """
    )
    assert batches == [[0, 1], [2, 3], [4, 5]]


def test_nothing_is_started_inside_a_running_profiler() -> None:
    theirs = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with theirs, pytest.raises(CountError, match="another profiler session"):
        Recording().start()
    assert profiler_guard.blocker() is None


def test_a_profiler_that_was_started_behind_our_back_is_noticed_by_torchs_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_profiler, "_is_profiler_enabled", True)
    assert profiler_guard.blocker() == "another profiler is running"


def test_two_recordings_of_ours_do_not_run_at_once() -> None:
    first = Recording()
    first.start()
    with pytest.raises(CountError, match="by flopmeter"):
        Recording().start()
    torch.ones(2).add(1)
    assert len(first.stop()) > 0


def test_a_recording_is_stopped_only_once_and_only_by_its_own_thread() -> None:
    recording, refusals = Recording(), []

    def stop() -> None:
        try:
            recording.stop()
        except CountError as error:
            refusals.append(str(error))

    recording.start()
    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    torch.ones(2).add(1)
    assert "on the thread that started it" in refusals[0]
    assert [event.name() for event in recording.stop()].count("aten::add") == 1
    assert recording.stop() == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch_profiler.profile, "_prepare_trace"),
        (torch_profiler, "_is_profiler_enabled"),
        (torch._C._autograd, "_profiler_enabled"),
    ],
)
def test_nothing_is_started_on_a_torch_that_hides_other_profilers(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    assert name in str(profiler_guard.blocker())


def test_nothing_is_started_beside_a_tool_that_holds_cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert profiler_guard.blocker() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "NSYS_PROFILING_SESSION_ID" in str(profiler_guard.blocker())


CUDA = """
torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.synchronize = lambda device: None
torch.autograd.profiler._supported_activities = lambda: {ProfilerActivity.CPU, ProfilerActivity.CUDA}
recording = Recording(with_shapes=False, devices=[torch.device("cuda", 1), torch.device("cuda", 2)])
"""
"""Makes the profiler believe in a GPU: as far as it checks names, torch's code is the same."""


def test_what_a_gpu_does_is_asked_for_by_names_in_the_groups_where_torch_has_them(output_of: OutputOf) -> None:
    # One name in the wrong group, and torch refuses the whole session.
    names = output_of(CUDA + "recording.start(); step(); print(json.dumps([e.name() for e in recording.stop()]))")
    assert "aten::addmm" in names


def test_the_devices_that_hold_the_model_are_waited_for_and_no_other(output_of: OutputOf) -> None:
    # The current device is cuda:0, which the model does not use: a wait there would make a context on it.
    waited_for = output_of(
        CUDA
        + """
waited_for = []
torch.cuda.synchronize = lambda device=None: waited_for.append(str(device))
recording.start(); step(); recording.stop()
print(json.dumps(waited_for))
"""
    )
    assert waited_for == ["cuda:1", "cuda:2"]


@pytest.mark.parametrize(
    "obstacle", ["is_current_stream_capturing = lambda: True", "synchronize = lambda device: 1 / 0"]
)
def test_a_session_ends_although_the_device_cannot_be_waited_for(output_of: OutputOf, obstacle: str) -> None:
    # Left running, it would crash the interpreter at its end. A wait during a capture would spoil the user's graph.
    events, was_cut_short, is_on, blocker = output_of(
        CUDA
        + f"""
recording.start()
torch.cuda.synchronize = lambda device: print("waited")
torch.cuda.{obstacle}
step()
events = len(recording.stop())
print(json.dumps([events, recording.was_cut_short, torch._C._autograd._profiler_enabled(), profiler_guard.blocker()]))
"""
    )
    assert (events, was_cut_short, is_on, blocker) == (0, True, False, None)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is mended")
@pytest.mark.slow
def test_a_child_that_is_forked_after_a_profile_ends_as_it_wants_to(output_of: OutputOf) -> None:
    answer = output_of("""
        import os, time
        recording = Recording()
        recording.start()
        step()
        recording.stop()

        def status_of(child):
            for _ in range(300):
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.1)
            os.kill(child, 9)
            return "hangs"

        def forked(code):
            sys.stdout.flush()
            child = os.fork()
            if not child:
                sys.exit(code)
            return status_of(child)

        codes = [forked(code) for code in (0, 3)]
        sys.stdout.flush()
        child = os.fork()
        if not child:
            step()
            sys.exit(forked(4))  # a child's child
        print(json.dumps([*codes, status_of(child)]))
        """)
    assert answer == [0, 3, 4]


def test_what_a_forked_child_prints_arrives(run: Run) -> None:
    done = run("""
        import ctypes, os
        recording = Recording()
        recording.start()
        recording.stop()
        child = os.fork()
        if not child:
            print("from Python")
            ctypes.CDLL(None).puts(b"from C")  # in a buffer that Python knows nothing of
            sys.exit(0)
        os.waitpid(child, 0)
        """)
    assert sorted(done.stdout.split("\n")) == ["", "from C", "from Python"]
