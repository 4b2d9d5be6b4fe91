"""What may the value of a setting be, and what is said when it is something else?

Every type is strict (`true` is no number, `1` no switch) but for what YAML itself muddles: a number such as `989e12`
arrives as text, and a lone text may stand for a list of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from flopmeter.config.refusals import Allowed

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_INT64_MAX = 2**63 - 1  # also keeps every accepted number printable


def _number(value: object) -> object:
    """YAML 1.1 reads `989e12` as text, because the number lacks a dot; here it is a number."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value.strip()) else value


def _whole(value: object) -> object:
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else value


def _several(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, bytes) else value


def _mapping(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


Values = Annotated[dict[str, Any], BeforeValidator(_mapping), Allowed("a mapping from names to values")]
Switch = Annotated[bool, Allowed("true or false")]
Text = Annotated[str, Allowed("text, in quotes where YAML would read a number or a date")]
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(_several),
    Allowed("a list of texts, each in quotes where YAML would read a number or a date"),
]
Frequency = Annotated[
    int, BeforeValidator(_whole), Field(ge=0, le=_INT64_MAX), Allowed("a whole number of steps, 0 or more")
]
Steps = Annotated[
    int, BeforeValidator(_whole), Field(ge=1, le=_INT64_MAX), Allowed("a whole number of steps, 1 or more")
]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=_INT64_MAX), Allowed("a whole number, 1 or more")]
Seconds = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False), Allowed("seconds, more than 0")]
FlopRate = Annotated[
    float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False), Allowed("FLOP/s, more than 0, such as 989.4e12")
]
Budget = Annotated[
    float,
    BeforeValidator(_number),
    Field(gt=0, le=0.5),
    Allowed("a share above 0 and up to 0.5; 0.005 is half a percent"),
]
Port = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=65535), Allowed("a port from 1 to 65535")]
Host = Annotated[str, StringConstraints(pattern=r"^\S+$"), Allowed("a host name or address")]
SinkName = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_]*$")]
SinkNames = Annotated[
    tuple[SinkName, ...], BeforeValidator(_several), Allowed("a list of lower-case names such as console, wandb")
]
WandbMode = Annotated[
    Literal["online", "offline", "disabled", "shared"],
    BeforeValidator(lambda value: "disabled" if value is False else value),
]
Mode = Literal["smart", "profiler", "estimate", "hybrid"]
