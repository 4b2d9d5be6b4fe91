"""Does every dialect of settings end as the right MonitorConfig, and what do its settings mean?"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flopmeter.config import MonitorConfig, preset_paths
from flopmeter.config.reading import setting_paths
from flopmeter.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PERFORMANCE = "monitoring.performance_monitoring"


def nested(path: str, value: object) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    *sections, name = path.split(".")
    tree: dict[str, Any] = {name: value}
    for section in reversed(sections):
        tree = {section: tree}
    return tree


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    """The trees as one, for settings written side by side."""
    result: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


@pytest.fixture
def yaml_file(tmp_path: Path) -> Any:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "train.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_the_defaults_are_those_of_the_design() -> None:
    config = MonitorConfig.load(None)
    monitoring = config.monitoring
    assert (monitoring.mfu_calculation_mode, monitoring.convention) == ("smart", "exact")
    assert (monitoring.overhead_budget, monitoring.peak_flop_per_s) == (0.005, None)
    assert (monitoring.detail_every, monitoring.dataset_metrics_every) == (50, 10)
    assert (monitoring.flush_every, monitoring.flush_s, monitoring.sinks) == (200, 5.0, ("console",))
    assert (config.prometheus.host, config.prometheus.port) == ("127.0.0.1", 9464)
    assert (config.wandb.enabled, config.tensorboard.enabled, config.prometheus.enabled) == (False, False, False)
    assert (config.wandb.log_dataset_metrics, config.wandb.reduced_logging) == (True, False)
    assert config.training.logging_steps == 1
    assert MonitorConfig() == config == MonitorConfig.load({})


def test_the_yaml_of_the_design_is_read_in_full(yaml_file: Any) -> None:
    config = MonitorConfig.load(
        yaml_file("""\
monitoring:
  mfu_calculation_mode: hybrid
  flops_profile_freq: 300
  convention: full
  overhead_budget: 0.01
  peak_flop_per_s: 312e12
  sinks: [console, tensorboard]
  performance_monitoring:
    measure_flops_frequency: 250
    smart_mode:  {initial_profiling: false, calibration_enabled: false, recalibration_frequency: 800}
    hybrid_mode: {hardware_counters_enabled: false, fallback_to_profiler: false}
    phase_frequency: {warmup: 10, main: 20, finetune: 30}
