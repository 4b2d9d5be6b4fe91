"""What does `flopmeter run` cost beside `python` on the same program?

    python benchmarks/run_script.py [--steps 3000] [--sets 40] [--short] [--record FILE]

`a step`: one process under `flopmeter run` trains two steps with the hooks that it finds on model, optimizer and
backward pass, and two without, in turn; the figure is the median difference to the plain step of the same turn, with
its standard error. Measured steps and their turns are left out.

`a process`: two under `python` and one under `flopmeter run` train in turns, a few steps at a time and in random order,
then all are started anew, many times: two processes that do the same differ by a percent, by where their memory lies,
and only many of them tell more. Each is compared with the first one under `python`, step by step: mean over the sets
of the median difference, after the first 20 steps, with its standard error. What the second `python` shows is what the
machine cannot tell from nothing. glibc is told to keep freed memory: else a step takes 0 to 1,300 page faults, by luck,
which is up to 4 % of it. `measured steps` is what observed and profiled ones took beyond an ordinary step, spread over
all; `the first 20 steps` is what it takes to understand the loop and to observe it for the first time. The losses of a
set must be equal.

`start-up` is the wall time of programs that train nothing. flopmeter is byte-compiled, as pip leaves it. One torch
thread. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import flopmeter
from flopmeter import load_run
from outcome import add_record_option, finish

BENCHMARK_VERSION = 7
START_STEPS = 20
START_PAIRS = 8
BLOCK, SHORT_BLOCK = 16, 2
TURNS = 4
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
COMMANDS = {"python": [], "flopmeter run": ["-m", "flopmeter", "run", "--quiet", "-o"]}
TOGETHER = {"python": "python", "python again": "python", "flopmeter run": "flopmeter run"}
"""What the processes of a set are called, and how they are started."""
EMPTY = {"an empty program": "pass", "a program that imports torch": "import torch"}
TRAINING = """
import json, sys, time
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

torch.set_num_threads(1)
torch.manual_seed(0)
width, batch, length = 128, 8, 96
model = nn.Sequential(
    nn.Embedding(256, width),
    *(nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(3)),
    nn.Linear(width, 256),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
plain_backward, away = torch.autograd.backward, []


def take_hooks_away():
    away[:] = [(place, dict(place)) for place in (
        model._forward_pre_hooks, model._forward_hooks,
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        _global_optimizer_post_hooks,
    )] + [torch.autograd.backward]
    for place, _ in away[:-1]:
        place.clear()
    torch.autograd.backward = plain_backward


def put_hooks_back():
    torch.autograd.backward = away.pop()
    while away:
        place, hooks = away.pop()
        place.update(hooks)


for line in sys.stdin:
    command, num_steps = line.split()
    if command == "plain":
        take_hooks_away()
    ends = [time.perf_counter()]
    for _ in range(int(num_steps)):
        ids = torch.randint(256, (batch, length + 1))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    if command == "plain":
        put_hooks_back()
    print(json.dumps([end - start for start, end in zip(ends, ends[1:])]), flush=True)
print(loss.item(), flush=True)
"""


def command_line(command: str, record: Path, script: Path) -> list[str]:
    options = [*COMMANDS[command], str(record)] if COMMANDS[command] else []
    return [sys.executable, *options, str(script)]


def wall_s(command: str, folder: Path, script: Path) -> float:
    """Wall time of a process that trains nothing."""
    start_s = time.perf_counter()
    subprocess.run(command_line(command, folder / "empty", script), capture_output=True, check=True)
    return time.perf_counter() - start_s


def start_up(folder: Path, num_pairs: int) -> dict[str, dict[str, float]]:
    """Median wall time of programs that train nothing, by program and command."""
    results = {}
    for name, source in EMPTY.items():
        script = folder / "empty.py"
        script.write_text(source)
        times: dict[str, list[float]] = {command: [] for command in COMMANDS}
        for _ in range(num_pairs):
            for command in COMMANDS:
                times[command].append(wall_s(command, folder, script))
        results[name] = {command: statistics.median(values) for command, values in times.items()}
    return results


class Training:
    """A process that trains when it is told to."""

    def __init__(self, command: str, record: Path, script: Path) -> None:
        self._process = subprocess.Popen(
            command_line(command, record, script), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY},
        )  # fmt: skip
        self.steps_s: list[float] = []

    def train(self, num_steps: int, *, is_plain: bool = False) -> list[float]:
        """Seconds of each step; with or without the hooks that there are."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{'plain' if is_plain else 'train'} {num_steps}\n")
        self._process.stdin.flush()
        steps_s: list[float] = json.loads(self._process.stdout.readline())
        self.steps_s += [] if is_plain else steps_s
        return steps_s

    def end(self) -> float:
        """The last loss."""
        answer, _ = self._process.communicate()
        return float(answer)


def make_script(folder: Path) -> Path:
    folder.mkdir(parents=True)
    script = folder / "train.py"
    script.write_text(TRAINING)
    return script


