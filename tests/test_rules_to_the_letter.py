"""Each rule at its threshold, and every number, sentence and cut of its finding; expected values are found by hand.

The planned run has 40 steps of 100 ms: 70 matmul (50 ideal), 20 other operators, 4 gaps, 5 optimizer, 1 data wait.
Times in comments are those of one step, in ms.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flopmeter.devices import Device
from flopmeter.diagnosis import RULES, Evidence, Finding, NotCheckedError
from planned_runs import START_S, event, record
from test_rules import PLAN, find, gain_of, look, why_not, workers

SOFTMAX = (("aten::_softmax", 0.004, 12), ("aten::masked_fill", 0.006, 12))
EAGER = {"eager_attention": {"calls": 24, "length": 256, "modules": ["blocks.0.attention"]}}
READS = {"host_syncs": {"aten::_local_scalar_dense": 100}}
PARALLEL = PLAN.but(header={"world_size": 3}, exposed_s=0.025)
"""Steps of 125 ms."""
LOOP = {"optimizer": "for-loop", "num_optimizer_ops": 140, "num_parameter_tensors": 10}


def faster(of: float, *saved: float) -> Any:
    """What it brings to save so much of so much, at least, likely and at most."""
    return pytest.approx(tuple(of / (of - part) - 1 for part in saved))


def gc_event(**fields: Any) -> dict[str, Any]:
    return event("gc", START_S + 4, **fields)


def memory(share: float) -> dict[str, Any]:
    return event("resources", START_S, metrics={"resource/gpu_memory_share": share})


def slow_peer(extra_s: float, **fields: Any) -> dict[str, Any]:
    usual = {"rank": 1, "host": "node7", "phase": "forward_s", "since_step": 3, "cause": "slow_peer"}
    return event("straggler", START_S + 1, extra_s=extra_s, **usual | fields)


# Thresholds

AT_THE_THRESHOLD = {
    "checkpoint_pause": PLAN.but(pauses=(("save", 0.6),)),
    "cpu_preprocessing": PLAN.but(data_wait_s=0.011, events=(workers(4, 3.2),)),
    "data_stall": PLAN.but(data_wait_s=0.011),
    "eager_attention": PLAN.but(facts=EAGER, top=SOFTMAX),
    "eval_pause": PLAN.but(pauses=(("eval", 0.6),)),
    "exposed_communication": PARALLEL,
    "gc_pause": PLAN.but(events=(gc_event(duration_s=0.4),)),
    "host_sync": PLAN.but(facts=READS, top=(("aten::_local_scalar_dense", 0.010, 100),)),
    "kernel_launch": PLAN.but(gap_s=0.1),
    "memory_bound": PLAN.but(non_matmul_s=0.120),
    "recompute": PLAN.but(recompute_s=0.025),
    "straggler": PARALLEL.but(events=(slow_peer(0.025),)),
}
"""Of rules that compare what is lost with `MIN_SHARE`."""


@pytest.mark.parametrize("rule", AT_THE_THRESHOLD)
def test_what_loses_just_as_much_as_the_threshold_is_found_and_a_hair_less_is_not(rule: str, tmp_path: Path) -> None:
    evidence = Evidence(AT_THE_THRESHOLD[rule].run(tmp_path))
    finding = RULES[rule].look(evidence, RULES[rule])
    assert finding is not None
    assert finding.lost > RULES[rule].threshold
    assert RULES[rule].look(evidence, replace(RULES[rule], threshold=finding.lost)) == finding
    assert RULES[rule].look(evidence, replace(RULES[rule], threshold=math.nextafter(finding.lost, 1))) is None


def test_an_update_that_takes_just_the_threshold_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = Evidence(PLAN.but(optimizer_s=0.025, facts=LOOP).run(tmp_path))
    for threshold, is_found in ((evidence.share("optimizer"), True), (evidence.share("optimizer") + 1e-9, False)):
        monkeypatch.setattr("flopmeter.diagnosis.rules.HEAVY_SHARE", threshold)
        assert (RULES["optimizer_heavy"].look(evidence, RULES["optimizer_heavy"]) is not None) is is_found


@pytest.mark.parametrize(("cores", "rule"), [(1.99, "data_stall"), (2.0, "cpu_preprocessing")])
def test_from_half_of_its_time_on_a_loader_computes(tmp_path: Path, cores: float, rule: str) -> None:
    plan = PLAN.but(data_wait_s=0.011, events=(workers(4, cores),))
    assert [name for name in ("data_stall", "cpu_preprocessing") if look(name, tmp_path, plan)] == [rule]


@pytest.mark.parametrize(("share", "is_found"), [(0.79, True), (0.8, False)])
def test_from_four_fifths_on_the_memory_is_full(tmp_path: Path, share: float, is_found: bool) -> None:
    plan = PLAN.but(recompute_s=0.025, events=(memory(share),))
    assert (look("recompute", tmp_path, plan) is not None) is is_found


def test_a_utilisation_of_just_the_peak_is_possible(tmp_path: Path) -> None:
    assert look("impossible_mfu", tmp_path, PLAN.but(metrics={"perf/mfu": 1.0, "perf/hfu": 1.0})) is None
    assert look("impossible_mfu", tmp_path, PLAN.but(metrics={"perf/mfu": 1.0, "perf/hfu": 1.001})) is not None


@pytest.mark.parametrize(("num", "is_found"), [(7, False), (8, True)])
def test_from_eight_on_recompilations_are_too_many(tmp_path: Path, num: int, is_found: bool) -> None:
    finding = look("ragged_shapes", tmp_path, PLAN.but(facts={"num_recompiles": num}))
    assert (finding is not None) is is_found


def test_padding_of_just_the_threshold_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Half of all tokens are useful, exactly: 0.25 of the peak against 0.5.
    plan = PLAN.but(metrics={"perf/mfu": 0.25, "perf/mfu_processed": 0.5})
    for threshold, is_found in ((0.5, True), (0.501, False)):
        monkeypatch.setattr("flopmeter.diagnosis.rules.MIN_WASTE", threshold)
        assert (look("padding_waste", tmp_path, plan) is not None) is is_found


@pytest.mark.parametrize(("num_steps", "advice"), [(49, "train longer"), (50, "profile_steps: true")])
def test_a_run_of_fifty_steps_was_long_enough_to_be_sampled(tmp_path: Path, num_steps: int, advice: str) -> None:
    plan = PLAN.but(matmul_s=0.970, num_profiles=0, num_steps=num_steps)
    finding = find("undetermined", tmp_path, plan)
    assert advice in finding.advice[0]
    assert finding.lost == 0


# Pauses and waits


def test_a_pause_for_a_checkpoint_in_numbers(tmp_path: Path) -> None:
    finding = find("checkpoint_pause", tmp_path, PLAN.but(pauses=(("save", 0.6),)))
    assert finding.lost == pytest.approx(0.6 / 4.6)
    assert gain_of(finding) == faster(4.6, 0.3, 0.57, 0.6)
    assert finding.evidence == ("600 ms of 4.6 s are pauses for checkpoints",)


def test_a_pause_for_evaluation_in_numbers(tmp_path: Path) -> None:
    finding = find("eval_pause", tmp_path, PLAN.but(pauses=(("eval", 0.6),)))
    assert gain_of(finding) == faster(4.6, 0.15, 0.3, 0.48)
    assert finding.evidence == ("600 ms of 4.6 s are pauses for evaluation",)


def test_collections_of_garbage_in_numbers(tmp_path: Path) -> None:
    events = (gc_event(duration_s=0.25, num=3, longest_s=0.125), gc_event(duration_s=0.15, num=4, longest_s=0.03))
    finding = find("gc_pause", tmp_path, PLAN.but(events=events))
    assert finding.evidence == ("7 collections in 400 ms, the longest of 125 ms, in 40 steps",)
    assert gain_of(finding) == faster(4.0, 0.2, 0.38, 0.4)
    unknown = find("gc_pause", tmp_path, PLAN.but(events=(gc_event(duration_s=0.4),)))
    assert unknown.evidence == ("0 collections in 400 ms, in 40 steps",)


@pytest.mark.parametrize(("num_workers", "advice"), [(0, "set num_workers (it is 0 now)"), (2, "raise num_workers")])
def test_a_stall_in_numbers(tmp_path: Path, num_workers: int, advice: str) -> None:
    finding = find("data_stall", tmp_path, PLAN.but(data_wait_s=0.011, events=(workers(num_workers, 0.2),)))
    assert finding.lost == pytest.approx(0.1)  # 11 of 110
    assert finding.evidence[0] == "11 ms of every step are spent waiting for the next batch"
    assert finding.advice[0].startswith(f"DataLoader: {advice}")
    assert gain_of(finding) == faster(110, 5.5, 10.45, 11)


def test_preprocessing_in_numbers(tmp_path: Path) -> None:
    finding = find("cpu_preprocessing", tmp_path, PLAN.but(data_wait_s=0.011, events=(workers(4, 3.2),)))
    assert finding.lost == pytest.approx(0.1)
    assert finding.evidence == (
        "11 ms of every step are spent waiting for the next batch",
        "its 4 workers are busy for 80.0 % of the time each",
    )
    assert gain_of(finding) == faster(110, 5.5, 10.45, 11)


def test_recomputation_in_numbers(tmp_path: Path) -> None:
    finding = find("recompute", tmp_path, PLAN.but(recompute_s=0.025, events=(memory(0.45),)))
    assert finding.evidence == (
        "25 ms of every step are recomputation in the backward pass",
        "the GPU's memory is 45.0 % full",
    )
    unknown = find("recompute", tmp_path, PLAN.but(recompute_s=0.025))
    assert unknown.evidence[1].startswith("how full the memory is was not recorded")
    assert gain_of(unknown) == faster(125, 12.5, 23.75, 25)


# Ranks


def test_communication_in_numbers(tmp_path: Path) -> None:
    finding = find("exposed_communication", tmp_path, PARALLEL.but(num_steps=30))
    assert finding.evidence == ("25 ms of every step, with 3 ranks",)
    assert gain_of(finding) == faster(125, 12.5, 22.5, 25)


@pytest.mark.parametrize("rule", ["exposed_communication", "straggler"])
def test_one_rank_waits_for_nobody_whatever_the_record_says(tmp_path: Path, rule: str) -> None:
    alone = PARALLEL.but(header={"world_size": 1}, events=(slow_peer(0.025),))
    assert look(rule, tmp_path, alone) is None
    assert look(rule, tmp_path, alone.but(header={"world_size": 2})) is not None


def test_a_straggler_in_numbers(tmp_path: Path) -> None:
    finding = find("straggler", tmp_path, PARALLEL.but(events=(slow_peer(0.005),)))
    assert finding.title == "rank 1 holds up all others for 5 ms a step"
    assert finding.lost == pytest.approx(0.04 * 38 / 40)  # from the third step on
    assert finding.evidence == (
        "its own time exceeds the others' by 5 ms a step, in forward",
        "host node7, since step 3",
        "that is 3.8 % of the time of 3 ranks",
    )
    assert gain_of(finding) == faster(125, 2.375, 4.5125, 4.75)


def test_names_of_a_straggler_are_cut(tmp_path: Path) -> None:
    long = slow_peer(0.025, rank="r" * 99, host="h" * 99, phase="p" * 99, since_step="s" * 99)
    finding = find("straggler", tmp_path, PARALLEL.but(events=(long,)))
    assert finding.title == f"rank {'r' * 20} holds up all others for 25 ms a step"
    assert finding.evidence[0].endswith(f" in {'p' * 40}")
    assert finding.evidence[1] == f"host {'h' * 79}…, since step {'s' * 20}"


class TestExchanges:
    """Three ranks; own times of 100, 100 and 160 ms: mean 120, and the slowest is 60 ms ahead of the others' mean."""

    def exchange(self, max_s: float = 0.16, blocked_s: float = 0.06, **changes: Any) -> dict[str, Any]:
        own = {"mean": (0.2 + max_s) / 3, "max": max_s, "argmax": 2}
        stats = {
            "own_s": own,
            "blocked_s": {"mean": 0.0, "max": blocked_s},
            "step_s": {"mean": 0.0, "max": 9.0},
            "memory_bytes": {"mean": 0.0, "max": 9.0},
            "data_wait_s": {"mean": 0.01, "max": 0.02},
            "host_to_device_s": {"mean": 0.01, "max": 0.04},
            "forward_s": {"mean": 0.02, "max": 0.03},
        }
        return event("ranks", START_S + 1, world_size=3, missing=[], stats=stats | changes)

    def look(self, folder: Path, *events: dict[str, Any]) -> Finding | None:
        return look("straggler", folder, PARALLEL.but(events=events))

    def test_the_last_one_names_the_phase_and_the_median_the_time(self, tmp_path: Path) -> None:
        odd_one = self.exchange(0.22, forward_s={"mean": 0.0, "max": 1.0})  # 220 against 100: 120 ms
        finding = self.look(tmp_path, odd_one, self.exchange(), self.exchange())
        assert finding is not None
        assert finding.title == "rank 2 holds up all others for 60 ms a step"
        assert finding.lost == pytest.approx(0.060 / 0.125)
        assert finding.evidence[:2] == (
            "its own time exceeds the others' by 60 ms a step, in host to device",
            "in all of 3 exchanges",
        )

    @pytest.mark.parametrize(("blocked_s", "is_found"), [(0.119, True), (0.121, False)])
    def test_a_rank_that_explains_less_than_half_of_the_wait_is_not_the_cause(
        self, tmp_path: Path, blocked_s: float, is_found: bool
    ) -> None:
        assert (self.look(tmp_path, self.exchange(blocked_s=blocked_s)) is not None) is is_found

    def test_just_half_of_the_wait_is_enough(self, tmp_path: Path) -> None:
        # Of two ranks, 0.75 s against 0.25: the mean is 0.5, the distance 0.5, and others wait for 1 s. All exact.
        stats = {"own_s": {"mean": 0.5, "max": 0.75, "argmax": 1}, "blocked_s": {"max": 1.0}}
        assert self.look(tmp_path, event("ranks", START_S + 1, world_size=2, missing=[], stats=stats)) is not None

    def test_an_unnamed_rank_must_be_a_tenth_ahead(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        events = (self.exchange(),)
        finding = self.look(tmp_path, *events)
        assert finding is not None
        for share, is_found in ((finding.lost, True), (math.nextafter(finding.lost, 1), False)):
            monkeypatch.setattr("flopmeter.diagnosis.rules.UNNAMED_SHARE", share)
            assert (self.look(tmp_path, *events) is not None) is is_found

    def test_without_phases_or_ranks_it_says_so(self, tmp_path: Path) -> None:
        bare = {"own_s": {"mean": 0.12, "max": 0.16, "argmax": "r" * 99}, "blocked_s": {"max": 0.06}}
        finding = self.look(tmp_path, event("ranks", START_S + 1, world_size=3, missing=[], stats=bare))
        assert finding is not None
        assert finding.title.startswith(f"rank {'r' * 20} holds")
        assert finding.evidence[0].endswith("in an unknown phase")
        single = event("ranks", START_S + 1, world_size=1, missing=[], stats=bare)
        assert self.look(tmp_path, single) is None


# Attention that is spelled out


def test_spelled_out_attention_in_numbers(tmp_path: Path) -> None:
    # Scores 10, other passes 3, matmuls 11 of 100.
    top = (*SOFTMAX, ("aten::div", 0.003, 12), ("aten::bmm", 0.011, 24))
    finding = find("eager_attention", tmp_path, PLAN.but(facts=EAGER, top=top))
    assert finding.title == "attention is spelled out instead of fused, which costs 13.0 % of the time"
    assert gain_of(finding) == faster(100, 5, 13, 18.5)
    assert finding.evidence == (
        "24 softmaxes over 256 x 256 scores in a step: blocks.0.attention",
        "scores 13.0 %, their matmuls 11.0 % of the time",
    )


def test_spelled_out_attention_that_no_step_timed(tmp_path: Path) -> None:
    names = ["a" * 99, "b", "c", "d"]
    seen = {"eager_attention": {"calls": "1" * 99, "length": "2" * 99, "modules": names}}
    finding = find("eager_attention", tmp_path, PLAN.but(facts=seen, num_profiles=0))
    assert finding.title == "attention is spelled out instead of fused"
    table = f"{'1' * 20} softmaxes over {'2' * 20} x {'2' * 20} scores in a step"
    assert finding.evidence == (
        f"{table}: {'a' * 60}, b, c",
        "no step was sampled, so what it costs is not known",
    )
    del seen["eager_attention"]["modules"]
    assert find("eager_attention", tmp_path, PLAN.but(facts=seen, num_profiles=0)).evidence[0] == table


# Number formats

H100 = {"device": "NVIDIA H100 80GB HBM3"}


def test_float64_in_numbers(tmp_path: Path) -> None:
    # Three quarters of the FLOPs, under two names; a format that we do not know is one of the others. Matmuls take 70,
    # all work 95: 100 less gaps and wait.
    dtypes = {"float64": 0.5, "fp64": 0.25, "bfloat16": 0.15, "no such": 0.1}
    finding = find("fp32_matmul", tmp_path, PLAN.but(facts={"matmul_dtypes": dtypes}))
    assert finding.title.startswith("75.0 % of the matmul FLOPs are float64")
    assert finding.lost == pytest.approx(0.75 * 95 / 2 / 100)
    assert gain_of(finding) == faster(100, 0.75 * 35, 0.75 * 47.5, 0.75 * 57)


@pytest.mark.parametrize(
    ("dtypes", "start"),
    [
        ({"float64": 1.0, "bfloat16": 9.0}, "10.0 % of the matmul FLOPs are float64"),
        ({"float32": 1.0, "bfloat16": 9.0}, "10.0 % of the matmul FLOPs are float32, and bf16 would be 14.8 times"),
        ({"float64": 0.99, "bfloat16": 9.01}, None),
        ({"float32": 0.99, "bfloat16": 9.01}, None),
        ({"bfloat16": 0.5}, None),
    ],
)
def test_from_a_tenth_of_the_flops_on_a_format_counts(
    tmp_path: Path, dtypes: dict[str, float], start: str | None
) -> None:
    finding = look("fp32_matmul", tmp_path, PLAN.but(header=H100, facts={"matmul_dtypes": dtypes}))
    assert finding is None if start is None else finding is not None and finding.title.startswith(start)


def test_a_format_of_which_nothing_was_computed_is_none(tmp_path: Path) -> None:
    plan = PLAN.but(facts={"matmul_dtypes": {"float32": 0}})
    assert why_not("fp32_matmul", tmp_path, plan) == "no observed step counted its matmuls by dtype"


def test_float32_in_numbers(tmp_path: Path) -> None:
    # The H100's sheet, in TFLOP/s: 67 fp32, 494.7 tf32, 989.4 bf16. Matmuls take 70 of 100, a fifth of it in float32.
    dtypes = {"float32": 0.2, "bfloat16": 0.8}
    finding = find("fp32_matmul", tmp_path, PLAN.but(header=H100, facts={"matmul_dtypes": dtypes}))
    saved = 0.2 * 70 * (1 - 67 / 989.4)
    assert finding.lost == pytest.approx(saved / 2 / 100)
    assert gain_of(finding) == faster(100, saved / 4, saved / 2, saved)
    assert finding.evidence[1] == "peaks on file: bf16 989.4 TFLOP/s, fp32 67 TFLOP/s"


@pytest.mark.parametrize(
    ("peaks", "best"),
    [
        ({"fp32": 2.0, "bf16": 6.0, "tf32": 4.0}, "bf16 would be 3 times"),
        ({"fp32": 2.0, "bf16": 3.0, "tf32": 4.0}, "tf32 would be 2 times"),
        ({"fp32": 2.0, "tf32": 3.0}, "tf32 would be 1.5 times"),
        ({"fp32": 2.0, "tf32": 2.0, "bf16": 2.0}, None),
        ({"fp32": 2.0, "fp16": 8.0}, None),
        ({"bf16": 8.0}, None),
    ],
)
def test_the_fastest_format_on_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peaks: dict[str, float], best: str | None
) -> None:
    device = Device(names=("X",), peak_flop_per_s=peaks, source="a test", date="2026-01-01")
    monkeypatch.setattr("flopmeter.diagnosis.rules.find_device", lambda _: device)
    finding = look("fp32_matmul", tmp_path, PLAN.but(header={"device": "X"}))
    assert finding is None if best is None else finding is not None and best in finding.title


