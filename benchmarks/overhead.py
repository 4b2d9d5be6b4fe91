"""What does the measurement cost? The same small GPT with and without each monitor, interleaved in one process.

    python benchmarks/overhead.py [--steps 300] [--quick]

Every variant trains the same model in short blocks, taken in turn, so that a slow moment of the machine hits all of
them. `before` does what careless loops do: a profiled step every 50 steps and a broadcast of the result, `.item()` per
sample, every metric formatted on every step, the whole log rewritten every 100 steps. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from flopmeter import count_flops, load_run, watch
from flopmeter.demo.gpt import GPT, GPTConfig
from flopmeter.demo.text import SyntheticText

BENCHMARK_VERSION = 1
SIZES = GPTConfig(num_layers=3, hidden=128, num_heads=4, length=96)
BATCH_SIZE = 8
TINY_BLOCK = 250
FREQUENCIES = (1, 10, 50, 100, 500)
QUICK_VARIANTS = ("baseline", "flopmeter smart", "flopmeter profiler")


class Loop:
    """One model in training; a variant hooks into it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(SIZES)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loader = DataLoader(SyntheticText(SIZES.length, 0), batch_size=BATCH_SIZE)
        self.step = 0
        self._batches: Iterator[dict[str, torch.Tensor]] | None = None

    def train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._batches is None:
            self._batches = iter(self.loader)
        batch = next(self._batches)
        loss = self.model(**batch)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss, grad_norm


class Variant:
    """A way to train with something watching. `run` does a number of steps and returns the seconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = Loop()
        self.step_s: list[float] = []

    def one(self) -> None:
        self.loop.train_step()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            start_s = time.perf_counter()
            self.one()
            self.step_s.append(time.perf_counter() - start_s)

    def close(self) -> dict[str, Any]:
        return {}


class Flopmeter(Variant):
    def __init__(self, mode: str, **settings: Any) -> None:
        super().__init__(f"flopmeter {mode}")
        self._dir = Path(tempfile.mkdtemp())
        config = {"monitoring": {"mfu_calculation_mode": mode, "sinks": [], **settings}}
        self._monitor = watch(self.loop.model, self.loop.optimizer, self.loop.loader, self._dir, config)

    def one(self) -> None:
        loss, grad_norm = self.loop.train_step()
        self._monitor.log_step(self.loop.step, 0, loss, grad_norm, 1e-3)

    def close(self) -> dict[str, Any]:
        summary = self._monitor.finish_training()
        run = load_run(self._dir)
        exact = count_flops(self.loop.model, next(iter(self.loop.loader))).model_flop
        counted = [value for value in run.column("perf/model_flop") if value == value]
        return {
            "mean_mfu": summary.get("perf/mfu"),
            "flop_error": counted[-1] / exact - 1 if counted else None,
            "own_overhead_share": run.column("perf/overhead_share")[-1],
            "measured_steps": sum("warmup" not in marks for marks in run.marks.values()),
        }


class FlopCounterEveryStep(Variant):
    def one(self) -> None:
        with FlopCounterMode(display=False):
            self.loop.train_step()


class ScheduledProfiler(Variant):
    """torch.profiler with the schedule of its tutorial, results dropped."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        schedule = torch.profiler.schedule(wait=8, warmup=1, active=1)
        self._profiler = torch.profiler.profile(schedule=schedule, with_flops=True, on_trace_ready=lambda p: p.events())
        self._profiler.start()

    def one(self) -> None:
        self.loop.train_step()
        self._profiler.step()

    def close(self) -> dict[str, Any]:
        self._profiler.stop()
        return {}


