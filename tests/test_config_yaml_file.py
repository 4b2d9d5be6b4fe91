"""Does no file get past the reader that hides a mistake, runs code, or fills the memory?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopmeter.config import MonitorConfig
from flopmeter.errors import ConfigError


def refused(source: Any) -> str:
    """The message of the ConfigError that the source must cause; always one line."""
    with pytest.raises(ConfigError) as caught:
        MonitorConfig.load(source)
    assert str(caught.value).isprintable()
    return str(caught.value)


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
        ("a: 1\nx: !!python/object/apply:os.system [ls]", "line 2: the tag '!!python/object/apply:os.system' is not"),
        ("x: !include other.yaml", "line 1: the tag '!include' is not allowed"),
        (b"a: 1\nb: \xff", "line 2: the file is not UTF-8 text"),
        ("monitoring:\n\tflush_s: 1\n", "YAML indents with spaces, not tabs"),
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("a: 'x", "line 1: while scanning a quoted scalar, found unexpected end of stream"),
        ("a: 1\n---\nb: 2\n", "line 2: expected a single document in the stream, but found another document"),
        ("a: 1\nb: \x07", "line 2: the character '\\x07' is not allowed in YAML"),
        ("? [a]\n: b", "line 1: while constructing a mapping, found unhashable key"),
        ("a: !!int ''", "line 1: not the kind of value it looks like"),
        ("a: 2024-13-45", "line 1: not the kind of value it looks like"),
        ("a: " + "7" * 5000, "line 1: not the kind of value it looks like"),
        ("a: &a [*a]", "line 1: an alias stands inside the value it refers to"),
        ("a: &a {<<: *a}", "line 1: an alias stands inside the value it refers to"),
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


@pytest.mark.parametrize("form", ["[{}]", "{{<<: [{}]}}"])
def test_aliases_that_multiply_are_refused_before_they_fill_the_memory(yaml_file: Any, form: str) -> None:
    levels = [f"l{i}: &l{i} " + form.format(",".join([f"*l{i - 1}"] * 10)) for i in range(1, 9)]
    assert "grows beyond 1,000,000 values" in refused(yaml_file("\n".join(["l0: &l0 {x: 1}", *levels])))


def test_anchors_and_merges_in_moderation_are_read(yaml_file: Any) -> None:
    config = MonitorConfig.load(
        yaml_file("pace: &pace {flush_s: 3, detail_every: 7}\nmonitoring:\n  <<: *pace\n  flush_s: 4")
    )
    assert (config.monitoring.flush_s, config.monitoring.detail_every) == (4.0, 7)


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


def outcome(source: Any) -> str:
    """The settings, or why there are none; anything but a ConfigError fails the test."""
    try:
        return repr(MonitorConfig.load(source))
    except ConfigError as error:
        return str(error)


@settings(max_examples=300)
@given(content=st.binary(max_size=60) | st.lists(yaml_pieces | st.text(max_size=3), max_size=30).map("".join))
def test_no_file_makes_the_reader_raise_anything_but_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes | str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert outcome(path).isprintable()
