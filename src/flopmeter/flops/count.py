"""What would one step of this model cost? Counting beside the training run, if possible without running anything.

    count_flops(model, (8, 2048)).model_flop
    count_flops(model, batch, training=False).forward_flop

The model runs on shapes only (`only_shapes`): no weight is read, copied or moved, and a 70B model needs no memory. A
model that cannot run so (code that looks at values which depend on weights) is run for real if the batch is small, and
the result says so; never inside training, and never one that talks to other ranks. Either way the model, its gradients,
buffers, attributes, hooks and flags, and the random state are as before (`untouched` says what is left out).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from flopmeter.errors import CountError
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.frames import active_autocast
from flopmeter.flops.inputs import build_inputs
from flopmeter.flops.observation import Observation
from flopmeter.flops.on_shapes import CollectiveError, for_real, only_shapes, shape_only_state, untouched
from flopmeter.flops.workload import unwrap as unwrap
from flopmeter.torch_compat import TOO_OLD, reparametrize_module, tree_iter, tree_map_only

MAX_REAL_ELEMENTS = 1 << 14
"""What a real run takes at most: tokens, or numbers by 256."""

_EXPERTS = "_experts_implementation"
_SHAPE_ONLY_EXPERTS = "batched_mm"


def count_flops(
    model: nn.Module,
    batch: Mapping[str, Any] | Sequence[Any] | torch.Tensor,
    training: bool = True,
    convention: Convention = "exact",
) -> FlopCount:
    """Count the FLOPs of one forward (and backward) pass.

    Args:
        batch: What the model is called with: keyword arguments, positional arguments, one tensor, or two whole numbers
            (batch size, length), from which inputs are built.
        training: Forward and backward; False counts the forward pass alone.

    Raises:
        CountError: The model can be run neither on shapes nor for real; the message has both reasons.
    """
    args, kwargs = call_arguments(unwrap(model), batch)
    return count_call(model, args, kwargs, training, convention)


@torch.inference_mode(False)
def count_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    training: bool = True,
    convention: Convention = "exact",
    *,
    may_run: bool = True,
    limit: Callable[[], None] | None = None,
) -> FlopCount:
    """`count_flops` for the call `model(*args, **kwargs)`.

    Args:
        limit: Called after each operator; raises CountError where the count takes too much.
        may_run: Run the model for real where it cannot be counted on shapes. Inside training it must not: other ranks
            do not run with this one, and the run takes memory and time.
    """
    if TOO_OLD is not None:
        raise CountError(TOO_OLD)
    target = unwrap(model)
    inputs: _Inputs = args, dict(kwargs)
    observed = partial(_observed, target, training=training, convention=convention, limit=limit)
    attempts: dict[str, Callable[[], FlopCount]] = {
        "meta": lambda: _count_on_shapes(target, inputs, observed),
        "meta, inputs too": lambda: _count_on_shapes(target, _without_values(inputs), observed),
    }
    configs = {id(c): c for m in target.modules() if hasattr(c := getattr(m, "config", None), _EXPERTS)}
    if configs:
        attempts["meta, experts as batched products"] = lambda: _count_with_other_experts(
            configs, lambda: _count_on_shapes(target, inputs, observed)
        )
    if may_run and not any(tensor.is_meta for tensor in target.parameters()):
        attempts["real"] = lambda: _count_for_real(target, inputs, observed)
    reasons: dict[str, str] = {}
    for method, attempt in attempts.items():
        try:
            count = attempt()
        except CollectiveError as error:
            raise CountError(f"the FLOPs of {type(target).__name__} cannot be counted: {error}") from error
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything; the next way is tried
            reasons.setdefault(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", method)
            continue
        fell_back = tuple(f"Could not be counted as {first}: {reason}" for reason, first in reasons.items())
        return replace(count, method=method + count.method, left_out=(*count.left_out, *fell_back))
    why = [f"{method}: {reason}" for reason, method in reasons.items()]
    if type(target).__module__.startswith("transformers."):
        version = str(sys.modules["transformers"].__version__)
        if int(version.partition(".")[0]) < 5:
            why.append(f"this is transformers {version}, and mixtures of experts need transformers 5")
    raise CountError(f"the FLOPs of {type(target).__name__} cannot be counted: {'; '.join(why)}")


def call_arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with, by position and by name, from what `count_flops` takes as a batch."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        if len(batch) == 2 and all(isinstance(size, int) and not isinstance(size, bool) for size in batch):
            return (), build_inputs(model, batch[0], batch[1])
        return tuple(batch), {}
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    raise CountError(f"a batch is a mapping, a sequence or a tensor, not {type(batch).__name__}")


_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with, by position and by name."""


