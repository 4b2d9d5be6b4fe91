"""What does a YAML file say, read so that no file can run code, fill the memory or hide a mistake?

PyYAML takes the last of two equal keys in silence and lets aliases multiply; the loader here refuses both. Whatever is
wrong with a file ends as a `ConfigError` of one line that names the line in the file.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from flopmeter.config.refusals import shown
from flopmeter.errors import ConfigError

MAX_BYTES = 1_000_000
MAX_NODES = 1_000_000
"""Values in a file, with every alias counted as often as it is used."""

_MERGE_TAG = "tag:yaml.org,2002:merge"
# What PyYAML's own constructors let out on text that does not fit an explicit tag, such as `!!int ""`.
_CONSTRUCTOR_ERRORS = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError)


def read_yaml(path: Path) -> dict[Hashable, Any]:
    """The mapping that a YAML file holds; anything else in it is a `ConfigError`."""
    document = _parse(_read_text(path))
    if document is None:
        raise ConfigError("the file is empty; write a setting, or give no config for the defaults")
    if not isinstance(document, dict):
        raise ConfigError(f"expected sections such as 'monitoring:' at the top level, found {shown(document)}")
    return document


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise ConfigError("this is a directory; give the YAML file in it")
        if path.exists() and not path.is_file():
            raise ConfigError("this is not a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"the file cannot be read ({reason or 'impossible name'})") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"the file is larger than {MAX_BYTES:,} bytes, which no settings file is")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"line {line}: the file is not UTF-8 text; save it as UTF-8") from None


def _parse(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_describe(error)) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"line {line}: the character {shown(text[error.position])} is not allowed in YAML") from None
    except RecursionError:
        raise ConfigError("the values are nested too deeply") from None


def _describe(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}: " if mark else ""
    problem = _on_one_line(", ".join(filter(None, [error.context, error.problem])))
    hint = "; YAML indents with spaces, not tabs" if "'\\t'" in problem else ""
    return f"{where}{problem}{hint}"


def _on_one_line(problem: object) -> str:
    return " ".join(str(problem).split())[:200]


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses keys given twice, foreign tags, and aliases that contain themselves or multiply."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_nodes = 0
        self._size_of: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
        is_alias, before = self.check_event(yaml.AliasEvent), self._num_nodes
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self._size_of:
            raise ConfigError(f"line {line}: an alias stands inside the value it refers to")
        self._num_nodes += self._size_of[id(node)] if is_alias else 1
        self._size_of[id(node)] = self._num_nodes - before
        if self._num_nodes > MAX_NODES:
            raise ConfigError(f"line {line}: the file grows beyond {MAX_NODES:,} values when its aliases are followed")
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        line_of: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE_TAG:
                continue
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in line_of:
                raise ConfigError(
                    f"line {line}: the key {shown(key.value)} is given twice (first on line {line_of[name]})"
                )
            line_of[name] = line
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _CONSTRUCTOR_ERRORS as error:
            line = node.start_mark.line + 1
            raise ConfigError(f"line {line}: not the kind of value it looks like ({_on_one_line(error)})") from None


def _refuse_tag(loader: _Loader, node: yaml.Node) -> None:
    tag = node.tag.replace("tag:yaml.org,2002:", "!!")
    raise ConfigError(
        f"line {node.start_mark.line + 1}: the tag {shown(tag)} is not allowed; settings are plain values"
    )


_Loader.add_constructor(None, _refuse_tag)
