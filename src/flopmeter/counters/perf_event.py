"""How many FLOPs did this process execute on the CPU, as the CPU itself counted them (Linux perf_event_open)?

Counts retired floating-point instructions of this process in user space, in all its threads: those that exist when
the reader opens, one by one, and those that they start later, by inheritance. A fused multiply-add counts as two.

Event codes and weights: Linux tools/perf/pmu-events/arch/x86/*/floating-point.json. Left out: x87; on Intel also AMX
tiles, AVX512-BF16 and AVX512-FP16 (the reading's note names those that the CPU has). On Intel the lanes that a mask
switches off count as if they had worked.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from flopmeter.counters import CounterUnavailableError
from flopmeter.devices.cpu import Cpu, read_cpu
from flopmeter.text import percent

DEVICE_TYPE = "cpu"
ORDER = 10

PERF_TYPE_RAW = 4
_SYSCALL_NUMBER = 298  # x86-64, the only architecture with event codes below
_ATTRIBUTE = struct.Struct("=IIQQQQQIIQ")  # perf_event_attr as first published: 64 bytes
_VALUE = struct.Struct("=QQQ")  # count, time enabled, time running
_READ_TIMES = 0b11
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR, _INHERIT_THREAD = 1 << 1, 1 << 5, 1 << 6, 1 << 35
_CLOSE_ON_EXEC = 8
_SELF_TEST_MULTIPLIES = 200_000


class CpuEvent(NamedTuple):
    """One hardware event; `weight` FLOPs per count."""

    type: int
    config: int
    weight: int


class Sample(NamedTuple):
    """What one counter says; the times differ when the kernel shares a counter among events."""

    events: int
    enabled_ns: int
    running_ns: int


# Broadwell to Granite Rapids, without the hybrids: their small cores do not know the event.
_INTEL_MODELS = frozenset(
    {0x3D, 0x47, 0x4F, 0x56, 0x4E, 0x5E, 0x8E, 0x9E, 0xA5, 0xA6, 0x55, 0x7D, 0x7E, 0x6A, 0x6C, 0x8C, 0x8D, 0xA7}
    | {0x8F, 0xCF, 0xAD, 0xAE}
)
_INTEL_UNCOUNTED = {"amx_tile": "AMX", "avx512_bf16": "AVX512-BF16", "avx512_fp16": "AVX512-FP16"}
_AMD_UMASKS = {"zen1": 0xFF, "zen2": 0xFF, "zen3": 0xFF, "zen4": 0x1F, "zen5": 0x0F}


def open(uuid: str | None) -> PerfEventReader:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CounterUnavailableError("only Linux on x86-64 is known")
    cpu, kernel = read_cpu(), kernel_version()
    events = fp_events(cpu, kernel)
    try:
        reader = PerfEventReader(events, kernel=kernel, note=uncounted(cpu))
    except OSError as error:
        raise CounterUnavailableError(explain_errno(error.errno)) from error
    try:
        self_test(reader)
    except CounterUnavailableError:
        reader.close()
        raise
    return reader


class PerfEventReader:
    """The weighted sum of the events over all threads of this process, since `start()`."""

    def __init__(self, events: tuple[CpuEvent, ...], *, kernel: tuple[int, int], note: str = "") -> None:
        self._note = note
        self._counters: list[tuple[int, int]] = []
        self._start: list[Sample] = []
        self._start_s = 0.0
        if kernel < (5, 13):
            self._note = "; ".join(filter(None, [note, "child processes count too (kernel before 5.13)"]))
        thread_ids = [int(name) for name in os.listdir("/proc/self/task")]
        import resource  # Unix only, and this folder is imported everywhere

        num_files, (limit, _) = len(thread_ids) * len(events), resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and num_files > limit // 4:
            raise CounterUnavailableError(
                f"{num_files} counters would take too many of the {limit} files: open earlier"
            )
        try:
            for thread_id in thread_ids:
                with suppress(ProcessLookupError):  # the thread ended meanwhile
                    for event in events:
                        self._counters.append((_open_event(event, thread_id, kernel >= (5, 13)), event.weight))
        except OSError:
            self.close()
            raise

    def start(self) -> None:
        self._start = self._read_counters()
        self._start_s = monotonic()

    def read(self) -> dict[str, Any]:
        interval_s = monotonic() - self._start_s
        now = self._read_counters()
        changes = [Sample(*(b - a for a, b in zip(*pair, strict=True))) for pair in zip(self._start, now, strict=True)]
        counts = [scale_count(change) for change in changes]
        if None in counts:
            return {"interval_s": interval_s, "note": "another program holds the CPU's counters"}
        flop = sum(weight * (count or 0.0) for (_, weight), count in zip(self._counters, counts, strict=True))
        lowest = min((change.running_ns / change.enabled_ns for change in changes if change.enabled_ns), default=1.0)
        scaled = f"scaled up: an event was counted {percent(lowest, 0)} of the time" if lowest < 0.99 else ""
        return {"flop": flop, "interval_s": interval_s, "note": "; ".join(filter(None, [self._note, scaled]))}

    def close(self) -> None:
        for file_descriptor, _ in self._counters:
            os.close(file_descriptor)
        self._counters.clear()

    def _read_counters(self) -> list[Sample]:
        return [Sample(*_VALUE.unpack(os.read(descriptor, _VALUE.size))) for descriptor, _ in self._counters]


def kernel_version() -> tuple[int, int]:
    """Major and minor number of the running kernel; (0, 0) when its name does not start with them."""
    numbers = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def fp_events(cpu: Cpu, kernel: tuple[int, int]) -> tuple[CpuEvent, ...]:
    """The events whose weighted sum is the CPU's FLOPs; an unknown CPU has none, never its neighbour's."""
    if cpu.vendor == "GenuineIntel" and cpu.family == 6 and cpu.model_number in _INTEL_MODELS:
        # FP_ARITH_INST_RETIRED by FLOPs per count. Units of one weight share an event: fewer counters, no sharing.
        umasks = {0x01 | 0x02: 1, 0x04: 2, 0x08 | 0x10: 4, 0x20 | 0x40: 8, 0x80: 16}
        if "avx512f" not in cpu.flags:
            umasks = {0x01 | 0x02: 1, 0x04: 2, 0x08 | 0x10: 4, 0x20: 8}
        return tuple(CpuEvent(PERF_TYPE_RAW, umask << 8 | 0xC7, weight) for umask, weight in umasks.items())
    generation = zen_generation(cpu)
    if generation is None:
        raise CounterUnavailableError(
            f"no event codes on file for {cpu.vendor} family {cpu.family} model {cpu.model_number}"
        )
    if kernel < (5, 6):
        # Up to 64 FLOPs retire in a cycle; earlier kernels do not pair two counters, and wrap at 15.
        raise CounterUnavailableError("AMD's FLOP event needs Linux 5.6 or newer")
    return (CpuEvent(PERF_TYPE_RAW, _AMD_UMASKS[generation] << 8 | 0x03, 1),)


def zen_generation(cpu: Cpu) -> str | None:
    """AMD's core generation by family and model, as Linux tells them apart; Zen 6 shares a family with Zen 5."""
    if cpu.vendor != "AuthenticAMD":
        return None
    group = cpu.model_number >> 4
    if cpu.family == 0x17:
        return "zen1" if group < 3 else "zen2"
    if cpu.family == 0x19:
        return "zen3" if group in {0, 2, 4, 5} else "zen4" if group in {1, 6, 7, 8, 9, 10} else None
    return "zen5" if cpu.family == 0x1A and group in {0, 1, 2, 4, 6, 7} else None


