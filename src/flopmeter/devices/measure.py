"""How fast does this device multiply matrices when nothing else is asked of it?

A sweep over square and LLM-like shapes, or over a run's own, in rounds, within a time budget. What each shape reached
is kept as the roof of this device, with its clock before and after; on a CPU the best figure is also kept as a peak,
because the instruction set's promise and the machine's performance can differ either way. Left out: formats that
`torch.mm` does not take (fp8, fp4, int8), products whose factors lie otherwise than in a forward pass, and cards that
slow down only after minutes of load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from flopmeter.devices import default_dtype, need_torch, normalise_dtype, uses_tf32
from flopmeter.devices.roof import Shape, condition, keep_roof
from flopmeter.errors import ConfigError, UnknownDeviceError

if TYPE_CHECKING:
    import torch

_CPU_SHAPES: tuple[Shape, ...] = (
    *((size, size, size) for size in (512, 1024, 2048)),
    *((512, 3072, 768), (1024, 4096, 1024)),
)
_ACCELERATOR_SHAPES: tuple[Shape, ...] = (
    *((size, size, size) for size in (4096, 8192, 16384)),
    *((8192, 4096, 14336), (8192, 28672, 4096), (16384, 8192, 8192)),
)
_TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MIN_CPU_SHARE = 0.6
"""Of the cores that torch computes with: a process that got less shared them, and small products keep not all busy."""
STARVED = "the machine was busy with something else: not kept as the roof of this device"
_ROUNDS = 3  # a shared machine has quiet moments; three chances per shape find one
_BURST_S = 0.02
_SLOWEST = 6.0  # a shape whose single product would take this many times its share of the budget is left out


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
    shapes: tuple[dict[str, Any], ...]
    """`shape` and the best `flop_per_s` of each."""
    skipped: tuple[Shape, ...]
    """Shapes that did not fit into memory or into the time budget."""
    elapsed_s: float
    before: Mapping[str, Any] = field(default_factory=dict)
    """Clock, power cap and what holds the clock down when the sweep began, where the driver tells."""
    after: Mapping[str, Any] = field(default_factory=dict)
    """The same when it ended, under load."""
    note: str = ""
    """Why it is not kept as the roof of this device."""


def measure_peak(
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    budget_s: float = 8.0,
    progress: Callable[[int, int], None] | None = None,
    own_shapes: Sequence[Shape] = (),
) -> Measurement:
    """Sweep matmul shapes on a device of this machine; no global flag or random state of torch is touched.

    Args:
        device: As torch spells it; None is the accelerator at hand, else the CPU.
        budget_s: Aimed-at length of the sweep; one product of the slowest shape may run over.
        progress: Called with (steps done, steps in all).
        own_shapes: Those of a run; none are best shapes.
    """
    if not 0 < budget_s < math.inf:
        raise ConfigError(f"budget_s must be a positive number of seconds, not {budget_s!r}")
    torch = need_torch("measuring a peak")
    here = _find_device(torch, device)
    ran_in = _runnable(torch, here, default_dtype() if dtype is None else normalise_dtype(dtype))
    shapes = tuple(own_shapes) or (_CPU_SHAPES if here.type == "cpu" else _ACCELERATOR_SHAPES)
    uuid = str(torch.cuda.get_device_properties(here).uuid) if here.type == "cuda" else None
    before = condition(uuid)
    best: dict[Shape, float] = {}
    start_s, cpu_s = time.perf_counter(), time.process_time()
    steps = shapes * _ROUNDS
    share_s = budget_s / len(steps)
    for done, shape in enumerate(steps, start=1):
        flop = 2 * math.prod(shape)
        is_slow = shape not in best and flop / max(best.values(), default=math.inf) > _SLOWEST * share_s
        if not is_slow and (time.perf_counter() - start_s < budget_s or not best):
            try:
                best[shape] = max(flop / _fastest_s(torch, here, ran_in, shape, share_s), best.get(shape, 0.0))
            except (RuntimeError, TypeError, AssertionError, MemoryError) as error:  # torch's ways to refuse a device
                if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
                    reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
                    raise UnknownDeviceError(f"{here} cannot multiply in {ran_in}: {reason}") from None
        if progress is not None:
            progress(done, len(steps))
    if not best:
        raise UnknownDeviceError(f"no matmul shape fitted into the memory of {here}: free some and repeat")
    best_shape = max(best, key=best.__getitem__)
    after = condition(uuid)
    busy = (time.process_time() - cpu_s) / (time.perf_counter() - start_s)
    is_starved = here.type == "cpu" and busy < MIN_CPU_SHARE * torch.get_num_threads()
    if not is_starved:
        keep_roof(here.type if uuid is None else torch.cuda.get_device_name(here), uuid, ran_in, best, after)
    return Measurement(
        device=str(here),
        dtype=ran_in,
        best_flop_per_s=best[best_shape],
        best_shape=best_shape,
        typical_flop_per_s=median(best.values()),
        shapes=tuple({"shape": shape, "flop_per_s": rate} for shape, rate in best.items()),
        skipped=tuple(shape for shape in shapes if shape not in best),
        elapsed_s=time.perf_counter() - start_s,
        before=before,
        after=after,
        note=STARVED if is_starved else "",
    )


def _find_device(torch: Any, device: object) -> Any:
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"a measurement runs on a device of this machine, such as cpu, not on {device!r}") from None
    backend = getattr(torch, found.type, None)
    count = 0 if backend is None else backend.device_count()
    if (found.index or 0) >= count:
        raise UnknownDeviceError(f"torch sees {count} {found.type} devices here, so {device} cannot be measured")
    return found


def _runnable(torch: Any, device: Any, dtype: str) -> str:
    """The format that `torch.mm` will really compute in."""
    if dtype not in _TORCH_NAMES:
        raise ConfigError(f"{dtype} cannot be measured with torch.mm: use one of {', '.join(_TORCH_NAMES)}")
    # TF32 units: Ampere and newer, or CDNA as ROCm reports it.
    runs_tf32 = device.type == "cuda" and uses_tf32() and torch.cuda.get_device_capability(device) >= (8, 0)
    if dtype == "tf32" and not runs_tf32:
        raise ConfigError(f"tf32 cannot be measured: torch is not set to TF32, or {device} has no such units")
    return "tf32" if dtype == "fp32" and runs_tf32 else dtype


def _fastest_s(torch: Any, device: Any, dtype: str, shape: Shape, share_s: float) -> float:
    """Seconds of the fastest product of this shape, multiplied again and again for its share of the time."""
    end_s = time.perf_counter() + share_s
    m, n, k = shape
    # Random, because zeros flatter a GPU; from a generator of our own, to leave the user's random state alone.
    seeded = torch.Generator(device=device).manual_seed(0)
    like = {"device": device, "dtype": getattr(torch, _TORCH_NAMES[dtype])}
    left = torch.randn(m, k, generator=seeded, **like)
    right = torch.randn(n, k, generator=seeded, **like).t()  # as nn.Linear stores its weight
    out = torch.empty(m, n, **like)

    def timed_s(repeats: int) -> float:
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.device(device):
                start.record()
                for _ in range(repeats):
                    torch.mm(left, right, out=out)
                end.record()
                end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / repeats
        wait = (lambda: None) if device.type == "cpu" else (lambda: torch.accelerator.synchronize(device))
        wait()
        start_s = time.perf_counter()
        for _ in range(repeats):
            torch.mm(left, right, out=out)
        wait()
        return (time.perf_counter() - start_s) / repeats

    torch.mm(left, right, out=out)  # the first call picks kernels and wakes threads
    once_s = fastest_s = timed_s(1)
    # Short kernels run in bursts, so that the gap before the first one does not count.
    burst = 1 if device.type == "cpu" else max(1, min(50, int(_BURST_S / once_s)))
    while time.perf_counter() < end_s:
        fastest_s = min(fastest_s, timed_s(burst))
    return fastest_s
