"""`flopmeter try`: what was tried is what the table says, nothing of the user's changes, each end has its line."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopmeter.diagnosis import Gain
from flopmeter.errors import ConfigError, RecordError
from flopmeter.trials import NOTHING_SEEN, Row, Tried, read_tried
from flopmeter.trials.candidates import CANDIDATES, load_candidates
from flopmeter.trials.judging import judge_losses, judge_memory, must_be_wall, process_gain, settle, switched_gain
from flopmeter.trials.processes import Ended, _copy, files_of, may_copy
from flopmeter.trials.rounds import Job, Trials, headline

PROGRAM = Path(__file__).parent / "programs" / "tried.py"
OWN = '''
import torch


def wrong_cast(trial):
    """Weights rounded to bf16."""
    for model in trial.models:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    yield


def crashes(trial):
    """A change that fails."""
    raise RuntimeError("no such kernel")
    yield


def leaks(trial):
    """Four megabytes are kept at each step."""
    kept = []
    hook = trial.optimizers[0].register_step_post_hook(lambda *_: kept.append(torch.ones(1 << 20)))
    yield
    hook.remove()
'''


def block(seconds: list[float], *, on: tuple[str, ...] = (), memory: float = 1e8, early: float = 1e8) -> dict[str, Any]:
    return {
        "on": list(on), "kind": "timed", "seconds": seconds, "waited": [0.0] * len(seconds),
        "is_pause": [False] * len(seconds), "others_cpu_s": 0.0,
        "memory_bytes": memory, "early_bytes": early, "peak_bytes": memory,
    }  # fmt: skip


def seen(losses: list[float], gradients: list[list[float]] | None = None) -> dict[str, Any]:
    return {"losses": losses, "gradients": gradients or [[1.0, 2.0]], "facts": {}}


def started(folder: Path, *words: str, launcher: tuple[str, ...] = ("-m",)) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, "flopmeter", "try", *words], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background ignores it
    )  # fmt: skip


def tried_in(folder: Path, *words: str, launcher: tuple[str, ...] = ("-m",)) -> tuple[int, str, str]:
    process = started(folder, *words, launcher=launcher)
    out, err = process.communicate(timeout=250)
    return process.returncode, out, err


@pytest.fixture
def program(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM.read_text())
    return folder


# Real programs


def test_a_slow_loader_is_found_harm_is_told_and_nothing_of_the_users_changes(program: Path) -> None:
    """The program saves to a place of the user's, forks, and lets no exception through."""
    precious = program.parent / "last.pt"
    precious.write_text("precious")
    (program / "own.py").write_text(OWN)
    only = "loader_workers,wrong_cast,crashes,leaks"
    words = ("--candidates", "own.py", "--only", only, "--rounds", "1", "--json", "-o", "runs/a", "train.py")
    code, out, err = tried_in(program, *words, "--fork", "--save", str(program.parent))
    assert code == 0, err
    tried = json.loads(out)
    rows = {row["names"][0]: row for row in tried["rows"]}
    # 8 samples of 4 ms each are 32 ms a step; four workers that wait at the same time need 8 ms for them.
    assert rows["loader_workers"]["gain"]["expected"] > 1
    assert rows["loader_workers"]["losses"] == "same"
    assert rows["wrong_cast"]["losses"] == "different"
    assert rows["crashes"]["outcome"] == "failed"
    assert rows["crashes"]["reason"] == "RuntimeError: no such kernel"
    assert "grows by 4.1" in rows["leaks"]["memory_text"] or "grows by 4.2" in rows["leaks"]["memory_text"]
    assert precious.read_text() == "precious"
    assert {path.name for path in program.parent.iterdir()} == {"last.pt", "project"}
    assert not (program / "beside.txt").exists()
    assert any("last.pt" in note for note in tried["notes"])
    assert not any("changed meanwhile" in note for note in tried["notes"])
    for name in ("last.pt", "last.safetensors", "sharded"):  # by the unchanged program twice, and with each change
        assert len(list((program / "runs" / "a" / "trials").glob(f"*/saved/**/{name}"))) == 5
    left = subprocess.run(["pgrep", "-f", str(program)], capture_output=True, text=True, check=False).stdout.split()
    assert left == []
    assert read_tried(program / "runs" / "a") is not None


