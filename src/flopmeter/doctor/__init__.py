"""Which parts of flopmeter work on this machine, which fall back, and why?

    for result in examine():
        print(result.name, result.standing, result.says)

Every other file of this folder is one check; its name is what users see. A check module has

    ORDER         checks run from low to high
    LIMIT_S       after so long it is given up
    NEEDS_TORCH   whether there is nothing to check without torch
    check()       a `Result`; what it raises is a defect, and shown as one

Checks run in a process of their own: one that crashes or hangs costs its own line and nothing else. Nothing heavy is
imported at the top of a check, so that the list of them costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from time import monotonic
from typing import Protocol, cast

from flopmeter.doctor._process import CheckProcess
from flopmeter.doctor._result import Result, Standing
from flopmeter.errors import ConfigError

__all__ = ["LIMIT_S", "Check", "Result", "Standing", "all_checks", "examine"]

LIMIT_S = 60.0
"""All checks together."""

_NO_TORCH = Result(standing="missing", says="this needs torch, which is not installed")


class Check(Protocol):
    """What every file of this folder offers."""

    ORDER: int
    LIMIT_S: float
    NEEDS_TORCH: bool

    def check(self) -> Result: ...


def all_checks() -> dict[str, Check]:
    """Checks by name, in the order in which they run."""
    names = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
    checks = {name: cast(Check, import_module(f"{__name__}.{name}")) for name in names}
    return dict(sorted(checks.items(), key=lambda item: item[1].ORDER))


def examine(
    names: Sequence[str] = (), limit_s: float = LIMIT_S, on_start: Callable[[str], None] | None = None
) -> Iterator[Result]:
    """Run the checks, and give each one's result as soon as it is there.

    Args:
        names: Only these; all by default.
        limit_s: For all of them together. Checks that find no time left are not made, and say so.
        on_start: Told the name of each check before it runs.
    """
    checks = all_checks()
    if unknown := [name for name in names if name not in checks]:
        raise ConfigError(f"there is no check {unknown[0]!r}; there are: {', '.join(checks)}")
    has_torch, end_s = find_spec("torch") is not None, monotonic() + limit_s
    with CheckProcess() as process:
        for name, check in checks.items():
            if names and name not in names:
                continue
            if on_start is not None:
                on_start(name)
            start_s = monotonic()
            if check.NEEDS_TORCH and not has_torch:
                result = _NO_TORCH
            elif start_s >= end_s:
                result = Result(standing="not checked", says=f"the {limit_s:.0f} s for all checks are over")
            else:
                result = process.run(f"{__name__}.{name}", min(check.LIMIT_S, end_s - start_s))
            yield replace(result, name=name, elapsed_s=monotonic() - start_s)
