"""What kind of work is a kernel or a copy on the device, and what is it called in short?"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

from flopmeter.devices.kernels import is_communication


class Work(IntEnum):
    """What the device is doing at an instant; where several things run at once, the first of this list is charged."""

    DATA = 0
    """Fetching a batch, on a device that is the host itself."""
    MATMUL = 1
    RECOMPUTE = 2
    OPTIMIZER = 3
    OTHER_COMPUTE = 4
    """Element-wise work, norms, softmax, embeddings, sorting."""
    COMMUNICATION = 5
    DEVICE_COPY = 6
    """Copies and fills within the device's memory."""
    HOST_COPY = 7
    """Copies between host and device, or between devices."""
    IDLE = 8


COMPUTE = (Work.MATMUL, Work.RECOMPUTE, Work.OPTIMIZER, Work.OTHER_COMPUTE)

_PARAMETERS = re.compile(r"[<(].*", re.DOTALL)
_DECORATION = re.compile(r"\(anonymous namespace\)::|\bvoid |at::native::")
_GENERIC = re.compile(r"elementwise_kernel|reduce_kernel|multi_tensor_apply_kernel|\bKernel2?$")
_TELLING = re.compile(r"\w*Functor\w*|\b(?!gpu_)\w+_kernel_(?:cuda|impl)|\w+Ops?\b|cutlass_\w+|\w*gemm\w*")
_MAX_NAME = 100


@lru_cache(maxsize=65536)
def work_of(category: str, name: str) -> Work:
    """Compute, communication or copy; what a compute kernel is for, only its launch tells."""
    if category == "kernel":
        return Work.COMMUNICATION if is_communication(name) else Work.OTHER_COMPUTE
    is_within = category == "gpu_memset" or "DtoD" in name or "Device -> Device" in name
    return Work.DEVICE_COPY if is_within else Work.HOST_COPY


@lru_cache(maxsize=65536)
def short_name(name: str) -> str:
    """A kernel's name without the parameters that make it hundreds of characters long.

    Of a kernel that runs whatever functor it is given, the functor is kept.
    """
    plain = _DECORATION.sub("", name)
    bare = _PARAMETERS.sub("", plain).strip() or name
    inner = _TELLING.search(plain, len(bare)) if _GENERIC.search(bare) else None
    return (f"{bare}<{inner.group()}>" if inner else bare)[:_MAX_NAME]
