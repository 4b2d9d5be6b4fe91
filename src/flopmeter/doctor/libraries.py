"""Which optional libraries are here? Read from the package's own list of extras, so that none is forgotten."""

from __future__ import annotations

import re
from importlib import import_module, metadata

from flopmeter.doctor._result import Result

ORDER = 10
LIMIT_S = 20.0
NEEDS_TORCH = False

_NOT_FOR_USERS = {"dev"}
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+).*extra == ['\"]([\w-]+)['\"]")
_WITHOUT_TORCH = (
    "torch is not installed, so nothing can be measured or counted here; records, traces, reports and the table of "
    "devices can be read (report, diagnose, compare, trace, serve, explain, devices)"
)


def check() -> Result:
    versions = {library: installed(library) for library in sorted(optional())}
    missing = {library: extra for library, extra in optional().items() if versions[library] is None}
    figures = {library: version for library, version in versions.items() if version is not None}
    if not has_torch():
        return Result(standing="missing", says=f"{_WITHOUT_TORCH}: run pip install 'flopmeter[torch]'", figures=figures)
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        names = ", ".join(sorted(missing))
        return Result(standing="missing", says=f"{names}: run pip install 'flopmeter[{extras}]'", figures=figures)
    return Result(standing="works", says=f"all {len(versions)} optional libraries are installed", figures=figures)


def optional() -> dict[str, str]:
    """Library to the extra that installs it."""
    found = (_REQUIREMENT.match(line) for line in metadata.requires("flopmeter") or ())
    return {match[1]: match[2] for match in found if match is not None and match[2] not in _NOT_FOR_USERS}


def has_torch() -> bool:
    """Whether it can be imported; a torch that is here and fails is broken, and its error says why."""
    try:
        import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return False
    return True


def installed(library: str) -> str | None:
    """Its version; None when it is not here."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
