"""Would the tests notice? Small errors are put into the source, one at a time, and the tests of that room are run.

    python benchmarks/mutation.py [--mutants 80] [--seed 20] [--rooms formulas rules] [--quick] [--record FILE]

A mutant changes one thing inside a function: a comparison, an operator, a constant, a condition. Which ones are made is
drawn with a fixed seed, evenly over the rooms. Caught is a mutant on which some test fails or takes too long; the
others are listed, also those that change nothing anybody could see. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from outcome import add_record_option, finish

BENCHMARK_VERSION = 1
ROOT = Path(__file__).resolve().parents[1]
SEED = 20
TIMEOUT_S = 240
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "formulas": (("flops/formulas/*.py",), ("test_formulas.py", "test_formulas_on_real_operators.py")),
    "schedule": (
        ("monitor/schedule.py", "monitor/sampling.py"),
        ("test_schedule.py", "test_sampling.py", "test_timing.py"),
    ),
    "record": (("record/*.py",), ("test_record.py", "test_training_monitor.py")),
    "rules": (("diagnosis/rules/*.py",), ("test_rules.py", "test_rules_to_the_letter.py", "test_diagnosis.py")),
}
"""Which files, and which tests have to notice."""

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One error that could be made."""

    room: str
    file: str
    line: int
    was: str
    becomes: str
    source: str
    """The whole file with the error in it."""


def changed(node: ast.AST) -> ast.AST | None:
    """The node with an error in it; None where this kind of node is left alone."""
    new = deepcopy(node)
    if isinstance(new, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(new.op) in OPERATORS:
        new.op = OPERATORS[type(new.op)]()
        return new
    if isinstance(new, ast.Compare) and type(new.ops[0]) in OPERATORS:
        new.ops[0] = OPERATORS[type(new.ops[0])]()
        return new
    if isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return new.operand
    if isinstance(new, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
        return new
    if isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new.value = not new.value
        return new
    if isinstance(new, ast.Constant) and isinstance(new.value, (int, float)):
        new.value = new.value + 1
        return new
    return None


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Every node inside a function that can be changed: its parent, field and index, and what it becomes."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    seen: set[int] = set()
    for function in functions:
        for statement in function.body:
            for parent in ast.walk(statement):
                for field, value in ast.iter_fields(parent):
                    if field in ("annotation", "returns", "msg", "exc"):
                        continue
                    for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                        if not isinstance(node, ast.AST) or id(node) in seen or isinstance(parent, ast.JoinedStr):
                            continue
                        new = changed(node)
                        if new is not None:
                            seen.add(id(node))
                            yield parent, field, index, new


def mutants(room: str) -> list[Mutant]:
    """Every error of a room."""
    found = []
    folder = ROOT / "src" / "flopmeter"
    for path in sorted(path for pattern in ROOMS[room][0] for path in folder.glob(pattern)):
        tree = ast.parse(path.read_text("utf-8"))
        for parent, field, index, new in list(places(tree)):
            siblings = getattr(parent, field)
            old = siblings if index is None else siblings[index]
            _set(parent, field, index, new)
            found.append(
                Mutant(
                    room=room,
                    file=str(path.relative_to(ROOT)),
                    line=getattr(old, "lineno", 0),
                    was=ast.unparse(old),
                    becomes=ast.unparse(new),
                    source=ast.unparse(ast.fix_missing_locations(tree)),
                )
            )
            _set(parent, field, index, old)
    return found


def _set(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def is_caught(mutant: Mutant | None, room: str) -> bool:
    """Whether a test of the room fails on it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests", "configs", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if mutant is not None:
            (copy / mutant.file).write_text(mutant.source, encoding="utf-8")
        tests = [f"tests/{name}" for name in ROOMS[room][1]]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return True
        return done.returncode == 1 or done.returncode == 2  # a failure, or tests that cannot be collected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=80, help="in all, evenly over the rooms")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one mutant of the schedule, to see that it runs")
    add_record_option(parser)
    arguments = parser.parse_args()
    rooms, total = (["schedule"], 1) if arguments.quick else (arguments.rooms, arguments.mutants)
    dice = random.Random(arguments.seed)
    for room in rooms:
        if is_caught(None, room):
            raise SystemExit(f"the tests of {room} fail without any mutant")
    chosen = [mutant for room in rooms for mutant in dice.sample(mutants(room), total // len(rooms))]
    with Progress(console=Console(stderr=True)) as bar, ThreadPoolExecutor(arguments.jobs) as pool:
        task = bar.add_task("Mutants", total=len(chosen))
        caught = []
        for found in pool.map(lambda mutant: is_caught(mutant, mutant.room), chosen):
            caught.append(found)
            bar.advance(task)
    survivors = [mutant for mutant, found in zip(chosen, caught, strict=True) if not found]
    for mutant in survivors:
        print(f"not caught: {mutant.file}:{mutant.line}: {mutant.was}  ->  {mutant.becomes}")
    by_room = {
        room: [sum(found for m, found in zip(chosen, caught, strict=True) if m.room == room),
               sum(m.room == room for m in chosen)]
        for room in rooms
    }  # fmt: skip
    listed = [{key: value for key, value in asdict(m).items() if key != "source"} for m in survivors]
    figures = {
        "seed": arguments.seed, "caught": [sum(caught), len(caught)], "by_room": by_room, "not_caught": listed
    }  # fmt: skip
    finish("mutation", BENCHMARK_VERSION, figures, arguments.record)


if __name__ == "__main__":
    main()
