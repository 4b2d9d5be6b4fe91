"""Which torch does flopmeter work with? Runs the tests of the Makefile's list on each version; writes docs/versions.md.

    make test-versions
    python scripts/test_versions.py 2.8.0 2.15.0 --tests tests/test_torch_versions.py --environments DIR

Each version has a virtual environment in a folder of its own: the torch wheel alone, with the CUDA libraries that it
only loads borrowed from one set for each major version of CUDA, and every other library borrowed from the environment
that runs this script. The first run downloads some gigabytes. Environments that exist are used as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
COLUMNS = {
    "counting": r"flops_of_a_model",
    "watch": r"plain_model|header|cuda_graphs",
    "compiled stays compiled": r"40_of_40|exported",
    "profiler": r"profiled_step|\[profiler\]",
    "DDP": r"\[ddp\]",
    "FSDP2": r"\[fsdp2\]",
    "HF": r"of_transformers",
    "Lightning": r"of_lightning",
}
"""Heading to the names of the tests that its cells are about."""
NOT_TRIED = "not tried"
HEAD = """# Versions of torch

Each cell is a run of `make test-versions` on that date, with the torch wheel of the package index on a CPU: nothing
here has run on a GPU. "works" means that every test passed; "skipped" has the reason. What is off with a version, and
why, is in the header of each run and in `flopmeter doctor`: before 2.10 a step that runs compiled code is counted on
shapes and not observed; before 2.12 no step is profiled on CUDA unless it is asked for; before 2.13 nothing is observed
beside CUDA graphs of torch.compile; from 2.14 on profiler mode does not see a custom operator that is called through
its own object. Before 2.6 the command line ends with one line, and a watched loop is only timed.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="such as 2.8.0")
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-versions")
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args()
    has_failed = False
    for version in asked.versions:
        python = environment(asked.environments / version, version)
        results = run_tests(python, asked.tests)
        cells = {heading: cell(results, pattern) for heading, pattern in COLUMNS.items()}
        print(version, cells, flush=True)
        write_row(asked.page, version, cells)
        has_failed |= any(" fail" in text for text in cells.values())
    return int(has_failed)


def environment(folder: Path, version: str) -> Path:
    """The Python of an environment with this torch, which is made if it is not there."""
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if not (site / "torch").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        pip("--python", str(python), "install", "--no-deps", f"torch=={version}")
        borrow_cuda(site, folder.parent)
        others = [path for path in sys.path if path.endswith("site-packages")]
        (site / "zz_borrowed.pth").write_text("\n".join(others) + "\n")  # after its own: torch comes from here
    return python


def borrow_cuda(site: Path, home: Path) -> None:
    """Link the CUDA libraries that this torch loads; those of its major version that are not there yet are fetched."""
    metadata = next(site.glob("torch-*.dist-info")) / "METADATA"
    wanted = re.findall(r"^Requires-Dist: ((?:nvidia|cuda-toolkit)[^;\n]*)", metadata.read_text(), re.M)
    major = next((found[0] for name in wanted if (found := re.search(r"(?<=-cu)1\d", name))), None)
    if major is None:
        return
    shared = home / f"cuda{major}"
    shared.mkdir(exist_ok=True)
    for requirement in wanted:
        name = re.split(r"[\[=<>~ (]", requirement)[0]
        marker = shared / f"{name}.fetched"
        if not marker.exists():
            with tempfile.TemporaryDirectory() as folder:
                own = re.sub(r"[() ]", "", requirement)
                pip("install", *([] if "[" in own else ["--no-deps"]), "--target", folder, own)
                shutil.copytree(folder, shared, dirs_exist_ok=True, copy_function=keep_first)
            marker.touch()
    for name, target in (("nvidia", shared / "nvidia"), ("cusparselt", shared / "nvidia" / "cusparselt")):
        if not (site / name).exists():
            (site / name).symlink_to(target)


def keep_first(source: str, target: str) -> None:
    """Copy what is not there: the set serves the versions that it was fetched for first."""
    if not os.path.exists(target):
        shutil.copy2(source, target)


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


def run_tests(python: Path, tests: list[str]) -> dict[str, str]:
    """Name of each test to "passed", "failed" or why it was skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        cases = ET.parse(report).getroot().iter("testcase") if report.exists() else []
        return {str(case.get("name")): outcome(case) for case in cases}


def outcome(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    return "passed" if skipped is None else f"skipped: {skipped.get('message')}"


def cell(results: dict[str, str], pattern: str) -> str:
    """What a table says of the tests whose names match."""
    found = [result for name, result in results.items() if re.search(pattern, name)]
    if not found:
        return NOT_TRIED
    date = time.strftime("%Y-%m-%d")
    if num_failed := found.count("failed"):
        return f"{num_failed} of {len(found)} fail ({date})"
    if reason := next((result for result in found if result != "passed"), None):
        return f"{reason} ({date})"
    return f"works ({date})"


def write_row(page: Path, version: str, cells: dict[str, str]) -> None:
    """Put a version's row into the table; other rows stay, and so does what this run did not try."""
    lines = page.read_text().splitlines() if page.exists() else []
    rows = {line.split("|")[1].strip(): line for line in lines if re.match(r"\| \d", line)}
    before = dict(zip(cells, rows[version].split(" | ")[1:], strict=True)) if version in rows else {}
    cells = {name: before.get(name, text).strip("| ") if text == NOT_TRIED else text for name, text in cells.items()}
    rows[version] = f"| {version} | " + " | ".join(cells.values()) + " |"
    ordered = [rows[name] for name in sorted(rows, key=lambda name: [int(part) for part in name.split(".")])]
    heading = "| torch | " + " | ".join(cells) + " |"
    page.write_text("\n".join([HEAD, heading, "|---" * (len(cells) + 1) + "|", *ordered]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
