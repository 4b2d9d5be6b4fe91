"""Ranks in one process: packets, sums, verdicts and the protocol, on numbers that can be checked by hand."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from flopmeter import distributed as distributed_module
from flopmeter.config.sections import Distributed
from flopmeter.distributed import Ranks
from flopmeter.distributed.blocking import Blocking
from flopmeter.distributed.exchange import Exchange, Greeting, Mailbox, Plan
from flopmeter.distributed.layout import layout_of
from flopmeter.distributed.packet import (
    FIELDS,
    MISSED_S,
    NO_PACKET,
    PACKET_BYTES,
    Heard,
    Interval,
    JobScale,
    RankStep,
    Table,
    describe,
    metrics_of,
    scale_of,
    unpack,
)
from flopmeter.distributed.stragglers import SUSTAINED, SUSTAINED_IF_STARVED, Straggler, StragglerWatch
from flopmeter.schema import METRICS_BY_KEY, PHASES
from interrupted import every_moment

ALONE = JobScale(flop=1.0, tokens=1.0, samples=1.0, devices=1.0)


def rank_step(index: int = 0, **changes: Any) -> RankStep:
    """A step of one second: half of it forward, half backward, of which 0.2 s are waiting."""
    values: dict[str, Any] = {
        "step_s": 1.0, "phase_s": [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0],
        "blocked_s": [0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0],
        "model_flop": 100.0, "ideal_s": 0.25, "tokens_processed": 8, "samples": 2,
    }  # fmt: skip
    return RankStep(number=index, **{**values, **changes})


def packet(*steps: RankStep, index: int = 1, weight: float = 1.0) -> bytes:
    interval = Interval(index=index, weight=weight)
    for step in steps:
        interval.add(step)
    return interval.pack()


def row(data: bytes) -> dict[str, float]:
    return {name: values[0] for name, values in unpack([data], 1).items()}


def table(num_ranks: int, **columns: float | list[float]) -> Table:
    """One value per rank, all alike but for the columns given."""
    result = unpack([packet(rank_step(0), rank_step(1))] * num_ranks, num_ranks)
    return result | {
        name: values if isinstance(values, list) else [values] * num_ranks for name, values in columns.items()
    }


def test_a_packet_has_21_numbers_and_168_bytes() -> None:
    assert len(FIELDS) == 21
    assert len(packet(rank_step())) == PACKET_BYTES == 168


def test_a_packet_holds_means_and_own_time_is_what_is_not_waiting() -> None:
    found = row(packet(rank_step(4), rank_step(5, step_s=2.0, phase_s=[0, 0, 1.0, 1.0, 0, 0, 0], samples=4)))
    assert found["num_steps"] == 2
    assert found["last_step"] == 5
    assert found["step_s"] == pytest.approx(1.5)
    assert found["forward_s"] == pytest.approx(0.75)
    assert found["backward_s"] == pytest.approx((0.3 + 0.8) / 2)
    assert found["blocked_s"] == found["exposed_s"] == pytest.approx(0.2)
    assert found["own_variance"] == pytest.approx(((0.8 - 1.3) ** 2 + (1.8 - 1.3) ** 2) / 1)
    assert found["samples"] == pytest.approx(3)
    assert found["peak_flop_per_s"] == pytest.approx(400)  # 100 FLOP would take a quarter of a second


def test_what_one_step_does_not_know_is_unknown_for_the_interval() -> None:
    found = row(packet(rank_step(0), rank_step(1, model_flop=None, blocked_s=None)))
    assert math.isnan(found["model_flop"])
    assert math.isnan(found["blocked_s"])
    assert math.isnan(found["forward_s"])
    assert found["step_s"] == 1.0


def test_the_devices_times_take_the_place_of_the_hosts() -> None:
    interval = Interval(index=1)
    interval.add(rank_step(blocked_s=None))
    interval.add_device({"forward": 0.3, "backward": 0.4, "communication": 0.1, "optimizer": 0.05})
    found = row(interval.pack())
    assert found["forward_s"] == pytest.approx(0.3)
    assert found["blocked_s"] == found["exposed_s"] == pytest.approx(0.1)


def test_a_device_that_does_not_mark_communication_apart_gives_no_own_time() -> None:
    interval = Interval(index=1)
    interval.add(rank_step(blocked_s=None))
    interval.add_device({"forward": 0.3, "backward": 0.5})
    assert math.isnan(row(interval.pack())["forward_s"])


def test_a_rank_whose_tokens_another_one_counts_adds_none() -> None:
    found = row(packet(rank_step(), weight=0.0))
    assert (found["tokens_processed"], found["samples"]) == (0, 0)
    assert found["model_flop"] == 100


def test_a_damaged_packet_counts_as_nothing_said() -> None:
    found = unpack([b"", packet(rank_step()), b"xyz"], 4)
    assert found["interval"] == [0, 1, 0, 0]


def test_the_table_of_a_large_job_names_each_rank() -> None:
    torch.manual_seed(0)
    numbers = torch.rand(4096, len(FIELDS), dtype=torch.float64)
    packets = [bytes(memoryview(line.numpy().tobytes())) for line in numbers]  # little-endian doubles
    found = unpack(packets, 4096)
    assert found == dict(zip(FIELDS, numbers.T.tolist(), strict=True))
    fields = describe(found, [False] * 4096)
    step_s = numbers[:, FIELDS.index("step_s")]
    assert fields["stats"]["step_s"]["argmax"] == int(step_s.argmax())
    assert fields["stats"]["step_s"]["mean"] == pytest.approx(float(step_s.mean()))
    assert len(fields["own_s_by_rank"]) == 4096
    assert max(fields["own_s_by_rank"]) == pytest.approx(fields["stats"]["own_s"]["max"])


def test_the_spread_names_the_rank_and_leaves_out_the_missing() -> None:
    missing = [False, False, True, False]
    fields = describe(table(4, step_s=[1.0, 3.0, 9.0, 2.0]), missing)
    assert fields["stats"]["step_s"] == {"min": 1.0, "mean": 2.0, "max": 3.0, "argmax": 1}
    assert fields["missing"] == [2]
    assert fields["own_s_by_rank"][2] is None
    assert "memory_bytes" not in fields["stats"]  # nobody knew it


def test_every_rank_metric_is_in_the_schema() -> None:
    fields = describe(table(2, memory_bytes=5.0), [False] * 2)
    found = metrics_of(fields)
    assert found.keys() == {key for key in METRICS_BY_KEY if key.startswith("rank/")}


def test_the_jobs_numbers_are_sums_over_the_ranks() -> None:
    found = table(4, model_flop=[100.0, 50.0, 100.0, 50.0], tokens_processed=[8.0, 0.0, 8.0, 0.0], samples=2.0)
    found["peak_flop_per_s"] = [400.0, 400.0, 200.0, 200.0]
    scale = scale_of(found, [1, 1, 1, 1], ALONE, is_alike=True)
    assert scale == JobScale(flop=3.0, tokens=2.0, samples=4.0, devices=3.0)


def test_a_device_that_ranks_share_counts_once() -> None:
    assert scale_of(table(4), [2, 2, 2, 2], ALONE, is_alike=True).devices == 2.0


def test_a_rank_that_has_not_counted_yet_does_what_rank_0_does() -> None:
    found = table(3, model_flop=[100.0, math.nan, 40.0])
    assert scale_of(found, [1, 1, 1], ALONE, is_alike=True).flop == pytest.approx(2.4)
    assert scale_of(found, [1, 1, 1], ALONE, is_alike=False).flop == pytest.approx((100 + 70 + 40) / 100)


def test_numbers_that_rank_0_does_not_know_stay_as_they_were() -> None:
    usual = JobScale(flop=4.0, tokens=2.0, samples=2.0, devices=4.0)
    found = table(4, model_flop=math.nan, tokens_processed=math.nan, peak_flop_per_s=math.nan)
    scale = scale_of(found, [1] * 4, usual, is_alike=True)
    assert (scale.flop, scale.tokens, scale.devices) == (4.0, 2.0, 4.0)


def test_a_rank_is_missing_only_when_it_was_silent_for_long() -> None:
    heard = Heard(2)
    assert heard.update(table(2, interval=1.0), now_s=0.0) == ([False, False], True, True)
    for now_s in (1.0, 2.0, MISSED_S - 1):
        assert heard.update(table(2, interval=[now_s + 2, 1.0]), now_s) == ([False, False], False, True)
    # All that still take part have said something new.
    assert heard.update(table(2, interval=[99.0, 1.0]), now_s=MISSED_S) == ([False, True], True, True)
    assert heard.update(table(2, interval=[100.0, 2.0]), now_s=MISSED_S + 1)[0] == [False, False]


def watch(*tables: Table) -> list[Straggler | None]:
    straggler_watch = StragglerWatch()
    return [straggler_watch.update(found) for found in tables]


def slow(rank: int, extra_s: float, phase: str = "forward", num_ranks: int = 4, variance: float = 0.0) -> Table:
    """One rank takes longer; the others wait for it, so that all steps last the same."""
    found = table(num_ranks, own_variance=variance, num_steps=50.0, last_step=99.0, step_s=1.0 + extra_s)
    found[f"{phase}_s"][rank] += extra_s
    found["blocked_s"] = [
        blocked_s + (extra_s if other != rank else 0.0) for other, blocked_s in enumerate(found["blocked_s"])
    ]
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_with_more_own_time_is_named_after_three_intervals(phase: str) -> None:
    found = watch(*[slow(2, 0.3, phase)] * 5)
    assert found[: SUSTAINED - 1] == [None] * (SUSTAINED - 1)
    expected = Straggler(rank=2, phase=phase, extra_s=pytest.approx(0.3), since_step=50, cause="slow_peer")
    assert found[SUSTAINED - 1 :] == [expected, None, None]  # once, not at every interval


def test_an_excess_below_a_tenth_of_the_step_is_not_worth_a_name() -> None:
    assert watch(*[slow(1, 0.09)] * 5) == [None] * 5


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    assert watch(*[slow(1, 0.3), slow(2, 0.3)] * 4) == [None] * 8
    assert watch(*[slow(1, 0.3), slow(1, 0.3), slow(1, 0.0)] * 3) == [None] * 9


def test_what_begins_in_the_middle_of_an_interval_is_named_all_the_same() -> None:
    # A tenth of a step in the interval in which it begins, half a step from then on: less than a third of it.
    named = watch(slow(1, 0.12), *[slow(1, 0.5)] * SUSTAINED)
    assert named[:-1] == [None] * SUSTAINED
    assert named[-1] is not None
    assert (named[-1].rank, named[-1].since_step) == (1, 50)


def test_noise_is_not_named_until_it_lasts() -> None:
    # The mean of 50 steps is off by sqrt(2 * 25 / 50) = 1: 0.3 is not three standard errors in any twelve intervals.
    assert watch(*[slow(1, 0.3, variance=25.0)] * 20) == [None] * 20
    # With sqrt(2 * 0.5 / 50) = 0.141, the sum over three is 0.9 against 3 * 0.141 * sqrt(3) = 0.73.
    assert watch(*[slow(1, 0.3, variance=0.5)] * 3)[-1] is not None


def test_a_rank_that_waits_for_a_core_must_do_so_for_long() -> None:
    found = slow(1, 0.3)
    found["starved_s"] = [0.1, 0.2, 0.1, 0.1]  # 0.2 of the 0.3
    named = watch(*[found] * SUSTAINED_IF_STARVED)
    assert [straggler is None for straggler in named] == [True] * (SUSTAINED_IF_STARVED - 1) + [False]


def test_a_packet_has_the_share_of_time_that_the_training_thread_was_without_a_core(
    join_fake_job: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    join_fake_job(1, 2)
    asked: list[int] = []
    waited_s, now_s = iter([0.1, 0.2]), [10.0]

    def waited(thread: int) -> float:
        asked.append(thread)
        return next(waited_s)

    monkeypatch.setattr(distributed_module, "waited_s", waited)
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    ranks = Ranks(None, Distributed(), lambda: 0, lambda *_, **__: None, "cpu")
    ranks.add(rank_step())  # of one second
    now_s[0] += 0.4
    with ThreadPoolExecutor(1) as background:
        assert row(background.submit(ranks._packed).result())["starved_s"] == pytest.approx(0.25)  # 0.1 s of 0.4 s
        assert math.isnan(row(background.submit(ranks._packed).result())["starved_s"])  # where Linux does not tell
    assert asked == [threading.get_native_id()] * 3


def test_a_rank_that_cannot_tell_does_not_hide_a_slow_one() -> None:
    found = slow(2, 0.3)
    found["forward_s"][0] = math.nan
    named = watch(*[found] * 3)[-1]
    assert named is not None
    assert named.rank == 2


def test_a_wait_that_grows_on_all_ranks_is_the_network() -> None:
    usual, long = table(4, blocked_s=0.05, exposed_s=0.05), table(4, blocked_s=0.6, exposed_s=0.6, step_s=1.55)
    named = watch(*[usual] * 3, *[long] * 3)[-1]
    assert named is not None
    assert (named.rank, named.phase, named.cause) == (None, "backward", "slow_network")
    assert named.extra_s == pytest.approx(0.55)


def test_a_job_that_always_communicates_much_is_not_slow() -> None:
    assert watch(*[table(4, blocked_s=0.6, exposed_s=0.6)] * 8) == [None] * 8


@pytest.fixture
def mailboxes() -> Callable[[], Mailbox]:
    store = dist.HashStore()
    return lambda: Mailbox(store, "test")


class Rank:
    """One rank's side of the protocol, with what it was told."""

    def __init__(
        self, rank: int, size: int, connect: Callable[[], Mailbox], join_s: float = 30.0, **hello: Any
    ) -> None:
        self.greetings: list[Greeting] = []
        self.tables: list[torch.Tensor] = []
        self.plans: list[tuple[Plan, Mapping[str, Any] | None]] = []
        self.reasons: list[str] = []
        greeting = Greeting(**{"host": "h", "device": "cpu", "digest": "same", **hello})
        self.exchange = Exchange(
            rank, size, greeting, connect, on_joined=self.greetings.extend, on_packets=self.tables.append,
            on_plan=lambda plan, count: self.plans.append((plan, count)), on_off=self.reasons.append, join_s=join_s,
        )  # fmt: skip