def test_two_ranks_end_together_and_a_large_folder_is_used_in_place(program: Path) -> None:
    (program / "data.bin").touch()
    os.truncate(program / "data.bin", 201_000_000)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "-m")
    words = ("--only", "gc_frozen", "--rounds", "1", "--json", "-o", "runs/b", "train.py", "--save", str(program))
    code, out, err = tried_in(program, *words, launcher=launcher)
    assert code == 0, err
    tried = json.loads(out.strip().splitlines()[-1])
    assert any(note.endswith("is too large to be copied: the program ran in it") for note in tried["notes"])
    assert any(note.endswith("changed meanwhile: beside.txt") for note in tried["notes"])
    assert not (program / "last.pt").exists()  # it was saved in the trials' folders
    (row,) = tried["rows"]
    assert row["names"] == ["gc_frozen"]
    assert row["gain"] is not None
    ends = [json.loads(p.read_text())["num_steps"] for p in (program / "runs/b/trials").glob("*gc_frozen/rank*.json")]
    assert len(ends) >= 2
    assert len(set(ends)) == 1


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (None, "the program ended by itself after 9 steps, and a comparison takes 32: let it run longer"),
        ("import torch", "no optimizer of torch stepped after a backward pass in the program's own process"),
        ("raise ValueError('no data')", "the unchanged program ended with ValueError: no data"),
    ],
)
def test_a_program_that_cannot_be_tried_is_told_why(program: Path, code: str | None, line: str) -> None:
    if code is not None:
        (program / "train.py").write_text(code)
    exit_code, out, err = tried_in(program, "--budget", "120s", "train.py", "--steps", "9")
    assert (exit_code, out) == (1, "")
    assert err.strip().splitlines()[-1].startswith("flopmeter: error: nothing was tried: ")
    assert line in err


def test_ctrl_c_leaves_a_result_and_no_process(program: Path) -> None:
    process = started(program, "--only", "gc_frozen", "--budget", "5m", "-o", "runs/c", "train.py")
    until_s = time.monotonic() + 100
    while not list((program / "runs" / "c" / "trials").glob("02-*")) and time.monotonic() < until_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "gc_frozen not measured: it was stopped before" in out
    tried = read_tried(program / "runs" / "c")
    assert tried is not None
    assert not tried.is_whole
    left = subprocess.run(["pgrep", "-f", str(program)], capture_output=True, text=True, check=False).stdout.split()
    assert left == []


def test_ctrl_c_in_the_first_look_is_one_line(program: Path) -> None:
    process = started(program, "-o", "runs/d", "train.py")
    until_s = time.monotonic() + 100
    while not list((program / "runs" / "d" / "trials").glob("01-*/output*")) and time.monotonic() < until_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    line = "flopmeter: stopped before the unchanged program was measured: nothing was tried"
    assert err.strip().splitlines()[-1] == line


# Gains


def test_a_change_that_is_switched_is_compared_with_the_blocks_around_it() -> None:
    """1 s without and 0.8 s with it is a quarter more; the machine grows slower all the while, on both sides alike."""
    blocks = []
    for place in range(21):
        on = ("x",) if place % 2 else ()
        blocks.append(block([9.0, *[1.02**place * (0.8 if on else 1.0)] * 4], on=on))
    gain = switched_gain([{"blocks": blocks}], ["x"], 1.0)
    assert gain is not None
    assert gain.expected == pytest.approx(0.25)
    assert gain.low < 0.25 / 1.02 < 0.25 * 1.02 < gain.high  # two processes differ by more than such a clean ratio
    assert switched_gain([{"blocks": blocks[:4]}], ["x"], 1.0) is None


def test_one_disturbed_block_does_not_move_a_switched_gain() -> None:
    blocks = [block([0.5 if place % 2 else 1.0] * 4, on=("x",) if place % 2 else ()) for place in range(21)]
    blocks[7]["seconds"] = [50.0] * 4
    gain = switched_gain([{"blocks": blocks}], ["x"], 1.0)
    assert gain is not None
    assert gain.expected == pytest.approx(1.0, abs=0.05)


def test_waits_for_a_core_are_left_out_where_one_thread_works() -> None:
    """1 s without and 0.5 s with it is twice as fast; in every other pair the core is held for 3 s a step."""
    blocks = []
    for place in range(21):
        own_s, waited_s = 0.5 if place % 2 else 1.0, 3.0 * (place % 4 < 2)
        one = block([own_s + waited_s] * 4, on=("x",) if place % 2 else ())
        blocks.append(one | {"waited": [waited_s] * 4})
    seen: dict[str, Any] = {"blocks": blocks, "facts": {"device": "cpu"}}
    gain = switched_gain([seen], ["x"], 1.0)
    assert gain is not None
    assert gain.expected == pytest.approx(1.0)
    idle = switched_gain([{"blocks": [one | {"waited": [0.0] * 4} for one in blocks]}], ["x"], 1.0, is_wall=True)
    assert idle is not None
    assert idle.expected != pytest.approx(1.0, abs=0.1)
    assert not must_be_wall([seen])
    assert must_be_wall([seen | {"facts": {"device": "cuda"}}])  # a wait may be hidden behind the device
    # The thread works for 0.75 s a step; others of the program do a twentieth of that, and may wait, too.
    assert must_be_wall([seen | {"blocks": [one | {"others_cpu_s": 4 * 0.05 * 0.75} for one in blocks]}])


