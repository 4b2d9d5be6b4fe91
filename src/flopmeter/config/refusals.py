"""How is a wrong setting refused, so that its author can mend it at once?

Each problem becomes `path: value is not allowed (expected ...)` or `path: unknown setting (did you mean ...?)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

MAX_SHOWN_CHARACTERS = 60
_MAX_PROBLEMS = 3
_MAX_NAMES = 12


class Allowed(str):
    """What a setting may be, in words; stands in the `Annotated` type of the setting."""

    __slots__ = ()


def refusal(error: ValidationError, model: type[BaseModel]) -> str:
    """All that pydantic found wrong, on one line, with the words of flopmeter instead of pydantic's."""
    problems = list(dict.fromkeys(_describe(problem, model) for problem in error.errors(include_url=False)))
    more = len(problems) - _MAX_PROBLEMS
    return "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def shown(value: object, max_characters: int = MAX_SHOWN_CHARACTERS) -> str:
    """A value as its author wrote it in YAML, short and on one line; a large or foreign object only by its kind."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    if isinstance(value, str):
        return repr(value if len(value) <= max_characters else value[: max_characters - 3] + "...")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (Mapping, list, tuple)):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    return f"a value of type {type(value).__name__}"


def expected(field: FieldInfo) -> str:
    """What a setting may be, in words; the settings page and the refusals both use this."""
    if section_of(field):
        return "a mapping"
    return ", or ".join(dict.fromkeys(_words([field.annotation, *field.metadata])))


def setting_paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting and section of a model with its full path, a section before what it holds."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        if section := section_of(field):
            yield from setting_paths(section, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section, None for a plain setting."""
    annotation = field.annotation
    if get_origin(annotation) is not None:  # Python 3.10 would take tuple[str, ...] for a class
        return None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def nearest(path: str, paths: Sequence[str]) -> str | None:
    """The valid path that the author of an unknown one most likely meant: a near name, or the name's right section."""
    section, _, name = path[-200:].rpartition(".")

    def score(candidate: str) -> float:
        other_section, _, other = candidate.rpartition(".")
        words, others = name.lower().split("_"), other.split("_")
        is_part = set(words) <= set(others)
        is_nearly = all(get_close_matches(word, others, n=1, cutoff=0.8) for word in words)
        part = 0.8 if is_part else 0.7 if is_nearly else 0.0
        likeness = max(SequenceMatcher(None, name.lower(), other).ratio(), part)
        return likeness + (0.25 if section == other_section else 0.0)

    best = max(paths, key=score)
    return best if score(best) >= 0.8 else None


def _describe(problem: Any, model: type[BaseModel]) -> str:
    kind, loc, value = problem["type"], problem["loc"], problem["input"]
    path, field, section = _locate(loc[:-1] if kind == "invalid_key" else loc, model)
    if kind == "unknown_key":
        return f"{_joined(path, problem['ctx']['key'])}: {problem['msg']}"
    if kind == "invalid_key":
        return f"{path}: the key {shown(value)} is not text; a setting's name is"
    if kind == "extra_forbidden":
        return f"{path}: unknown setting ({_suggestion(path, section, model)})"
    if kind == "value_error":
        return f"{path}: {problem['ctx']['error']}"
    allowed = expected(field) if field else "a mapping"
    return f"{path}: {shown(value)} is not allowed (expected {allowed}{_bool_hint(value, allowed)})"


def _suggestion(path: str, section: type[BaseModel], model: type[BaseModel]) -> str:
    if meant := nearest(path, [valid for valid, _ in setting_paths(model)]):
        return f"did you mean {meant}?"
    names = list(section.model_fields)
    return f"known here: {', '.join(names[:_MAX_NAMES])}{', ...' if len(names) > _MAX_NAMES else ''}"


def _bool_hint(value: object, allowed: str) -> str:
    # YAML 1.1 turns a bare `off` into false, so the author never wrote the value that is shown.
    is_puzzling = isinstance(value, bool) and "true" not in allowed
    return "; YAML reads a bare on, off, yes or no as true or false" if is_puzzling else ""


def _locate(loc: Sequence[str | int], model: type[BaseModel]) -> tuple[str, FieldInfo | None, type[BaseModel]]:
    """The path of a problem as its author would write it, with the field and the innermost section it stands in."""
    path, section = "", model
    field: FieldInfo | None = None
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        if field is not None:
            inner = section_of(field)
            if inner is None:
                break
            section = inner
        path, field = _joined(path, part), section.model_fields.get(part)
    return path, field, section


def _joined(path: str, key: str) -> str:
    name = key if key.isprintable() and len(key) <= MAX_SHOWN_CHARACTERS else shown(key)
    return f"{path}.{name}" if path else name


def _words(parts: Sequence[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Allowed):
            yield part
        elif get_origin(part) is Literal:
            yield ", ".join(get_args(part)[:-1]) + f" or {get_args(part)[-1]}"
        else:
            yield from _words(get_args(part))
