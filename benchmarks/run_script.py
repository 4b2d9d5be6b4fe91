"""What does `flopmeter run` cost beside `python` on the same program?

    python benchmarks/run_script.py [--steps 300] [--pairs 5] [--short]

Both commands run in turn, each in a process of its own, so that a slow moment of the machine hits both. The program
times its own steps. `steady` compares the medians of the steps after the first 20; `all` the time of the whole loop,
with what it takes to understand it and to measure a step; `start-up` the wall time of programs that train nothing.
One torch thread. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
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

BENCHMARK_VERSION = 1
START_STEPS = 20
COMMANDS = {"python": [], "flopmeter run": ["-m", "flopmeter", "run", "--quiet", "-o"]}
EMPTY = {"an empty program": "pass", "a program that imports torch": "import torch"}
TRAINING = """
import json, sys, time
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
num_steps, width, batch, length = int(sys.argv[1]), 128, 8, 64
model = nn.Sequential(
    nn.Embedding(256, width),
    *(nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(3)),
    nn.Linear(width, 256),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
begin, ends = time.perf_counter(), []
for _ in range(num_steps):
    ids = torch.randint(256, (batch, length + 1))
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ends.append(time.perf_counter())
steps = [end - start for start, end in zip([begin, *ends], ends)]
print(json.dumps({"steps_s": steps, "loss": loss.item()}))
"""


def run(command: str, folder: Path, script: Path, *arguments: str) -> tuple[float, str]:
    """Wall time of a process, and what it printed."""
    options = [*COMMANDS[command], str(folder / f"record-{time.monotonic_ns()}")] if COMMANDS[command] else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start_s = time.perf_counter()
    answer = subprocess.run(
        [sys.executable, *options, str(script), *arguments], capture_output=True, text=True, env=environment, check=True
    )
    return time.perf_counter() - start_s, answer.stdout


def start_up(folder: Path, num_pairs: int) -> dict[str, dict[str, float]]:
    """Median wall time of programs that train nothing, by program and command."""
    results = {}
    for name, source in EMPTY.items():
        script = folder / "empty.py"
        script.write_text(source)
        times: dict[str, list[float]] = {command: [] for command in COMMANDS}
        for _ in range(num_pairs):
            for command in COMMANDS:
                times[command].append(run(command, folder, script)[0])
        results[name] = {command: statistics.median(values) for command, values in times.items()}
    return results


def training(folder: Path, num_pairs: int, num_steps: int) -> dict[str, dict[str, float]]:
    """Step times of the same training, by command; raises when the losses differ."""
    script = folder / "train.py"
    script.write_text(TRAINING)
    steady: dict[str, list[float]] = {command: [] for command in COMMANDS}
    loops: dict[str, list[float]] = {command: [] for command in COMMANDS}
    losses = set()
    for _ in range(num_pairs):
        for command in COMMANDS:
            answer = json.loads(run(command, folder, script, str(num_steps))[1])
            steady[command].append(statistics.median(answer["steps_s"][min(START_STEPS, num_steps // 2) :]))
            loops[command].append(sum(answer["steps_s"]))
            losses.add(answer["loss"])
    if len(losses) != 1:
        raise SystemExit(f"the losses differ: {losses}")
    return {
        command: {"step_s": statistics.median(steady[command]), "loop_s": statistics.median(loops[command])}
        for command in COMMANDS
    }


def show(starts: dict[str, dict[str, float]], trained: dict[str, dict[str, float]], num_steps: int) -> None:
    table = Table(title="flopmeter run against python", title_justify="left")
    for heading in ("what", *COMMANDS, "more"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, times in starts.items():
        table.add_row(
            f"start-up: {name}", *(f"{value * 1e3:.0f} ms" for value in times.values()), f"{_more(times) * 1e3:.0f} ms"
        )
    for key, name in (("step_s", "steady step"), ("loop_s", f"all {num_steps} steps")):
        times = {command: values[key] for command, values in trained.items()}
        table.add_row(
            name, *(f"{value * 1e3:.2f} ms" for value in times.values()), f"{_more(times) / times['python']:+.2%}"
        )
    Console(stderr=True).print(table)


def _more(times: dict[str, float]) -> float:
    return times["flopmeter run"] - times["python"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="a few steps, to see that it runs")
    arguments = parser.parse_args()
    num_pairs, num_steps = (1, 8) if arguments.short else (arguments.pairs, arguments.steps)
    with tempfile.TemporaryDirectory() as name:
        starts = start_up(Path(name), num_pairs)
        trained = training(Path(name), num_pairs, num_steps)
    show(starts, trained, num_steps)
    machine = {"cpu": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "torch": version("torch")}
    print(json.dumps({
        "benchmark": "run_script", "version": BENCHMARK_VERSION, "machine": machine, "num_steps": num_steps,
        "num_pairs": num_pairs, "start_up_s": starts, "training": trained,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
