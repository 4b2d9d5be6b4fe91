"""The report as it is, for scripts and dashboards."""

from __future__ import annotations

import msgspec

from flopmeter.report._model import Report


def render(report: Report) -> str:
    """One JSON document; what is unknown is null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
