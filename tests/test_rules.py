"""Each rule on runs that have its cause, just miss it, or cannot tell; expected numbers are worked out by hand.

The planned run has 40 steps of 100 ms: 70 matmul (50 ideal), 20 other operators, 4 gaps, 5 optimizer, 1 data wait.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flopmeter.diagnosis import RULES, Evidence, Finding, NotCheckedError, diagnose
from planned_runs import START_S, Plan, event, record

PLAN = Plan()


def look(rule: str, folder: Path, plan: Plan) -> Finding | None:
    finding = RULES[rule].look(Evidence(plan.run(folder)), RULES[rule])
    assert finding is None or finding.rule == rule
    return finding


def find(rule: str, folder: Path, plan: Plan) -> Finding:
    finding = look(rule, folder, plan)
    assert finding is not None
    assert finding.title
    assert finding.evidence
    assert finding.advice
    return finding


def gain_of(finding: Finding) -> tuple[float, float, float]:
    assert finding.gain is not None
    return finding.gain.low, finding.gain.expected, finding.gain.high


def why_not(rule: str, folder: Path, plan: Plan) -> str:
    with pytest.raises(NotCheckedError) as caught:
        look(rule, folder, plan)
    return str(caught.value)


def workers(num: float, cores: float) -> dict[str, Any]:
    metrics = {"resource/num_workers": num, "resource/worker_cpu_cores": cores}
    return event("resources", START_S + 2, metrics=metrics)


class TestDataRules:
    waiting = PLAN.but(data_wait_s=0.101)  # half of a step of 200 ms, and a little

    def test_workers_that_wait_are_a_stall(self, tmp_path: Path) -> None:
        plan = self.waiting.but(events=(workers(4, 0.4),))
        finding = find("data_stall", tmp_path, plan)
        assert finding.lost == pytest.approx(0.505)
        # All of it gone: 200/99; 95 % of it: 200/(200 - 95.95); half of it gone: 200/149.5.
        assert gain_of(finding) == pytest.approx((200 / 149.5 - 1, 200 / 104.05 - 1, 200 / 99 - 1))
        assert "its 4 workers are busy for 10.0 % of the time each" in finding.evidence
        assert look("cpu_preprocessing", tmp_path, plan) is None

    def test_one_worker_is_not_called_workers(self, tmp_path: Path) -> None:
        finding = find("data_stall", tmp_path, self.waiting.but(events=(workers(1, 0.1),)))
        assert "its one worker is busy for 10.0 % of the time" in finding.evidence

    def test_workers_that_compute_are_preprocessing(self, tmp_path: Path) -> None:
        plan = self.waiting.but(events=(workers(4, 3.2),))
        finding = find("cpu_preprocessing", tmp_path, plan)
        assert gain_of(finding) == pytest.approx((200 / 149.5 - 1, 200 / 104.05 - 1, 200 / 99 - 1))
        assert look("data_stall", tmp_path, plan) is None

    def test_what_a_worker_waited_for_a_core_is_no_disks_fault(self, tmp_path: Path) -> None:
        # One worker computes for 10 % of the time, at the quarter of a core that this process gets, too: it waits for
        # a core for 30 %. Of each step of 199 ms 100 are spent on waiting for it.
        metrics = {"resource/process_cpu_cores": 0.2, "resource/cpu_wait_share": 0.6}
        metrics |= {"resource/num_workers": 1.0, "resource/worker_cpu_cores": 0.1}
        plan = PLAN.but(data_wait_s=0.100, events=(event("resources", START_S + 2, metrics=metrics),))
        assert find("data_stall", tmp_path, plan).lost == pytest.approx((0.100 - 0.3 * 0.199) / 0.199)

    @pytest.mark.parametrize(("cpu_share", "rule"), [(0.05, "data_stall"), (0.95, "cpu_preprocessing")])
    def test_without_workers_the_cpu_time_of_the_wait_decides(
        self, tmp_path: Path, cpu_share: float, rule: str
    ) -> None:
        plan = self.waiting.but(metrics={"perf/data_wait_cpu_share": cpu_share}, events=(workers(0, 0),))
        other = {"data_stall": "cpu_preprocessing", "cpu_preprocessing": "data_stall"}[rule]
        assert "the training process" in find(rule, tmp_path, plan).evidence[1]
        assert look(other, tmp_path, plan) is None

    def test_long_waits_decide_and_not_the_many_short_ones(self, tmp_path: Path) -> None:
        # Nine of ten batches are there after 1 ms of computing; every tenth takes 900 ms in which nothing computes.
        lines = self.waiting.lines()
        for line in [line for line in lines if line.get("kind", "step") == "step"]:
            is_long = line["step"] % 10 == 0
            step_s, wait_s, cpu_share = (1.0, 0.9, 0.0) if is_long else (0.1, 0.001, 1.0)
            line["metrics"] |= {"perf/step_time": step_s, "perf/data_wait_share": wait_s / step_s}
            line["metrics"] |= {"perf/data_wait_cpu_share": cpu_share}
        evidence = Evidence(record(tmp_path, lines))
        assert evidence.loader_busy == pytest.approx(0.009 / 0.909)
        assert RULES["data_stall"].look(evidence, RULES["data_stall"]) is not None

    def test_where_cpu_time_is_unknown_the_wait_is_reported_and_the_cause_left_open(self, tmp_path: Path) -> None:
        assert "not in the record" in find("data_stall", tmp_path, self.waiting).evidence[1]
        assert "CPU time was not recorded" in why_not("cpu_preprocessing", tmp_path, self.waiting)

    def test_a_short_wait_is_no_finding(self, tmp_path: Path) -> None:
        assert look("data_stall", tmp_path, PLAN.but(data_wait_s=0.004)) is None
        assert look("cpu_preprocessing", tmp_path, PLAN.but(data_wait_s=0.004)) is None

    def test_on_a_gpu_a_wait_that_left_no_idle_time_is_no_finding(self, tmp_path: Path) -> None:
        hidden = event("device_time", START_S + 2, num_steps=10, device_s={"data_wait": 0.0})
        assert look("data_stall", tmp_path, self.waiting.but(device="cuda", events=(hidden,))) is None


class TestKernelLaunch:
    def test_gaps_and_a_light_update_are_the_fixed_cost(self, tmp_path: Path) -> None:
        # Batch of one: 7 + 2 ms of work, 6 ms of gaps, 4 ms of fused update, 1 ms of wait: 10 of 20 ms are fixed.
        plan = PLAN.but(matmul_s=0.007, non_matmul_s=0.002, gap_s=0.006, optimizer_s=0.004)
        finding = find("kernel_launch", tmp_path, plan)
        assert finding.lost == pytest.approx(0.5)
        assert gain_of(finding) == pytest.approx((20 / 15 - 1, 20 / 10.625 - 1, 1.0))
        assert "500 operators a step" in finding.evidence

    def test_on_a_cpu_the_start_of_each_operator_is_fixed_cost_as_well(self, tmp_path: Path) -> None:
        # 20 ms of other operators, 20 ms of gaps: 1000 operators take 7.5 ms to start, which a GPU shows as gaps.
        plan = PLAN.but(matmul_s=0.0, ideal_s=0.0, non_matmul_s=0.02, gap_s=0.02, optimizer_s=0.0, data_wait_s=0.0)
        lost = find("kernel_launch", tmp_path, plan.but(num_ops=1000)).lost
        assert lost == pytest.approx(27.5 / 40)
        assert find("kernel_launch", tmp_path, plan.but(num_ops=1000, device="cuda")).lost == pytest.approx(20 / 40)
        # 200 of them only read values: 6 ms for the others. On a CPU no gap stands behind a read.
        reading = plan.but(num_ops=1000, facts={"host_syncs": {"aten::_local_scalar_dense": 200}})
        assert find("kernel_launch", tmp_path, reading).lost == pytest.approx((20 + 6) / 40)

    def test_what_waits_for_a_core_may_have_put_into_the_gaps_is_not_claimed(self, tmp_path: Path) -> None:
        # As above, with 4 ms of waiting, which may all have been in the gaps: 6 - 4 + 4 of 20.
        plan = PLAN.but(matmul_s=0.007, non_matmul_s=0.002, gap_s=0.006, optimizer_s=0.004, waited_s=0.004)
        assert find("kernel_launch", tmp_path, plan).lost == pytest.approx(0.3)

    def test_an_update_in_a_loop_is_not_counted(self, tmp_path: Path) -> None:
        plan = PLAN.but(optimizer_s=0.1, facts={"optimizer": "for-loop"})
        assert look("kernel_launch", tmp_path, plan) is None

    def test_gaps_behind_synchronisations_are_left_to_their_own_rule(self, tmp_path: Path) -> None:
        plan = PLAN.but(
            gap_s=0.1, facts={"host_syncs": {"aten::_local_scalar_dense": 400}}, device="cuda", num_ops=1000
        )
        assert look("kernel_launch", tmp_path, plan) is None
        assert find("kernel_launch", tmp_path, plan.but(facts={})).lost > 0.5

    def test_a_host_bound_gpu_is_named_as_evidence(self, tmp_path: Path) -> None:
        verdict = {"bound": "host", "reason": "the device waited for the host in 95% of 40 steps"}
        bound = event("device_time", START_S + 2, num_steps=10, verdict=verdict)
        plan = PLAN.but(gap_s=0.1, device="cuda", events=(bound,))
        assert verdict["reason"] in find("kernel_launch", tmp_path, plan).evidence

    def test_it_needs_a_sampled_step(self, tmp_path: Path) -> None:
        assert why_not("kernel_launch", tmp_path, PLAN.but(num_profiles=0)) == "no step was sampled by the profiler"


class TestRanks:
    parallel = PLAN.but(header={"world_size": 2}, exposed_s=0.025)  # of steps of 125 ms

    def test_exposed_communication_is_lost_time(self, tmp_path: Path) -> None:
        finding = find("exposed_communication", tmp_path, self.parallel)
        assert finding.lost == pytest.approx(0.2)
        assert gain_of(finding) == pytest.approx((1 / 0.9 - 1, 1 / 0.82 - 1, 1 / 0.8 - 1))

    def test_one_rank_alone_has_no_communication(self, tmp_path: Path) -> None:
        assert look("exposed_communication", tmp_path, PLAN) is None
        assert look("straggler", tmp_path, PLAN) is None

    def test_ranks_kept_from_their_cores_wait_for_each_other_and_not_for_the_network(self, tmp_path: Path) -> None:
        finding = find("exposed_communication", tmp_path, self.parallel)
        metrics = {"resource/process_cpu_cores": 0.1, "resource/cpu_wait_share": 0.1}
        starved = self.parallel.but(events=(event("resources", START_S + 2, metrics=metrics),))
        # It gets a tenth of a core and waits for another: half of what it wants, for a tenth of the time.
        assert find("exposed_communication", tmp_path, starved).lost == pytest.approx(finding.lost - 0.1)
        gpu = starved.but(device="cuda")
        assert find("exposed_communication", tmp_path, gpu).lost == pytest.approx(finding.lost)

    def test_communication_that_was_not_measured_is_not_checked(self, tmp_path: Path) -> None:
        plan = PLAN.but(header={"world_size": 2}, num_profiles=0)
        assert "not measured" in why_not("exposed_communication", tmp_path, plan)

    def test_a_slow_peer_is_a_straggler(self, tmp_path: Path) -> None:
        fields = {"rank": 1, "host": "node7", "phase": "forward_s", "since_step": 3, "cause": "slow_peer"}
        plan = self.parallel.but(events=(event("straggler", START_S + 1, extra_s=0.025, **fields),))
        finding = find("straggler", tmp_path, plan)
        assert finding.lost == pytest.approx(0.19)  # 38 of 40 steps: it was slow from the third on
        assert gain_of(finding) == pytest.approx((1 / 0.905 - 1, 1 / 0.8195 - 1, 1 / 0.81 - 1))
        assert "host node7, since step 3" in finding.evidence
        assert "in forward" in finding.evidence[0]

    def test_a_slow_network_is_no_straggler(self, tmp_path: Path) -> None:
        plan = self.parallel.but(events=(event("straggler", START_S + 1, extra_s=0.025, cause="slow_network"),))
        assert look("straggler", tmp_path, plan) is None
        assert "the network is slow, not a rank" in find("exposed_communication", tmp_path, plan).evidence[1]

    def test_statistics_that_agree_point_to_a_rank_before_it_is_named(self, tmp_path: Path) -> None:
        # Own times of 100 and 130 ms: the mean is 115, and the slowest is 30 ms ahead of the other one.
        def exchange(rank: int, slowest_s: float, blocked_s: float = 0.03) -> dict[str, Any]:
            own = {"min": 0.1, "mean": 0.05 + slowest_s / 2, "max": slowest_s, "argmax": rank}
            forward = {"min": 0.03, "mean": 0.045, "max": 0.06, "argmax": rank}
            optimizer = {"min": 0.005, "mean": 0.005, "max": 0.005, "argmax": 0}
            stats = {"own_s": own, "blocked_s": {"max": blocked_s}, "forward_s": forward, "optimizer_s": optimizer}
            return event("ranks", START_S + 1, world_size=2, missing=[], stats=stats)

        finding = find("straggler", tmp_path, self.parallel.but(events=(exchange(1, 0.13), exchange(1, 0.13))))
        assert finding.title == "rank 1 holds up all others for 30 ms a step"
        assert finding.lost == pytest.approx(0.030 / 0.125)
        assert "in forward" in finding.evidence[0]
        assert look("straggler", tmp_path, self.parallel.but(events=(exchange(1, 0.13), exchange(0, 0.13)))) is None
        assert look("straggler", tmp_path, self.parallel.but(events=(exchange(1, 0.105),))) is None
        assert look("straggler", tmp_path, self.parallel.but(events=(exchange(1, 0.13, blocked_s=0.5),))) is None

    def test_ranks_that_did_not_report_are_not_checked(self, tmp_path: Path) -> None:
        assert "no statistics of the other ranks" in why_not("straggler", tmp_path, self.parallel)
        reported = self.parallel.but(events=(event("ranks", START_S + 1, world_size=2, missing=[], stats={}),))
        assert look("straggler", tmp_path, reported) is None


class TestEagerAttention:
    seen: ClassVar[dict[str, Any]] = {
        "eager_attention": {"calls": 24, "length": 256, "modules": ["blocks.0.attention"]}
    }
    top = (("aten::_softmax", 0.004, 12), ("aten::masked_fill", 0.006, 12), ("aten::bmm", 0.010, 24))

    def test_work_on_the_scores_is_lost_and_their_matmuls_may_be(self, tmp_path: Path) -> None:
        finding = find("eager_attention", tmp_path, PLAN.but(facts=self.seen, top=self.top))
        assert finding.lost == pytest.approx(0.010 / 0.1)  # 4 + 6 of 100 ms
        assert gain_of(finding) == pytest.approx((1 / 0.95 - 1, 1 / 0.90 - 1, 1 / 0.85 - 1))
        assert "24 softmaxes over 256 x 256 scores in a step: blocks.0.attention" in finding.evidence

    def test_other_passes_over_the_scores_are_counted_up_to_a_bound(self, tmp_path: Path) -> None:
        few, many = (("aten::div", 0.003, 12),), (("aten::div", 0.003, 12), ("aten::copy_", 0.050, 90))
        found = [
            find("eager_attention", tmp_path, PLAN.but(facts=self.seen, top=self.top + more)) for more in (few, many)
        ]
        assert found[0].lost == pytest.approx((0.010 + 0.003) / 0.1)
        assert found[1].lost == pytest.approx((0.010 + 1.5 * 0.010) / 0.1)  # of 53 ms, 1.5 times those of the scores

    def test_the_softmax_of_the_loss_and_other_products_are_not_counted(self, tmp_path: Path) -> None:
        others = (("aten::_log_softmax", 0.030, 1), ("aten::addmm", 0.050, 24), ("aten::mul", 0.02, 9))
        assert look("eager_attention", tmp_path, PLAN.but(facts=self.seen, top=others)) is None

    def test_without_a_sampled_step_no_gain_is_promised(self, tmp_path: Path) -> None:
        finding = find("eager_attention", tmp_path, PLAN.but(facts=self.seen, num_profiles=0))
        assert finding.gain is None

    def test_fused_attention_is_fine_and_an_unobserved_run_is_not_checked(self, tmp_path: Path) -> None:
        assert look("eager_attention", tmp_path, PLAN) is None
        assert "event `facts`" in why_not("eager_attention", tmp_path, PLAN.but(facts=None))


class TestNumberFormats:
    h100: ClassVar[dict[str, Any]] = {"device": "NVIDIA H100 80GB HBM3"}

    def test_float64_halves_all_computing(self, tmp_path: Path) -> None:
        finding = find("fp32_matmul", tmp_path, PLAN.but(facts={"matmul_dtypes": {"float64": 9e9}}))
        # Half of 70 matmul + 20 other operators + 5 optimizer = 47.5 of 100 ms; at least half of 70.
        assert finding.lost == pytest.approx(0.475)
        assert gain_of(finding)[:2] == pytest.approx((1 / 0.65 - 1, 1 / 0.525 - 1))

    def test_float32_on_a_gpu_with_bf16_is_flagged_by_the_ratio_of_the_peaks(self, tmp_path: Path) -> None:
        finding = find("fp32_matmul", tmp_path, PLAN.but(header=self.h100, facts={"tf32": False}))
        saved = 0.070 * (1 - 66.9 / 989.4)  # NVIDIA's sheet: 66.9 TFLOP/s fp32, 989.4 bf16
        assert gain_of(finding)[2] == pytest.approx(1 / (1 - saved / 0.1) - 1, rel=0.01)
        assert finding.lost == pytest.approx(saved / 2 / 0.1, rel=0.01)

    def test_tf32_and_bf16_are_fine(self, tmp_path: Path) -> None:
        assert look("fp32_matmul", tmp_path, PLAN.but(header=self.h100, facts={"tf32": True})) is None
        mixed = {"matmul_dtypes": {"bfloat16": 95.0, "float32": 5.0}}
        assert look("fp32_matmul", tmp_path, PLAN.but(header=self.h100, facts=mixed)) is None

    def test_on_a_cpu_only_float64_is_judged(self, tmp_path: Path) -> None:
        assert "whether this CPU is faster in bf16" in why_not("fp32_matmul", tmp_path, PLAN)

    def test_an_unknown_gpu_is_not_checked(self, tmp_path: Path) -> None:
        assert "not on file" in why_not("fp32_matmul", tmp_path, PLAN.but(header={"device": "NVIDIA X999"}))

    def test_the_count_serves_where_no_facts_are(self, tmp_path: Path) -> None:
        count = event("count", START_S + 1, by_dtype={"float64": 1.0})
        assert find("fp32_matmul", tmp_path, PLAN.but(facts=None, events=(count,))).lost == pytest.approx(0.475)
        assert "no observed step counted" in why_not("fp32_matmul", tmp_path, PLAN.but(facts=None))


class TestPadding:
    def test_the_gain_is_processed_over_useful(self, tmp_path: Path) -> None:
        finding = find("padding_waste", tmp_path, PLAN.but(processed=1.6))
        waste = 1 - 1 / 1.6
        # 90 of 100 ms are work that grows with tokens; shorter batches would save the padded share of it.
        assert finding.lost == pytest.approx(waste * 0.090 / 0.1)
        assert gain_of(finding) == pytest.approx((1 / (1 - waste * 0.9) - 1, 1 / (1 - 0.95 * waste) - 1, 0.6))

    def test_a_little_padding_is_fine(self, tmp_path: Path) -> None:
        assert look("padding_waste", tmp_path, PLAN.but(processed=1.08)) is None

    def test_a_run_that_does_nothing_useful_at_all_is_not_about_padding(self, tmp_path: Path) -> None:
        lines = PLAN.lines()
        for line in lines:
            if "perf/mfu" in line.get("metrics", {}):
                line["metrics"] |= {"perf/mfu": 0.0, "perf/mfu_processed": 0.5}
        assert RULES["padding_waste"].look(Evidence(record(tmp_path, lines)), RULES["padding_waste"]) is None

    def test_without_masks_it_is_not_checked(self, tmp_path: Path) -> None:
        lines = PLAN.lines()
        for line in lines:
            line.get("metrics", {}).pop("perf/mfu_processed", None)
        with pytest.raises(NotCheckedError, match="no step has perf/mfu_processed"):
            RULES["padding_waste"].look(Evidence(record(tmp_path, lines)), RULES["padding_waste"])


class TestRecompute:
    again = PLAN.but(recompute_s=0.025)  # of steps of 125 ms

    def test_the_recomputed_seconds_are_lost(self, tmp_path: Path) -> None:
        finding = find("recompute", tmp_path, self.again)
        assert finding.lost == pytest.approx(0.2)
        assert gain_of(finding) == pytest.approx((1 / 0.9 - 1, 1 / 0.81 - 1, 0.25))
        assert finding.evidence[0].startswith("25 ms of every step")

    def test_a_full_gpu_needs_it(self, tmp_path: Path) -> None:
        full, half = (event("resources", START_S, metrics={"resource/gpu_memory_share": x}) for x in (0.93, 0.45))
        assert look("recompute", tmp_path, self.again.but(events=(full,))) is None
        assert "45.0 % full" in find("recompute", tmp_path, self.again.but(events=(half,))).evidence[1]

    def test_what_fused_attention_recomputes_is_fine(self, tmp_path: Path) -> None:
        counted = event("count", START_S + 1, model_flop=1e9, recompute_flop=6e7)  # 6 % of the 50 ms of ideal
        assert look("recompute", tmp_path, PLAN.but(num_profiles=0, events=(counted,))) is None

    def test_padding_is_no_recomputation(self, tmp_path: Path) -> None:
        counted = event("count", START_S + 1, model_flop=1e9, recompute_flop=0.0)
        plan = PLAN.but(num_profiles=0, metrics={"perf/hfu": 0.8}, events=(counted,))
        assert look("recompute", tmp_path, plan) is None
        assert "count of recomputation" in why_not("recompute", tmp_path, plan.but(events=()))


class TestOptimizer:
    def test_a_loop_leaves_seven_lengths_of_three_an_operator(self, tmp_path: Path) -> None:
        # 25 of 120 ms, 14 operators a tensor: 7 of 42 lengths remain, so 5/6 of the 25 ms can go.
        facts = {"optimizer": "for-loop", "num_optimizer_ops": 140, "num_parameter_tensors": 10}
        finding = find("optimizer_heavy", tmp_path, PLAN.but(optimizer_s=0.025, facts=facts))
        saved = 25 * 5 / 6
        assert finding.lost == pytest.approx(saved / 120)
        assert gain_of(finding) == pytest.approx((120 / 107.5 - 1, 120 / (120 - saved) - 1, 120 / 95 - 1))
        assert "140 operators for 10 tensors" in finding.evidence[1]

    def test_an_optimizer_of_ones_own_is_judged_by_its_operators(self, tmp_path: Path) -> None:
        facts = {"optimizer": None, "num_optimizer_ops": 140, "num_parameter_tensors": 10}
        assert find("optimizer_heavy", tmp_path, PLAN.but(optimizer_s=0.025, facts=facts)).rule == "optimizer_heavy"
        facts["num_optimizer_ops"] = 20
        assert look("optimizer_heavy", tmp_path, PLAN.but(optimizer_s=0.025, facts=facts)) is None

    @pytest.mark.parametrize("kind", ["fused", "foreach"])
    def test_a_fused_update_is_not_the_cause(self, tmp_path: Path, kind: str) -> None:
        assert look("optimizer_heavy", tmp_path, PLAN.but(optimizer_s=0.1, facts={"optimizer": kind})) is None

    def test_a_cheap_update_is_fine_and_an_unseen_one_is_not_checked(self, tmp_path: Path) -> None:
        assert look("optimizer_heavy", tmp_path, PLAN.but(facts={"optimizer": "for-loop"})) is None
        assert "was not seen" in why_not("optimizer_heavy", tmp_path, PLAN.but(optimizer_s=0.1, facts=None))


class TestHostSync:
    facts: ClassVar[dict[str, Any]] = {
        "host_syncs": {"aten::_local_scalar_dense": 100},
        "host_sync_places": ["train.py:42"],
    }
    top = (("aten::_local_scalar_dense", 0.010, 100),)

    def test_on_a_cpu_a_read_costs_what_its_calls_took(self, tmp_path: Path) -> None:
        # 10 ms of calls, of 116 ms; no gap stands behind them.
        finding = find("host_sync", tmp_path, PLAN.but(gap_s=0.020, facts=self.facts, top=self.top))
        assert finding.lost == pytest.approx(0.010 / 0.116)
        assert gain_of(finding) == pytest.approx((116 / 111 - 1, 116 / 106.5 - 1, 116 / 106 - 1))
        assert "values are read 100 times a step: aten::_local_scalar_dense x 100; at train.py:42" in finding.evidence

    def test_a_call_that_was_interrupted_costs_no_more_than_a_slow_one(self, tmp_path: Path) -> None:
        # One read of 14 ms in the sampled step of 100: the process lost its core in it.
        plan = PLAN.but(facts={"host_syncs": {"aten::_local_scalar_dense": 1}})
        assert look("host_sync", tmp_path, plan.but(top=(("aten::_local_scalar_dense", 0.014, 1),))) is None

    def test_the_loops_own_time_is_none_of_its_reads(self, tmp_path: Path) -> None:
        # One read a step of a loop that sleeps for 400 of 500 ms: what is found is the loop's own code.
        plan = PLAN.but(other_s=0.4, facts={"host_syncs": {"aten::_local_scalar_dense": 1}})
        assert look("host_sync", tmp_path, plan) is None
        finding = find("own_code", tmp_path, plan)
        assert finding.lost == pytest.approx(0.8)
        assert gain_of(finding) == pytest.approx((1 / 0.92 - 1, 1 / 0.6 - 1, 4.0))
        assert diagnose(plan.run(tmp_path)).findings[0].rule == "own_code"

    def test_on_a_gpu_the_time_for_which_the_host_is_blocked_is_the_devices_work(self, tmp_path: Path) -> None:
        # The host sits 80 of 100 ms in .item() while the device works; 4 ms of gaps are all that could be lost.
        facts = {"host_syncs": {"aten::_local_scalar_dense": 1}}
        plan = PLAN.but(facts=facts, device="cuda", header={"device": "NVIDIA H100 80GB HBM3"})
        plan = plan.but(metrics={"perf/forward_share": 0.05, "perf/backward_share": 0.05, "perf/other_share": 0.8})
        result = diagnose(plan.run(tmp_path))
        assert result.mfu == pytest.approx(0.5)
        assert not {"host_sync", "own_code"} & {finding.rule for finding in result.findings}
        assert result.waterfall.seconds("launch_gaps") == pytest.approx(40 * 0.004)

    def test_on_a_gpu_a_call_costs_a_hundred_launches(self, tmp_path: Path) -> None:
        # Five calls, each followed by a hundred launches of 10 us during which the device waits: 5 of 116 ms.
        facts = {"host_syncs": {"aten::_local_scalar_dense": 5}}
        finding = find("host_sync", tmp_path, PLAN.but(gap_s=0.020, facts=facts, device="cuda"))
        assert finding.lost == pytest.approx(0.005 / 0.116)
        assert gain_of(finding)[2] == pytest.approx(116 / 96 - 1)  # all gaps, at most

    def test_reading_the_loss_once_costs_nothing_on_a_cpu(self, tmp_path: Path) -> None:
        assert look("host_sync", tmp_path, PLAN.but(facts={"host_syncs": {"aten::_local_scalar_dense": 1}})) is None

    def test_what_it_costs_needs_a_sampled_step(self, tmp_path: Path) -> None:
        assert "to tell what that costs" in why_not("host_sync", tmp_path, PLAN.but(facts=self.facts, num_profiles=0))
        assert look("host_sync", tmp_path, PLAN.but(num_profiles=0)) is None


class TestPauses:
    def test_garbage_collection(self, tmp_path: Path) -> None:
        collected = event("gc", START_S + 4, duration_s=0.4, num=80, longest_s=0.02)
        finding = find("gc_pause", tmp_path, PLAN.but(events=(collected,)))
        assert finding.lost == pytest.approx(0.1)
        assert gain_of(finding) == pytest.approx((1 / 0.95 - 1, 1 / 0.905 - 1, 1 / 0.9 - 1))
        assert finding.evidence == ("80 collections in 400 ms, the longest of 20 ms, in 40 steps",)
        few = event("gc", START_S + 4, duration_s=0.02, num=80, longest_s=0.001)
        assert look("gc_pause", tmp_path, PLAN.but(events=(few,))) is None
        assert "not recorded" in why_not("gc_pause", tmp_path, PLAN)

    @pytest.mark.parametrize("name", ["checkpoint", "save_model", "ckpt"])
    def test_checkpoints(self, tmp_path: Path, name: str) -> None:
        finding = find("checkpoint_pause", tmp_path, PLAN.but(pauses=((name, 1.0),)))
        assert finding.lost == pytest.approx(0.2)
        assert gain_of(finding) == pytest.approx((1 / 0.9 - 1, 1 / 0.81 - 1, 0.25))
        assert look("eval_pause", tmp_path, PLAN.but(pauses=((name, 1.0),))) is None

    @pytest.mark.parametrize("name", ["eval", "evaluation", "validate"])
    def test_evaluation(self, tmp_path: Path, name: str) -> None:
        finding = find("eval_pause", tmp_path, PLAN.but(pauses=((name, 1.0),)))
        assert finding.lost == pytest.approx(0.2)
        assert gain_of(finding) == pytest.approx((1 / 0.95 - 1, 1 / 0.9 - 1, 1 / 0.84 - 1))
        assert look("checkpoint_pause", tmp_path, PLAN.but(pauses=((name, 1.0),))) is None

    @pytest.mark.parametrize(("rule", "name"), [("eval_pause", "evaluation"), ("checkpoint_pause", "checkpoint")])
    def test_long_pauses_are_told_in_hours(self, tmp_path: Path, rule: str, name: str) -> None:
        # 4 s of steps (a pause of 1 s is a fifth) and a pause of ten hours: 36,004 s, which is 10 h 0 min again.
        finding = find(rule, tmp_path, PLAN.but(pauses=((name, 36_000.0),)))
        assert finding.evidence[0].startswith("10 h 0 min of 10 h 0 min are pauses for")

    def test_short_pauses_are_fine(self, tmp_path: Path) -> None:
        plan = PLAN.but(pauses=(("evaluation", 0.1), ("checkpoint", 0.1)))
        assert look("eval_pause", tmp_path, plan) is None
        assert look("checkpoint_pause", tmp_path, plan) is None


class TestSlowSag:
    def run_of(self, mfu: list[float], folder: Path, step_s: float = 10.0, *events: dict[str, Any]) -> Evidence:
        lines: list[dict[str, Any]] = [{"kind": "header", "schema": 2, "started_at": START_S}]
        for place, value in enumerate(mfu):
            metrics = {"perf/step_time": step_s, "perf/mfu": value, "perf/data_wait_share": 0.0}
            lines.append({"kind": "step", "step": place, "time": START_S + step_s * (place + 1), "metrics": metrics})
        return Evidence(record(folder, [*lines, *events]))

    def test_a_run_that_keeps_falling_is_found(self, tmp_path: Path) -> None:
        # 100 steps of 10 s, from 0.50 down by 0.002 a step. Medians: 0.481 in the first fifth, 0.321 in the last.
        evidence = self.run_of([0.5 - 0.002 * step for step in range(100)], tmp_path)
        finding = RULES["slow_sag"].look(evidence, RULES["slow_sag"])
        assert finding is not None
        assert finding.title == "computing has become 33.3 % slower since the run began"  # 1 - 0.321/0.481
        assert finding.lost == pytest.approx(1 - 0.401 / 0.481, abs=0.01)

    def test_steps_that_vary_are_no_fall(self, tmp_path: Path) -> None:
        assert RULES["slow_sag"].look(self.run_of([0.5, 0.4] * 50, tmp_path), RULES["slow_sag"]) is None

    def test_a_fall_that_is_smaller_than_the_scatter_of_the_beginning_is_none(self, tmp_path: Path) -> None:
        # The first fifth: median 0.5, deviation 0.1. A fall by 0.08 is 16 %, but no two deviations; one by 0.25 is.
        first = [0.4, 0.5, 0.6, 0.5, 0.6] * 4
        assert (
            RULES["slow_sag"].look(self.run_of([*first, *[0.46] * 60, *[0.42] * 20], tmp_path), RULES["slow_sag"])
            is None
        )
        assert (
            RULES["slow_sag"].look(self.run_of([*first, *[0.46] * 60, *[0.25] * 20], tmp_path), RULES["slow_sag"])
            is not None
        )

    def test_waiting_for_data_is_no_fall(self, tmp_path: Path) -> None:
        evidence = self.run_of([0.5] * 50 + [0.25] * 50, tmp_path)
        evidence.run.columns["perf/data_wait_share"][50:] = type(evidence.run.time)("d", [0.5] * 50)
        assert RULES["slow_sag"].look(evidence, RULES["slow_sag"]) is None

    def test_a_short_run_is_judged_only_when_the_monitor_saw_a_fall(self, tmp_path: Path) -> None:
        mfu = [0.5] * 50 + [0.25] * 50
        with pytest.raises(NotCheckedError, match="shorter than 15 minutes"):
            RULES["slow_sag"].look(self.run_of(mfu, tmp_path, 0.1), RULES["slow_sag"])
        regime = event("regime", START_S + 7, from_mfu=0.5, to_mfu=0.25, since_step=50)
        with pytest.raises(NotCheckedError, match="shorter than 15 minutes"):  # 100 steps of 1.19 s: not two minutes
            RULES["slow_sag"].look(self.run_of(mfu, tmp_path, 1.19, regime), RULES["slow_sag"])
        finding = RULES["slow_sag"].look(self.run_of(mfu, tmp_path, 1.21, regime), RULES["slow_sag"])
        assert finding is not None
        assert finding.lost == pytest.approx(0.25)
        assert "the monitor saw it fall at step 50" in finding.evidence


class TestShapes:
    odd: ClassVar[dict[str, Any]] = {"odd_sizes": [{"module": "lm_head", "dimension": "out_features", "size": 50257}]}
    count = event("count", START_S + 1, by_module={"lm_head": 30.0, "blocks": 70.0})

    def test_odd_sizes_lose_their_share_of_matmul_time_on_a_gpu(self, tmp_path: Path) -> None:
        # 30 % of the 20 ms that matmuls lose of 100 ms; half of it is expected back.
        plan = PLAN.but(facts=self.odd, device="cuda", events=(self.count,))
        finding = find("ragged_shapes", tmp_path, plan)
        assert finding.lost == pytest.approx(0.03)
        assert gain_of(finding) == pytest.approx((0.0, 1 / 0.97 - 1, 1 / 0.94 - 1))
        assert "lm_head: out_features 50257" in finding.evidence

    def test_on_a_cpu_odd_sizes_are_fine(self, tmp_path: Path) -> None:
        assert look("ragged_shapes", tmp_path, PLAN.but(facts=self.odd)) is None

    def test_recompiling_again_and_again_is_found(self, tmp_path: Path) -> None:
        finding = find("ragged_shapes", tmp_path, PLAN.but(facts={"num_recompiles": 12, "num_shapes": 30}))
        assert "compiled again 12 times, for 30 shapes" in finding.evidence
        assert finding.gain is None
        assert look("ragged_shapes", tmp_path, PLAN.but(facts={"num_recompiles": 2})) is None


class TestMemoryBound:
    moving = PLAN.but(non_matmul_s=0.120, top=(("aten::addmm", 0.070, 9), ("aten::gelu", 0.060, 12)))

    def test_a_third_of_the_moving_is_expected_back(self, tmp_path: Path) -> None:
        finding = find("memory_bound", tmp_path, self.moving)
        assert finding.lost == pytest.approx(0.6)
        assert gain_of(finding) == pytest.approx((1 / 0.94 - 1, 1 / 0.8 - 1, 1 / 0.6 - 1))
        assert finding.evidence == ("the longest of them in a step: aten::gelu 60 ms",)

    def test_what_a_missing_core_may_have_put_there_is_not_claimed(self, tmp_path: Path) -> None:
        # 60 % of a step, in which the thread was off its core for 40 ms, 10 at a time: four times. So many fall into
        # this part by chance, give or take 2 sqrt(4 x 0.6 x 0.4) of 10 ms each.
        lost_s = 0.120 - 2 * math.sqrt(4 * 0.6 * 0.4) * 0.010
        assert find("memory_bound", tmp_path, self.moving.but(waited_s=0.040)).lost == pytest.approx(lost_s / 0.2)

    def test_some_of_them_must_be_sure(self, tmp_path: Path) -> None:
        # 23 of 100 ms. Waits of 1 ms can put no more than that there. Waits of 8 ms leave 2 sqrt(0.8 x 0.23 x 0.77) of
        # 10 ms to chance, which is 7.5; waits of 10 ms 8.4, and 14.6 are too few.
        plan = PLAN.but(matmul_s=0.067, non_matmul_s=0.023)
        assert find("memory_bound", tmp_path, plan.but(waited_s=0.001)).lost == pytest.approx(0.22)
        chance_s = 2 * math.sqrt(0.8 * 0.23 * 0.77) * 0.010
        assert find("memory_bound", tmp_path, plan.but(waited_s=0.008)).lost == pytest.approx((0.023 - chance_s) / 0.1)
        assert look("memory_bound", tmp_path, plan.but(waited_s=0.010)) is None
        gpu = plan.but(waited_s=0.010, device="cuda")  # whose kernels wait for no core
        assert find("memory_bound", tmp_path, gpu).lost == pytest.approx(0.23)

    def test_matmuls_and_collectives_of_a_gpu_are_not_among_them(self, tmp_path: Path) -> None:
        kernels = ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNN", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "pow_kernel")
        top = tuple((name, 0.060, 9) for name in kernels)
        finding = find("memory_bound", tmp_path, self.moving.but(top=top))
        assert finding.evidence == ("the longest of them in a step: pow_kernel 60 ms",)

    def test_a_compiled_model_is_promised_nothing(self, tmp_path: Path) -> None:
        assert find("memory_bound", tmp_path, self.moving.but(facts={"is_compiled": True})).gain is None

    def test_a_usual_share_is_fine(self, tmp_path: Path) -> None:
        assert look("memory_bound", tmp_path, PLAN) is None


class TestImpossible:
    def test_an_mfu_above_one_is_found_with_its_peak(self, tmp_path: Path) -> None:
        peak = event("peak", START_S, dtype="fp32", flop_per_s=2e12, source="derived")
        finding = find("impossible_mfu", tmp_path, PLAN.but(ideal_s=0.130, events=(peak,)))
        assert finding.is_doubt
        assert "130.0 %" in finding.title
        assert finding.gain is None
        assert "peak: 2 TFLOP/s fp32, derived" in finding.evidence

    def test_an_hfu_above_one_is_found_too(self, tmp_path: Path) -> None:
        assert "101.0 %" in find("impossible_mfu", tmp_path, PLAN.but(metrics={"perf/hfu": 1.01})).title

    def test_a_possible_one_is_fine_and_an_unknown_one_is_not_checked(self, tmp_path: Path) -> None:
        assert look("impossible_mfu", tmp_path, PLAN) is None
        assert why_not("impossible_mfu", tmp_path, PLAN.but(ideal_s=None)) == "no step has perf/mfu"


class TestHealthy:
    """The advice goes by the largest part; steps of 100 ms at 50 ms of ideal."""

    slow = PLAN.but(matmul_s=0.080)  # 30 ms beyond the ideal, of 110
    peak = event("peak", START_S, dtype="fp32", flop_per_s=2e12, source="derived")

    def test_slow_matmuls_want_larger_matrices_and_a_look_at_the_peak(self, tmp_path: Path) -> None:
        finding = find("healthy", tmp_path, self.slow.but(events=(self.peak,)))
        assert finding.evidence[0] == "matmuls below peak: 27.3 % of the time"  # 30/110
        assert finding.advice[0].startswith("larger matrices")
        assert finding.advice[1].endswith("flopmeter peak --measure")

    @pytest.mark.parametrize(
        "changes",
        [{"header": {"mode": "trace"}}, {"events": ({**peak, "source": "measured"},)}],
        ids=["the device is elsewhere", "it is measured already"],
    )
    def test_nobody_is_told_to_measure_in_vain(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        advice = find("healthy", tmp_path, self.slow.but(**changes)).advice
        assert len(advice) == 1
        assert advice[0].startswith("larger matrices")

    @pytest.mark.parametrize(
        ("changes", "part", "advice"),
        [
            ({"non_matmul_s": 0.030}, "other operators: 27.3 % of the time", "torch.compile"),
            ({"gap_s": 0.034}, "launch gaps: 26.2 % of the time", "fewer and larger operators"),  # 34/130
            ({"optimizer_s": 0.035}, "optimizer: 26.9 % of the time", "fused=True"),  # 35/130
        ],
    )
    def test_each_part_has_its_own_advice(
        self, tmp_path: Path, changes: dict[str, Any], part: str, advice: str
    ) -> None:
        finding = find("healthy", tmp_path, PLAN.but(**changes))
        assert finding.evidence[0] == part
        assert advice in finding.advice[0]
        assert "peak --measure" not in " ".join(finding.advice)

    @pytest.mark.parametrize(("mode", "advice"), [("estimate", "mode: smart"), ("smart", "train longer")])
    def test_what_the_record_does_not_tell_another_record_would(self, tmp_path: Path, mode: str, advice: str) -> None:
        finding = find("healthy", tmp_path, PLAN.but(num_profiles=0, header={"mode": mode}))
        assert finding.evidence[0] == "unexplained: 44.0 % of the time"  # 100 less 50 ideal, 5 optimizer, 1 data wait
        assert advice in finding.advice[0]


class TestUndetermined:
    """Steps of 1000 ms at 50 ms of ideal; 944 of them are not split where none was sampled."""

    dark = PLAN.but(matmul_s=0.970, num_profiles=0)

    def test_a_short_run_is_to_be_longer_and_not_told_of_a_setting_that_is_on(self, tmp_path: Path) -> None:
        finding = find("undetermined", tmp_path, self.dark)
        assert finding.title.endswith("undetermined: too few steps were sampled; train longer")
        assert finding.evidence == ("unexplained: 94.4 % of the time", "useful work at peak: 5.0 % of the time")
        assert "profile_steps" not in " ".join(finding.advice)

    @pytest.mark.parametrize(
        ("changes", "advice"),
        [
            ({"header": {"mode": "estimate"}}, "mode: smart"),
            ({"num_steps": 60}, "profile_steps: true"),
            ({"events": (PLAN.profile(START_S + 4),)}, "beside the training thread"),
        ],
        ids=["estimate mode", "long enough to have been sampled", "sampled"],
    )
    def test_the_advice_goes_by_the_reason(self, tmp_path: Path, changes: dict[str, Any], advice: str) -> None:
        assert advice in find("undetermined", tmp_path, self.dark.but(**changes)).advice[0]

    def test_half_explained_is_healthy_and_only_one_of_the_two_speaks(self, tmp_path: Path) -> None:
        assert look("undetermined", tmp_path, PLAN.but(num_profiles=0)) is None
        assert look("healthy", tmp_path, self.dark) is None
