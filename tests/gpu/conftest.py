"""Tests on a CUDA device: `make test-gpu`. Every hidden wait for the device is an error while they run.

Without a GPU they run on a simulated one (tests/simcuda), which computes nothing: what compares computed values is
marked `values` and left out there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from gpu_loop import IS_SIMULATED


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "values: compares computed values, which a simulated device has not")
    config.addinivalue_line("markers", "devices(n): needs n CUDA devices")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if IS_SIMULATED and item.get_closest_marker("values"):
        pytest.skip("compares computed values, and the simulated device computes none")
    wanted = item.get_closest_marker("devices")
    if wanted and torch.cuda.device_count() < wanted.args[0]:
        pytest.skip(f"needs {wanted.args[0]} CUDA devices")


@pytest.fixture(autouse=True)
def _no_hidden_waits() -> Iterator[None]:
    with warnings.catch_warnings():  # torch calls it a prototype, once a process
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
