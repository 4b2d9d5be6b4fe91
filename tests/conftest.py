"""What holds for every test: one thread a process, hypothesis without a clock, and a torchrun that is ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is loaded, here and in what tests start. `make test` runs a process for each of two cores: with as many
# threads in each, these wait for each other, and small models take four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile(
    "flopmeter", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("flopmeter")


@pytest.fixture(scope="session", autouse=True)
def _torchrun_of_this_python(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where torch belongs to the Python that this environment was made from, its torchrun would run that Python."""
    if (Path(sys.executable).parent / "torchrun").exists():
        return
    folder = tmp_path_factory.mktemp("programs")
    program = folder / "torchrun"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