# The fixed cost of a step


def test_a_fixed_cost_in_numbers(tmp_path: Path) -> None:
    # On a GPU: 40 gaps and 5 of a fused update of 136.
    verdict = {"bound": "host", "reason": "w" * 300}
    bound = event("device_time", START_S + 2, num_steps=10, verdict=verdict)
    finding = find("kernel_launch", tmp_path, PLAN.but(gap_s=0.040, device="cuda", events=(bound,)))
    assert finding.lost == pytest.approx(45 / 136)
    assert finding.evidence == (
        "nothing runs for 29.4 % of the time, while the host prepares operators",
        "the update takes 3.7 %, whatever the batch size",
        "500 operators a step",
        "w" * 199 + "…",
    )
    assert gain_of(finding) == faster(136, 22.5, 45 * 15 / 16, 45)


def test_an_update_in_a_loop_is_no_part_of_a_fixed_cost(tmp_path: Path) -> None:
    finding = find("kernel_launch", tmp_path, PLAN.but(gap_s=0.040, device="cuda", facts={"optimizer": "for-loop"}))
    assert finding.lost == pytest.approx(40 / 136)


def test_a_fixed_cost_without_an_update_or_operators(tmp_path: Path) -> None:
    plan = PLAN.but(gap_s=0.040, optimizer_s=0.0, num_ops=0)
    finding = find("kernel_launch", tmp_path, plan)
    assert finding.evidence == ("nothing runs for 30.5 % of the time, while the host prepares operators",)  # 40/131
    bound = event("device_time", START_S + 2, num_steps=10, verdict={"bound": "device", "reason": "busy"})
    assert len(find("kernel_launch", tmp_path, plan.but(device="cuda", events=(bound,))).evidence) == 1


