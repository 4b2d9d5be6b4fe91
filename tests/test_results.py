"""The READMEs and the page of numbers say what the results and the schema say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_the_page_of_numbers_is_made_from_the_schema() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/write_numbers.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    page = (ROOT / "docs" / "numbers.md").read_text("utf-8")
    assert page == done.stdout, "run  python scripts/write_numbers.py > docs/numbers.md"
