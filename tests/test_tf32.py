"""Convolutions on float32 run in TF32 where the GPU has it, because torch allows it unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flopmeter.devices import tf32_families
from flopmeter.flops.count import count_flops
from flopmeter.flops.estimate import read_leaves
from flopmeter.flops.observe import observe
from flopmeter.flops.profiled import ProfiledStep

GPU = torch.device("cuda", 0)
ROWS, SIDE, CHANNELS, CLASSES = 2, 6, 4, 5
CONVOLUTION = 2 * ROWS * SIDE * SIDE * CHANNELS * 3 * 9
"""Forward: nine taps from three channels to four, at every pixel. The image wants no gradient: backward is as much."""
LINEAR = 2 * ROWS * CHANNELS * SIDE * SIDE * CLASSES
"""Forward; backward is twice as much."""


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An A100 in use by this process, with torch's settings as they come."""
    before = torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    yield
    torch.backends.cudnn.allow_tf32 = before


def make_net() -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(CHANNELS * SIDE**2, CLASSES)
    )
    return net, torch.ones(ROWS, 3, SIDE, SIDE)


@pytest.mark.usefixtures("ampere")
def test_on_an_ampere_card_cudnn_uses_tf32_until_it_is_told_not_to() -> None:
    assert tf32_families(GPU) == {"convolution", "recurrent"}
    torch.backends.cudnn.allow_tf32 = False
    assert tf32_families(GPU) == set()


@pytest.mark.usefixtures("ampere")
def test_older_cards_other_makers_and_the_cpu_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tf32_families(torch.device("cpu")) == set()
    assert tf32_families(None) == set()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))  # a V100
        assert tf32_families(GPU) == set()
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm calls its devices cuda, too
    assert tf32_families(GPU) == set()


def test_before_cuda_is_in_use_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pytest.fail("this would start CUDA"))
    assert tf32_families(GPU) == set()


def test_every_way_of_counting_tells_convolutions_in_tf32_from_products_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("observation", "profiled", "estimate"):
        monkeypatch.setattr(f"flopmeter.flops.{module}.tf32_families", lambda device: frozenset({"convolution"}))
    expected = {"tf32": 2 * CONVOLUTION, "float32": 3 * LINEAR}
    net, images = make_net()
    with observe(net) as observed:
        net(images).sum().backward()
    assert observed.result().by_dtype == expected
    assert count_flops(net, images).by_dtype == expected
    with ProfiledStep() as profiled:
        net(images).sum().backward()
    assert profiled.result().by_dtype == expected
    assert set(read_leaves(net).by_dtype) == {"tf32", "float32"}


def test_under_autocast_a_twin_counts_convolutions_in_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopmeter.flops.observation.tf32_families", lambda device: frozenset({"convolution"}))
    net, images = make_net()
    with torch.autocast("cpu", torch.bfloat16):
        assert set(count_flops(net, images).by_dtype) == {"bfloat16"}