def train_in_turns(folder: Path, num_steps: int) -> dict[str, float]:
    """What a step takes more with the hooks of `flopmeter run` than without, in one process."""
    run = Training("flopmeter run", folder / "record", make_script(folder))
    run.train(START_STEPS)
    chance = random.Random(0)
    turns = []
    for _ in range(num_steps // (2 * SHORT_BLOCK)):
        plain_first = chance.random() < 0.5
        times = {is_plain: run.train(SHORT_BLOCK, is_plain=is_plain) for is_plain in (plain_first, not plain_first)}
        turns.append((times[True], times[False]))
    run.end()
    measured = {(at - START_STEPS) // SHORT_BLOCK for at in measured_steps(folder / "record")}
    spoiled = measured | {turn - 1 for turn in measured}  # a measurement begins at the end of the step before
    kept = [turn for at, turn in enumerate(turns) if at not in spoiled]
    more_s = [watched - plain for turn in kept for plain, watched in zip(*turn, strict=True)]
    low_s, middle_s, high_s = statistics.quantiles(more_s, n=4)
    return {
        "num_steps": len(more_s),
        "step_s": statistics.median(step_s for plain, _ in kept for step_s in plain),
        "more_s": middle_s,
        "error_s": 1.25 * (high_s - low_s) / 1.35 / len(more_s) ** 0.5,
    }


def train_together(folder: Path, num_turns: int, block: int, chance: random.Random) -> dict[str, dict[str, float]]:
    """What a step takes more in each process of a set than in the first; raises when the losses differ."""
    runs = {name: Training(command, folder / f"{name}.record", make_script(folder / name))
            for name, command in TOGETHER.items()}  # fmt: skip
    for run in runs.values():
        run.train(START_STEPS)
    for _ in range(num_turns):
        for name in chance.sample(list(runs), len(runs)):
            runs[name].train(block)
    losses = [run.end() for run in runs.values()]
    if len(set(losses)) != 1:
        raise SystemExit(f"the losses differ: {losses}")
    plain, *others = runs
    return {
        name: compared(runs[plain].steps_s, runs[name].steps_s, measured_steps(folder / f"{name}.record"))
        for name in others
    }


def measured_steps(record: Path) -> list[int]:
    """Steps after the start that were observed or profiled, counted from 0."""
    if not record.exists():
        return []
    return [at for at, marks in load_run(record).marks.items() if at >= START_STEPS and marks]


def compared(plain: list[float], watched: list[float], measured: list[int]) -> dict[str, float]:
    step_s = statistics.median(plain[START_STEPS:])
    more = [b - a for a, b in zip(plain[START_STEPS:], watched[START_STEPS:], strict=True)]
    more_s = statistics.median(more)
    return {
        "num_steps": len(plain),
        "step_s": step_s,
        "more_s": more_s,
        "num_measured": len(measured),
        "measuring_s": sum(watched[at] - step_s - more_s for at in measured) / len(more),
        "start_s": sum(watched[:START_STEPS]) - sum(plain[:START_STEPS]),
    }


def over_sets(found: list[dict[str, float]]) -> dict[str, float]:
    """Means over the sets, and the standard error of what a step takes more."""
    means = {key: statistics.fmean(one[key] for one in found) for key in found[0]}
    totals = {key: sum(one[key] for one in found) for key in ("num_steps", "num_measured")}
    deviation_s = statistics.stdev(one["more_s"] for one in found) if len(found) > 1 else float("nan")
    return {**means, **totals, "error_s": deviation_s / len(found) ** 0.5}


def show(
    starts: dict[str, dict[str, float]], in_turns: dict[str, float], processes: dict[str, dict[str, float]]
) -> None:
    table = Table(title="flopmeter run against python", title_justify="left")
    for heading in ("what", *COMMANDS, "more"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, times in starts.items():
        table.add_row(
            f"start-up: {name}", *(f"{value * 1e3:.0f} ms" for value in times.values()), f"{_more(times) * 1e3:.0f} ms"
        )
    for name, found in {"a step": in_turns, **{f"a process: {name}": one for name, one in processes.items()}}.items():
        step_s, more_s, error_s = (found[key] for key in ("step_s", "more_s", "error_s"))
        table.add_row(
            name, f"{step_s * 1e3:.2f} ms", f"{(step_s + more_s) * 1e3:.2f} ms",
            f"{more_s / step_s:+.2%} (+- {error_s / step_s:.2%})",
        )  # fmt: skip
    watched = processes["flopmeter run"]
    table.add_row(
        f"{watched['num_measured']:.0f} measured steps", "", "", f"{watched['measuring_s'] / watched['step_s']:+.2%}"
    )
    table.add_row(f"the first {START_STEPS} steps", "", "", f"{watched['start_s'] * 1e3:.0f} ms")
    Console(stderr=True).print(table)


def _more(times: dict[str, float]) -> float:
    return times["flopmeter run"] - times["python"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="of the process that trains with and without hooks")
    parser.add_argument("--sets", type=int, default=40, help="of processes that train in turns")
    parser.add_argument("--short", action="store_true", help="a few steps, to see that it runs")
    add_record_option(parser)
    arguments = parser.parse_args()
    num_sets, num_steps, num_turns, block = (
        (2, 40, 1, 8) if arguments.short else (arguments.sets, arguments.steps, TURNS, BLOCK)
    )
    compileall.compile_dir(Path(flopmeter.__file__).parent, quiet=1)
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        starts = start_up(folder, min(num_sets, START_PAIRS))
        in_turns = train_in_turns(folder / "turns", num_steps)
        sets = [train_together(folder / str(number), num_turns, block, chance) for number in range(num_sets)]
    processes = {name: over_sets([found[name] for found in sets]) for name in sets[0]}
    show(starts, in_turns, processes)
    figures = {
        "num_sets": num_sets, "start_up_s": starts, "in_turns": in_turns, "processes": processes, "sets": sets
    }  # fmt: skip
    finish("run_script", BENCHMARK_VERSION, figures, arguments.record)


if __name__ == "__main__":
    main()
