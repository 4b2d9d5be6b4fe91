"""Are verdict, waterfall and MFU of a GPU run what the device itself did?

    make gpu-truth          (or: python benchmarks/gpu_truth.py [--runs 5] [--steps 160] [--quick] [--record FILE])

Only the simulated device of tests/simcuda can tell: it keeps an account of each kernel and copy (`SIMCUDA_ACCOUNT`), in
nanoseconds of the host's own clock. Each scenario trains in a process of its own and notes when its steps and its waits
for data began and ended. What the device did between the first and the last of the steps at the end of the run is the
truth; `Run.waterfall()` of the same steps, the last verdict and the mean MFU are compared with it. Host time is made of
sleeps that dominate the machine's noise. This proves logic under the simulator's rules; it is no result of a GPU.

The last line printed is JSON: for each scenario the median over the runs of each part's error, in points of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from flopmeter import load_run, watch
from outcome import add_record_option, finish

BENCHMARK_VERSION = 1
PEAK_FLOP_PER_S = 989.4e12
"""Dense bf16 of the H100 that is simulated."""
MAX_POINTS = 3.0
"""How far each part may be off, in points of wall time."""
MAX_MFU_ERROR = 0.01
TRUE_PARTS = ("ideal", "matmul_below_peak", "non_matmul", "optimizer", "launch_gaps", "data_wait", "host_to_device")

SCENARIOS: dict[str, dict[str, Any]] = {
    "compute bound": {"width": 8192, "num_layers": 3},
    "launch bound": {"width": 1024, "num_layers": 12, "layer_sleep_s": 0.002},
    "launch bound, long last kernel": {"width": 1024, "num_layers": 12, "layer_sleep_s": 0.002, "tail": 8192},
    "data wait": {"width": 4096, "num_layers": 3, "data_sleep_s": 0.02},
    "data wait hidden by run-ahead": {"width": 8192, "num_layers": 3, "data_sleep_s": 0.004},
    "item in mid-step": {"width": 8192, "num_layers": 3, "reads_loss": True, "read_sleep_s": 0.004},
    "slow copy": {"width": 4096, "num_layers": 3, "copies": True},
}


class Layers(nn.Module):
    """Linears in bf16, with the host asleep before each one, and perhaps one large product at the end."""

    def __init__(self, width: int, num_layers: int, layer_sleep_s: float, tail: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))
        self.tail = nn.Linear(tail, tail, bias=False) if tail else None
        self.layer_sleep_s = layer_sleep_s

    def forward(self, rows: torch.Tensor, wide: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            if self.layer_sleep_s:
                time.sleep(self.layer_sleep_s)
            rows = layer(rows)
        loss = rows.square().mean()
        if self.tail is not None and wide is not None:
            loss = loss + self.tail(wide).square().mean()
        return loss


class Sleepy(IterableDataset[Any]):
    """Batches that take their time; `spans` says when the loop waited for one."""

    def __init__(self, batch: Any, sleep_s: float) -> None:
        self.batch, self.sleep_s = batch, sleep_s
        self.spans: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[Any]:
        while True:
            begin_ns = time.monotonic_ns()
            if self.sleep_s:
                time.sleep(self.sleep_s)
            self.spans.append((begin_ns, time.monotonic_ns()))
            yield self.batch


def train(
    folder: Path,
    num_steps: int,
    *,
    width: int,
    num_layers: int,
    layer_sleep_s: float = 0.0,
    tail: int = 0,
    data_sleep_s: float = 0.0,
    reads_loss: bool = False,
    read_sleep_s: float = 0.0,
    copies: bool = False,
) -> None:
    """One watched run on the simulated device; leaves `clock.json` with the host's times beside the run file."""
    model = Layers(width, num_layers, layer_sleep_s, tail).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = torch.zeros(width, width, dtype=torch.bfloat16, device="cpu" if copies else "cuda")
    wide = torch.zeros(tail, tail, dtype=torch.bfloat16, device="cuda") if tail else None
    batches = Sleepy(rows, data_sleep_s)
    loader = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
    # By hand: a product is 2 m n k. The first layer's input needs no gradient, nor does the tail's.
    flop = 2 * width**3 * (3 * num_layers - 1) + (2 * tail**3 * 2 if tail else 0)
    settings = {"sinks": [], "report": False, "detail_every": 20, "flops_profile_freq": 10 * num_steps}
    ends_ns = []
    with watch(model, optimizer, loader, folder, {"monitoring": settings}) as _:
        for _, batch in zip(range(num_steps), loader, strict=False):
            loss = model(batch.to("cuda") if copies else batch, wide)
            if reads_loss:
                loss.item()
                time.sleep(read_sleep_s)
            loss.backward()
            optimizer.step()
            ends_ns.append(time.monotonic_ns())
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    (folder / "clock.json").write_text(json.dumps({"ends_ns": ends_ns, "waits_ns": batches.spans, "flop": flop}))