@pytest.mark.parametrize(
    ("num_ops", "fixed"),
    [(1000, 40 + 7.5), (100_000, 40 + 40), (400, 40 + 3), (0, 40)],
    ids=["7.5 us each", "at most what they took", "just enough for the gaps", "unknown"],
)
def test_on_a_cpu_operators_take_their_time_to_start(tmp_path: Path, num_ops: int, fixed: float) -> None:
    # 70 matmul of which 50 ideal, 20 others: 40 that starting may have taken. Steps of 131.
    plan = PLAN.but(gap_s=0.040, optimizer_s=0.0, num_ops=num_ops)
    assert find("kernel_launch", tmp_path, plan).lost == pytest.approx(fixed / 131)
    assert find("kernel_launch", tmp_path, plan.but(device="cuda")).lost == pytest.approx(40 / 131)


def test_gaps_that_launching_cannot_account_for_are_no_fixed_cost(tmp_path: Path) -> None:
    # 200 operators launch within 20 at the most, a tenth of a millisecond each. Steps of 206, 5 of them a fused update.
    plan = PLAN.but(gap_s=0.110, num_ops=200, device="cuda")
    assert look("kernel_launch", tmp_path, plan) is None  # 25 of 206
    assert find("kernel_launch", tmp_path, plan.but(num_ops=1100)).lost == pytest.approx(115 / 206)


