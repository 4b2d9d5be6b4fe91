"""What the whole run did, held and cost, from records in which every number is planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.planned_runs import START_S, Line, Plan, event, record

from flopmeter.diagnosis import RULES, Evidence, Finding
from flopmeter.diagnosis.evidence import explanations
from flopmeter.record import load_run
from flopmeter.report._model import report_of
from flopmeter.report._texts import totals_rows
from flopmeter.text import plain
from flopmeter.totals import totals

STEP_S, TOKENS, FLOP = 2.0, 1000, 4e12
PEAK = 8e12


def step(number: int, time_s: float, tokens: int = TOKENS, **more: Any) -> Line:
    row = {"training/loss": 1.0, ".ns": STEP_S * 1e9, ".tokens": tokens, ".samples": 4, ".model_flop/bf16": FLOP}
    return {
        "kind": "step",
        "step": number,
        "time": time_s,
        "metrics": {**row, ".hardware_flop/bf16": 1.25 * FLOP, **more},
    }


def header(at_s: float, **more: Any) -> Line:
    peak = {"bf16": {"device": "card", "flop_per_s": PEAK, "source": "table", "note": ""}}
    return {"kind": "header", "schema": 2, "started_at": at_s, "device": "card", "peak": peak, "world_size": 1, **more}


def ten_steps(at_s: float = START_S, **more: Any) -> list[Line]:
    return [header(at_s, **more), *(step(number, at_s + STEP_S * number) for number in range(1, 11))]


def test_sums_are_of_the_steps_whose_work_is_kept(tmp_path: Path) -> None:
    # Ten steps, then a restart 40 s after the first start that begins again at step 8 with other lengths.
    again = [step(number, START_S + 40 + STEP_S * (number - 7), tokens=500) for number in range(8, 13)]
    found = totals(record(tmp_path, [*ten_steps(), header(START_S + 40), *again]))
    assert found.num_steps == 7 + 5
    assert found.tokens == 7 * 1000 + 5 * 500
    assert found.samples == 12 * 4
    assert found.model_flop == pytest.approx(12 * FLOP)
    assert found.hardware_flop == pytest.approx(12 * 1.25 * FLOP)
    assert found.wall_s == pytest.approx(50)


def test_what_is_not_known_is_none_and_flops_that_some_steps_lack_are_said(tmp_path: Path) -> None:
    bare = [{"kind": "step", "step": n, "time": START_S + n, "metrics": {".ns": 1e9}} for n in range(1, 4)]
    found = totals(record(tmp_path, [{**header(START_S), "peak": {}}, *bare]))
    assert (found.tokens, found.samples, found.model_flop, found.energy_kwh, found.cost) == (None,) * 5
    assert (found.memory, found.notes) == ((), ())
    mixed = totals(record(tmp_path, [*ten_steps(), *(line | {"step": n} for n, line in enumerate(bare, 11))]))
    assert mixed.model_flop == pytest.approx(10 * FLOP)
    assert mixed.notes == ("the FLOPs of 3 of 13 steps are not known, and left out",)


def test_training_and_roles_add_up_to_the_wall_time(tmp_path: Path) -> None:
    lines, now_s = [header(START_S)], START_S
    for number in range(1, 11):
        now_s += 5.0
        lines.append(event("pause", now_s, name="rollout", duration_s=5.0, is_role=True))
        now_s += STEP_S
        # A quarter of the step is a pass without gradients that nobody has named.
        lines.append(step(number, now_s, **{".no_grad_ns": 0.5e9}))
        if number in (4, 8):
            lines.append(
                event("count", now_s, by_role={"rollout": 2e12, "seen once": 1.0} if number == 4 else {"rollout": 4e12})
            )
    found = totals(record(tmp_path, lines))
    roles = {role.name: role for role in found.roles}
    assert {name: role.seconds for name, role in roles.items()} == pytest.approx(
        {"training": 15.0, "rollout": 50.0, "no_grad": 5.0}
    )
    assert sum(role.seconds for role in found.roles) == pytest.approx(found.wall_s) == pytest.approx(70.0)
    assert [role.name for role in found.roles][:2] == ["training", "rollout"]
    assert roles["training"].flop == pytest.approx(10 * FLOP)
    assert roles["training"].utilisation == pytest.approx(10 * FLOP / (15.0 * PEAK))
    # Two counted steps had 2 and 4 TFLOP of it, which is 3 a step.
    assert roles["rollout"].flop == pytest.approx(10 * 3e12)
    assert roles["rollout"].utilisation == pytest.approx(10 * 3e12 / (50.0 * PEAK))
    assert roles["no_grad"].flop is None


def test_energy_and_money_by_hand(tmp_path: Path) -> None:
    samples = [event("resources", START_S + at_s, metrics={"resource/gpu_power_w": watts})
               for at_s, watts in ((2, 100.0), (4, 300.0), (10, 600.0))]  # fmt: skip
    found = totals(record(tmp_path, [*ten_steps(price_per_device_hour=3.6, world_size=4), *samples]))
    # 100 W for 2 s, 300 W for 2 s, 600 W for 6 s: 440 W; four devices for 20 s.
    assert found.energy_kwh == pytest.approx(440 * 4 * 20 / 3.6e6)
    assert found.joules_per_token == pytest.approx(440 * 4 * 20 / 10_000)
    # 3.6 an hour is a thousandth a second.
    assert found.cost == pytest.approx(0.001 * 4 * 20)
    assert found.cost_per_million_tokens == pytest.approx(0.08 / 10_000 * 1e6)
    assert found.notes == ("energy is that of rank 0's device times 4",)


@pytest.mark.parametrize("again_s", [80, 1000])
def test_a_watt_is_not_counted_while_nothing_ran(tmp_path: Path, again_s: float) -> None:
    first, second = ten_steps(), ten_steps(START_S + again_s)
    for number, line in enumerate(second[1:], 11):
        line["step"] = number
    looks = ((2, 200.0), (12, 200.0), (again_s + 2, 500.0), (again_s + 12, 500.0))
    samples = [event("resources", START_S + at_s, metrics={"resource/gpu_power_w": watts}) for at_s, watts in looks]
    found = totals(record(tmp_path, [*first, *second, *samples]))
    # 12 s of either start are sampled: 350 W; each ran for 20 s.
    assert found.energy_kwh == pytest.approx(350 * 40 / 3.6e6)


def look(name: str, evidence: Evidence) -> Finding | None:
    return RULES[name].look(evidence, RULES[name])


GB = float(1 << 30)


def memory(peak: float, reserved: float, used: float, total: float = 80) -> Line:
    shown = {"memory_peak": peak, "memory_reserved": reserved, "memory_total": total, "gpu_memory": used}
    metrics = {f"resource/{name}_bytes": amount * GB for name, amount in shown.items()}
    return event("resources", START_S + 3, metrics={**metrics, "resource/memory_peak_bytes/cuda:1": 7 * GB})


def test_memory_is_the_most_that_was_sampled_and_what_others_use_is_no_room(tmp_path: Path) -> None:
    found = totals(record(tmp_path, [*ten_steps(), memory(20, 24, 27), memory(30, 36, 39)])).memory
    assert [each.device for each in found] == ["card", "cuda:1"]
    # 3 GB are the driver's and other processes': 80 - 3 - 30.
    assert found[0].headroom_bytes == 47 * GB
    assert found[0].growth == pytest.approx(1 + 47 / 30)
    assert (found[0].peak_bytes, found[0].reserved_bytes) == (30 * GB, 36 * GB)
    assert (found[1].peak_bytes, found[1].headroom_bytes, found[1].growth) == (7 * GB, None, None)


def test_on_a_cpu_the_process_is_what_counts(tmp_path: Path) -> None:
    shown = {"resource/process_memory_bytes": 4 * GB, "resource/host_free_bytes": 6 * GB}
    less = {"resource/process_memory_bytes": 3 * GB, "resource/host_free_bytes": 5 * GB}
    events = [event("resources", START_S + n, metrics=metrics) for n, metrics in enumerate((shown, less), 1)]
    (found,) = totals(record(tmp_path, [*ten_steps(device="cpu"), *events])).memory
    assert (found.device, found.peak_bytes, found.headroom_bytes) == ("cpu", 4 * GB, 5 * GB)


def test_the_advice_to_raise_the_batch_says_by_how_much(tmp_path: Path) -> None:
    assert "{room}" in explanations()["kernel_launch"]
    plan = Plan(gap_s=0.2, num_ops=5000, events=(memory(20, 24, 27),))
    finding = look("kernel_launch", Evidence(plan.run(tmp_path)))
    assert finding is not None
    advice = next(text for text in finding.advice if "memory is full" in text)
    assert "room for at least 3.9 times the batch" in advice  # 1 + (80 - 3 - 20) / 20 = 3.85
    bare = look("kernel_launch", Evidence(plan.but(events=()).run(tmp_path)))
    assert bare is not None
    assert not any("room" in text for text in bare.advice)


def clocks(mhz: list[float], reasons: int = 0, utilisation: float = 0.9) -> tuple[Line, ...]:
    shown = {"resource/gpu_utilisation": utilisation, "resource/gpu_throttle_reasons": float(reasons)}
    return tuple(event("resources", START_S + n / 10, metrics={"resource/gpu_clock_hz": clock * 1e6, **shown})
                 for n, clock in enumerate(mhz, 1))  # fmt: skip


def test_a_clock_that_falls_is_a_finding_with_what_holds_it_down(tmp_path: Path) -> None:
    plan = Plan(header={"device": "NVIDIA H100 80GB HBM3"}, events=clocks([2000] * 2 + [1600] * 10, reasons=0x4 | 0x20))
    finding = look("clock_fall", Evidence(plan.run(tmp_path)))
    assert finding is not None
    # A fifth of the useful work, matmuls and other operators: 0.2 x (70 + 20 of 100 ms).
    assert finding.lost == pytest.approx(0.2 * 0.9)
    assert "fell by 20.0 %" in finding.title
    assert "held down by the power cap in 10 of 12 samples, heat in 10 of 12 samples" in finding.evidence


def test_the_time_lost_to_a_finding_has_its_price(tmp_path: Path) -> None:
    header = {"device": "NVIDIA H100 80GB HBM3", "price_per_device_hour": 3600.0}  # one a second
    report = report_of(Plan(header=header, events=clocks([2000] * 2 + [1600] * 10, reasons=0x4)).run(tmp_path))
    assert report.whole.cost == pytest.approx(report.whole.wall_s)
    # The clock costs 18 % of the time, as in the test before.
    assert f"clock_fall {plain(0.18 * report.whole.wall_s)}" in dict(totals_rows(report))["Cost of lost time"]


@pytest.mark.parametrize(
    "events",
    [clocks([2000] * 2 + [1950] * 10), clocks([2000] * 2 + [300] * 10, utilisation=0.1) + clocks([2000] * 9)],
    ids=["as clocks do", "at rest"],
)
def test_a_clock_that_moves_a_little_or_rests_is_none(tmp_path: Path, events: tuple[Line, ...]) -> None:
    plan = Plan(header={"device": "NVIDIA H100 80GB HBM3"}, events=events)
    assert look("clock_fall", Evidence(plan.run(tmp_path))) is None


def test_the_roof_of_this_card_splits_what_matmuls_lack(tmp_path: Path) -> None:
    peaks = event("peak", START_S, dtype="fp32", flop_per_s=10e12, device="cpu", source="table", note="")
    count = event("count", START_S, by_dtype={"float32": 1e9})
    roof = event("roof", START_S, dtype="fp32", flop_per_s=8e12, own_shapes=1.0)
    plan = Plan(ideal_s=0.040, matmul_s=0.070)
    parts = {
        part.name: part.seconds / 40 for part in plan.but(events=(peaks, count, roof)).run(tmp_path).waterfall().parts
    }
    # At 80 % of the peak the useful work takes 50 ms; the run's matmuls took 70.
    assert parts["card_below_peak"] == pytest.approx(0.010)
    assert parts["matmul_below_peak"] == pytest.approx(0.020)
    beaten = plan.but(events=(peaks, count, roof), matmul_s=0.042).run(tmp_path).waterfall()
    assert "card_below_peak" not in {part.name for part in beaten.parts}  # 42 ms are 19 % faster than the roof
    without = {part.name: part.seconds / 40 for part in plan.but(events=(peaks, count)).run(tmp_path).waterfall().parts}
    assert "card_below_peak" not in without
    assert without["matmul_below_peak"] == pytest.approx(0.030)


def test_a_record_of_anything_is_summed_up_without_an_error(tmp_path: Path) -> None:
    odd = [event("resources", START_S, metrics={"resource/memory_peak_bytes": "a", "resource/gpu_power_w": -1}),
           event("pause", START_S, name=None, duration_s="x", is_role=True), event("count", by_role=[1]),
           event("roof", dtype=3, flop_per_s=[])]  # fmt: skip
    path = tmp_path / "run.jsonl"
    path.write_text(
        "\n".join(map(json.dumps, [{"kind": "header", "schema": 2, "price_per_device_hour": "much"}, *odd]))
    )
    assert totals(load_run(path)).num_steps == 0
