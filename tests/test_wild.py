"""The benchmark of programs from elsewhere: its one recipe of our own runs, and its judgement holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wild import Done, gain, is_gain_right, judged, own_verdict, summarise
from wild_recipes import OWN, RECIPES, Edit, PlaceError, Recipe, Variant, gpt_flop

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "wild.py"


def recipe(**fields: Any) -> Recipe:
    return Recipe(name="one", kind="LM", repository="r", script="s.py", losses="loss", **fields)


def row(**fields: Any) -> dict[str, Any]:
    plain = {
        "name": "one", "kind": "LM", "chosen": "before", "fault_put_in": False, "judged": "right",
        "right": ["gc_pause"], "verdict": "gc_pause", "real_gain": None, "predicted_gain": None, "mfu_over_hand": None,
        "same_exit_code": True, "same_losses": True, "steps": 9, "steps_with_us": 9, "is_starved": False,
    }  # fmt: skip
    return plain | fields


def test_the_recipe_of_our_own_runs_from_start_to_verdict(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, SCRIPT, "--short", "--work", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert told.returncode == 0, told.stderr
    (found,) = json.loads(told.stdout.splitlines()[-1])["rows"]
    assert (found["exit_code"], found["same_exit_code"], found["same_losses"]) == (0, True, True)
    assert (found["steps"], found["steps_with_us"]) == (30, 30)
    assert found["judged"] == "right", found


def test_without_programs_at_hand_it_says_so(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "none"], capture_output=True, text=True, check=False, timeout=120
    )
    assert told.returncode == 1
    assert "no programs at hand" in told.stderr


def test_every_recipe_has_a_name_of_its_own_and_a_truth_beside_what_is_right() -> None:
    names = [one.name for one in (OWN, *RECIPES)]
    assert len(set(names)) == len(names)
    assert [one.name for one in (OWN, *RECIPES) if one.right and not one.truth] == []


def test_an_edit_whose_place_is_gone_stops_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("steps = 5\n")
    Edit("a.py", r"steps = \d+", "steps = 7").apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "steps = 7\n"
    with pytest.raises(PlaceError, match="another version"):
        Edit("a.py", r"epochs = \d+", "epochs = 7").apply(tmp_path)


@pytest.mark.parametrize(
    ("right", "verdict", "expected"),
    [
        ({"padding_waste"}, "padding_waste", "right"),
        ({"padding_waste"}, "host_sync", "wrong"),
        ({"padding_waste"}, "undetermined", "undetermined"),
        ({"undetermined"}, "undetermined", "right"),
        (set(), "host_sync", "not judged"),
    ],
)
def test_a_verdict_is_judged_by_the_truth_that_was_written_down(right: set[str], verdict: str, expected: str) -> None:
    assert judged(recipe(truth="known", right=frozenset(right)), verdict) == expected


@pytest.mark.parametrize(
    ("waited", "expected"),
    [(0.5, ("gc_pause", True)), (0.05, ("cpu_contention", False)), (None, ("cpu_contention", False))],
)
def test_a_process_is_kept_from_its_core_by_our_own_clock(waited: float | None, expected: tuple[str, bool]) -> None:
    assert own_verdict(["cpu_contention", "gc_pause"], waited) == expected
    assert own_verdict(["gc_pause", "own_code"], 0.5) == ("gc_pause", False)


def test_shares_leave_out_what_was_not_judged_and_count_the_later_third_apart() -> None:
    rows = [
        row(), row(judged="wrong", chosen="after"), row(judged="undetermined", same_losses=False),
        row(is_starved=True, chosen="after"), row(judged="not judged", steps_with_us=8),
    ]  # fmt: skip
    found = summarise(rows)
    assert (found["all"]["right %"], found["all"]["wrong %"], found["all"]["undetermined %"]) == (50.0, 25.0, 25.0)
    assert (found["chosen_after"]["runs"], found["chosen_after"]["wrong %"]) == (2, 50.0)
    assert found["other_losses"] == ["one"]
    assert found["other_steps"] == ["one"]
    assert found["starved"] == ["one"]


def test_a_gain_is_by_cpu_time_unless_the_cause_is_a_wait() -> None:
    plain, twin = Done(exit_code=0, step_s=3.0, step_cpu_s=1.5), Done(exit_code=0, step_s=1.0, step_cpu_s=1.0)
    removal = Variant(arguments=("--fast",))
    assert gain(recipe(removal=removal), plain, twin) == 0.5
    assert gain(recipe(removal=removal, clock="wall"), plain, twin) == 2.0
    assert gain(recipe(), plain, None) is None


@pytest.mark.parametrize(
    ("predicted", "real", "expected"),
    [(0.9, 0.5, True), (1.1, 0.5, False), (0.05, 0.01, True), (0.07, 0.01, False), (0.0, 0.5, True)],
)
def test_a_promise_may_exceed_the_gain_by_itself_or_five_points(predicted: float, real: float, expected: bool) -> None:
    assert is_gain_right(row(predicted_gain=predicted, real_gain=real)) is expected


def test_the_flops_of_a_gpt_by_hand() -> None:
    # One layer of width 2, 3 tokens of 5 kinds: per token 2 * (4*4 + 2*2*8 + 2*5) = 116; pairs 4 * 2 * 6 = 48.
    assert gpt_flop(1, 2, 5, 3, 1) == 3 * (3 * 116 + 48)
