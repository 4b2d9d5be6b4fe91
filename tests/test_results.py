"""The READMEs and the page of numbers say what the results and the schema say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_evidence
from write_results import rewritten

ROOT = Path(__file__).resolve().parents[1]


def test_the_tables_of_the_readmes_are_those_of_the_result_files() -> None:
    command = [sys.executable, "scripts/write_results.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}: run  make results"


def test_the_check_fails_on_a_table_that_is_not_the_results() -> None:
    text = "<!-- results: accuracy -->\n| made up |\n<!-- end of results -->"
    right = rewritten(text, "en")
    assert right != text
    assert rewritten(right, "en") == right


def test_the_page_of_gpus_is_made_from_the_files_of_cards() -> None:
    command = [sys.executable, "scripts/gpu_evidence.py", "--pages", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}: run  python scripts/gpu_evidence.py --pages"


def test_a_simulated_device_makes_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {
        "step_time": {"added_share": 0.01, "plain_step_s": 0.004},
        "trace": {"error": "x"},
        "counters": {"error": "x"},
    }
    parts |= {"tests": {"num_passed": 30, "failed": []}, "planted": {"padding": {"first": "a", "wanted": "a"}}}
    here = {"card": "Card", "num_cards": 2, "torch": "2.13.0", "driver": "580", "date": "2026-01-01"}
    monkeypatch.setattr(gpu_evidence, "RESULTS", tmp_path)
    (tmp_path / "card.json").write_text(json.dumps({"is_simulated": False, "environment": here, **parts}))
    assert "| Card x 2 |" in gpu_evidence.page()
    assert "| 30 passed, 0 failed | +1.00% of 4.00 ms | not measured | not measured | 1 of 1 |" in gpu_evidence.page()
    (tmp_path / "card.json").write_text(json.dumps({"is_simulated": True, "environment": here, **parts}))
    with pytest.raises(ValueError, match="simulated device"):
        gpu_evidence.page()


def test_the_page_of_numbers_is_made_from_the_schema() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/write_numbers.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    page = (ROOT / "docs" / "numbers.md").read_text("utf-8")
    assert page == done.stdout, "run  python scripts/write_numbers.py > docs/numbers.md"