def test_an_evaluation_in_a_block_belongs_to_neither_side() -> None:
    """1 s without and 0.5 s with it; in one block without it the program evaluates for 300 s."""
    blocks = [block([0.5 if place % 2 else 1.0] * 4, on=("x",) if place % 2 else ()) for place in range(21)]
    blocks[4] |= {"seconds": [1.0, 1.0, 301.0, 1.0], "is_pause": [False, False, True, False]}
    gain = switched_gain([{"blocks": blocks}], ["x"], 1.0)
    assert gain is not None
    assert gain.high < 1.1
    assert gain.expected == pytest.approx(1.0)


def test_an_interval_is_wider_on_a_busy_machine() -> None:
    widths = []
    for waited_s in (0.0, 9.0):  # of 10 s
        blocks = [block([1.0 + waited_s] * 4, on=("x",) if place % 2 else ()) for place in range(21)]
        gain = switched_gain([{"blocks": [one | {"waited": [waited_s] * 4} for one in blocks]}], ["x"], 1.0)
        assert gain is not None
        assert gain.expected == pytest.approx(0.0)
        widths.append(gain.high - gain.low)
    assert widths[1] > 2 * widths[0] > 0


def test_a_larger_batch_counts_by_the_sample() -> None:
    """Twice the samples in 1.6 times the time: a quarter more samples a second."""
    gain = process_gain([1 / 1.6, 1 / 1.6], 2.0)
    assert gain is not None
    assert gain.expected == pytest.approx(0.25)


def test_the_interval_of_processes_is_students() -> None:
    """Ratios of 1.1 and 1.3 of logarithms l: the mean, and 12.71 standard errors of one degree of freedom."""
    gain = process_gain([1.1, 1.3], 1.0)
    assert gain is not None
    logs = [math.log(1.1), math.log(1.3)]
    middle, spread = sum(logs) / 2, abs(logs[1] - logs[0]) / math.sqrt(2)
    half = 12.71 * spread / math.sqrt(2)
    assert gain.expected == pytest.approx(math.exp(middle) - 1)
    assert gain.low == pytest.approx(math.exp(middle - half) - 1)
    assert gain.high == pytest.approx(math.exp(middle + half) - 1)


def test_one_round_is_no_certainty() -> None:
    gain = process_gain([1.0], 1.0)
    assert gain is not None
    assert gain.low < -0.1 < 0.1 < gain.high


def test_a_verdict_needs_the_whole_interval() -> None:
    for low, high, outcome in ((0.01, 0.2, "faster"), (-0.1, 0.2, "no difference"), (-0.2, -0.1, "slower")):
        row = Row(names=["x"], what="", gain=Gain(low=low, expected=(low + high) / 2, high=high))
        settle(row)
        assert row.outcome == outcome


@pytest.mark.parametrize("name", ["bf16", "loader_workers"])
def test_a_plan_asks_for_no_more_steps_than_the_program_has(name: str) -> None:
    launcher: Any = SimpleNamespace(program=["train.py"], candidates="")
    for num_steps in (32, 33, 40, 45, 60, 99, 400):
        for step_s in (0.001, 0.1, 5.0):
            trials = Trials(launcher, 600.0, (), False, 6, lambda what, done: None, lambda line: None)
            trials.tried.step_s, trials._num_steps = step_s, num_steps
            plan = trials._plan(Job(name, (CANDIDATES[name],)))["plan"]
            assert 2 + sum(block["steps"] for block in plan) <= num_steps  # two come before the first block
            assert sum(block["on"] == [] and block["kind"] == "timed" for block in plan) >= 2


