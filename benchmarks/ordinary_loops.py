"""Training loops as people write them, in which nothing of what they do in passing is the cause of lost time.

    python benchmarks/ordinary_loops.py sleep|python|item|memmap|outer_loss|busy [SECONDS]

Nothing of flopmeter is in here: `benchmarks/planted.py` runs each under `flopmeter run`, and `TRUTH` says which first
findings are right. `healthy` and `undetermined` accuse nobody.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from array import array
from multiprocessing import Process, set_start_method
from pathlib import Path

NOBODY = ("healthy", "undetermined")
TRUTH = {
    "sleep": ("own_code",),
    "python": ("own_code",),
    "item": NOBODY,
    "memmap": (*NOBODY, "own_code"),
    "outer_loss": (*NOBODY, "memory_bound"),
    "busy": ("cpu_contention",),
}
"""By loop: the first findings that are right."""
WHAT = {
    "sleep": "waits 40 ms between two steps, as for an environment",
    "python": "does 40 ms of its own in Python between two steps",
    "item": "reads the loss in every step, on a CPU",
    "memmap": "makes batches from a memory-mapped file, indexed by tensors",
    "outer_loss": "computes a loss over a large vocabulary outside the model",
    "busy": "shares its core with three other processes",
}
NUM_HOGS = 3


def hog(until_s: float) -> None:
    """Keep the core busy."""
    while time.time() < until_s:
        sum(range(10_000))


def train(kind: str, seconds: float) -> None:
    """A small transformer layer or two, with what the loop does in passing."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    vocabulary = 8192 if kind == "outer_loss" else 256
    layers = [nn.TransformerEncoderLayer(192, 4, 768, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(vocabulary, 192), *layers, nn.Linear(192, vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        path.write_bytes(array("q", [(7 * n) % 256 for n in range(1 << 16)]).tobytes())
        tokens = torch.from_file(str(path), size=1 << 16, dtype=torch.int64)
        end_s = time.time() + seconds
        while time.time() < end_s:
            starts = torch.randint((1 << 16) - 65, (8,))
            if kind == "memmap":
                batch = torch.stack([tokens[start : start + 65].clone() for start in starts])
            else:
                batch = torch.randint(256, (8, 65))
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            if kind == "outer_loss":
                loss = loss + 1e-4 * logits.logsumexp(-1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind == "item":
                loss.item()
            if kind == "sleep":
                time.sleep(0.04)
            if kind == "python":
                done_s = time.perf_counter() + 0.04
                while time.perf_counter() < done_s:
                    sum(range(1000))


def main() -> None:
    kind, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 15.0
    hogs = []
    if kind == "busy":
        set_start_method("spawn")
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        hogs = [Process(target=hog, args=(time.time() + seconds + 20,), daemon=True) for _ in range(NUM_HOGS)]
        for process in hogs:
            process.start()
    train(kind, seconds)
    for process in hogs:
        process.terminate()


if __name__ == "__main__":
    main()
