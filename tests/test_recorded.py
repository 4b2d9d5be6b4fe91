"""Recorded ranges: how they nest, which of them count, and what arguments they were recorded with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flopmeter.flops import formulas
from flopmeter.flops.formulas import Spec
from flopmeter.profiling import recorded as recorded_module
from flopmeter.profiling.profiler_guard import Recording
from flopmeter.profiling.recorded import Range, choose, nest, recorded_arguments, recorded_flop, uncounted
from flopmeter.torch_compat import input_shapes


def test_ranges_nest_by_time_on_their_own_thread() -> None:
    ranges = [
        Range("inner", 2, 4, 1),
        Range("outer", 0, 9, 1),
        Range("next", 4, 9, 1),
        Range("within next, begun with it", 4, 5, 1),
        Range("after", 9, 10, 1),
        Range("elsewhere", 3, 4, 2),
    ]
    found = [[range_.name, *(outer.name for outer in range_.around())] for range_ in nest(ranges)]
    assert found == [
        ["outer"],
        ["inner", "outer"],
        ["next", "outer"],
        ["within next, begun with it", "next", "outer"],
        ["after"],
        ["elsewhere"],
    ]


def call(name: str, start: int, end: int, *shapes: list[int]) -> Range:
    formula = formulas.find(name)
    assert formula is not None
    flop, dtype = recorded_flop(formula, shapes, ["float"] * len(shapes), [None] * len(shapes))
    return Range(name, start, end, 1, formula=formula, flop=flop, dtype=dtype)


def test_of_one_product_inside_another_the_inner_counts_and_a_lost_one_is_listed_once() -> None:
    linear, addmm = call("aten::linear", 0, 9, [3, 5], [7, 5]), call("aten::addmm", 1, 8, [7], [3, 5], [5, 7])
    lost = [call("aten::convolution", 10, 19), call("aten::_convolution", 11, 18), call("aten::mm", 20, 21)]
    nested = nest([linear, addmm, *lost])
    assert choose(nested) == [addmm]
    assert sorted(range_.name for range_ in uncounted(nested)) == ["aten::_convolution", "aten::mm"]


def test_an_attention_counts_as_a_whole_and_nothing_that_it_is_made_of_is_missed() -> None:
    qkv = [[1, 2, 4, 8]] * 3
    whole = call("aten::_scaled_dot_product_attention_math", 0, 9, *qkv)
    inside = [call("aten::bmm", 1, 3, [2, 4, 8], [2, 8, 4]), call("aten::bmm", 4, 6)]
    nested = nest([whole, *inside])
    assert choose(nested) == [whole]
    assert uncounted(nested) == []


def test_a_damaged_trace_with_operators_in_operators_without_end_is_read_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(recorded_module, "is_closer", lambda inner, outer: not asked.append(outer.op))
    deep = [call("aten::mm", at, 10_000 - at, [2, 2], [2, 2]) for at in range(1000)]
    assert choose(nest(deep)) == [deep[-1]]
    assert len(asked) == 999


def recorded(function: Any, *args: Any) -> list[Any]:
    recording = Recording()
    recording.start()
    function(*args)
    return recording.stop()


def arguments(events: list[Any], name: str) -> list[Any]:
    (raw,) = (raw for raw in events if raw.name() == name)
    return recorded_arguments(input_shapes(raw), raw.dtypes(), raw.concrete_inputs())


def test_arguments_are_specs_and_values_in_the_operators_order() -> None:
    x, weight = torch.ones(2, 4, 10, dtype=torch.bfloat16), torch.ones(6, 2, 3, dtype=torch.bfloat16)
    tensors = [Spec((2, 4, 10), "bfloat16"), Spec((6, 2, 3), "bfloat16")]
    found = arguments(recorded(torch.conv1d, x, weight, None, 1, 0, 1, 2), "aten::conv1d")
    assert found == [*tensors, None, [1], [0], [1], 2]


def test_the_members_of_a_tensor_list_keep_their_shapes() -> None:
    found = arguments(recorded(torch.cat, [torch.ones(2, 3), torch.ones(4, 3)]), "aten::cat")
    assert found == [[Spec((2, 3)), Spec((4, 3))], 0]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64, torch.complex64]
)
def test_dtypes_have_the_names_that_torch_prints(dtype: torch.dtype) -> None:
    def copy(x: Tensor) -> Tensor:
        return x.clone()

    found = arguments(recorded(copy, torch.ones(2, dtype=dtype)), "aten::clone")
    assert f"torch.{found[0].dtype}" == str(dtype)


def test_a_call_whose_shapes_were_lost_has_no_answer() -> None:
    assert call("aten::mm", 0, 1, [], []).flop is None
    assert call("aten::mm", 0, 1, [3, 5], [5, 7]).flop == (210, 210, 210)
