"""The summary that a terminal shows, as plain text for a log or a CI step."""

from __future__ import annotations

from io import StringIO
from typing import Any

from flopmeter.report._sentences import method_rows, remarks_of
from flopmeter.report._terminal import show


def render(facts: dict[str, Any]) -> str:
    """The summary and how the number was made, without colours."""
    from rich.console import Console

    text = StringIO()
    console = Console(file=text, width=120, color_system=None, force_terminal=False, markup=False, highlight=False)
    show(facts, console)
    rows = [f"  {name}: {value}" for name, value in method_rows(facts)]
    remarks = [f"  {remark}" for remark in remarks_of(facts)]
    return "\n".join((text.getvalue(), "How this number was made", *rows, *remarks, ""))