class Before(Variant):
    """The loop that this project began with."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._log: list[dict[str, Any]] = []
        self._path = Path(tempfile.mkdtemp()) / "training_log.json"
        self._mfu = 0.0

    def one(self) -> None:
        loop = self.loop
        if loop.step % 50 == 0:
            with torch.profiler.profile(with_flops=True, record_shapes=True) as profiler:
                loss, grad_norm = loop.train_step()
            flops = torch.tensor(float(sum(event.flops or 0 for event in profiler.key_averages())))
            dist.broadcast(flops, 0)
            self._mfu = flops.item() / 1e12
        else:
            loss, grad_norm = loop.train_step()
        per_sample = torch.rand(BATCH_SIZE)
        samples = {f"dataset_{i % 3}": per_sample[i].item() for i in range(BATCH_SIZE)}
        line = {"step": loop.step, "loss": loss.item(), "grad_norm": grad_norm.item(), "mfu": self._mfu, **samples}
        self._log.append({key: f"{value:.6f}" for key, value in line.items()})
        if loop.step % 100 == 0:
            self._path.write_text(json.dumps(self._log, indent=2))


class LightningThroughput(Variant):
    """Lightning's Throughput, fed every step as its monitor does."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        from lightning.fabric.utilities.throughput import Throughput

        self._throughput = Throughput(available_flops=1e12, world_size=1, window_size=50)
        self._start_s = time.perf_counter()

    def one(self) -> None:
        loss, _ = self.loop.train_step()
        loss.item()  # Lightning waits for the device before it reads its clock
        step = self.loop.step
        self._throughput.update(
            time=time.perf_counter() - self._start_s,
            batches=step,
            samples=step * BATCH_SIZE,
            lengths=step * BATCH_SIZE * SIZES.length,
            flops=10**9,
        )
        self._throughput.compute()


@contextmanager
def one_process_group() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def make_variants() -> dict[str, Callable[[], Variant]]:
    return {
        "baseline": lambda: Variant("baseline"),
        "flopmeter estimate": lambda: Flopmeter("estimate"),
        "flopmeter smart": lambda: Flopmeter("smart"),
        "flopmeter profiler": lambda: Flopmeter("profiler", flops_profile_freq=50),
        "flopmeter hybrid": lambda: Flopmeter("hybrid"),
        "before": lambda: Before("before"),
        "FlopCounterMode every step": lambda: FlopCounterEveryStep("FlopCounterMode every step"),
        "torch.profiler scheduled": lambda: ScheduledProfiler("torch.profiler scheduled"),
        "Lightning Throughput": lambda: LightningThroughput("Lightning Throughput"),
    }


