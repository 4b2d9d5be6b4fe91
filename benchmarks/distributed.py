"""What do rank statistics cost, and how does that grow with the number of ranks?

    python benchmarks/distributed.py [--ranks 2 4 8] [--steps 3000] [--quick] [--record FILE]

For each number of ranks one job trains a small GPT under DDP, the one of `overhead.py`. Its monitor takes part in the
statistics in every other block of steps: waits are timed, packets are left and read; in the blocks between it does not.
Neighbouring blocks are compared, so that a slow moment of the machine hits both; the wall ratio is the median of their
ratios minus one, with its standard error. Where that is larger than the cost, CPU time says more: what the statistics
take on rank 0, as a share of the blocks' wall time. That is the exchange's thread, what the output thread takes beyond
the blocks without statistics, and the calls on the training thread, each by its own clock. Beside it the calls to the
store.

More ranks than this machine has cores for are simulated: what rank 0 does with that many packets, and their size. The
last line printed is JSON.
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from flopmeter import TrainingMonitor
from flopmeter.demo import GPT, GPTConfig
from flopmeter.distributed.exchange import Mailbox
from flopmeter.distributed.packet import FIELDS, PACKET_BYTES, JobScale, describe, metrics_of, scale_of, unpack
from flopmeter.distributed.stragglers import StragglerWatch
from outcome import add_record_option, finish

BENCHMARK_VERSION = 2
EVERY = 50
SIZES = GPTConfig(num_layers=3, hidden=128, num_heads=4, length=96)
BATCH_SIZE = 8
SIMULATED = (1024, 4096, 16384)
GOAL = 0.002
SETTLE_S = 0.4
"""Longer than the output thread sleeps."""


class Job:
    """One rank of the job: trains, with its part in the statistics switched on or off."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        model = DistributedDataParallel(GPT(SIZES))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        distributed = {"statistics_every": EVERY, "statistics_s": 1e-3}
        settings = {"sinks": [], "peak_flop_per_s": 1e12, "profile_steps": False, "report": False}
        config = {"monitoring": {**settings, "distributed": distributed}}
        self.monitor = TrainingMonitor(folder, config, model=model, optimizer=self.optimizer)
        self.monitor.start_training()
        self.model = model
        self.ids = torch.randint(SIZES.vocabulary, (BATCH_SIZE, SIZES.length))
        assert self.monitor.run.ranks is not None
        assert self.monitor.run.worker is not None
        self.ranks, self.worker = self.monitor.run.ranks, self.monitor.run.worker
        self.calls_s = 0.0
        """What the training thread has spent in the statistics' calls."""
        for name in ("on_backward", "on_backward_end", "_queue", "_note_computed", "take"):
            setattr(self.ranks.blocking, name, self._timed(getattr(self.ranks.blocking, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.calls_s += time.perf_counter() - start_s

        return timed

    def take_part(self, is_on: bool) -> None:
        monitor = self.monitor
        monitor.run.digest.ranks = self.ranks if is_on else None
        monitor.recorder.blocking = self.ranks.blocking if is_on else None
        self.ranks.blocking.attach() if is_on else self.ranks.blocking.detach()

    def block(self) -> dict[str, float]:
        """Seconds of one interval of steps, and of ours what the threads took for it; ranks begin together."""
        dist.barrier()
        before, start_s = self._own_s(), time.perf_counter()
        for _ in range(EVERY):
            self.model(self.ids, self.ids).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        wall_s = time.perf_counter() - start_s
        dist.barrier()  # whoever is still at it, and what our threads have left to do for these steps, counts as CPU
        time.sleep(SETTLE_S)
        return {"wall": wall_s} | {name: after_s - before[name] for name, after_s in self._own_s().items()}

    def _own_s(self) -> dict[str, float]:
        return {"exchange": self.ranks.exchange.cpu_s, "output": self.worker.cpu_s, "training": self.calls_s}


def count_calls() -> Counter[str]:
    """Calls to the store from here on, by what is asked."""
    calls: Counter[str] = Counter()

    def counted(name: str, original: Any) -> Any:
        def call(self: Mailbox, what: Any) -> Any:
            calls[name] += 1
            return original(self, what)

        return call

    for name in ("put", "has", "read"):
        setattr(Mailbox, name, counted(name, getattr(Mailbox, name)))
    return calls


def work(folder: Path, num_steps: int) -> None:
    """What each rank runs."""
    torch.set_num_threads(1)
    calls = count_calls()
    dist.init_process_group("gloo")
    job = Job(folder)
    job.block()
    blocks: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for pair in range(max(2, num_steps // (2 * EVERY))):
        for is_on in (True, False) if pair % 2 else (False, True):
            job.take_part(is_on)
            blocks[is_on].append(job.block())
    answer = {"on_s": blocks[True], "off_s": blocks[False], "calls": dict(calls)}
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(answer))
    job.monitor.finish_training()
    dist.destroy_process_group()


def launch(num_ranks: int, num_steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += [__file__, "--worker", folder, "--steps", str(num_steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
        answers = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    first, last = answers[0], answers[-1]
    pairs = list(zip(first["on_s"], first["off_s"], strict=True))
    ratios = [on["wall"] / off["wall"] - 1 for on, off in pairs]
    quartiles = statistics.quantiles(ratios, n=4)[::2]
    num_intervals = len(ratios)
    block_s = statistics.median(off["wall"] for _, off in pairs)
    added_ms = {
        name: 1e3 * statistics.median(on[name] - off[name] for on, off in pairs)
        for name in ("exchange", "output", "training")
    }
    return {
        "ranks": num_ranks,
        "step_ms": block_s / EVERY * 1e3,
        "added_share": statistics.median(ratios),
        "added_share_quartiles": quartiles,
        # Of a median, where the middle half of a normal distribution is 1.35 standard deviations wide.
        "added_share_error": 1.25 * (quartiles[1] - quartiles[0]) / 1.35 / num_intervals**0.5,
        "added_cpu_share_rank_0": sum(added_ms.values()) / 1e3 / block_s,
        "num_pairs": num_intervals,
        "ms_per_interval_rank_0": added_ms,
        "exchange_ms_per_interval_last_rank": 1e3 * statistics.median(block["exchange"] for block in last["on_s"]),
        "calls_rank_0": first["calls"],
        "calls_last_rank": last["calls"],
    }


def simulate(num_ranks: int) -> dict[str, Any]:
    """Rank 0's arithmetic on that many packets, and what travels per interval."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    joined = torch.rand(num_ranks, len(FIELDS), dtype=torch.float64).numpy().tobytes()
    packets = [joined[i : i + PACKET_BYTES] for i in range(0, len(joined), PACKET_BYTES)]
    nobody, watch = [False] * num_ranks, StragglerWatch()
    alone = JobScale(flop=1.0, tokens=1.0, samples=1.0, devices=1.0)
    times_s = []
    for _ in range(5):
        start_s = time.thread_time()
        table = unpack(packets, num_ranks)
        metrics_of(describe(table, nobody))
        scale_of(table, [1] * num_ranks, alone, is_alike=True)
        watch.update(table)
        times_s.append(time.thread_time() - start_s)
    return {
        "ranks": num_ranks,
        "arithmetic_ms": statistics.median(times_s) * 1e3,
        "bytes_per_rank": PACKET_BYTES,
        "bytes_to_rank_0": num_ranks * PACKET_BYTES,
        "notes_read_by_rank_0": num_ranks,
    }


def show(measured: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> None:
    console = Console(width=110)
    table = Table(title=f"Statistics every {EVERY} steps")
    threads = ("exchange", "output", "training")
    for heading in ("ranks", "step ms", "wall %", "error %", "CPU %", *(f"{name} ms" for name in threads)):
        table.add_column(heading, justify="right")
    for row in measured:
        table.add_row(
            str(row["ranks"]), f"{row['step_ms']:.1f}", f"{row['added_share'] * 100:.2f}",
            f"{row['added_share_error'] * 100:.2f}", f"{row['added_cpu_share_rank_0'] * 100:.2f}",
            *(f"{row['ms_per_interval_rank_0'][name]:.2f}" for name in threads),
        )  # fmt: skip
    console.print(table)
    for row in simulated:
        kb = row["bytes_to_rank_0"] / 1024
        console.print(
            f"{row['ranks']:>6} ranks, simulated: {row['arithmetic_ms']:.1f} ms of arithmetic, "
            f"{kb:,.0f} KB to rank 0 in {row['notes_read_by_rank_0']} notes"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument(
        "--quick", "--short", action="store_true", help="two ranks and a few blocks, to see that it runs"
    )
    add_record_option(parser)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, arguments.steps)
        return
    ranks, num_steps = ([2], 4 * EVERY) if arguments.quick else (arguments.ranks, arguments.steps)
    measured = [launch(num_ranks, num_steps) for num_ranks in ranks]
    simulated = [simulate(num_ranks) for num_ranks in SIMULATED]
    show(measured, simulated)
    figures = {"every": EVERY, "goal": GOAL, "measured": measured, "simulated": simulated}
    finish("distributed", BENCHMARK_VERSION, figures, arguments.record)


if __name__ == "__main__":
    main()
