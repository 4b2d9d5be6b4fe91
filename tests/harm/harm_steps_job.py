"""Run by `test_harm_steps` as one of two ranks over gloo: `python harm_steps_job.py FOLDER KIND RANK WATCHED`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopmeter import watch

CONFIG = {"monitoring": {"sinks": [], "report": False, "peak_flop_per_s": 1e12, "profile_steps": False}}


def join(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)


def hooked(folder: Path, rank: int, watched: bool) -> Any:
    """Hooks of the user's on some losses of DDP, in all the ways that there are; gradients and calls in their order."""
    join(folder, rank)
    torch.manual_seed(0)
    net = nn.Linear(2, 1, bias=False)
    nn.init.ones_(net.weight)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer, None, folder / "run", CONFIG) if watched else None
    calls: list[str] = []
    gradients: list[Any] = []
    kept = []

    def noted(name: str, factor: float = 1.0) -> Any:
        def hook(grad: Any) -> Any:
            calls.append(name)
            return grad * factor

        return hook

    for step in range(10):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        kept.append(loss)
        if step == 1:  # before, in the user's order, one of them removed again
            loss.register_hook(noted("first", 3.0))
            loss.register_hook(noted("removed", 100.0)).remove()
            loss.register_hook(noted("second", 0.5))
        if step == 2:
            loss.retain_grad()
        if step == 3 and loss.grad_fn is not None:
            loss.grad_fn.register_hook(lambda *_: calls.append("node"))
            loss.grad_fn.register_prehook(lambda *_: calls.append("before the node"))
        if step in (4, 6):  # after a first pass
            loss.backward(retain_graph=True)
            optimizer.zero_grad()
            handle = loss.register_hook(noted(f"late {step}", 0.0))
            if step == 6:
                handle.remove()
        loss.backward()
        gradients.append([net.weight.grad.tolist(), None if step != 2 else loss.grad.item()])
        optimizer.step()
    left = [list(loss._backward_hooks or ()) for loss in kept]
    if monitor is not None:
        monitor.finish_training()
    return {"gradients": gradients, "calls": calls, "num_left": [len(hooks) for hooks in left]}


def early(folder: Path, rank: int, watched: bool) -> Any:
    """`watch` comes before `init_process_group`, and so does a number of the user's."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, None, folder / "run", CONFIG)
    monitor.log_metrics({"mine": float(rank)})
    join(folder, rank)
    for _ in range(6):
        model(torch.randn(2, 8)).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    monitor.finish_training()
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, kind, own_rank, is_watched = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1"
    answer = {"hooked": hooked, "early": early}[kind](place, own_rank, is_watched)
    (place / f"{kind}{own_rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
