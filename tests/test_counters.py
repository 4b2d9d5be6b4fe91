"""Counter readers, against recorded texts, loopback servers, the real kernel, and a stand-in for libnvidia-ml."""

# ruff: noqa: N802 (the functions of the stand-in bear NVML's names)

from __future__ import annotations

import ctypes
import errno
import inspect
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from flopmeter import counters
from flopmeter.counters import READERS, READING, CounterReader, CounterUnavailableError, PerfEvent, open_counters
from flopmeter.devices.cpu import Cpu

DATA = Path(__file__).parent / "data"


def why_not(device: str, uuid: str | None = None) -> str:
    with pytest.raises(CounterUnavailableError) as caught:
        open_counters(device, uuid=uuid)
    return str(caught.value)


def test_gpu_readers_are_tried_from_the_driver_to_the_server_and_cpu_readers_only_on_a_cpu() -> None:
    assert [list(READERS[kind]) for kind in ("cuda", "cpu")] == [["nvml_gpm", "dcgm_exporter"], ["perf_event"]]


# What a training run is given


class Exploding:
    """A reader with defects of every kind."""

    def read(self) -> dict[str, Any]:
        raise ZeroDivisionError("read")

    def close(self) -> None:
        raise OSError("close")


def test_a_reader_that_fails_gives_a_reading_without_values_and_says_why() -> None:
    reader = CounterReader("exploding", Exploding())
    assert reader.read() == {**READING, "note": "exploding: ZeroDivisionError: read"}
    reader.close()
    reader.close()
    assert reader.read() == {**READING, "note": "exploding: closed"}


def test_no_reader_means_every_reason_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("FLOPMETER_DCGM_EXPORTER", "file:///etc/hostname")
    assert why_not("cuda:0", "GPU-1") == (
        "hardware counters: none (nvml_gpm: nvidia-ml-py is not installed;"
        " dcgm_exporter: FLOPMETER_DCGM_EXPORTER is 'file:///etc/hostname', which is no http address)"
    )


def test_a_defect_in_a_reader_costs_only_that_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "fp_events", lambda cpu: 1 // 0)
    assert "(perf_event: ZeroDivisionError:" in why_not("cpu")


def test_a_device_that_no_reader_is_made_for_is_named() -> None:
    assert why_not("mps") == "hardware counters: none (no reader is made for mps)"


def test_a_gpu_that_is_known_by_index_only_is_refused() -> None:
    assert why_not("cuda:0") == "hardware counters: none (the GPU's UUID is not known)"


# NVML GPM


class FakeNvml:
    """Stands in for libnvidia-ml.so beneath the real nvidia-ml-py: two boards, GPM on the first."""

    HANDLES = MappingProxyType({b"GPU-hopper": 0x1000, b"GPU-ampere": 0x2000})
    NOT_SUPPORTED, NOT_FOUND, INVALID = 3, 6, 2

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.percent = {2: 80.0, 3: 25.0, 5: 40.0, 10: 30.0, 11: 0.0, 12: 12.5, 13: 1.0}
        self.broken_metric: int | None = None
        self.num_allocated = 0
        self.num_open = 0
        self.taken: list[int] = []

    def library(self) -> SimpleNamespace:
        """pynvml sets attributes on the functions it finds, so they are plain functions, not bound methods."""
        names = [name for name in dir(self) if name.startswith("nvml")]
        return SimpleNamespace(**{name: self._as_function(getattr(self, name)) for name in names})

    def _as_function(self, method: Callable[..., int]) -> Callable[..., int]:
        return lambda *arguments: method(*arguments)

    def nvmlInitWithFlags(self, flags: int) -> int:
        self.num_open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlErrorString(self, code: int) -> bytes:
        return b"error %d" % code

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:
        if uuid.value not in self.HANDLES:
            return self.NOT_FOUND
        self._set_pointer(device, self.HANDLES[uuid.value])
        return 0

    def nvmlGpmQueryDeviceSupport(self, device: Any, support: Any) -> int:
        assert support._obj.version == 1
        support._obj.isSupportedDevice = int(self._address(device) == self.HANDLES[b"GPU-hopper"])
        return 0

    def nvmlGpmSampleAlloc(self, sample: Any) -> int:
        self.num_allocated += 1
        self._set_pointer(sample, 0x10 * self.num_allocated)
        return 0

    def nvmlGpmSampleFree(self, sample: Any) -> int:
        self.freed.append(self._address(sample))
        return 0

    def nvmlGpmSampleGet(self, device: Any, sample: Any) -> int:
        self.taken.append(self._address(sample))
        return 0

    def nvmlGpmMetricsGet(self, request: Any) -> int:
        request = request._obj
        samples = [self._address(request.sample1), self._address(request.sample2)]
        if request.version != 1 or samples != self.taken[-2:]:
            return self.INVALID
        for metric in request.metrics[: request.numMetrics]:
            metric.nvmlReturn = self.NOT_SUPPORTED if metric.metricId == self.broken_metric else 0
            metric.value = self.percent[metric.metricId]
        return 0

    @staticmethod
    def _set_pointer(reference: Any, address: int) -> None:
        ctypes.cast(reference, ctypes.POINTER(ctypes.c_size_t))[0] = address

    @staticmethod
    def _address(pointer: Any) -> int:
        return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


