"""How long does a report take, how much memory, how large is the page, and how long does a browser draw it?

    python benchmarks/report.py [--steps 10000 100000 1000000] [--ranks 1024] [--short] [--record FILE]

Run files are made up: every metric of a real run of the monitor, pauses, counts, profiles, metrics by dataset, and for
the last case statistics of that many ranks. Each report is made in a process of its own, as `flopmeter report` does it,
imports included; memory is the largest resident size of that process. Where playwright and Chromium are installed, the
page is opened and zoomed, and the longest task of its main thread is told. Growth is the time per step of each size
over that of the size before: 1 is linear. The goal for time is one of CPU time, which other programs change little. The
last line printed is JSON; the exit code is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from flopmeter.metrics import ROW_NAMES
from flopmeter.record import RunWriter
from flopmeter.schema import PHASES, RUN_FILE, SCHEMA_VERSION
from outcome import add_record_option, finish

BENCHMARK_VERSION = 3
STEPS = (3_000, 10_000, 100_000, 1_000_000)
RANKS = 1024
RANK_STEPS = 10_000
GOAL_STEPS, GOAL_S, GOAL_RSS_MB, GOAL_PAGE_MB, GOAL_TASK_S = 1_000_000, 7.0, 400.0, 1.5, 0.5
GOAL_FILE_MB = 200.0
SHORT_STEPS, GOAL_SHORT_PAGE_MB = 3_000, 0.4
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
WATCH = """window.longest = 0;
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.longest = Math.max(window.longest, task.duration);
}).observe({ type: "longtask", buffered: true });"""
STEP_S, PEAK_FLOP_PER_S, MODEL_FLOP = 0.4, 1e15, 1.6e14

TOKENS = ("tokens", "tokens_processed", "pairs_causal", "pairs_processed", "pairs_run")

Line = dict[str, Any]


def run_lines(num_steps: int, num_ranks: int) -> Iterator[Line]:
    """The lines of a run: one slow step in a thousand, a pause every tenth part, statistics of the ranks 200 times."""
    noise, time_s = random.Random(0), 1.8e9
    yield header(time_s, num_ranks)
    # Of a text model: FLOPs per token, and per pair that the causal mask lets through.
    exact = {"bf16": {"tokens": 9e9, "pairs_causal": 1e5}}
    hardware = {"bf16": {"tokens": 1e10, "pairs_run": 1e5}}
    yield {"kind": "law", "law": 1, "state": 0, "is_estimate": False, "kinds": ["tokens", "pairs_causal"],
           "exact": exact, "full": exact, "hardware": hardware, "processed": exact}  # fmt: skip
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
    ns, tokens = round(1e9 * step_s), 16384
    pairs = tokens * (tokens // 2 + 1) // 2  # two samples
    phases = [ns // len(PHASES)] * (len(PHASES) - 1)  # what is left of the step is the phase "other"
    row = [1, ns, *phases, 2, tokens, tokens, pairs, 2 * pairs, 2 * pairs]
    assert ROW_NAMES[len(phases) + 2 :][:6] == ("samples", *TOKENS)
    metrics = {
        "training/loss": 2.0 + 1 / step_s,
        "training/lr": 3e-4,
        "training/epoch": 0,
        "training/grad_norm": 1.0,
        **(dataset_metrics(step) | {"perf/overhead_share": 0.001} if step % 50 == 0 else {}),
    }
    line = {"kind": "step", "step": step, "time": round(time_s, 3), "row": row, "metrics": metrics}
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
    used_s = time.process_time()
    from flopmeter.record import load_run
    from flopmeter.report import write_report

    run = load_run(folder)
    read_s = time.perf_counter() - start_s
    page = write_report(run, folder / "report.html")
    result = {
        "read_s": read_s,
        "report_s": time.perf_counter() - start_s,
        "cpu_s": time.process_time() - used_s,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "page_mb": page.stat().st_size / 1e6,
        "run_file_mb": (folder / RUN_FILE).stat().st_size / 1e6,
    }
    print(json.dumps(result))


def measure(num_steps: int, num_ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(Path(folder) / RUN_FILE)
        for number, line in enumerate(run_lines(num_steps, num_ranks)):
            writer.write(line)
            if number % 10_000 == 0:
                writer.flush()
        writer.close()
        command = [sys.executable, __file__, "--worker", folder]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        drawn = draw(Path(folder) / "report.html")
    return {"num_steps": num_steps, "num_ranks": num_ranks, **json.loads(answer.stdout.splitlines()[-1]), **drawn}


def draw(page_path: Path) -> dict[str, float]:
    """The longest task while the page opens, and while it is zoomed; empty where there is no browser."""
    path = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {}
    if path is None:
        return {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page()
        page.add_init_script(WATCH)
        page.goto(page_path.as_uri())
        page.wait_for_selector("html[data-drawn=yes]", state="attached", timeout=60_000)
        page.wait_for_timeout(1000)
        for _ in range(3):
            page.click("text=Zoom in")
            page.wait_for_timeout(300)
        longest_s = page.evaluate("window.longest") / 1000
        browser.close()
    return {"longest_task_s": longest_s}


def missed_goals(results: list[dict[str, Any]]) -> list[str]:
    limits = {"cpu_s": GOAL_S, "peak_rss_mb": GOAL_RSS_MB, "page_mb": GOAL_PAGE_MB, "longest_task_s": GOAL_TASK_S}
    limits["run_file_mb"] = GOAL_FILE_MB
    short = [result for result in results if result["num_steps"] <= SHORT_STEPS]
    return [
        f"{key} {result[key]:.1f} is above {limit:g} at {result['num_steps']:,} steps, {result['num_ranks']} ranks"
        for result in results
        for key, limit in limits.items()
        if result["num_steps"] <= GOAL_STEPS and result.get(key, 0) > limit
    ] + [
        f"a page of {r['num_steps']:,} steps has {r['page_mb']:.2f} MB"
        for r in short
        if r["page_mb"] > GOAL_SHORT_PAGE_MB
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
