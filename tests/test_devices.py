"""Peaks of devices: the table, exact look-up, dtypes and TF32, what the user states, and devices of this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopmeter.devices import (
    DTYPES,
    _table,
    find_device,
    list_devices,
    normalise_dtype,
    normalise_name,
    peak_flops,
)
from flopmeter.devices import uses_tf32 as torch_uses_tf32
from flopmeter.errors import ConfigError, UnknownDeviceError

NAMES = [name for device in list_devices() for name in device.names]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPMETER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLOPMETER_PEAK_FLOP_PER_S", raising=False)


@pytest.fixture
def fp32_flags() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for place in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends):
        place.fp32_precision = "none"


# The table


@pytest.mark.parametrize(
    ("name", "bf16_tflop_per_s"),
    [  # vendor sheets, as collected in peaks.csv
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA RTX A4000", 76.7),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA H800", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-PG509-200", 312),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_a_device_gives_its_own_number(name: str, bf16_tflop_per_s: float) -> None:
    peak = peak_flops(name, "bf16")
    assert peak.flop_per_s == pytest.approx(bf16_tflop_per_s * 1e12, rel=1e-12)
    assert (peak.source, peak.dtype, peak.device) == ("table", "bf16", name)
    assert peak.reference


@pytest.mark.parametrize(
    ("name", "clock_hz", "fma_per_clock", "cores"),
    [  # the makers' own arithmetic: clock x multiply-adds per clock and core x 2 x cores
        ("NVIDIA H100 80GB HBM3", 1830e6, 512, 528),
        ("NVIDIA A100-SXM4-80GB", 1410e6, 256, 432),
        ("AMD Instinct MI300X", 2100e6, 256, 1216),
        ("AMD Instinct MI355X", 2400e6, 512, 1024),
        ("AMD Instinct MI250X", 1700e6, 128, 440),
        ("GAUDI3", 1600e6, 65536, 8),
    ],
)
def test_a_peak_is_clock_times_units(name: str, clock_hz: float, fma_per_clock: int, cores: int) -> None:
    assert peak_flops(name, "bf16").flop_per_s == pytest.approx(clock_hz * fma_per_clock * 2 * cores, rel=1e-3)


def test_no_two_names_in_the_table_are_compared_equal() -> None:
    blocks = [*_table()["device"], *_table()["unlisted"]]
    compared = [normalise_name(name) for block in blocks for name in block["names"]]
    assert len(compared) == len(set(compared))


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.names[0])
def test_a_block_is_complete_dense_and_plausible(device: object) -> None:
    peaks = device.peak_flop_per_s
    assert set(peaks) <= {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8"}
    assert set(device.derived) <= set(peaks)
    assert re.fullmatch(r"20\d\d-\d\d", device.date)
    assert device.source
    assert all(1e11 < peak < 2e16 for peak in peaks.values())
    assert max(peaks.get("bf16", 0), peaks.get("fp16", 0)) < 2.6e15, (
        "no device of 2026 is denser: is this with sparsity?"
    )
    assert device.memory_bytes_per_s is None or 1e11 < device.memory_bytes_per_s < 1e13
    for slow, fast in [
        ("fp64", "bf16"),
        ("fp32", "bf16"),
        ("tf32", "bf16"),
        ("bf16", "fp8"),
        ("bf16", "int8"),
        ("fp8", "fp4"),
    ]:
        if slow in peaks and fast in peaks:
            assert peaks[slow] <= peaks[fast]


@pytest.mark.parametrize("line", ["NVIDIA H100 80GB HBM3", " nvidia h100 80gb hbm3\n", "H100 80GB HBM3"])
def test_case_maker_and_outer_space_do_not_matter(line: str) -> None:
    assert find_device(line) is find_device("NVIDIA H100 80GB HBM3")


def test_older_and_newer_drivers_name_the_same_v100() -> None:
    found = {id(find_device(prefix + "V100-SXM2-16GB")) for prefix in ("Tesla ", "NVIDIA Tesla ", "NVIDIA ", "")}
    assert len(found) == 1


# Names that are not in the table


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG slice"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "laptop card"),
        ("NVIDIA GeForce RTX 2080 with Max-Q Design", "laptop card"),
        ("NVIDIA X999", ""),
        ("NVIDIA GeForce RTX 4090 D", "on file are 'NVIDIA GeForce RTX 4090'"),
        ("NVIDIA H100", "HBM2e"),
        ("NVIDIA L20Y", ""),
        ("AMD Instinct MI308X", ""),
        ("AMD Radeon Graphics", "generic name"),
        ("Apple M2", "core counts"),
        ("", "gcnArchName"),
    ],
)
def test_an_unknown_name_raises_one_line_that_names_every_cure(name: str, why: str) -> None:
    with pytest.raises(UnknownDeviceError) as raised:
        peak_flops(name, "bf16")
    message = str(raised.value)
    assert why in message
    assert "\n" not in message
    for cure in (
        "peak_flop_per_s:",
        "monitoring:",
        "FLOPMETER_PEAK_FLOP_PER_S",
        "flopmeter peak --measure",
        "devices.toml",
    ):
        assert cure in message


@pytest.mark.parametrize("name", NAMES)
def test_a_name_with_something_added_is_another_device(name: str) -> None:
    for other in (name + " MIG 1g.10gb", name + " Z", name + "Z", "Z" + name):
        with pytest.raises(UnknownDeviceError):
            peak_flops(other, "bf16")


@given(st.text() | st.sampled_from(NAMES).flatmap(lambda name: st.text(max_size=3).map(lambda end: name + end)))
def test_any_string_gives_a_peak_or_the_one_error(name: str) -> None:
    try:
        peak = peak_flops(name, "fp16")
    except UnknownDeviceError as error:
        message = str(error)
    else:
        assert peak.source != "table" or normalise_name(name) in map(normalise_name, NAMES)
        message = "a peak"
    assert len(message.splitlines()) == 1


def test_a_dtype_that_is_not_on_file_says_which_are() -> None:
    with pytest.raises(UnknownDeviceError, match=r"no bf16 peak .* \(on file: fp64, fp32, fp16\)"):
        peak_flops("Tesla V100-SXM2-16GB", "bf16")


# dtypes, TF32 and what the user states


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bf16"),
        ("torch.bfloat16", "bf16"),
        ("BF16", "bf16"),
        (torch.float16, "fp16"),
        ("half", "fp16"),
        (torch.float32, "fp32"),
        (torch.float64, "fp64"),
        (torch.float8_e4m3fn, "fp8"),
        ("nvfp4", "fp4"),
        (torch.int8, "int8"),
        ("tf32", "tf32"),
    ],
)
def test_every_usual_spelling_of_a_dtype_is_understood(dtype: object, name: str) -> None:
    assert normalise_dtype(dtype) == name


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, "int4", "", "bf-16"])
def test_a_dtype_without_a_matmul_peak_is_refused_with_the_choices(dtype: object) -> None:
    with pytest.raises(ConfigError, match="use one of fp64, fp32"):
        normalise_dtype(dtype)


def test_fp32_is_the_cuda_core_rate_by_default() -> None:
    peak = peak_flops("NVIDIA A100-SXM4-80GB", torch.float32)
    assert (peak.dtype, peak.flop_per_s) == ("fp32", 19.5e12)
    assert peak_flops("NVIDIA A100-SXM4-80GB") == peak  # torch's default dtype


@pytest.mark.parametrize("setting", ["fp32_precision", "parent", "allow_tf32", "matmul_precision"])
@pytest.mark.usefixtures("fp32_flags")
def test_fp32_is_the_tf32_rate_whichever_way_torch_was_set_to_it(setting: str) -> None:
    if setting == "fp32_precision":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            _ = torch.backends.cuda.matmul.allow_tf32  # why the order of reading matters
    elif setting == "parent":
        torch.backends.fp32_precision = "tf32"
    elif setting == "allow_tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    else:
        torch.set_float32_matmul_precision("high")
    assert torch_uses_tf32()
    peak = peak_flops("NVIDIA A100-SXM4-80GB", "fp32")
    assert (peak.dtype, peak.flop_per_s) == ("tf32", 156e12)
    assert "TF32" in peak.note
    assert peak_flops("Tesla V100-SXM2-16GB", "fp32").dtype == "fp32"  # has no TF32 units, whatever the flag says


@pytest.mark.usefixtures("fp32_flags")
def test_tf32_switched_off_by_the_newer_interface_is_off() -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert not torch_uses_tf32()


def test_a_stated_peak_beats_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPMETER_PEAK_FLOP_PER_S", "1.5e14")
    stated = peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    assert (stated.flop_per_s, stated.source) == (1.5e14, "user")
    assert "FLOPMETER_PEAK_FLOP_PER_S" in stated.note
    assert peak_flops("NVIDIA X999", "bf16", peak_flop_per_s=2e14).flop_per_s == 2e14  # the argument comes first


@pytest.mark.parametrize("text", ["fast", "0", "-1e12", "nan", "inf", "989 TFLOPS"])
def test_a_stated_peak_that_is_no_positive_number_names_its_variable(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOPMETER_PEAK_FLOP_PER_S", text)
    with pytest.raises(ConfigError, match=re.escape(f"FLOPMETER_PEAK_FLOP_PER_S is {text!r}")):
        peak_flops("NVIDIA L4", "bf16")


# Devices of this machine; the driver is played, since the tests run without a GPU


def play_driver(monkeypatch: pytest.MonkeyPatch, name: str, *, units: int = 108, started: bool = True) -> None:
    properties = SimpleNamespace(multi_processor_count=units, gcnArchName="gfx942")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)


@pytest.mark.parametrize("device", [None, "cuda", "cuda:1", torch.device("cuda", 0)])
def test_a_device_of_this_machine_is_looked_up_by_its_driver_name(
    device: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_driver(monkeypatch, "NVIDIA A100-SXM4-80GB")
    assert peak_flops(device, "bf16").flop_per_s == 312e12


def test_a_lookup_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, "NVIDIA L4", started=False)
    with pytest.raises(UnknownDeviceError, match="has not started cuda"):
        peak_flops(None, "bf16")
    assert peak_flops(None, "bf16", may_initialise=True).flop_per_s == 121e12


def test_a_name_that_two_boards_share_is_told_apart_by_its_compute_units(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, "AMD Instinct MI250X/MI250", units=110)
    assert peak_flops("cuda:0", "bf16").flop_per_s == 191.5e12
    play_driver(monkeypatch, "AMD Instinct MI250X/MI250", units=104)
    with pytest.raises(UnknownDeviceError, match="104 compute units, and the device on file has 110"):
        peak_flops("cuda:0", "bf16")


def test_a_nameless_rocm_device_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, " ")
    with pytest.raises(UnknownDeviceError, match=r"no name, as seen on ROCm.*gcnArchName.*gfx942"):
        peak_flops("cuda:0", "bf16")


def test_a_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, "NVIDIA L4")
    with pytest.raises(UnknownDeviceError, match="torch sees 2 cuda devices here and no cuda:7"):
        peak_flops("cuda:7", "bf16")


def test_without_an_accelerator_the_peak_is_the_cpus() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert peak_flops(None, "fp32") == peak_flops("cpu", "fp32")


def test_looking_up_a_name_imports_no_torch() -> None:
    code = """