@pytest.fixture
def pynvml() -> Any:
    return pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")


@pytest.fixture
def nvml(pynvml: Any, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(pynvml, "nvmlLib", fake.library())
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return fake


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_metric_numbers_are_those_of_nvidia_ml_py(pynvml: Any) -> None:
    by_number = {
        pynvml.NVML_GPM_METRIC_SM_UTIL: "sm_active",
        pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: "tensor_active",
        pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: "dram_active",
    }
    assert by_number == counters.GPM_METRICS


def test_gpm_compares_each_sample_with_the_one_before_it(nvml: FakeNvml) -> None:
    clock = Clock()
    reader = counters.NvmlGpm("GPU-hopper", clock=clock)
    clock.now_s += 0.0625
    assert reader.read() == {"note": "less than 0.1 s since the last reading"}
    assert nvml.taken == [0x10]
    clock.now_s += 2.0
    assert reader.read() == {
        "sm_active": 0.8,
        "tensor_active": 0.4,
        "dram_active": 0.3,
        "interval_s": 2.0625,
        "note": "since the last reading",
    }
    nvml.broken_metric = 10  # this GPU lacks it: the others stay
    clock.now_s += 3.0
    reading = reader.read()
    assert (reading["dram_active"], reading["tensor_active"], reading["interval_s"]) == (None, 0.4, 3.0)
    assert nvml.taken == [0x10, 0x20, 0x10]


def test_gpm_frees_its_samples_and_leaves_nvml_as_it_was(nvml: FakeNvml) -> None:
    reader = open_counters("cuda:0", uuid="hopper")
    assert (reader.name, nvml.num_open) == ("nvml_gpm", 1)
    reader.close()
    reader.close()
    assert (nvml.freed, nvml.num_open) == ([0x10, 0x20], 0)


@pytest.mark.parametrize(
    ("uuid", "reason"), [("GPU-ampere", r"no GPM \(Hopper or newer"), ("GPU-elsewhere", "Not Found|error 6")]
)
def test_a_gpu_without_gpm_and_one_that_nvml_does_not_know_are_refused_and_nvml_closed(
    pynvml: Any, nvml: FakeNvml, uuid: str, reason: str
) -> None:
    with pytest.raises((CounterUnavailableError, pynvml.NVMLError), match=reason):
        counters.NvmlGpm(uuid)
    assert (nvml.num_open, nvml.num_allocated) == (0, 0)


def test_an_old_pynvml_is_told_apart_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace())
    with pytest.raises(CounterUnavailableError, match="pip install -U nvidia-ml-py"):
        counters.NvmlGpm("GPU-hopper")


# dcgm-exporter

A100 = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
NOTE = {"note": "averaged by the exporter over its own collection interval"}


