"""The map of the repository is true, and both READMEs say the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
MAP_ROW = re.compile(r"^\| (`[^|]+`) \|", re.MULTILINE)


def tracked_files() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listing.returncode != 0:
        pytest.skip("not a git checkout: no list of files to compare the map with")
    return [name for name in listing.stdout.splitlines() if (ROOT / name).exists()]


def mapped() -> list[str]:
    sections = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), flags=re.MULTILINE)
    (file_map,) = (section for section in sections if section.startswith("File map"))
    return [path for cell in MAP_ROW.findall(file_map) for path in re.findall(r"`([^`]+)`", cell)]


def unmapped(paths: list[str], files: list[str]) -> list[str]:
    """Source files that no row of the map covers; a row that ends in / covers its folder."""
    return [
        name
        for name in files
        if name.startswith("src/")
        and name.endswith((".py", ".toml"))
        and not name.endswith("/__init__.py")
        and not any(name == path or (path.endswith("/") and name.startswith(path)) for path in paths)
    ]


def test_every_row_of_the_map_exists() -> None:
    assert [path for path in mapped() if not (ROOT / path).exists()] == []


def test_every_source_file_is_on_the_map() -> None:
    assert unmapped(mapped(), tracked_files()) == []


@pytest.mark.parametrize(
    "page", [*READMES, *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(
        r"\]\(([^)#\s]*)(#[^)\s]*)?\)", re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    )
    places = [(page.parent / path if path else page, anchor[1:]) for path, anchor in links if "://" not in path]
    assert [path for path, _ in places if not path.exists()] == []
    assert [(path.name, anchor) for path, anchor in places if anchor and anchor not in anchors(path)] == []


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_that_the_guide_for_contributors_names_exists() -> None:
    named = re.findall(
        r"`((?:src|docs|benchmarks|scripts|tests)/[^`*<]+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    )
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_map_test_fails_on_a_file_that_is_not_on_it() -> None:
    assert unmapped(["src/flopmeter/errors.py"], ["src/flopmeter/errors.py", "src/flopmeter/new.py"]) == [
        "src/flopmeter/new.py"
    ]


def test_both_readmes_have_the_same_commands_and_headings() -> None:
    english, chinese = (path.read_text("utf-8") for path in READMES)
    commands = re.compile(r"^(?:make|flopmeter|pip|python) .*$", re.MULTILINE)
    assert commands.findall(english) == commands.findall(chinese)
    assert english.count("\n## ") == chinese.count("\n## ")


def test_after_make_demo_the_commands_of_the_readme_have_their_libraries() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("$(VENV)/.ready-demo:")[2].partition("\n\n")[0]
    assert "-e '.[serve,transformers]'" in recipe  # `flopmeter serve runs` and `flopmeter count llama-3-70b`


def test_the_docs_build_as_a_site_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, site = (
        (tmp_path / "index.html").read_text("utf-8"),
        (tmp_path / "findings" / "index.html").read_text("utf-8"),
    )
    assert "First run" in first
    assert 'id="data_stall"' in site