def test_of_changes_that_share_a_process_only_the_one_that_was_on_has_failed() -> None:
    """Where a start takes as long as the budget, two changes share one; the second fails when it is switched on."""
    blocks = [{"on": on, "kind": "timed", "seconds": [0.1], "waited": [0.0]} for on in ([], ["bf16"], [], ["compile"])]
    rank = {**NOTHING_SEEN, "blocks": blocks, "error": "RuntimeError: no such kernel"}
    launcher: Any = SimpleNamespace(
        program=["train.py"], candidates="", run=lambda name, timeout_s, plan: Ended([rank], 0, "", 1.0)
    )
    trials = Trials(launcher, 600.0, (), False, 1, lambda what, done: None, lambda line: None)
    trials.tried.step_s, trials.tried.startup_s = 0.1, 200.0
    trials._jobs = [Job(name, (CANDIDATES[name],)) for name in ("bf16", "compile")]
    (shared,) = trials._joined(trials._jobs)
    trials._round(0, [shared])
    rows = [job.row for job in trials._jobs]
    assert [row.outcome for row in rows] == ["not measured", "failed"]
    assert rows[0].reason == "the process that all changes shared ended: RuntimeError: no such kernel"
    assert rows[1].reason == "RuntimeError: no such kernel"


# Harm


def test_losses_are_judged_by_the_rounding_of_the_change() -> None:
    plain = [seen([1.0, 0.9]), seen([1.0, 0.9])]
    assert judge_losses(seen([1.0, 0.9]), plain, 0.0, 1.0)[0] == "same"
    assert judge_losses(seen([1.0, 0.9 * (1 + 1e-6)]), plain, 2.0**-23, 1.0)[0] == "rounding"
    assert judge_losses(seen([1.0, 0.9 * (1 + 1e-6)]), plain, 0.0, 1.0)[0] == "different"
    assert judge_losses(seen([1.004, 0.904]), plain, 2.0**-23, 1.0)[0] == "different"
    assert judge_losses(seen([1.004, 0.904]), plain, 2.0**-8, 1.0)[0] == "rounding"
    assert judge_losses(seen([math.nan, math.nan]), plain, 2.0**-8, 1.0)[0] == "different"
    assert judge_losses(seen([2.0, 1.0]), plain, 0.0, 2.0)[0] == "not comparable"
    assert judge_losses(seen([]), plain, 0.0, 1.0)[0] == "unknown"


def test_a_gradient_tells_what_an_untrained_loss_does_not() -> None:
    """Before training a loss is the logarithm of the number of classes, whatever goes in."""
    plain = [seen([2.3, 2.3], [[1.0, 0.0]])] * 2
    verdict, text = judge_losses(seen([2.3, 2.301], [[0.0, 1.0]]), plain, 2.0**-8, 1.0)
    assert verdict == "different"
    assert "first gradients 141.4 %" in text  # two unit vectors at a right angle are the root of two apart


def test_a_program_without_a_seed_is_compared_with_itself() -> None:
    plain = [seen([1.0, 0.9]), seen([1.0, 0.99])]  # a tenth apart
    assert judge_losses(seen([1.1, 0.9]), plain, 0.0, 1.0)[0] == "rounding"
    assert judge_losses(seen([1.5, 0.9]), plain, 0.0, 1.0)[0] == "different"


def test_memory_that_grows_is_told_whether_it_is_freed_between_blocks_or_not() -> None:
    steps, flat = [0.1] * 6, [block([0.1] * 6) for _ in range(8)]
    freed = [block(steps, on=("x",), memory=1e8 + 4 * 4e6, early=1e8) for _ in range(8)]
    kept = [block(steps, on=("x",), memory=1e8 + n * 24e6, early=1e8 + n * 24e6) for n in range(8)]
    calm = [block(steps, on=("x",), memory=2e8, early=2e8) for _ in range(8)]
    for blocks, grows in ((freed, True), (kept, True), (calm, False)):
        peak, text = judge_memory([[{"blocks": blocks}]], [{"blocks": flat}], ["x"])
        assert peak == max(one["peak_bytes"] for one in blocks)
        assert ("grows by 4 MB a step" in text) is grows
    assert "grows" not in judge_memory([[{"blocks": kept}], [{"blocks": calm}]], [{"blocks": flat}], ["x"])[1]
    restless = [block([0.1] * 6, memory=1e8 + n % 2 * 3e7, early=1e8) for n in range(8)]  # by more than it grows
    assert "grows" not in judge_memory([[{"blocks": kept}]], [{"blocks": restless}], ["x"])[1]
    assert "(+100 %)" in judge_memory([[{"blocks": calm}]], [{"blocks": flat}], ["x"])[1]


