"""How does a benchmark end? With one JSON line: what was measured, when, on which machine and of which source."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from argparse import ArgumentParser
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def add_record_option(parser: ArgumentParser) -> None:
    parser.add_argument("--record", type=Path, help="write the result to this file, too")


def finish(name: str, version: int, figures: Mapping[str, Any], record: Path | None) -> None:
    """Print the line that every benchmark ends with, and keep it in a file when asked to."""
    result = {"benchmark": name, "version": version, **_circumstances(), **figures}
    if record is not None:
        record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def _circumstances() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "source": source(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": _torch_version(),
        },
    }


def source() -> str | None:
    """Git's name of `src/` as it was measured: the same for every commit that leaves it alone; None if unknown."""
    changes, tree = _git("status", "--porcelain", "--", "src"), _git("rev-parse", "--short=12", "HEAD:src")
    return None if tree is None or changes is None else tree + ("+" if changes else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive, or a machine without git
        return None
    return done.stdout.strip()


def _torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
