"""Lines of the loop's own code: what a stack tells, by stacks made by hand, and one burst on a real thread."""

from __future__ import annotations

import os
import sysconfig
import threading
from types import CodeType
from typing import Any

import flopmeter
from flopmeter.profiling.frames import FrameWatch, Stack

LIBRARIES = sysconfig.get_path("purelib")
OURS = os.path.dirname(flopmeter.__file__)


def code(file: str, name: str = "run") -> CodeType:
    return compile("0", file, "exec").replace(co_name=name)


MAIN, HELPER = code("/home/me/train.py", "main"), code("/home/me/data.py", "read")
CALL = code(f"{LIBRARIES}/torch/nn/modules/module.py", "_call_impl")
STEP = code(f"{LIBRARIES}/torch/optim/optimizer.py", "wrapper")
MEMMAP = code(f"{LIBRARIES}/numpy/memmap.py", "__getitem__")
FORWARD: Stack = [(CALL, 1), (MAIN, 10)]


def watch(*stacks: Stack) -> FrameWatch:
    found = FrameWatch(lambda *_, **__: None, 0.005)
    for stack in stacks:
        assert found.note(stack)
    return found


def test_a_line_of_the_loop_is_named_with_the_line_that_it_had_come_to() -> None:
    reading: Stack = [(MEMMAP, 5), (HELPER, 7), (MAIN, 12)]
    rows = watch(FORWARD, reading, reading, reading, [(MAIN, 14)]).rows()
    assert rows == [("train.py:12, in data.py:7", 0.75), ("train.py:14", 0.25)]


def test_what_runs_below_a_module_or_an_optimizer_is_not_the_loops_own() -> None:
    assert watch(FORWARD, [(MEMMAP, 5), (STEP, 2), (MAIN, 11)]).rows() == []


def test_the_loop_is_the_deepest_function_that_calls_the_model() -> None:
    fit = code(f"{LIBRARIES}/trainer/fit.py", "fit")
    rows = watch([(CALL, 1), (fit, 50), (MAIN, 10)], [(HELPER, 3), (fit, 60), (MAIN, 10)]).rows()
    assert rows == [("fit.py:60, in data.py:3", 1.0)]


def test_our_own_time_and_observed_steps_are_no_part_of_it() -> None:
    ours: Stack = [(code(f"{OURS}/monitor/hooks.py"), 9), (MAIN, 12)]
    observed: Stack = [(HELPER, 3), (code(f"{OURS}/flops/observation.py"), 9), (MAIN, 12)]
    assert watch(ours, observed).rows() == []


def test_a_late_sample_counts_for_what_it_missed_and_says_native_code() -> None:
    found = watch([(MAIN, 14)])
    found.note([(MEMMAP, 5), (MAIN, 12)], 3, is_native=True)
    assert found.rows() == [("train.py:12 (native code)", 0.75), ("train.py:14", 0.25)]


def test_a_thread_that_has_ended_is_not_read() -> None:
    assert not watch().note([])


def test_a_burst_reads_the_thread_that_began_the_run_and_tells_once() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    found = FrameWatch(lambda name, **fields: told.append((name, fields)), 0.005)
    found.start_run()
    found.note_step(2)
    assert found._burst is None, "too early"
    found.note_step(3)
    burst, enough = found._burst, threading.Event()
    assert burst is not None
    while found._num_all < 3:
        enough.wait(0.01)
    found.note_step(4)
    assert found._burst is burst, "one at a time"
    found.close()
    assert not burst.is_alive()
    ((name, fields),) = told
    assert name == "frames"
    assert fields["own_share"] == 1.0
    assert any("test_frames.py:" in place for place, _ in fields["top"])
    found.note_step(99)
    assert found._burst is burst, "closed"


def test_without_a_run_nothing_is_read() -> None:
    found = FrameWatch(lambda *_, **__: None, 0.005)
    found.note_step(50)
    assert found._burst is None