@pytest.mark.parametrize(
    ("uuid", "expected"),
    [
        (  # old field names; a blank is left out
            A100,
            {
                "sm_active": 0.88,
                "tensor_active": 0.47,
                "dram_active": 0.33,
            },
        ),
        ("GPU-8f8001ff-73ba-2e83-3cdc-4156ae4f3912", {"tensor_active": 0.61, "sm_active": 0.93}),  # names of DCGM 4
        ("GPU-585834DA-79ca-0599-5140-4ffdb131ae93", {"tensor_active": 0.19}),  # label "uuid", other case
    ],
)
def test_an_exporters_text_is_read_whatever_its_spelling(uuid: str, expected: dict[str, float]) -> None:
    assert counters.read_exporter((DATA / "dcgm_exporter_boards.txt").read_text(), uuid) == expected | NOTE


@pytest.mark.parametrize(
    ("uuid", "reason"),
    [
        ("GPU-265c9814-6156-355b-e589-ff2064894f16", "no DCGM_FI_PROF"),  # slices only
        ("GPU-0", "does not report GPU-0"),
    ],
)
def test_a_slice_or_a_neighbour_never_stands_in_for_the_gpu(uuid: str, reason: str) -> None:
    with pytest.raises(CounterUnavailableError, match=reason):
        counters.read_exporter((DATA / "dcgm_exporter_mig.txt").read_text(), uuid)


def test_an_exporter_on_loopback_is_read_past_any_proxy_until_it_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DATA / "dcgm_exporter_boards.txt").read_bytes()
    answers = [(200, text), (200, text), (200, b"\xff\x00{{{"), (503, b"")]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setitem(sys.modules, "pynvml", None)
        monkeypatch.setenv("FLOPMETER_DCGM_EXPORTER", f"http://127.0.0.1:{server.server_port}/metrics")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        reader = open_counters("cuda:0", uuid=A100.removeprefix("GPU-"))
        assert (reader.name, reader.read()["tensor_active"]) == ("dcgm_exporter", 0.47)
        assert reader.read() == {**READING, "note": f"dcgm_exporter: the exporter does not report {A100}"}
        assert "HTTP Error 503" in reader.read()["note"]
        reader.close()
        server.shutdown()


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/metrics", "http://127.0.0.1:99999/", "http://[", "http:///"])
def test_an_address_where_nothing_answers_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("FLOPMETER_DCGM_EXPORTER", address)
    with pytest.raises(CounterUnavailableError, match="no answer from"):
        counters.DcgmExporter(A100)


# perf_event: which events, and what their sum means


def cpu(vendor: str, family: int, model: int, *flags: str) -> Cpu:
    return Cpu(model="", vendor=vendor, family=family, model_number=model, flags=frozenset(flags), cores=1)


def raw_codes(events: tuple[counters.CpuEvent, ...]) -> dict[str, int]:
    assert {event.type for event in events} == {4}
    return {f"r{event.config:04x}": event.weight for event in events}


@pytest.mark.parametrize("model", [0x55, 0x6A, 0x8F, 0xCF, 0xAD])
def test_intel_with_avx512_sums_every_unit_of_the_table_with_its_weight(model: int) -> None:
    events = counters.fp_events(cpu("GenuineIntel", 6, model, "avx512f"))
    # FP_ARITH_INST_RETIRED is event 0xc7: scalar 01+02, 128 bit double 04, 128 single 08 + 256 double 10,
    # 256 single 20 + 512 double 40, 512 single 80.
    assert raw_codes(events) == {"r03c7": 1, "r04c7": 2, "r18c7": 4, "r60c7": 8, "r80c7": 16}


@pytest.mark.parametrize("model", [0x4F, 0x5E, 0x9E])
def test_intel_without_avx512_asks_for_no_512_bit_unit(model: int) -> None:
    events = counters.fp_events(cpu("GenuineIntel", 6, model, "avx2"))
    assert raw_codes(events) == {"r03c7": 1, "r04c7": 2, "r18c7": 4, "r20c7": 8}


