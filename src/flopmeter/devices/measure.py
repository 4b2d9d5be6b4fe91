"""How fast does this device multiply matrices when nothing else is asked of it?

A sweep over square and LLM-like shapes, in rounds, within a time budget. On a CPU the best figure is kept between runs,
because the instruction set's promise and the machine's performance can differ either way. Left out: formats that
`torch.mm` does not take (fp8, fp4, int8), and cards that slow down only after minutes of load.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flopmeter.devices.cpu import Cpu, num_threads, read_cpu
from flopmeter.devices.table import default_dtype, normalise_dtype, uses_tf32
from flopmeter.errors import ConfigError, MissingLibraryError, UnknownDeviceError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int, int]
"""Rows, columns and inner length of one product: 2 x m x n x k FLOP."""

_CPU_SHAPES: tuple[Shape, ...] = (
    (512, 512, 512),
    (1024, 1024, 1024),
    (512, 3072, 768),
    (1024, 4096, 1024),
    (2048, 2048, 2048),
)
_ACCELERATOR_SHAPES: tuple[Shape, ...] = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 16384, 16384),
    (8192, 4096, 14336),
    (8192, 28672, 4096),
    (16384, 8192, 8192),
)
_TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ROUNDS = 3  # a shared machine has quiet moments; three chances per shape find one
_BURST_S = 0.02
_SLOWEST = 6.0  # a shape whose single product would take this many times its share of the budget is left out

_measured_here: dict[str, float] = {}  # serves this process when the cache file cannot be written


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeRate:
    """The best rate seen for one shape."""

    shape: Shape
    flop_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What a sweep found."""

    device: str
    """As torch spells it ("cuda:0")."""
    dtype: str
    best_flop_per_s: float
    best_shape: Shape
    typical_flop_per_s: float
    """Median over the shapes of each shape's best."""
    shapes: tuple[ShapeRate, ...]
    skipped: tuple[Shape, ...]
    """Shapes that did not fit into memory or into the time budget."""
    elapsed_s: float


