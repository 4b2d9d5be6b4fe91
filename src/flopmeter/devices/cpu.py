"""What could this processor have done, by its own description, and of what is a measurement on it one?

    peak = usable physical cores x clock x floating-point operations per cycle and core

Source of the per-cycle figures: two fused multiply-add units per core (two operations per lane) in every x86 core since
Haswell and Zen, their width by instruction set; Intel's AMX figures (1024 bf16, 2048 int8). Left out: clocks that fall
under wide vector load, and cores whose units differ from their siblings'. No torch is imported here.
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ARM_PIPES = {"0xd0c": 2, "0xd40": 2, "0xd49": 2, "0xd4f": 4}  # Neoverse N1, V1, N2, V2

# What the flags must hold, AMD's family and models where it is theirs alone, fp32 operations per cycle, and why.
_ANY = range(1 << 16)
_X86: tuple[tuple[set[str], int, range, int, str], ...] = (
    ({"avx512f"}, 25, _ANY, 32, "AVX-512 on 256-bit units, Zen 4"),
    ({"avx512f"}, 0, _ANY, 64, "two 512-bit FMA units assumed; chips with one do half"),
    ({"avx2", "fma"}, 23, range(0x30), 16, "AVX2 on 128-bit units, Zen 1"),
    ({"avx2", "fma"}, 0, _ANY, 32, "two 256-bit FMA units, AVX2"),
    ({"avx"}, 0, _ANY, 16, "256-bit add and multiply, AVX"),
    ({"sse2"}, 0, _ANY, 8, "128-bit add and multiply, SSE"),
)
# Instruction set -> times the fp32 rate, or operations per cycle where it has units of its own.
_FASTER: dict[str, tuple[tuple[str, int, int], ...]] = {
    "bf16": (("amx_bf16", 0, 1024), ("avx512_bf16", 2, 0), ("bf16", 4, 0)),
    "fp16": (("amx_fp16", 0, 1024), ("avx512_fp16", 2, 0), ("asimdhp", 2, 0)),
    "int8": (("amx_int8", 0, 2048), ("avx512_vnni", 4, 0), ("avx_vnni", 4, 0), ("i8mm", 8, 0), ("asimddp", 4, 0)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """What Linux tells about the processor that this process may use."""

    model: str
    vendor: str = ""
    family: int = 0
    model_number: int = 0
    part: str = ""
    """Arm's part number ("0xd40"), else empty."""
    flags: frozenset[str] = frozenset()
    cores: float
    """Physical cores that affinity and the cgroup quota leave to this process; a quota may give a fraction."""
    clock_hz: float | None = None
    clock_source: str = ""
    vector_bytes: int = 16
    """Length of an SVE register; 16 is NEON's."""


def derive(dtype: str, cpu: Cpu | None = None, threads: int | None = None) -> tuple[float | None, str]:
    """The peak in FLOP/s by instruction set and clock, None where either is not known; the factors, what is assumed."""
    cpu = cpu or read_cpu()
    cores = min(cpu.cores, threads or num_threads(cpu))
    known = _flop_per_cycle(cpu, dtype)
    if known is None or cpu.clock_hz is None:
        return None, "the instruction set or the clock of this CPU is not known"
    clock = f"{cpu.clock_hz / 1e9:.3g} GHz ({cpu.clock_source})"
    how = f"{cores:g} core{'s' * (cores != 1)} x {clock} x {known[0]} FLOP per cycle ({known[1]})"
    return cores * cpu.clock_hz * known[0], how


