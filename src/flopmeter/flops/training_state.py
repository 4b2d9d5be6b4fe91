"""Is the model still trained as it was when a step was counted? One number tells, in a fraction of a millisecond.

It changes when parameters are frozen or unfrozen, when activation checkpointing is switched, when modules come or go,
and when torch is told to use TF32 or not to. Left out: what forward code decides by flags of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from torch import nn

from flopmeter.flops.tf32 import tf32_families


def training_state(models: Iterable[nn.Module]) -> int:
    """The same in every process that trains the same model in the same way.

    To be called between two steps: an evaluation, and a loop that freezes one network while it trains another, put
    things back before a step is over.
    """
    modules = list(models)
    first = next((parameter for module in modules for parameter in module.parameters()), None)
    in_tf32 = " ".join(sorted(tf32_families(None if first is None else first.device)))
    flags: list[int] = []
    for module in modules:
        own = vars(module)  # asking a module for an attribute that it lacks costs microseconds, and there are hundreds
        # transformers and diffusers, timm, many others; outside of training transformers recomputes nothing
        if own.get("gradient_checkpointing") or own.get("grad_checkpointing") or own.get("use_checkpoint"):
            flags.append(2 + own["training"])
        for parameter in own["_parameters"].values():
            if parameter is not None:
                flags.append(parameter.requires_grad)
        flags.append(4)
        if own["_modules"]:
            modules += [child for child in own["_modules"].values() if child is not None]
    return crc32(bytes(flags), crc32(in_tf32.encode()))
