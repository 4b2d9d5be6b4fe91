"""Run by torchrun in tests: trains a small model in the ways that its arguments name, and prints what came of each.

torchrun --nproc-per-node 2 tests/distributed_job.py FOLDER forward backward loader healthy ...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flopmeter.distributed as distributed
from flopmeter import TrainingMonitor
from flopmeter.distributed import exchange

WIDTH, ROWS = 64, 16
EVERY, STEPS, HEALTHY_STEPS = 10, 60, 150
DELAY_S = 0.08
"""Far beyond what a machine that runs other tests as well does to a process that shares its cores."""
PACE_S = 0.03
"""What a step takes at least where several intervals have to go by in some seconds."""
SLOW_RANK = 1


class CountedStore:
    """A store that counts its calls, by method."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return method(*arguments)

        return call


class CountedMailbox(exchange.Mailbox):
    def __init__(self, store: Any, prefix: str) -> None:
        super().__init__(store, prefix)
        self._store = CountedStore(self._store)


def delay(*_: Any) -> None:
    time.sleep(DELAY_S)


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self, is_slow: bool, num_steps: int) -> None:
        self.is_slow, self.num_steps = is_slow, num_steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.num_steps):
            if self.is_slow:
                delay()
            yield torch.randn(ROWS, WIDTH)


def slow_network(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants no annotations that are strings
    """All-reduce that takes longer on every rank, from some step on."""
    is_slow = bucket.is_last() and len(LOSSES) >= STEPS

    def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        if is_slow:
            delay()
        return future.value()[0] / dist.get_world_size()

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(finish)


LOSSES: list[float] = []


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "differing":
        return nn.Linear(WIDTH, WIDTH * (1 + dist.get_rank()))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    if kind.startswith("fsdp2"):
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)
    return DistributedDataParallel(model)


def plant(kind: str, model: nn.Module, is_slow: bool) -> None:
    layers = model.module if isinstance(model, DistributedDataParallel) else model
    if kind.endswith("forward") and is_slow:
        layers[1].register_forward_pre_hook(delay)
    if kind.endswith("backward") and is_slow:
        layers[1].register_full_backward_hook(delay)
    if kind == "network" and isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, slow_network)


def monitor_of(kind: str, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
    rank = dist.get_rank()
    if kind == "unwatched" or (kind == "absent" and rank == SLOW_RANK):
        return nullcontext()
    distributed = {"statistics_every": EVERY, "statistics_s": 0.2, "join_s": 1.0 if kind == "absent" else 60.0}
    distributed["record_every_rank"] = kind == "recorded"
    config = {
        "monitoring": {
            "sinks": [],
            "peak_flop_per_s": 1e12,
            "profile_steps": False,
            "report": False,
            "distributed": distributed,
        }
    }
    return TrainingMonitor(folder / kind, config, model=model, optimizer=optimizer, loader=loader)


def die_once(folder: Path) -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        (folder / "killed_at").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def train(kind: str, folder: Path, num_steps: int) -> dict[str, Any]:
    rank = dist.get_rank()
    is_slow = rank == SLOW_RANK
    model = make_model(kind)
    plant(kind, model, is_slow)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    loader = torch.utils.data.DataLoader(Batches(kind == "loader" and is_slow, num_steps), batch_size=None)
    LOSSES.clear()
    with monitor_of(kind, folder, model, optimizer, loader) as monitor:
        if kind == "raising" and is_slow and monitor is not None:
            monitor.run.ranks._interval = None  # the next step fails inside the statistics of this rank
        for step, inputs in enumerate(loader):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            LOSSES.append(loss.item())
            if kind in ("absent", "network", "differing"):
                time.sleep(PACE_S)
            if kind == "pausing" and rank == 0 and step == num_steps // 2 and monitor is not None:
                with monitor.pause("checkpoint"):
                    time.sleep(2.0)
            if kind.startswith("killed") and step == 2 * EVERY and rank == dist.get_world_size() - 1:
                die_once(folder)
    group = dist.group.WORLD
    mailbox = monitor.run.ranks.exchange.mailbox if monitor is not None and monitor.run.ranks else None
    calls = {} if mailbox is None else dict(mailbox._store.calls)
    return {"losses": LOSSES, "calls": calls, "sequence": group._get_sequence_number_for_group() if group else 0}


def main() -> None:
    folder, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    distributed.Mailbox = CountedMailbox  # type: ignore[misc]
    store, rank, world_size = next(dist.rendezvous("env://"))
    # After a restart gloo would find the addresses of the processes before it, now and then.
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    answers = {}
    for kind in kinds:
        before = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
        name, _, repeats = kind.partition("*")
        for number in range(int(repeats or 1)):
            num_steps = {"network": 2 * STEPS, "healthy": HEALTHY_STEPS}.get(name, STEPS)
            answer = train(name, Path(folder) / str(number) if repeats else Path(folder), num_steps)
        answers[name] = {**answer, "collectives": answer["sequence"] - before}
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