def test_each_operator_is_charged_at_most_its_own_time(tmp_path: Path) -> None:
    # Of 1000 operators 800 are known to take 2 in all; 200 others take 1.5 to start. Steps of 131, 40 of them gaps.
    plan = PLAN.but(gap_s=0.040, optimizer_s=0.0, num_ops=1000, top=(("aten::add", 0.002, 800),))
    assert find("kernel_launch", tmp_path, plan).lost == pytest.approx((40 + 2 + 1.5) / 131)


def test_reads_and_own_code_are_no_fixed_cost(tmp_path: Path) -> None:
    # 100 of 1000 operators read: 900 others take 6.75. Steps of 206 with 5 of a fused update and 20 of own code.
    facts = {"host_syncs": {"aten::_local_scalar_dense": 100}}
    plan = PLAN.but(gap_s=0.090, other_s=0.020, num_ops=1000, facts=facts)
    assert find("kernel_launch", tmp_path, plan).lost == pytest.approx((90 + 6.75 + 5) / 206)
    # On a GPU one read has at most 100 launches of 10 us behind it.
    once = {"host_syncs": {"aten::_local_scalar_dense": 1}}
    assert find("kernel_launch", tmp_path, plan.but(facts=once, device="cuda")).lost == pytest.approx((89 + 5) / 206)


# Reading values


def test_reads_in_numbers(tmp_path: Path) -> None:
    # The calls take 5 of 121.
    syncs = {"a": 3, "b": 40, "c": 10, "d": 5, "e": 2}
    places = [*("p" * 99 for _ in range(2)), "3", "4", "5", "6"]
    facts = {"host_syncs": syncs, "host_sync_places": places}
    plan = PLAN.but(gap_s=0.025, facts=facts, top=(("aten::item", 0.005, 1),))
    finding = find("host_sync", tmp_path, plan)
    assert finding.title == "the loop reads values 60 times a step, which costs 4.1 % of the time"
    assert finding.lost == pytest.approx(5 / 121)
    cut = "p" * 79 + "…"
    assert finding.evidence == (
        f"values are read 60 times a step: b x 40, c x 10, d x 5, a x 3; at {cut}, {cut}, 3, 4, 5",
        "the calls took 4.1 % of the time",
    )
    assert gain_of(finding) == faster(121, 2.5, 4.75, 5)
    bare = find("host_sync", tmp_path, plan.but(facts={"host_syncs": syncs}))
    assert bare.evidence[0] == "values are read 60 times a step: b x 40, c x 10, d x 5, a x 3"


