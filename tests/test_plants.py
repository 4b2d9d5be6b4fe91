"""Does each planted fault leave its trace in the record, on every workload, and nothing when it is off?"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter import load_run
from flopmeter.demo import IGNORED, SyntheticText
from flopmeter.demo import train as train_demo
from flopmeter.errors import ConfigError
from flopmeter.record import Run
from naive_adam import NaiveAdam
from plant_training import build, run_demo, train
from plants import CHECKPOINT_EVERY, PLANTS, WORKLOADS, Planted, WorkloadName, _Debt, find_plant
from workloads import Recipe, SlowSamples, burn, loss_of, recipe_for

CPU = torch.device("cpu")
QUIET = {"monitoring": {"sinks": [], "peak_flop_per_s": 1e12}}
NUM_STEPS = 8
"""Enough for the warm-up and the observed step."""


def tiny(workload: WorkloadName = "gpt", **changes: Any) -> Recipe:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden": 32, "length": 16, "batch_size": 4, "step_s": 0.01}
    return Recipe(workload=workload, **(sizes | changes))


def spoiled(name: str, size: float, workload: WorkloadName = "gpt") -> Recipe:
    recipe, plant = tiny(workload), find_plant(name)
    plant.spoil(recipe, size)
    return recipe


def trained(recipe: Recipe, folder: Path, num_steps: int = NUM_STEPS) -> Run:
    """A run of a few steps, whatever the clock says."""
    train(recipe, folder, 0.0, QUIET, CPU, num_steps)
    return load_run(folder)


def event(run: Run, name: str) -> dict[str, Any]:
    return next(found for found in run.events if found["event"] == name)


def test_every_plant_is_described_and_has_sizes() -> None:
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) == 14
    for plant in PLANTS:
        assert 0 < plant.sizes[0] <= plant.sizes[1]
        assert plant.what
        assert plant.rule
        assert set(plant.workloads) <= set(WORKLOADS)


@pytest.mark.parametrize("plant", [plant for plant in PLANTS if plant.name != "none"], ids=lambda plant: plant.name)
def test_a_plant_that_is_off_leaves_only_the_setting_that_it_needs(plant: Any) -> None:
    prepared, planted = tiny(), tiny()
    plant.prepare(prepared, plant.sizes[1])
    plant.prepare(planted, plant.sizes[1])
    assert prepared == planted
    plant.spoil(planted, plant.sizes[1])
    assert prepared != planted


def test_a_misspelt_fault_is_refused_before_torch_is_loaded() -> None:
    code = (
        "import sys; sys.argv = ['flopmeter', 'demo', '--fault', 'slow_dik']\n"
        "from flopmeter.cli import _run\n"
        "sys.exit(_run() + 10 * ('torch' in sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 2, answer.stderr
    assert "did you mean 'slow_disk'?" in answer.stderr


def test_the_demo_pads_half_of_each_sample_and_leaves_it_out_of_the_loss() -> None:
    sample = next(iter(SyntheticText(16, seed=0, padding=0.5)))
    assert sample["attention_mask"].tolist() == [1] * 8 + [0] * 8
    assert sample["input_ids"][8:].tolist() == [0] * 8
    assert sample["labels"][8:].tolist() == [IGNORED] * 8
    assert sample["labels"][:7].tolist() == sample["input_ids"][1:8].tolist()


def test_the_demos_slow_disk_takes_its_time_for_each_sample(tmp_path: Path) -> None:
    run = load_run(train_demo(tmp_path, 0.0, "slow_disk", QUIET, min_steps=4))
    # Eight samples of 8 ms: the wait is at least their sum, whatever else the machine does.
    waits = [
        share * step_s
        for share, step_s in zip(run.column("perf/data_wait_share"), run.column("perf/step_time"), strict=True)
    ]
    assert min(wait for wait in waits if wait == wait) >= 8 * 0.008


def test_an_unknown_plant_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"no plant 'slow_disc'; did you mean 'slow_disk'\?"):
        find_plant("slow_disc")


def test_a_plant_goes_only_where_it_can_happen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="padding cannot be planted in conv; it can in: gpt, hf"):
        run_demo(tmp_path, 1, workload="conv", planted=[Planted(find_plant("padding"), 0.5)])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_healthy_run_shows_none_of_the_faults(workload: WorkloadName, tmp_path: Path) -> None:
    if workload == "hf":
        pytest.importorskip("transformers")
    run = trained(tiny(workload), tmp_path)
    facts = event(run, "facts")
    assert len(run) == NUM_STEPS
    assert "eager_attention" not in facts
    assert facts["optimizer"] == "fused"
    assert sum(facts["host_syncs"].values()) <= 1  # transformers reads one value to build its mask
    assert event(run, "count")["recompute_flop"] == 0
    assert not [found for found in run.events if found["event"] == "pause" and found["name"] != "flopmeter"]


@pytest.mark.parametrize("workload", ["gpt", "hf"])
def test_eager_attention_is_in_the_facts(workload: WorkloadName, tmp_path: Path) -> None:
    if workload == "hf":
        pytest.importorskip("transformers")
    run = trained(spoiled("eager_attention", 512, workload), tmp_path)
    found = event(run, "facts")["eager_attention"]
    assert (found["calls"], found["length"]) == (2, 16)


@pytest.mark.parametrize("workload", ["gpt", "hf"])
def test_padding_is_in_the_tokens(workload: WorkloadName, tmp_path: Path) -> None:
    if workload == "hf":
        pytest.importorskip("transformers")
    run = trained(spoiled("padding", 0.5, workload), tmp_path)
    # Half of 16 / (1 - 0.5) = 32 tokens is real.
    ratio = run.column("perf/tokens_per_second")[-1] / run.column("perf/tokens_processed_per_second")[-1]
    assert ratio == pytest.approx(0.5)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_checkpointing_is_in_the_count(workload: WorkloadName, tmp_path: Path) -> None:
    if workload == "hf":
        pytest.importorskip("transformers")
    count = event(trained(spoiled("checkpointing", 1.0, workload), tmp_path), "count")
    assert 0 < count["recompute_flop"] <= count["forward_flop"]


def test_a_naive_optimizer_is_in_the_facts(tmp_path: Path) -> None:
    facts = event(trained(spoiled("naive_optimizer", 4), tmp_path), "facts")
    assert facts["optimizer"] == "for-loop"
    # Four chunks of each of 28 tensors, with more than ten operators each.
    assert facts["num_optimizer_ops"] > 4 * facts["num_parameter_tensors"] * 10


def test_garbage_is_in_the_record(tmp_path: Path) -> None:
    gc.freeze()  # what the other tests left in memory would make a single collection take longer than all steps owe
    try:
        run = trained(spoiled("gc_storm", 20.0), tmp_path)
    finally:
        gc.unfreeze()
    assert event(run, "gc")["num"] >= 1


def test_checkpoint_pauses_are_in_the_record(tmp_path: Path) -> None:
    recipe = tiny()
    find_plant("checkpoint_pause").spoil(recipe, 1.0)
    run = trained(recipe, tmp_path, CHECKPOINT_EVERY)
    pauses = [found for found in run.events if found["event"] == "pause" and found["name"] == "checkpoint"]
    assert len(pauses) == 1
    assert pauses[0]["duration_s"] > 0


def test_host_syncs_are_in_the_facts_with_their_place(tmp_path: Path) -> None:
    str(torch.ones(3))  # the first one of a process takes longer than many steps owe
    facts = event(trained(spoiled("host_sync", 20.0), tmp_path), "facts")
    assert facts["host_syncs"]["aten::_local_scalar_dense"] >= 1
    assert facts["host_sync_places"][0].startswith("plants.py:")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_double_precision_is_in_the_facts(workload: WorkloadName, tmp_path: Path) -> None:
    if workload == "hf":
        pytest.importorskip("transformers")
    facts = event(trained(spoiled("fp64", 1, workload), tmp_path), "facts")
    assert "float64" in facts["matmul_dtypes"]


def test_a_tiny_batch_is_in_the_samples(tmp_path: Path) -> None:
    run = trained(spoiled("tiny_batch", 1), tmp_path)
    samples = run.column("perf/samples_per_second")[-1] * run.column("perf/step_time")[-1]
    assert samples == pytest.approx(1)


def test_slow_samples_take_their_time_and_busy_ones_their_cpu() -> None:
    samples = recipe_for("gpt", CPU, is_short=True).loader().dataset
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    next(iter(SlowSamples(samples, 0.05, 0.0)))
    assert time.perf_counter() - start_s >= 0.05
    assert time.thread_time() - start_cpu_s < 0.05
    start_cpu_s = time.thread_time()
    burn(0.02)
    assert time.thread_time() - start_cpu_s >= 0.02


def test_a_debt_is_paid_by_the_work_that_was_really_done() -> None:
    done: list[int] = []
    debt = _Debt(1e-4, every=2)
    assert not debt.add_step()
    assert debt.add_step()
    debt.pay(lambda: done.append(time.sleep(1e-4) or 1))
    assert 1 <= len(done) <= 2  # two tenths of a millisecond are owed, and each piece of work takes one or more


def test_sizes_in_steps_are_taken_from_a_measured_step() -> None:
    plant = find_plant("slow_disk")
    recipe = build(tiny(step_s=0.0), [Planted(plant, 0.5)], CPU)
    assert recipe.step_s > 0
    assert recipe.read_s == pytest.approx(1.5 * recipe.step_s)
    assert build(tiny(step_s=0.0), [Planted(plant, 0.5, is_on=False)], CPU).read_s == 0


def test_spelled_out_attention_computes_what_sdpa_computes() -> None:
    batch = next(iter(tiny().loader()))
    losses = [tiny(has_eager_attention=is_eager).model()(**batch) for is_eager in (False, True)]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_the_naive_optimizer_computes_what_torchs_does(num_slices: int) -> None:
    weights = []
    for make in (
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        lambda parameters: NaiveAdam(parameters, lr=0.01, num_slices=num_slices),
    ):
        torch.manual_seed(0)
        net = nn.Linear(5, 3)
        optimizer = make(net.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        weights.append(net.weight.detach())
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_weights_are_the_same_every_time(workload: WorkloadName) -> None:
    if workload == "hf":
        pytest.importorskip("transformers")
    recipe = tiny(workload)
    batch = next(iter(recipe.loader()))
    first, second = (loss_of(recipe.model()(**batch)) for _ in range(2))
    torch.testing.assert_close(first, second)


def test_two_ranks_train_together_and_stop_together(tmp_path: Path) -> None:
    planted = [Planted(find_plant(name), 0.5) for name in ("slow_rank", "slow_network")]
    result = run_demo(tmp_path, 1.0, QUIET, planted=planted)
    run = load_run(result.run_path)
    assert run.header.world_size == 2
    assert result.num_steps == len(run) > 0
    assert result.num_steps % 10 == 0  # rank 0 is asked every ten steps
