"""Which float32 products does a GPU compute in TF32?

Torch allows it for convolutions and recurrences from the start, and for matmuls only where the user says so, at any
time. On a GPU that has the units (Ampere and newer), held against the fp32 peak such work would look eight times as
good as it is.
"""

from __future__ import annotations

import torch

from flopmeter.devices import uses_tf32

MATMUL = "matmul"
"""Stands for every family that cuDNN does not rule."""
_SETTINGS = {"convolution": "conv", "recurrent": "rnn"}
"""Family of operators to the part of `torch.backends.cudnn` that rules it."""


def tf32_families(device: torch.device | None) -> frozenset[str]:
    """The families of operators whose float32 products run in TF32 on this device. Starts no CUDA."""
    if device is None or device.type != "cuda" or torch.version.cuda is None:
        return frozenset()
    if not torch.cuda.is_initialized() or torch.cuda.get_device_capability(device) < (8, 0):  # type: ignore[no-untyped-call]
        return frozenset()
    in_cudnn = (family for family, part in _SETTINGS.items() if _allows_tf32(part))
    return frozenset((*in_cudnn, MATMUL) if uses_tf32() else in_cudnn)


def _allows_tf32(part: str) -> bool:
    cudnn = torch.backends.cudnn
    try:
        return bool(getattr(cudnn, part).fp32_precision == "tf32")  # tells of the older setting as well
    except AttributeError:
        return bool(cudnn.allow_tf32)


def product_dtype(dtype: str, family: str, families: frozenset[str]) -> str:
    """What a product of this family runs in, given what `tf32_families` says."""
    return "tf32" if dtype == "float32" and (family if family in _SETTINGS else MATMUL) in families else dtype