def until(is_done: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.005)


def start(*ranks: Rank) -> None:
    for rank in ranks:
        rank.exchange.start()


def finish(*ranks: Rank) -> None:
    for rank in reversed(ranks):
        rank.exchange.close(1.0, packet(rank_step(), index=99))


def test_ranks_join_count_once_and_exchange_packets(mailboxes: Callable[[], Mailbox]) -> None:
    first, second = Rank(0, 2, mailboxes), Rank(1, 2, mailboxes, digest="other")
    start(first, second)
    until(lambda: second.plans)
    assert [greeting.digest for greeting in first.greetings] == ["same", "other"]
    first.exchange.publish({"flop": 5})
    until(lambda: second.plans[-1][0].version == 1)
    assert second.plans[-1][1] == {"flop": 5}
    second.exchange.post(packet(rank_step(7), index=1))
    until(lambda: mailboxes().read(["packet/1"])[0] == packet(rank_step(7), index=1))
    first.exchange.post(packet(rank_step(7), index=1))
    until(lambda: first.tables)
    assert first.tables[0]["last_step"] == [7, 7]
    finish(first, second)
    assert first.reasons == second.reasons == []


def test_a_packet_and_a_count_that_are_handed_over_in_the_middle_of_a_turn_go_out(
    mailboxes: Callable[[], Mailbox],
) -> None:
    old, new = packet(rank_step(1), index=1), packet(rank_step(2), index=2)
    ranks: list[Rank] = []

    def make_call() -> tuple[Callable[[], None], Callable[[], None]]:
        rank = Rank(0, 1, mailboxes)
        exchange = rank.exchange
        exchange._greet()
        exchange._turn()  # it is the only one, so there is a plan
        exchange.post(old)
        exchange.publish({"flop": 1})
        ranks.append(rank)
        return exchange._turn, lambda: (exchange.post(new), exchange.publish({"flop": 2}))[0]

    sent = []
    for _ in every_moment(make_call):
        ranks[-1].exchange._turn()
        mailbox = ranks[-1].exchange.mailbox
        assert mailbox is not None
        sent.append((mailbox.read(["packet/0"])[0], json.loads(mailbox.read(["count"])[0])))
    assert len(sent) > 50
    assert [number for number, told in enumerate(sent) if told != (new, {"flop": 2})] == []


