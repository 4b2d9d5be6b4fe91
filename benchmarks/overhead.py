"""What does the measurement cost? The same small GPT with and without each monitor, interleaved in one process.

    python benchmarks/overhead.py [--steps 300] [--quick]

Every variant trains the same model in short blocks, taken in turn, so that a slow moment of the machine hits all of
them; one torch thread, because two on a shared machine vary tenfold. The overhead is the ratio of the median steps plus
what measured steps took beyond the median one. Means over blocks are beside it: they hold the machine's noise too.

The second table is what a step costs when the step itself costs nothing: CPU time of the training thread, CPU of the
whole process and wall time of a tiny model, on against off. TraceML, if it is installed, runs in a process of its own
(`peer_traceml.py`), because its patches reach every model of a process.

`before` does what careless loops do: a profiled step every 50 steps and a broadcast of the result, `.item()` per
sample, every metric formatted on every step, the whole log rewritten every 100 steps. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
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

BENCHMARK_VERSION = 2
SIZES = GPTConfig(num_layers=3, hidden=128, num_heads=4, length=96)
BATCH_SIZE = 8
START_STEPS = 5
"""Steps before the race: the warm-up and the first measured step, whose surplus counts all the same."""
TINY_BLOCK = 250
ALL_SINKS = ["console", "tensorboard", "prometheus", "wandb"]
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
        self.blocks: list[list[float]] = []
        """Seconds of each step, block by block; the first block is the start, and is not raced."""

    def one(self) -> None:
        self.loop.train_step()

    @property
    def is_measuring(self) -> bool:
        """Whether the next step is a measured one: then it must come before anybody else's."""
        return False

    def run(self, num_steps: int) -> None:
        block: list[float] = []
        while len(block) < num_steps or self.is_measuring:
            start_s = time.perf_counter()
            self.one()
            block.append(time.perf_counter() - start_s)
        self.blocks.append(block)

    @property
    def step_s(self) -> list[float]:
        return [seconds for block in self.blocks[1:] for seconds in block]

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

    @property
    def is_measuring(self) -> bool:
        source = self._monitor.marks.source
        return source.is_measuring or self._monitor._effort.sampling.running is not None

    def close(self) -> dict[str, Any]:
        self._monitor.finish_training()
        run = load_run(self._dir)
        exact = count_flops(self.loop.model, next(iter(self.loop.loader))).model_flop
        counted = [value for value in run.column("perf/model_flop") if value == value]
        mfu = run.column("perf/mfu")
        return {
            "median_mfu": statistics.median(
                mfu[at] for at in run.steady()
            ),  # a mean would hold the other racers' turns
            "flop_error": counted[-1] / exact - 1 if counted else None,
            "own_overhead_share": run.column("perf/overhead_share")[-1],
            "measured": [at for at, marks in run.marks.items() if "warmup" not in marks],
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
            runs[name].run(START_STEPS)
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
    means = [[statistics.fmean(block) for block in racer.blocks[1:]] for racer in (variant, baseline)]
    ratios = [own / base for own, base in zip(*means, strict=True)]
    typical_s, base_s = statistics.median(variant.step_s), statistics.median(baseline.step_s)
    num_steps = len(variant.step_s)
    closing = variant.close()
    every_s = [*variant.blocks[0], *variant.step_s]
    measured = [every_s[at] for at in closing.pop("measured", ())]
    longer_s = sum(measured) - typical_s * len(measured)
    steady = typical_s / base_s - 1
    is_ours = isinstance(variant, Flopmeter) or variant is baseline
    by_blocks = statistics.median(ratios) - 1
    return {
        "steps": num_steps,
        "total_s": sum(variant.step_s),
        "steps_per_s": num_steps / sum(variant.step_s),
        "median_step_ms": typical_s * 1e3,
        # A peer that works on every step, or every tenth, has no measured steps to set apart: blocks hold all of it.
        "overhead_percent": (steady + longer_s / (base_s * num_steps) if is_ours else by_blocks) * 100,
        "steady_percent": steady * 100,
        "by_blocks_percent": by_blocks * 100,
        "by_blocks_spread_percent": statistics.pstdev(ratios) * 100,
        "measured_steps": len(measured),
        "ms_per_measurement": longer_s / len(measured) * 1e3 if measured else None,
        "extra_memory_mb": getattr(variant, "memory_mb", None),
        **closing,
    }


class TinyLoop:
    """A model that is all overhead: what a step costs here is what the step itself costs."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.layer(self.embedding(input_ids)).mean()

    def __init__(self) -> None:
        self.model = self.Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader([torch.zeros(4, dtype=torch.long)] * 2 * TINY_BLOCK, batch_size=2)
        self.step = 0

    def after_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """What the monitor is told."""

    def close(self) -> None:
        """The end."""

    def block(self) -> dict[str, float]:
        """A block of steps, microseconds per step: CPU of the training thread and of the process, and wall time."""
        before = (time.thread_time(), time.process_time(), time.perf_counter())
        for ids in self.loader:
            loss = self.model(input_ids=ids, attention_mask=torch.ones_like(ids))
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.after_step(loss, grad_norm)
        after = (time.thread_time(), time.process_time(), time.perf_counter())
        names = ("thread_us", "process_us", "wall_us")
        return {name: (b - a) / TINY_BLOCK * 1e6 for name, a, b in zip(names, before, after, strict=True)}


class TinyWatched(TinyLoop):
    def __init__(self, sinks: list[str]) -> None:
        super().__init__()
        config = {
            "monitoring": {"sinks": sinks, "peak_flop_per_s": 1e12},
            "wandb": {"project": "overhead"},
            "prometheus": {"port": _free_port()},
        }
        self.monitor = watch(self.model, self.optimizer, self.loader, tempfile.mkdtemp(), config)

    def after_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        self.monitor.log_step(self.step, 0, loss, grad_norm, 0.1)

    def close(self) -> None:
        self.monitor.finish_training()


class TinyThroughput(TinyLoop):
    """Lightning's arithmetic alone: no hooks, no phases, no record, no sinks."""

    def __init__(self) -> None:
        super().__init__()
        from lightning.fabric.utilities.throughput import Throughput

        self._throughput = Throughput(available_flops=1e12, world_size=1, window_size=50)
        self._start_s = time.perf_counter()

    def after_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        elapsed_s = time.perf_counter() - self._start_s
        self._throughput.update(
            time=elapsed_s, batches=self.step, samples=2 * self.step, lengths=8 * self.step, flops=1
        )
        self._throughput.compute()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def steady_cost(rounds: int, make: Callable[[], TinyLoop]) -> dict[str, float]:
    """What a watched step costs beyond a plain one. Blocks alternate; the least disturbed ones are compared too."""
    loops = {"plain": TinyLoop(), "watched": make()}
    for loop in loops.values():
        loop.block()  # the warm-up and the observed step are behind us
    found: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            found[name].append(loop.block())
            time.sleep(0.3)  # what the background still has to do for these steps is not charged to the next ones
    loops["watched"].close()
    result: dict[str, float] = {"steps": float(rounds * TINY_BLOCK)}
    for key in ("thread_us", "process_us", "wall_us"):
        plain, watched = ([block[key] for block in found[name]] for name in ("plain", "watched"))
        result[f"plain_{key}"] = statistics.median(plain)
        result[f"added_{key}"] = statistics.median(b - a for a, b in zip(plain, watched, strict=True))
        result[f"added_{key}_least_disturbed"] = min(watched) - min(plain)
    result["wall_ratio"] = (result["plain_wall_us"] + result["added_wall_us"]) / result["plain_wall_us"]
    return result


def traceml_cost(rounds: int) -> dict[str, float]:
    """The same loop under TraceML's own launcher."""
    command = shutil.which("traceml", path=str(Path(sys.executable).parent))
    if command is None:
        raise ModuleNotFoundError("No module named 'traceml_ai'")
    script = Path(__file__).with_name("peer_traceml.py")
    with tempfile.TemporaryDirectory() as folder:
        line = [command, "run", "--mode", "summary", "--logs-dir", folder, str(script), "--args", str(rounds)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
    found = [text for text in done.stdout.splitlines() if text.startswith('{"traceml"')]
    if not found:
        raise RuntimeError(f"traceml gave no result: {(done.stderr or done.stdout).strip()[-200:]}")
    return json.loads(found[-1])["traceml"]  # type: ignore[no-any-return]


def tiny_costs(rounds: int, is_quick: bool) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    cases: dict[str, Callable[[], dict[str, float]]] = {
        "flopmeter, no sinks": lambda: steady_cost(rounds, lambda: TinyWatched([])),
    }
    if not is_quick:
        cases |= {
            "flopmeter, all sinks": lambda: steady_cost(rounds, lambda: TinyWatched(ALL_SINKS)),
            "Lightning Throughput, arithmetic only": lambda: steady_cost(rounds, TinyThroughput),
            "TraceML": lambda: traceml_cost(rounds),
        }
    found: dict[str, dict[str, float]] = {}
    missing: dict[str, str] = {}
    for name, measure in cases.items():
        try:
            found[name] = measure()
        except Exception as error:  # noqa: BLE001 - a peer that is not installed must not stop the others
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def show(results: dict[str, dict[str, Any]], missing: dict[str, str], tiny: dict[str, dict[str, float]]) -> None:
    console = Console(width=130)
    table = Table(title="Cost of measuring, interleaved")
    headings = (
        "total s",
        "overhead %",
        "by blocks %",
        "+-",
        "steps/s",
        "median MFU",
        "memory MB",
        "ms/measured",
        "FLOP error",
    )
    for heading in ("variant", *headings):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, row in results.items():
        cost_ms = row["ms_per_measurement"]
        table.add_row(
            name, f"{row['total_s']:.1f}", f"{row['overhead_percent']:.2f}", f"{row['by_blocks_percent']:.2f}",
            f"{row['by_blocks_spread_percent']:.2f}", f"{row['steps_per_s']:.1f}", _percent(row.get("median_mfu")),
            f"{row['extra_memory_mb']:.0f}", "-" if cost_ms is None else f"{cost_ms:.0f}",
            _percent(row.get("flop_error")),
        )  # fmt: skip
    console.print(table)
    for name, reason in missing.items():
        console.print(f"{name}: {reason}")
    per_step_ms, step_ms = results["flopmeter profiler"]["ms_per_measurement"], results["baseline"]["median_step_ms"]
    for every in FREQUENCIES if per_step_ms is not None else ():
        console.print(f"profile every {every:>3} steps -> {max(0.0, per_step_ms) / every / step_ms * 100:.2f} %")
    tiny_table = Table(title="A steady step of a tiny model: microseconds beyond the plain one (least disturbed block)")
    for heading in ("who", "training thread", "whole process", "wall", "plain step, wall", "wall ratio"):
        tiny_table.add_column(heading, justify="left" if heading == "who" else "right")
    for name, cost in tiny.items():
        cells = [
            f"{cost[f'added_{key}']:.1f} ({cost[f'added_{key}_least_disturbed']:.1f})"
            for key in ("thread_us", "process_us", "wall_us")
        ]
        tiny_table.add_row(name, *cells, f"{cost['plain_wall_us']:.0f}", f"{cost['wall_ratio']:.3f}")
    console.print(tiny_table)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    num_steps, block = (4, 2) if arguments.quick else (arguments.steps, 5)
    with one_process_group():
        results, missing = race(num_steps, block, arguments.quick)
    tiny, not_run = tiny_costs(2 if arguments.quick else 40, arguments.quick)
    show(results, missing | not_run, tiny)
    machine = {"cpu": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "torch": torch.__version__}
    print(json.dumps({
        "benchmark": "overhead", "version": BENCHMARK_VERSION, "machine": machine, "variants": results,
        "missing": missing | not_run, "tiny": tiny,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
