"""Which hardware counters can watch this device, and what do they say?

    try:
        counters = open_counters("cuda:0", uuid=str(torch.cuda.get_device_properties(0).uuid))
    except CounterUnavailableError as error:
        logger.info("%s: using smart", error)

`READERS` has the readers of each kind of device. A reader is a class. It is made with the GPU's UUID, and the time that
its first reading covers begins; or it says by a `CounterUnavailableError` why not. `read` gives some of `READING`.

Opening may wait for a server (seconds), reading may wait as well: both belong in the monitor's background thread, at a
slow rate, never in a training step. No torch is imported here. Left out: MIG slices, which no reader serves.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import re
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.request import ProxyHandler, build_opener

from flopmeter.devices.cpu import Cpu, read_cpu, text_of
from flopmeter.errors import FlopmeterError
from flopmeter.text import percent

logger = logging.getLogger("flopmeter")

READING: Mapping[str, Any] = MappingProxyType(
    {
        "flop": None,  # floating-point operations of this process since the opening: a true count, of CPU readers only
        "tensor_active": None,  # tensor pipes of any type, as a share of the cycles that elapsed
        "sm_active": None,  # multiprocessors with at least one warp
        "dram_active": None,  # the device's memory interface
        "interval_s": None,  # the time that the values cover, where the source says
        "note": "",  # what the values leave out, or why there are none
    }
)
"""What a reader may see. Shares are 0-1 and say how long a unit was busy, never how many FLOPs it did."""


class CounterUnavailableError(FlopmeterError):
    """A reader, or every reader, cannot serve this device now; the message is the reason, in a few words."""


class CounterReader:
    """A reader that never raises and may be closed while another thread reads: failures become notes."""

    def __init__(self, name: str, source: Any) -> None:
        self.name = name
        self._source = source
        self._lock = threading.Lock()

    def read(self) -> dict[str, Any]:
        """What happened since the opening (counts) or since the last reading (shares): every key of `READING`."""
        with self._lock:
            try:
                return {**READING, **(self._source.read() if self._source else {"note": f"{self.name}: closed"})}
            except Exception as error:  # noqa: BLE001 (nothing of ours may stop a training run)
                return {**READING, "note": f"{self.name}: {_describe(error)}"}

    def close(self) -> None:
        """Give back what the reader holds."""
        with self._lock:
            source, self._source = self._source, None
            try:
                if source is not None:
                    source.close()
            except Exception as error:  # noqa: BLE001 (nothing of ours may stop a training run)
                logger.debug("%s did not close cleanly: %s", self.name, error)


def open_counters(device: str, *, uuid: str | None = None) -> CounterReader:
    """The first reader that serves the device, made safe for a training run.

    Args:
        uuid: The GPU's UUID, with or without the prefix "GPU-". GPU readers need it: an index names another GPU under
            CUDA_VISIBLE_DEVICES.

    Raises:
        CounterUnavailableError: There is none; the message has every reader's reason, in the order they were tried.
    """
    kind, reasons = device.partition(":")[0], []
    if kind == "cuda" and uuid is None:
        raise CounterUnavailableError("hardware counters: none (the GPU's UUID is not known)")
    for name, reader in READERS.get(kind, {}).items():
        try:
            return CounterReader(name, reader(f"GPU-{(uuid or '').removeprefix('GPU-')}"))
        except Exception as error:  # noqa: BLE001 (a reader's defect must cost its numbers, not the run)
            reasons.append(f"{name}: {_describe(error)}")
    why = "; ".join(reasons) or f"no reader is made for {device}"
    raise CounterUnavailableError(f"hardware counters: none ({why})")


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CounterUnavailableError) else f"{type(error).__name__}: {error}"


def _as_share(value: float) -> float | None:
    """The value if it can be a share. DCGM's blanks are huge numbers (from 2^47 on), a missing one may be NaN."""
    return value if 0.0 <= value <= 1.01 else None


GPM_METRICS = {2: "sm_active", 5: "tensor_active", 10: "dram_active"}
GPM_MIN_INTERVAL_S = 0.1


