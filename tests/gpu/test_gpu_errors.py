"""The user's own errors on the device come out as they would without us."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_loop import IS_SIMULATED, Loop, waits_allowed, watched
from torch import nn

ASSERT = """
import sys, torch
from torch import nn
from flopmeter import watch
model = nn.Embedding(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if sys.argv[1] == "watched":
    watch(model, optimizer, output_dir=sys.argv[2], config={"monitoring": {"sinks": [], "report": False}})
good, bad = torch.zeros(2, dtype=torch.long).cuda(), torch.full((2,), 99).cuda()
for number in range(6):
    model(good if number < 5 else bad).sum().backward()
    optimizer.step()
torch.cuda.synchronize()
"""


class Greedy(nn.Module):
    """A layer that wants 64 TiB when it is told to."""

    is_greedy = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 46, dtype=torch.uint8, device="cuda") if self.is_greedy else x


def greedy_loop() -> tuple[Loop, Greedy]:
    loop, greedy = Loop(), Greedy()
    loop.model.append(greedy)
    return loop, greedy


def out_of_memory(loop: Loop, greedy: Greedy) -> str:
    greedy.is_greedy = True
    with pytest.raises(torch.cuda.OutOfMemoryError) as error, waits_allowed():
        loop.model(loop.batch)
    greedy.is_greedy = False
    return re.sub(r"[\d.]+ (GiB|MiB|KiB|bytes)", "N", str(error.value))


def test_running_out_of_memory_says_what_it_says_without_us(tmp_path: Path) -> None:
    plain = out_of_memory(*greedy_loop())
    loop, greedy = greedy_loop()
    with watched(loop, tmp_path) as monitor:
        loop.losses(10, monitor)
        assert out_of_memory(loop, greedy) == plain
        loop.losses(5, monitor)


def test_a_device_side_assert_is_the_users_and_names_no_frame_of_ours(tmp_path: Path) -> None:
    last = {}
    # Where nothing is computed nothing asserts either: there the sixth lookup fails because it is told to.
    told = {"SIMCUDA_FAIL": "indexSelectSmallIndex@6:710"} if IS_SIMULATED else {}
    for kind in ("plain", "watched"):
        command = [sys.executable, "-c", ASSERT, kind, str(tmp_path)]
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=200, env={**os.environ, **told}
        )
        assert answer.returncode != 0
        # The kernel's own complaint and the traceback name threads and files: the error is what torch says of it.
        last[kind] = next(line for line in answer.stderr.splitlines() if line.startswith("torch.AcceleratorError"))
    assert last["watched"] == last["plain"]
