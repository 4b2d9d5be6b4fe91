"""What could this processor have done, by its own description?

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
from pathlib import Path

_ARM_PIPES = {"0xd0c": 2, "0xd40": 2, "0xd49": 2, "0xd4f": 4}  # Neoverse N1, V1, N2, V2

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Derivation:
    """A peak that follows from the processor's description."""

    flop_per_s: float
    note: str
    """The factors, and what was assumed."""


def derive(dtype: str, cpu: Cpu | None = None, threads: int | None = None) -> Derivation | None:
    """The peak by instruction set and clock, or None where either is not known."""
    cpu = cpu or read_cpu()
    cores = min(cpu.cores, threads or num_threads(cpu))
    known = _flop_per_cycle(cpu, dtype)
    if known is None or cpu.clock_hz is None:
        return None
    flop_per_cycle, how = known
    used = f"{cores:g} core{'s' * (cores != 1)}"
    clock = f"{cpu.clock_hz / 1e9:.3g} GHz ({cpu.clock_source})"
    note = f"{used} x {clock} x {flop_per_cycle} FLOP per cycle ({how})"
    return Derivation(flop_per_s=cores * cpu.clock_hz * flop_per_cycle, note=note)


def num_threads(cpu: Cpu) -> int:
    """Threads that torch computes with here; without torch, what it would choose."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    wish = os.environ.get("OMP_NUM_THREADS", "")
    return int(wish) if wish.isascii() and wish.isdigit() and int(wish) else max(1, int(cpu.cores))


def _flop_per_cycle(cpu: Cpu, dtype: str) -> tuple[int, str] | None:
    """Operations per cycle of one core in this dtype, and the reason."""
    vector = _arm_fp32(cpu) if "asimd" in cpu.flags else _x86_fp32(cpu)
    if vector is None:
        return None
    fp32, how = vector
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


def _x86_fp32(cpu: Cpu) -> tuple[int, str] | None:
    is_amd = cpu.vendor == "AuthenticAMD"
    if "avx512f" in cpu.flags:
        if is_amd and cpu.family == 25:
            return 32, "AVX-512 on 256-bit units, Zen 4"
        return 64, "two 512-bit FMA units assumed; chips with one do half"
    if {"avx2", "fma"} <= cpu.flags:
        if is_amd and cpu.family == 23 and cpu.model_number < 0x30:
            return 16, "AVX2 on 128-bit units, Zen 1"
        return 32, "two 256-bit FMA units, AVX2"
    if "avx" in cpu.flags:
        return 16, "256-bit add and multiply, AVX"
    return (8, "128-bit add and multiply, SSE") if "sse2" in cpu.flags else None


def _arm_fp32(cpu: Cpu) -> tuple[int, str]:
    pipes = _ARM_PIPES.get(cpu.part, 2)
    assumed = "" if cpu.part in _ARM_PIPES else " assumed"
    kind = "SVE" if "sve" in cpu.flags else "NEON"
    return pipes * (cpu.vector_bytes // 4) * 2, f"{pipes} {cpu.vector_bytes * 8}-bit {kind} pipes{assumed}"


def read_cpu(root: Path = Path("/"), cpus: Iterable[int] | None = None) -> Cpu:
    """Read the processor's description below `root`, for the given CPU numbers (default: this process's affinity)."""
    numbers = sorted(_affinity() if cpus is None else cpus)
    info = _cpuinfo(root)
    clock_hz, clock_source = _clock(root, numbers, info)
    arm = f"Arm {info.get('CPU implementer', '')} {info['CPU part']}" if "CPU part" in info else ""
    return Cpu(
        model=info.get("model name") or arm or platform.processor() or platform.machine() or "unknown",
        vendor=info.get("vendor_id", ""),
        family=_number(info.get("cpu family")),
        model_number=_number(info.get("model")),
        part=info.get("CPU part", ""),
        flags=frozenset((info.get("flags") or info.get("Features") or "").split()),
        cores=min(_physical_cores(root, numbers), _quota_cores(root)),
        clock_hz=clock_hz,
        clock_source=clock_source,
        vector_bytes=_number(_text(root / "proc/sys/abi/sve_default_vector_length")) or 16,
    )


def _affinity() -> Iterable[int]:
    ask = getattr(os, "sched_getaffinity", None)  # Linux only
    return ask(0) if ask else range(os.cpu_count() or 1)


def _cpuinfo(root: Path) -> dict[str, str]:
    """The first processor's fields of /proc/cpuinfo; "cpu MHz" is the highest of all processors."""
    pairs = [line.split(":", 1) for line in _text(root / "proc/cpuinfo").splitlines() if ":" in line]
    fields = [(key.strip(), value.strip()) for key, value in pairs]
    info = dict(reversed(fields))
    clocks = [value for key, value in fields if key == "cpu MHz" and re.fullmatch(r"\d+(\.\d+)?", value)]
    if clocks:
        info["cpu MHz"] = max(clocks, key=float)
    return info


def _clock(root: Path, numbers: list[int], info: dict[str, str]) -> tuple[float | None, str]:
    files = (root / f"sys/devices/system/cpu/cpu{n}/cpufreq/cpuinfo_max_freq" for n in numbers)
    fastest_khz = max((_number(_text(file)) for file in files), default=0)
    if fastest_khz:
        return fastest_khz * 1e3, "highest clock in cpufreq"
    if "cpu MHz" in info:
        return float(info["cpu MHz"]) * 1e6, "clock in /proc/cpuinfo; the boost clock is not told here"
    return None, ""


def _physical_cores(root: Path, numbers: list[int]) -> float:
    """Hyper-threads that share a core count once: they share its FMA units."""
    folder = root / "sys/devices/system/cpu"
    return float(len({_text(folder / f"cpu{n}/topology/thread_siblings_list") or str(n) for n in numbers}) or 1)


def _quota_cores(root: Path) -> float:
    """The tightest CPU quota of this process's cgroup and its parents, in cores; infinite without one."""
    base = root / "sys/fs/cgroup"
    own = re.search(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE)
    folder = base / (own.group(1) if own else "")
    quotas = [_text(place / "cpu.max").split() for place in (folder, *folder.parents)]
    quotas.append([_text(base / "cpu/cpu.cfs_quota_us"), _text(base / "cpu/cpu.cfs_period_us")])
    shares = [_number(q[0]) / _number(q[1]) for q in quotas if len(q) == 2 and _number(q[0]) and _number(q[1])]
    return min(shares, default=math.inf)


def _text(file: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text().strip()
    return ""


def _number(text: str | None) -> int:
    """Zero for whatever is not a plain positive integer ("max", "-1", nothing)."""
    return int(text) if text and text.isascii() and text.isdigit() else 0
