"""Is every mistake in the settings told in one line that says where, what, and what instead?"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopmeter.config import MonitorConfig
from flopmeter.config.reading import allowed, setting_paths
from flopmeter.errors import ConfigError

PERFORMANCE = "monitoring.performance_monitoring"


def nested(path: str, value: object) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    *sections, name = path.split(".")
    tree: dict[str, Any] = {name: value}
    for section in reversed(sections):
        tree = {section: tree}
    return tree


def refused(source: Any) -> str:
    """The message of the ConfigError that the source must cause; always one line."""
    with pytest.raises(ConfigError) as caught:
        MonitorConfig.load(source)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "shown", "allowed"),
    [
        (f"{PERFORMANCE}.measure_flops_frequency", -5, "-5", "a whole number of steps, 0 or more"),
        (f"{PERFORMANCE}.smart_mode.recalibration_frequency", 1.5, "1.5", "a whole number of steps, 0 or more"),
        (f"{PERFORMANCE}.smart_mode.calibration_enabled", 1, "1", "true or false"),
        (f"{PERFORMANCE}.phase_frequency.main", "abc", "'abc'", "a whole number"),
        ("monitoring.mfu_calculation_mode", "fast", "'fast'", "smart, profiler, estimate or hybrid"),
        ("monitoring.mfu_calculation_mode", False, "false", "smart, .*YAML reads a bare on, off"),
        ("monitoring.convention", "palm", "'palm'", "exact or full"),
        ("monitoring.detail_every", True, "true", "a whole number of steps, 1 or more"),
        ("monitoring.detail_every", 0, "0", "a whole number of steps, 1 or more"),
        ("monitoring.flush_every", 10**100, "a number of more than 60 digits", "a whole number"),
        ("monitoring.flush_s", 0, "0", "seconds, more than 0"),
        ("monitoring.flush_s", True, "true", "seconds, more than 0"),
        ("monitoring.overhead_budget", 0, "0", "above 0 and up to 0.5"),
        ("monitoring.overhead_budget", 0.6, "0.6", "above 0 and up to 0.5"),
        ("monitoring.overhead_budget", float("nan"), ".nan", "above 0 and up to 0.5"),
        ("monitoring.peak_flop_per_s", float("inf"), ".inf", "FLOP/s, more than 0"),
        ("monitoring.peak_flop_per_s", "1e999", "'1e999'", "FLOP/s, more than 0"),
        ("monitoring.peak_flop_per_s", -1, "-1", "FLOP/s, more than 0"),
        ("monitoring.peak_flop_per_s", True, "true", "FLOP/s, more than 0"),
        ("monitoring.sinks", 5, "5", "a list of lower-case names"),
        ("monitoring", [1], "a list", "a mapping"),
        ("monitor", "val_loss", "'val_loss'", "a mapping"),
        ("monitor.freq.flops_profile_freq", "x" * 99, f"'{'x' * 57}...'", "a whole number"),
        ("wandb.project", 5, "5", "text, in quotes"),
        ("monitoring.distributed.data_parallel_size", 0, "0", "expected a whole number, 1 or more"),
        ("prometheus.port", 65536, "65536", "a port from 1 to 65535"),
        ("prometheus.port", 0, "0", "a port from 1 to 65535"),
        ("prometheus.host", "", "''", "a host name or address"),
        ("training.logging_steps", 0, "0", "a whole number of steps, 1 or more"),
    ],
)
def test_a_wrong_value_is_refused_with_path_value_and_what_is_allowed(
    path: str, value: object, shown: str, allowed: str
) -> None:
    message = refused(nested(path, value))
    assert message.startswith(f"{path}: {shown} is not allowed (expected ")
    assert re.search(allowed, message)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("monitoring.mfu_calculation_mod", "monitoring.mfu_calculation_mode"),
        ("monitoring.mode", "monitoring.mfu_calculation_mode"),
        ("monitoring.mod", "monitoring.mfu_calculation_mode"),
        ("monitoring.Flush_S", "monitoring.flush_s"),
        ("monitoring.measure_flops_frequency", f"{PERFORMANCE}.measure_flops_frequency"),
        ("monitoring.smart_mode", f"{PERFORMANCE}.smart_mode"),
        (f"{PERFORMANCE}.phase_frequency.finetuning", f"{PERFORMANCE}.phase_frequency.finetune"),
        ("monitor.freq.flop_profile_freq", "monitor.freq.flops_profile_freq"),
        ("prometheus.prot", "prometheus.port"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(path: str, meant: str) -> None:
    assert refused(nested(path, 1)) == f"{path}: unknown setting (did you mean {meant}?)"


def test_an_unknown_key_like_no_other_is_refused_with_the_known_ones_and_without_its_value() -> None:
    message = refused({"tensorboard": {"api_key": "secret"}})
    assert message == "tensorboard.api_key: unknown setting (known here: enabled, metrics)"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("training.loging_steps", "logging_steps"),
        ("training.logging_step", "logging_steps"),
        ("wandbb", "wandb"),
        ("wandb.projet", "project"),
        ("wandb.log_dataset_metric", "log_dataset_metrics"),
        ("monitering", "monitoring"),
        ("Prometheus", "prometheus"),
    ],
)
def test_a_slip_in_a_name_of_ours_is_refused_where_foreign_keys_are_not(path: str, meant: str) -> None:
    assert refused(nested(path, {})).startswith(f"{path}: unknown key (did you mean {meant}?")


def test_a_foreign_key_that_looks_like_a_slip_may_stand_beside_ours() -> None:
    config = MonitorConfig.load({"training": {"logging_step": 9, "logging_steps": 3}})
    assert config.training.logging_steps == 3


def test_several_mistakes_stand_on_one_line_and_the_rest_is_counted() -> None:
    wrong = {"flush_s": -1, "flush_every": -1, "detail_every": -1, "convention": 5, "sinks": 5}
    message = refused({"monitoring": wrong})
    assert message.count("is not allowed") == 3
    assert message.endswith("; and 2 more")


def test_two_names_for_a_wandb_run_are_refused_unless_they_agree() -> None:
    assert refused({"wandb": {"name": "a", "run_name": "b"}}).startswith("wandb: run_name and name differ")
    assert MonitorConfig.load({"wandb": {"name": "a", "run_name": "a"}}).wandb.init_arguments() == {"name": "a"}


def test_keys_that_are_not_text_are_refused_in_our_sections_and_at_the_top() -> None:
    assert refused({"monitoring": {5: 1}}) == "monitoring: the key 5 is not text; a setting's name is"
    assert refused({True: 1}) == "the key true at the top level is not text; a section's name is"


def test_an_item_of_a_list_is_named_by_its_place() -> None:
    assert refused({"monitoring": {"sinks": ["console", "no way"]}}).startswith("monitoring.sinks[1]: 'no way' is not")


@pytest.mark.parametrize("source", [5, 1.5, True, b"smart", ["smart"], object()])
def test_a_source_of_another_kind_is_refused(source: object) -> None:
    assert refused(source).startswith("config: expected a YAML file, a preset, a mapping or a MonitorConfig, not ")


def test_the_constructor_refuses_as_load_does() -> None:
    with pytest.raises(ConfigError, match=r"^prometheus\.port: 0 is not allowed"):
        MonitorConfig(prometheus={"port": 0})


def test_every_setting_is_described_and_says_what_is_allowed() -> None:
    for path, kind in setting_paths(MonitorConfig):
        assert kind.__doc__ if isinstance(kind, type) else allowed(kind), path


any_text = st.text(st.characters(exclude_categories=()), max_size=20)
known_names = st.sampled_from(sorted({name for path, _ in setting_paths(MonitorConfig) for name in path.split(".")}))
scalars = st.none() | st.booleans() | st.integers() | st.floats() | any_text | st.binary(max_size=5) | st.dates()
keys = known_names | any_text | st.integers() | st.none() | st.booleans() | st.tuples(st.integers())
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5), max_leaves=20
)
setting_trees = st.sampled_from([path for path, _ in setting_paths(MonitorConfig)]).flatmap(
    lambda path: trees.map(lambda value: nested(path, value))
)


def outcome(source: Any) -> str:
    """The settings, or why there are none; anything but a ConfigError fails the test."""
    try:
        return repr(MonitorConfig.load(source))
    except ConfigError as error:
        return str(error)


@settings(max_examples=300)
@given(trees | setting_trees | st.dictionaries(known_names, trees, max_size=4))
def test_no_data_makes_the_reader_raise_anything_but_a_config_error(source: Any) -> None:
    assert outcome(source).isprintable()


@pytest.fixture
def yaml_file(tmp_path: Path) -> Any:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "train.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "found a list"),
        ("smart", "found 'smart'"),
        ("monitoring:\n  flush_s: 1\n  flush_s: 2\n", "line 3: the key 'flush_s' is given twice (first on line 2)"),
        ("model: {'a': 1, \"a\": 2}", "line 1: the key 'a' is given twice"),
        (
            "a: 1\nx: !!python/object/apply:os.system [ls]",
            "line 2: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
        ),
        ("x: !include other.yaml", "line 1: could not determine a constructor for the tag '!include'"),
        (b"a: 1\nb: \xff", "line 2: the file is not UTF-8 text"),
        ("monitoring:\n\tflush_s: 1\n", "YAML indents with spaces, not tabs"),
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("a: 'x", "line 1: while scanning a quoted scalar, found unexpected end of stream"),
        ("a: 1\n---\nb: 2\n", "line 2: expected a single document in the stream, but found another document"),
        ("a: 1\nb: \x07", "unacceptable character #x0007: special characters are not allowed"),
        ("? [a]\n: b", "line 1: while constructing a mapping, found unhashable key"),
        ("a: !!int ''", "a value is not of the kind that it looks like"),
        ("a: 2024-13-45", "a value is not of the kind that it looks like"),
        ("a: " + "7" * 5000, "a value is not of the kind that it looks like"),
        ("a: *b", "line 1: found undefined alias 'b'"),
        ("[" * 2000, "the values are nested too deeply"),  # compiling a model raises the limit of recursion to 2,000
        ("#" * 1_000_001, "the file is larger than 1,000,000 bytes"),
    ],
)
def test_a_file_that_is_not_settings_is_refused_with_the_line(
    yaml_file: Any, content: str | bytes, problem: str
) -> None:
    path = yaml_file(content)
    message = refused(path)
    assert message.startswith(f"{str(path)!r}: ")
    assert problem in message


def test_anchors_and_merges_in_moderation_are_read(yaml_file: Any) -> None:
    config = MonitorConfig.load(
        yaml_file("pace: &pace {flush_s: 3, detail_every: 7}\nmonitoring:\n  <<: *pace\n  flush_s: 4")
    )
    assert (config.monitoring.flush_s, config.monitoring.detail_every) == (4.0, 7)


def test_what_a_merge_overrides_is_not_given_twice(yaml_file: Any) -> None:
    # The inner mapping is merged into the second section before it is read itself.
    content = "z: &z {flush_s: 1}\ntop: {inner: &a {<<: *z, flush_s: 2}}\nmonitoring: {<<: *a}"
    assert MonitorConfig.load(yaml_file(content)).monitoring.flush_s == 2.0


def test_a_byte_order_mark_is_no_mistake(yaml_file: Any) -> None:
    assert MonitorConfig.load(yaml_file(b"\xef\xbb\xbfmonitoring: {flush_s: 3}")).monitoring.flush_s == 3.0


def test_paths_that_hold_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dangling.yaml").symlink_to(tmp_path / "gone.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "this is a directory" in refused(tmp_path)
    assert "the file cannot be read (No such file or directory)" in refused(tmp_path / "dangling.yaml")
    assert "this is not a regular file" in refused(tmp_path / "pipe.yaml")
    assert "no such file and no such preset: did you mean 'smart'? (it is one of config_prof" in refused("smar")
    for name in ("a\0b", "x" * 5000, "", str(tmp_path / "gone.yaml")):
        message = refused(name)
        assert "no such file and no such preset: it is one of config_profiler_mfu, " in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_refused(yaml_file: Any) -> None:
    path = yaml_file("a: 1")
    path.chmod(0)
    assert "the file cannot be read (Permission denied)" in refused(path)


TAGS = ["!!int ", "!!bool ", "!!float ", "!!set ", "!!omap ", "!!binary ", "!!timestamp ", "!!python/none "]
WORDS = ["monitoring", "wandb", "flush_s", "1e3", "0x1", "off", "null", "---\n", "\n  ", ": ", "<<", "&a ", "*a"]
yaml_pieces = st.sampled_from([*"[]{}:,-?&*!|>'\"%@`#=~<\t\n ", *TAGS, *WORDS])


@settings(max_examples=300)
@given(content=st.binary(max_size=60) | st.lists(yaml_pieces | st.text(max_size=3), max_size=30).map("".join))
def test_no_file_makes_the_reader_raise_anything_but_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes | str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert outcome(path).isprintable()
