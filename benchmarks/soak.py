"""Does anything grow in a long run, or stay behind after a short one?

    python benchmarks/soak.py [--steps 100000] [--rank-steps 10000] [--cycles 50] [--short] [--record FILE]

Three trials, each in processes of its own, on a model so small that the monitor is most of the work: one long run with
every sink on, and one with none, to tell whose growth it is; a job of two ranks; and many short runs in one process.
Sampled on the way: resident memory, open files, threads. Afterwards: whether every step is in the record, and which
hooks, patches, threads, files and objects are left. Steps here are far shorter than any real one, so queues are under
more pressure than in practice. The last line printed is JSON; the exit code is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flopmeter import TrainingMonitor, load_run, watch
from outcome import add_record_option, finish

BENCHMARK_VERSION = 2
ALL_SINKS = ("console", "tensorboard", "prometheus", "wandb")
QUICK_SINKS = ("console", "tensorboard")
"""The others take half a second or more to open and close, fifty times over."""
START_STEPS = 20
NUM_SAMPLES = 40
SETTLED = 0.5
"""Growth is looked for in this last part of the samples: before it, buffers and libraries fill up."""
GOAL_BYTES_PER_STEP = 64.0
"""Six megabytes in a hundred thousand steps; noise of the allocator is a few bytes."""
STEPS_PER_CYCLE = 12


class Loop:
    """The smallest training that has everything we hook into: a loader, a model, an optimizer."""

    def __init__(self, is_parallel: bool = False) -> None:
        self.model: nn.Module = nn.Linear(4, 4)
        if is_parallel:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.loader = DataLoader(TensorDataset(torch.ones(256, 4)), batch_size=4)
        self._batches: Iterator[list[torch.Tensor]] = iter(())

    def step(self) -> torch.Tensor:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches)
        loss = self.model(batch[0]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def left_behind(self) -> dict[str, Any]:
        """Everything that a monitor may have hung itself into, as numbers and names."""
        model, optimizer = self.model, self.optimizer
        return {
            "forward_hooks": len(model._forward_hooks) + len(model._forward_pre_hooks),
            "optimizer_hooks": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
            "backward": torch.autograd.backward.__module__,
            "engine": torch.autograd._engine_run_backward.__module__,
            "loader": _BaseDataLoaderIter.__next__.__module__,
            "dispatch_modes": len(_get_current_dispatch_mode_stack()),
            "gc_callbacks": len(gc.callbacks),
        }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings(sinks: tuple[str, ...], **more: Any) -> dict[str, Any]:
    """Sinks as a user would have them; W&B offline, Prometheus on a free port."""
    own = {"sinks": list(sinks), "peak_flop_per_s": 1e12, "report": False, **more}
    return {
        "monitoring": own,
        "wandb": {"mode": "offline", "project": "soak"},
        "prometheus": {"port": free_port()},
        "training": {"logging_steps": 1},
    }


def usage() -> dict[str, int]:
    process = psutil.Process()
    return {"rss": process.memory_info().rss, "files": process.num_fds(), "threads": process.num_threads()}


def wait_for(is_done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not is_done() and time.monotonic() < end_s:
        time.sleep(0.05)


def train(loop: Loop, monitor: TrainingMonitor, num_steps: int) -> list[dict[str, int]]:
    """Train, and look at the process now and then."""
    every = max(1, num_steps // NUM_SAMPLES)
    samples = []
    for step in range(1, num_steps + 1):
        loss = loop.step()
        monitor.log_step(step, 0, loss, None, 1e-3)
        if step == START_STEPS:
            monitor.latest(wait_s=10.0)  # digested, they make it ask for its first profile, whose thread stays
            wait_for(lambda: monitor.run.ranks is None or monitor.run.ranks.exchange.mailbox is not None)
        if step % every == 0:
            samples.append({"step": step, **usage()})
    return samples


def growth(samples: list[dict[str, int]]) -> dict[str, Any]:
    """What happened to the process once it had settled. Medians: a file that is read and closed again is not growth."""
    settled = samples[int(len(samples) * SETTLED) :]
    halves = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    slope = statistics.linear_regression([s["step"] for s in settled], [s["rss"] for s in settled]).slope
    return {
        "rss_bytes_per_step": slope,
        "rss_mb": [round(s["rss"] / 1e6, 1) for s in samples[:: len(samples) // 8]],
        **{kind: [statistics.median_low(s[kind] for s in half) for half in halves] for kind in ("files", "threads")},
    }


def record_of(folder: Path, num_steps: int) -> dict[str, Any]:
    """Whether the record has every step once, in order, and its summary."""
    run = load_run(folder)
    return {
        "num_steps": len(run),
        "is_complete": list(run.step) == list(range(1, num_steps + 1)),
        "has_summary": run.summary is not None,
        "unreadable": len(run.skipped),
    }


def wait_for_sinks(monitor: TrainingMonitor) -> None:
    """Until every sink has opened and taken a number: its threads and files are not growth."""
    monitor.start_training(has_joined=True)
    monitor.log_metrics({"soak/start": 1.0}, step=0)
    assert monitor.run.worker is not None
    monitor.run.worker.drain(10.0)
    waiting = [sink for sink in monitor.run.worker._sinks if not sink.takes_every_step]
    wait_for(lambda: all(sink._num_taken for sink in waiting))


def run_steps(folder: Path, num_steps: int, sinks: tuple[str, ...]) -> dict[str, Any]:
    loop = Loop()
    monitor = watch(loop.model, loop.optimizer, loop.loader, folder, settings(sinks))
    wait_for_sinks(monitor)
    start_s = time.perf_counter()
    samples = train(loop, monitor, num_steps)
    step_us = (time.perf_counter() - start_s) / num_steps * 1e6
    monitor.finish_training()
    return {"sinks": list(sinks), "step_us": step_us, **growth(samples), "record": record_of(folder, num_steps)}


def run_rank(folder: Path, num_steps: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    loop = Loop(is_parallel=True)
    config = settings((), distributed={"statistics_every": 50, "statistics_s": 0.1, "record_every_rank": True})
    monitor = watch(loop.model, loop.optimizer, loop.loader, folder, config)
    samples = train(loop, monitor, num_steps)
    monitor.finish_training()
    rank = dist.get_rank()
    dist.destroy_process_group()
    name = "run.jsonl" if rank == 0 else f"run.rank{rank}.jsonl"
    return {"rank": rank, **growth(samples), "record": record_of(folder / name, num_steps)}


def _watch_exits() -> list[Any]:
    """What of ours waits for the interpreter's end; other libraries leave something there too."""
    waiting: list[Any] = []
    register, unregister = atexit.register, atexit.unregister

    def note(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.__module__.startswith("flopmeter"):
            waiting.append(function)
        return register(function, *args, **kwargs)

    def forget(function: Any) -> None:
        waiting[:] = [other for other in waiting if other != function]
        unregister(function)

    atexit.register, atexit.unregister = note, forget
    return waiting


def run_cycles(folder: Path, num_cycles: int, sinks: tuple[str, ...]) -> dict[str, Any]:
    """Start and stop again and again. The first two cycles load libraries and set up what stays for good."""
    loop, at_exit = Loop(), _watch_exits()
    untouched = loop.left_behind()
    after: list[dict[str, Any]] = []
    for cycle in range(num_cycles):
        monitor = watch(loop.model, loop.optimizer, loop.loader, folder / str(cycle), settings(sinks))
        train(loop, monitor, STEPS_PER_CYCLE)
        monitor.finish_training()
        del monitor
        gc.collect()
        after.append({**loop.left_behind(), **usage(), "python_threads": threading.active_count()})
    complete = [record_of(folder / str(cycle), STEPS_PER_CYCLE)["is_complete"] for cycle in range(num_cycles)]
    is_ours = sum(issubclass(type(thing), TrainingMonitor) for thing in gc.get_objects())
    return {
        "num_cycles": num_cycles,
        "sinks": list(sinks),
        "hooks": {name: [untouched[name], after[-1][name]] for name in untouched},
        "files": [after[1]["files"], after[-1]["files"]],
        "threads": [after[1]["threads"], after[-1]["threads"]],
        "python_threads": [after[1]["python_threads"], after[-1]["python_threads"]],
        "rss_mb": [round(after[1]["rss"] / 1e6, 1), round(after[-1]["rss"] / 1e6, 1)],
        "monitors_alive": is_ours,
        "left_for_exit": len(at_exit),
        "num_complete": sum(complete),
    }


def is_worse(before: Any, after: Any) -> bool:
    """More than before, or another function than before. Fewer is a library that has finished something late."""
    return bool(after > before) if isinstance(before, int) else bool(after != before)


def missed_goals(result: dict[str, Any]) -> list[str]:
    """What grew, stayed or is missing, one sentence each."""
    missed = []
    for name, trial in result["runs"].items():
        if trial["rss_bytes_per_step"] > GOAL_BYTES_PER_STEP and not result["is_short"]:
            missed.append(f"{name}: memory grows by {trial['rss_bytes_per_step']:.0f} bytes a step")
        pairs = {kind: trial[kind] for kind in ("files", "threads")}
        missed += [f"{name}: {kind} grew from {one} to {other}" for kind, (one, other) in pairs.items() if other > one]
        record = trial["record"]
        if not (record["is_complete"] and record["has_summary"] and record["unreadable"] == 0):
            missed.append(f"{name}: the record is incomplete: {record}")
    cycles = result["cycles"]
    pairs = {**cycles["hooks"], **{kind: cycles[kind] for kind in ("files", "threads", "python_threads")}}
    missed += [
        f"cycles: {name} went from {one} to {other}" for name, (one, other) in pairs.items() if is_worse(one, other)
    ]
    for kind in ("monitors_alive", "left_for_exit"):
        if cycles[kind]:
            missed.append(f"cycles: {kind} is {cycles[kind]}, not 0")
    if cycles["num_complete"] != cycles["num_cycles"]:
        missed.append(f"cycles: {cycles['num_complete']} of {cycles['num_cycles']} records are complete")
    return missed


def launch(kind: str, number: int, sinks: tuple[str, ...] = (), num_ranks: int = 1) -> list[dict[str, Any]]:
    """One trial in processes of its own; gives what each of them found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    command = [sys.executable]
    if num_ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        command += [__file__, "--worker", kind, folder, str(number), ",".join(sinks)]
        answer = subprocess.run(
            command, check=False, env=environment | {"WANDB_DIR": folder}, stderr=subprocess.PIPE, text=True
        )
        if answer.returncode:
            raise SystemExit(f"soak: {kind} failed:\n{answer.stderr[-2000:]}")
        return [json.loads(Path(folder, f"answer{rank}.json").read_text()) for rank in range(num_ranks)]


def work(kind: str, folder: Path, number: int, sinks: tuple[str, ...]) -> None:
    """What one process of a trial runs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if kind == "steps":
        answer = run_steps(folder / "run", number, sinks)
    elif kind == "rank":
        answer = run_rank(folder / "run", number)
    else:
        answer = run_cycles(folder, number, sinks)
    (folder / f"answer{answer.get('rank', 0)}.json").write_text(json.dumps(answer))


def soak(num_steps: int, num_rank_steps: int, num_cycles: int, is_short: bool) -> dict[str, Any]:
    """All trials, one after the other."""
    cycle_sinks = QUICK_SINKS if is_short else ALL_SINKS
    runs = {"every sink": launch("steps", num_steps, ALL_SINKS)[0], "no sink": launch("steps", num_steps)[0]}
    runs |= {f"rank {trial['rank']} of 2": trial for trial in launch("rank", num_rank_steps, num_ranks=2)}
    result: dict[str, Any] = {
        "is_short": is_short,
        "goal_bytes_per_step": GOAL_BYTES_PER_STEP,
        "runs": runs,
        "cycles": launch("cycles", num_cycles, cycle_sinks)[0],
    }
    return {**result, "missed": missed_goals(result)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rank-steps", type=int, default=10_000)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--short", action="store_true", help="2,000 steps, 200 of two ranks; too few to judge memory")
    add_record_option(parser)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.worker:
        kind, folder, number, sinks = arguments.worker
        work(kind, Path(folder), int(number), tuple(filter(None, sinks.split(","))))
        return 0
    steps, rank_steps = (2000, 200) if arguments.short else (arguments.steps, arguments.rank_steps)
    result = soak(steps, rank_steps, arguments.cycles, arguments.short)
    for sentence in result["missed"]:
        print(f"missed: {sentence}")
    finish("soak", BENCHMARK_VERSION, result, arguments.record)
    return int(bool(result["missed"]))


if __name__ == "__main__":
    sys.exit(main())