def test_reads_on_a_gpu_may_cost_all_gaps_and_nothing_else(tmp_path: Path) -> None:
    # Three reads: 3 of gaps behind them, of 140; all 45 gaps at most. For how long the host was blocked is no cost.
    facts = {"host_syncs": {"aten::item": 3}}
    plan = PLAN.but(gap_s=0.045, facts=facts, device="cuda", top=(("aten::item", 0.9, 3),))
    finding = find("host_sync", tmp_path, plan)
    assert finding.title == "the loop reads values from the device 3 times a step, which costs 2.1 % of the time"
    assert gain_of(finding) == faster(141, 1.5, 2.85, 45)


class TestOwnCode:
    """Steps of 125, 25 of them the loop's own."""

    plan = PLAN.but(other_s=0.025)

    def test_in_numbers(self, tmp_path: Path) -> None:
        finding = find("own_code", tmp_path, self.plan)
        assert finding.lost == pytest.approx(0.2)
        assert gain_of(finding) == faster(125, 2.5, 12.5, 25)
        assert finding.evidence == ("25 ms of every step lie outside data, forward, backward and update",)
        assert "py-spy" in finding.advice[-1]

    def test_a_loss_outside_the_model_is_not_called_own_code(self, tmp_path: Path) -> None:
        # The sampled step saw 25 of operators between the passes: they are in the other operators.
        plan = self.plan.but(gap_s=0.0, num_profiles=0)
        seen = plan.profile(START_S + 4) | {"non_matmul_s": 0.020 + 0.025}
        assert look("own_code", tmp_path, plan.but(events=(seen,))) is None

    def test_frames_say_where_it_is(self, tmp_path: Path) -> None:
        frames = event("frames", START_S + 2, top=[["env.py:12 step", 0.7], ["train.py:3 <module>", 0.2], ["odd"], 7])
        finding = find("own_code", tmp_path, self.plan.but(events=(frames,)))
        assert finding.evidence[1] == "most of it in: env.py:12 step 70.0 %, train.py:3 <module> 20.0 %"
        assert "py-spy" not in " ".join(finding.advice)

    def test_many_reads_in_it_are_named(self, tmp_path: Path) -> None:
        assert look("host_sync", tmp_path, self.plan.but(facts=READS)) is None
        finding = find("own_code", tmp_path, self.plan.but(facts=READS))
        assert finding.evidence[1].startswith("in it values are read 100 times a step")
        assert finding.advice[0].startswith("read values, print and log")

    def test_a_column_of_its_own_counts_where_the_record_has_it(self, tmp_path: Path) -> None:
        named = find("own_code", tmp_path, self.plan.but(metrics={"perf/own_code_share": 0.15}))
        assert named.lost == pytest.approx(0.15)


class TestContention:
    """Of steps of 100, 50 are ideal."""

    def waiting(self, share: float, cores: float) -> dict[str, Any]:
        metrics = {"resource/process_cpu_cores": cores, "resource/cpu_wait_share": share}
        return event("resources", START_S + 2, metrics=metrics)

    def test_where_linux_tells_the_wait_for_a_core_that_is_what_it_costs(self, tmp_path: Path) -> None:
        # 20 of 100 in a queue for a core and 60 on one: it gets 60 of the 80 that it wants.
        finding = find("cpu_contention", tmp_path, PLAN.but(events=(self.waiting(0.2, 0.6),)))
        assert finding.lost == pytest.approx(0.2)
        assert finding.title.startswith("the process gets 75.0 % of the CPU time that it needs")
        assert gain_of(finding) == faster(100, 10, 19, 20)
        assert "ready to run for 20.0 % of the time" in finding.evidence[0]

    @pytest.mark.parametrize(("share", "cores", "device", "is_found"), [
        (0.09, 0.5, "cpu", False), (0.11, 1.9, "cpu", True), (0.5, 0.5, "cuda", False),
    ])  # fmt: skip
    def test_a_short_wait_is_none_and_a_device_works_meanwhile(
        self, tmp_path: Path, share: float, cores: float, device: str, is_found: bool
    ) -> None:
        plan = PLAN.but(device=device, events=(self.waiting(share, cores),))
        assert (look("cpu_contention", tmp_path, plan) is not None) is is_found

    def test_a_loop_that_sleeps_is_not_starved(self, tmp_path: Path) -> None:
        plan = PLAN.but(other_s=0.100, events=(self.waiting(0.0, 0.5),))
        assert look("cpu_contention", tmp_path, plan) is None

    def test_a_starved_loader_computes(self, tmp_path: Path) -> None:
        # Steps of 200, 101 of them waiting; the process gets 30 of 100 that it needs, and so does its loader.
        plan = PLAN.but(data_wait_s=0.101, metrics={"perf/data_wait_cpu_share": 0.3})
        assert look("cpu_preprocessing", tmp_path, plan) is None
        plan = plan.but(events=(self.waiting(0.7, 0.3),))
        assert find("cpu_preprocessing", tmp_path, plan).evidence[1].endswith("computes for 100.0 % of the wait")
        assert look("data_stall", tmp_path, plan) is None

    def test_a_gpu_is_not_asked_and_without_samples_it_is_not_checked(self, tmp_path: Path) -> None:
        assert look("cpu_contention", tmp_path, PLAN.but(device="cuda", events=(self.waiting(0.9, 0.1),))) is None
        assert "not sampled" in why_not("cpu_contention", tmp_path, PLAN)


class TestSidePasses:
    """What later records tell of passes without gradients."""

    plan = PLAN.but(matmul_s=0.170, metrics={"perf/no_grad_share": 0.3, "perf/generation_share": 0.1})

    def test_in_numbers(self, tmp_path: Path) -> None:
        finding = find("side_passes", tmp_path, self.plan)
        assert finding.lost == pytest.approx(0.4)
        assert gain_of(finding) == faster(1.0, 0, 0.2, 0.36)
        assert finding.evidence == ("passes without gradients: 30.0 % of the time", "generation: 10.0 % of the time")

    def test_without_the_columns_there_are_none(self, tmp_path: Path) -> None:
        assert look("side_passes", tmp_path, PLAN) is None


