"""What kind of work is a kernel or a copy on the device, told by its name?

Names are all that a trace gives. Libraries that hide theirs (a Triton kernel with a name of its own, a cubin without
symbols) count as other compute.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache


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

_COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|oneccl|mscclpp|deep_ep|cross_device_reduce|(one|two)_shot_all_?reduce|multimem_|symm_mem",
    re.IGNORECASE,
)
_MATMUL = re.compile(
    r"(?<!fb)gemm|gemv|cutlass|cublas|xmma|wgmma|_mma_|hmma|cudnn.*(conv|engine|wgrad|dgrad|fprop)|wgrad|dgrad|fprop"
    r"|implicit_|winograd|scudnn|convolve|conv2d|conv3d|conv_depthwise|depthwise|fft2d|flash_(fwd|bwd)|fmha|attention"
    r"|nvjet|triton_tem|^Cijk_|_mm_kernel",
    re.IGNORECASE,
)
_TF32 = re.compile(r"tf32|tensorop_s\d*gemm|_s1688|s16816gemm_tf", re.IGNORECASE)
_PARAMETERS = re.compile(r"[<(].*", re.DOTALL)
_DECORATION = re.compile(r"\(anonymous namespace\)::|\bvoid |at::native::")
_GENERIC = re.compile(r"elementwise_kernel|reduce_kernel|multi_tensor_apply_kernel|\bKernel2?$")
_TELLING = re.compile(r"\w*Functor\w*|\b(?!gpu_)\w+_kernel_(?:cuda|impl)|\w+Ops?\b|cutlass_\w+|\w*gemm\w*")
_MAX_NAME = 100


@lru_cache(maxsize=65536)
def work_of(category: str, name: str) -> Work:
    """Compute, communication or copy; what a compute kernel is for, only its launch tells."""
    if category == "kernel":
        return Work.COMMUNICATION if _COMMUNICATION.search(name) else Work.OTHER_COMPUTE
    is_within = category == "gpu_memset" or "DtoD" in name or "Device -> Device" in name
    return Work.DEVICE_COPY if is_within else Work.HOST_COPY


@lru_cache(maxsize=65536)
def is_matmul(name: str) -> bool:
    """Whether a kernel multiplies matrices, convolves or attends, by the names that the usual libraries give."""
    return _MATMUL.search(name) is not None


@lru_cache(maxsize=65536)
def is_tf32(name: str) -> bool:
    """Whether a kernel on fp32 operands multiplies in TF32: cuBLAS, cuDNN and CUTLASS write it into the name."""
    return _TF32.search(name) is not None


@lru_cache(maxsize=65536)
def short_name(name: str) -> str:
    """A kernel's name without the parameters that make it hundreds of characters long.

    Of a kernel that runs whatever functor it is given, the functor is kept.
    """
    plain = _DECORATION.sub("", name)
    bare = _PARAMETERS.sub("", plain).strip() or name
    inner = _TELLING.search(plain, len(bare)) if _GENERIC.search(bare) else None
    return (f"{bare}<{inner.group()}>" if inner else bare)[:_MAX_NAME]
