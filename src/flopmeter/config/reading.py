"""How does data from a file or a call become settings, and what is said where it cannot?

A section is a frozen dataclass; a setting's type says what it may be. Each problem becomes one sentence: `path: value
is not allowed (expected ...)` or `path: unknown setting (did you mean ...?)`. Types are strict (`true` is no number,
`1` no switch) but for what YAML itself muddles: a number such as `989e12` arrives as text, and a lone text may stand
for a list of one. A setting written as null counts as not written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from flopmeter.errors import ConfigError

MAX_SHOWN_CHARACTERS = 60
MAX_PROBLEMS, MAX_NAMES = 3, 12
MAX_BYTES = 1_000_000
MISSPELLING_CUTOFF = 0.88
"""Close enough to be the same word with a slip in it: "loging_steps" is, "log_steps" and "tensorboard_dir" are not."""
MORE = "more"
"""The field that takes a section's foreign keys, where they are wanted."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


class Section:
    """A part of the settings. Heirs are frozen dataclasses whose fields are settings or further sections.

    A setting's type is a Literal of texts, or Annotated with a `msgspec.Meta`, whose description says in words what is
    allowed, and perhaps with a function that checks further: it raises ValueError, with the place and the item.
    """

    has_foreign_keys: ClassVar[bool] = False
    """Whether we share it with somebody else's code: then only what looks like a slip in a key of ours is refused."""
    bare: ClassVar[str | None] = None
    """The setting that a bare true or false in the section's place means."""

    @classmethod
    def check(cls, written: Mapping[str, Any]) -> str | None:
        """What is wrong with what was written here, each setting by itself being right."""
        return None


Kind: TypeAlias = Any
"""The type of a setting, or the class of a section."""


def settings_of(section: type[Section]) -> dict[str, Kind]:
    """What each key of a section is: a setting of some kind, or a section."""
    hints = get_type_hints(section, include_extras=True)
    return {
        name: get_args(hint)[0] if type(None) in get_args(hint) else hint
        for name, hint in hints.items()
        if get_origin(hint) is not ClassVar and name != MORE
    }


def allowed(kind: Kind) -> str:
    """What a setting may be, in words."""
    if not hasattr(kind, "__metadata__"):
        *names, last = get_args(kind)
        return f"{', '.join(names)} or {last}"
    return str(kind.__metadata__[0].description)


def setting_paths(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Kind]]:
    """Every setting and section with its full path, a section before what it holds."""
    for name, kind in settings_of(section).items():
        yield f"{prefix}{name}", kind
        if isinstance(kind, type):
            yield from setting_paths(kind, f"{prefix}{name}.")


def _read(kind: Kind, value: Any) -> Any:
    """The value of a setting; a ValueError where it is none, for an item of a list with its place and the item."""
    plain = getattr(kind, "__origin__", None)
    if isinstance(value, str) and plain in (int, float) and _NUMBER.fullmatch(value.strip()):
        value = float(value)  # YAML 1.1 reads `989e12` as text, because it lacks a dot
    if isinstance(value, float) and plain is int and value.is_integer():
        value = int(value)
    if isinstance(value, str) and get_origin(plain) is tuple:
        value = [value]
    try:
        found = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if place := re.search(r"\$\[(\d+)\]", str(error)):
            raise ValueError(f"[{place[1]}]", value[int(place[1])]) from None
        raise
    for check in getattr(kind, "__metadata__", ())[1:]:
        check(found)
    return found


