"""The training monitor under the names that existing loops import: a thin facade over flopmeter.

    from training.utils.monitor import TrainingMonitor, calculate_precise_mfu, get_gpu_peak_flops

As their contract says, these functions return 0.0 on failure and log the reason, and clamp MFU to 1.0 with a warning.
flopmeter itself does neither: there an unknown number is None or an error, and an impossible MFU stays visible.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, ParamSpec
from weakref import WeakKeyDictionary

import torch
from torch import nn

from flopmeter.devices import peak_flops
from flopmeter.errors import CountError
from flopmeter.flops.count import count_call, unwrap
from flopmeter.flops.estimate import estimate_flops
from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.inputs import build_inputs
from flopmeter.flops.prediction import Law, training_state
from flopmeter.flops.profiled import profile_flops
from flopmeter.flops.workload import needs_of, workload_of
from flopmeter.metrics import utilisation
from flopmeter.monitor import TrainingMonitor

__all__ = [
    "TrainingMonitor",
    "calculate_mfu",
    "calculate_mfu_with_profiler",
    "calculate_precise_mfu",
    "get_gpu_peak_flops",
    "profile_model_flops",
]

logger = logging.getLogger("flopmeter")

TEXT_COEFFICIENT = 2.0
MULTIMODAL_COEFFICIENT = 2.5
TRAINING_FACTOR = 3.0
TOKENS_PER_IMAGE = 576
MAX_COUNTED_SHAPES = 16
"""Smart mode counts this many shapes of a model; a run with more lengths than that gets the corrected estimate."""
_MODES = ("smart", "profiler", "estimate", "hybrid")
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
    mfu = utilisation({"all": flops}, {"all": gpu_peak_flops}, compute_time) or 0.0
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
def calculate_precise_mfu(
    model: nn.Module,
    batch_size: int,
    seq_length: float,
    step_time: float,
    measurement_mode: str = "smart",
    actual_flops: float | None = None,
) -> float:
    """MFU of a training step of `step_time` seconds on `batch_size` sequences of `seq_length` tokens.

    Args:
        measurement_mode: "smart" counts each shape once, without running the model; "estimate" does so within two
            seconds, and else reads the module tree;
            "profiler" runs the model at every call; "hybrid" is smart, because hardware counters tell utilisation.
        actual_flops: FLOPs of the step, when they are known: nothing is measured then.
    """
    if measurement_mode not in _MODES:
        raise ValueError(f"measurement_mode {measurement_mode!r} is none of {', '.join(_MODES)}")
    if step_time <= 0:
        raise ValueError(f"step_time={step_time}: a step takes more than 0 seconds")
    if actual_flops is None and measurement_mode == "profiler":
        actual_flops = _measure_flops_with_profiler(model, batch_size, seq_length)
    elif actual_flops is None:
        if measurement_mode == "hybrid":
            _say_once("hybrid mode counts FLOPs as smart mode does: hardware counters tell utilisation, not FLOPs")
        mode = "estimate" if measurement_mode == "estimate" else "smart"
        actual_flops = _counted_flop(model, batch_size, round(seq_length), mode)
    return calculate_mfu(actual_flops, step_time, get_gpu_peak_flops())


@_zero_on_failure
def calculate_mfu_with_profiler(model: nn.Module, batch_size: int, seq_length: float, step_time: float) -> float:
    """`calculate_precise_mfu` in profiler mode: the model runs once, on a batch that is made up."""
    return calculate_precise_mfu(model, batch_size, seq_length, step_time, "profiler")


@_zero_on_failure
def profile_model_flops(model: nn.Module, batch_example: Mapping[str, Any]) -> float:
    """Training FLOPs of a step on this batch, by the estimate: on shapes, nothing runs for real."""
    try:
        return estimate_flops(model, batch_example).model_flop
    except CountError as error:
        logger.warning("no estimate for %s, so the rule of thumb is used: %s", type(model).__name__, error)
        return _estimate_flops_fallback(model, batch_example, _get_actual_sequence_length(model, batch_example))


@_zero_on_failure
def _measure_flops_with_profiler(model: nn.Module, batch_size: int, seq_length: float) -> float:
    """Forward and backward FLOPs, from one real run under torch's profiler that leaves the model as it was."""
    return profile_flops(model, _inputs(model, batch_size, round(seq_length))).model_flop