class NvmlGpm:
    """How busy were the GPU's pipes, as the NVIDIA driver itself measures it (NVML GPM, Hopper and newer)?

    GPM subtracts two samples of the GPU's own counters that were taken more than 0.1 s apart; taking one costs no
    synchronisation, and the two change roles after each reading. No special privilege is documented. Numbers of the
    metrics: nvml.h of API 13 (NVIDIA/go-nvml). Left out: there is no split of the tensor pipe by FP8 or FP4, and no
    conversion from pipe activity to FLOPs.
    """

    def __init__(self, uuid: str, *, clock: Callable[[], float] = monotonic) -> None:
        try:
            self._nvml = nvml = import_module("pynvml")
        except ImportError as error:
            raise CounterUnavailableError("nvidia-ml-py is not installed") from error
        if not hasattr(nvml, "nvmlGpmSampleGet"):
            raise CounterUnavailableError("this pynvml has no GPM calls: run pip install -U nvidia-ml-py")
        self._clock = clock
        nvml.nvmlInit()
        try:
            self._board = nvml.nvmlDeviceGetHandleByUUID(uuid)
            if not nvml.nvmlGpmQueryDeviceSupport(self._board).isSupportedDevice:
                raise CounterUnavailableError("this GPU has no GPM (Hopper or newer does)")
            self._older, self._newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
            nvml.nvmlGpmSampleGet(self._board, self._older)
        except BaseException:
            nvml.nvmlShutdown()
            raise
        self._older_s = clock()

    def read(self) -> dict[str, Any]:
        nvml = self._nvml
        if self._clock() - self._older_s <= GPM_MIN_INTERVAL_S:
            return {"note": f"less than {GPM_MIN_INTERVAL_S} s since the last reading"}
        nvml.nvmlGpmSampleGet(self._board, self._newer)
        newer_s = self._clock()
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(GPM_METRICS)
        request.sample1, request.sample2 = self._older, self._newer
        for slot, metric_id in enumerate(GPM_METRICS):
            request.metrics[slot].metricId = metric_id
        nvml.nvmlGpmMetricsGet(request)
        shares = {
            name: _as_share(answer.value / 100) if answer.nvmlReturn == nvml.NVML_SUCCESS else None
            for name, answer in zip(GPM_METRICS.values(), request.metrics, strict=False)
        }
        interval_s = newer_s - self._older_s
        self._older, self._newer, self._older_s = self._newer, self._older, newer_s
        return {**shares, "interval_s": interval_s, "note": "since the last reading"}

    def close(self) -> None:
        self._nvml.nvmlGpmSampleFree(self._older)
        self._nvml.nvmlGpmSampleFree(self._newer)
        self._nvml.nvmlShutdown()


