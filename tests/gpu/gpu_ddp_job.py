"""What each rank of the NCCL job runs: `gpu_ddp_job.py FOLDER BUCKET_MB`; no bucket is FSDP2."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flopmeter import TrainingMonitor

NUM_STEPS, NUM_WARM_UP, WIDTH, ROWS = 120, 20, 2048, 4096
"""Long enough a step that the device, not the host, decides how long it takes, and when the ranks meet."""


def main() -> None:
    folder, bucket_mb = Path(sys.argv[1]), int(sys.argv[2])
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).cuda()
    if bucket_mb:
        model: nn.Module = DistributedDataParallel(layers, device_ids=[rank], bucket_cap_mb=bucket_mb)
    else:
        for layer in layers:
            fully_shard(layer)
        model = fully_shard(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    settings: dict[str, Any] = {"sinks": [], "report": False, "peak_flop_per_s": 1e15, "overhead_budget": 0.05}
    settings["distributed"] = {"statistics_every": 50, "statistics_s": 0.2}
    # The tracer's first start takes long, and not equally long on each rank: the profiled step would show them waiting.
    with torch.profiler.profile():
        layers(torch.zeros(8, WIDTH, device="cuda"))
    is_watched = os.environ.get("JOB_KIND", "watched") == "watched"
    config = {"monitoring": settings}
    monitor = TrainingMonitor(folder, config, model=model, optimizer=optimizer) if is_watched else nullcontext()
    batch = torch.randn(ROWS, WIDTH, device="cuda")
    with monitor:
        for number in range(NUM_STEPS):
            if number == NUM_WARM_UP:
                torch.cuda.synchronize()
                start_s = time.perf_counter()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        step_s = (time.perf_counter() - start_s) / (NUM_STEPS - NUM_WARM_UP)
    if rank == 0:
        folder.mkdir(exist_ok=True)
        (folder / "step_s.json").write_text(json.dumps(step_s))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
