"""Waits of FSDP2 on a simulated device; torch's own classes call us, on a job of one where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from flopmeter.monitor.device_time import DeviceTime
from flopmeter.schema import PHASES
from flopmeter.timing.cuda import ShardedWaits
from flopmeter.timing.events import FIRST_STEPS
from simulated_device import MS, US, SimulatedDevice, SimulatedEvents, Stream, timeline_on

FORWARD, BACKWARD = PHASES.index("forward"), PHASES.index("backward")


class FakeGroup:
    """What `wait_for_unshard` is called on: weights that are gathered on another stream."""

    def __init__(self, device: SimulatedDevice, gathering: Stream) -> None:
        self._all_gather_result = SimpleNamespace(all_gather_event=gathering)
        self.device_handle = SimpleNamespace(current_stream=lambda: SimpleNamespace(wait_event=device.stream.wait_for))


class Loop:
    """A sharded model: every layer's weights take 3 ms to gather, of which 2 ms are hidden; 1 ms of computing each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_events: int = 64) -> None:
        self.device, self.phase = SimulatedDevice(), FORWARD
        self.gathering = self.device.new_stream()
        monkeypatch.setattr(FSDPParamGroup, "wait_for_unshard", lambda group: self.copy_out())
        monkeypatch.setattr(FSDPState, "_root_post_backward_final_callback", lambda state: self.wait_for_gradients())
        self.waits = ShardedWaits(SimulatedEvents(self.device, num_events), lambda: self.phase)
        self.waits.attach()
        self.timeline = timeline_on(self.device)
        self.device_time = DeviceTime(self.timeline, lambda *_, **__: None, every=1000)
        self.device_time.waits = self.waits
        self.told: list[dict[str, float]] = []
        self.device_time.on_step = self.told.append

    def copy_out(self) -> None:
        self.device.stream.launch(0.5 * MS)  # not waiting: it belongs to the phase

    def wait_for_gradients(self) -> None:
        self.device.stream.launch(0.0)
        self.device.stream.wait_until(self.device.stream.free_at_s + 4 * MS)

    def step(self, number: int, num_layers: int = 3) -> None:
        main = self.device.stream
        for self.phase, name in ((FORWARD, "forward"), (BACKWARD, "backward")):
            if self.device_time.is_marking:
                self.timeline.mark(name)
            for _ in range(num_layers):
                self.gathering.free_at_s = main.free_at_s + 1 * MS  # that much is left of it
                FSDPParamGroup.wait_for_unshard(FakeGroup(self.device, self.gathering))
                main.launch(1 * MS)
        FSDPState._root_post_backward_final_callback(None)
        self.device_time.end_step(number)
        self.device_time.take_finished(number)
        main.synchronize()


def test_waits_are_taken_out_of_their_phases_on_sampled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    for number in range(50):
        loop.step(number)
    assert len(loop.told) == 3  # steps 13, 34 and 47, by the hash of their numbers
    for phase_s in loop.told:
        # Three layers: 1 ms of computing and 0.5 of copying each; 1 ms of waiting each, and 4 at the end.
        assert phase_s["forward"] == pytest.approx(4.5 * MS, abs=20 * US)
        assert phase_s["backward"] == pytest.approx(4.5 * MS, abs=20 * US)
        assert phase_s["communication"] == pytest.approx((3 + 3 + 4) * MS, abs=20 * US)


def test_a_step_with_more_waits_than_events_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, num_events=12)  # six waits; the step has seven
    for number in range(FIRST_STEPS):
        loop.step(number)
    assert loop.told == []


def test_nothing_is_recorded_on_other_steps_and_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    loop.waits.end_step(0, begins=True)
    loop.device.is_capturing = True  # the simulated device raises what no `except Exception` catches
    FSDPParamGroup.wait_for_unshard(FakeGroup(loop.device, loop.gathering))
    loop.device.is_capturing = False
    loop.waits.end_step(1, begins=False)
    assert loop.waits.take(1) is None
    FSDPParamGroup.wait_for_unshard(FakeGroup(loop.device, loop.gathering))
    assert loop.device.num_records == 0


def test_with_one_connection_no_event_stands_beside_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    loop = Loop(monkeypatch)
    for number in range(1, FIRST_STEPS + 1):
        loop.step(number)
    assert loop.told == []  # how long the device waited in a phase is unknown
    # Of each step: the start of forward and of backward, and its end.
    assert loop.device.num_records == 3 * FIRST_STEPS


def test_a_failing_event_switches_it_off_and_the_pass_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(monkeypatch)
    monkeypatch.setattr(SimulatedEvents, "record", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
    loop.waits.end_step(0, begins=True)
    for _ in range(2):
        FSDPParamGroup.wait_for_unshard(FakeGroup(loop.device, loop.gathering))
    assert loop.device.stream.free_at_s > 0  # the copy ran
    loop.waits.end_step(1, begins=False)
    assert [record.message for record in caplog.records] == [
        "waits of FSDP2 are not measured from here on: RuntimeError: device lost"
    ]


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(os.environ, "MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_torch_calls_both_places_and_gets_them_back() -> None:
    before = (FSDPParamGroup.wait_for_unshard, FSDPState._root_post_backward_final_callback)
    model = nn.Sequential(*[fully_shard(nn.Linear(4, 4)) for _ in range(3)])
    fully_shard(model)
    device, calls = SimulatedDevice(), []
    waits = ShardedWaits(SimulatedEvents(device), lambda: BACKWARD)
    waits._unsharding = _noting(waits._unsharding, calls)  # type: ignore[method-assign]
    waits.attach()
    waits.end_step(0, begins=True)
    model(torch.ones(2, 4)).sum().backward()
    waits.end_step(1, begins=False)
    device.stream.synchronize()
    # Three layers and a root that owns nothing, forward and backward; a CPU has no event for the gathered weights.
    assert len(calls) >= 6
    found = waits.take(1)
    assert found is not None
    assert found.keys() == {"backward"}
    assert device.num_records == 2  # around the last callback
    waits.detach()
    assert (FSDPParamGroup.wait_for_unshard, FSDPState._root_post_backward_final_callback) == before


def _noting(make: Any, calls: list[Any]) -> Any:
    def make_noting(original: Any) -> Any:
        waiting = make(original)

        def noted(group: Any) -> Any:
            calls.append(group)
            return waiting(group)

        return noted

    return make_noting