def measure_peak(
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    budget_s: float = 8.0,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Sweep matmul shapes on a device of this machine; no global flag or random state of torch is touched.

    Args:
        device: As torch spells it; None is the accelerator at hand, else the CPU.
        budget_s: Aimed-at length of the sweep; one product of the slowest shape may run over.
        progress: Called with (steps done, steps in all).
    """
    if not 0 < budget_s < math.inf:
        raise ConfigError(f"budget_s must be a positive number of seconds, not {budget_s!r}")
    sweep = _Sweep(device, default_dtype() if dtype is None else normalise_dtype(dtype))
    start_s = time.perf_counter()
    steps = [shape for _ in range(_ROUNDS) for shape in sweep.shapes]
    for done, shape in enumerate(steps, start=1):
        if time.perf_counter() - start_s < budget_s or not sweep.best:
            sweep.run(shape, share_s=budget_s / len(steps))
        if progress is not None:
            progress(done, len(steps))
    result = sweep.result(elapsed_s=time.perf_counter() - start_s)
    if sweep.device.type == "cpu":
        remember(result.dtype, result.best_flop_per_s)
    return result


class _Sweep:
    """The operands of one shape at a time, and the best rate of each shape so far."""

    def __init__(self, device: object, dtype: str) -> None:
        try:
            self.torch: Any = import_module("torch")
        except ImportError:
            raise MissingLibraryError("torch", needed_for="measuring a peak", extra="torch") from None
        self.device: torch.device = self._device(device)
        self.dtype = self._runnable(dtype)
        self.shapes = _CPU_SHAPES if self.device.type == "cpu" else _ACCELERATOR_SHAPES
        self.best: dict[Shape, float] = {}

    def _device(self, device: object) -> Any:
        if device is None:
            accelerator = self.torch.accelerator
            device = accelerator.current_accelerator() if accelerator.is_available() else "cpu"
        try:
            found = self.torch.device(device)
        except RuntimeError:
            raise ConfigError(
                f"a measurement runs on a device of this machine, such as cpu, not on {device!r}"
            ) from None
        backend = getattr(self.torch, found.type, None)
        count = 0 if backend is None else backend.device_count()
        if (found.index or 0) >= count:
            raise UnknownDeviceError(f"torch sees {count} {found.type} devices here, so {device} cannot be measured")
        return found

    def _runnable(self, dtype: str) -> str:
        """The format that `torch.mm` will really compute in."""
        if dtype not in _TORCH_NAMES:
            raise ConfigError(f"{dtype} cannot be measured with torch.mm: use one of {', '.join(_TORCH_NAMES)}")
        runs_tf32 = self.device.type == "cuda" and uses_tf32() and self._has_tf32_units()
        if dtype == "tf32" and not runs_tf32:
            raise ConfigError(f"tf32 cannot be measured: torch is not set to TF32, or {self.device} has no such units")
        return "tf32" if dtype == "fp32" and runs_tf32 else dtype

    def _has_tf32_units(self) -> bool:
        return bool(self.torch.cuda.get_device_capability(self.device) >= (8, 0))  # Ampere, or CDNA as ROCm reports it

    def run(self, shape: Shape, share_s: float) -> None:
        """Multiply this shape again and again for its share of the time, and keep the best rate."""
        flop = 2 * math.prod(shape)
        fastest = max(self.best.values(), default=math.inf)
        if shape not in self.best and flop / fastest > _SLOWEST * share_s:
            return
        try:
            times_s = self._times_s(shape, share_s)
        except (RuntimeError, TypeError, AssertionError, MemoryError) as error:  # torch's ways to refuse a device
            if "memory" in str(error).lower() or isinstance(error, MemoryError):
                return
            raise UnknownDeviceError(f"{self.device} cannot multiply in {self.dtype}: {_first_line(error)}") from None
        self.best[shape] = max(flop / min(times_s), self.best.get(shape, 0.0))

    def _times_s(self, shape: Shape, share_s: float) -> list[float]:
        end_s = time.perf_counter() + share_s
        left, right, out = self._operands(shape)

        def product() -> None:
            self.torch.mm(left, right, out=out)

        product()  # the first call picks kernels and wakes threads
        once_s = self._timed(product, 1)
        # Short kernels run in bursts, so that the gap before the first one does not count.
        burst = 1 if self.device.type == "cpu" else max(1, min(50, int(_BURST_S / once_s)))
        times_s = [once_s]
        while time.perf_counter() < end_s:
            times_s.append(self._timed(product, burst))
        return times_s

    def _operands(self, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random, because zeros flatter a GPU; from a generator of our own, to leave the user's random state alone."""
        m, n, k = shape
        seeded = self.torch.Generator(device=self.device).manual_seed(0)
        like = {"device": self.device, "dtype": getattr(self.torch, _TORCH_NAMES[self.dtype])}
        left = self.torch.randn(m, k, generator=seeded, **like)
        right = self.torch.randn(n, k, generator=seeded, **like).t()  # as nn.Linear stores its weight
        return left, right, self.torch.empty(m, n, **like)

    def _timed(self, product: Callable[[], None], repeats: int) -> float:
        """Seconds of one product, over a burst of `repeats`."""
        if self.device.type == "cuda":
            return self._timed_by_events(product, repeats)
        self._wait()
        start_s = time.perf_counter()
        for _ in range(repeats):
            product()
        self._wait()
        return (time.perf_counter() - start_s) / repeats

    def _wait(self) -> None:
        if self.device.type != "cpu":
            self.torch.accelerator.synchronize(self.device)

    def _timed_by_events(self, product: Callable[[], None], repeats: int) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.torch.cuda.device(self.device):
            start.record()
            for _ in range(repeats):
                product()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats

    def result(self, elapsed_s: float) -> Measurement:
        if not self.best:
            raise UnknownDeviceError(f"no matmul shape fitted into the memory of {self.device}: free some and repeat")
        best_shape = max(self.best, key=self.best.__getitem__)
        return Measurement(
            device=str(self.device),
            dtype=self.dtype,
            best_flop_per_s=self.best[best_shape],
            best_shape=best_shape,
            typical_flop_per_s=median(self.best.values()),
            shapes=tuple(ShapeRate(shape=shape, flop_per_s=rate) for shape, rate in self.best.items()),
            skipped=tuple(shape for shape in self.shapes if shape not in self.best),
            elapsed_s=elapsed_s,
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def cache_file() -> Path:
    """Where measured CPU peaks are kept between runs."""
    own = os.environ.get("FLOPMETER_CACHE")
    if own:
        return Path(own) / "cpu_peak.json"
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(parent) / "flopmeter" / "cpu_peak.json"


def remembered(dtype: str, cpu: Cpu | None = None) -> float | None:
    """The best FLOP/s measured on this processor with this torch and thread count, if it ever was; imports no torch."""
    key = _key(dtype, cpu or read_cpu())
    known = [value for value in (_read_cache().get(key), _measured_here.get(key)) if value is not None]
    return max(known, default=None)


def remember(dtype: str, flop_per_s: float, cpu: Cpu | None = None) -> None:
    """Keep a measurement; of several the best counts. A cache that cannot be written is no error."""
    cpu = cpu or read_cpu()
    best = max(flop_per_s, remembered(dtype, cpu) or 0.0)
    _measured_here[_key(dtype, cpu)] = best
    file = cache_file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({**_read_cache(), _key(dtype, cpu): best}, indent=1))
        draft.replace(file)


def _key(dtype: str, cpu: Cpu) -> str:
    """A measurement counts only for the processor, cores, torch and threads that it was taken with."""
    return f"{cpu.model} | {cpu.cores:g} cores | torch {_torch_version()} | {num_threads(cpu)} threads | {dtype}"


def _torch_version() -> str:
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.__version__)
    try:
        return version("torch")
    except PackageNotFoundError:
        return "absent"


def _read_cache() -> dict[str, float]:
    try:
        content = json.loads(cache_file().read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    entries = content.items() if isinstance(content, dict) else ()
    return {key: float(value) for key, value in entries if isinstance(value, (int, float)) and 0 < value < math.inf}
