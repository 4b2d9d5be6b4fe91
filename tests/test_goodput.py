"""Goodput of runs made by hand: every expected number is the sum of what the lines say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopmeter.goodput import Goodput, goodput
from flopmeter.record import Run, RunWriter, load_run

Line = dict[str, Any]


def header(started_at: Any) -> Line:
    return {"kind": "header", "schema": 2, "started_at": started_at}


def step(number: int, end_s: Any, step_s: Any, *marks: str) -> Line:
    # The loss shows that the loop tells of its steps: their numbers are its own.
    line = {"kind": "step", "step": number, "time": end_s, "metrics": {"perf/step_time": step_s, "training/loss": 1.0}}
    return line | ({"marks": list(marks)} if marks else {})


def pause(name: str, end_s: Any, duration_s: Any) -> Line:
    return {"kind": "event", "event": "pause", "name": name, "time": end_s, "duration_s": duration_s}


def record(folder: Path, *lines: Line) -> Run:
    path = folder / "run.jsonl"
    path.unlink(missing_ok=True)
    writer = RunWriter(path)
    for line in lines:
        writer.write(line)
    writer.close()
    return load_run(path)


def judge(folder: Path, *lines: Line) -> Goodput:
    result = goodput(record(folder, *lines))
    assert sum_of_parts(result) == pytest.approx(result.wall_s, abs=1e-6)
    return result


def sum_of_parts(result: Goodput) -> float:
    named_s = result.productive_s + result.lost_steps_s + result.measuring_s + result.restart_s + result.start_up_s
    return named_s + math.fsum(result.pause_s.values()) + result.other_s


def test_steps_over_the_wall_time_since_the_header_are_the_share(tmp_path: Path) -> None:
    # 1000: start. Steps of 2 s end at 1004, 1006, 1008: 2 s of start-up, 6 s of steps, 8 s in all.
    result = judge(tmp_path, header(1000.0), *(step(n, 1004.0 + 2 * n, 2.0) for n in range(3)))
    assert (result.wall_s, result.productive_s, result.start_up_s, result.other_s) == (8.0, 6.0, 2.0, 0.0)
    assert result.share == 0.75
    assert (result.num_steps, result.num_lost_steps, result.num_starts, result.note) == (3, 0, 1, "")


def test_warm_up_steps_are_productive(tmp_path: Path) -> None:
    result = judge(tmp_path, header(1000.0), step(1, 1006.0, 6.0, "warmup"), step(2, 1008.0, 2.0))
    assert result.productive_s == 8.0
    assert result.share == 1.0


def test_pauses_are_listed_by_name_and_are_not_step_time(tmp_path: Path) -> None:
    result = judge(
        tmp_path,
        header(1000.0),
        step(1, 1002.0, 2.0),
        pause("evaluation", 1007.0, 5.0),
        step(2, 1009.0, 2.0),
        pause("checkpoint", 1010.0, 1.0),
        pause("evaluation", 1014.0, 4.0),
        step(3, 1016.0, 2.0),
    )
    assert dict(result.pause_s) == {"evaluation": 9.0, "checkpoint": 1.0}
    assert (result.productive_s, result.other_s, result.share) == (6.0, 0.0, 6 / 16)


def test_a_pause_inside_another_counts_once(tmp_path: Path) -> None:
    # The checkpoint runs from 1003 to 1005, inside the evaluation from 1002 to 1008, and is written first.
    result = judge(
        tmp_path,
        header(1000.0),
        step(1, 1002.0, 2.0),
        pause("checkpoint", 1005.0, 2.0),
        pause("evaluation", 1008.0, 6.0),
        step(2, 1010.0, 2.0),
    )
    assert dict(result.pause_s) == {"checkpoint": 2.0, "evaluation": 4.0}
    assert result.other_s == 0.0


def test_a_clock_set_back_between_two_pauses_does_not_put_one_inside_the_other(tmp_path: Path) -> None:
    result = judge(tmp_path, header(900.0), pause("a", 1010.0, 4.0), pause("b", 1006.0, 6.0), step(1, 1020.0, 1.0))
    assert dict(result.pause_s) == {"a": 4.0, "b": 6.0}


def test_a_pause_before_the_first_step_is_not_start_up(tmp_path: Path) -> None:
    # 1000-1003 start-up, 1003-1008 restoring, 1008-1010 the first step.
    result = judge(tmp_path, header(1000.0), pause("restore", 1008.0, 5.0), step(1, 1010.0, 2.0))
    assert (result.start_up_s, dict(result.pause_s), result.productive_s) == (3.0, {"restore": 5.0}, 2.0)


def test_steps_after_the_checkpoint_of_a_restart_are_lost(tmp_path: Path) -> None:
    # Steps 0-4 of 10 s from 1000 on; down from 1050 to 1080; 5 s of start-up; resumes at step 3.
    first = [step(n, 1010.0 + 10 * n, 10.0) for n in range(5)]
    second = [step(n, 1095.0 + 10 * (n - 3), 10.0) for n in range(3, 6)]
    result = judge(tmp_path, header(1000.0), *first, header(1080.0), *second)
    assert (result.wall_s, result.restart_s, result.start_up_s) == (115.0, 30.0, 5.0)
    assert (result.num_lost_steps, result.lost_steps_s) == (2, 20.0)
    assert (result.num_steps, result.productive_s, result.other_s) == (6, 60.0, 0.0)
    assert result.share == 60 / 115


def test_where_the_program_tells_no_numbers_nothing_is_called_lost_and_the_note_says_so(tmp_path: Path) -> None:
    def unnumbered(*arguments: Any) -> Line:
        line = step(*arguments)
        del line["metrics"]["training/loss"]
        return line

    first = [unnumbered(n, 1000.0 + 2 * n, 2.0) for n in range(1, 4)]
    again = [unnumbered(n, 1010.0 + 2 * n, 2.0) for n in range(1, 4)]  # perhaps steps 4 to 6, as a checkpoint told it
    result = judge(tmp_path, header(1000.0), *first, header(1010.0), *again)
    assert (result.num_steps, result.num_lost_steps) == (6, 0)
    assert result.note.startswith("what restarts threw away is not known")
    alone = judge(tmp_path, header(1000.0), *first)
    assert alone.note == ""  # one start threw nothing away


def test_a_lost_step_is_lost_before_it_is_redone(tmp_path: Path) -> None:
    first = [step(n, 1010.0 + 10 * n, 10.0) for n in range(5)]
    result = judge(tmp_path, header(1000.0), *first, header(1060.0), step(1, 1070.0, 10.0))
    assert (result.num_lost_steps, result.lost_steps_s, result.productive_s) == (4, 40.0, 20.0)


def test_a_second_restart_may_reach_back_behind_the_first(tmp_path: Path) -> None:
    lines = [header(1000.0), *(step(n, 1001.0 + n, 1.0) for n in range(6))]  # 0 to 5, kept: 0 and 1
    lines += [header(1010.0), *(step(n, 1007.0 + n, 1.0) for n in range(4, 7))]  # 4 to 6, kept: none
    lines += [header(1020.0), *(step(n, 1019.0 + n, 1.0) for n in range(2, 4))]  # 2 and 3
    result = judge(tmp_path, *lines)
    assert (result.num_steps, result.num_lost_steps) == (4, 7)
    assert (result.productive_s, result.lost_steps_s, result.num_starts) == (4.0, 7.0, 3)


def test_a_restart_that_goes_on_where_the_run_ended_loses_nothing(tmp_path: Path) -> None:
    result = judge(tmp_path, header(1000.0), step(1, 1001.0, 1.0), header(1002.0), step(2, 1003.0, 1.0))
    assert (result.num_lost_steps, result.lost_steps_s, result.restart_s) == (0, 0.0, 1.0)
    assert result.productive_s == 2.0


def test_steps_that_go_backwards_without_a_restart_are_all_productive(tmp_path: Path) -> None:
    lines = [step(n % 4, 1001.0 + n, 1.0) for n in range(12)]  # a loop that counts anew in each of three epochs
    result = judge(tmp_path, header(1000.0), *lines)
    assert (result.num_steps, result.num_lost_steps, result.productive_s) == (12, 0, 12.0)


@pytest.mark.parametrize(("resumed_at", "num_lost"), [(0, 4), (2, 2)])
def test_older_epochs_of_a_loop_that_counts_anew_are_not_lost(tmp_path: Path, resumed_at: int, num_lost: int) -> None:
    lines = [step(n % 4, 1001.0 + n, 1.0) for n in range(12)]
    result = judge(tmp_path, header(1000.0), *lines, header(1020.0), step(resumed_at, 1021.0, 1.0))
    assert (result.num_steps, result.num_lost_steps) == (13 - num_lost, num_lost)


def test_a_start_that_made_no_step_is_downtime(tmp_path: Path) -> None:
    warning = {"kind": "event", "event": "warning", "time": 1014.0}
    lines = [header(1000.0), step(1, 1002.0, 2.0), header(1010.0), warning, header(1020.0), step(2, 1022.0, 2.0)]
    result = judge(tmp_path, *lines)
    assert (result.restart_s, result.start_up_s) == (8.0 + 10.0, 0.0)
    assert (result.productive_s, result.other_s, result.num_starts) == (4.0, 0.0, 3)


def test_a_line_made_just_before_the_header_that_it_follows_does_not_shorten_the_downtime(tmp_path: Path) -> None:
    peak = {"kind": "event", "event": "peak", "time": 1019.5}
    lines = [header(1000.0), step(1, 1002.0, 2.0), header(1020.0), peak, step(2, 1022.0, 2.0)]
    assert judge(tmp_path, *lines).restart_s == 18.0


@pytest.mark.parametrize("mark", ["observed", "profiled"])
def test_a_measured_step_is_productive_but_for_its_surplus(tmp_path: Path, mark: str) -> None:
    # Ordinary steps take 2 s, the measured one 7 s: 5 s of measuring.
    lines = [step(1, 1002.0, 2.0), step(2, 1009.0, 7.0, mark), step(3, 1011.0, 2.0)]
    result = judge(tmp_path, header(1000.0), *lines)
    assert (result.productive_s, result.measuring_s, result.other_s) == (6.0, 5.0, 0.0)


def test_measured_steps_are_not_held_against_each_other(tmp_path: Path) -> None:
    lines = [step(1, 1002.0, 2.0), step(2, 1009.0, 7.0, "observed"), step(3, 1018.0, 9.0, "profiled")]
    assert judge(tmp_path, header(1000.0), *lines).measuring_s == 5.0 + 7.0


def test_the_surplus_is_held_against_the_steps_nearby(tmp_path: Path) -> None:
    # Six short steps, then long ones: the measured step stands among those of 4 s.
    sizes = [1.0] * 6 + [4.0] * 5 + [6.0] + [4.0] * 5
    ends = [1000.0 + sum(sizes[: n + 1]) for n in range(len(sizes))]
    lines = [step(n, ends[n], size, *(["observed"] if n == 11 else [])) for n, size in enumerate(sizes)]
    assert judge(tmp_path, header(1000.0), *lines).measuring_s == 2.0


def test_the_surplus_is_held_against_steps_that_did_the_same_work(tmp_path: Path) -> None:
    # Long steps and short ones in turn; a short one was measured and took 2 s instead of 1 s.
    sizes = [(4.0, 400.0), (1.0, 100.0)] * 6
    sizes[5] = (2.0, 100.0)
    lines, now_s = [], 1000.0
    for number, (step_s, flop) in enumerate(sizes):
        now_s += step_s
        line = step(number, now_s, step_s, *(["observed"] if number == 5 else []))
        line["metrics"]["perf/model_flop"] = flop
        lines.append(line)
    assert judge(tmp_path, header(1000.0), *lines).measuring_s == 1.0


def test_a_run_in_which_every_step_is_measured_has_nothing_to_compare_with(tmp_path: Path) -> None:
    result = judge(tmp_path, header(1000.0), *(step(n, 1001.0 + n, 1.0, "profiled") for n in range(3)))
    assert (result.productive_s, result.measuring_s) == (3.0, 0.0)


def test_the_measuring_of_a_lost_step_is_lost_with_it(tmp_path: Path) -> None:
    lines = [step(1, 1001.0, 1.0), step(2, 1005.0, 4.0, "observed"), header(1010.0), step(2, 1011.0, 1.0)]
    result = judge(tmp_path, header(1000.0), *lines)
    assert (result.lost_steps_s, result.measuring_s, result.productive_s) == (4.0, 0.0, 2.0)


def test_time_after_the_last_step_is_other(tmp_path: Path) -> None:
    summary = {"kind": "summary", "time": 1010.0, "metrics": {}}
    result = judge(tmp_path, header(1000.0), step(1, 1002.0, 2.0), summary)
    assert (result.wall_s, result.other_s, result.share) == (10.0, 8.0, 0.2)


def test_a_header_alone_has_no_share(tmp_path: Path) -> None:
    result = judge(tmp_path, header(1000.0))
    assert (result.share, result.wall_s, result.num_steps) == (None, 0.0, 0)
    assert "no wall time" in result.note


def test_a_run_without_steps_is_start_up_and_its_share_is_zero(tmp_path: Path) -> None:
    warning = {"kind": "event", "event": "warning", "time": 1010.0}
    result = judge(tmp_path, header(1000.0), pause("download", 1008.0, 6.0), warning)
    assert (result.share, result.start_up_s, dict(result.pause_s)) == (0.0, 4.0, {"download": 6.0})


@pytest.mark.parametrize("started_at", [0.0, "yesterday", math.nan, -1.0, 1e300])
def test_a_header_without_a_time_is_replaced_by_the_beginning_of_the_first_step(
    tmp_path: Path, started_at: Any
) -> None:
    result = judge(tmp_path, header(started_at), step(1, 1002.0, 2.0), step(2, 1006.0, 2.0))
    assert (result.wall_s, result.productive_s, result.other_s) == (6.0, 4.0, 2.0)


def test_a_run_without_any_header_is_judged_by_its_steps(tmp_path: Path) -> None:
    run = record(tmp_path, header(1000.0), step(1, 1002.0, 2.0))
    run.headers.clear()
    assert goodput(run).share == 1.0
    assert goodput(Run(path=tmp_path)).share is None


def test_a_step_without_a_duration_is_other_and_the_note_says_so(tmp_path: Path) -> None:
    lines = [step(1, 1002.0, 2.0), step(2, 1004.0, math.nan), step(3, 1006.0, math.inf), step(4, 1008.0, -3.0)]
    result = judge(tmp_path, header(1000.0), *lines)
    assert (result.productive_s, result.other_s, result.num_steps) == (2.0, 6.0, 4)
    assert result.note == "3 steps have no duration; their time is in other"


def test_a_step_without_a_date_still_counts(tmp_path: Path) -> None:
    lines = [step(1, math.nan, 2.0), step(2, 1004.0, 2.0), step(3, "later", 2.0), header(1010.0), step(3, 1012.0, 2.0)]
    result = judge(tmp_path, header(1000.0), *lines)
    assert (result.num_steps, result.num_lost_steps) == (3, 1)
    assert (result.wall_s, result.productive_s, result.lost_steps_s) == (12.0, 6.0, 2.0)


def test_a_clock_that_was_set_back_gives_no_share_and_says_why(tmp_path: Path) -> None:
    # Ten steps of 10 s in truth, but after the second the clock lost 50 s: the last line is of 1050.
    ends = [1010.0, 1020.0] + [970.0 + 10 * n for n in range(1, 9)]
    result = judge(tmp_path, header(1000.0), *(step(n, end_s, 10.0) for n, end_s in enumerate(ends)))
    assert (result.share, result.wall_s, result.productive_s, result.other_s) == (None, 50.0, 100.0, -50.0)
    assert result.note.startswith("the parts exceed the wall time by 50.0 s: the clock was set back")


def test_a_run_that_ends_before_it_started_has_no_wall_time(tmp_path: Path) -> None:
    result = judge(tmp_path, header(1000.0), step(1, 902.0, 2.0))
    assert (result.share, result.wall_s, result.other_s) == (None, 0.0, -2.0)


def test_a_small_correction_of_the_clock_is_let_pass(tmp_path: Path) -> None:
    result = judge(tmp_path, header(1000.0), step(1, 1100.0, 100.5))
    assert (result.share, result.other_s) == (1.005, -0.5)


def test_a_restart_dated_before_the_start_is_no_negative_downtime(tmp_path: Path) -> None:
    result = judge(tmp_path, header(1000.0), step(1, 1002.0, 2.0), header(900.0), step(2, 1004.0, 2.0))
    assert (result.restart_s, result.productive_s, result.wall_s) == (0.0, 4.0, 4.0)


NUMBERS = st.one_of(
    st.floats(0, 2000), st.floats(), st.integers(-(10**30), 10**30), st.none(), st.booleans(), st.just("NaN")
)
LINES = st.one_of(
    NUMBERS.map(header),
    st.builds(step, st.integers(-3, 20), NUMBERS, NUMBERS, st.sampled_from(["warmup", "observed"])),
    st.builds(pause, st.sampled_from(["a", "b"]), NUMBERS, NUMBERS),
    NUMBERS.map(lambda time: {"kind": "summary", "time": time}),
)


@settings(max_examples=150)
@given(lines=st.lists(LINES, max_size=25))
def test_whatever_the_record_holds_the_parts_add_up(tmp_path: Path, lines: list[Line]) -> None:
    result = goodput(record(tmp_path, header(1000.0), *lines))
    assert sum_of_parts(result) == pytest.approx(result.wall_s, rel=1e-9, abs=1e-6)
    assert result.num_steps + result.num_lost_steps == sum(line.get("kind", "step") == "step" for line in lines)
    measured_s = (result.productive_s, result.lost_steps_s, result.measuring_s, result.restart_s, result.start_up_s)
    assert min(*measured_s, *result.pause_s.values(), 0.0) > -1e-6
    assert result.share is None or 0 <= result.share <= 1.011