def test_the_headline_is_of_a_change_that_does_no_harm() -> None:
    fast = Row(names=["a"], what="", gain=Gain(low=0.5, expected=0.6, high=0.7), outcome="faster", losses="different")
    fair = Row(names=["b"], what="", gain=Gain(low=0.28, expected=0.31, high=0.34), outcome="faster", losses="same")
    assert headline(Tried(program=[], rows=[fast, fair])) == "+31 % (28 to 34) with b"
    assert headline(Tried(program=[], rows=[fast])) == "+60 % (50 to 70) with a, but not without harm"
    assert headline(Tried(program=[])) == "nothing was measured"


# The table, the command


@pytest.mark.parametrize("name", sorted(CANDIDATES))
def test_every_change_has_what_the_table_and_the_patch_need(name: str) -> None:
    row = CANDIDATES[name]
    assert row.name == name
    assert row.what != name  # the docstring's first line
    assert row.code[""]


def test_a_file_of_ones_own_must_hold_a_function(tmp_path: Path) -> None:
    own = tmp_path / "my.py"
    own.write_text('def mine(trial):\n    """Faster."""\n    yield\n\ndef _helper(trial): ...\n')
    found = load_candidates(str(own))
    assert found["mine"].what == "Faster"
    assert found["mine"].is_switched
    assert "_helper" not in found
    for text, said in (("x = 1", "no function"), ("1 / 0", "ZeroDivisionError")):
        own.write_text(text)
        with pytest.raises(ConfigError, match=said):
            load_candidates(str(own))


def test_a_change_that_is_switched_off_leaves_everything_as_it_was() -> None:
    class Model(torch.nn.Linear):
        flash = True

    model = Model(4, 4)
    model.flash = False
    optimizer = torch.optim.AdamW(model.parameters())
    trial: Any = SimpleNamespace(
        optimizers=[optimizer], models=[model], compiled={id(model): print}, keeps_activations=False, device="cpu",
        seen={"facts": {"num_cores": torch.get_num_threads() + 1}}, around_forward=lambda context: lambda: None,
    )  # fmt: skip

    def state() -> tuple[Any, ...]:
        group = optimizer.param_groups[0]
        return (
            group["fused"], group["foreach"], model.flash, trial.keeps_activations, torch.get_num_threads(),
            torch.get_float32_matmul_precision(), gc.isenabled(), gc.get_freeze_count(), model._compiled_call_impl,
        )  # fmt: skip

    before = state()
    for name in ("fused_optimizer", "sdpa", "no_checkpointing", "threads", "tf32", "gc_frozen", "compile"):
        change = CANDIDATES[name].change(trial)
        assert change is not None
        next(change)
        if name != "compile":  # what it made stands in for the model, and is no part of this test
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert state() != before, name
        assert next(change, "ended") == "ended"
        assert state() == before, name


def test_what_lies_beside_a_folder_is_found_from_its_copy(tmp_path: Path) -> None:
    program, data = tmp_path / "project" / "vae", tmp_path / "project" / "data"
    for folder in (program / ".git", program / "runs" / "old", data, tmp_path / "shared"):
        folder.mkdir(parents=True)
        (folder / "file").write_text(folder.name)
    copy = _copy(program, tmp_path / "trial", program / "runs")
    assert (copy / ".." / "data" / "file").read_text() == "data"
    assert (copy / ".." / ".." / "shared" / "file").read_text() == "shared"
    assert not (copy / ".git").exists()
    assert not (copy / "runs").exists()


def test_a_large_folder_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "data.bin").touch()
    os.truncate(tmp_path / "data.bin", 199_000_000)
    assert may_copy(files_of(tmp_path, tmp_path / "runs"))
    (tmp_path / "more.bin").touch()
    os.truncate(tmp_path / "more.bin", 2_000_000)
    assert not may_copy(files_of(tmp_path, tmp_path / "runs"))
    (tmp_path / ".git").mkdir()
    (tmp_path / "more.bin").rename(tmp_path / ".git" / "more.bin")  # nothing that a program needs
    assert may_copy(files_of(tmp_path, tmp_path / "runs"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is nothing to try"),
        (["-m"], "there is nothing to try"),
        (["--budget", "soon", str(PROGRAM)], "--budget: 'soon' is no time such as 90s, 10m or 1h"),
        (["none.py"], "there is no file none.py"),
        (["--nonsense", "x.py"], "No such option: --nonsense"),
        (["--only", "bf61", str(PROGRAM)], "--only: unknown 'bf61': did you mean 'bf16'?"),
    ],
)
def test_wrong_use_is_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    code, out, err = tried_in(tmp_path, *words)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    assert read_tried(tmp_path) is None
    (tmp_path / "try.json").write_text("[]")
    with pytest.raises(RecordError, match=r"try\.json"):
        read_tried(tmp_path)
