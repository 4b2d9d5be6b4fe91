"""Counter readers, against recorded texts, loopback servers, the real kernel, and a stand-in for libnvidia-ml."""

# ruff: noqa: N802 (the functions of the stand-in bear NVML's names)

from __future__ import annotations

import ast
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

from flopmeter.flops import counters
from flopmeter.flops.counters import (
    CounterUnavailableError,
    Reading,
    SafeReader,
    Target,
    Unavailable,
    as_share,
    dcgm_exporter,
    dcgmi,
    locate,
    nvml_gpm,
    open_counters,
    perf_event,
    reader_modules,
)

DATA = Path(__file__).parent / "data"
FOLDER = Path(counters.__file__).parent
PLUGINS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
GPU_READERS = ["nvml_gpm", "dcgm_exporter", "dcgmi"]


# The contract of the folder


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


@pytest.mark.parametrize("name", PLUGINS)
def test_every_plugin_offers_what_the_contract_says(name: str) -> None:
    module = vars(counters)[name]
    assert name in reader_modules(module.DEVICE_TYPE)
    assert isinstance(module.ORDER, int)
    assert list(inspect.signature(module.open).parameters) == ["target"]
    assert "Left out:" in (module.__doc__ or "")
    readers = [member for member in vars(module).values() if getattr(member, "name", None) == name]
    assert len(readers) == 1
    assert all(callable(getattr(readers[0], method)) for method in ("start", "read", "close"))


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_import_neither_each_other_nor_torch(name: str) -> None:
    for imported in imported_names(FOLDER / f"{name}.py"):
        assert imported.partition(".")[0] not in {"torch", "pynvml"}
        assert not any(imported.endswith(f".{other}") for other in PLUGINS), imported


def test_gpu_readers_are_tried_from_the_driver_to_the_external_program_and_cpu_readers_only_on_a_cpu() -> None:
    assert list(reader_modules("cuda")) == GPU_READERS
    assert list(reader_modules("cpu")) == ["perf_event"]


def test_two_readers_of_one_device_type_never_share_a_place_in_the_order() -> None:
    orders = [(vars(counters)[name].DEVICE_TYPE, vars(counters)[name].ORDER) for name in PLUGINS]
    assert len(set(orders)) == len(orders)


# What a training run is given


class Exploding:
    """A reader with defects of every kind."""

    name = "exploding"

    def start(self) -> None:
        raise RuntimeError("start")

    def read(self) -> Reading:
        raise ZeroDivisionError("read")

    def close(self) -> None:
        raise OSError("close")


def test_a_reader_that_fails_gives_a_reading_without_values_and_says_why() -> None:
    assert SafeReader(Exploding()).read() == Reading(note="exploding: ZeroDivisionError: read")


def test_a_reader_that_did_not_start_keeps_saying_so() -> None:
    reader = SafeReader(Exploding())
    reader.start()
    assert reader.read() == Reading(note="exploding: RuntimeError: start")


def test_a_closed_reader_is_not_touched_again() -> None:
    reader = SafeReader(Exploding())
    reader.close()
    reader.close()
    assert reader.read() == Reading(note="exploding: closed")


def test_no_reader_means_every_reason_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FLOPMETER_DCGM_EXPORTER", "file:///etc/hostname")
    answer = open_counters("cuda:0", uuid="GPU-1")
    assert str(answer) == (
        "hardware counters: none (nvml_gpm: nvidia-ml-py is not installed;"
        " dcgm_exporter: FLOPMETER_DCGM_EXPORTER is 'file:///etc/hostname', which is no http address;"
        " dcgmi: no dcgmi in PATH)"
    )


def test_a_defect_in_a_reader_costs_only_that_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_event, "fp_events", lambda cpu, kernel: 1 // 0)
    answer = open_counters("cpu")
    assert isinstance(answer, Unavailable)
    assert "ZeroDivisionError" in answer.reasons["perf_event"]


def test_a_device_that_no_reader_is_made_for_is_named() -> None:
    assert str(open_counters("mps")) == "hardware counters: none (no reader is made for mps)"


def test_gpu_readers_refuse_a_gpu_that_is_known_by_index_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_dcgmi(monkeypatch, tmp_path, "exit 0")
    answer = open_counters("cuda:0")
    assert isinstance(answer, Unavailable)
    assert answer.reasons == dict.fromkeys(GPU_READERS, "the GPU's UUID is not known")


