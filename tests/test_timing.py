from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.overrides import TorchFunctionMode

from flopmeter.schema import PHASES
from flopmeter.timing import BACKWARD, DATA_WAIT, FORWARD, HOST_TO_DEVICE, OTHER, PhaseClock, StepTime, split
from flopmeter.timing.late import HostCopies, LateNumber, LateNumbers, _Slots, to_host
from simulated_device import UNKNOWN, Queue


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def time_() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(monkeypatch)


@pytest.fixture
def clock(time_: FakeClock) -> PhaseClock:
    clock = PhaseClock(time_)
    clock.start()
    return clock


def seconds(step: StepTime) -> tuple[float, dict[str, float]]:
    phases = {name: ns / 1e9 for name, ns in zip(PHASES, step.phase_ns, strict=True) if ns}
    return step.step_ns / 1e9, phases


def test_a_step_lasts_from_the_end_of_the_last_one(clock: PhaseClock, time_: FakeClock) -> None:
    time_.pass_s(2)
    assert seconds(split(clock.take())) == (2.0, {"other": 2.0})
    time_.pass_s(3)
    assert seconds(split(clock.take())) == (3.0, {"other": 3.0})


def test_every_moment_belongs_to_one_phase(clock: PhaseClock, time_: FakeClock) -> None:
    time_.pass_s(0.5)
    clock.switch(FORWARD)
    time_.pass_s(1)
    clock.switch(BACKWARD)
    time_.pass_s(2)
    clock.switch(OTHER)
    time_.pass_s(0.25)
    assert seconds(split(clock.take())) == (3.75, {"forward": 1.0, "backward": 2.0, "other": 0.75})


def test_phases_are_summed_over_micro_batches(clock: PhaseClock, time_: FakeClock) -> None:
    for _ in range(2):
        with clock.phase(FORWARD):
            time_.pass_s(1)
        time_.pass_s(0.5)
    assert seconds(split(clock.take())) == (3.0, {"forward": 2.0, "other": 1.0})
    assert seconds(split(clock.take())) == (0.0, {})


def test_a_phase_inside_another_is_taken_out_of_it(clock: PhaseClock, time_: FakeClock) -> None:
    with clock.phase(FORWARD):
        time_.pass_s(1)
        with clock.phase(DATA_WAIT):
            time_.pass_s(5)
        time_.pass_s(1)
    assert seconds(split(clock.take())) == (7.0, {"forward": 2.0, "data_wait": 5.0})


def test_a_pause_is_no_part_of_the_step(clock: PhaseClock, time_: FakeClock) -> None:
    time_.pass_s(1)
    with clock.pause() as lasted_s:
        time_.pass_s(10)
    time_.pass_s(1)
    assert lasted_s() == 10.0
    assert split(clock.take()).step_ns == 2_000_000_000


def test_a_pause_within_a_pause_is_taken_out_once(clock: PhaseClock, time_: FakeClock) -> None:
    with clock.pause():
        time_.pass_s(1)
        with clock.pause() as inner_s:
            time_.pass_s(2)
    assert inner_s() == 2.0
    time_.pass_s(5)
    assert split(clock.take()).step_ns == 5_000_000_000


def test_a_phase_or_pause_that_raises_is_timed_all_the_same(clock: PhaseClock, time_: FakeClock) -> None:
    with pytest.raises(RuntimeError), clock.phase(FORWARD):
        time_.pass_s(1)
        raise RuntimeError
    with pytest.raises(RuntimeError), clock.pause():
        time_.pass_s(4)
        raise RuntimeError
    assert seconds(split(clock.take())) == (1.0, {"forward": 1.0})


def test_marks_before_the_start_do_not_count_but_the_phase_goes_on(clock: PhaseClock, time_: FakeClock) -> None:
    clock.switch(FORWARD)
    time_.pass_s(1)
    clock.switch(OTHER)
    clock.start()
    time_.pass_s(2)
    assert seconds(split(clock.take())) == (2.0, {"other": 2.0})