def truth(account: Path, begin_ns: int, end_ns: int, waits_ns: list[list[int]]) -> dict[str, float]:
    """Seconds of the device's time by what it did, each moment given to the first that fits, as the waterfall does."""
    order = ("matmul", "non_matmul", "optimizer", "copy", "data_wait", "idle")
    edges = [(begin_ns, 1, 5), (end_ns, -1, 5)]
    for line in account.read_text().splitlines():
        _, start, end, kind, engine, name = line.split("\t")
        if kind == "kernel" and int(engine) == 1:
            place = 0
        elif kind == "memcpy":
            place = 3
        elif kind in ("kernel", "memset"):
            place = 2 if "multi_tensor" in name or "FusedAdam" in name or "Adam" in name else 1
        else:
            continue
        edges += _clipped(int(start), int(end), begin_ns, end_ns, place)
    for start, end in waits_ns:
        edges += _clipped(start, end, begin_ns, end_ns, 4)
    active, spent_ns, last_ns = [0] * 6, [0] * 6, begin_ns
    for at_ns, change, place in sorted(edges):
        owner = next((i for i, count in enumerate(active) if count), None)
        if owner is not None:
            spent_ns[owner] += at_ns - last_ns
        last_ns = at_ns
        active[place] += change
    return {name: spent / 1e9 for name, spent in zip(order, spent_ns, strict=True)}


def _clipped(start: int, end: int, low: int, high: int, place: int) -> list[tuple[int, int, int]]:
    start, end = max(start, low), min(end, high)
    return [(start, 1, place), (end, -1, place)] if end > start else []


def judge(folder: Path) -> dict[str, Any]:
    """Compare one run's record with the simulator's account of its second half."""
    run, clock = load_run(folder), json.loads((folder / "clock.json").read_text())
    ends_ns, num_steps = clock["ends_ns"], len(clock["ends_ns"])
    start = num_steps // 2
    odd = [run.marks[place] for place in range(start, num_steps) if place in run.marks]
    begin_ns, end_ns = ends_ns[start - 1], ends_ns[-1]
    wall_s = (end_ns - begin_ns) / 1e9
    did = truth(folder / "account.txt", begin_ns, end_ns, clock["waits_ns"])
    ideal_s = clock["flop"] * (num_steps - start) / PEAK_FLOP_PER_S
    parts = {
        "ideal": ideal_s,
        "matmul_below_peak": did["matmul"] - ideal_s,
        "non_matmul": did["non_matmul"],
        "optimizer": did["optimizer"],
        "launch_gaps": did["idle"],
        "data_wait": did["data_wait"],
        "host_to_device": did["copy"],
    }
    found = run.waterfall(start, num_steps)
    kernels_s = did["matmul"] + did["non_matmul"] + did["optimizer"]
    verdicts = [event["verdict"] for event in run.events if event["event"] == "device_time"]
    known = [verdict["bound"] for verdict in verdicts if verdict["bound"] != "unknown"]
    return {
        "true_bound": "device" if kernels_s >= 0.5 * wall_s else "host",
        "bound": known[-1] if known else "unknown",
        "kernel_share": kernels_s / wall_s,
        "true_mfu": ideal_s / wall_s,
        "mfu": found.mfu,
        "points": {name: 100 * ((found.share(name) or 0.0) - parts[name] / wall_s) for name in TRUE_PARTS},
        "true_points": {name: 100 * parts[name] / wall_s for name in TRUE_PARTS},
        "unexplained_points": 100 * (found.share("unexplained") or 0.0),
        "step_ms": 1e3 * wall_s / (num_steps - start),
        "marked_steps": odd,
    }


