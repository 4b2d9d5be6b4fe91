"""How many FLOPs will a step take, told from the module tree alone? No forward pass, no allocation, any batch.

    estimate_flops(model, (8, 2048)).model_flop
    plan = plan_of(model)                            # once, in milliseconds
    plan.evaluate(workload_of(batch, plan.needs))    # every step, in microseconds

Linears and convolutions by how often they are called, attention by its pairs, experts by their top k, backward by what
is trained: sizes are read from the modules and settings from their config, never from a table of models. What the tree
does not show (products written out in forward code) is not seen; `left_out` names what was noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from flopmeter.errors import CountError
from flopmeter.flops.estimate.amounts import Pairs, Rows
from flopmeter.flops.estimate.leaves import dtype_of
from flopmeter.flops.estimate.plan import EstimatePlan, Term, needs_of
from flopmeter.flops.estimate.structure import is_sequence_first, reads_of
from flopmeter.flops.estimate.walk import Walk
from flopmeter.flops.flop_count import Convention, FlopCount
from flopmeter.flops.inputs import build_inputs
from flopmeter.flops.side_count import unwrap
from flopmeter.flops.tf32 import tf32_families
from flopmeter.flops.workload import Workload, workload_of

__all__ = ["EstimatePlan", "estimate_flops", "plan_of"]

RULE_OF_THUMB = "estimate (rule of thumb, low confidence)"
MAX_UNREAD_SHARE = 0.5
"""With more of its parameters unread than this, a model's structure counts as unknown."""

_SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func", "_active_adapter")
_plans: WeakKeyDictionary[nn.Module, tuple[int, EstimatePlan]] = WeakKeyDictionary()


def estimate_flops(
    model: nn.Module,
    workload: Workload | tuple[int, int] | Mapping[str, Any],
    training: bool = True,
    convention: Convention = "exact",
) -> FlopCount:
    """Estimate the FLOPs of one step.

    Args:
        workload: What the step is given: a Workload, a batch, or (batch size, length) for sequences without padding.
        training: Forward and backward; False for the forward pass alone.

    Raises:
        CountError: The model has no parameters, or (batch size, length) does not tell what it is called with.
    """
    model = unwrap(model)
    plan = plan_of(model)
    if isinstance(workload, tuple):
        workload = _uniform_workload(model, plan, *workload)
    elif isinstance(workload, Mapping):
        workload = workload_of(workload, plan.needs)
    count = plan.evaluate(workload, training, convention, _autocast_dtype(model))
    return replace(count, by_module=plan.by_module(workload, training, convention))


def plan_of(model: nn.Module) -> EstimatePlan:
    """The coefficients of a model. Kept until what is trained, cast, replaced or checkpointed changes."""
    model = unwrap(model)
    state = _state_of(model)
    known = _plans.get(model)
    if known is None or known[0] != state:
        known = _plans[model] = (state, _make_plan(model))
    return known[1]


def _state_of(model: nn.Module) -> int:
    """A number that changes with all that a plan depends on and that users change: what is trained, cast, wrapped."""
    first = next(model.parameters(), None)
    parts: list[object] = [tf32_families(None if first is None else first.device)]
    modules = [model]
    for module in modules:
        modules += [child for child in module._modules.values() if child is not None]
        parts += [(id(p), p.requires_grad, p.dtype) for p in module._parameters.values() if p is not None]
        own = vars(module)
        parts += [str(own[name]) for name in _SWITCHES if name in own]
    return hash(tuple(parts))


def _make_plan(model: nn.Module) -> EstimatePlan:
    num_parameters = sum(p.numel() for p in model.parameters())
    if not num_parameters:
        raise CountError(f"{type(model).__name__} has no parameters: there is nothing to estimate its FLOPs from")
    try:
        walk = Walk(model)
    except Exception as error:  # noqa: BLE001 - attributes of a user's model may raise anything; the reason is told
        return _rule_of_thumb(model, num_parameters, f"{type(error).__name__}: {error}")
    terms = tuple(walk.terms)
    if not terms or walk.num_unread > MAX_UNREAD_SHARE * num_parameters:
        return _rule_of_thumb(model, num_parameters, "most of its parameters belong to no layer that is known here")
    reads = reads_of(model, attends=any(isinstance(term.amount, Pairs) for term in terms))
    needs = replace(needs_of(terms), reads=reads, is_sequence_first=is_sequence_first(model))
    return EstimatePlan(terms=terms, left_out=tuple(walk.left_out), needs=needs)


def _rule_of_thumb(model: nn.Module, num_parameters: int, reason: str) -> EstimatePlan:
    """2 FLOPs a parameter and token, 2.5 for models that also see or hear; training takes three times that."""
    config = getattr(model, "config", None)
    is_multimodal = any(hasattr(config, name) for name in ("vision_config", "audio_config"))
    coefficient = 2.5 if is_multimodal else 2.0
    dtype = next((name for p in model.parameters() if (name := dtype_of(p))), "float32")
    term = Term("", dtype, Rows("anything"), coefficient * num_parameters, num_grads=2)
    rule = f"{coefficient:g} FLOPs a parameter and token, three times that in training"
    told = f"{type(model).__name__} has no structure that we can read ({reason}): {rule}"
    return EstimatePlan(terms=(term,), left_out=(told,), method=RULE_OF_THUMB)


def _uniform_workload(model: nn.Module, plan: EstimatePlan, batch_size: int, length: int) -> Workload:
    """Sequences of one length without padding, with the images that `count_flops` would build for them."""
    sources = {term.amount.source for term in plan.terms if isinstance(term.amount, Rows)}
    if not sources & {"dense", "patches"}:
        return Workload.of_lengths([length] * batch_size, needs=plan.needs)
    return workload_of(build_inputs(model, batch_size, length), plan.needs)


def _autocast_dtype(model: nn.Module) -> str | None:
    """What autocast would compute in here and now."""
    device = next(model.parameters()).device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
