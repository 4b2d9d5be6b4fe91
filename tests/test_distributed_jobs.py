"""Real jobs of two and four processes over gloo: what rank 0's record says of them, and what they are spared."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from distributed_job import DELAY_S, EVERY, SLOW_RANK, STEPS
from flopmeter import Run, count_flops, load_run

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).with_name("distributed_job.py")
NUM_HEALTHY = 20


def torchrun(
    num_ranks: int, script: Path, *arguments: str | Path, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [f"--max-restarts={restarts}", str(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)


@dataclass
class Job:
    """One launch that went through several runs, one after the other."""

    folder: Path
    errors: str
    answers: list[dict[str, Any]]

    def run(self, kind: str) -> Run:
        return load_run(self.folder / kind)

    def stragglers(self, kind: str) -> list[dict[str, Any]]:
        return events(self.run(kind), "straggler")


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == name]


def launch(folder: Path, num_ranks: int, *kinds: str) -> Job:
    result = torchrun(num_ranks, SCRIPT, folder, *kinds)
    assert result.returncode == 0, result.stderr
    answers = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    return Job(folder, result.stderr, answers)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Job:
    kinds = ["unwatched", "forward", "backward", "loader", "network", "fsdp2_forward", "fsdp2_backward"]
    kinds += ["raising", "pausing", "recorded", "differing", f"healthy*{NUM_HEALTHY}", "absent"]
    return launch(tmp_path_factory.mktemp("two"), 2, *kinds)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return launch(tmp_path_factory.mktemp("four"), 4, "unwatched", "forward", "backward", "loader", "absent")


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Job:
    return request.getfixturevalue(request.param)


BOTH = pytest.mark.parametrize("job", ["two", pytest.param("four", marks=pytest.mark.slow)], indirect=True)
PLANTED = {"forward": "forward", "backward": "backward", "loader": "data_wait"}


@BOTH
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_slow_rank_is_named_with_its_phase(job: Job, kind: str) -> None:
    (found,) = job.stragglers(kind)
    assert (found["rank"], found["phase"], found["cause"]) == (SLOW_RANK, PLANTED[kind], "slow_peer")
    assert found["host"] == job.run(kind).header.host
    assert found["extra_s"] == pytest.approx(DELAY_S, rel=0.5)
    assert 0 <= found["since_step"] <= 3 * EVERY


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_same_holds_under_fsdp2(two: Job, phase: str) -> None:
    (found,) = two.stragglers(f"fsdp2_{phase}")
    assert (found["rank"], found["phase"], found["cause"]) == (SLOW_RANK, phase, "slow_peer")


def test_a_healthy_job_names_nobody_in_twenty_runs(two: Job) -> None:
    for number in range(NUM_HEALTHY):
        assert events(load_run(two.folder / str(number) / "healthy"), "straggler") == []


def test_a_slow_network_is_told_from_a_slow_rank(two: Job) -> None:
    (found,) = two.stragglers("network")
    assert (found["rank"], found["phase"], found["cause"]) == (None, "backward", "slow_network")
    assert found["extra_s"] == pytest.approx(DELAY_S, rel=0.5)
    assert found["since_step"] > STEPS // 2


def test_the_delay_of_the_network_shows_as_exposed_communication(two: Job) -> None:
    run = two.run("network")
    share, step_s = run.column("perf/exposed_communication_share"), run.column("perf/step_time")
    exposed_s = [share[i] * step_s[i] for i in range(len(run))]
    before, after = sorted(exposed_s[EVERY : STEPS - 1]), sorted(exposed_s[STEPS + 1 :])
    assert after[len(after) // 2] - before[len(before) // 2] == pytest.approx(DELAY_S, rel=0.5)


@BOTH
def test_every_loss_is_the_same_to_the_last_bit_with_and_without_the_monitor(job: Job) -> None:
    for answer in job.answers:
        plain = answer["unwatched"]["losses"]
        assert len(plain) == STEPS
        for kind in answer.keys() - {"unwatched", "healthy", "network", "differing", "fsdp2_forward", "fsdp2_backward"}:
            assert answer[kind]["losses"] == plain, kind


@BOTH
def test_the_monitor_issues_no_collective(job: Job) -> None:
    for answer in job.answers:
        counts = {kind: answer[kind]["collectives"] for kind in ("unwatched", "forward", "backward", "loader")}
        assert set(counts.values()) == {counts["unwatched"]}
        assert counts["unwatched"] >= STEPS


@BOTH
def test_a_rank_leaves_one_note_per_interval_and_rank_0_one_more_per_count(job: Job) -> None:
    run = job.run("forward")
    num_counts = len(events(run, "count"))
    assert 1 <= num_counts <= 2  # the first, and the early second look where the budget has room for it
    # Without the four steps of warm-up and measuring, the whole intervals and what is left of the last one.
    at_most = -(-(STEPS - 4) // EVERY)
    for rank, answer in enumerate(job.answers):
        calls = answer["forward"]["calls"]
        is_first = rank == 0
        # The greeting; a count goes out beside the plan. One of the last steps may have none to go to.
        assert 1 + is_first <= calls["multi_set"] <= 1 + num_counts * is_first
        assert calls["set"] <= at_most + is_first  # the packets, and the plan
        assert set(calls) <= {"set", "multi_set", "check", "multi_get"}


@BOTH
def test_the_record_has_the_spread_of_the_ranks(job: Job) -> None:
    found = events(job.run("forward"), "ranks")
    assert found
    last = found[-1]
    assert last["world_size"] == len(job.answers)
    assert last["missing"] == []
    stats = last["stats"]
    assert stats["own_s"]["argmax"] == stats["forward_s"]["argmax"] == SLOW_RANK
    assert stats["blocked_s"]["argmax"] != SLOW_RANK
    assert len(last["own_s_by_rank"]) == last["world_size"]
    for quantity in stats.values():
        assert quantity["min"] <= quantity["mean"] <= quantity["max"]


def test_tokens_and_flops_are_those_of_the_job(two: Job) -> None:
    run = two.run("recorded")
    width, rows, layers = 64, 16, 4
    forward = 2 * rows * width * width * layers
    backward = 2 * forward - 2 * rows * width * width  # the first layer's input needs no gradient
    assert run.column("perf/model_flop")[-1] == pytest.approx(2 * (forward + backward))
    assert run.column("perf/samples_per_second")[-1] * run.column("perf/step_time")[-1] == pytest.approx(2 * rows)


def test_ranks_that_do_other_work_than_rank_0_count_for_themselves(two: Job) -> None:
    run = two.run("differing")
    layer = 2 * 16 * 64 * 64
    # Forward and the weight's gradient; the second rank's layer is twice as wide.
    assert run.column("perf/model_flop")[-1] == pytest.approx(2 * layer * (1 + 2))
    told = [event["message"] for event in events(run, "warning")]  # what the report shows among its remarks
    assert sum("the ranks do not do the same work" in message for message in told) == 1


def test_ranks_that_share_a_processor_share_its_peak(two: Job) -> None:
    run = two.run("recorded")
    wall_s, flop = run.column("perf/step_time")[-1], run.column("perf/model_flop")[-1]
    assert run.column("perf/mfu")[-1] == pytest.approx(flop / (1e12 * wall_s))


def test_other_ranks_write_a_record_only_when_asked(two: Job) -> None:
    assert [path.name for path in (two.folder / "loader").glob("run*")] == ["run.jsonl"]
    own = load_run(two.folder / "recorded" / "run.rank1.jsonl")
    assert len(own) == STEPS
    assert own.column("perf/samples_per_second")[-1] * own.column("perf/step_time")[-1] == pytest.approx(16)


def test_statistics_that_fail_on_one_rank_cost_one_warning(two: Job) -> None:
    assert two.errors.count("no statistics of the other ranks from here on: AttributeError") == 1
    assert "not recorded" not in two.errors
    assert len(two.run("raising")) == STEPS


def test_a_rank_0_that_pauses_is_no_straggler(two: Job) -> None:
    run = two.run("pausing")
    assert [event["name"] for event in events(run, "pause") if event["name"] == "checkpoint"] == ["checkpoint"]
    assert events(run, "straggler") == []


@BOTH
def test_a_rank_without_the_monitor_ends_the_statistics_with_one_warning(job: Job) -> None:
    messages = [event["message"] for event in events(job.run("absent"), "warning")]
    assert len([message for message in messages if f"rank {SLOW_RANK} did not join" in message]) == 1
    assert events(job.run("absent"), "ranks") == []


def test_a_killed_rank_ends_the_job_as_soon_as_without_the_monitor(tmp_path: Path) -> None:
    took_s = {}
    for kind in ("unwatched", "watched"):
        folder = tmp_path / kind
        folder.mkdir()
        result = torchrun(4, SCRIPT, folder, f"killed_{kind}")
        took_s[kind] = time.time() - float((folder / "killed_at").read_text())
        assert result.returncode != 0
        assert "Signal 9 (SIGKILL)" in result.stderr
    assert took_s["watched"] < 2 * took_s["unwatched"] + 5  # of what other tests may take from either
    run = load_run(tmp_path / "watched" / "killed_watched")
    assert run.summary is None or len(run) >= EVERY
    assert run.skipped == []


def test_an_elastic_restart_goes_on_in_the_same_record(tmp_path: Path) -> None:
    result = torchrun(2, SCRIPT, tmp_path, "killed_watched", restarts=1)
    assert result.returncode == 0, result.stderr
    run = load_run(tmp_path / "killed_watched")
    assert len(run.headers) == 2
    assert run.summary is not None
    assert events(run, "ranks")[-1]["missing"] == []


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel"])
def test_the_flops_of_an_examples_job_are_those_of_one_process_on_the_whole_batch(name: str, tmp_path: Path) -> None:
    result = torchrun(2, ROOT / "examples" / f"{name}.py", "--steps", "12", "--output-dir", tmp_path)
    assert result.returncode == 0, result.stderr
    module = example(name)
    model: nn.Module = module.LanguageModel()
    words = torch.zeros(module.BATCH, module.LENGTH, dtype=torch.long)
    batch = {"input_ids": words, "labels": words} if name == "fsdp2" else {"input_ids": words}
    alone = count_flops(model, batch).model_flop
    run = load_run(tmp_path)
    assert run.column("perf/model_flop")[-1] == pytest.approx(alone, rel=1e-3)
    tokens = run.column("perf/tokens_per_second")[-1] * run.column("perf/step_time")[-1]
    assert tokens == pytest.approx(words.numel())


def test_eight_ranks_leave_their_notes_and_rank_0_reads_them_all(tmp_path: Path) -> None:
    job = launch(tmp_path, 8, "forward")
    last = job.run("forward").last("ranks")
    assert (last["world_size"], last["missing"], len(last["own_s_by_rank"])) == (8, [], 8)
    assert all(own_s > 0 for own_s in last["own_s_by_rank"])
    assert max(last["own_s_by_rank"]) >= DELAY_S  # the slow rank's own time
    assert job.run("forward").header.world_size == 8