@pytest.mark.parametrize(
    ("value", "share"),
    [
        (0.0, 0.0),
        (1.0, 1.0),
        (-0.1, None),
        (9223372036854775794.0, None),
        (140737488355328.0, None),
        (float("nan"), None),
    ],
)
def test_only_a_number_from_0_to_1_is_a_share(value: float, share: float | None) -> None:
    assert as_share(value) == share


# NVML GPM


class FakeNvml:
    """Stands in for libnvidia-ml.so beneath the real nvidia-ml-py: two boards, a MIG slice, GPM on the first board."""

    HOPPER, AMPERE, SLICE = 0x1000, 0x2000, 0x3000
    HANDLES = MappingProxyType({b"GPU-hopper": HOPPER, b"GPU-ampere": AMPERE, b"MIG-slice": SLICE})
    NOT_SUPPORTED, NOT_FOUND, INVALID = 3, 6, 2

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
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

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, device: Any, board: Any) -> int:
        if self._address(device) != self.SLICE:
            return self.INVALID
        self._set_pointer(board, self.HOPPER)
        return 0

    def nvmlDeviceGetGpuInstanceId(self, device: Any, number: Any) -> int:
        number._obj.value = 7
        return 0 if self._address(device) == self.SLICE else self.INVALID

    def nvmlDeviceGetUUID(self, device: Any, text: Any, length: Any) -> int:
        text.value = {address: uuid for uuid, address in self.HANDLES.items()}[self._address(device)]
        return 0

    def nvmlGpmQueryDeviceSupport(self, device: Any, support: Any) -> int:
        self.calls.append(("support", self._address(device)))
        assert support._obj.version == 1
        support._obj.isSupportedDevice = int(self._address(device) == self.HOPPER)
        return self.INVALID if self._address(device) == self.SLICE else 0

    def nvmlGpmSampleAlloc(self, sample: Any) -> int:
        self.num_allocated += 1
        self._set_pointer(sample, 0x10 * self.num_allocated)
        return 0

    def nvmlGpmSampleFree(self, sample: Any) -> int:
        self.calls.append(("free", self._address(sample)))
        return 0

    def nvmlGpmSampleGet(self, device: Any, sample: Any) -> int:
        self.calls.append(("take", self._address(device), self._address(sample)))
        self.taken.append(self._address(sample))
        return 0

    def nvmlGpmMigSampleGet(self, device: Any, instance: int, sample: Any) -> int:
        self.calls.append(("take slice", self._address(device), instance))
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
        pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: "sm_occupancy",
        pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: "tensor_active",
        pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: "dram_active",
        pynvml.NVML_GPM_METRIC_FP64_UTIL: "fp64_active",
        pynvml.NVML_GPM_METRIC_FP32_UTIL: "fp32_active",
        pynvml.NVML_GPM_METRIC_FP16_UTIL: "fp16_active",
    }
    assert by_number == nvml_gpm.METRICS


def test_gpm_turns_percent_of_two_samples_into_shares(pynvml: Any, nvml: FakeNvml) -> None:
    clock = Clock()
    reader = nvml_gpm.NvmlGpmReader(pynvml, Target(device="cuda:0", uuid="GPU-hopper"), clock=clock)
    reader.start()
    clock.now_s += 2.0
    reading = reader.read()
    assert (reading.tensor_active, reading.sm_active, reading.dram_active) == (0.4, 0.8, 0.3)
    assert (reading.fp64_active, reading.fp32_active, reading.fp16_active) == (0.0, 0.125, 0.01)
    assert reading.sm_occupancy == 0.25
    assert reading.interval_s == 2.0
    assert reading.flop is None


def test_gpm_compares_each_sample_with_the_one_before_it(pynvml: Any, nvml: FakeNvml) -> None:
    clock = Clock()
    reader = nvml_gpm.NvmlGpmReader(pynvml, Target(device="cuda:0", uuid="GPU-hopper"), clock=clock)
    reader.start()
    for interval_s in (1.0, 3.0, 0.5):
        clock.now_s += interval_s
        assert reader.read().interval_s == interval_s
    assert nvml.taken == [0x10, 0x20, 0x10, 0x20]