def read_settings(root: type[Section], data: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the root's fields, and all settings that were written, by path.

    Raises:
        ConfigError: Something is wrong; several problems stand on one line.
    """
    problems: list[str] = []
    written: dict[str, Any] = {}

    def refuse(path: str, value: object, words: str) -> None:
        # YAML 1.1 turns a bare `off` into false, so the author never wrote the value that is shown.
        is_puzzling = isinstance(value, bool) and "true" not in words
        hint = "; YAML reads a bare on, off, yes or no as true or false" if is_puzzling else ""
        problems.append(f"{path}: {shown(value)} is not allowed (expected {words}{hint})")

    def fields_of(section: type[Section], data: Any, path: str) -> dict[str, Any]:
        if isinstance(data, bool) and section.bare:
            data = {section.bare: data}
        if not isinstance(data, Mapping):
            refuse(path, data, "a mapping")
            return {}
        known = settings_of(section)
        values: dict[str, Any] = {}
        for key, value in data.items():
            if not isinstance(key, str):
                if not (section.has_foreign_keys and path):
                    where = f"{path}: the key {shown(key)}" if path else f"the key {shown(key)} at the top level"
                    problems.append(f"{where} is not text; a {'setting' if path else 'section'}'s name is")
                continue
            name = key if key.isprintable() and len(key) <= MAX_SHOWN_CHARACTERS else shown(key)
            here = f"{path}.{name}" if path else name
            if (kind := known.get(key)) is None:
                if slip := _unknown(root, section, data, key, here):
                    problems.append(slip)
                elif value is not None and MORE in section.__annotations__:
                    values.setdefault(MORE, {})[key] = written[f"{path}.{key}"] = value
            elif isinstance(kind, type) and value is not None:
                values[key] = kind(**fields_of(kind, value, here))
            elif value is not None:
                try:
                    values[key] = written[here] = _read(kind, value)
                except (ValueError, OverflowError) as error:
                    place, item = error.args if len(error.args) == 2 else ("", value)
                    refuse(f"{here}{place}", item, allowed(kind))
        if not problems and (problem := section.check(data)):
            problems.append(f"{path}: {problem}")
        return values

    values = fields_of(root, data, "")
    if problems:
        more = len(problems) - MAX_PROBLEMS
        raise ConfigError("; ".join(problems[:MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else ""))
    return values, written


def _unknown(root: type[Section], section: type[Section], data: Mapping[Any, Any], key: str, here: str) -> str:
    """What to say of a key that is not ours: nothing where it may well be somebody else's."""
    names = list(settings_of(section))
    if section.has_foreign_keys:
        # Taken for a slip only while the key that it resembles is absent, so that a foreign key can always be kept.
        near = get_close_matches(key.lower(), [name for name in names if name not in data], 1, MISSPELLING_CUTOFF)
        kept = f"If the key is your own, give {near[0]} beside it" if near else ""
        return f"{here}: unknown key (did you mean {near[0]}? {kept})" if near else ""
    if meant := _nearest(here, [path for path, _ in setting_paths(root)]):
        return f"{here}: unknown setting (did you mean {meant}?)"
    known = f"{', '.join(names[:MAX_NAMES])}{', ...' if len(names) > MAX_NAMES else ''}"
    return f"{here}: unknown setting (known here: {known})"


def _nearest(path: str, paths: Sequence[str]) -> str | None:
    """The valid path that the author of an unknown one most likely meant: a near name, or the name's right section."""
    section, _, name = path[-200:].lower().rpartition(".")

    def score(candidate: str) -> float:
        other_section, _, other = candidate.rpartition(".")
        part = 0.8 if len(name) > 2 and name in other else 0.0
        likeness = max(SequenceMatcher(None, name, other).ratio(), part)
        return likeness + (0.25 if section == other_section else 0.0)

    best = max(paths, key=score)
    return best if score(best) >= 0.8 else None


def shown(value: object, max_characters: int = MAX_SHOWN_CHARACTERS) -> str:
    """A value as its author wrote it in YAML, short and on one line; a large or foreign object only by its kind."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    if isinstance(value, str):
        return repr(value if len(value) <= max_characters else value[: max_characters - 3] + "...")
    if isinstance(value, (int, float)):
        return repr(value) if math.isfinite(value) else f"{value}".replace("inf", ".inf").replace("nan", ".nan")
    if isinstance(value, (Mapping, list, tuple)):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    return f"a value of type {type(value).__name__}"


def read_yaml(path: Path) -> dict[Hashable, Any]:
    """The mapping that a YAML file holds. Anything else in it is a `ConfigError` of one line, with the file's line."""
    import yaml  # a quarter of the start of a program that has no such file

    class Loader(yaml.SafeLoader):
        """Refuses a key that is given twice, of which PyYAML takes the last one in silence."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            lines: dict[tuple[str, str], int] = {}
            for key, _ in node.value:
                line, name = key.start_mark.line + 1, (key.tag, str(key.value))
                if name in lines and isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    twice = f"the key {shown(key.value)} is given twice (first on line {lines[name]})"
                    raise ConfigError(f"line {line}: {twice}")
                lines[name] = line
            return node

    try:
        if path.exists() and not path.is_file():
            what = "a directory; give the YAML file in it" if path.is_dir() else "not a regular file"
            raise ConfigError(f"this is {what}")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"the file cannot be read ({reason or 'impossible name'})") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"the file is larger than {MAX_BYTES:,} bytes, which no settings file is")
    try:
        document = yaml.load(content.decode("utf-8-sig"), Loader)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"line {line}: the file is not UTF-8 text; save it as UTF-8") from None
    except RecursionError:
        raise ConfigError("the values are nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        said = ", ".join(filter(None, [getattr(error, "context", None), getattr(error, "problem", None)]))
        problem = _on_one_line(said or error)
        hint = "; YAML indents with spaces, not tabs" if "'\\t'" in problem else ""
        raise ConfigError(f"{f'line {mark.line + 1}: ' if mark else ''}{problem}{hint}") from None
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        # What PyYAML's own constructors let out on text that does not fit its tag, such as `!!int ""`.
        raise ConfigError(f"a value is not of the kind that it looks like ({_on_one_line(error)})") from None
    if document is None:
        raise ConfigError("the file is empty; write a setting, or give no config for the defaults")
    if not isinstance(document, dict):
        raise ConfigError(f"expected sections such as 'monitoring:' at the top level, found {shown(document)}")
    return document


def _on_one_line(problem: object) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(problem).split())[:200])
