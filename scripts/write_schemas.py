"""What does each command's `--json` look like? As JSON Schemas, one file a command, under docs/schemas/:

    python scripts/write_schemas.py [COMMAND ...]

Outputs that are made from types (`report`, `compare`, `try`) take theirs from the types. Those of the others are
summed up from the answers to the calls below: a key that all answers have is required, and a value may be of any kind
that was seen. A file's name ends with its version: raise it in VERSIONS where a key goes or changes its meaning. New
keys raise nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
VERSIONS = {
    "report": 1,
    "report-explain": 1,
    "compare": 1,
    "try": 1,
    "try-list": 1,
    "count": 1,
    "mfu": 1,
    "peak": 1,
    "peak-list": 1,
    "doctor": 1,
    "demo": 1,
}
MAPS = {
    *("by_dtype", "by_op", "by_module", "by_role", "hardware_by_dtype", "uncounted", "growth", "exact", "full"),
    *("hardware", "report-explain", "workload", "peak_flop_per_s", "derived", "notes", "settings", "parts"),
}
"""Objects whose keys are names of things, not of fields."""
FREE = {"figures"}
"""Objects that hold what a machine has."""
SMALL = "llama:layers=2,hidden=64,heads=4,vocab=128"
MODELS = """from torch import nn


def convolution():
    return nn.Conv2d(3, 8, 3)


def embedding():
    return nn.Embedding(16, 8)
"""
"""Models without tokens and without FLOPs: a module in the folder where the calls are made."""
PUBLISHED = ["mfu", "--model", "llama-3.1-8b", "--seq", "8192", "--gpus", "8", "--tokens-per-second", "80000", "--json"]
CALLS: dict[str, list[list[str]]] = {
    "count": [
        ["count", SMALL, "--seq", "16", "--json"],
        ["count", SMALL, "--seq", "16", "--checkpointing", "--convention", "full", "--dtype", "fp16", "--json"],
        ["count", SMALL, "--seq", "16", "--forward", "--json"],
        ["count", "models_of_ours:convolution", "--seq", "16", "--json"],
        ["count", "models_of_ours:embedding", "--seq", "16", "--json"],
    ],
    "mfu": [
        [*PUBLISHED, "--device", "NVIDIA H100 80GB HBM3"],
        [*PUBLISHED, "--peak-flop-per-s", "989e12", "--recompute", "full"],
        [*PUBLISHED, "--peak-flop-per-s", "100e12", "--recompute", "selective"],  # more than it could have done
    ],
    "peak": [
        ["peak", "--device", "NVIDIA H100 80GB HBM3", "--json"],
        ["peak", "--device", "NVIDIA H100 80GB HBM3", "--dtype", "bf16", "--json"],
        ["peak", "--json"],
    ],
    "peak-list": [["peak", "--list", "", "--json"]],
    "report-explain": [["report", "--explain", "data_stall", "--json"]],
    "try-list": [["try", "--list", "--json"]],
    "doctor": [["doctor", "--json"]],
    "demo": [["demo", "--seconds", "6", "--json", "--output-dir", "demo"]],
}


def answer(call: list[str], folder: Path) -> Any:
    """What a call prints."""
    command = [sys.executable, "-m", "flopmeter", *call]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(call)}: {done.stderr}")
    return json.loads(done.stdout)


def summed_up(values: list[Any], name: str = "") -> dict[str, Any]:
    """A schema that all of these values fit."""
    kinds: dict[str, dict[str, Any]] = {}
    objects = [value for value in values if isinstance(value, dict)]
    lists = [value for value in values if isinstance(value, list)]
    for value in values:
        if value is None:
            kinds["null"] = {"type": "null"}
        elif isinstance(value, bool):
            kinds["boolean"] = {"type": "boolean"}
        elif isinstance(value, (int, float)):
            kinds["number"] = {"type": "number"}
        elif isinstance(value, str):
            kinds["string"] = {"type": "string"}
    if lists:
        inside = [item for value in lists for item in value]
        kinds["array"] = {"type": "array", "items": summed_up(inside, name) if inside else {}}
    if objects and (name in MAPS or not any(objects)):
        inside = [item for value in objects for item in value.values()]
        kinds["object"] = {"type": "object", "additionalProperties": summed_up(inside) if inside else {}}
    elif objects and name in FREE:
        kinds["object"] = {"type": "object"}
    elif objects:
        keys = list(dict.fromkeys(key for value in objects for key in value))
        kinds["object"] = {
            "type": "object",
            "properties": {key: summed_up([value[key] for value in objects if key in value], key) for key in keys},
            "required": [key for key in keys if all(key in value for value in objects)],
        }
    found = list(kinds.values())
    return found[0] if len(found) == 1 else {"anyOf": found}


def of_types(kind: Any, **more: dict[str, Any]) -> dict[str, Any]:
    """The schema of a typed output; `more` are keys that the command adds."""
    (body,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    name = body["$ref"].rpartition("/")[2]
    body = parts.pop(name)
    body["properties"].update(more)
    return {**body, "$defs": parts}


def schema_of(command: str, folder: Path) -> dict[str, Any]:
    """The whole schema of a command's output."""
    if command in CALLS:
        (folder / "models_of_ours.py").write_text(MODELS, "utf-8")
        body = summed_up([answer(call, folder) for call in CALLS[command]], command)
    elif command == "compare":
        from flopmeter.compare import Comparison
        from flopmeter.compare.condition import Verdict

        (verdict,), parts = msgspec.json.schema_components([Verdict], ref_template="#/$defs/{name}")
        body = of_types(Comparison, conditions={"type": "array", "items": verdict})
        body["$defs"] |= parts
    elif command == "report":
        from flopmeter.report._model import Report

        body = of_types(Report)
    else:
        from flopmeter.trials import Tried

        body = of_types(Tried)
    title = f"flopmeter {command.replace('-', ' --')} --json, version {VERSIONS[command]}"
    return {"$schema": DIALECT, "title": title, **body}


def path_of(command: str) -> Path:
    """Where it is."""
    return FOLDER / f"{command}.v{VERSIONS[command]}.json"


def text_of(schema: dict[str, Any]) -> str:
    """As it is written."""
    return json.dumps(schema, indent=1, sort_keys=False) + "\n"


def main(commands: Iterable[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for command in commands:
            path_of(command).write_text(text_of(schema_of(command, Path(folder))), "utf-8")
            print(path_of(command))


if __name__ == "__main__":
    main(sys.argv[1:] or VERSIONS)
