"""What does the measurement cost? A small GPT with and without each monitor, in turn and in one process.

    python benchmarks/overhead.py [--steps 300] [--long 2000] [--quick] [--record FILE]

Every variant has a model of its own and trains it a few steps with its hooks and a few steps without, in turn: two
models that do the same differ by a percent, by where their memory lies, and a slow moment of the machine lasts longer
than a turn. One torch thread, because two on a shared machine vary tenfold. A step is compared with the plain one of
the same turn. The overhead of ours is the median of these differences plus what measured steps took beyond an ordinary
one; of the others, whose work cannot be told apart, it is the ratio of the total times. Both stand in the table, and
the standard error of the median. The plain loop, which has nothing to switch and shows the noise, estimate and smart
go on to `--long` steps.

The second table is what a step costs when the step itself costs nothing: CPU time of the training thread, CPU of the
whole process and wall time of a tiny model, on against off, in blocks of 1,000 steps, all variants in turn. They are
that long because the background writes every 200 steps, and the two threads get into each other's way meanwhile: blocks
of 25 steps saw half of the cost. `times` holds the thread and the process against Python functions that do nothing in
the same six places: two hooks on the model, two on the optimizer, a wrapper around the backward pass and one around the
loader. `by itself` is the same code called again and again with nothing in between, so that it stays in the cache.
TraceML, if it is installed, runs in a process of its own (`peer_traceml.py`), because its patches
reach every model of a process.

`before` does what careless loops do: a profiled step every 50 steps and a broadcast of the result, `.item()` per
sample, every metric formatted on every step, the whole log rewritten every 100 steps. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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

from flopmeter import TrainingMonitor, count_flops, load_run, watch
from flopmeter.demo import GPT, GPTConfig, SyntheticText
from flopmeter.hook_hiding import replace_attribute
from flopmeter.torch_compat import LoaderIterator
from outcome import add_record_option, finish

BENCHMARK_VERSION = 6
SIZES = GPTConfig(num_layers=3, hidden=128, num_heads=4, length=96)
BATCH_SIZE = 8
START_STEPS = 5
"""Steps before the race: the warm-up and the first measured step, whose surplus counts all the same."""
TINY_BLOCK, SETTLE_S = 1000, 0.1
NOTHING = "hooks that do nothing"
LONG_VARIANTS = ("baseline", "flopmeter estimate", "flopmeter smart")
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
    """A way to train with something watching, and without it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = Loop()
        self.start_s: list[float] = []
        """Seconds of the steps before the race."""
        self.turns: list[tuple[list[float], list[float]]] = []
        """Seconds of each step, turn by turn: watched ones, plain ones."""

    def one(self) -> None:
        """A watched step."""
        self.loop.train_step()

    def switch(self, *, is_on: bool) -> None:
        """Put hooks in place, or take them away."""

    @property
    def is_measuring(self) -> bool:
        """Whether the next step is a measured one: then it must come before anybody else's."""
        return False

    def start(self) -> None:
        self.start_s = self._timed(self.one, START_STEPS)

    def turn(self, num_steps: int, order: tuple[bool, bool]) -> None:
        block: dict[bool, list[float]] = {}
        for is_on in order:
            self.switch(is_on=is_on)
            block[is_on] = self._timed(self.one if is_on else self.loop.train_step, num_steps)
        self.turns.append((block[True], block[False]))

    def _timed(self, one: Callable[[], Any], num_steps: int) -> list[float]:
        block: list[float] = []
        while len(block) < num_steps or self.is_measuring:
            start_s = time.perf_counter()
            one()
            block.append(time.perf_counter() - start_s)
        return block

    def close(self) -> dict[str, Any]:
        return {}


def switch_hooks(monitor: TrainingMonitor, loop: Loop | TinyLoop, *, is_on: bool) -> None:
    """Take a monitor's hooks away, or put them back as `watch` does."""
    monitor.run.hooks.remove()
    if is_on:
        monitor.run.hooks.attach_models(loop.model)
        monitor.run.hooks.attach_optimizer(loop.optimizer)
        monitor.run.hooks.attach_loader(loop.loader)
        monitor.recorder.clock.take()  # what lies between is no step's time