def test_gpm_takes_no_sample_before_a_tenth_of_a_second_has_passed(pynvml: Any, nvml: FakeNvml) -> None:
    clock = Clock()
    reader = nvml_gpm.NvmlGpmReader(pynvml, Target(device="cuda:0", uuid="GPU-hopper"), clock=clock)
    reader.start()
    clock.now_s += 0.0625
    assert reader.read() == Reading(note="less than 0.1 s since the last reading")
    assert len(nvml.taken) == 1


def test_a_metric_that_this_gpu_lacks_is_none_and_the_others_stay(pynvml: Any, nvml: FakeNvml) -> None:
    nvml.broken_metric = 10
    clock = Clock()
    reader = nvml_gpm.NvmlGpmReader(pynvml, Target(device="cuda:0", uuid="GPU-hopper"), clock=clock)
    reader.start()
    clock.now_s += 1.0
    reading = reader.read()
    assert (reading.dram_active, reading.tensor_active) == (None, 0.4)


def test_gpm_frees_its_samples_and_leaves_nvml_as_it_was(nvml: FakeNvml) -> None:
    reader = open_counters("cuda:0", uuid="GPU-hopper")
    assert not isinstance(reader, Unavailable)
    assert (reader.name, nvml.num_open) == ("nvml_gpm", 1)
    reader.close()
    reader.close()
    assert [call for call in nvml.calls if call[0] == "free"] == [("free", 0x10), ("free", 0x20)]
    assert nvml.num_open == 0


@pytest.mark.parametrize("uuid", ["MIG-slice", "slice", "MIG-GPU-hopper/7/0"])
def test_a_mig_slice_is_sampled_through_its_board_whatever_the_spelling(nvml: FakeNvml, uuid: str) -> None:
    reader = open_counters("cuda:0", uuid=uuid)
    assert not isinstance(reader, Unavailable)
    reader.start()
    assert nvml.calls == [("support", FakeNvml.HOPPER), ("take slice", FakeNvml.HOPPER, 7)]


def test_a_uuid_without_prefix_is_a_board_unless_nvml_knows_a_slice_of_that_name(nvml: FakeNvml) -> None:
    assert locate("cuda:0", "hopper") == Target(device="cuda:0", uuid="GPU-hopper")
    assert nvml.num_open == 0


def test_a_gpu_before_hopper_is_refused_and_nvml_closed(nvml: FakeNvml) -> None:
    with pytest.raises(CounterUnavailableError, match=r"no GPM \(Hopper or newer"):
        nvml_gpm.open(Target(device="cuda:0", uuid="GPU-ampere"))
    assert (nvml.num_open, nvml.num_allocated) == (0, 0)


def test_a_gpu_that_nvml_does_not_know_is_refused_and_nvml_closed(pynvml: Any, nvml: FakeNvml) -> None:
    with pytest.raises(CounterUnavailableError):
        nvml_gpm.open(Target(device="cuda:0", uuid="GPU-elsewhere"))
    assert nvml.num_open == 0


def test_an_old_pynvml_is_told_apart_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace())
    with pytest.raises(CounterUnavailableError, match="pip install -U nvidia-ml-py"):
        nvml_gpm.open(Target(device="cuda:0", uuid="GPU-hopper"))


# dcgm-exporter

A100 = Target(device="cuda:0", uuid="GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52")


def test_old_field_names_are_read_and_a_blank_is_none() -> None:
    reading = dcgm_exporter.find_reading((DATA / "dcgm_exporter_boards.txt").read_text(), A100)
    assert (reading.sm_active, reading.sm_occupancy, reading.tensor_active) == (0.88, 0.22, 0.47)
    assert (reading.dram_active, reading.fp64_active, reading.fp32_active) == (0.33, 0.0, 0.11)
    assert reading.fp16_active is None
    assert reading.flop is None


@pytest.mark.parametrize(
    ("uuid", "tensor_active"),
    [
        ("GPU-8f8001ff-73ba-2e83-3cdc-4156ae4f3912", 0.61),  # names of DCGM 4
        ("GPU-585834DA-79ca-0599-5140-4ffdb131ae93", 0.19),  # label "uuid", other case
    ],
)
def test_new_field_names_and_other_label_spellings_are_read(uuid: str, tensor_active: float) -> None:
    text = (DATA / "dcgm_exporter_boards.txt").read_text()
    reading = dcgm_exporter.find_reading(text, Target(device="cuda:1", uuid=uuid))
    assert reading.tensor_active == tensor_active
    assert reading.dram_active is None


