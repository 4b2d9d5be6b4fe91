"""What of flopmeter works on this machine, what is missing or off, and why?

    for result in examine():
        print(result.name, result.standing, result.says)

Each check is a function of this file; its name is what users see. A check that raises costs only its own line.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from typing import Any, Literal

from flopmeter.devices.roof import throttling
from flopmeter.errors import ConfigError, UnknownDeviceError
from flopmeter.text import percent, plural, rate

__all__ = ["CHECKS", "Result", "Standing", "examine"]

Standing = Literal["ok", "warning", "missing", "failed"]
"""warning: works, with less. missing: not here, and what it gives is left out. failed: the machine or we are wrong."""

_NO_TORCH = "torch is not installed: records, traces and reports can be read, nothing can be measured or counted"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+).*extra == ['\"]([\w-]+)['\"]")
SWEEP_S = 2.0
TOLERANCE = 1.03
"""Clocks may be a little above what the maker states; a rate further above the peak means that the peak is wrong."""
LOW_SHARE = 0.5
"""Matmuls below this share of the peak are worth a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one check found."""

    standing: Standing
    says: str
    """Why, in plain words: what is used instead, or what to do."""
    figures: Mapping[str, float | str] = field(default_factory=dict)
    """The numbers behind it; names carry their units."""
    name: str = ""
    """The check; filled in by `examine`."""
    elapsed_s: float = 0.0
    """How long it took; filled in by `examine`."""


def examine(names: Sequence[str] = (), on_start: Callable[[str], None] | None = None) -> Iterator[Result]:
    """Run the checks, and give each one's result as soon as it is there.

    Args:
        names: Only these; all by default.
        on_start: Called with the name of each check before it runs.
    """
    if unknown := [name for name in names if name not in CHECKS]:
        raise ConfigError(f"there is no check {unknown[0]!r}; there are: {', '.join(CHECKS)}")
    for name in names or CHECKS:
        if on_start is not None:
            on_start(name)
        start_s = time.monotonic()
        try:
            result = CHECKS[name]()
        except Exception as error:  # noqa: BLE001 - a check that fails is a result too
            reason = (str(error).splitlines() or [""])[0][:200]
            result = Result(standing="failed", says=f"failed with {type(error).__name__}: {reason}")
        yield replace(result, name=name, elapsed_s=time.monotonic() - start_s)


def versions() -> Result:
    """Is this a torch that flopmeter was tried with, and what is off on it?"""
    figures: dict[str, float | str] = {"flopmeter": metadata.version("flopmeter"), "python": python_version()}
    if find_spec("torch") is None:
        return Result(standing="missing", says=f"{_NO_TORCH}: run pip install 'flopmeter[torch]'", figures=figures)
    import torch

    from flopmeter.torch_compat import TRIED, off_here

    figures["torch"] = torch.__version__
    says = [f"torch {torch.__version__}; flopmeter was run on {', '.join(TRIED)}", *off_here()]
    return Result(standing="warning" if len(says) > 1 else "ok", says="; ".join(says), figures=figures)


def libraries() -> Result:
    """Which optional libraries are here? Read from the package's own list of extras, so that none is forgotten."""
    found = (_REQUIREMENT.match(line) for line in metadata.requires("flopmeter") or ())
    extras = {match[1]: match[2] for match in found if match is not None and match[2] != "dev"}
    figures: dict[str, float | str] = {}
    for library in extras:
        try:
            figures[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    if missing := sorted(extras.keys() - figures.keys()):
        install = ",".join(sorted({extras[library] for library in missing}))
        says = f"{', '.join(missing)}: run pip install 'flopmeter[{install}]'"
        return Result(standing="missing", says=says, figures=figures)
    return Result(standing="ok", says=f"all {len(figures)} optional libraries are installed", figures=figures)


def device() -> Result:
    """What is trained on here, do its clocks hold under load, and can its hardware counters be read?"""
    if find_spec("torch") is None:
        return Result(standing="missing", says=_NO_TORCH)
    import torch

    from flopmeter.counters import CounterUnavailableError, open_counters
    from flopmeter.demo import pick_device

    own = pick_device()
    figures: dict[str, float | str] = {"device": str(own), "num_devices": 1.0}
    uuid, standing, said = None, "ok", ["a CPU: the host's clock times the phases"]
    if own.type == "cuda":
        properties = torch.cuda.get_device_properties(own)
        uuid = str(properties.uuid)
        memory = properties.total_memory
        said = [f"{properties.name}, {memory / 2**30:.0f} GiB; {plural(torch.cuda.device_count(), 'device')} here"]
        figures |= {"num_devices": float(torch.cuda.device_count()), "memory_bytes": float(memory)}
    elif own.type != "cpu":
        standing, said = "warning", [f"{own.type}: phases are what the host saw; steps are right on average"]
    try:
        counters = open_counters(str(own), uuid=uuid)
    except CounterUnavailableError as error:
        said.append(f"{error}; the mode hybrid uses the profiler")
    else:
        said.append(f"hardware counters: {counters.name}")
        counters.close()
    return Result(standing=standing, says="; ".join(said), figures=figures)  # type: ignore[arg-type]


def peak() -> Result:
    """Is the peak of this device known, and do matmuls here agree with it?"""
    from flopmeter.devices import peak_flops
    from flopmeter.devices.measure import measure_peak

    if find_spec("torch") is None:
        stated = peak_flops("cpu", "fp32")
        says = f"{stated.device}, fp32: {rate(stated.flop_per_s)}; not measured, because torch is not installed"
        return Result(standing="warning", says=says, figures={"peak_flop_per_s": stated.flop_per_s})
    from flopmeter.demo import pick_device

    own = pick_device()
    dtype = matmul_dtype(own)
    try:
        measured = measure_peak(own, dtype, SWEEP_S)
    except UnknownDeviceError as refused:  # some Macs multiply no bf16
        return Result(standing="warning", says=f"not measured: {refused}")
    try:
        stated = peak_flops(own, dtype, may_initialise=True)
    except UnknownDeviceError as unknown:
        says = f"no peak is on file, so MFU is unknown ({unknown}); matmuls reach {rate(measured.best_flop_per_s)}"
        return Result(standing="warning", says=says, figures={"measured_flop_per_s": measured.best_flop_per_s})
    said = judge_peak(f"{stated.device}, {stated.dtype}", stated.flop_per_s, stated.source, measured.best_flop_per_s)
    return with_clock(said, measured.after)


def load() -> Result:
    """Does this process get the cores that it counts on?"""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    usable = min(cores, quota) if quota is not None else cores
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    figures: dict[str, float | str] = {"cores": float(cores), "usable_cores": float(usable), "load": busy}
    said = [f"{plural(cores, 'core')}, load {busy:.1f} over the last minute"]
    if quota is not None and quota < cores:
        said.append(f"a limit of this container leaves {quota:g} of them")
    if busy > cores:
        said.append("other programs compete for them: loaders, launches and timings here are slower than they could be")
    return Result(standing="warning" if len(said) > 1 else "ok", says="; ".join(said), figures=figures)


def profile() -> Result:
    """May a step be sampled, which splits forward and backward in the waterfall; and does torch.compile work here?"""
    if find_spec("torch") is None:
        return Result(standing="missing", says=_NO_TORCH)
    from flopmeter.demo import pick_device
    from flopmeter.profiling.profiler_guard import why_not

    kind = pick_device().type
    reason, lacks = why_not(kind), compiler_lacks(kind)
    said = [f"steps are not sampled ({reason}): the waterfall does not split forward and backward"] if reason else []
    said += [f"torch.compile does not work here: {lacks}"] if lacks else []
    if said:
        return Result(standing="warning" if reason else "missing", says="; ".join(said))
    return Result(standing="ok", says="steps can be sampled, and torch.compile finds its compiler")


CHECKS: Mapping[str, Callable[[], Result]] = {
    check.__name__: check for check in (versions, libraries, device, peak, load, profile)
}
"""By name, in the order in which they run."""


def matmul_dtype(device: Any) -> str:
    """What matmuls are fastest in, of what the device multiplies itself: a T4 or a V100 only emulates bf16."""
    from flopmeter.demo import has_bfloat16

    if device.type == "cpu":
        return "fp32"
    return "bf16" if device.type != "cuda" or has_bfloat16() else "fp16"


def judge_peak(device: str, peak_flop_per_s: float, source: str, measured_flop_per_s: float) -> Result:
    """Compare what is on file with what was reached."""
    share = measured_flop_per_s / peak_flop_per_s
    figures: dict[str, float | str] = {
        "peak_flop_per_s": peak_flop_per_s,
        "source": source,
        "measured_flop_per_s": measured_flop_per_s,
        "share": share,
    }
    reached = f"matmuls reach {rate(measured_flop_per_s)}, {percent(share, 0)} of it"
    says = f"{device}: {rate(peak_flop_per_s)} ({source}); {reached}"
    if share > TOLERANCE:
        fix = "that peak is too low, and MFU too high: set monitoring.peak_flop_per_s, or report a wrong table"
        return Result(standing="failed", says=f"{says}; {fix}", figures=figures)
    if share < LOW_SHARE:
        says += "; other programs on the machine, a power limit or low clocks keep it down"
        return Result(standing="warning", says=says, figures=figures)
    return Result(standing="ok", says=says, figures=figures)


def with_clock(result: Result, state: Mapping[str, Any]) -> Result:
    """The same with the GPU's clock under load and what held it down, as the driver told right after."""
    held = throttling(state.get("throttle_reasons", 0))
    says = f"{result.says}; at {state['clock_hz'] / 1e6:.0f} MHz" if "clock_hz" in state else result.says
    says += f", held down by {' and '.join(held)}" if held else ""
    return replace(result, says=says, standing="warning" if held and result.standing == "ok" else result.standing)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the container may use at once; None where nothing limits them, or nothing tells."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((root / name).read_text() for name in files).split()
            return int(quota) / int(period) if int(quota) > 0 else None
        except (OSError, ValueError):  # another version of control groups, or "max": no limit
            continue
    return None


def compiler_lacks(device_type: str) -> str | None:
    """What torch's compiler lacks here, or None."""
    if device_type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++", "icpx"))):
        return "there is no C++ compiler"
    if device_type == "cuda" and find_spec("triton") is None:
        return "triton is not installed"
    if device_type == "cuda" and not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang", "cc"))):
        return "there is no C compiler, which triton needs"
    return None