def test_time_before_the_start_does_not_count(time_: FakeClock) -> None:
    clock = PhaseClock(time_)
    time_.pass_s(100)
    clock.start()
    time_.pass_s(1)
    assert split(clock.take()).step_ns == 1_000_000_000


def test_a_late_number_is_the_one_at_the_time_of_taking() -> None:
    loss = torch.tensor(8.0, requires_grad=True) * 1
    value = LateNumbers().take(loss)
    with torch.no_grad():
        loss /= 4
    assert value == 8.0


def test_a_late_number_does_not_keep_the_graph_alive() -> None:
    weight = torch.ones(3, requires_grad=True, device="meta")
    hidden = weight * 2
    loss = hidden.sum()
    numbers = LateNumbers()
    value = numbers.take(loss)
    graph = weakref.ref(hidden)
    del hidden, loss
    gc.collect()
    assert graph() is None
    assert isinstance(value, LateNumber)


def test_a_plain_number_is_there_at_once() -> None:
    assert LateNumbers().take(1.5) == 1.5


def test_taking_from_a_device_reads_nothing() -> None:
    # On the meta device there is no value to read: any .item(), .cpu() or bool() raises.
    value = LateNumbers().take(torch.ones(1, device="meta", requires_grad=True) * 2)
    assert isinstance(value, LateNumber)
    assert value.is_ready()
    with pytest.raises(RuntimeError, match="meta"):
        value.read()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_norm_that_every_rank_has_whole_is_taken_from_this_one(mesh: DeviceMesh) -> None:
    norm = DTensor.from_local(torch.ones((), device="meta"), mesh, [Replicate()], run_check=False)  # as FSDP2's is
    assert isinstance(LateNumbers().take(norm), LateNumber)
    assert LateNumbers().take(DTensor.from_local(torch.tensor(2.5), mesh, [Replicate()])) == 2.5