monitor: {freq: {flops_profile_freq: 50}}
wandb: {enabled: yes, project: p, run_name: r, tags: [a, b], entity: team, mode: offline}
prometheus: {enabled: true, host: 0.0.0.0, port: 9000}
training: {logging_steps: 5, eval_steps: 100, save_steps: 0.5, learning_rate: 1e-4}
model: {id2label: {0: cat}}
""")
    )
    performance = config.monitoring.performance_monitoring
    assert config.monitoring.peak_flop_per_s == 312e12
    assert (performance.measure_flops_frequency, config.monitor.freq.flops_profile_freq) == (250, 50)
    assert not performance.smart_mode.initial_profiling
    assert not performance.smart_mode.calibration_enabled
    assert not performance.hybrid_mode.hardware_counters_enabled
    assert not performance.hybrid_mode.fallback_to_profiler
    phases = performance.phase_frequency
    assert (phases.warmup, phases.main, phases.finetune) == (10, 20, 30)
    assert config.sink_names == ("console", "tensorboard", "wandb", "prometheus")
    assert config.training.logging_steps == 5


@pytest.mark.parametrize("value", [-1, 0, 0.5, 100, "epoch", "never"])
def test_what_the_trainer_means_by_its_own_keys_is_the_trainers_business(value: Any) -> None:
    config = MonitorConfig.load({"training": {"eval_steps": value, "save_steps": value}})
    assert config == MonitorConfig.load({"training": {}})


@pytest.mark.parametrize("section", ["model", "datasets", "deepspeed", "log", "trainer", "tensorboard_dir", "mode"])
def test_sections_that_are_not_ours_are_left_alone(section: str) -> None:
    assert MonitorConfig.load({section: {"anything": [1, {2: 3}]}}) == MonitorConfig()


def test_keys_of_the_trainer_are_left_alone() -> None:
    trainer = {"learning_rate": 1e-4, "num_epochs": 3, "log_steps": 7, "logging_strategy": "steps", 1: 2}
    assert MonitorConfig.load({"training": trainer}) == MonitorConfig()


@pytest.mark.parametrize("empty", [None, {}])
def test_an_empty_section_and_a_null_count_as_not_written(empty: object) -> None:
    assert MonitorConfig.load({"monitoring": empty, "wandb": empty}) == MonitorConfig()
    config = MonitorConfig.load({"monitoring": {"flops_profile_freq": None, "detail_every": None, "sinks": None}})
    assert config == MonitorConfig()
    assert not config.measuring_interval().is_explicit


def test_any_mapping_will_do_and_a_config_is_passed_on() -> None:
    config = MonitorConfig.load(MappingProxyType({"monitoring": MappingProxyType({"detail_every": 7})}))
    assert config.monitoring.detail_every == 7
    assert MonitorConfig.load(config) is config
    assert MonitorConfig(monitoring={"detail_every": 7}) == config


@pytest.mark.parametrize(
    ("text", "number"), [("989e12", 989e12), ("9.89E+14", 989e12), ("1_000_000", 1e6), ("5", 5.0), ("'2.5'", 2.5)]
)
def test_numbers_that_yaml_takes_for_text_are_numbers(yaml_file: Any, text: str, number: float) -> None:
    config = MonitorConfig.load(yaml_file(f"monitoring: {{peak_flop_per_s: {text}}}"))
    assert config.monitoring.peak_flop_per_s == number


def test_whole_numbers_may_be_written_with_an_exponent_or_a_point(yaml_file: Any) -> None:
    config = MonitorConfig.load(yaml_file("monitoring: {flops_profile_freq: 1e3, detail_every: 20.0}"))
    assert (config.monitoring.flops_profile_freq, config.monitoring.detail_every) == (1000, 20)


def test_a_setting_cannot_be_changed_afterwards() -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        MonitorConfig().monitoring.detail_every = 3  # type: ignore[misc]


@pytest.mark.parametrize("mode", ["profiler", "hybrid"])
def test_the_measuring_frequency_goes_to_the_strongest_that_was_written(mode: str) -> None:
    strongest_last = [
        (f"{PERFORMANCE}.measure_flops_frequency", 400),
        ("monitor.freq.flops_profile_freq", 300),
        ("monitoring.flops_profile_freq", 200),
    ]
    written = nested("monitoring.mfu_calculation_mode", mode)
    assert MonitorConfig.load(written).measuring_interval() == (500, None)
    for path, steps in strongest_last:
        written = merged(written, nested(path, steps))
        assert MonitorConfig.load(written).measuring_interval() == (steps, path)
    assert MonitorConfig.load(written).measuring_interval(argument=100).steps == 100


def test_in_smart_mode_the_recalibration_frequency_rules() -> None:
    recalibration = nested(f"{PERFORMANCE}.smart_mode.recalibration_frequency", 800)
    frequency = nested("monitoring.flops_profile_freq", 50)
    assert MonitorConfig.load(merged(recalibration, frequency)).measuring_interval().steps == 800
    assert MonitorConfig.load(recalibration).measuring_interval(argument=70).steps == 70
    assert MonitorConfig.load(None).measuring_interval() == (1000, None)


def test_in_smart_mode_no_default_overrules_a_written_frequency() -> None:
    assert MonitorConfig.load(nested("monitor.freq.flops_profile_freq", 50)).measuring_interval().steps == 50


def test_after_a_phase_was_set_its_frequency_rules() -> None:
    config = MonitorConfig.load(nested(f"{PERFORMANCE}.phase_frequency.main", 0))
    assert config.measuring_interval(phase="main", argument=70) == (0, f"{PERFORMANCE}.phase_frequency.main")
    assert config.measuring_interval(phase="warmup") == (1000, None)
    assert config.measuring_interval(phase="finetune") == (200, None)


def test_estimate_mode_never_measures() -> None:
    config = MonitorConfig.load(merged(nested("monitoring.mfu_calculation_mode", "estimate")))
    assert config.measuring_interval(argument=50, phase="main") == (0, None)


def test_a_frequency_of_zero_counts_as_written() -> None:
    config = MonitorConfig.load({"monitoring": {"mfu_calculation_mode": "profiler", "flops_profile_freq": 0}})
    assert config.measuring_interval() == (0, "monitoring.flops_profile_freq")
    assert config.measuring_interval().is_explicit


@pytest.mark.parametrize("argument", [-5, True, 1.5, "often"])
def test_an_impossible_argument_is_refused_in_every_mode(argument: Any) -> None:
    for mode in ("smart", "estimate"):
        config = MonitorConfig.load(nested("monitoring.mfu_calculation_mode", mode))
        with pytest.raises(ConfigError, match=r"^flops_profile_freq: .* whole number of steps, 0 or more"):
            config.measuring_interval(argument=argument)


def test_an_unknown_phase_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'pretrain' is not allowed \(expected warmup, main, finetune"):
        MonitorConfig().measuring_interval(phase="pretrain")


def test_each_sink_is_named_once_however_often_it_is_asked_for() -> None:
    config = MonitorConfig.load({"monitoring": {"sinks": ["wandb", "console", "wandb"]}, "wandb": True})
    assert config.sink_names == ("wandb", "console")
    assert MonitorConfig.load({"monitoring": {"sinks": []}, "tensorboard": True}).sink_names == ("tensorboard",)
    assert MonitorConfig.load({"monitoring": {"sinks": "jsonl"}}).sink_names == ("jsonl",)


def test_what_wandb_init_takes_is_passed_through_to_it() -> None:
    section = {"enabled": True, "project": "p", "run_name": "r", "tags": "x", "reduced_logging": True}
    passed = {"entity": "team", "group": "g", "resume": "allow", "config": {"seed": 1}, "save_code": False}
    passed["an_argument_of_next_year"] = [1, 2]
    arguments = MonitorConfig.load({"wandb": {**section, **passed}}).wandb.init_arguments()
    assert arguments == {"project": "p", "name": "r", "tags": ("x",), **passed}
    assert MonitorConfig().wandb.init_arguments() == {}


def test_a_bare_off_as_wandb_mode_means_disabled(yaml_file: Any) -> None:
    assert MonitorConfig.load(yaml_file("wandb: {mode: off}")).wandb.init_arguments() == {"mode": "disabled"}


@pytest.mark.parametrize(
    ("preset", "mode", "interval_steps"),
    [
        ("smart", "smart", 1000),
        ("profiler", "profiler", 50),
        ("estimate", "estimate", 0),
        ("hybrid", "hybrid", 500),
        ("config_profiler_mfu", "profiler", 500),
        ("light", "smart", 1000),
        ("large_model", "smart", 1000),
    ],
)
def test_each_preset_loads_by_name_and_by_path(preset: str, mode: str, interval_steps: int) -> None:
    config = MonitorConfig.load(preset)
    assert config == MonitorConfig.load(ROOT / "configs" / f"{preset}.yaml")
    assert config.monitoring.mfu_calculation_mode == mode
    assert config.measuring_interval().steps == interval_steps


def test_the_presets_say_what_the_mission_fixes() -> None:
    config = {name: MonitorConfig.load(name) for name in preset_paths()}
    assert len(config) == 7
    smart = config["smart"].monitoring.performance_monitoring
    assert (smart.measure_flops_frequency, smart.smart_mode.recalibration_frequency) == (500, 1000)
    hybrid = config["hybrid"].monitoring.performance_monitoring.hybrid_mode
    assert hybrid.hardware_counters_enabled
    assert hybrid.fallback_to_profiler
    assert config["config_profiler_mfu"].monitoring.flops_profile_freq == 500
    assert config["estimate"].monitoring.performance_monitoring.measure_flops_frequency == 0
    assert config["profiler"].measuring_interval().is_explicit
    assert (config["light"].wandb.log_dataset_metrics, config["light"].wandb.reduced_logging) == (False, True)
    assert config["large_model"].training.logging_steps == 100


def test_presets_load_from_a_wheel_without_torch_and_whatever_lies_around(tmp_path: Path) -> None:
    package = tmp_path / "site" / "flopmeter"
    shutil.copytree(ROOT / "src" / "flopmeter" / "config", package / "config")
    for name in ("__init__.py", "errors.py", "schema.py"):
        shutil.copy(ROOT / "src" / "flopmeter" / name, package)
    shutil.copytree(ROOT / "configs", package / "configs")
    (tmp_path / "smart").mkdir()
    program = (
        "import sys; from flopmeter.config import MonitorConfig, preset_paths; MonitorConfig.load('smart');"
        "print(preset_paths()['smart']); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    output = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert output.split() == [str(package / "configs" / "smart.yaml"), "False"]


def test_the_settings_page_is_up_to_date_and_lists_every_setting() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    command = [sys.executable, "scripts/write_settings.py"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert page == made, "run  python scripts/write_settings.py > docs/settings.md"
    for path, kind in setting_paths(MonitorConfig):
        assert (f"## {path}\n" if isinstance(kind, type) else f"| `{path}` |") in page


frequencies = st.integers(0, 10**9)
steps = st.integers(1, 10**9)
VALID = {
    "monitoring.mfu_calculation_mode": st.sampled_from(["smart", "profiler", "estimate", "hybrid"]),
    "monitoring.flops_profile_freq": frequencies,
    "monitoring.convention": st.sampled_from(["exact", "full"]),
    "monitoring.overhead_budget": st.floats(0, 0.5, exclude_min=True),
    "monitoring.peak_flop_per_s": st.floats(0, exclude_min=True, allow_infinity=False),
    "monitoring.sinks": st.lists(st.sampled_from(["console", "wandb", "my_sink"])),
    f"{PERFORMANCE}.measure_flops_frequency": frequencies,
    f"{PERFORMANCE}.smart_mode.recalibration_frequency": frequencies,
    f"{PERFORMANCE}.phase_frequency.main": frequencies,
    "monitor.freq.flops_profile_freq": frequencies,
    "wandb.enabled": st.booleans(),
    "wandb.notes": st.text(max_size=20),
    "wandb.tags": st.lists(st.text(max_size=5)),
    "wandb.config": st.dictionaries(st.text(max_size=5), st.integers()),
    "prometheus.port": st.integers(1, 65535),
    "training.logging_steps": steps,
}


@settings(max_examples=100)
@given(st.fixed_dictionaries({}, optional=VALID))
def test_valid_settings_survive_the_way_through_yaml_and_back(
    tmp_path_factory: pytest.TempPathFactory, written: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    config = MonitorConfig.load(merged(*(nested(name, value) for name, value in written.items())))
    path.write_text(yaml.safe_dump({"model": {}, **json.loads(json.dumps(config.as_written()))}), "utf-8")
    again = MonitorConfig.load(path)
    assert again == config
    assert again.measuring_interval() == config.measuring_interval()
    for name, value in written.items():
        if name in ("wandb.notes", "wandb.config"):
            assert config.wandb.init_arguments()[name.partition(".")[2]] == value
        else:
            assert attrgetter(name)(config) == (tuple(value) if isinstance(value, list) else value)
