"""Which number format did a matmul run in, as a column of the peak table?

torch is only looked at when the process has imported it already.
"""

from __future__ import annotations

import sys
from types import ModuleType

from flopmeter.errors import ConfigError

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")

_ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "complex128": "fp64",  # counted as real multiply-adds, which run in fp64
    "float32": "fp32",
    "float": "fp32",
    "complex64": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2": "fp8",
    "float8_e5m2fnuz": "fp8",
    "mxfp8": "fp8",
    "float4_e2m1fn_x2": "fp4",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
}


def normalise_dtype(dtype: object) -> str:
    """The table's name ("bf16") for a torch dtype or for any usual spelling of one.

    Raises:
        ConfigError: for formats that have no matmul peak, such as bool and int64.
    """
    name = str(dtype).strip().casefold().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise ConfigError(f"dtype {str(dtype)!r} has no matmul peak: use one of {', '.join(DTYPES)}")
    return name


def default_dtype() -> str:
    """What torch gives a new floating-point tensor; fp32 where torch is not loaded."""
    torch = sys.modules.get("torch")
    return "fp32" if torch is None else normalise_dtype(torch.get_default_dtype())


def uses_tf32() -> bool:
    """True when torch runs fp32 matmuls on CUDA in TF32, whichever of its interfaces the user chose; never raises.

    The newer interface is asked first: once it has been used, reading the older ones raises.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    for read in (_fp32_precision, _allow_tf32, _matmul_precision):
        try:
            answer = read(torch)
        except (AttributeError, RuntimeError):
            continue
        if answer is not None:
            return answer
    return False


def _fp32_precision(torch: ModuleType) -> bool | None:
    precision = torch.backends.cuda.matmul.fp32_precision
    return None if precision == "none" else bool(precision == "tf32")


def _allow_tf32(torch: ModuleType) -> bool | None:
    return bool(torch.backends.cuda.matmul.allow_tf32)


def _matmul_precision(torch: ModuleType) -> bool | None:
    return bool(torch.get_float32_matmul_precision() != "highest")
