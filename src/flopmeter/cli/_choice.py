"""Is the value of an option one of those that there are? For the commands that have such options."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import typer

from flopmeter.errors import did_you_mean


def choose(option: str, value: str, known: Collection[str]) -> Any:
    """The value itself, refused with the nearest one unless it is known."""
    if value in known:
        return value
    raise typer.BadParameter(f"{option}: unknown {value!r}: {did_you_mean(value, known)}")
