"""The facts as they are, for scripts and dashboards."""

from __future__ import annotations

import json
from typing import Any


def render(facts: dict[str, Any]) -> str:
    """One JSON document; what is unknown is null."""
    return json.dumps(facts, allow_nan=False, indent=1, ensure_ascii=False)
