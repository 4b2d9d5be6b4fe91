"""Recorded ranges: how they nest, what arguments they tell, and which names look like matrix work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from flopmeter.flops import formulas
from flopmeter.flops.formulas import Spec
from flopmeter.flops.profiler_events import Event, looks_like_matrix_work, tree
from flopmeter.flops.profiler_guard import Recording


@dataclass
class Range:
    """A stand-in for torch's own event, with the methods that are called on it."""

    label: str
    start: int
    end: int
    thread: int = 1
    arguments: list[tuple[Any, str, Any]] = field(default_factory=list)

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.end - self.start

    def start_thread_id(self) -> int:
        return self.thread

    def sequence_nr(self) -> int:
        return -1

    def structured_input_shapes(self) -> list[Any]:
        return [shape for shape, _, _ in self.arguments]

    def dtypes(self) -> list[str]:
        return [dtype for _, dtype, _ in self.arguments]

    def concrete_inputs(self) -> list[Any]:
        return [value for _, _, value in self.arguments]


def outline(events: list[Event]) -> list[Any]:
    return [(event.name, outline(event.children)) if event.children else event.name for event in events]


def test_ranges_nest_by_time_on_their_own_thread() -> None:
    ranges = [
        Range("inner", 2, 4),
        Range("outer", 0, 9),
        Range("next", 4, 9),
        Range("within next, begun with it", 4, 5),
        Range("after", 9, 10),
        Range("elsewhere", 3, 4, thread=2),
    ]
    nested = ("outer", ["inner", ("next", ["within next, begun with it"])])
    assert outline(tree(map(Event, ranges))) == [nested, "after", "elsewhere"]


def recorded(function: Any, *args: Any) -> list[Event]:
    recording = Recording()
    recording.start()
    function(*args)
    return [Event(raw) for raw in recording.stop()]


def test_arguments_are_specs_and_values_in_the_operators_order() -> None:
    x, weight = torch.ones(2, 4, 10, dtype=torch.bfloat16), torch.ones(6, 2, 3, dtype=torch.bfloat16)
    (event,) = (e for e in recorded(torch.conv1d, x, weight, None, 1, 0, 1, 2) if e.name == "aten::conv1d")
    tensors = [Spec((2, 4, 10), "bfloat16"), Spec((6, 2, 3), "bfloat16")]
    assert event.arguments() == [*tensors, None, [1], [0], [1], 2]


def test_the_members_of_a_tensor_list_keep_their_shapes() -> None:
    (event,) = (e for e in recorded(torch.cat, [torch.ones(2, 3), torch.ones(4, 3)]) if e.name == "aten::cat")
    assert event.arguments() == [[Spec((2, 3)), Spec((4, 3))], 0]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64, torch.complex64]
)
def test_dtypes_have_the_names_that_torch_prints(dtype: torch.dtype) -> None:
    def copy(x: Tensor) -> Tensor:
        return x.clone()

    (event,) = (e for e in recorded(copy, torch.ones(2, dtype=dtype)) if e.name == "aten::clone")
    assert f"torch.{event.arguments()[0].dtype}" == str(dtype)


def test_a_call_whose_shapes_were_lost_has_no_answer() -> None:
    formula = formulas.find("aten::mm")
    assert formula is not None
    lost = Event(Range("aten::mm", 0, 1, arguments=[([], "float", None), ([], "float", None)]))
    known = Event(Range("aten::mm", 0, 1, arguments=[([3, 5], "float", None), ([5, 7], "float", None)]))
    assert lost.work(formula) is None
    assert known.work(formula) == (210, 210, 210)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::_new_kind_of_mm", True),
        ("aten::_thnn_fused_lstm_cell", False),
        ("c10d::allreduce_", False),
        ("autograd::engine::evaluate_function: ConvolutionBackward0", False),
        ("my::annotation", False),
    ],
)
def test_names_that_sound_like_matrix_work_are_told_from_those_that_do_not(name: str, expected: bool) -> None:
    assert looks_like_matrix_work(name) is expected