@pytest.mark.parametrize(
    ("family", "model", "code"),
    [
        (0x17, 0x01, "rff03"),  # Zen 1, Naples
        (0x17, 0x31, "rff03"),  # Zen 2, Rome
        (0x19, 0x01, "rff03"),  # Zen 3, Milan
        (0x19, 0x21, "rff03"),  # Zen 3, Ryzen 5000
        (0x19, 0x11, "r1f03"),  # Zen 4, Genoa
        (0x19, 0x61, "r1f03"),  # Zen 4, Ryzen 7000
        (0x1A, 0x02, "r0f03"),  # Zen 5, Turin
        (0x1A, 0x44, "r0f03"),  # Zen 5, Ryzen 9000
    ],
)
def test_amd_counts_flops_directly_with_the_mask_of_its_generation(family: int, model: int, code: str) -> None:
    events = counters.fp_events(cpu("AuthenticAMD", family, model))
    assert raw_codes(events) == {code: 1}


@pytest.mark.parametrize(
    "unknown",
    [
        cpu("GenuineIntel", 6, 0x3F),  # Haswell has no such event
        cpu("GenuineIntel", 6, 0x97),  # Alder Lake: its small cores have none
        cpu("GenuineIntel", 6, 0xAF),  # Sierra Forest: small cores only
        cpu("AuthenticAMD", 0x15, 0x02),
        cpu("AuthenticAMD", 0x1A, 0x50),  # Zen 6
        cpu("HygonGenuine", 0x18, 0x01),
        cpu("", 0, 0),
    ],
)
def test_a_cpu_without_codes_on_file_is_refused(unknown: Cpu) -> None:
    with pytest.raises(CounterUnavailableError, match="no event codes on file"):
        counters.fp_events(unknown)


def test_a_kernel_that_would_count_child_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "5.12.9-generic")
    assert "Linux 5.13 or newer" in why_not("cpu")


@pytest.mark.parametrize(
    ("cpu", "note"),
    [
        (
            cpu("GenuineIntel", 6, 0x8F, "avx512f", "avx512_bf16", "amx_tile", "avx512_fp16"),
            "not counted: AMX, AVX512-BF16, AVX512-FP16",
        ),
        (cpu("AuthenticAMD", 0x19, 0x11, "avx512_bf16"), ""),  # in Zen 4's mask 0x10
    ],
)
def test_units_that_the_events_do_not_see_are_named(monkeypatch: pytest.MonkeyPatch, cpu: Cpu, note: str) -> None:
    monkeypatch.setattr(counters, "read_cpu", lambda: cpu)
    monkeypatch.setattr(counters, "fp_events", lambda cpu: ())
    monkeypatch.setattr(counters, "self_test", lambda reader: None)
    assert counters.open_perf_event("").read()["note"] == note


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        ((600, 1000, 1000), (600.0, "")),
        ((600, 1000, 250), (2400.0, "scaled up: an event was counted 25 % of the time")),
        ((0, 0, 0), (0.0, "")),
        ((0, 1000, 0), (None, "another program holds the CPU's counters")),
    ],
)
def test_an_event_that_shared_a_counter_is_scaled_to_the_whole_time(
    monkeypatch: pytest.MonkeyPatch, open_faults: Any, ticks: tuple[int, int, int], expected: tuple[float | None, str]
) -> None:
    reader = open_faults(())
    reader._counters, reader._start = [(-1, 1)], [(7, 7, 7)]
    monkeypatch.setattr(reader, "_read_counters", lambda: [tuple(7 + tick for tick in ticks)])
    reading = reader.read()
    reader._counters = []
    assert (reading.get("flop"), reading["note"]) == expected


def test_a_refusal_of_the_kernel_is_explained() -> None:
    setting = Path("/proc/sys/kernel/perf_event_paranoid")
    value = setting.read_text().strip() if setting.exists() else "unknown"
    assert f"kernel.perf_event_paranoid is {value}:" in counters.explain_errno(errno.EACCES)
    assert "no PMU" in counters.explain_errno(errno.ENOENT)
    assert "perf_event_open failed" in counters.explain_errno(errno.EMFILE)


