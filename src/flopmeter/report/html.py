"""One self-contained page that works offline: what most people open, and send to a colleague."""

from __future__ import annotations

from typing import Any

from flopmeter.report._charts import figures_of
from flopmeter.report._page import body_of, page


def render(facts: dict[str, Any]) -> str:
    """The page, its script and its data in one file."""
    figures = figures_of(facts)
    return page(f"{facts['run']['name']}: MFU report", body_of(facts, figures), figures)
