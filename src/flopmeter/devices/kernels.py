"""Does a kernel on the device multiply matrices, in TF32, or talk to other ranks, and what is it called in short?

Names are all that a profiler gives. Libraries that hide theirs (a Triton kernel with a name of its own, a cubin without
symbols) count as neither.
"""

from __future__ import annotations

import re
from functools import lru_cache

_COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|oneccl|mscclpp|deep_ep|cross_device_reduce|(one|two)_shot_all_?reduce|multimem_|symm_mem",
    re.IGNORECASE,
)
_MATMUL = re.compile(
    r"(?<!fb)gemm|gemv|cutlass|cublas|xmma|wgmma|_mma_|hmma|cudnn.*(conv|engine|wgrad|dgrad|fprop)|wgrad|dgrad|fprop"
    r"|implicit_|winograd|scudnn|convol|conv\dd|conv_depthwise|depthwise|fft2d|flash_(fwd|bwd)|fmha|attention"
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
def is_communication(name: str) -> bool:
    """Whether a kernel talks to other ranks."""
    return _COMMUNICATION.search(name) is not None


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
