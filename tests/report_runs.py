"""Run files whose numbers are known by hand, and hostile ones, for the tests of the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PEAK_FLOP_PER_S = 100e12
STEP_S = 0.5
MODEL_FLOP = 20e12
MFU = MODEL_FLOP / STEP_S / PEAK_FLOP_PER_S
"""0.4: 20 TFLOP in half a second, of 100 TFLOP/s."""
SCRIPT = "<script>window.pwned=1</script>"
IMAGE = "<img src=x onerror=window.pwned=1>"


def header(**fields: Any) -> dict[str, Any]:
    return {
        "kind": "header",
        "schema": 2,
        "run_id": "abc",
        "started_at": 1000.0,
        "host": "node-1",
        "model": "Decoder",
        "num_parameters": 3_000_000,
        "device": "cpu",
        "mode": "smart",
        "convention": "exact",
        "versions": {"flopmeter": "0.1.0", "torch": "2.13.0"},
        **fields,
    }


def step(number: int, step_s: float = STEP_S, marks: Iterable[str] = (), **metrics: Any) -> dict[str, Any]:
    """A step that ends `number` half seconds after the start and does the known work."""
    perf = {
        "perf/step_time": step_s,
        "perf/mfu": MODEL_FLOP / step_s / PEAK_FLOP_PER_S,
        "perf/hfu": 1.1 * MODEL_FLOP / step_s / PEAK_FLOP_PER_S,
        "perf/model_flop": MODEL_FLOP,
        "perf/tokens_per_second": 1000 / step_s,
        "perf/tokens_processed_per_second": 1000 / step_s,
        "perf/samples_per_second": 10 / step_s,
        "perf/overhead_share": 0.001,
        "perf/data_wait_share": 0.1,
        "perf/host_to_device_share": 0.0,
        "perf/forward_share": 0.3,
        "perf/backward_share": 0.5,
        "perf/optimizer_share": 0.08,
        "perf/other_share": 0.02,
    }
    line = {"kind": "step", "step": number, "time": 1000.0 + STEP_S * number, "metrics": {**perf, **metrics}}
    return {**line, "marks": list(marks)} if marks else line


def event(kind: str, after_step: int = 0, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "event": kind, "time": 1000.0 + STEP_S * after_step, "after_step": after_step, **fields}


def peak(**fields: Any) -> dict[str, Any]:
    known = {"dtype": "fp32", "device": "cpu", "flop_per_s": PEAK_FLOP_PER_S, "source": "user", "note": ""}
    return event("peak", **{**known, **fields})


def count(after_step: int, **fields: Any) -> dict[str, Any]:
    known = {
        "flop_error": 0.0,
        "model_flop": MODEL_FLOP,
        "forward_flop": MODEL_FLOP / 3,
        "backward_flop": MODEL_FLOP * 2 / 3,
        "recompute_flop": 0.1 * MODEL_FLOP,
        "hardware_flop": 1.1 * MODEL_FLOP,
        "by_dtype": {"float32": MODEL_FLOP},
        "by_op": {"aten::mm": 0.75 * MODEL_FLOP, "aten::bmm": 0.25 * MODEL_FLOP},
        "by_module": {
            "layers.0.mlp": 0.5 * MODEL_FLOP,
            "layers.0.attention": 0.25 * MODEL_FLOP,
            "head": 0.25 * MODEL_FLOP,
        },
        "coverage": 1.0,
        "method": "observed",
        "convention": "exact",
    }
    return event("count", after_step, **{**known, **fields})


def ordinary_lines(num_steps: int = 20) -> Iterator[dict[str, Any]]:
    """Two warm-up steps, a counted one, a pause of two seconds, and steps of half a second."""
    yield header()
    yield peak()
    for number in range(1, num_steps + 1):
        yield step(number, marks=["warmup"] if number <= 2 else ["observed"] if number == 3 else [])
        if number == 3:
            yield count(3)
        if number == 10:
            yield event("pause", 10, name="checkpoint", duration_s=2.0)
    yield {"kind": "summary", "time": 1000.0 + STEP_S * num_steps, "num_steps": num_steps, "metrics": {}}


def hostile_lines(num_steps: int = 30) -> Iterator[dict[str, Any]]:
    """Names that are scripts, texts of megabytes, numbers that are none, in every place that a reader looks at."""
    bad = SCRIPT + IMAGE + "</script>"
    yield header(host=f"host{bad}", model=f"Model{bad}", device=bad, versions={bad: bad, "torch": 7}, world_size=4)
    yield peak(note=bad, device=bad, source=bad)
    yield event("warning", message="x" * 3_000_000 + bad)
    yield event("warning", message=bad)
    for number in range(1, num_steps + 1):
        odd = {f"dataset/{bad}/loss": "NaN", f"dataset/{bad}/accuracy": None, f"dataset/{bad}/samples": "Infinity"}
        yield step(number, **(odd if number % 5 == 0 else {"perf/mfu": "NaN"} if number % 7 == 0 else {}))
    yield count(
        5, by_module={f"a.{bad}.b": 1e12, bad: 2e12, "y" * 100_000: 3e12, "": "NaN"}, by_op={bad: 1e12, "z": "NaN"}
    )
    yield count(
        6, left_out=[bad, 7], uncounted={bad: 1}, method=bad, by_dtype={bad: 1e12}, by_module={bad: 1e13, "q": 1e13}
    )
    yield event("pause", 7, name=bad, duration_s=1.0)
    yield event("pause", 8, name=["not", "text"], duration_s="long")
    yield event("pause", 1 << 80, name="far", duration_s=1.0)
    yield event("regime", 9, since_step="NaN", from_mfu=None, to_mfu=0.1)
    yield event(
        "ranks", 10, world_size="many", stats={"own_s": 5}, own_s_by_rank=[1.0, "NaN", None, 2.0], missing=["x"]
    )
    yield event("ranks", 20, world_size=4, stats={"own_s": {"min": "x"}}, own_s_by_rank="all", missing=3)
    yield event("straggler", 20, rank=2, host=bad, phase=bad, cause=bad, extra_s="NaN", since_step=12)
    yield event("profile", 20, device=bad, step_s=-1, matmul_s="NaN", top=[[bad, bad, bad]])
    yield event("facts", 20, host_syncs={bad: bad}, host_sync_places=[bad], odd_sizes=bad, matmul_dtypes={bad: "x"})


def write_run(folder: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """A folder with these lines as its run file."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (folder / "run.jsonl").write_text(text, encoding="utf-8")
    return folder
