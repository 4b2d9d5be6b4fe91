from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import typer

from flopmeter import __version__
from flopmeter.cli import build_app
from flopmeter.record import load_run
from made_runs import make_run


def flopmeter(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flopmeter", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def commands() -> list[str]:
    return [str(command.name) for command in build_app().registered_commands]


def test_every_command_has_a_help_text_with_an_example() -> None:
    for name in commands():
        answer = flopmeter(name, "--help", COLUMNS="200")
        assert answer.returncode == 0
        assert f"flopmeter {name}" in answer.stdout.replace("Usage: flopmeter", "")
        assert "Example" in answer.stdout


ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / "src/flopmeter/SKILL.md", *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
CALL = re.compile(r"^(?:\$ )?(?:flopmeter|.*-m flopmeter) +([a-z].*)$", re.M)


def calls_of(page: Path) -> list[list[str]]:
    """What the blocks of a page call `flopmeter` with, up to a pipe, a redirection or a comment."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    shown = "\n".join(block for language, block in fenced if language in ("", "bash", "console", "sh"))
    found = []
    for call in CALL.findall(shown.replace("\\\n", " ")):
        words = shlex.shlex(call, posix=True, punctuation_chars="|&;<>")
        words.whitespace_split = True
        found.append(list(takewhile(lambda word: not set(word) <= set("|&;<>"), words)))
    return found


@pytest.mark.parametrize("page", [page for page in TEXTS if calls_of(page)], ids=lambda page: page.stem)
def test_the_command_line_takes_every_call_that_a_page_shows(page: Path) -> None:
    known = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    for name, *arguments in calls_of(page):
        known[name].make_context(name, arguments)  # raises on what it does not take; nothing is run


def test_a_call_that_the_command_line_does_not_take_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\npython -m flopmeter run a.py \\\n  -o x > y\nflopmeter peak --lst 'a > b' # all\n```\n")
    assert calls_of(page) == [["run", "a.py", "-o", "x"], ["peak", "--lst", "a > b"]]
    known = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    with pytest.raises(typer.TyperException):
        known["peak"].make_context("peak", ["--lst"])


def test_the_version_is_printed() -> None:
    assert flopmeter("--version").stdout.strip() == f"flopmeter {__version__}"


WRONG_USE = (
    "nonsense",
    "peak --no-such-option",
    "peak extra",
    "peak --dtype fp99",
    "demo --seconds soon",
    "run",
    "run --mode fast train.py",
    "report . --format pdf",
    "report --explain no_such_rule",
    "peak h100",
    "doctor --only no_such_check",
    "mfu --arch layers=2 --seq 8 --gpus 1 --tokens-per-second 8 --peak-flop-per-s 1e12",
)


def test_a_size_given_twice_is_wrong_use() -> None:
    pytest.importorskip("transformers", reason="the sizes are those of its configs")
    assert_wrong_use("count llama:layers=2,layers=3")


@pytest.mark.parametrize("arguments", WRONG_USE)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: str) -> None:
    assert_wrong_use(arguments)


def assert_wrong_use(arguments: str) -> None:
    answer = flopmeter(*arguments.split())
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("flopmeter: error: ")
    assert answer.stderr.count("\n") == 1


def test_a_failure_is_one_line_and_exit_code_1() -> None:
    answer = flopmeter("peak", "--device", "NVIDIA X999", "--dtype", "bf16")
    assert answer.returncode == 1
    assert answer.stderr.startswith("flopmeter: error: ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["peak --list", "peak --list --json", "report --explain data_stall", "--help"])
def test_a_reader_that_has_seen_enough_is_no_failure(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does, but at once
    with os.fdopen(writer, "wb") as closed:
        command = [sys.executable, "-m", "flopmeter", *arguments.split()]
        answer = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_debug_shows_the_traceback() -> None:
    answer = flopmeter("--debug", "peak", "--device", "NVIDIA X999")
    assert "Traceback" in answer.stderr
    assert answer.returncode == 1


def test_debug_changes_no_exit_code() -> None:
    answer = flopmeter("--debug", "report", "--explain", "no_such_rule")
    assert "Traceback" in answer.stderr
    assert answer.returncode == 2


def test_without_a_command_the_help_is_shown() -> None:
    assert "demo" in flopmeter().stdout


def test_a_command_that_needs_torch_says_so_in_one_line_when_it_is_absent(tmp_path: Path) -> None:
    # A module finder in front of all others: torch is then as absent as on a machine without it.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class NoTorch:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'torch' else real(name, package)\n"
        "sys.meta_path.insert(0, NoTorch)\n"
    )
    answer = flopmeter("demo", PYTHONPATH=str(tmp_path))
    assert answer.returncode == 1
    assert answer.stderr == (
        "flopmeter: error: flopmeter demo needs torch, which is not installed: run pip install 'flopmeter[torch]'\n"
    )


def test_the_demo_trains_and_leaves_a_run_file(tmp_path: Path) -> None:
    answer = flopmeter("demo", "--seconds", "4", "--output-dir", str(tmp_path / "demo"), "--json")
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout)
    run = load_run(result["run"])
    assert len(run) == result["num_steps"] > 0
    assert run.column("training/loss")[-1] < run.column("training/loss")[0]


def test_a_further_demo_takes_the_next_free_folder(tmp_path: Path) -> None:
    for name in ("demo", "demo-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.jsonl").touch()
    (tmp_path / "runs" / "demo-3").mkdir()  # a folder without a run is free
    answer = subprocess.run(
        [sys.executable, "-m", "flopmeter", "demo", "--seconds", "1", "--json"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(answer.stdout)["run"] == str(tmp_path / "runs" / "demo-3" / "run.jsonl")


@pytest.mark.slow
def test_the_demo_shows_a_line_and_a_table(tmp_path: Path) -> None:
    answer = flopmeter("demo", "--seconds", "3", "--output-dir", str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    assert "step " in answer.stderr
    assert "MFU" in answer.stderr
    assert "goodput" in answer.stdout
    assert "run.jsonl" in answer.stdout


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_pipe_that_cannot_take_a_sign_gets_another_and_no_traceback(tmp_path: Path, encoding: str) -> None:
    before, after = (
        str(make_run(tmp_path / name, [s] * 30).path.parent) for name, s in (("a", 0.1), ("b \u2603", 0.2))
    )
    answer = flopmeter("compare", before, after, PYTHONIOENCODING=encoding)
    assert answer.returncode == 0, answer.stderr
    assert "?50.0 %" in answer.stdout  # half the steps per second, behind a minus that neither encoding has