def test_a_number_that_is_spread_over_the_ranks_is_unknown_and_no_collective(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = LateNumbers()
    for _ in range(3):
        assert math.isnan(numbers.take(DTensor.from_local(torch.tensor(2.5), mesh, [Partial()])))
    assert caplog.text.count("full_tensor") == 1


def test_slots_that_were_made_in_inference_mode_hold_numbers_outside_of_it() -> None:
    with torch.inference_mode():
        slots = _Slots(torch.device("cpu"), num_slots=2)
        first = slots.put(torch.tensor(1.0))
    second = slots.put(torch.tensor(2.0))
    assert isinstance(first, LateNumber)
    assert isinstance(second, LateNumber)
    assert (first.read(), second.read()) == (1.0, 2.0)


def test_a_copy_goes_to_the_host_whatever_the_default_device_is() -> None:
    class OnCuda:
        """As far as the copy looks at it."""

        shape, dtype, device = torch.Size([3]), torch.int64, torch.device("cuda", 0)

    made: list[dict[str, Any]] = []

    class Empty(TorchFunctionMode):
        """Makes what is asked for without CUDA, beneath the default device."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.empty:
                made.append(kwargs)
                return SimpleNamespace(copy_=lambda tensor, non_blocking: tensor)
            return func(*args, **(kwargs or {}))

    with Empty(), torch.device("meta"):
        to_host(OnCuda())  # type: ignore[arg-type]
    assert [(kwargs["device"], kwargs["pin_memory"]) for kwargs in made] == [("cpu", True)]


def test_copies_that_were_read_elsewhere_die_where_new_ones_are_made(queue: Queue) -> None:
    copies, threads = HostCopies(), []
    for _ in range(3):
        record = [torch.ones(1)]
        weakref.finalize(record[0], lambda: threads.append(threading.current_thread()))
        reader = threading.Thread(target=copies.used.append, args=(record,))
        del record
        reader.start()
        reader.join()
        del reader
    assert threads == []
    copies.put(torch.ones(1))
    assert threads == [threading.current_thread()] * 2  # the last one may still be in use


def test_a_slot_is_used_again_only_after_it_was_read() -> None:
    slots = _Slots(torch.device("cpu"), num_slots=2)  # the host stands in for a device: the copies are real
    first, second, third = (slots.put(torch.tensor(float(value))) for value in (1, 2, 3))
    assert isinstance(first, LateNumber)
    assert isinstance(second, LateNumber)
    assert isinstance(third, float)
    assert math.isnan(third)  # no slot was free: unknown, rather than another step's value
    assert first.read() == 1.0
    fourth = slots.put(torch.tensor(4.0))
    assert isinstance(fourth, LateNumber)
    assert (second.read(), fourth.read()) == (2.0, 4.0)


def test_an_error_of_the_users_on_the_device_does_not_come_out_of_us() -> None:
    class BrokenEvent:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: device-side assert triggered")

    value = LateNumber(torch.tensor(1.0), BrokenEvent(), [])
    assert value.is_ready()
    assert math.isnan(value.read())  # what the slot held before is another step's


def test_copies_are_there_when_the_device_has_passed_the_last_of_them(queue: Queue) -> None:
    copies = HostCopies()
    assert copies.put(torch.ones(2)).tolist() == [1.0, 1.0]  # the device has nothing to do
    queue.device.stream.launch(2.0)
    second = copies.put(torch.ones(1))
    assert second.tolist() == [UNKNOWN]
    arrival, copies.arrival = copies.arrival, None
    assert arrival is not None
    queue.pass_s(1.0)
    assert not arrival.is_ready()
    queue.pass_s(1.0)
    assert arrival.is_ready()
    assert second.tolist() == [1.0]
    assert arrival.is_ready()  # whoever asks again gets no event of a later step
    assert queue.num_events == 1


def test_an_event_is_used_again_once_it_was_passed(queue: Queue) -> None:
    copies = HostCopies()
    for _ in range(50):
        copies.put(torch.ones(1))
        arrival, copies.arrival = copies.arrival, None
        assert arrival is not None
        queue.pass_s(1.0)
        assert arrival.is_ready()
    assert queue.num_events == 1


def test_copies_that_never_come_are_waited_for_in_bounded_time(queue: Queue) -> None:
    copies = HostCopies()
    queue.device.stream.launch(1e9)
    copies.put(torch.ones(1))
    assert copies.arrival is not None
    assert not copies.arrival.comes_within(0.01)


def test_no_event_of_copies_is_asked_for_while_a_graph_is_captured(queue: Queue) -> None:
    copies = HostCopies()
    copies.put(torch.ones(1))
    queue.pass_s(1.0)
    queue.device.is_capturing = True  # any query raises what no `except` of ours catches
    assert copies.arrival is not None
    assert not copies.arrival.is_ready()


def test_copies_are_lost_when_the_device_fails(queue: Queue) -> None:
    queue.device.fail_at_query = 1
    copies = HostCopies()
    copies.put(torch.ones(1))
    assert copies.arrival is not None
    assert copies.arrival.is_ready()
    assert copies.arrival.is_lost
    assert not copies.arrival.comes_within(0.0)


def test_on_the_host_there_is_nothing_to_copy() -> None:
    copies, tensor = HostCopies(), torch.ones(1)
    assert copies.put(tensor) is tensor
    assert copies.arrival is None


def test_a_loop_that_never_steps_keeps_its_times_in_bounded_memory(clock: PhaseClock, time_: FakeClock) -> None:
    for _ in range(5000):
        clock.switch(FORWARD)
        time_.pass_s(1)
        clock.switch(OTHER)
        time_.pass_s(2)
    marks = clock.take()
    assert len(marks) <= 4100
    assert seconds(split(marks)) == (15_000.0, {"forward": 5000.0, "other": 10_000.0})


def test_the_copy_to_the_device_does_not_go_on_after_a_named_phase(clock: PhaseClock, time_: FakeClock) -> None:
    clock.switch(HOST_TO_DEVICE)  # a batch has come
    time_.pass_s(1)
    with clock.phase(FORWARD):
        time_.pass_s(2)
    time_.pass_s(4)
    assert seconds(split(clock.take())) == (7.0, {"host_to_device": 1.0, "forward": 2.0, "other": 4.0})
