"""Tests for the day a GPU is there: `make test-gpu`. Every hidden wait for the device is an error while they run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_hidden_waits() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with warnings.catch_warnings():  # torch calls it a prototype, once a process
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
