"""The training monitor under the names that existing loops import: a thin facade over flopmeter.

    from training.utils.monitor import TrainingMonitor, calculate_mfu, get_gpu_peak_flops

As their contract says, these functions return 0.0 on failure and log the reason, and clamp MFU to 1.0 with a warning.
flopmeter itself does neither: there an unknown number is None or an error, and an impossible MFU stays visible.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import nn

from flopmeter.devices import peak_flops
from flopmeter.monitor import TrainingMonitor

__all__ = ["TrainingMonitor", "calculate_mfu", "get_gpu_peak_flops"]

logger = logging.getLogger("flopmeter")

TEXT_COEFFICIENT = 2.0
MULTIMODAL_COEFFICIENT = 2.5
TRAINING_FACTOR = 3.0
TOKENS_PER_IMAGE = 576
_VISION_ATTRIBUTES = ("visual", "vision_tower", "vision_model", "vision_encoder")

_P = ParamSpec("_P")


def _zero_on_failure(function: Callable[_P, float]) -> Callable[_P, float]:
    @wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> float:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the contract of these functions: 0.0, and the reason in the log
            logger.warning("%s returns 0.0: %s: %s", function.__name__, type(error).__name__, error)
            return 0.0

    return guarded


@_zero_on_failure
def calculate_mfu(flops: float, compute_time: float, gpu_peak_flops: float) -> float:
    """FLOPs over what the peak (FLOP/s) allows in `compute_time` seconds, clamped to 1.0 with a warning."""
    if flops < 0 or compute_time <= 0 or gpu_peak_flops <= 0:
        raise ValueError(f"flops={flops}, compute_time={compute_time}, gpu_peak_flops={gpu_peak_flops}")
    mfu = flops / (compute_time * gpu_peak_flops)
    if mfu > 1:
        logger.warning("MFU %.3f is impossible and shown as 1.0: the peak, the FLOPs or the time is wrong", mfu)
    return min(mfu, 1.0)


@_zero_on_failure
def get_gpu_peak_flops() -> float:
    """Peak of the current device in FLOP/s: bf16 on an accelerator that has it, fp32 on a CPU."""
    if torch.accelerator.is_available():
        return peak_flops(dtype="bf16", may_initialise=True).flop_per_s
    return peak_flops("cpu", "fp32").flop_per_s


@_zero_on_failure
def _get_actual_sequence_length(model: nn.Module, batch_example: Mapping[str, Any]) -> float:
    """Mean tokens per sample, padding left out, with the visual tokens that the text does not already hold."""
    input_ids, mask = batch_example.get("input_ids"), batch_example.get("attention_mask")
    if mask is not None:
        text = float(mask.sum(1).float().mean())
    elif input_ids is not None:
        text = float(input_ids.size(1))
    else:
        raise ValueError("the batch has neither attention_mask nor input_ids")
    samples = (mask if mask is not None else input_ids).size(0)
    return text + _missing_visual_tokens(model, batch_example) / samples


def _missing_visual_tokens(model: nn.Module, batch: Mapping[str, Any]) -> float:
    """Visual tokens of the batch, unless its text has placeholders for them."""
    config = getattr(model, "config", None)
    placeholder = getattr(config, "image_token_id", None)
    input_ids, grid, pixels = (batch.get(name) for name in ("input_ids", "image_grid_thw", "pixel_values"))
    if placeholder is not None and input_ids is not None and bool((input_ids == placeholder).any()):
        return 0.0
    if grid is not None:
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 2)
        return float(grid.prod(-1).sum()) / merge**2
    return float(TOKENS_PER_IMAGE * pixels.size(0)) if pixels is not None else 0.0


def _is_multimodal(model: nn.Module) -> bool:
    has_config = getattr(getattr(model, "config", None), "vision_config", None) is not None
    return has_config or any(name.split(".")[-1] in _VISION_ATTRIBUTES for name, _ in model.named_modules())


@_zero_on_failure
def _estimate_forward_flops(model: nn.Module, batch_size: int, seq_length: float) -> float:
    """The rule of thumb, as a last resort: 2 x parameters x tokens, 2.5 for models that see.

    Leaves out attention, and counts embeddings, frozen parts and idle experts as if they worked.
    """
    coefficient = MULTIMODAL_COEFFICIENT if _is_multimodal(model) else TEXT_COEFFICIENT
    return coefficient * sum(p.numel() for p in model.parameters()) * batch_size * seq_length


@_zero_on_failure
def _estimate_flops_fallback(model: nn.Module, batch_example: Mapping[str, Any], seq_length: float) -> float:
    """Training FLOPs by the rule of thumb: three times the forward pass."""
    first = next(value for value in batch_example.values() if isinstance(value, torch.Tensor))
    return TRAINING_FACTOR * _estimate_forward_flops(model, first.size(0), seq_length)


def _create_dummy_batch_for_profiling(
    batch_size: int, seq_length: int, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """A text batch of ones: token ids that every vocabulary has, nothing padded, labels to learn from."""
    input_ids = torch.ones((batch_size, seq_length), dtype=torch.long, device=device)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": input_ids.clone()}
