from __future__ import annotations

from pathlib import Path

from flopmeter.cli.doctor import touches
from flopmeter.schema import METRICS, METRICS_BY_KEY, PHASES


def test_every_metric_has_a_unique_key_a_meaning_and_a_rule_for_ranks() -> None:
    assert len(METRICS_BY_KEY) == len(METRICS)
    for metric in METRICS:
        assert metric.meaning.endswith(".")
        assert metric.ranks in ("sum", "mean", "max", "rank0")


def test_the_keys_that_the_mission_fixes_are_there() -> None:
    fixed = (
        "training/loss training/lr training/epoch training/grad_norm global_step perf/mfu perf/mfu_percent "
        "perf/step_time perf/steps_per_second perf/tokens_per_second perf/samples_per_second"
    )
    assert set(fixed.split()) <= set(METRICS_BY_KEY)


def test_every_phase_has_its_share() -> None:
    assert all(f"perf/{phase}_share" in METRICS_BY_KEY for phase in PHASES)


def test_the_page_of_what_is_touched_is_the_table_that_doctor_shows() -> None:
    page = (Path(__file__).parents[1] / "docs" / "what_it_touches.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    shown = [[field.replace("`", "") for field in row] for row in rows]
    assert shown == [[field.replace("`", "") for field in touched.values()] for touched in touches()]
