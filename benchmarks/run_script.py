"""What does `flopmeter run` cost beside `python` on the same program?

    python benchmarks/run_script.py [--steps 300] [--pairs 8] [--short]

Two processes train the same model, one under each command, and a few steps at a time in turn: the program waits for a
line on its standard input before every block. So a slow moment of the machine hits both, and a step is compared with
one of the same turn. Two processes differ by a percent even under the same command, by where their memory lies: so
there are several pairs, and `a step` is the mean over the pairs of the median difference, after the first 20 steps,
with its standard error. `measured steps` is what observed and profiled ones took beyond an ordinary step, spread over
all; `the first 20 steps` is what it takes to understand the loop and to observe it for the first time. `start-up` is
the wall time of programs that train nothing. flopmeter is byte-compiled, as pip leaves it. One torch thread. The last
line printed is JSON.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

import flopmeter
from flopmeter import load_run

BENCHMARK_VERSION = 3
START_STEPS = 20
BLOCK = 4
COMMANDS = {"python": [], "flopmeter run": ["-m", "flopmeter", "run", "--quiet", "-o"]}
EMPTY = {"an empty program": "pass", "a program that imports torch": "import torch"}
TRAINING = """
import json, sys, time
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
width, batch, length = 128, 8, 96
model = nn.Sequential(
    nn.Embedding(256, width),
    *(nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(3)),
    nn.Linear(width, 256),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for line in sys.stdin:
    ends = [time.perf_counter()]
    for _ in range(int(line)):
        ids = torch.randint(256, (batch, length + 1))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
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
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.steps_s: list[float] = []

    def train(self, num_steps: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_steps}\n")
        self._process.stdin.flush()
        self.steps_s += json.loads(self._process.stdout.readline())

    def end(self) -> float:
        """The last loss."""
        answer, _ = self._process.communicate()
        return float(answer)


def train_pair(folder: Path, num_steps: int) -> dict[str, float]:
    """What a step of the same training takes more; raises when the losses differ."""
    folder.mkdir()
    script, record = folder / "train.py", folder / "record"
    script.write_text(TRAINING)
    runs = {command: Training(command, record, script) for command in COMMANDS}
    for turn in range(num_steps // BLOCK):
        for command in list(COMMANDS)[:: 1 if turn % 2 else -1]:
            runs[command].train(BLOCK)
    losses = {command: run.end() for command, run in runs.items()}
    if len(set(losses.values())) != 1:
        raise SystemExit(f"the losses differ: {losses}")
    plain, watched = (run.steps_s for run in runs.values())
    return compared(plain, watched, measured_steps(record))


def measured_steps(record: Path) -> list[int]:
    """Steps after the start that were observed or profiled, counted from 0."""
    return [at for at, marks in load_run(record).marks.items() if at >= START_STEPS and marks]


def compared(plain: list[float], watched: list[float], measured: list[int]) -> dict[str, float]:
    start = min(START_STEPS, len(plain) // 2)
    step_s = statistics.median(plain[start:])
    more = [b - a for a, b in zip(plain[start:], watched[start:], strict=True)]
    more_s = statistics.median(more)
    return {
        "num_steps": len(plain),
        "step_s": step_s,
        "more_s": more_s,
        "num_measured": len(measured),
        "measuring_s": sum(watched[at] - step_s - more_s for at in measured) / len(more),
        "start_s": sum(watched[:start]) - sum(plain[:start]),
    }


def together(pairs: list[dict[str, float]]) -> dict[str, float]:
    """Means over the pairs, and the standard error of what a step takes more."""
    means = {key: statistics.fmean(pair[key] for pair in pairs) for key in pairs[0]}
    totals = {key: sum(pair[key] for pair in pairs) for key in ("num_steps", "num_measured")}
    deviation_s = statistics.stdev(pair["more_s"] for pair in pairs) if len(pairs) > 1 else float("nan")
    return {**means, **totals, "error_s": deviation_s / len(pairs) ** 0.5}


def show(starts: dict[str, dict[str, float]], trained: dict[str, float]) -> None:
    table = Table(title="flopmeter run against python", title_justify="left")
    for heading in ("what", *COMMANDS, "more"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, times in starts.items():
        table.add_row(
            f"start-up: {name}", *(f"{value * 1e3:.0f} ms" for value in times.values()), f"{_more(times) * 1e3:.0f} ms"
        )
    step_s, more_s, error_s = (trained[key] for key in ("step_s", "more_s", "error_s"))
    table.add_row(
        "a step", f"{step_s * 1e3:.2f} ms", f"{(step_s + more_s) * 1e3:.2f} ms",
        f"{more_s / step_s:+.2%} (+- {error_s / step_s:.2%})",
    )  # fmt: skip
    table.add_row(f"{trained['num_measured']:.0f} measured steps", "", "", f"{trained['measuring_s'] / step_s:+.2%}")
    table.add_row(f"the first {START_STEPS} steps", "", "", f"{trained['start_s'] * 1e3:.0f} ms")
    Console(stderr=True).print(table)


def _more(times: dict[str, float]) -> float:
    return times["flopmeter run"] - times["python"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of each process")
    parser.add_argument("--pairs", type=int, default=8, help="of processes")
    parser.add_argument("--short", action="store_true", help="a few steps, to see that it runs")
    arguments = parser.parse_args()
    num_pairs, num_steps = (2, 16) if arguments.short else (arguments.pairs, arguments.steps)
    compileall.compile_dir(Path(flopmeter.__file__).parent, quiet=1)
    with tempfile.TemporaryDirectory() as name:
        starts = start_up(Path(name), num_pairs)
        pairs = [train_pair(Path(name) / str(number), num_steps) for number in range(num_pairs)]
        trained = together(pairs)
    show(starts, trained)
    machine = {"cpu": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "torch": version("torch")}
    print(json.dumps({
        "benchmark": "run_script", "version": BENCHMARK_VERSION, "machine": machine,
        "num_pairs": num_pairs, "start_up_s": starts, "training": trained, "pairs": pairs,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