import sys
from flopmeter.devices import list_devices, peak_flops, uses_tf32
peak_flops("NVIDIA L4", "bf16"), peak_flops("cpu", "fp32"), list_devices(), uses_tf32()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("dtype", "said", "unsaid"),
    [
        ("bf16", "1979 is with sparsity", "CUDA cores"),
        ("fp64", "CUDA cores do 34", "sparsity"),
        ("fp8", "", "sparsity"),
    ],
)
def test_a_note_about_one_dtype_is_not_shown_for_another(dtype: str, said: str, unsaid: str) -> None:
    note = peak_flops("NVIDIA H100 80GB HBM3", dtype).note
    assert said in note
    assert unsaid not in note


def test_a_note_names_what_all_dtypes_share_then_its_own_dtype_then_the_rule_of_a_derived_peak() -> None:
    derived = next(device for device in list_devices() if device.note and device.derived)
    dtype, rule = next(iter(derived.derived.items()))
    assert peak_flops(derived.names[0], dtype).note.startswith(derived.note)
    assert peak_flops(derived.names[0], dtype).note.endswith(f"{dtype} is derived: {rule}.")
    for dtype in ("bf16", "fp16"):
        assert "330.3 needs FP16 accumulation" in peak_flops("NVIDIA GeForce RTX 4090", dtype).note
    assert all(set(device.notes) <= set(DTYPES) for device in list_devices())