def test_a_rank_that_never_joins_ends_the_statistics_and_nothing_else(mailboxes: Callable[[], Mailbox]) -> None:
    first, third = Rank(0, 3, mailboxes, join_s=0.1), Rank(2, 3, mailboxes, join_s=0.1)
    start(first, third)
    first.exchange.note_first_step()
    until(lambda: first.reasons)
    assert "rank 1 did not join" in first.reasons[0]
    first.exchange.publish({"flop": 5})  # what rank 0 counts still reaches those who are there
    third.exchange.post(packet(rank_step()))
    until(lambda: third.plans and third.plans[-1][0].version == 1)
    assert not third.plans[-1][0].has_statistics
    finish(first, third)
    assert first.tables == []


def test_without_rank_0_each_rank_is_told_to_count_for_itself(mailboxes: Callable[[], Mailbox]) -> None:
    second = Rank(1, 2, mailboxes, join_s=0.05)
    start(second)
    second.exchange.note_first_step()
    until(lambda: second.reasons)
    assert "rank 0 did not answer" in second.reasons[0]
    until(lambda: not second.exchange._thread.is_alive())


def test_a_store_that_fails_ends_the_statistics_with_the_reason() -> None:
    class DeadStore:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("connection reset by peer")

    def connect() -> Mailbox:
        mailbox = Mailbox(dist.HashStore(), "test")
        mailbox._store = DeadStore()
        return mailbox

    rank = Rank(0, 2, connect)
    start(rank)
    until(lambda: rank.reasons)
    assert rank.reasons == ["RuntimeError: connection reset by peer"]
    until(lambda: not rank.exchange._thread.is_alive())


