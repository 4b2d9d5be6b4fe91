"""Does what a command prints with `--json` fit the schema that is published for it?"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import write_schemas
from made_runs import noisy, run_lines, write_run

jsonschema = pytest.importorskip("jsonschema", reason="needs check-jsonschema")
TYPED = sorted(write_schemas.VERSIONS.keys() - write_schemas.CALLS.keys())


def schema(command: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(write_schemas.path_of(command).read_text("utf-8"))
    return found


def fits(command: str, output: Any) -> None:
    jsonschema.Draft202012Validator(schema(command)).validate(output)
    if "properties" in schema(command):
        assert output.keys() <= schema(command)["properties"].keys(), "say what the new key is: write_schemas.py"


def test_each_command_has_one_sound_schema() -> None:
    written = {path.name for path in write_schemas.FOLDER.glob("*.json")}
    assert written == {write_schemas.path_of(command).name for command in write_schemas.VERSIONS}
    for command in write_schemas.VERSIONS:
        jsonschema.Draft202012Validator.check_schema(schema(command))


@pytest.mark.parametrize("command", TYPED)
def test_the_schema_of_a_typed_output_is_that_of_its_types(command: str, tmp_path: Path) -> None:
    made = write_schemas.text_of(write_schemas.schema_of(command, tmp_path))
    assert write_schemas.path_of(command).read_text("utf-8") == made, "run  python scripts/write_schemas.py"


ANSWERS = [
    ["count", "llama:layers=1,hidden=32,heads=2,vocab=64", "--seq", "8", "--dtype", "bf16", "--json"],
    [*write_schemas.PUBLISHED, "--device", "NVIDIA A100-SXM4-80GB", "--recompute", "selective"],
    ["peak", "--device", "NVIDIA A100-SXM4-80GB", "--json"],
    ["report", "--explain", "host_sync", "--json"],
    ["try", "--list", "--json"],
    pytest.param(["doctor", "--json"], marks=pytest.mark.slow),
    pytest.param(["demo", "--seconds", "6", "--json", "--output-dir", "demo"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("call", ANSWERS, ids=lambda call: call[0])
def test_other_answers_than_those_it_was_made_from_fit(call: list[str], tmp_path: Path) -> None:
    kind = "-explain" if "--explain" in call else "-list" if "--list" in call else ""
    fits(call[0] + kind, write_schemas.answer(call, tmp_path))


def test_a_report_and_a_comparison_fit(tmp_path: Path) -> None:
    steps_s = noisy(0.1, 60, seed=1, correlation=0.0, spread=0.02)
    runs = [str(write_run(tmp_path / name, run_lines(steps_s)).parent) for name in ("before", "after")]
    fits("report", write_schemas.answer(["report", runs[0], "--json"], tmp_path))
    compared = write_schemas.answer(["compare", *runs, "--fail-if", "mfu < 0.5 * baseline", "--json"], tmp_path)
    fits("compare", compared)
    assert compared["conditions"][0]["verdict"] == "passes"


def test_what_does_not_fit_is_found() -> None:
    output = {"condition": "mfu < 1", "run": "after", "left": 1, "right": 2, "verdict": "perhaps"}
    verdict = {"$defs": schema("compare")["$defs"], "$ref": "#/$defs/Verdict"}
    with pytest.raises(jsonschema.ValidationError, match="perhaps"):
        jsonschema.validate(output, verdict)


def test_the_workflows_of_the_project_and_of_the_page_on_gates_are_sound(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs" / "gate_in_ci.md").read_text("utf-8")
    (workflow,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "gate.yml").write_text(workflow)
    files = [str(root / ".github" / "workflows" / "ci.yml"), str(tmp_path / "gate.yml")]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
