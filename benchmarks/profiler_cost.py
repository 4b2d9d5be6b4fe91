"""What does it cost to profile one training step, in time and in memory, and what does one learn from it?

    python benchmarks/profiler_cost.py [--quick] [--record benchmarks/results/profiler_cost.json]

Plain, observed and profiled steps take turns in one process and on one thread, so that a busy machine slows all of them
alike; compared are medians. `profiled_ratio` has start and stop in it, `profiled_step_ratio` has not. `peak_mb` is what
the first profiled step takes at most beyond a plain one (in the first case with what torch's profiler sets up once),
`kept_mb` what all later ones leave behind with garbage collection off. `predicted_us` is what the FLOPs of a step take
that is not measured, once one was observed. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from timeit import repeat
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from flopmeter.flops.observe import observe
from flopmeter.flops.prediction import Law
from flopmeter.flops.profiled import ProfiledStep
from outcome import add_record_option, finish

BENCHMARK_VERSION = 1
MEMORY_SESSIONS = 60

Step = Callable[[], None]
Times = dict[str, list[float]]


def wide_step() -> tuple[nn.Module, Step]:
    """Few operators, large products."""
    model = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))
    return model, _training_step(model, torch.randn(256, 768))


def transformer_step() -> tuple[nn.Module, Step]:
    """Four layers of an ordinary encoder."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return model, _training_step(model, torch.randn(4, 128, 256))


def tiny_ops_step() -> tuple[nn.Module, Step]:
    """Hundreds of operators that do next to nothing: the worst case."""
    model = nn.Sequential(*(part for _ in range(150) for part in (nn.Linear(16, 16), nn.ReLU())))
    return model, _training_step(model, torch.randn(4, 16))


def _training_step(model: nn.Module, batch: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CASES = {"wide": wide_step, "transformer": transformer_step, "tiny_ops": tiny_ops_step}


def measure(name: str, rounds: int, sessions: int) -> dict[str, Any]:
    """One case: times in turns, then memory."""
    model, step = CASES[name]()
    for _ in range(3):
        step()
    plain_peak_mb = _peak_mb(step)
    first = ProfiledStep()
    profiled_peak_mb = _peak_mb(lambda: _record(first, step, defaultdict(list)))
    times: Times = defaultdict(list)
    turns: list[Callable[[], object]] = [
        lambda: times["plain"].append(_seconds(step)),
        lambda: times["observed"].append(_seconds(lambda: _observed(model, step))),
        lambda: _record(ProfiledStep(), step, times),
    ]
    for turn in range(3 * rounds):
        # Who goes first changes from round to round: whoever follows the profiler finds a cold cache.
        turns[(turn + turn // 3) % 3]()
    plain_s = median(times["plain"])
    parts = {part: median(times[part]) for part in ("start", "step", "stop")}
    return {
        "plain_step_ms": round(1e3 * plain_s, 3),
        "observed_ratio": round(median(times["observed"]) / plain_s, 3),
        "profiled_ratio": round(sum(parts.values()) / plain_s, 3),
        "profiled_step_ratio": round(parts["step"] / plain_s, 3),
        "start_ms": round(1e3 * parts["start"], 3),
        "stop_and_read_ms": round(1e3 * parts["stop"], 3),
        "peak_mb": round(profiled_peak_mb - plain_peak_mb, 1),
        "kept_mb": round(_kept_mb(step, sessions), 1),
        "predicted_us": round(_predicted_us(model, step), 2),
        "profiler_sum_over_ours": round(first.profiler_flop / first.result("full").model_flop, 4),
    }


def _seconds(run: Step) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin


def _observed(model: nn.Module, step: Step) -> None:
    with observe(model) as observed:
        step()
    observed.result("full")


def _predicted_us(model: nn.Module, step: Step) -> float:
    with observe(model) as observed:
        step()
    count = observed.result()
    assert count.workload is not None
    law, workload = Law.of(count, count.workload), count.workload
    return min(repeat(lambda: law.at(workload), number=10_000, repeat=5)) * 100


def _record(profiled: ProfiledStep, step: Step, times: Times) -> None:
    times["start"].append(_seconds(profiled.start))
    times["step"].append(_seconds(step))
    times["stop"].append(_seconds(profiled.stop))


def _kept_mb(step: Step, sessions: int) -> float:
    gc.disable()
    try:
        before_mb = _memory_mb("VmRSS")
        for _ in range(sessions):
            _record(ProfiledStep(), step, defaultdict(list))
        return _memory_mb("VmRSS") - before_mb
    finally:
        gc.enable()


def _peak_mb(run: Step) -> float:
    """How far the process grows at most while this runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the largest size so far
    before_mb = _memory_mb("VmRSS")
    run()
    return _memory_mb("VmHWM") - before_mb


def _memory_mb(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 2**10


def _print(results: dict[str, dict[str, Any]]) -> None:
    table = Table(title="One profiled step")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    for key in next(iter(results.values())):
        table.add_row(key, *(f"{result[key]:g}" for result in results.values()))
    Console().print(table)


def main() -> int:
    """Measure, print a table, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    add_record_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds, sessions = (3, 5) if arguments.quick else (31, MEMORY_SESSIONS)
    results = {name: measure(name, rounds, sessions) for name in CASES}
    _print(results)
    figures = {"rounds": rounds, "memory_sessions": sessions, "cases": results}
    finish("profiler_cost", BENCHMARK_VERSION, figures, arguments.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
