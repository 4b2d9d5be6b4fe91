"""Where a model computes, when its parameters lie on several devices, or wait on the host."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter.config import MonitorConfig
from flopmeter.devices import Peak, devices_of
from flopmeter.distributed.blocking import Blocking
from flopmeter.monitor.measuring import FlopSource

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(3)]


class Placed(nn.Module):
    """A model whose parameters say that they are on these devices, and of this mesh."""

    def __init__(self, *devices: torch.device, mesh: str | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        own = {} if mesh is None else {"device_mesh": SimpleNamespace(device_type=mesh)}
        self._placed = [SimpleNamespace(device=device, **own) for device in devices]

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter(self._placed)


def test_a_model_without_parameters_and_none_at_all_are_on_the_cpu() -> None:
    assert devices_of(None) == devices_of(nn.ReLU()) == devices_of(nn.Linear(2, 2)) == (CPU,)


def test_a_model_that_is_cut_over_gpus_computes_on_each_of_them() -> None:
    assert devices_of(Placed(GPUS[1], GPUS[1], GPUS[0])) == (GPUS[1], GPUS[0])


def test_an_embedding_on_the_host_does_not_make_a_model_one_of_the_cpu() -> None:
    assert devices_of(Placed(CPU, torch.device("meta"), GPUS[2])) == (GPUS[2],)


def test_parameters_that_fsdp2_keeps_on_the_host_are_used_on_the_devices_of_their_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    offloaded = Placed(CPU, CPU, mesh="cuda")
    assert devices_of(offloaded) == (GPUS[2],)
    assert devices_of(Placed(CPU, CPU, mesh="cpu")) == (CPU,)
    # NCCL does not block the host: what it saw says nothing of waiting.
    assert Blocking(offloaded, lambda: 0).take() is None
    assert Blocking(Placed(CPU), lambda: 0).take() is not None


def test_parameters_that_fsdp1_keeps_on_the_host_are_used_on_its_compute_device() -> None:
    model = Placed(CPU)
    model.layer.compute_device = GPUS[1]
    assert devices_of(model) == (GPUS[1],)


def test_data_parallel_computes_on_all_of_its_devices() -> None:
    model = nn.DataParallel(nn.Linear(2, 2))
    model.device_ids, model.src_device_obj = [0, 1, 2], GPUS[0]
    assert devices_of(model) == tuple(GPUS)


def test_the_peak_of_a_process_is_that_of_its_devices_together(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = {GPUS[0]: 3e14, GPUS[1]: 1e14}

    def peak(device: torch.device, dtype: str, peak_flop_per_s: float | None = None, **_: object) -> Peak:
        source = "user" if peak_flop_per_s else "table"
        return Peak(flop_per_s=peak_flop_per_s or stated[device], dtype=dtype, device=str(device), source=source)

    monkeypatch.setattr("flopmeter.monitor.measuring.peak_flops", peak)
    for module in ("measuring", "header"):
        monkeypatch.setattr(f"flopmeter.monitor.{module}.devices_of", lambda _: (GPUS[0], GPUS[1]))
    model = nn.Linear(4, 4)
    source = FlopSource([model], MonitorConfig.load({}), lambda *_, **__: None)
    assert source.peaks == {"fp32": 4e14}
    assert source.recorded_peaks["fp32"]["note"] == "Of 2 devices together."
    config = MonitorConfig.load({"monitoring": {"peak_flop_per_s": 5e14}})
    assert FlopSource([model], config, lambda *_, **__: None).peaks == {"fp32": 5e14}