class TestRollouts:
    """Passes without gradients between the steps are an evaluation only where the record calls them one."""

    def plan_of(self, name: str) -> Any:
        return PLAN.but(events=[event("pause", START_S + 0.1 * at, name=name, duration_s=0.02) for at in range(1, 40)])

    def test_they_are_no_evaluation_that_could_be_less_often(self, tmp_path: Path) -> None:
        assert look("eval_pause", tmp_path, self.plan_of("no_grad")) is None
        assert look("eval_pause", tmp_path, self.plan_of("generation")) is None

    def test_one_that_is_called_so_is_one_however_often(self, tmp_path: Path) -> None:
        finding = find("eval_pause", tmp_path, self.plan_of("eval"))
        assert finding.title.startswith("training stands still for evaluation")
        assert "eval_steps" in finding.advice[0]


def test_a_device_that_idles_with_work_queued_is_found_and_promised_nothing(tmp_path: Path) -> None:
    plan = PLAN.but(device="cuda", num_profiles=0, gap_s=0.029)
    queued = plan.but(gap_s=0.004).profile(START_S + 4) | {"queued_s": 0.025}
    finding = find("queued_idle", tmp_path, plan.but(events=(queued,)))
    assert finding.lost == pytest.approx(0.2)  # 25 of 125
    assert finding.gain is None
    assert look("queued_idle", tmp_path, PLAN.but(device="cuda")) is None


@pytest.mark.parametrize("rule", AT_THE_THRESHOLD)
def test_a_recording_that_is_not_cut_into_steps_promises_nothing(rule: str, tmp_path: Path) -> None:
    plan = AT_THE_THRESHOLD[rule]
    finding = look(rule, tmp_path, plan.but(num_steps=1, header={**plan.header, "mode": "trace"}))
    assert finding is None or finding.gain is None


# Operators and sizes


def test_operators_that_move_memory_in_numbers(tmp_path: Path) -> None:
    names = [f"{letter * 70}" for letter in "uvwxyz"]
    top = tuple((name, 0.020, 1) for name in names)
    plan = PLAN.but(non_matmul_s=0.120, top=top)
    finding = find("memory_bound", tmp_path, plan)
    shown = ", ".join(f"{letter * 60} 20 ms" for letter in "uvwx")
    assert finding.evidence == (f"the longest of them in a step: {shown}",)
    assert finding.advice[0] == "torch.compile(model): it fuses chains of them"
    assert gain_of(finding) == faster(200, 12, 40, 80)
    compiled = find("memory_bound", tmp_path, plan.but(top=(), facts={"is_compiled": True}))
    assert compiled.advice[0].startswith("the model is compiled already")
    assert compiled.evidence == ("the longest of them in a step: not recorded",)


@pytest.mark.parametrize(
    ("facts", "left"),
    [
        (LOOP, 7 / 42),
        ({"optimizer": "for-loop", "num_optimizer_ops": None}, 7 / 27),
        ({"optimizer": "for-loop", "num_parameter_tensors": None}, 7 / 27),
        ({"optimizer": None, "num_optimizer_ops": 40, "num_parameter_tensors": 10}, 0.5),
        ({"optimizer": "for-loop", "num_optimizer_ops": 10, "num_parameter_tensors": 10}, 0.5),
        ({"optimizer": None, "num_optimizer_ops": 50, "num_parameter_tensors": 10}, 7 / 15),
    ],
    ids=["14 a tensor", "operators unknown", "tensors unknown", "just four", "one a tensor", "five a tensor"],
)
def test_what_is_left_of_an_update_in_a_loop(tmp_path: Path, facts: dict[str, Any], left: float) -> None:
    finding = find("optimizer_heavy", tmp_path, PLAN.but(optimizer_s=0.025, facts=facts))  # of 120
    assert finding.lost == pytest.approx(25 / 120 * (1 - left))
    assert gain_of(finding) == faster(120, 12.5, 25 * (1 - left), 25)
    assert finding.evidence[0] == "25 ms of every step are the optimizer's"


def test_an_update_that_was_not_counted_is_not_said_to_have_been(tmp_path: Path) -> None:
    facts = {"optimizer": "for-loop", "num_optimizer_ops": None}
    finding = find("optimizer_heavy", tmp_path, PLAN.but(optimizer_s=0.025, facts=facts))
    assert finding.evidence[1] == "its update goes tensor by tensor"
    counted = find("optimizer_heavy", tmp_path, PLAN.but(optimizer_s=0.025, facts=LOOP))
    assert counted.evidence[1] == "its update goes tensor by tensor: 140 operators for 10 tensors"


def test_an_update_with_fewer_than_four_operators_a_tensor_is_no_loop(tmp_path: Path) -> None:
    facts = {"optimizer": None, "num_optimizer_ops": 39, "num_parameter_tensors": 10}
    assert look("optimizer_heavy", tmp_path, PLAN.but(optimizer_s=0.025, facts=facts)) is None