@pytest.mark.parametrize(("instance", "tensor_active"), [(3, 0.31), (4, 0.42)])
def test_a_mig_slice_gets_its_own_values(instance: int, tensor_active: float) -> None:
    target = Target(device="cuda:0", uuid="GPU-265c9814-6156-355b-e589-ff2064894f16", mig_instance=instance)
    reading = dcgm_exporter.find_reading((DATA / "dcgm_exporter_mig.txt").read_text(), target)
    assert reading.tensor_active == tensor_active


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Target(device="cuda:0", uuid="GPU-265c9814-6156-355b-e589-ff2064894f16"), "no DCGM_FI_PROF"),  # slices only
        (Target(device="cuda:0", uuid="GPU-58e8f5ea-13cc-013a-d88f-2bcf5ae8bc77", mig_instance=8), "no DCGM_FI_PROF"),
        (Target(device="cuda:0", uuid="GPU-0"), "does not report GPU-0"),
    ],
)
def test_a_slice_or_a_neighbour_never_stands_in_for_the_gpu(target: Target, reason: str) -> None:
    with pytest.raises(CounterUnavailableError, match=reason):
        dcgm_exporter.find_reading((DATA / "dcgm_exporter_mig.txt").read_text(), target)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[BaseHTTPRequestHandler], None]], str]]:
    """Starts a loopback HTTP server that answers with the given function, and points the reader at it."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[BaseHTTPRequestHandler], None]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        monkeypatch.setenv("FLOPMETER_DCGM_EXPORTER", address)
        return address

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_nvml")
def test_an_exporter_on_loopback_is_found_and_read_past_any_proxy(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DATA / "dcgm_exporter_boards.txt").read_bytes()
    serve(lambda handler: send(handler, text))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    reader = open_counters("cuda:0", uuid="604ac76c-d9cf-fef3-62e9-d92044ab6e52")
    assert not isinstance(reader, Unavailable)
    reader.start()
    assert (reader.name, reader.read().tensor_active) == ("dcgm_exporter", 0.47)
    reader.close()


@pytest.mark.usefixtures("no_nvml")
def test_an_exporter_that_goes_away_leaves_readings_without_values(serve: Any) -> None:
    answers = [(200, (DATA / "dcgm_exporter_boards.txt").read_bytes()), (200, b"\xff\x00{{{"), (503, b"")]
    serve(lambda handler: send(handler, answers[0][1], answers.pop(0)[0]))
    reader = open_counters("cuda:0", uuid=A100.uuid)
    assert not isinstance(reader, Unavailable)
    garbage, gone = reader.read(), reader.read()
    assert (garbage.tensor_active, gone.tensor_active) == (None, None)
    assert garbage.note == f"dcgm_exporter: the exporter does not report {A100.uuid}"
    assert gone.note.endswith("answers HTTP 503")


def test_an_exporter_that_answers_404_is_refused(serve: Any) -> None:
    serve(lambda handler: send(handler, b"", 404))
    with pytest.raises(CounterUnavailableError, match="answers HTTP 404"):
        dcgm_exporter.open(A100)


def test_a_port_that_nothing_listens_on_is_refused(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPMETER_DCGM_EXPORTER", "http://127.0.0.1:1/metrics")
    with pytest.raises(CounterUnavailableError, match=r"nothing listens on http://127\.0\.0\.1:1/metrics"):
        dcgm_exporter.open(A100)


@pytest.mark.parametrize("address", ["http://127.0.0.1:99999/", "http://[", "http://127.0.0.1:x/", "http:///"])
def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("FLOPMETER_DCGM_EXPORTER", address)
    with pytest.raises(CounterUnavailableError):
        dcgm_exporter.open(A100)


def test_a_server_of_another_protocol_is_refused(serve: Any) -> None:
    address = serve(lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n"))
    with pytest.raises(CounterUnavailableError, match="speaks no HTTP"):
        dcgm_exporter.fetch(address)


def test_a_silent_server_costs_no_more_than_the_timeout(serve: Any) -> None:
    release = threading.Event()
    address = serve(lambda handler: (release.wait(), None)[1])
    try:
        with pytest.raises(CounterUnavailableError, match=r"did not answer within 0\.05 s"):
            dcgm_exporter.fetch(address, timeout_s=0.05)
    finally:
        release.set()


def test_a_server_that_trickles_is_cut_off_at_the_deadline(serve: Any) -> None:
    release = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not release.wait(0.01):
                handler.wfile.write(b"# more\n")
        except OSError:
            handler.close_connection = True

    address = serve(trickle)
    try:
        with pytest.raises(CounterUnavailableError, match=r"did not answer within 0\.1 s"):
            dcgm_exporter.fetch(address, timeout_s=0.1)
    finally:
        release.set()


def test_an_answer_without_end_is_cut_off(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcgm_exporter, "MAX_BYTES", 1000)
    address = serve(lambda handler: send(handler, b"x" * 1001))
    with pytest.raises(CounterUnavailableError, match="longer than 1000 bytes"):
        dcgm_exporter.fetch(address)


# dcgmi

H100 = Target(device="cuda:0", uuid="GPU-d6a2c177-4cd8-8d01-0310-79f2720f37de")


def install_dcgmi(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    program = folder / "dcgmi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_each_column_of_dmon_is_averaged_over_the_rows_that_have_it() -> None:
    values = dcgmi.parse_dmon((DATA / "dcgmi_dmon.txt").read_text(), 0)
    assert values == {
        "sm_active": pytest.approx((0.8 + 0.6) / 2),
        "sm_occupancy": pytest.approx((0.2 + 0.1) / 2),
        "tensor_active": pytest.approx((0.178 + 0.222) / 2),
        "dram_active": pytest.approx((0.3 + 0.5) / 2),
        "fp64_active": None,
        "fp32_active": None,
        "fp16_active": pytest.approx((0.001 + 0.003) / 2),
    }


def test_discovery_tells_the_number_that_dcgm_gives_to_a_uuid() -> None:
    assert dcgmi.parse_discovery((DATA / "dcgmi_discovery.txt").read_text()) == {
        "GPU-d6a2c177-4cd8-8d01-0310-79f2720f37de": 0,
        "GPU-75c4ee16-a840-6f6c-9a7b-5ed8f41598b8": 1,
    }


@pytest.mark.parametrize("text", ["", "no table", "|", "| x | y |", "GPU 0", "GPU 0 1 2 3", "GPU 0 a b c d e f g"])
def test_texts_of_another_form_give_no_values(text: str) -> None:
    assert dcgmi.parse_discovery(text) == {}
    assert set(dcgmi.parse_dmon(text, 0).values()) == {None}


def test_the_program_is_asked_for_this_gpu_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("FLOPMETER_DCGM_EXPORTER", "http://127.0.0.1:1/metrics")
    script = f'echo "$@" >> {tmp_path}/calls; cat {DATA}/dcgmi_"$1".txt'
    install_dcgmi(monkeypatch, tmp_path, script)
    reader = open_counters("cuda:0", uuid=H100.uuid)
    assert not isinstance(reader, Unavailable)
    assert (reader.name, reader.read().tensor_active) == ("dcgmi", pytest.approx(0.2))
    assert (tmp_path / "calls").read_text().splitlines() == [
        "discovery -l",
        "dmon -e 1002,1003,1004,1005,1006,1007,1008 -i 0 -d 100 -c 11",
        "dmon -e 1002,1003,1004,1005,1006,1007,1008 -i 0 -d 100 -c 11",
    ]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Error: unable to establish a connection; exit 255", "dcgmi failed: Error: unable to establish"),
        ("exit 3", "dcgmi failed: 3"),
        ("echo 0 GPUs found.", "dcgmi does not list GPU-d6a2c177"),
        (f"[ $1 = dmon ] || cat {DATA}/dcgmi_discovery.txt", "prints only N/A"),
    ],
)
def test_a_dcgmi_that_cannot_serve_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    install_dcgmi(monkeypatch, tmp_path, script)
    with pytest.raises(CounterUnavailableError, match=reason):
        dcgmi.open(H100)


def test_a_mig_slice_is_refused_as_its_rows_are_not_reliable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_dcgmi(monkeypatch, tmp_path, "exit 0")
    with pytest.raises(CounterUnavailableError, match="MIG"):
        dcgmi.open(Target(device="cuda:0", uuid=H100.uuid, mig_instance=1))


def test_a_program_that_hangs_or_cannot_start_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_dcgmi(monkeypatch, tmp_path, "exec sleep 60")
    with pytest.raises(CounterUnavailableError, match=r"within 0\.05 s"):
        dcgmi.run_dcgmi(str(tmp_path / "dcgmi"), timeout_s=0.05)
    with pytest.raises(CounterUnavailableError, match="does not start"):
        dcgmi.run_dcgmi(str(tmp_path / "absent"))


# perf_event: which events, and what their sum means

ANY_KERNEL = (6, 1)


def cpu(vendor: str, family: int, model: int, *flags: str) -> perf_event.Cpu:
    return perf_event.Cpu(vendor, family, model, frozenset(flags))


def raw_codes(events: tuple[perf_event.Event, ...]) -> dict[str, int]:
    assert {event.type for event in events} == {4}
    return {f"r{event.config:04x}": event.weight for event in events}


@pytest.mark.parametrize("model", [0x55, 0x6A, 0x8F, 0xCF, 0xAD])
def test_intel_with_avx512_sums_every_unit_of_the_table_with_its_weight(model: int) -> None:
    events = perf_event.fp_events(cpu("GenuineIntel", 6, model, "avx512f"), ANY_KERNEL)
    # FP_ARITH_INST_RETIRED is event 0xc7: scalar 01+02, 128 bit double 04, 128 single 08 + 256 double 10,
    # 256 single 20 + 512 double 40, 512 single 80.
    assert raw_codes(events) == {"r03c7": 1, "r04c7": 2, "r18c7": 4, "r60c7": 8, "r80c7": 16}


@pytest.mark.parametrize("model", [0x4F, 0x5E, 0x9E])
def test_intel_without_avx512_asks_for_no_512_bit_unit(model: int) -> None:
    events = perf_event.fp_events(cpu("GenuineIntel", 6, model, "avx2"), ANY_KERNEL)
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
    events = perf_event.fp_events(cpu("AuthenticAMD", family, model), ANY_KERNEL)
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
def test_a_cpu_without_codes_on_file_is_refused(unknown: perf_event.Cpu) -> None:
    with pytest.raises(CounterUnavailableError, match="no event codes on file"):
        perf_event.fp_events(unknown, ANY_KERNEL)


def test_amd_is_refused_on_a_kernel_that_would_lose_counts() -> None:
    with pytest.raises(CounterUnavailableError, match=r"Linux 5\.6"):
        perf_event.fp_events(cpu("AuthenticAMD", 0x19, 0x01), (5, 5))


def test_units_that_the_events_do_not_see_are_named() -> None:
    sapphire_rapids = cpu("GenuineIntel", 6, 0x8F, "avx512f", "avx512_bf16", "amx_tile", "avx512_fp16")
    assert perf_event.uncounted(sapphire_rapids) == "not counted: AMX, AVX512-BF16, AVX512-FP16"
    assert perf_event.uncounted(cpu("AuthenticAMD", 0x19, 0x11, "avx512_bf16")) == ""  # in Zen 4's mask 0x10


def test_the_processor_is_read_from_the_first_block_of_cpuinfo() -> None:
    block = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9654\n"
    text = block + "flags\t\t: fpu avx2\n\n" + block.replace("25", "99")
    assert perf_event.parse_cpuinfo(text) == cpu("AuthenticAMD", 25, 17, "fpu", "avx2")
    assert perf_event.parse_cpuinfo("") == cpu("", 0, 0)


@pytest.mark.parametrize(
    ("sample", "count"),
    [((600, 1000, 1000), 600.0), ((600, 1000, 250), 2400.0), ((0, 0, 0), 0.0), ((0, 1000, 0), None)],
)
def test_an_event_that_shared_a_counter_is_scaled_to_the_whole_time(
    sample: tuple[int, int, int], count: float | None
) -> None:
    assert perf_event.scale_count(perf_event.Sample(*sample)) == count


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EOPNOTSUPP])
def test_a_machine_without_pmu_is_told(number: int) -> None:
    assert "no PMU" in perf_event.explain_errno(number)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_refusal_names_the_setting_and_its_value(number: int) -> None:
    setting = Path("/proc/sys/kernel/perf_event_paranoid")
    value = setting.read_text().strip() if setting.exists() else "unknown"
    assert f"kernel.perf_event_paranoid is {value}:" in perf_event.explain_errno(number)


# perf_event: the real kernel, with an event that needs no PMU. One page touched for the first time is one page fault.

PAGE_FAULTS = perf_event.Event(type=1, config=2, weight=1)
NUM_PAGES = 3000


def touch_pages() -> None:
    with mmap.mmap(-1, NUM_PAGES * mmap.PAGESIZE) as memory:
        for page in range(NUM_PAGES):
            memory[page * mmap.PAGESIZE] = 1


@pytest.fixture
def open_faults() -> Iterator[Callable[..., perf_event.PerfEventReader]]:
    if not sys.platform.startswith("linux"):
        pytest.skip("perf_event_open is Linux's")
    readers: list[perf_event.PerfEventReader] = []

    def open_reader(
        events: tuple[perf_event.Event, ...] = (PAGE_FAULTS,), kernel: tuple[int, int] | None = None
    ) -> perf_event.PerfEventReader:
        try:
            readers.append(perf_event.PerfEventReader(events, kernel=kernel or perf_event.kernel_version()))
        except OSError as error:
            if error.errno not in {errno.EACCES, errno.EPERM, errno.ENOSYS}:
                raise
            pytest.skip(f"perf_event_open is forbidden here: {error}")
        return readers[-1]

    yield open_reader
    for reader in readers:
        reader.close()


def test_only_what_happens_after_the_start_is_counted(open_faults: Any) -> None:
    reader = open_faults()
    touch_pages()
    reader.start()
    before = reader.read().flop
    touch_pages()
    after = reader.read().flop
    assert before < NUM_PAGES <= after - before < 2 * NUM_PAGES


def test_the_weight_of_an_event_multiplies_its_count(open_faults: Any) -> None:
    reader = open_faults((PAGE_FAULTS, PAGE_FAULTS._replace(weight=9)))
    reader.start()
    touch_pages()
    assert 10 * NUM_PAGES <= reader.read().flop < 20 * NUM_PAGES


def test_threads_that_existed_before_and_threads_that_come_later_are_counted(open_faults: Any) -> None:
    begin = threading.Event()
    early = threading.Thread(target=lambda: (begin.wait(), touch_pages()), daemon=True)
    early.start()
    reader = open_faults()
    reader.start()
    begin.set()
    early.join()
    with_early = reader.read().flop
    late = threading.Thread(target=touch_pages)
    late.start()
    late.join()
    assert NUM_PAGES <= with_early < 2 * NUM_PAGES
    assert NUM_PAGES <= reader.read().flop - with_early < 2 * NUM_PAGES


def test_child_processes_such_as_loader_workers_are_not_counted(open_faults: Any) -> None:
    if perf_event.kernel_version() < (5, 13):
        pytest.skip("this kernel cannot tell threads from child processes")
    reader, counts_children = open_faults(), open_faults(kernel=(5, 12))
    reader.start()
    counts_children.start()
    script = f"import mmap\n{inspect.getsource(touch_pages)}\nNUM_PAGES = {NUM_PAGES}\ntouch_pages()"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert reader.read().flop < NUM_PAGES <= counts_children.read().flop
    assert "child processes count too" in counts_children.read().note


def test_counters_that_miss_known_multiplications_are_refused(open_faults: Any) -> None:
    with pytest.raises(CounterUnavailableError, match="the counters miss FLOPs"):
        perf_event.self_test(open_faults())


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
    reader = open_counters("cpu")
    if isinstance(reader, Unavailable):
        assert list(reader.reasons) == ["perf_event"]
        assert len(reader.reasons["perf_event"]) > 10
        return
    a, b = numpy.ones((512, 512), numpy.float32), numpy.ones((512, 512), numpy.float32)
    reader.start()
    for _ in range(8):
        a @ b
    reading = reader.read()
    reader.close()
    assert reading.flop == pytest.approx(8 * 2 * 512**3, rel=0.05), reading.note