def test_notes_are_overwritten_so_the_store_does_not_grow() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    first, second = (Rank(number, 2, lambda: Mailbox(store, "test")) for number in (0, 1))
    start(first, second)
    until(lambda: second.plans)
    first.exchange.publish({"flop": 0})
    until(lambda: second.plans[-1][0].version == 1)
    before = store.num_keys()
    for number in range(5):
        version, num_tables = second.plans[-1][0].version, len(first.tables)
        first.exchange.publish({"flop": number})
        first.exchange.post(packet(rank_step(), index=number + 1))
        until(lambda n=num_tables: len(first.tables) > n)
        second.exchange.post(packet(rank_step(), index=number + 1))
        until(lambda v=version: second.plans[-1][0].version > v)
    assert store.num_keys() == before
    finish(first, second)


@pytest.fixture
def join_fake_job() -> Iterator[Callable[[int, int], None]]:
    """A process group that talks to nobody, in which this process may be any rank of any job."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def join(rank: int, world_size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield join
    dist.destroy_process_group()


def test_nothing_is_said_of_the_ranks_before_all_have_spoken_or_the_run_is_over(
    join_fake_job: Callable[[int, int], None],
) -> None:
    join_fake_job(0, 2)
    events: list[dict[str, Any]] = []
    ranks = Ranks(None, Distributed(), lambda: 0, lambda event, metrics=None, **fields: events.append(fields), "cpu")
    slow = packet(rank_step(phase_s=[0.0, 0.0, 0.9, 0.5, 0.0, 0.0, 0.0]), index=1)
    ranks._on_packets(unpack([packet(rank_step(), index=1), NO_PACKET], 2))
    assert events == []
    ranks._on_packets(unpack([packet(rank_step(), index=2), slow], 2))
    assert [event["stats"]["own_s"]["argmax"] for event in events] == [1]
    last = Interval(index=2)
    last.add(rank_step())
    silent = Ranks(None, Distributed(), lambda: 0, lambda event, metrics=None, **fields: events.append(fields), "cpu")
    silent._on_packets(unpack([last.pack(is_last=True), NO_PACKET], 2))
    assert [event["stats"]["own_s"]["argmax"] for event in events] == [1, 0]


def test_steps_that_end_while_a_packet_waits_go_into_the_next_one(
    join_fake_job: Callable[[int, int], None], mailboxes: Callable[[], Mailbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    join_fake_job(1, 2)
    monkeypatch.setattr(distributed_module, "MOST_STEPS", 6)
    ranks = Ranks(None, Distributed(statistics_every=2, statistics_s=0.5), lambda: 0, lambda *_, **__: None, "cpu")
    is_answering = threading.Event()
    monkeypatch.setattr(ranks.exchange, "_connect", lambda: mailboxes() if is_answering.wait(20) else None)

    def told() -> dict[str, float]:
        return row(mailboxes().read(["packet/1"])[0])

    ranks.exchange.start()
    for number in range(10):  # 0 and 1 are a packet, 2 to 7 take its place, 8 and 9 wait for it to leave
        ranks.add(rank_step(number))
    is_answering.set()
    until(lambda: mailboxes().has(["packet/1"]) and told()["interval"] == 2)
    assert (told()["num_steps"], told()["last_step"]) == (6, 7)
    until(lambda: not ranks.exchange.is_behind)
    ranks.add(rank_step(10))
    until(lambda: told()["interval"] == 3)
    assert (told()["num_steps"], told()["last_step"]) == (3, 10)
    ranks.close(0.1)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def split_over(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def test_tensor_parallel_ranks_count_a_token_once(join_fake_job: Callable[[int, int], None]) -> None:
    join_fake_job(5, 8)  # coordinates (2, 1): the second of its pair
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    layout = layout_of(split_over(mlp(), mesh["tp"]), 5, 8)
    assert (layout.counts_tokens, layout.num_sharing, layout.num_split, layout.note) == (False, 2, 2, "")


def test_a_mesh_without_names_is_told_by_what_is_sharded(join_fake_job: Callable[[int, int], None]) -> None:
    join_fake_job(0, 4)
    layout = layout_of(split_over(mlp(), init_device_mesh("cpu", (4,))), 0, 4)
    assert (layout.counts_tokens, layout.num_sharing) == (True, 4)


@pytest.mark.parametrize("names", [None, ("anything",)])
def test_fsdp2_ranks_count_their_own_tokens(
    names: tuple[str] | None, join_fake_job: Callable[[int, int], None]
) -> None:
    join_fake_job(3, 4)
    model = fully_shard(mlp(), mesh=init_device_mesh("cpu", (4,), mesh_dim_names=names))
    layout = layout_of(model, 3, 4)
    assert (layout.counts_tokens, layout.num_sharing, layout.num_split) == (True, 1, 1)


def test_fsdp2_over_tensor_parallelism_shares_tokens_along_one_dimension(
    join_fake_job: Callable[[int, int], None],
) -> None:
    join_fake_job(6, 8)  # coordinates (3, 0)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(split_over(mlp(), mesh["tp"]), mesh=mesh["dp"])
    layout = layout_of(model, 6, 8)
    assert (layout.counts_tokens, layout.num_sharing, layout.num_split) == (True, 2, 2)


def test_pipeline_stages_are_seen_in_the_mesh_that_the_parameters_mesh_was_cut_from(
    join_fake_job: Callable[[int, int], None],
) -> None:
    join_fake_job(5, 8)  # coordinates (1, 1): second stage, second of its data-parallel ranks
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    layout = layout_of(fully_shard(mlp(), mesh=mesh["dp"]), 5, 8)
    assert (layout.counts_tokens, layout.num_sharing, layout.num_split) == (False, 2, 1)


def test_layers_that_every_tensor_parallel_rank_runs_in_full_are_named(
    join_fake_job: Callable[[int, int], None],
) -> None:
    join_fake_job(0, 2)
    model = nn.ModuleDict({"body": mlp(), "head": nn.Linear(8, 32)})
    split_over(model["body"], init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    assert "1 of 3 linear layers are not split over the model-parallel ranks (head)" in layout_of(model, 0, 2).note


def test_ranks_of_plain_models_count_their_own_tokens() -> None:
    layout = layout_of(nn.Linear(4, 4), rank=3, world_size=8)
    assert (layout.counts_tokens, layout.num_sharing, layout.note) == (True, 1, "")


def test_the_setting_says_how_many_groups_there_are() -> None:
    layouts = [layout_of(nn.Linear(4, 4), rank, 8, data_parallel_size=2) for rank in range(8)]
    assert [layout.counts_tokens for layout in layouts] == [True, False, False, False] * 2
    assert {layout.num_sharing for layout in layouts} == {4}


def test_models_of_other_shape_or_training_have_another_digest() -> None:
    def digest(model: nn.Module) -> str:
        return layout_of(model, 0, 2).digest

    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert digest(nn.Linear(4, 4)) == digest(nn.Linear(4, 4))
    assert len({digest(m) for m in (nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(4, 4).bfloat16(), frozen)}) == 4


def test_experts_make_the_work_uneven() -> None:
    assert not layout_of(nn.ModuleDict({"mlp": nn.Linear(4, 4)}), 0, 2).is_uneven
    assert layout_of(nn.ModuleDict({"experts": nn.Linear(4, 4)}), 0, 2).is_uneven


class FakePhase:
    """The phase that the clock is said to be in."""

    def __init__(self) -> None:
        self.now = PHASES.index("forward")

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_waits_are_booked_in_the_phase_in_which_they_fall() -> None:
    phase = FakePhase()
    blocking = Blocking(nn.Linear(2, 2), phase)
    blocking.attach()
    try:
        dist.barrier()
        first = blocking.take()
        phase.now = len(PHASES)  # a pause: lost time, but not the step's
        dist.barrier()
        assert blocking.take() == (0,) * len(PHASES)
    finally:
        blocking.detach()
    assert first is not None
    assert [name for name, waited_ns in zip(PHASES, first, strict=True) if waited_ns] == ["forward"]


@pytest.mark.usefixtures("group_of_one")
def test_waits_of_other_threads_are_not_the_steps() -> None:
    blocking = Blocking(nn.Linear(2, 2), FakePhase())
    blocking.attach()
    thread = threading.Thread(target=dist.barrier)
    try:
        thread.start()
        thread.join()
    finally:
        blocking.detach()
    assert blocking.take() == (0,) * len(PHASES)


def test_every_patch_is_taken_back() -> None:
    from torch.distributed import _functional_collectives as functional

    places = [
        (dist.Work, "wait"),
        (functional.AsyncCollectiveTensor, "wait"),
        (DistributedDataParallel, "_sync_buffers"),
    ]
    before = [getattr(owner, name) for owner, name in places]
    blocking = Blocking(None, FakePhase())
    blocking.attach()
    assert all(getattr(owner, name) is not found for (owner, name), found in zip(places, before, strict=True))
    blocking.detach()
    assert [getattr(owner, name) for owner, name in places] == before


@pytest.mark.usefixtures("group_of_one")
def test_exposed_communication_is_unknown_where_the_callback_must_not_be_queued() -> None:
    blocking = Blocking(DistributedDataParallel(nn.Linear(2, 2)), FakePhase())
    root = torch.ones(1, requires_grad=True) * 2
    for is_compiled in (False, True):
        with torch._dynamo.config.patch(compiled_autograd=is_compiled):
            blocking.on_backward(root)
            if not is_compiled:
                root.sum().backward()  # the engine calls our hook, and at the end our callback
            blocking.on_backward_end()
        assert (blocking.take() is None) == is_compiled


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("has_own_hook", [False, True])
def test_the_loops_own_hook_on_the_loss_and_a_second_backward_pass_are_left_alone(has_own_hook: bool) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    blocking = Blocking(model, FakePhase())
    loss, calls = model(torch.ones(1, 2)).sum(), []
    if has_own_hook:
        loss.register_hook(lambda grad: calls.append(float(grad)))
    for _ in range(2):
        blocking.on_backward(loss)
        loss.backward(retain_graph=True)
        blocking.on_backward_end()
        assert blocking.take() is not None  # the moment was seen
    assert calls == [1.0, 1.0] * has_own_hook
    assert torch.equal(model.module.weight.grad, torch.full((2, 2), 2.0))  # twice the input
