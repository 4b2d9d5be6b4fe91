"""One self-contained page that works offline: what most people open, and send to a colleague."""

from __future__ import annotations

from flopmeter.report._model import Report
from flopmeter.report._page import body_of, data_of, document


def render(report: Report) -> str:
    """The page, its script and its data in one file."""
    return document(f"{report.about.name}: MFU report", body_of(report), data_of(report))
