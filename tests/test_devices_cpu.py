"""Peaks of a CPU: derived from a description, measured by a sweep, kept between runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flopmeter.devices import cpu as cpu_module
from flopmeter.devices import measure, peak_flops
from flopmeter.devices.cpu import Cpu, cache_folder, derive, num_threads, read_cpu
from flopmeter.devices.measure import measure_peak
from flopmeter.devices.roof import keep_roof, roof_of
from flopmeter.errors import ConfigError, UnknownDeviceError

AVX2 = frozenset({"sse2", "avx", "avx2", "fma"})
AVX512 = AVX2 | {"avx512f"}
NEON = frozenset({"asimd"})


def remember(dtype: str, flop_per_s: float) -> None:
    keep_roof("cpu", None, dtype, {(8, 8, 8): flop_per_s}, {})


def remembered(dtype: str) -> float | None:
    roof = roof_of("cpu", None, dtype)
    return roof["flop_per_s"] if roof else None


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPMETER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLOPMETER_PEAK_FLOP_PER_S", raising=False)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def processor(number: int, mhz: float, flags: str) -> str:
    return (
        f"processor : {number}\nvendor_id : GenuineIntel\nmodel name : Test CPU\ncpu MHz : {mhz}\nflags : {flags}\n\n"
    )


# What the description gives


@pytest.mark.parametrize(
    ("cpu_fields", "dtype", "flop_per_cycle"),
    [  # units x lanes x 2 operations of a fused multiply-add
        ({"flags": AVX2}, "fp32", 2 * 8 * 2),
        ({"flags": AVX2}, "fp64", 2 * 4 * 2),
        ({"flags": AVX512}, "fp32", 2 * 16 * 2),
        ({"flags": AVX512 | {"avx512_bf16"}}, "bf16", 2 * 32 * 2),
        ({"flags": AVX512 | {"amx_bf16"}}, "bf16", 16 * 16 * 32 * 2 // 16),  # a tile product takes 16 cycles
        ({"flags": AVX512 | {"amx_int8"}}, "int8", 16 * 16 * 64 * 2 // 16),
        ({"flags": AVX512, "vendor": "AuthenticAMD", "family": 25}, "fp32", 2 * 8 * 2),  # Zen 4: 256-bit units
        ({"flags": AVX512, "vendor": "AuthenticAMD", "family": 26}, "fp32", 2 * 16 * 2),
        ({"flags": AVX2, "vendor": "AuthenticAMD", "family": 23, "model_number": 1}, "fp32", 2 * 4 * 2),  # Zen 1
        ({"flags": frozenset({"sse2", "avx"})}, "fp32", 8 + 8),  # one add and one multiply
        ({"flags": NEON}, "fp32", 2 * 4 * 2),
        ({"flags": NEON | {"asimdhp"}}, "fp16", 2 * 8 * 2),
        ({"flags": NEON | {"sve"}, "vector_bytes": 32, "part": "0xd40"}, "fp32", 2 * 8 * 2),  # Neoverse V1
        ({"flags": NEON | {"sve"}, "part": "0xd4f"}, "fp32", 4 * 4 * 2),  # Neoverse V2
    ],
)
def test_the_derived_peak_is_cores_times_clock_times_operations(
    cpu_fields: dict[str, object], dtype: str, flop_per_cycle: int
) -> None:
    cpu = Cpu(model="test", cores=4, clock_hz=3e9, **cpu_fields)
    assert derive(dtype, cpu, threads=8)[0] == 4 * 3e9 * flop_per_cycle


def test_bf16_without_units_for_it_is_at_most_the_fp32_rate_and_says_so() -> None:
    cpu = Cpu(model="test", cores=1, clock_hz=1e9, flags=AVX2)
    flop_per_s, how = derive("bf16", cpu, threads=1)
    assert flop_per_s == derive("fp32", cpu, threads=1)[0]
    assert "no bf16 units" in how


def test_fewer_threads_than_cores_lower_the_peak() -> None:
    cpu = Cpu(model="test", cores=8, clock_hz=1e9, flags=AVX2)
    assert derive("fp32", cpu, threads=2)[0] == 2 * 1e9 * 32


@pytest.mark.parametrize("cpu", [Cpu(model="x", cores=1, clock_hz=1e9), Cpu(model="x", cores=1, flags=AVX2)])
def test_an_unknown_instruction_set_or_clock_derives_nothing(cpu: Cpu) -> None:
    assert derive("fp32", cpu, threads=1) == (None, "the instruction set or the clock of this CPU is not known")


def test_hyper_threads_count_once_and_the_highest_clock_is_taken(tmp_path: Path) -> None:
    topology = {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 2},{n % 2 + 2}" for n in range(4)
    }
    clocks = {f"sys/devices/system/cpu/cpu{n}/cpufreq/cpuinfo_max_freq": "3500000" for n in range(4)}
    info = "".join(processor(n, 800, "sse2 avx avx2 fma") for n in range(4))
    root = write(tmp_path, {"proc/cpuinfo": info, **topology, **clocks})
    cpu = read_cpu(root, cpus=range(4))
    assert (cpu.model, cpu.cores, cpu.clock_hz) == ("Test CPU", 2, 3.5e9)
    assert "cpufreq" in derive("fp32", cpu, threads=4)[1]
    assert derive("fp32", cpu, threads=1)[1].startswith("1 core x ")
    assert read_cpu(root, cpus=[1, 3]).cores == 1  # an affinity to both threads of one core


def test_without_cpufreq_the_clock_is_the_fastest_processors(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/cpuinfo": processor(0, 1200.5, "avx2 fma") + processor(1, 2400.25, "avx2 fma")})
    cpu = read_cpu(root, cpus=[0, 1])
    assert cpu.clock_hz == 2400.25e6
    assert "boost clock is not told" in cpu.clock_source


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 4),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"sys/fs/cgroup/cpu.max": "garbage"}, 4),
        ({}, 4),
    ],
)
def test_a_cgroup_quota_limits_the_cores(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    assert read_cpu(write(tmp_path, files), cpus=range(4)).cores == cores


def test_an_arm_processor_is_read_by_its_own_fields(tmp_path: Path) -> None:
    info = "processor : 0\nFeatures : fp asimd sve bf16\nCPU implementer : 0x41\nCPU part : 0xd40\n"
    cpu = read_cpu(write(tmp_path, {"proc/cpuinfo": info, "proc/sys/abi/sve_default_vector_length": "32"}), cpus=[0])
    assert (cpu.model, cpu.part, cpu.vector_bytes) == ("Arm 0x41 0xd40", "0xd40", 32)
    assert cpu.flags >= {"asimd", "sve"}


def test_this_machine_can_be_read() -> None:
    cpu = read_cpu()
    assert cpu.cores > 0
    assert cpu.model


def test_the_thread_count_is_torchs_when_torch_is_loaded() -> None:
    assert num_threads(read_cpu()) == torch.get_num_threads()


# What was measured


def test_the_larger_of_derived_and_measured_is_the_peak_and_both_are_shown() -> None:
    derived, how = derive("fp32")
    if derived is None:
        pytest.skip("this machine does not tell its instruction set or clock")
    before = peak_flops("cpu", "fp32")
    assert (before.source, before.flop_per_s, before.measured_flop_per_s) == ("derived", derived, None)
    # Other threads or another dtype would be measured in vain: the next look-up would not find it.
    command = f"OMP_NUM_THREADS={torch.get_num_threads()} flopmeter peak --device cpu --dtype fp32 --measure"
    assert before.note.endswith(f"; not measured yet: {command}")
    assert "--measure" in before.note
    remember("fp32", derived / 2)
    slower = peak_flops("cpu", "fp32")
    assert (slower.source, slower.flop_per_s) == ("derived", derived)
    assert slower.measured_flop_per_s == derived / 2
    remember("fp32", derived * 2)
    faster = peak_flops("cpu", "fp32")
    assert (faster.source, faster.flop_per_s) == ("measured", derived * 2)
    assert faster.derived_flop_per_s == derived
    assert faster.note.startswith(f"measured on this machine and kept for this user ({command} measures again)")
    assert faster.note.endswith(f"derived would be less, {derived / 1e9:.4g} GFLOP/s: {how}")
    assert how in slower.note
    assert "measured on this machine" not in slower.note


def test_a_dtype_that_a_cpu_cannot_do_is_unknown() -> None:
    with pytest.raises(UnknownDeviceError, match="no fp4 peak can be derived"):
        peak_flops("cpu", "fp4")


def test_of_several_measurements_the_best_is_kept_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for rate in (1e9, 3e9, 2e9):
        remember("fp32", rate)
    assert remembered("fp32") == 3e9
    assert remembered("bf16") is None


def test_a_measurement_counts_only_for_the_machine_torch_and_threads_it_was_taken_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found_on(cpu: Cpu) -> float | None:
        monkeypatch.setattr(cpu_module, "read_cpu", lambda: cpu)
        return remembered("fp32")

    cpu = Cpu(model="test", cores=2)
    assert found_on(cpu) is None
    remember("fp32", 1e9)
    assert found_on(Cpu(model="test", cores=4)) is None
    assert found_on(Cpu(model="another", cores=2)) is None
    assert found_on(cpu) == 1e9
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "1.0")
        assert remembered("fp32") is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 99)
        assert remembered("fp32") is None
    assert remembered("fp32") == 1e9


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": "b"}', b"[" * 100_000])
def test_a_corrupt_cache_is_empty_and_can_be_written_again(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder().mkdir(parents=True)
    (cache_folder() / "roofs.json").write_bytes(content)
    assert remembered("fp32") is None
    remember("fp32", 1e9)
    assert remembered("fp32") == 1e9


def test_a_cache_entry_that_is_no_rate_is_ignored() -> None:
    remember("fp32", 1e9)
    file = cache_folder() / "roofs.json"
    text = file.read_text()
    for value in ("NaN", "-1", "Infinity", "null", '"fast"'):
        file.write_text(text.replace("1000000000.0", value))
        assert remembered("fp32") is None


def test_an_unwritable_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("a file where the folder should be")
    monkeypatch.setenv("FLOPMETER_CACHE", str(tmp_path / "file"))
    remember("fp32", 1e9)
    assert remembered("fp32") is None


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPMETER_CACHE", "/own")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("FLOPMETER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/flopmeter")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/flopmeter")


# The sweep


def test_a_sweep_reports_best_and_typical_and_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MIN_CPU_SHARE", 0.0)  # whatever else runs here
    random_state, seen = torch.get_rng_state(), []
    result = measure_peak("cpu", "fp32", budget_s=0.3, progress=lambda done, total: seen.append((done, total)))
    rates = {entry["shape"]: entry["flop_per_s"] for entry in result.shapes}
    assert result.best_flop_per_s == max(rates.values()) == rates[result.best_shape]
    assert min(rates.values()) <= result.typical_flop_per_s <= result.best_flop_per_s
    assert not set(rates) & set(result.skipped)
    assert [done for done, _ in seen] == list(range(1, seen[-1][1] + 1))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert remembered("fp32") == result.best_flop_per_s


def test_a_shape_that_does_not_fit_into_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.mm

    def small_memory(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if left.shape[0] > 512:
            raise torch.OutOfMemoryError("out of memory")
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", small_memory)
    result = measure_peak("cpu", "fp32", budget_s=0.2)
    assert {entry["shape"][0] for entry in result.shapes} == {512}
    assert (1024, 1024, 1024) in result.skipped


@pytest.mark.parametrize(
    ("device", "dtype", "budget_s", "error", "message"),
    [
        ("cpu", "fp8", 1, ConfigError, "fp8 cannot be measured"),
        ("cpu", "tf32", 1, ConfigError, "tf32 cannot be measured"),
        ("cpu", "fp32", 0, ConfigError, "positive number of seconds"),
        ("cpu", "fp32", float("nan"), ConfigError, "positive number of seconds"),
        ("NVIDIA L4", "fp32", 1, ConfigError, "not on 'NVIDIA L4'"),
        ("cuda:99", "fp32", 1, UnknownDeviceError, "so cuda:99 cannot be measured"),
    ],
)
def test_a_sweep_that_cannot_run_says_why(
    device: str, dtype: str, budget_s: float, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        measure_peak(device, dtype, budget_s)
