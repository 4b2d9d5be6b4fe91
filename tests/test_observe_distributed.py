"""DDP, FSDP2 and tensor parallelism on real processes: each rank counts what it computed itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_count import HIDDEN, ROWS, WIDTH

SCRIPT = Path(__file__).with_name("distributed_count.py")
NUM_RANKS = 2
LAYER = 2 * ROWS * WIDTH * HIDDEN


def run(kind: str) -> list[list[list[float]]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    answer = subprocess.run([*command, str(SCRIPT), kind], capture_output=True, text=True, check=False, timeout=200)
    assert answer.returncode == 0, answer.stderr
    answers, text = [], answer.stdout
    while (start := text.find("{")) >= 0:  # two ranks may write into the same line
        found, length = json.JSONDecoder().raw_decode(text[start:])
        answers.append(found)
        text = text[start + length :]
    return [found["counts"] for found in sorted(answers, key=lambda found: found["rank"])]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_data_parallel_ranks_count_their_own_batch_in_full(kind: str) -> None:
    # Two layers forward; backward both weights and one input.
    assert run(kind) == [[[2 * LAYER, 3 * LAYER]] * 2] * NUM_RANKS


def test_tensor_parallel_ranks_count_their_own_slice() -> None:
    # Half of the hidden width each: together they did exactly the work of one model.
    share = [2 * LAYER / NUM_RANKS, 3 * LAYER / NUM_RANKS]
    assert run("tensor_parallel") == [[share] * 2] * NUM_RANKS
