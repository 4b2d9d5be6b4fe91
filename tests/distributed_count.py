"""Run by torchrun in tests: each rank trains one step and prints the FLOPs it observed, as JSON."""

from __future__ import annotations

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from flopmeter.flops.observe import observe

ROWS, WIDTH, HIDDEN = 6, 8, 16


def wrapped(kind: str, model: nn.Sequential) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def main(kind: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False))
    model = wrapped(kind, layers)
    counts = []
    for _ in range(2):  # the first call of a sharded model also tries its operators on fake tensors
        with observe(model) as step:
            model(torch.randn(ROWS, WIDTH)).sum().backward()
        count = step.result()
        counts.append([count.forward_flop, count.backward_flop])
    print(json.dumps({"rank": dist.get_rank(), "counts": counts}), flush=True)
    dist.barrier()
    os._exit(0)  # on a busy machine, threads of torch's own now and then abort an ordinary end


if __name__ == "__main__":
    main(sys.argv[1])
