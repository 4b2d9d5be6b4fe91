"""How does a run look to a reader? `report_of` says what there is to tell; one file in this folder per format.

    from flopmeter import load_run, write_report

    write_report(load_run("runs/mine"), "report.html")

Each format is a file with a function `render(report) -> str`, named as users write it after `--format`. All of them
render the same `Report`, so that the page, the live page, Markdown, JSON and the terminal say the same.
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from flopmeter.errors import ConfigError, FlopmeterError

if TYPE_CHECKING:
    from flopmeter.record import Run
    from flopmeter.report._model import Report

logger = logging.getLogger("flopmeter")

REPORT_FILE = "report.html"
MAX_STEPS_AT_END = 50_000
"""A run with more steps gets its report when it is asked for: at the end of a job nobody wants to wait."""


def available_formats() -> list[str]:
    """Names that `write_report` takes."""
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def report_of(run: Run, start: int | None = None, stop: int | None = None) -> Report:
    """All that a report shows of a run, or of its steps at positions `start` up to `stop`."""
    from flopmeter.report import _model

    return _model.report_of(run, start, stop)


def render(report: Report, format: str = "html") -> str:
    """The whole report as text of that format.

    Raises:
        ConfigError: There is no such format.
    """
    if format not in available_formats():
        raise ConfigError(f"there is no report format {format!r}; there are: {', '.join(available_formats())}")
    return str(import_module(f"{__name__}.{format}").render(report))


def write_report(run: Run, path: str | Path, format: str | None = None) -> Path:
    """Write the report to a file, all or nothing, and say where it is.

    Args:
        path: A file, or a folder, which gets a `report.html` (or another ending).
        format: html, md or json; None: as the file's name ends.

    Raises:
        ConfigError: There is no such format.
        OSError: The file cannot be written.
    """
    from flopmeter.record import replace_file

    target, format = place_of(path, format)
    text = render(report_of(run), format)
    replace_file(target, lambda file: file.write(text))
    return target


def leave_report(run: Run) -> Path | None:
    """The report that a finished run leaves beside its run file; None, and at most a log line, when it cannot be."""
    folder = run.path.parent
    if len(run) > MAX_STEPS_AT_END:
        logger.info("%d steps: make the report with  flopmeter report %s", len(run), folder)
        return None
    try:
        return write_report(run, folder / REPORT_FILE)
    except (FlopmeterError, ImportError, OSError) as error:
        logger.warning("no report: %s", error)
    return None


def place_of(path: str | Path, format: str | None) -> tuple[Path, str]:
    """The file and the format that are meant by a path, which may be a folder, and a format, which may be left out."""
    target = Path(path)
    if target.is_dir():
        target = target / Path(REPORT_FILE).with_suffix(f".{format or 'html'}")
    format = format or {"": "html", "htm": "html"}.get(ending := target.suffix.removeprefix(".").lower(), ending)
    if format not in available_formats():
        raise ConfigError(f"there is no report format {format!r}; there are: {', '.join(available_formats())}")
    return target, format
