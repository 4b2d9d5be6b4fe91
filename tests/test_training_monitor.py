"""The facade `training.utils.monitor`: names, signatures and the contract that its functions never raise."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from training.utils import monitor


def test_the_signatures_are_those_of_the_mission() -> None:
    expected = {
        "calculate_mfu": ["flops", "compute_time", "gpu_peak_flops"],
        "get_gpu_peak_flops": [],
        "_create_dummy_batch_for_profiling": ["batch_size", "seq_length", "device"],
        "_get_actual_sequence_length": ["model", "batch_example"],
        "_estimate_forward_flops": ["model", "batch_size", "seq_length"],
        "_estimate_flops_fallback": ["model", "batch_example", "seq_length"],
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(monitor, name)).parameters) == parameters


def test_mfu_is_flops_over_peak_and_time() -> None:
    assert monitor.calculate_mfu(50.0, 0.5, 200.0) == pytest.approx(0.5)


def test_an_impossible_mfu_is_clamped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert monitor.calculate_mfu(300.0, 1.0, 200.0) == 1.0
    assert "1.500 is impossible" in caplog.text


@pytest.mark.parametrize("arguments", [(1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (-1.0, 1.0, 1.0), ("x", 1.0, 1.0)])
def test_failure_is_zero_with_the_reason_in_the_log(
    arguments: tuple[float, float, float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert monitor.calculate_mfu(*arguments) == 0.0
    assert "calculate_mfu returns 0.0" in caplog.text


def test_the_peak_of_this_machine_is_a_rate() -> None:
    assert monitor.get_gpu_peak_flops() > 1e9


def test_the_length_is_the_mean_of_the_mask() -> None:
    batch = {"input_ids": torch.ones(2, 6), "attention_mask": torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])}
    assert monitor._get_actual_sequence_length(nn.Linear(1, 1), batch) == pytest.approx(4.0)


def test_without_a_mask_the_length_is_that_of_the_ids() -> None:
    assert monitor._get_actual_sequence_length(nn.Linear(1, 1), {"input_ids": torch.ones(2, 6)}) == 6.0


class Seeing(nn.Module):
    """A stand-in with the attributes by which multimodal models are known."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(3, 5, bias=False)
        self.config = SimpleNamespace(image_token_id=9, vision_config=SimpleNamespace(spatial_merge_size=2))


def test_visual_tokens_are_added_when_the_text_has_no_place_for_them() -> None:
    # One image of 1 x 4 x 6 patches, merged 2 x 2: six tokens for a batch of two samples of five.
    batch = {"input_ids": torch.ones(2, 5), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    assert monitor._get_actual_sequence_length(Seeing(), batch) == pytest.approx(5 + 6 / 2)


def test_visual_tokens_that_the_text_already_holds_are_not_added_again() -> None:
    batch = {"input_ids": torch.tensor([[1, 9, 9, 1]]), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    assert monitor._get_actual_sequence_length(Seeing(), batch) == 4.0


def test_an_image_without_a_grid_counts_576_tokens() -> None:
    batch = {"input_ids": torch.ones(1, 5), "pixel_values": torch.zeros(1, 3, 8, 8)}
    assert monitor._get_actual_sequence_length(Seeing(), batch) == 5 + 576


def test_the_rule_of_thumb_is_2_for_text_and_2_point_5_for_models_that_see() -> None:
    text = nn.Linear(3, 5, bias=False)
    assert monitor._estimate_forward_flops(text, 2, 7) == 2 * 15 * 14
    assert monitor._estimate_forward_flops(Seeing(), 2, 7) == 2.5 * 15 * 14
    assert monitor._estimate_flops_fallback(text, {"x": torch.ones(2, 7)}, 7) == 3 * 2 * 15 * 14


def test_a_dummy_batch_is_text_that_any_vocabulary_has() -> None:
    batch = monitor._create_dummy_batch_for_profiling(2, 3, "cpu")
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), (2, 3)
    )
