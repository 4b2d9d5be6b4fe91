from __future__ import annotations

from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.varying import MAX_COUNTS, Counts
from flopmeter.flops.workload import Workload

SHAPE = Workload(samples=8)


def count(forward: float) -> FlopCount:
    model = 3 * forward
    return FlopCount(
        forward_flop=forward,
        backward_flop=2 * forward,
        hardware_flop=model + 10,
        by_dtype={"float32": model},
        hardware_by_dtype={"float32": model + 10},
        growth={"float32": {"sample": model}},
    )


def test_counts_that_agree_leave_the_last_one_as_it_is() -> None:
    counts = Counts()
    counts.add(count(1000), SHAPE)
    last = count(1005)
    assert counts.add(last, SHAPE) is last
    assert counts.difference == 0


def test_counts_that_differ_are_averaged_in_every_number() -> None:
    counts = Counts()
    counts.add(count(100), SHAPE)
    mean = counts.add(count(300), SHAPE)
    assert mean == count(200)
    assert counts.difference == (900 - 300) / 600


def test_other_shapes_are_not_mixed_in() -> None:
    counts = Counts()
    counts.add(count(100), Workload(samples=1))
    assert counts.add(count(300), SHAPE) == count(300)
    assert counts.difference == 0


def test_a_model_that_changes_for_good_is_followed() -> None:
    counts = Counts()
    counts.add(count(100), SHAPE)
    for _ in range(MAX_COUNTS):
        mean = counts.add(count(300), SHAPE)
    assert mean == count(300)


def test_counts_add_up_and_scale_in_every_number() -> None:
    one = FlopCount(
        forward_flop=1,
        by_dtype={"float32": 1},
        growth={"float32": {"token": 1}},
        uncounted={"aten::x_mm": 1},
        coverage=0.5,
        left_out=("a", "b"),
    )
    other = FlopCount(
        forward_flop=2,
        backward_flop=4,
        by_dtype={"float32": 2, "bfloat16": 4},
        growth={"float32": {"token": 1, "sample": 1}, "bfloat16": {"token": 4}},
        uncounted={"aten::x_mm": 2},
        left_out=("b", "c"),
        method="meta",
    )
    both = one + other
    assert (both.forward_flop, both.backward_flop, both.method, both.coverage) == (3, 4, "observed", 0.5)
    assert both.by_dtype == {"float32": 3, "bfloat16": 4}
    assert both.growth == {"float32": {"token": 2, "sample": 1}, "bfloat16": {"token": 4}}
    assert (both.uncounted, both.left_out) == ({"aten::x_mm": 3}, ("a", "b", "c"))
    twice = other * 2
    assert (twice.forward_flop, twice.backward_flop, twice.by_dtype) == (4, 8, {"float32": 4, "bfloat16": 8})
    assert twice.growth == {"float32": {"token": 2, "sample": 2}, "bfloat16": {"token": 8}}
    assert twice.uncounted == {"aten::x_mm": 2}