def num_threads(cpu: Cpu) -> int:
    """Threads that torch computes with here; without torch, what it would choose."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    wish = os.environ.get("OMP_NUM_THREADS", "")
    return int(wish) if wish.isascii() and wish.isdigit() and int(wish) else max(1, int(cpu.cores))


def _flop_per_cycle(cpu: Cpu, dtype: str) -> tuple[int, str] | None:
    """Operations per cycle of one core in this dtype, and the reason."""
    if "asimd" in cpu.flags:
        pipes, assumed = _ARM_PIPES.get(cpu.part, 2), "" if cpu.part in _ARM_PIPES else " assumed"
        fp32, kind = pipes * (cpu.vector_bytes // 4) * 2, "SVE" if "sve" in cpu.flags else "NEON"
        how = f"{pipes} {cpu.vector_bytes * 8}-bit {kind} pipes{assumed}"
    else:
        family = cpu.family if cpu.vendor == "AuthenticAMD" else -1
        fitting = (row for row in _X86 if row[0] <= cpu.flags and row[1] in (0, family) and cpu.model_number in row[2])
        found = next(fitting, None)
        if found is None:
            return None
        fp32, how = found[3:]
    if dtype == "fp32":
        return fp32, how
    if dtype == "fp64":
        return fp32 // 2, how
    for flag, factor, absolute in _FASTER.get(dtype, ()):
        if flag in cpu.flags:
            return absolute or fp32 * factor, flag
    if dtype in ("bf16", "fp16"):
        return fp32, f"no {dtype} units, so at most the fp32 rate: {how}"
    return None


def read_cpu(root: Path = Path("/"), cpus: Iterable[int] | None = None) -> Cpu:
    """Read the processor's description below `root`, for the given CPU numbers (default: this process's affinity)."""
    ask = getattr(os, "sched_getaffinity", None)  # Linux only
    numbers = sorted(cpus if cpus is not None else ask(0) if ask else range(os.cpu_count() or 1))
    lines = [line.split(":", 1) for line in text_of(root / "proc/cpuinfo").splitlines() if ":" in line]
    fields = [(key.strip(), value.strip()) for key, value in lines]
    info = dict(reversed(fields))  # of the first processor
    folder = root / "sys/devices/system/cpu"
    top_khz = max((_number(text_of(folder / f"cpu{n}/cpufreq/cpuinfo_max_freq")) for n in numbers), default=0)
    told = [float(value) for key, value in fields if key == "cpu MHz" and re.fullmatch(r"\d+(\.\d+)?", value)]
    clock_hz, clock_source = None, ""
    if top_khz:
        clock_hz, clock_source = top_khz * 1e3, "highest clock in cpufreq"
    elif told:
        clock_hz, clock_source = max(told) * 1e6, "clock in /proc/cpuinfo; the boost clock is not told here"
    # Hyper-threads that share a core count once: they share its FMA units.
    cores = len({text_of(folder / f"cpu{n}/topology/thread_siblings_list") or str(n) for n in numbers}) or 1
    arm = f"Arm {info.get('CPU implementer', '')} {info['CPU part']}" if "CPU part" in info else ""
    return Cpu(
        model=info.get("model name") or arm or platform.processor() or platform.machine() or "unknown",
        vendor=info.get("vendor_id", ""),
        family=_number(info.get("cpu family")),
        model_number=_number(info.get("model")),
        part=info.get("CPU part", ""),
        flags=frozenset((info.get("flags") or info.get("Features") or "").split()),
        cores=min(float(cores), _quota_cores(root)),
        clock_hz=clock_hz,
        clock_source=clock_source,
        vector_bytes=_number(text_of(root / "proc/sys/abi/sve_default_vector_length")) or 16,
    )


def _quota_cores(root: Path) -> float:
    """The tightest CPU quota of this process's cgroup and its parents, in cores; infinite without one."""
    base = root / "sys/fs/cgroup"
    own = re.search(r"^0::/(.*)$", text_of(root / "proc/self/cgroup"), re.MULTILINE)
    folder = base / (own.group(1) if own else "")
    quotas = [text_of(place / "cpu.max").split() for place in (folder, *folder.parents)]
    quotas.append([text_of(base / "cpu/cpu.cfs_quota_us"), text_of(base / "cpu/cpu.cfs_period_us")])
    shares = [_number(q[0]) / _number(q[1]) for q in quotas if len(q) == 2 and _number(q[0]) and _number(q[1])]
    return min(shares, default=math.inf)


def text_of(file: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text().strip()
    return ""


def _number(text: str | None) -> int:
    """Zero for whatever is not a plain positive integer ("max", "-1", nothing)."""
    return int(text) if text and text.isascii() and text.isdigit() else 0


def cache_folder() -> Path:
    """Where what was measured on this machine is kept between runs."""
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("FLOPMETER_CACHE") or f"{parent}/flopmeter")


def key(dtype: str, cpu: Cpu) -> str:
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