# perf_event: the real kernel, with an event that needs no PMU. One page touched for the first time is one page fault.

PAGE_FAULTS = counters.CpuEvent(type=1, config=2, weight=1)
NUM_PAGES = 3000


def touch_pages() -> None:
    with mmap.mmap(-1, NUM_PAGES * mmap.PAGESIZE) as memory:
        for page in range(NUM_PAGES):
            memory[page * mmap.PAGESIZE] = 1


@pytest.fixture
def open_faults() -> Iterator[Callable[..., PerfEvent]]:
    if not sys.platform.startswith("linux"):
        pytest.skip("perf_event_open is Linux's")
    readers: list[PerfEvent] = []

    def open_reader(events: tuple[counters.CpuEvent, ...] = (PAGE_FAULTS,)) -> PerfEvent:
        try:
            readers.append(PerfEvent("", events))
        except CounterUnavailableError as error:
            if getattr(error.__cause__, "errno", None) not in {errno.EACCES, errno.EPERM, errno.ENOSYS}:
                raise
            pytest.skip(f"perf_event_open is forbidden here: {error}")
        return readers[-1]

    yield open_reader
    for reader in readers:
        reader.close()


def test_only_what_happens_after_the_start_is_counted_by_the_weight_of_its_event(open_faults: Any) -> None:
    touch_pages()
    reader = open_faults((PAGE_FAULTS, PAGE_FAULTS._replace(weight=9)))
    before = reader.read()["flop"]
    touch_pages()
    after = reader.read()["flop"]
    assert before < 10 * NUM_PAGES <= after - before < 20 * NUM_PAGES


def test_threads_that_existed_before_and_threads_that_come_later_are_counted(open_faults: Any) -> None:
    begin = threading.Event()
    early = threading.Thread(target=lambda: (begin.wait(), touch_pages()), daemon=True)
    early.start()
    reader = open_faults()
    begin.set()
    early.join()
    with_early = reader.read()["flop"]
    late = threading.Thread(target=touch_pages)
    late.start()
    late.join()
    assert NUM_PAGES <= with_early < 2 * NUM_PAGES
    assert NUM_PAGES <= reader.read()["flop"] - with_early < 2 * NUM_PAGES


def test_child_processes_such_as_loader_workers_are_not_counted(open_faults: Any) -> None:
    reader = open_faults()
    script = f"import mmap\n{inspect.getsource(touch_pages)}\nNUM_PAGES = {NUM_PAGES}\ntouch_pages()"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert reader.read()["flop"] < NUM_PAGES


def test_counters_that_miss_known_multiplications_are_refused(open_faults: Any) -> None:
    with pytest.raises(CounterUnavailableError, match="the counters miss FLOPs"):
        counters.self_test(open_faults())


def num_perf_event_files() -> int:
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum("perf_event" in link for link in links)


def test_closing_gives_back_every_file(open_faults: Any) -> None:
    reader = open_faults()
    assert num_perf_event_files() >= 1
    reader.close()
    assert num_perf_event_files() == 0


def test_a_process_with_too_many_threads_keeps_its_files(open_faults: Any) -> None:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        pytest.skip("no limit on open files")
    with pytest.raises(CounterUnavailableError, match="too many"):
        open_faults((PAGE_FAULTS,) * limit)


def test_this_machine_counts_a_matmul_within_a_few_percent_or_says_why_not() -> None:
    numpy = pytest.importorskip("numpy")
    reader, reason = None, ""
    try:
        reader = open_counters("cpu")
    except CounterUnavailableError as error:
        reason = str(error).partition("perf_event: ")[2]
    if reader is None:
        assert len(reason) > 10
        return
    a, b = numpy.ones((512, 512), numpy.float32), numpy.ones((512, 512), numpy.float32)
    for _ in range(8):
        a @ b
    reading = reader.read()
    reader.close()
    assert reading["flop"] == pytest.approx(8 * 2 * 512**3, rel=0.05), reading["note"]