def race(num_steps: int, block: int, is_quick: bool) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """All variants in turns; a variant that cannot start is left out with the reason."""
    chosen = {name: make for name, make in make_variants().items() if not is_quick or name in QUICK_VARIANTS}
    runs: dict[str, Variant] = {}
    missing: dict[str, str] = {}
    for name, make in chosen.items():
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            runs[name] = make()
            runs[name].run(5)
            runs[name].step_s.clear()
        except Exception as error:  # noqa: BLE001 - a peer that is not installed must not stop the others
            missing[name] = f"{type(error).__name__}: {error}"
            continue
        runs[name].memory_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024  # type: ignore[attr-defined]
    for turn in range(num_steps // block):
        order = list(runs.values())
        for variant in order[turn % len(order) :] + order[: turn % len(order)]:
            variant.run(block)
    return {name: _result(variant, runs["baseline"], block) for name, variant in runs.items()}, missing


def _result(variant: Variant, baseline: Variant, block: int) -> dict[str, Any]:
    blocks = [
        [sum(times[i : i + block]) for i in range(0, len(times) - block + 1, block)]
        for times in (variant.step_s, baseline.step_s)
    ]
    ratios = [own / base for own, base in zip(*blocks, strict=True)]
    typical_s = statistics.median(variant.step_s)
    extra_s = sum(variant.step_s) - typical_s * len(variant.step_s)
    return {
        "steps": len(variant.step_s),
        "total_s": sum(variant.step_s),
        "steps_per_s": len(variant.step_s) / sum(variant.step_s),
        "median_step_ms": typical_s * 1e3,
        "overhead_percent": (statistics.median(ratios) - 1) * 100,
        "overhead_spread_percent": statistics.pstdev(ratios) * 100,
        "longer_steps_ms": extra_s * 1e3,
        "extra_memory_mb": getattr(variant, "memory_mb", None),
        **variant.close(),
    }


class TinyLoop:
    """A model that is all overhead: what a step costs here is what the step itself costs."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.layer(self.embedding(input_ids)).mean()

    def __init__(self, sinks: list[str] | None) -> None:
        self.model = self.Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader([torch.zeros(4, dtype=torch.long)] * 2 * TINY_BLOCK, batch_size=2)
        self.monitor = None
        self.step = 0
        if sinks is not None:
            config = {"monitoring": {"sinks": sinks, "peak_flop_per_s": 1e12}}
            self.monitor = watch(self.model, self.optimizer, self.loader, tempfile.mkdtemp(), config)

    def block(self) -> dict[str, float]:
        """A block of steps: CPU time of the training thread and wall time, microseconds per step."""
        thread_s, wall_s = time.thread_time(), time.perf_counter()
        for ids in self.loader:
            loss = self.model(input_ids=ids, attention_mask=torch.ones_like(ids))
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            if self.monitor is not None:
                self.monitor.log_step(self.step, 0, loss, grad_norm, 0.1)
        thread_s, wall_s = time.thread_time() - thread_s, time.perf_counter() - wall_s
        return {"thread_us": thread_s / TINY_BLOCK * 1e6, "wall_us": wall_s / TINY_BLOCK * 1e6}


def steady_cost(rounds: int, sinks: list[str]) -> dict[str, float]:
    """What a watched step costs beyond a plain one. Blocks alternate; the least disturbed ones are compared too."""
    torch.set_num_threads(1)
    loops = {"plain": TinyLoop(None), "watched": TinyLoop(sinks)}
    for loop in loops.values():
        loop.block()  # the warm-up and the observed step are behind us
    process_s, found = time.process_time(), {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            found[name].append(loop.block())
    process_us = (time.process_time() - process_s) / rounds / TINY_BLOCK * 1e6
    assert loops["watched"].monitor is not None
    loops["watched"].monitor.finish_training()
    result = {"process_us_of_both": process_us}
    for key in ("thread_us", "wall_us"):
        plain, watched = ([block[key] for block in found[name]] for name in ("plain", "watched"))
        result[f"plain_{key}"] = statistics.median(plain)
        result[f"added_{key}"] = statistics.median(b - a for a, b in zip(plain, watched, strict=True))
        result[f"added_{key}_least_disturbed"] = min(watched) - min(plain)
    return result


def show(results: dict[str, dict[str, Any]], missing: dict[str, str], tiny: dict[str, dict[str, float]]) -> None:
    console = Console(width=130)
    table = Table(title="Cost of measuring, interleaved")
    for heading in ("variant", "total s", "overhead %", "+-", "steps/s", "mean MFU", "memory MB", "FLOP error"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, row in results.items():
        table.add_row(
            name, f"{row['total_s']:.1f}", f"{row['overhead_percent']:.2f}", f"{row['overhead_spread_percent']:.2f}",
            f"{row['steps_per_s']:.1f}", _percent(row.get("mean_mfu")), f"{row['extra_memory_mb']:.0f}",
            _percent(row.get("flop_error")),
        )  # fmt: skip
    console.print(table)
    for name, reason in missing.items():
        console.print(f"{name}: {reason}")
    cost_ms, step_ms = results["flopmeter profiler"]["longer_steps_ms"], results["baseline"]["median_step_ms"]
    per_step_ms = max(0.0, cost_ms) / max(1, results["flopmeter profiler"].get("measured_steps", 1))
    console.print(f"a profiled step takes {per_step_ms:.0f} ms more")
    for every in FREQUENCIES:
        console.print(f"profile every {every:>3} steps -> {per_step_ms / every / step_ms * 100:.2f} %")
    for name, cost in tiny.items():
        least, typical = cost["added_thread_us_least_disturbed"], cost["added_thread_us"]
        console.print(
            f"steady step of a tiny model, {name}: {least:.1f} us on the training thread, median {typical:.1f}"
        )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    num_steps, block = (4, 2) if arguments.quick else (arguments.steps, 15)
    with one_process_group():
        results, missing = race(num_steps, block, arguments.quick)
    tiny = {"no sinks": steady_cost(2 if arguments.quick else 40, [])}
    if not arguments.quick:
        tiny["tensorboard at every step"] = steady_cost(40, ["tensorboard"])
    show(results, missing, tiny)
    machine = {"cpu": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "torch": torch.__version__}
    print(json.dumps({
        "benchmark": "overhead", "version": BENCHMARK_VERSION, "machine": machine, "variants": results,
        "missing": missing, "tiny": tiny,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
