"""Run files with known contents, as a monitor would have written them, for tests of the readers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flopmeter.record import Run, load_run
from flopmeter.record.writer import encode

PEAK_FLOP_PER_S = 1e12
MODEL_FLOP = 4e10
TOKENS = 1024
STARTED_AT = 1_700_000_000.0

HEADER = {
    "kind": "header",
    "schema": 2,
    "run_id": "a1",
    "started_at": STARTED_AT,
    "host": "node7",
    "model": "GPT",
    "num_parameters": 1000,
    "device": "cpu",
    "mode": "smart",
    "convention": "exact",
    "versions": {"flopmeter": "0.1.0", "torch": "2.13.0"},
}
PEAK = {"kind": "event", "event": "peak", "time": STARTED_AT, "after_step": 0, "dtype": "fp32", "device": "Test CPU"}
PEAK |= {"flop_per_s": PEAK_FLOP_PER_S, "source": "measured", "note": ""}


def step_line(step: int, step_s: float, time: float, data_wait_share: float = 0.0, **more: Any) -> dict[str, Any]:
    """One step of `MODEL_FLOP`: its MFU follows from its duration."""
    mfu = MODEL_FLOP / step_s / PEAK_FLOP_PER_S
    metrics = {
        "training/loss": 2.0 + 1.0 / step,
        "perf/step_time": step_s,
        "perf/steps_per_second": 1 / step_s,
        "perf/tokens_per_second": TOKENS / step_s,
        "perf/model_flop": MODEL_FLOP,
        "perf/mfu": mfu,
        "perf/hfu": 1.1 * mfu,
        "perf/data_wait_share": data_wait_share,
        "perf/forward_share": (1 - data_wait_share) / 3,
        "perf/backward_share": (1 - data_wait_share) / 2,
        "perf/optimizer_share": (1 - data_wait_share) / 6,
    }
    return {"kind": "step", "step": step, "time": time, "metrics": metrics | more}


def run_lines(
    step_s: Iterable[float], data_wait_share: float = 0.0, *, is_finished: bool = True, **header: Any
) -> list[dict[str, Any]]:
    """A whole run: header, peak, steps, summary."""
    lines, time = [HEADER | header, PEAK], STARTED_AT
    for number, duration_s in enumerate(step_s, start=1):
        time += duration_s
        lines.append(step_line(number, duration_s, time, data_wait_share))
    if is_finished:
        lines.append({"kind": "summary", "time": time, "num_steps": len(lines) - 2, "metrics": {}})
    return lines


def write_run(folder: Path, lines: Iterable[dict[str, Any] | bytes]) -> Path:
    """The run file in that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.jsonl"
    path.write_bytes(b"".join(line if isinstance(line, bytes) else encode(line) for line in lines))
    return path


def make_run(folder: Path, step_s: Iterable[float], data_wait_share: float = 0.0, **header: Any) -> Run:
    """Written, and read back."""
    return load_run(write_run(folder, run_lines(step_s, data_wait_share, **header)))


def noisy(mean: float, num: int, seed: int, correlation: float = 0.0, spread: float = 0.05) -> list[float]:
    """Step times that wander about a mean: each keeps `correlation` of the distance of the one before."""
    source, distance, values = random.Random(seed), 0.0, []
    for _ in range(num + 100):
        distance = correlation * distance + source.gauss(0, spread * mean * (1 - correlation**2) ** 0.5)
        values.append(max(mean + distance, mean / 10))
    return values[100:]