def _count_on_shapes(model: nn.Module, inputs: _Inputs, observed: Callable[..., FlopCount]) -> FlopCount:
    tensors, lent = shape_only_state(model), tree_map_only(torch.Tensor, _lent, inputs)
    with untouched(model, _lent), only_shapes():
        autocast = active_autocast()  # it does not know of tensors without values
        return observed(tensors, lent, autocast_to=str(autocast[1]).removeprefix("torch.") if autocast else None)


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an input with its values, on the CPU, unless a gradient is wanted for it: gradients have none."""
    if tensor.requires_grad:
        return torch.empty_like(tensor, device="meta", requires_grad=True)
    return tensor if tensor.is_meta else tensor.to("cpu", copy=True)


def _without_values(inputs: _Inputs) -> _Inputs:
    """For models that want gradients of their input, as wav2vec2 does. Integers are ids and masks, and keep theirs."""
    lent: _Inputs = tree_map_only(
        torch.Tensor, lambda t: torch.empty_like(t, device="meta") if t.is_floating_point() else t, inputs
    )
    return lent


def _count_with_other_experts(configs: Mapping[int, Any], count: Callable[[], FlopCount]) -> FlopCount:
    """Experts that loop over the tokens each received need values; as one batched product they need none."""
    before = {key: getattr(config, _EXPERTS) for key, config in configs.items()}
    try:
        for config in configs.values():
            setattr(config, _EXPERTS, _SHAPE_ONLY_EXPERTS)
        return count()
    finally:
        for key, config in configs.items():
            setattr(config, _EXPERTS, before[key])


def _count_for_real(model: nn.Module, inputs: _Inputs, observed: Callable[..., FlopCount]) -> FlopCount:
    """Run the model itself, on copies of its buffers and of a small batch."""
    sizes = [t.numel() // (256 if t.is_floating_point() else 1) for t in tree_iter(inputs) if torch.is_tensor(t)]
    if max(sizes, default=0) > MAX_REAL_ELEMENTS:
        raise CountError("it would have to be run for real, which takes a smaller batch")
    tensors, lent = for_real(model, inputs)
    with untouched(model):
        return observed(tensors, lent)


def _observed(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    inputs: _Inputs,
    *,
    training: bool,
    convention: Convention,
    limit: Callable[[], None] | None,
    autocast_to: str | None = None,
) -> FlopCount:
    observation = Observation([model], is_training_step=False, limit=limit)
    # Backward runs inside too: checkpointing calls the model again from there.
    with torch.set_grad_enabled(training), reparametrize_module(model, dict(tensors), tie_weights=True):
        observation.start()
        try:
            loss = loss_of(model(*inputs[0], **inputs[1]))
            if training and loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            observation.stop()
        if autocast_to:
            is_cast = ("float32", "tf32", "float16", "bfloat16")
            observation.calls = [
                call._replace(dtype=autocast_to) if call.dtype in is_cast and "fft" not in call.op else call
                for call in observation.calls
            ]
        count = observation.result(convention)
        return replace(count, method=count.method.removeprefix("observed"))


def loss_of(out: Any) -> torch.Tensor | None:
    """The model's own loss, or the sum of all it returns; None when nothing can be trained."""
    own = getattr(out, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own.sum()
    parts = [t.sum() for t in _outputs(out) if t.requires_grad and t.is_floating_point()]
    return torch.stack([part.to(parts[0].dtype) for part in parts]).sum() if parts else None


def _outputs(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, Mapping):
        for value in out.values():
            yield from _outputs(value)
    elif isinstance(out, (list, tuple)):
        for value in out:
            yield from _outputs(value)
    elif is_dataclass(out) and not isinstance(out, type):
        for field in fields(out):
            yield from _outputs(getattr(out, field.name))