class TestOddSizes:
    odd = tuple({"module": letter * 99, "dimension": "d" * 99, "size": "9" * 99} for letter in "abcdefghijkl")
    count = event("count", START_S + 1, by_module={"head": 30.0, "neck": 10.0, "body": 60.0})

    def two(self, *names: str) -> dict[str, Any]:
        return {"odd_sizes": [{"module": name, "dimension": "out", "size": 7} for name in names]}

    def test_in_numbers(self, tmp_path: Path) -> None:
        # 40 % of the 20 that matmuls lose of 100.
        plan = PLAN.but(facts=self.two("head", "neck", "head", "none"), device="cuda", events=(self.count,))
        finding = find("ragged_shapes", tmp_path, plan)
        assert finding.title == "sizes that are no multiple of 8 cost 4.0 % of the time"
        assert finding.lost == pytest.approx(0.04)
        assert finding.evidence == ("head: out 7", "neck: out 7", "head: out 7", "none: out 7")
        assert gain_of(finding) == faster(100, 0, 4, 8)

    def test_names_are_cut_and_only_some_are_shown(self, tmp_path: Path) -> None:
        finding = find("ragged_shapes", tmp_path, PLAN.but(facts={"odd_sizes": list(self.odd)}, device="cuda"))
        assert finding.evidence == tuple(f"{letter * 60}: {'d' * 20} {'9' * 20}" for letter in "abcd")
        assert finding.lost == pytest.approx(0.10)  # without a count all FLOPs are taken for theirs

    def test_of_a_long_list_ten_are_looked_at(self, tmp_path: Path) -> None:
        by_module = {f"m{place}": 10.0 for place in range(12)}
        plan = PLAN.but(device="cuda", events=(event("count", START_S + 1, by_module=by_module),))
        finding = find("ragged_shapes", tmp_path, plan.but(facts=self.two(*by_module)))
        assert finding.lost == pytest.approx(0.10 * 10 / 12)

    def test_half_of_their_loss_must_reach_the_threshold(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        evidence = Evidence(PLAN.but(facts=self.two("head"), device="cuda", events=(self.count,)).run(tmp_path))
        finding = RULES["ragged_shapes"].look(evidence, RULES["ragged_shapes"])
        assert finding is not None
        for threshold, is_found in ((finding.lost, True), (math.nextafter(finding.lost, 1), False)):
            monkeypatch.setattr("flopmeter.diagnosis.rules.MIN_ODD", threshold)
            assert (RULES["ragged_shapes"].look(evidence, RULES["ragged_shapes"]) is not None) is is_found

    def test_matmuls_above_the_peak_lose_nothing(self, tmp_path: Path) -> None:
        plan = PLAN.but(ideal_s=0.090, facts=self.two("head") | {"num_recompiles": 9}, device="cuda")
        finding = find("ragged_shapes", tmp_path, plan)
        assert finding.title == "shapes that keep changing cost time"
        assert finding.lost == 0
        assert finding.gain is None

    def test_compiling_again_costs_the_pauses_named_so(self, tmp_path: Path) -> None:
        # 0.4 s of 4.4, and half of 30 % of the 20 ms of 40 steps: 0.12 s.
        facts = self.two("head") | {"num_recompiles": 9}
        plan = PLAN.but(facts=facts, device="cuda", events=(self.count,), pauses=(("compile", 0.4),))
        finding = find("ragged_shapes", tmp_path, plan)
        assert finding.lost == pytest.approx(0.52 / 4.4)
        assert gain_of(finding) == faster(4.4, 0, 0.52, 0.64)
        assert finding.evidence == ("head: out 7", "compiled again 9 times")


def test_padding_in_numbers(tmp_path: Path) -> None:
    # Of 8 steps of 100, with 90 of work besides the optimizer; three of eight tokens are padding.
    finding = find("padding_waste", tmp_path, PLAN.but(num_steps=8, processed=1.6))
    assert finding.lost == pytest.approx(0.375 * 0.9)
    assert finding.evidence == ("MFU is 50.0 % with useful tokens and 80.0 % with all tokens processed",)
    assert gain_of(finding) == pytest.approx((1 / (1 - 0.3375) - 1, 1 / (1 - 0.95 * 0.375) - 1, 0.6))


def test_padding_where_nothing_is_known_to_be_processed_is_none(tmp_path: Path) -> None:
    assert look("padding_waste", tmp_path, PLAN.but(metrics={"perf/mfu": 0.5, "perf/mfu_processed": 0.0})) is None
    assert look("padding_waste", tmp_path, PLAN.but(metrics={"perf/mfu": 0.5, "perf/mfu_processed": 0.5})) is None


# The peak, and what is left


def test_an_impossible_utilisation_in_words(tmp_path: Path) -> None:
    peaks = (
        event("peak", START_S, dtype="fp32", flop_per_s=1e12, source="derived"),
        event("peak", START_S, dtype="d" * 99, flop_per_s=1.0, source="s" * 99),
    )
    finding = find("impossible_mfu", tmp_path, PLAN.but(metrics={"perf/mfu": 1.25, "perf/hfu": None}, events=peaks))
    assert finding.is_doubt
    assert "125.0 %" in finding.title
    assert finding.evidence == ("MFU 125.0 % over the ordinary steps", f"peak: 1 FLOP/s {'d' * 20}, {'s' * 20}")
    nothing = event("peak", START_S, dtype="fp32", flop_per_s=0.0, source="derived")
    for events in ((), (nothing,)):
        unknown = find("impossible_mfu", tmp_path, PLAN.but(metrics={"perf/mfu": 1.25}, events=events))
        assert unknown.evidence[1] == "which peak was used is not in the record"


def test_a_healthy_run_in_words(tmp_path: Path) -> None:
    # 10 steps of 110: 80 matmul of which 50 ideal, 20 others.
    finding = find("healthy", tmp_path, PLAN.but(num_steps=10, matmul_s=0.080))
    assert finding.evidence == (
        "matmuls below peak: 27.3 % of the time",
        "other operators: 18.2 % of the time",
        "matmuls run at 62.5 % of the peak while they run",
    )
    assert finding.lost == 0


@pytest.mark.parametrize(
    "changes",
    [{"ideal_s": None}, {"ideal_s": 0.0}, {"num_profiles": 0}, {"matmul_s": 0.0}],
    ids=["MFU unknown", "no FLOPs", "not sampled", "no matmuls"],
)
def test_how_fast_matmuls_are_is_said_only_where_it_is_known(tmp_path: Path, changes: dict[str, Any]) -> None:
    finding = look("healthy", tmp_path, PLAN.but(**changes))
    assert finding is None or "while they run" not in " ".join(finding.evidence)


# A run that gets slower


class TestSag:
    """100 steps of 10 s, 20 in each fifth."""

    def look(self, folder: Path, mfu: list[float], *events: dict[str, Any], step_s: float = 10.0) -> Finding | None:
        lines: list[dict[str, Any]] = [{"kind": "header", "schema": 2, "started_at": START_S}]
        for place, value in enumerate(mfu):
            metrics = {"perf/step_time": step_s, "perf/mfu": value, "perf/data_wait_share": 0.0}
            lines.append({"kind": "step", "step": place, "time": START_S + step_s * (place + 1), "metrics": metrics})
        return RULES["slow_sag"].look(Evidence(record(folder, [*lines, *events])), RULES["slow_sag"])

    def test_in_numbers(self, tmp_path: Path) -> None:
        regimes = [event("regime", START_S + 500, since_step=place) for place in (1, 2, 3)]
        regimes.append(event("regime", START_S + 500, since_step="9" * 99))
        finding = self.look(tmp_path, [0.5] * 30 + [0.4] * 40 + [0.3] * 30, *regimes)
        assert finding is not None
        assert finding.title == "computing has become 40.0 % slower since the run began"
        # 40 steps lose a fifth and 30 two fifths: 20 of 100.
        assert finding.lost == pytest.approx(0.20)
        assert gain_of(finding) == faster(1.0, 0.1, 0.19, 0.2)
        assert finding.evidence == (
            "MFU while computing: 50.0 % in the first fifth, 40.0 % in the middle, 30.0 % in the last",
            "the monitor saw it fall at step 2",
            "the monitor saw it fall at step 3",
            f"the monitor saw it fall at step {'9' * 20}",
        )

    def test_each_fifth_has_its_place(self, tmp_path: Path) -> None:
        # Only the middle of the fifths 1, 3 and 5 is told by a level of its own; the others are absurd.
        mfu = [0.5] * 20 + [0.9] * 20 + [0.4] * 20 + [0.9] * 20 + [0.25] * 20
        finding = self.look(tmp_path, mfu)
        assert finding is not None
        assert finding.evidence[0].endswith("50.0 % in the first fifth, 40.0 % in the middle, 25.0 % in the last")
        assert finding.lost == pytest.approx((20 * 0.2 + 20 * 0.5) / 100)  # faster steps lose nothing

    @pytest.mark.parametrize("middle", [0.51, 0.29])
    def test_a_middle_that_is_not_in_between_is_no_fall(self, tmp_path: Path, middle: float) -> None:
        assert self.look(tmp_path, [0.5] * 40 + [middle] * 20 + [0.3] * 40) is None

    @pytest.mark.parametrize("middle", [0.5, 0.3])
    def test_a_middle_like_either_end_is_in_between(self, tmp_path: Path, middle: float) -> None:
        assert self.look(tmp_path, [0.5] * 40 + [middle] * 20 + [0.3] * 40) is not None

    def test_a_fall_of_just_the_threshold_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for threshold, is_found in ((0.5, True), (0.501, False)):
            monkeypatch.setattr("flopmeter.diagnosis.rules.MIN_FALL", threshold)
            assert (self.look(tmp_path, [0.5] * 50 + [0.25] * 50) is not None) is is_found

    def test_a_fall_of_just_two_deviations_is_found(self, tmp_path: Path) -> None:
        # Median 0.5, and half of the first fifth lies 0.125 off it: two deviations are 0.25.
        first = [0.5, 0.5, 0.5, 0.625, 0.375] * 2 + [0.5, 0.625, 0.375, 0.625, 0.375] * 2
        assert self.look(tmp_path, [*first, *[0.25] * 80]) is not None
        assert self.look(tmp_path, [*first, *[0.2501] * 80]) is None

    def test_a_run_without_flops_has_not_fallen(self, tmp_path: Path) -> None:
        assert self.look(tmp_path, [0.0] * 100) is None

    @pytest.mark.parametrize(("num_steps", "is_enough"), [(49, False), (50, True)])
    def test_it_takes_fifty_steps(self, tmp_path: Path, num_steps: int, is_enough: bool) -> None:
        mfu = [0.5] * 20 + [0.25] * (num_steps - 20)
        if is_enough:
            assert self.look(tmp_path, mfu, step_s=20.0) is not None
        else:
            with pytest.raises(NotCheckedError, match="49 ordinary steps have an MFU, and it takes 50 to tell"):
                self.look(tmp_path, mfu, step_s=20.0)

    def test_a_quarter_of_an_hour_is_long_enough(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        mfu = [0.5] * 30 + [0.25] * 30
        assert self.look(tmp_path, mfu, step_s=15.0) is not None  # 60 steps: 900 s, exactly
        with pytest.raises(NotCheckedError, match="shorter than 15 minutes"):
            self.look(tmp_path, mfu, step_s=14.9)
        monkeypatch.setattr("flopmeter.diagnosis.rules.MIN_LENGTH_S", 6000.0)
        with pytest.raises(NotCheckedError, match="shorter than 100 minutes"):
            self.look(tmp_path, mfu, step_s=14.9)

    def test_steps_are_judged_by_what_they_computed(self, tmp_path: Path) -> None:
        # Waits of a half, none known, and of all but nothing: the last are left out, or the speed would be absurd.
        def line(place: int, mfu: float, wait: float | None) -> dict[str, Any]:
            metrics = {"perf/step_time": 20.0, "perf/mfu": mfu, "perf/data_wait_share": wait}
            return {"kind": "step", "step": place, "time": START_S + 20.0 * (place + 1), "metrics": metrics}

        lines: list[dict[str, Any]] = [{"kind": "header", "schema": 2, "started_at": START_S}]
        for place in range(100):
            waits = (0.5, None, 0.0, 0.99, 1.0)[place % 5]
            level = 0.4 if place < 50 else 0.2
            lines.append(line(place, level / 2 if waits == 0.5 else level, waits))
        finding = RULES["slow_sag"].look(Evidence(record(tmp_path, lines)), RULES["slow_sag"])
        assert finding is not None
        # 60 steps are left, and the middle twelve of them are half and half.
        assert finding.evidence[0].endswith("40.0 % in the first fifth, 30.0 % in the middle, 20.0 % in the last")
        assert finding.lost == pytest.approx(0.25)


class TestAdvice:
    """It names what the program has, and leaves out what it cannot use."""

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("Adadelta", "Adadelta(..., foreach=True)"),
            ("AdamW", "AdamW(..., fused=True)"),
            ("", "an optimizer with fused"),
        ],
    )
    def test_the_optimizer_is_the_programs_own_in_a_form_that_it_has(
        self, tmp_path: Path, name: str, said: str
    ) -> None:
        top = ((f"Optimizer.step#{name}.step", 0.004, 1),) if name else ()
        finding = find("optimizer_heavy", tmp_path, PLAN.but(optimizer_s=0.100, facts=LOOP, top=top))
        assert finding.advice[0].startswith(said)

    @pytest.mark.parametrize(
        ("wrapper", "has", "has_not"),
        [
            ("DistributedDataParallel", "model.no_sync()", "set_requires_gradient_sync"),
            ("FSDPModule", "set_requires_gradient_sync", "no_sync"),
            ("FSDPModule", "set_modules_to_forward_prefetch", "bucket_cap_mb"),
        ],
    )
    def test_gradients_are_kept_back_by_the_wrappers_own_call(
        self, tmp_path: Path, wrapper: str, has: str, has_not: str
    ) -> None:
        advice = " ".join(find("exposed_communication", tmp_path, PARALLEL.but(facts={"wrapper": wrapper})).advice)
        assert has in advice
        assert has_not not in advice

    @pytest.mark.parametrize("has_tokens", [True, False])
    def test_a_tokenizer_is_for_text(self, tmp_path: Path, has_tokens: bool) -> None:
        metrics = {"perf/data_wait_cpu_share": 0.9} | ({"perf/tokens_per_second": 1e3} if has_tokens else {})
        finding = find("cpu_preprocessing", tmp_path, PLAN.but(data_wait_s=0.101, metrics=metrics))
        assert any("fast tokenizer" in line for line in finding.advice) is has_tokens