ADDRESS_VARIABLE = "FLOPMETER_DCGM_EXPORTER"
# DCGM 4 renamed the fields (ACTIVE to UTIL_RATIO), and exporters of both kinds are in use.
_SHARES = {"SM": "sm_active", "PIPE_TENSOR": "tensor_active", "TENSOR": "tensor_active", "DRAM": "dram_active"}
_LINE = re.compile(r"DCGM_FI_PROF_(SM|PIPE_TENSOR|TENSOR|DRAM)_(?:ACTIVE|UTIL_RATIO)\{(.*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class DcgmExporter:
    """How busy were the GPU's pipes, as a dcgm-exporter on this machine publishes it, as of its last collection?

    Reads the exporter's Prometheus text from http://127.0.0.1:9400/metrics, or from the address in
    FLOPMETER_DCGM_EXPORTER. The exporter needs SYS_ADMIN for the DCGM_FI_PROF_* fields; its reader needs nothing.
    Left out: fields that the exporter's counter file does not enable (by default only tensor and memory activity are).
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self.read()

    def read(self) -> dict[str, Any]:
        address = os.environ.get(ADDRESS_VARIABLE, "http://127.0.0.1:9400/metrics")
        if not address.startswith(("http://", "https://")):
            raise CounterUnavailableError(f"{ADDRESS_VARIABLE} is {address!r}, which is no http address")
        try:
            # Proxies are for the internet, not for this machine.
            with build_opener(ProxyHandler({})).open(address, timeout=2.0) as response:
                text = response.read(8 << 20).decode("utf-8", errors="replace")
        except (OSError, HTTPException, ValueError) as error:
            with suppress(AttributeError):
                error.close()  # type: ignore[union-attr] # an HTTPError holds the connection
            raise CounterUnavailableError(f"no answer from {address} ({error})") from error
        return read_exporter(text, self._uuid)

    def close(self) -> None:
        """Nothing is held between readings."""


def read_exporter(text: str, uuid: str) -> dict[str, Any]:
    """The GPU's values in an exporter's text. Its UUID is found by value: an exporter's settings may rename the label.

    MIG slices carry their board's UUID and a GPU_I_ID: they are other devices.
    """
    values: dict[str, float] = {}
    for parts in filter(None, map(_LINE.match, text.splitlines())):
        labels = dict(_LABEL.findall(parts[2]))
        if uuid.casefold() in map(str.casefold, labels.values()) and not labels.get("GPU_I_ID"):
            with suppress(ValueError):
                if (share := _as_share(float(parts[3]))) is not None:
                    values[_SHARES[parts[1]]] = share
    if values:
        return {**values, "note": "averaged by the exporter over its own collection interval"}
    if uuid.casefold() in text.casefold():
        raise CounterUnavailableError(f"the exporter has no DCGM_FI_PROF_* values for {uuid}: enable them there")
    raise CounterUnavailableError(f"the exporter does not report {uuid}")


class CpuEvent(NamedTuple):
    """One hardware event; `weight` FLOPs per count."""

    config: int
    weight: int
    type: int = 4  # PERF_TYPE_RAW


# Broadwell to Granite Rapids, without the hybrids: their small cores do not know the event.
_INTEL_MODELS = frozenset(
    {0x3D, 0x47, 0x4F, 0x56, 0x4E, 0x5E, 0x8E, 0x9E, 0xA5, 0xA6, 0x55, 0x7D, 0x7E, 0x6A, 0x6C, 0x8C, 0x8D, 0xA7}
    | {0x8F, 0xCF, 0xAD, 0xAE}
)
# FP_ARITH_INST_RETIRED (0xc7) by FLOPs per count. Units of one weight share an event: fewer counters, no sharing.
_INTEL_UMASKS = {0x01 | 0x02: 1, 0x04: 2, 0x08 | 0x10: 4, 0x20: 8}
_INTEL_512_BIT = {0x01 | 0x02: 1, 0x04: 2, 0x08 | 0x10: 4, 0x20 | 0x40: 8, 0x80: 16}
_INTEL_UNCOUNTED = {"amx_tile": "AMX", "avx512_bf16": "AVX512-BF16", "avx512_fp16": "AVX512-FP16"}
# Family, model number by sixteens, umask of event 0x03: Zen 1 and 2, 3, 4, 5. Zen 6 shares a family with Zen 5.
_AMD_UMASKS = (
    (0x17, range(16), 0xFF),
    (0x19, (0, 2, 4, 5), 0xFF),
    (0x19, (1, 6, 7, 8, 9, 10), 0x1F),
    (0x1A, (0, 1, 2, 4, 6, 7), 0x0F),
)
_SYSCALL_NUMBER = 298  # x86-64, the only architecture with event codes above
_ATTRIBUTE = struct.Struct("=IIQQQQQIIQ")  # perf_event_attr as first published: 64 bytes
_VALUE = struct.Struct("=QQQ")  # count, time enabled, time running
_READ_TIMES, _CLOSE_ON_EXEC = 0b11, 8
# Inherited by the threads that a thread starts, not by its forks; user space only.
_FLAGS = 1 << 1 | 1 << 5 | 1 << 6 | 1 << 35
_KERNEL = (5, 13)
"""The first that can leave out child processes; it also counts AMD's event right, which overflows before 5.6."""
_SELF_TEST_MULTIPLIES = 200_000


class PerfEvent:
    """How many FLOPs did this process execute on the CPU, as the CPU itself counted them (Linux perf_event_open)?

    Counts retired floating-point instructions of this process in user space, in all its threads: those that exist when
    the reader opens, one by one, and those that they start later, by inheritance. A fused multiply-add counts as two.

    Event codes and weights: Linux tools/perf/pmu-events/arch/x86/*/floating-point.json. Left out: x87; on Intel also
    AMX tiles, AVX512-BF16 and AVX512-FP16 (the reading's note names those that the CPU has). On Intel the lanes that a
    mask switches off count as if they had worked.
    """

    def __init__(self, _uuid: str, events: tuple[CpuEvent, ...] = (), note: str = "") -> None:
        kernel = re.match(r"(\d+)\.(\d+)", platform.release())
        if platform.system() != "Linux" or platform.machine() != "x86_64" or not kernel:
            raise CounterUnavailableError("only Linux on x86-64 is known")
        if tuple(map(int, kernel.groups())) < _KERNEL:
            raise CounterUnavailableError(f"Linux {_KERNEL[0]}.{_KERNEL[1]} or newer is needed")
        import resource  # Unix only, and this file is imported everywhere

        self._counters: list[tuple[int, int]] = []
        self._note = note
        thread_ids = [int(name) for name in os.listdir("/proc/self/task")]
        num_files, (limit, _) = len(thread_ids) * len(events), resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and num_files > limit // 4:
            raise CounterUnavailableError(
                f"{num_files} counters would take too many of the {limit} files: open earlier"
            )
        try:
            for thread_id in thread_ids:
                with suppress(ProcessLookupError):  # the thread ended meanwhile
                    for event in events:
                        self._counters.append((_open_event(event, thread_id), event.weight))
        except OSError as error:
            self.close()
            raise CounterUnavailableError(explain_errno(error.errno)) from error
        self._start, self._start_s = self._read_counters(), monotonic()

    def read(self) -> dict[str, Any]:
        reading = {"interval_s": monotonic() - self._start_s}
        now = self._read_counters()
        changes = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(self._start, now, strict=True)]
        if any(enabled and not running for _, enabled, running in changes):
            return {**reading, "note": "another program holds the CPU's counters"}
        # Where an event had a counter for a part of the time, its count stands for the whole.
        shares = [running / enabled if enabled else 1.0 for _, enabled, running in changes]
        counted = zip(self._counters, changes, shares, strict=True)
        flop = sum(weight * change[0] / share for (_, weight), change, share in counted)
        lowest = min(shares, default=1.0)
        scaled = f"scaled up: an event was counted {percent(lowest, 0)} of the time" if lowest < 0.99 else ""
        return {**reading, "flop": flop, "note": "; ".join(filter(None, [self._note, scaled]))}

    def close(self) -> None:
        while self._counters:
            os.close(self._counters.pop()[0])

    def _read_counters(self) -> list[tuple[int, ...]]:
        return [_VALUE.unpack(os.read(descriptor, _VALUE.size)) for descriptor, _ in self._counters]