def run_scenario(name: str, num_runs: int, num_steps: int) -> dict[str, Any]:
    """The median of several runs, each in a process of its own."""
    results = []
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory() as folder:
            # A short queue: the host is as far ahead as it can be after a few steps, and steps last as on the device.
            environment = {**os.environ, "SIMCUDA_ACCOUNT": f"{folder}/account.txt", "SIMCUDA_QUEUE": "64"}
            command = [sys.executable, __file__, "--train", name, "--steps", str(num_steps), "--folder", folder]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            results.append(judge(Path(folder)))
    mfu_errors = [result["mfu"] / result["true_mfu"] - 1 for result in results if result["mfu"] is not None]
    points = {part: statistics.median(result["points"][part] for result in results) for part in TRUE_PARTS}
    true = {part: statistics.median(result["true_points"][part] for result in results) for part in TRUE_PARTS}
    mfu_error = statistics.median(mfu_errors) if mfu_errors else None
    is_right = [result["bound"] == result["true_bound"] for result in results]
    return {
        "bound": [result["bound"] for result in results],
        "true_bound": [result["true_bound"] for result in results],
        "kernel_share": statistics.median(result["kernel_share"] for result in results),
        "mfu_error": mfu_error,
        "points": points,
        "true_points": true,
        "unexplained_points": statistics.median(result["unexplained_points"] for result in results),
        "step_ms": statistics.median(result["step_ms"] for result in results),
        "passes": all(is_right)
        and mfu_error is not None
        and abs(mfu_error) <= MAX_MFU_ERROR
        and all(abs(error) <= MAX_POINTS for error in points.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--quick", action="store_true", help="one run of two scenarios: shows that it works")
    parser.add_argument("--only", help="the scenarios whose names hold this")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    add_record_option(parser)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.folder, arguments.steps, **SCENARIOS[arguments.train])
        return
    if not torch.cuda.is_available() or "SIMCUDA_DEVICES" not in os.environ:
        sys.exit("this needs the simulated device, which alone keeps an account of itself: make gpu-truth")
    names = [name for name in SCENARIOS if arguments.only is None or arguments.only in name]
    if arguments.quick:
        names, arguments.runs = names[:2], 1
    console, table = Console(), Table("scenario", "who waits: found", "true", "MFU", *TRUE_PARTS, "unexplained")
    results = {}
    for name in names:
        console.print(f"{name} ...", style="dim")
        result = results[name] = run_scenario(name, arguments.runs, arguments.steps)
        error = result["mfu_error"]
        table.add_row(
            name,
            ", ".join(sorted(set(result["bound"]))),
            ", ".join(sorted(set(result["true_bound"]))),
            "unknown" if error is None else f"{100 * error:+.2f} %",
            *(f"{result['points'][part]:+.1f} of {result['true_points'][part]:.1f}" for part in TRUE_PARTS),
            f"{result['unexplained_points']:+.1f}",
        )
    console.print(table)
    figures = {"simulated": True, "num_runs": arguments.runs, "num_steps": arguments.steps, "scenarios": results}
    finish("gpu_truth", BENCHMARK_VERSION, figures, arguments.record)
    if not arguments.quick and not all(result["passes"] for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
