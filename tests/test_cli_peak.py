"""`flopmeter peak`, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flopmeter.cli import peak as peak_command
from flopmeter.devices import list_devices, measure
from flopmeter.devices.measure import Measurement
from flopmeter.errors import ConfigError, UnknownDeviceError

app = typer.Typer()
app.command("peak")(peak_command.command)
app.callback()(lambda: None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPMETER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLOPMETER_PEAK_FLOP_PER_S", raising=False)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_peak_of_an_h100_as_json() -> None:
    answer = json.loads(run("peak", "--device", "NVIDIA H100 80GB HBM3", "--dtype", "bf16", "--json"))
    assert (answer["device"], answer["dtype"]) == ("NVIDIA H100 80GB HBM3", "bf16")
    assert answer["flop_per_s"] == 989400000000000.0  # NVIDIA's sheet: 989.4 TFLOP/s dense
    assert (answer["source"], answer["memory_bytes_per_s"]) == ("table", 3.35e12)
    assert {"reference", "note"} <= set(answer)
    assert "measured" not in answer


def test_the_peak_of_an_l40s_in_words() -> None:
    text = run("peak", "--device", "NVIDIA L40S", "--dtype", "bf16")
    assert text.startswith("NVIDIA L40S, bf16: 362.05 TFLOP/s\n")
    assert "733" in text  # the caveat


@pytest.mark.parametrize(
    "name", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4070 Laptop GPU", "NVIDIA X999"]
)
def test_an_unknown_device_is_an_error_and_prints_nothing(name: str) -> None:
    with pytest.raises(UnknownDeviceError, match="no peak is on file"):
        run("peak", "--device", name)


def test_the_exit_code_and_the_one_line_of_an_unknown_device() -> None:
    command = [sys.executable, "-m", "flopmeter", "peak", "--device", "NVIDIA X999", "--dtype", "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("flopmeter: error: no peak is on file for 'NVIDIA X999'")
    assert "flopmeter peak --list shows the names on file" in done.stderr
    assert "YAML" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["'--list', '--json'", "'--list'", "'--device', 'NVIDIA L4'"])
def test_looking_up_and_listing_import_no_torch(command: str) -> None:
    code = f"""
import sys
from flopmeter.cli import main
sys.argv = ['flopmeter', 'peak', {command}]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert 'torch' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_list_as_json_holds_every_device_in_flop_per_s() -> None:
    listed = json.loads(run("peak", "--list", "--json"))
    assert len(listed) == len(list_devices())
    l4 = next(block for block in listed if block["names"] == ["NVIDIA L4"])
    assert l4["peak_flop_per_s"]["bf16"] == 121e12
    assert l4["memory_bytes_per_s"] == 0.3e12


def test_the_list_in_words_has_every_name_and_unit() -> None:
    text = run("peak", "--list")
    assert "TFLOP/s" in text
    for device in list_devices():
        assert all(name in text for name in device.names)


def test_the_list_can_be_filtered() -> None:
    listed = json.loads(run("peak", "--list", "l4", "--json"))
    assert ["NVIDIA L4"] in [block["names"] for block in listed]
    assert all(any("l4" in name.lower() for name in block["names"]) for block in listed)
    assert len(listed) < len(list_devices())


def test_a_measured_cpu_shows_derived_and_measured_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MIN_CPU_SHARE", 0.0)  # whatever else runs here
    answer = json.loads(run("peak", "--device", "cpu", "--dtype", "fp32", "--measure", "--seconds", "0.3", "--json"))
    measured = answer["measured"]
    assert measured["best_flop_per_s"] == max(entry["flop_per_s"] for entry in measured["shapes"])
    assert measured["typical_flop_per_s"] <= measured["best_flop_per_s"]
    assert len(measured["best_shape"]) == 3
    derived = answer.get("derived", {"flop_per_s": 0.0})["flop_per_s"]
    assert answer["flop_per_s"] == max(derived, measured["best_flop_per_s"])
    again = json.loads(run("peak", "--device", "cpu", "--dtype", "fp32", "--json"))
    assert again["measured"] == {"kept_flop_per_s": measured["best_flop_per_s"]}


def test_measuring_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigError, match="a device of this machine"):
        run("peak", "--device", "NVIDIA L4", "--measure")


def test_a_measured_device_that_is_not_on_file_still_gets_a_number() -> None:
    shape = (4096, 4096, 4096)
    measurement = Measurement(
        device="cuda:0",
        dtype="bf16",
        best_flop_per_s=3e13,
        best_shape=shape,
        typical_flop_per_s=2e13,
        shapes=({"shape": shape, "flop_per_s": 3e13},),
        skipped=(),
        elapsed_s=8.0,
    )
    peak = peak_command._peak("NVIDIA X999", "bf16", measurement)
    assert (peak.source, peak.flop_per_s, peak.dtype) == ("measured", 3e13, "bf16")
    assert "not a peak on file" in peak.note


def test_measuring_without_torch_names_the_library() -> None:
    code = """
import sys
sys.modules['torch'] = None  # as if it were not installed
from flopmeter.cli import main
sys.argv = ['flopmeter', 'peak', *sys.argv[1:]]
main()
"""
    run_code = [sys.executable, "-c", code]
    asked = subprocess.run([*run_code, "--measure"], capture_output=True, text=True, check=False)
    assert asked.returncode == 1
    assert "needs torch, which is not installed" in asked.stderr
    plain = subprocess.run([*run_code, "--dtype", "fp32"], capture_output=True, text=True, check=False)
    assert (plain.returncode, "fp32" in plain.stdout) == (0, True)  # this CPU's own, derived
