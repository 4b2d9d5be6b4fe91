"""Which argument is the input, what it is called, and what lies in containers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from flopmeter.flops.workload import (
    Needs,
    Reads,
    WorkloadReader,
    can_vary,
    flatten,
    is_list_of_samples,
    main_input,
    second_input,
)

VECTORS, IMAGES = torch.zeros(2, 8), torch.zeros(2, 3, 4, 4)
IDS, CLASSES = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, dtype=torch.long)


class Model(nn.Module):
    def forward(self, tokens: Any, mask: Any = None, *more: Any, scale: float = 1.0) -> None:
        return None


class Other(nn.Module):
    def forward(self, image: Any, noise: Any = None) -> None:
        return None


class DistributedDataParallel(nn.Module):
    """Passes on what it is called with, and is recognised by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Engine(DistributedDataParallel):
    """A wrapper under a name that nobody knows."""


class Adapted(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [lambda m: m, DistributedDataParallel, Engine, Adapted, compiled, lambda m: Engine(compiled(Adapted(m)))],
)
def test_positional_arguments_have_the_names_of_the_model_inside_its_wrappers(wrap: Any) -> None:
    names = WorkloadReader(Needs(), models=[wrap(Model())])
    assert names.bind((1, 2), {"scale": 3}) == {"tokens": 1, "mask": 2, "scale": 3}
    assert list(names.bind((1, 2, 3, 4), {}).values()) == [1, 2, 3, 4]


def test_arguments_stand_as_in_the_forward() -> None:
    reader = WorkloadReader(Needs(), models=[Model()])
    assert list(reader.in_order({"scale": 1, "mask": 2, "tokens": 3})) == [
        "tokens",
        "mask",
        "scale",
    ]


def test_of_several_models_the_first_that_knows_the_keywords_names_the_others() -> None:
    names = WorkloadReader(Needs(), models=[Model(), Other()])
    assert names.bind((1,), {"noise": 2}) == {"image": 1, "noise": 2}
    assert names.bind((1,), {"mask": 2}) == {"tokens": 1, "mask": 2}


def test_a_forward_without_names_leaves_numbers() -> None:
    assert WorkloadReader(Needs(), models=[]).bind((1, 2), {"x": 3}) == {"0": 1, "1": 2, "x": 3}


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Data:
    x: Any
    note: str = ""


def test_containers_name_what_they_hold() -> None:
    assert flatten({"batch": {"x": VECTORS, "y": CLASSES}}) == {"x": VECTORS, "y": CLASSES}
    assert flatten({"batch": Pair(VECTORS, CLASSES)}) == {"left": VECTORS, "right": CLASSES}
    assert flatten({"batch": Data(VECTORS)}) == {"x": VECTORS}
    assert list(flatten({"batch": [IMAGES, CLASSES]})) == ["batch.0", "batch.1"]
    assert flatten({"n": 3, "s": "a", "none": None, "numbers": [1, 2, 3], "model": nn.Linear(2, 2)}) == {}


def test_lists_of_one_kind_stay_lists_and_lists_of_dicts_become_some() -> None:
    assert flatten({"images": (IMAGES, IMAGES)}) == {"images": [IMAGES, IMAGES]}
    found = flatten({"samples": [{"image": IMAGES[0], "label": 1}, {"image": IMAGES[1], "label": 2}]})
    assert list(found) == ["image"]
    assert len(found["image"]) == 2


def test_labels_in_containers_are_left_alone() -> None:
    assert flatten({"x": VECTORS, "targets": [{"boxes": VECTORS}]}) == {"x": VECTORS}


@pytest.mark.parametrize(
    ("inputs", "reads", "expected"),
    [
        ({"labels": CLASSES, "features": VECTORS}, "", "features"),
        ({"labels": IDS, "x": VECTORS}, "", "x"),
        ({"segments": IDS, "image": IMAGES}, "values", "image"),
        ({"extra": VECTORS, "tokens": IDS}, "text", "tokens"),
        ({"attention_mask": IDS, "tokens": IDS}, "text", "tokens"),
        ({"seen": IDS.bool(), "tokens": IDS}, "text", "tokens"),
        ({"t": CLASSES, "x": IMAGES}, "values", "x"),
        ({"user": CLASSES, "item": CLASSES}, "ids", "user"),
        ({"y": VECTORS}, "", "y"),
        ({"labels": CLASSES}, "", None),
        ({"n": torch.tensor(3)}, "", None),
        ({}, "", None),
    ],
)
def test_the_input_is_neither_a_label_nor_a_mask(inputs: dict[str, Any], reads: Reads, expected: str | None) -> None:
    assert main_input(inputs, reads) == expected


def test_a_decoder_is_given_the_next_tensor_that_is_no_mask() -> None:
    assert second_input({"src": IDS, "src_mask": IDS, "lengths": CLASSES, "tgt": VECTORS}, "src") is VECTORS
    assert second_input({"src": IDS, "lengths": CLASSES}, "src") is None


def test_items_of_a_list_are_samples_where_each_has_a_size_of_its_own() -> None:
    assert is_list_of_samples([IMAGES[0], IMAGES[1]], "values")
    assert is_list_of_samples([VECTORS, VECTORS[:1]], "sequence")
    assert is_list_of_samples([CLASSES, CLASSES], "text")
    assert not is_list_of_samples([VECTORS, VECTORS], "values")
    assert not is_list_of_samples([IMAGES, IMAGES], "values")  # two views of the same samples
    assert not is_list_of_samples([torch.tensor(1), torch.tensor(2)], "values")


def test_packed_sequences_are_an_input_as_they_are() -> None:
    packed = pack_sequence([torch.zeros(3, 4), torch.zeros(2, 4)])
    found = flatten({"x": packed})
    assert isinstance(found["x"], PackedSequence)
    assert main_input(found, "sequence") == "x"


def test_flags_decide_nothing_and_numbers_may() -> None:
    assert [can_vary(value) for value in (None, True, "mean", 3, 0.5, object())] == [False] * 3 + [True] * 3
