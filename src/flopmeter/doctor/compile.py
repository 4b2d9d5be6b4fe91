"""Does a compiled model stay compiled after a step was observed?"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Any

from flopmeter.doctor._result import Result, Standing

ORDER = 120
LIMIT_S = 30.0
NEEDS_TORCH = True

WIDTH, ROWS = 64, 8
FLOP = 2 * 2 * ROWS * WIDTH * WIDTH + 3 * 2 * ROWS * WIDTH * WIDTH
"""Two linears forward; backward two weight gradients and one input gradient, because the batch needs none."""


def check() -> Result:
    from flopmeter.doctor._trial import device_at_hand

    device = device_at_hand()
    if reason := why_not(device.type):
        return Result(
            standing="missing", says=f"{reason}: torch.compile does not work here; other models are not touched"
        )
    return _try(device)


def why_not(device_type: str) -> str | None:
    """What torch's compiler lacks here, or None."""
    if device_type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++", "icpx"))):
        return "there is no C++ compiler"
    if device_type == "cuda" and find_spec("triton") is None:
        return "triton is not installed"
    if device_type == "cuda" and not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang", "cc"))):
        return "there is no C compiler, which triton needs"
    return None


def _try(device: Any) -> Result:
    import torch

    from flopmeter.flops.observe import observe

    compiler = _CountingCompiler()
    layers = torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH, bias=False)
    model: Any = torch.compile(torch.nn.Sequential(*layers).to(device), backend=compiler)
    batch = torch.ones(ROWS, WIDTH, device=device)

    def step() -> None:
        model(batch).sum().backward()

    step()
    step()
    with observe(model) as observed:
        step()
    before = compiler.num_calls
    step()
    step()
    count = observed.result().model_flop
    num_compiled = compiler.num_calls - before
    if num_compiled != 2 or compiler.num_graphs != 1:
        says = f"after an observed step {num_compiled} of 2 steps ran compiled, from {compiler.num_graphs} graphs"
        return Result(standing="broken", says=says)
    if count != FLOP:
        return Result(standing="broken", says=f"a compiled step of {FLOP:,} FLOP was counted as {count:,.0f}")
    how = "observed" if observed.gave_way is None else f"not observed ({observed.gave_way})"
    standing: Standing = "works" if observed.gave_way is None else "falls back"
    return Result(standing=standing, says=f"a compiled model was {how}, counted right, and ran compiled afterwards")


class _CountingCompiler:
    """Torch's usual compiler, with a count of the calls to what it made."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from flopmeter.torch_compat import compile_fx

        self.num_graphs += 1
        compiled: Any = compile_fx(graph, inputs)

        def run(*args: Any) -> Any:
            self.num_calls += 1
            return compiled(*args)

        return run
