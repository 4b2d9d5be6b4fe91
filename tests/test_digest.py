"""What reaches the sinks, and how often; what every line of the record holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopmeter.config import MonitorConfig
from flopmeter.monitor.digest import Delivery, Digest, StepRecord
from flopmeter.record import load_run
from flopmeter.record.writer import encode
from flopmeter.schema import METRICS_BY_KEY
from flopmeter.timing import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, OTHER

CLOCK = (0, DATA_WAIT, 10_000_000, FORWARD, 50_000_000, BACKWARD, 90_000_000, OPTIMIZER, 100_000_000)


NUMBERS = {"loss": 2.0, "lr": 0.1, "epoch": 0, "grad_norm": 1.5}


def deliveries(num_steps: int, config: dict[str, Any] | None = None, **values: Any) -> list[Delivery]:
    digest = Digest(MonitorConfig.load(config), overhead=lambda: 0.001)
    records = [
        StepRecord(
            index=index,
            time_s=1000.0 + index * 0.1,
            clock=CLOCK,
            values={"step": index + 1, **{f"training/{name}": value for name, value in NUMBERS.items()}, **values},
            marks=("warmup",) if index < 3 else (),
        )
        for index in range(num_steps)
    ]
    return [digest(record) for record in records]


def shown(delivery: Delivery) -> dict[str, float]:
    return dict(delivery.all_metrics()) if delivery.all_metrics is not None else {}


def logged(found: list[Delivery]) -> list[dict[str, float]]:
    return [dict(delivery.metrics()) for delivery in found if delivery.metrics is not None]


def test_basics_are_logged_every_step_and_details_every_fifty() -> None:
    logs = logged(deliveries(100))
    assert len(logs) == 100
    basic = {"global_step", "training/loss", "training/lr", "training/epoch"}
    assert set(logs[0]) == basic
    assert [index + 1 for index, log in enumerate(logs) if "perf/step_time" in log] == [50, 100]
    assert {"training/grad_norm", "perf/overhead_share", "perf/data_wait_share"} <= set(logs[49])


def test_logging_steps_thins_the_basics() -> None:
    logs = logged(deliveries(100, {"training": {"logging_steps": 10}}))
    assert [log["global_step"] for log in logs] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]


def test_reduced_logging_of_wandb_leaves_the_other_sinks_and_the_record_alone() -> None:
    reduced = logged(deliveries(400, {"wandb": {"reduced_logging": True}}))
    assert len(reduced) == 400
    assert sum("perf/step_time" in log for log in reduced) == 8


def test_the_record_has_every_step_in_full_whatever_the_sinks_get(tmp_path: Path) -> None:
    found = deliveries(20, {"training": {"logging_steps": 10}})
    assert [delivery.line["step"] for delivery in found] == list(range(1, 21))
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(encode(line) for line in ({"kind": "header", "schema": 2}, *(one.line for one in found))))
    run = load_run(path)
    assert list(run.column("perf/step_time")) == pytest.approx([0.1] * 20)
    assert list(run.column("perf/forward_share")) == pytest.approx([0.4] * 20)
    for place, delivery in enumerate(found):  # what is read is what the sinks could have had
        assert {key: run.columns[key][place] for key in shown(delivery)} == pytest.approx(shown(delivery))


def test_a_logged_value_is_the_aggregate_since_the_last_one_without_marked_steps() -> None:
    digest = Digest(MonitorConfig.load({"monitoring": {"detail_every": 4}}))
    logs = []
    for index, step_ms in enumerate((1000, 10, 20, 30)):
        record = StepRecord(
            index=index,
            time_s=float(index),
            clock=(0, OTHER, step_ms * 10**6),
            marks=("warmup",) if index == 0 else (),
        )
        logs.append(digest(record))
    assert logged(logs[-1:])[0]["perf/step_time"] == pytest.approx(
        0.020
    )  # (10 + 20 + 30) / 3: the warm-up step is left out


def test_what_only_some_steps_know_reaches_the_sinks_and_waits_for_ranks_are_aggregated() -> None:
    digest = Digest(MonitorConfig.load({"monitoring": {"detail_every": 2}}))
    first = StepRecord(index=0, time_s=0.0, clock=(0, OTHER, 10**8), blocked_ns=(0, 0, 0, 10**7, 0, 0))
    second = StepRecord(
        index=1, time_s=0.1, clock=(0, OTHER, 10**8), blocked_ns=(0, 0, 0, 3 * 10**7, 0, 0), wait_cpu_share=0.25
    )
    first_shown = shown(digest(first))
    assert first_shown["perf/exposed_communication_share"] == pytest.approx(0.1)
    logged_now = logged([digest(second)])[0]
    assert logged_now["perf/exposed_communication_share"] == pytest.approx(0.2)  # 40 of 200 ms
    assert logged_now["perf/data_wait_cpu_share"] == 0.25


def test_every_key_is_one_of_the_schema() -> None:
    for delivery in deliveries(60):
        assert set(shown(delivery)) <= set(METRICS_BY_KEY)
        assert set(() if delivery.metrics is None else delivery.metrics()) <= set(METRICS_BY_KEY)


def test_a_step_can_be_kept_out_of_wandb() -> None:
    assert all(delivery.skipped_sinks == ("wandb",) for delivery in deliveries(3, skip_wandb=True))
    assert all(delivery.skipped_sinks == () for delivery in deliveries(3))


def test_goodput_is_the_share_of_wall_time_in_steps() -> None:
    # Steps of 0.1 s that end 0.1 s apart: all of the time.
    assert shown(deliveries(10)[-1])["perf/goodput"] == pytest.approx(1.0)


def test_steps_without_numbers_of_the_loop_count_on_by_themselves() -> None:
    digest = Digest(MonitorConfig.load(None))
    steps = [digest(StepRecord(index=i, time_s=0.0, clock=(0, OTHER, 1))).line["step"] for i in range(3)]
    assert steps == [1, 2, 3]