class Flopmeter(Variant):
    def __init__(self, mode: str, **settings: Any) -> None:
        super().__init__(f"flopmeter {mode}")
        self._dir = Path(tempfile.mkdtemp())
        config = {"monitoring": {"mfu_calculation_mode": mode, "sinks": [], **settings}}
        self._monitor = watch(self.loop.model, self.loop.optimizer, self.loop.loader, self._dir, config)

    def switch(self, *, is_on: bool) -> None:
        switch_hooks(self._monitor, self.loop, is_on=is_on)

    def one(self) -> None:
        loss, grad_norm = self.loop.train_step()
        self._monitor.log_step(self.loop.step, 0, loss, grad_norm, 1e-3)

    @property
    def is_measuring(self) -> bool:
        source = self._monitor.recorder.source
        return source.is_measuring or self._monitor.run.effort.sampling.running is not None

    def close(self) -> dict[str, Any]:
        self._monitor.finish_training()
        run = load_run(self._dir)
        exact = count_flops(self.loop.model, next(iter(self.loop.loader))).model_flop
        counted = [value for value in run.column("perf/model_flop") if value == value]
        mfu = run.column("perf/mfu")
        return {
            "median_mfu": statistics.median(mfu[at] for at in run.steady()),
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

    @property
    def is_measuring(self) -> bool:
        return self._profiler.current_action is not torch.profiler.ProfilerAction.NONE  # two at once crash torch

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


def race(num_steps: int, long: int, block: int, is_quick: bool) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """All variants in turns; a variant that cannot start is left out with the reason."""
    chosen = {name: make for name, make in make_variants().items() if not is_quick or name in QUICK_VARIANTS}
    runs: dict[str, Variant] = {}
    missing: dict[str, str] = {}
    for name, make in chosen.items():
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            runs[name] = make()
            runs[name].start()
        except Exception as error:  # noqa: BLE001 - a peer that is not installed must not stop the others
            missing[name] = f"{type(error).__name__}: {error}"
            continue
        runs[name].memory_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024  # type: ignore[attr-defined]
    chance = random.Random(0)
    for turn in range(max(num_steps, long) // block):
        order = [run for name, run in runs.items() if turn * block < num_steps or name in LONG_VARIANTS]
        for variant in chance.sample(order, len(order)):
            variant.turn(block, (True, False) if chance.random() < 0.5 else (False, True))
    return {name: _result(variant) for name, variant in runs.items()}, missing


def _result(variant: Variant) -> dict[str, Any]:
    pairs = [pair for on, off in variant.turns for pair in zip(on, off, strict=False)]  # a measured step comes on top
    on_s = [seconds for on, _ in variant.turns for seconds in on]
    off_s = [seconds for _, off in variant.turns for seconds in off]
    base_s = statistics.median(off_s)
    steady, error = median_and_error([(on - off) / base_s for on, off in pairs])
    closing = variant.close()
    every_s = [*variant.start_s, *on_s]
    measured = [every_s[at] for at in closing.pop("measured", ())]
    longer_s = sum(measured) - base_s * (1 + steady) * len(measured)
    is_ours = isinstance(variant, Flopmeter) or type(variant) is Variant
    by_total = statistics.fmean(on_s) / statistics.fmean(off_s) - 1
    return {
        "steps": len(on_s),
        "total_s": sum(on_s),
        "steps_per_s": len(on_s) / sum(on_s),
        "median_step_ms": base_s * 1e3,
        "overhead_percent": (steady + longer_s / (base_s * len(on_s)) if is_ours else by_total) * 100,
        "error_percent": error * 100,
        "steady_percent": steady * 100,
        "by_total_percent": by_total * 100,
        "measured_steps": len(measured),
        "ms_per_measurement": longer_s / len(measured) * 1e3 if measured else None,
        "extra_memory_mb": getattr(variant, "memory_mb", None),
        **closing,
    }


def median_and_error(values: list[float]) -> tuple[float, float]:
    """The median, and its standard error: the middle half of a normal distribution is 1.35 deviations wide."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, 1.25 * (high - low) / 1.35 / len(values) ** 0.5


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
        self._batches = iter(self.loader)
        self.step = 0

    def switch(self, *, is_on: bool) -> None:
        """Put hooks in place, or take them away."""

    def after_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """What the monitor is told of a step, when it is on."""

    def settle(self) -> None:
        """Let the background finish."""

    def by_itself(self) -> Callable[[], None] | None:
        """All that a step costs, without the step."""
        return None

    def close(self) -> None:
        """The end."""

    def _batch(self) -> torch.Tensor:
        try:
            return next(self._batches)  # type: ignore[no-any-return]
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)  # type: ignore[no-any-return]

    def block(self, num_steps: int, *, is_on: bool) -> dict[str, float]:
        """A block of steps, microseconds per step: CPU of the training thread and of the process, and wall time."""
        self.switch(is_on=is_on)
        process_s, thread_s, wall_s = time.process_time(), time.thread_time(), time.perf_counter()
        for _ in range(num_steps):
            ids = self._batch()
            loss = self.model(input_ids=ids, attention_mask=torch.ones_like(ids))
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            if is_on:
                self.after_step(loss, grad_norm)
        thread_s, wall_s = time.thread_time() - thread_s, time.perf_counter() - wall_s
        self.settle()
        time.sleep(SETTLE_S)
        found = {"thread_us": thread_s, "wall_us": wall_s, "process_us": time.process_time() - process_s}
        return {name: seconds / num_steps * 1e6 for name, seconds in found.items()}


class TinyNothing(TinyLoop):
    """Functions that do nothing where flopmeter has its hooks: what torch and Python take for being watched at all."""

    def __init__(self) -> None:
        super().__init__()
        self._undo: list[Callable[[], None]] = []

    def switch(self, *, is_on: bool) -> None:
        while self._undo:
            self._undo.pop()()
        if not is_on:
            return

        def nothing(*_: Any) -> None:
            pass

        original_backward, original_next = torch.autograd.backward, LoaderIterator.__next__

        def backward(*args: Any, **kwargs: Any) -> Any:
            return original_backward(*args, **kwargs)

        def fetch(iterator: Any) -> Any:
            return original_next(iterator)

        self._undo += [
            self.model.register_forward_pre_hook(nothing, with_kwargs=True).remove,
            self.model.register_forward_hook(nothing).remove,
            self.optimizer.register_step_pre_hook(nothing).remove,
            self.optimizer.register_step_post_hook(nothing).remove,
            replace_attribute(torch.autograd, "backward", backward),
            replace_attribute(LoaderIterator, "__next__", fetch),
        ]


class TinyWatched(TinyLoop):
    def __init__(self, sinks: list[str], *, logs: bool = True) -> None:
        super().__init__()
        self._logs = logs
        config = {
            "monitoring": {"sinks": sinks, "peak_flop_per_s": 1e12},
            "wandb": {"project": "overhead"},
            "prometheus": {"port": _free_port()},
        }
        self.monitor = watch(self.model, self.optimizer, self.loader, tempfile.mkdtemp(), config)

    def switch(self, *, is_on: bool) -> None:
        switch_hooks(self.monitor, self, is_on=is_on)

    def settle(self) -> None:
        self.monitor.latest(wait_s=1.0)

    def by_itself(self) -> Callable[[], None]:
        marks, ids, number = self.monitor.recorder, torch.zeros(2, 4, dtype=torch.long), torch.ones(())
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def one() -> None:
            marks.on_wait()
            marks.on_batch()
            marks.on_forward((), batch)
            marks.on_forward_end()
            marks.on_backward(None)
            marks.on_backward_end()
            marks.on_optimizer()
            marks.on_optimizer_end()
            self.monitor.log_step(self.step, 0, number, number, 0.1)

        return one

    def after_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        if self._logs:
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

    def by_itself(self) -> Callable[[], None]:
        number = torch.ones(())

        def one() -> None:
            self.step += 1
            self.after_step(number, number)

        return one


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def steady_costs(num_pairs: int, loops: dict[str, TinyLoop]) -> dict[str, dict[str, float]]:
    """What a watched step costs beyond a plain one of the same loop, blocks of all loops in turn."""
    chance = random.Random(0)
    found: dict[str, dict[bool, list[dict[str, float]]]] = {name: {True: [], False: []} for name in loops}
    for loop in loops.values():
        loop.block(TINY_BLOCK, is_on=True)  # the warm-up and the observed step are behind us
    for _ in range(num_pairs):
        for name in chance.sample(list(loops), len(loops)):
            for is_on in chance.sample((True, False), 2):
                found[name][is_on].append(loops[name].block(TINY_BLOCK, is_on=is_on))
            loops[name].switch(is_on=False)
    results = {name: _cost(blocks, loops[name]) for name, blocks in found.items()}
    nothing = results.get(NOTHING, {})
    for result in results.values():
        for key in ("thread", "process"):
            if nothing.get(f"added_{key}_us", 0.0) > 0:
                result[f"times_{key}"] = result[f"added_{key}_us"] / nothing[f"added_{key}_us"]
    return results


def _cost(blocks: dict[bool, list[dict[str, float]]], loop: TinyLoop) -> dict[str, float]:
    result: dict[str, float] = {"steps": len(blocks[True]) * TINY_BLOCK}
    for key in ("thread_us", "process_us", "wall_us"):
        off, on = ([block[key] for block in blocks[is_on]] for is_on in (False, True))
        result[f"plain_{key}"] = statistics.median(off)
        added = [b - a for a, b in zip(off, on, strict=True)]
        result[f"added_{key}"], result[f"error_{key}"] = median_and_error(added)
    loop.switch(is_on=True)
    if (one := loop.by_itself()) is not None:
        result["by_itself_us"] = statistics.median(_cpu_us(one) for _ in range(5))
    loop.close()
    result["wall_ratio"] = (result["plain_wall_us"] + result["added_wall_us"]) / result["plain_wall_us"]
    return result


def _cpu_us(one: Callable[[], None]) -> float:
    """CPU time of a call among 100 like it."""
    start_s = time.thread_time()
    for _ in range(100):
        one()
    return (time.thread_time() - start_s) / 100 * 1e6


def traceml_cost(num_pairs: int) -> dict[str, float]:
    """The same loop under TraceML's own launcher."""
    command = shutil.which("traceml", path=str(Path(sys.executable).parent))
    if command is None:
        raise ModuleNotFoundError("No module named 'traceml_ai'")
    script = Path(__file__).with_name("peer_traceml.py")
    with tempfile.TemporaryDirectory() as folder:
        line = [command, "run", "--mode", "summary", "--logs-dir", folder, str(script), "--args", str(num_pairs)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
    found = [text for text in done.stdout.splitlines() if text.startswith('{"traceml"')]
    if not found:
        raise RuntimeError(f"traceml gave no result: {(done.stderr or done.stdout).strip()[-200:]}")
    return json.loads(found[-1])["traceml"]  # type: ignore[no-any-return]


def tiny_costs(num_pairs: int, is_quick: bool) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    cases: dict[str, Callable[[], TinyLoop]] = {
        "a plain loop": TinyLoop,
        NOTHING: TinyNothing,
        "flopmeter, hooks alone": lambda: TinyWatched([], logs=False),
        "flopmeter, no sinks": lambda: TinyWatched([]),
    }
    if not is_quick:
        cases |= {
            "flopmeter, all sinks": lambda: TinyWatched(ALL_SINKS),
            "Lightning Throughput, arithmetic only": TinyThroughput,
        }
    loops: dict[str, TinyLoop] = {}
    missing: dict[str, str] = {}
    for name, make in cases.items():
        try:
            loops[name] = make()
        except Exception as error:  # noqa: BLE001 - a peer that is not installed must not stop the others
            missing[name] = f"{type(error).__name__}: {error}"
    found = steady_costs(num_pairs, loops)
    if not is_quick:
        try:
            found["TraceML"] = traceml_cost(num_pairs)
        except Exception as error:  # noqa: BLE001 - as above
            missing["TraceML"] = f"{type(error).__name__}: {error}"
    return found, missing


def show(results: dict[str, dict[str, Any]], missing: dict[str, str], tiny: dict[str, dict[str, float]]) -> None:
    console = Console(width=130)
    table = Table(title="Cost of measuring, interleaved")
    headings = (
        "total s",
        "overhead %",
        "+-",
        "by total %",
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
            name, f"{row['total_s']:.1f}", f"{row['overhead_percent']:.2f}", f"{row['error_percent']:.2f}",
            f"{row['by_total_percent']:.2f}", f"{row['steps_per_s']:.1f}", _percent(row.get("median_mfu")),
            f"{row['extra_memory_mb']:.0f}", "-" if cost_ms is None else f"{cost_ms:.0f}",
            _percent(row.get("flop_error")),
        )  # fmt: skip
    console.print(table)
    for name, reason in missing.items():
        console.print(f"{name}: {reason}")
    per_step_ms, step_ms = results["flopmeter profiler"]["ms_per_measurement"], results["baseline"]["median_step_ms"]
    for every in FREQUENCIES if per_step_ms is not None else ():
        console.print(f"profile every {every:>3} steps -> {max(0.0, per_step_ms) / every / step_ms * 100:.2f} %")
    tiny_table = Table(title="A steady step of a tiny model: microseconds beyond the plain one (standard error)")
    headings = ("training thread", "by itself", "whole process", "wall", "plain step, wall", "wall ratio", "times")
    for heading in ("who", *headings):
        tiny_table.add_column(heading, justify="left" if heading == "who" else "right")
    for name, cost in tiny.items():
        cells = [
            f"{cost[f'added_{key}']:.1f} ({cost[f'error_{key}']:.1f})" for key in ("thread_us", "process_us", "wall_us")
        ]
        cells.insert(1, f"{cost['by_itself_us']:.1f}" if "by_itself_us" in cost else "-")
        times = " / ".join(f"{cost[key]:.1f}" for key in ("times_thread", "times_process") if key in cost)
        tiny_table.add_row(name, *cells, f"{cost['plain_wall_us']:.0f}", f"{cost['wall_ratio']:.3f}", times)
    console.print(tiny_table)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--long", type=int, default=2000, help="steps of the plain loop, estimate and smart")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    add_record_option(parser)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    num_steps, long, block = (4, 4, 2) if arguments.quick else (arguments.steps, arguments.long, 3)
    with one_process_group():
        results, missing = race(num_steps, long, block, arguments.quick)
    tiny, not_run = tiny_costs(2 if arguments.quick else 30, arguments.quick)
    show(results, missing | not_run, tiny)
    figures = {"variants": results, "missing": missing | not_run, "tiny": tiny}
    finish("overhead", BENCHMARK_VERSION, figures, arguments.record)


if __name__ == "__main__":
    main()