def open_perf_event(uuid: str) -> PerfEvent:
    """The events of this CPU, if they count what is known to happen: some virtual machines accept them and do not."""
    cpu = read_cpu()
    units = [unit for flag, unit in _INTEL_UNCOUNTED.items() if flag in cpu.flags and cpu.vendor == "GenuineIntel"]
    reader = PerfEvent(uuid, fp_events(cpu), f"not counted: {', '.join(units)}" if units else "")
    try:
        self_test(reader)
    except CounterUnavailableError:
        reader.close()
        raise
    return reader


def fp_events(cpu: Cpu) -> tuple[CpuEvent, ...]:
    """The events whose weighted sum is the CPU's FLOPs; an unknown CPU has none, never its neighbour's."""
    if cpu.vendor == "GenuineIntel" and cpu.family == 6 and cpu.model_number in _INTEL_MODELS:
        umasks = _INTEL_512_BIT if "avx512f" in cpu.flags else _INTEL_UMASKS
        return tuple(CpuEvent(umask << 8 | 0xC7, weight) for umask, weight in umasks.items())
    for family, groups, umask in _AMD_UMASKS if cpu.vendor == "AuthenticAMD" else ():
        if cpu.family == family and cpu.model_number >> 4 in groups:
            return (CpuEvent(umask << 8 | 0x03, 1),)
    raise CounterUnavailableError(
        f"no event codes on file for {cpu.vendor} family {cpu.family} model {cpu.model_number}"
    )


def self_test(reader: PerfEvent) -> None:
    """Refuse counters by which a known number of multiplications does not show."""
    before, product = reader.read().get("flop"), 1.0
    for _ in range(_SELF_TEST_MULTIPLIES):
        product *= 1.0000001
    after = reader.read().get("flop")
    if before is not None and after is not None and after - before < 0.9 * _SELF_TEST_MULTIPLIES:
        seen = f"{after - before:.0f} seen of {_SELF_TEST_MULTIPLIES} executed"
        raise CounterUnavailableError(f"the counters miss FLOPs: {seen}")


def explain_errno(number: int | None) -> str:
    """What the kernel's refusal means, and what to do."""
    if number in {errno.EACCES, errno.EPERM}:
        paranoid = text_of(Path("/proc/sys/kernel/perf_event_paranoid")) or "unknown"
        return (
            f"kernel.perf_event_paranoid is {paranoid}: up to 2 allows counting the own process"
            " (sysctl kernel.perf_event_paranoid=2); a container's seccomp profile may also forbid it"
        )
    if number in {errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV}:
        return "no PMU in this machine, or none that the virtual machine passes on"
    return f"perf_event_open failed ({os.strerror(number or 0)})"


def _open_event(event: CpuEvent, thread_id: int) -> int:
    """A file descriptor that counts the event in a thread, and in those it starts from now on."""
    packed = _ATTRIBUTE.pack(event.type, _ATTRIBUTE.size, event.config, 0, 0, _READ_TIMES, _FLAGS, 0, 0, 0)
    attribute, libc = ctypes.create_string_buffer(packed, len(packed)), ctypes.CDLL(None, use_errno=True)
    any_cpu = no_group = -1
    arguments = _SYSCALL_NUMBER, ctypes.addressof(attribute), thread_id, any_cpu, no_group, _CLOSE_ON_EXEC
    descriptor: int = libc.syscall(*map(ctypes.c_long, arguments))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


READERS: Mapping[str, Mapping[str, Callable[[str], Any]]] = {
    "cuda": {"nvml_gpm": NvmlGpm, "dcgm_exporter": DcgmExporter},
    "cpu": {"perf_event": open_perf_event},
}
"""By kind of device: the cheapest and sharpest first. Their names are what users see."""