_counted: WeakKeyDictionary[nn.Module, dict[tuple[str, int], dict[tuple[int, int], FlopCount]]] = WeakKeyDictionary()


def _counted_flop(model: nn.Module, batch_size: int, seq_length: int, mode: str) -> float:
    """Counted once for each shape and each way of training, then remembered as long as the model lives.

    A run with more shapes than are kept gets the others from the nearest one, by what its work grows with.
    """
    known = _counted.setdefault(model, {}).setdefault((mode, training_state([model])), {})
    shape = batch_size, seq_length
    if shape not in known:
        inputs = _inputs(model, *shape)
        if len(known) >= MAX_COUNTED_SHAPES:
            count = known[min(known, key=lambda own: abs(own[1] - seq_length))]
            if count.workload is not None:
                return sum(Law.of(count, count.workload).at(workload_of(inputs, needs_of(model))).model.values())
        try:  # called inside training, so the model is never run for real: one that shapes do not tell of is estimated
            known[shape] = (
                count_call(model, (), inputs, may_run=False) if mode == "smart" else estimate_flops(model, inputs)
            )
        except CountError as error:
            if mode != "smart":
                raise
            logger.warning("the FLOPs are estimated instead: %s", error)
            known[shape] = estimate_flops(model, inputs)
    return known[shape].model_flop


@cache
def _say_once(message: str) -> None:
    logger.warning(message)


def _inputs(model: nn.Module, batch_size: int, seq_length: int) -> dict[str, Any]:
    """What the model is called with; a plain text batch where neither config nor layers tell."""
    try:
        return build_inputs(unwrap(model), batch_size, seq_length)
    except CountError:
        return _create_dummy_batch_for_profiling(batch_size, seq_length, "cpu")


@_zero_on_failure
def _get_actual_sequence_length(model: nn.Module, batch_example: Mapping[str, Any]) -> float:
    """Mean tokens per sample, padding left out, with the visual tokens that the text does not already hold."""
    mask: torch.Tensor | None = batch_example.get("attention_mask")
    tokens: torch.Tensor | None = mask if mask is not None else batch_example.get("input_ids")
    if tokens is None:
        raise ValueError("the batch has neither attention_mask nor input_ids")
    text = float(tokens.size(1)) if mask is None else float(mask.sum(1).float().mean())
    # Visual tokens, unless the text has placeholders for them.
    config = getattr(model, "config", None)
    placeholder = getattr(config, "image_token_id", None)
    input_ids, grid, pixels = (batch_example.get(name) for name in ("input_ids", "image_grid_thw", "pixel_values"))
    visual = 0.0
    if placeholder is not None and input_ids is not None and bool((input_ids == placeholder).any()):
        return text
    if grid is not None:
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 2)
        visual = float(grid.prod(-1).sum()) / merge**2
    elif pixels is not None:
        visual = float(TOKENS_PER_IMAGE * pixels.size(0))
    return text + visual / tokens.size(0)


@_zero_on_failure
def _estimate_forward_flops(model: nn.Module, batch_size: int, seq_length: float) -> float:
    """The rule of thumb, as a last resort: 2 x parameters x tokens, 2.5 for models that see.

    Leaves out attention, and counts embeddings, frozen parts and idle experts as if they worked.
    """
    sees = getattr(getattr(model, "config", None), "vision_config", None) is not None
    sees = sees or any(name.split(".")[-1] in _VISION_ATTRIBUTES for name, _ in model.named_modules())
    coefficient = MULTIMODAL_COEFFICIENT if sees else TEXT_COEFFICIENT
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