def uncounted(cpu: Cpu) -> str:
    """Which of the CPU's floating-point units the events do not see."""
    units = [unit for flag, unit in _INTEL_UNCOUNTED.items() if flag in cpu.flags and cpu.vendor == "GenuineIntel"]
    return f"not counted: {', '.join(units)}" if units else ""


def scale_count(change: Sample) -> float | None:
    """The count for the whole time, where the event had a counter for a part of it; None where it never had."""
    if change.running_ns == 0:
        return 0.0 if change.enabled_ns == 0 else None
    return change.events * change.enabled_ns / change.running_ns


def self_test(reader: PerfEventReader) -> None:
    """Some virtual machines accept the events and count nothing: a known number of multiplications must show."""
    reader.start()
    product = 1.0
    for _ in range(_SELF_TEST_MULTIPLIES):
        product *= 1.0000001
    flop = reader.read().get("flop")
    if flop is not None and flop < 0.9 * _SELF_TEST_MULTIPLIES:
        raise CounterUnavailableError(f"the counters miss FLOPs: {flop:.0f} seen of {_SELF_TEST_MULTIPLIES} executed")


def explain_errno(number: int | None) -> str:
    """What the kernel's refusal means, and what to do."""
    if number in {errno.EACCES, errno.EPERM}:
        paranoid = "unknown"
        with suppress(OSError):
            paranoid = Path("/proc/sys/kernel/perf_event_paranoid").read_text().strip()
        return (
            f"kernel.perf_event_paranoid is {paranoid}: up to 2 allows counting the own process"
            " (sysctl kernel.perf_event_paranoid=2); a container's seccomp profile may also forbid it"
        )
    if number in {errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV}:
        return "no PMU in this machine, or none that the virtual machine passes on"
    return f"perf_event_open failed ({os.strerror(number or 0)})"


def _open_event(event: CpuEvent, thread_id: int, inherit_thread: bool) -> int:
    """A file descriptor that counts the event in a thread, and in those it starts from now on, but not in its forks."""
    flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR | (_INHERIT_THREAD if inherit_thread else 0)
    packed = _ATTRIBUTE.pack(event.type, _ATTRIBUTE.size, event.config, 0, 0, _READ_TIMES, flags, 0, 0, 0)
    attribute = ctypes.create_string_buffer(packed, len(packed))
    any_cpu, no_group = ctypes.c_int(-1), ctypes.c_int(-1)
    number, close_on_exec = ctypes.c_long(_SYSCALL_NUMBER), ctypes.c_ulong(_CLOSE_ON_EXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.syscall(number, attribute, ctypes.c_int(thread_id), any_cpu, no_group, close_on_exec)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor
