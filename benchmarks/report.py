"""How long does a report take, how much memory, and how large is the page, from ten thousand steps to a million?

    python benchmarks/report.py [--steps 10000 100000 1000000] [--ranks 1024] [--short] [--record FILE]

Run files are made up: every metric of a real run of the monitor, pauses, counts, profiles, metrics by dataset, and for
the last case statistics of that many ranks. Each report is made in a process of its own, as `flopmeter report` does it,
imports included; memory is the largest resident size of that process. Growth is the time per step of each size over
that of the size before: 1 is linear. The last line printed is JSON; the exit code is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from flopmeter.metrics import as_row
from flopmeter.schema import PHASES, RUN_FILE, SCHEMA_VERSION
from outcome import add_record_option, finish

BENCHMARK_VERSION = 1
STEPS = (10_000, 100_000, 1_000_000)
RANKS = 1024
RANK_STEPS = 10_000
GOAL_STEPS, GOAL_S, GOAL_RSS_MB, GOAL_PAGE_MB = 1_000_000, 20.0, 500.0, 8.0
STEP_S, PEAK_FLOP_PER_S, MODEL_FLOP = 0.4, 1e15, 1.6e14

Line = dict[str, Any]


def run_lines(num_steps: int, num_ranks: int) -> Iterator[Line]:
    """The lines of a run: one slow step in a thousand, a pause every tenth part, statistics of the ranks 200 times."""
    noise, time_s = random.Random(0), 1.8e9
    yield header(time_s, num_ranks)
    yield event("peak", time_s, 0, dtype="bf16", device="made up", flop_per_s=PEAK_FLOP_PER_S, source="user", note="")
    for step in range(1, num_steps + 1):
        step_s = STEP_S * (1 + 0.05 * noise.random() + 5 * (noise.random() < 0.001))
        time_s += step_s
        is_observed = step == 5 or step % 10_000 == 0
        yield step_line(step, time_s, step_s, ["observed"] if is_observed else ["warmup"] if step < 4 else [])
        if is_observed:
            yield count(time_s, step)
            yield profile(time_s, step)
        if step % max(num_steps // 10, 1) == 0:
            time_s += 10
            yield event("pause", time_s, step, name="checkpoint", duration_s=10.0)
        if num_ranks > 1 and step % max(num_steps // 200, 1) == 0:
            yield ranks(time_s, step, [STEP_S * (0.8 + 0.02 * noise.random()) for _ in range(num_ranks)])
    yield {"kind": "summary", "time": time_s, "num_steps": num_steps, "metrics": {}}


def header(time_s: float, num_ranks: int) -> Line:
    line = {"kind": "header", "schema": SCHEMA_VERSION, "run_id": "benchmark", "started_at": time_s, "host": "host"}
    model = {"model": "Decoder", "num_parameters": 8_000_000_000, "device": "made up", "world_size": num_ranks}
    return {**line, **model, "mode": "smart", "convention": "exact", "versions": {"flopmeter": "0"}}


def event(kind: str, time_s: float, step: int, **fields: Any) -> Line:
    return {"kind": "event", "event": kind, "time": time_s, "after_step": step, **fields}


def step_line(step: int, time_s: float, step_s: float, marks: list[str]) -> Line:
    ns = round(1e9 * step_s)
    measured = {
        "ns": ns,
        **dict.fromkeys((f"{phase}_ns" for phase in PHASES[:-1]), ns // len(PHASES)),
        "tokens": 16384,
        "tokens_processed": 16384,
        "samples": 2,
        "model_flop": {"bf16": MODEL_FLOP},
        "hardware_flop": {"bf16": 1.1 * MODEL_FLOP},
        "processed_flop": {"bf16": MODEL_FLOP},
    }
    metrics = {
        "training/epoch": 0,
        "training/lr": 3e-4,
        "training/loss": 2.0 + 1 / step_s,
        "training/grad_norm": 1.0,
        **(dataset_metrics(step) if step % 50 == 0 else {}),
        "perf/overhead_share": 0.001,
        "perf/flop_error": 0.0,
        **as_row(measured),
    }
    line = {"kind": "step", "step": step, "time": time_s, "metrics": metrics}
    return {**line, "marks": marks} if marks else line


def dataset_metrics(step: int) -> dict[str, float]:
    names = ("books", "code", "web")
    return {f"dataset/{name}/{key}": value for name in names for key, value in (("loss", 2.0), ("samples", 2.0 * step))}


def count(time_s: float, step: int) -> Line:
    modules = {f"layers.{layer}.{part}": MODEL_FLOP / 64 for layer in range(32) for part in ("attention", "mlp")}
    flop = {"model_flop": MODEL_FLOP, "forward_flop": MODEL_FLOP / 3, "backward_flop": MODEL_FLOP * 2 / 3}
    parts = {"by_module": modules, "by_op": {"aten::mm": MODEL_FLOP}, "by_dtype": {"bfloat16": MODEL_FLOP}}
    return event("count", time_s, step, flop_error=0.0, hardware_flop=1.1 * MODEL_FLOP, coverage=1.0, **flop, **parts)


def profile(time_s: float, step: int) -> Line:
    parts = {"matmul_s": 0.22, "non_matmul_s": 0.08, "optimizer_s": 0.03, "gap_s": 0.01, "copy_s": 0.001}
    return event("profile", time_s, step, device="cuda", step_s=STEP_S, typical_step_s=STEP_S, num_ops=4000, **parts)


def ranks(time_s: float, step: int, own_s: list[float]) -> Line:
    stats = {"own_s": {"min": min(own_s), "mean": sum(own_s) / len(own_s), "max": max(own_s), "argmax": 0}}
    fields = {"world_size": len(own_s), "missing": [], "stats": stats, "own_s_by_rank": own_s, "num_steps": 50}
    return event("ranks", time_s, step, **fields)


def work(folder: Path) -> None:
    """The child: what `flopmeter report` does, with the clock running from the start of its imports."""
    start_s = time.perf_counter()
    from flopmeter.record import load_run
    from flopmeter.report import write_report

    run = load_run(folder)
    read_s = time.perf_counter() - start_s
    page = write_report(run, folder / "report.html")
    result = {
        "read_s": read_s,
        "report_s": time.perf_counter() - start_s,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "page_mb": page.stat().st_size / 1e6,
        "run_file_mb": (folder / RUN_FILE).stat().st_size / 1e6,
    }
    print(json.dumps(result))


def measure(num_steps: int, num_ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / RUN_FILE).open("w", encoding="utf-8") as file:
            for line in run_lines(num_steps, num_ranks):
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
        command = [sys.executable, __file__, "--worker", folder]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"num_steps": num_steps, "num_ranks": num_ranks, **json.loads(answer.stdout.splitlines()[-1])}


def missed_goals(results: list[dict[str, Any]]) -> list[str]:
    limits = {"report_s": GOAL_S, "peak_rss_mb": GOAL_RSS_MB, "page_mb": GOAL_PAGE_MB}
    return [
        f"{key} {result[key]:.1f} is above {limit:g} at {result['num_steps']:,} steps, {result['num_ranks']} ranks"
        for result in results
        for key, limit in limits.items()
        if result["num_steps"] <= GOAL_STEPS and result[key] > limit
    ]


def growths(results: list[dict[str, Any]]) -> list[float]:
    """Time per step over that of the size before; single ranks only."""
    alone = [result for result in results if result["num_ranks"] == 1]
    per_step = [result["report_s"] / result["num_steps"] for result in alone]
    return [after / before for before, after in pairwise(per_step)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--short", action="store_true", help="a few hundred steps, to see that it runs")
    add_record_option(parser)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments.worker)
        return 0
    sizes = [(steps, 1) for steps in ((200, 400) if arguments.short else arguments.steps)]
    sizes.append((400 if arguments.short else RANK_STEPS, 16 if arguments.short else arguments.ranks))
    results = []
    for num_steps, num_ranks in sizes:
        results.append(measure(num_steps, num_ranks))
        shown = ", ".join(f"{key} {value:.1f}" for key, value in results[-1].items() if isinstance(value, float))
        print(f"{num_steps:>9,} steps, {num_ranks:>4} ranks: {shown}", flush=True)
    missed = missed_goals(results)
    figures = {"missed": missed, "growth": growths(results), "results": results}
    finish("report", BENCHMARK_VERSION, figures, arguments.record)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
