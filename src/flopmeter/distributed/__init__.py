"""What did the other ranks see? One object per rank, between the monitor and the rest of the job.

    ranks = join_job(model, settings, phase=clock_phase, emit=write_event)       # None in a job of one
    ranks.add(RankStep(...))          # every step, from the monitor's background thread
    ranks.scale                       # from rank 0's numbers to the job's

Nothing here waits for another rank, and no collective is issued: notes are left in the job's store by a thread of our
own. A rank that dies, hangs, runs without the monitor or fails in here costs the others nothing but its row.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from threading import get_native_id
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn

from flopmeter.config.sections import Distributed
from flopmeter.distributed.blocking import Blocking
from flopmeter.distributed.exchange import Exchange, Greeting, Mailbox, Plan, next_prefix, own_connection
from flopmeter.distributed.layout import Layout, layout_of
from flopmeter.distributed.packet import (
    COMMUNICATION,
    LAST_WORD,
    Heard,
    Interval,
    JobScale,
    RankStep,
    Table,
    describe,
    metrics_of,
    scale_of,
)
from flopmeter.distributed.stragglers import StragglerWatch
from flopmeter.resources import Rate, ask, waited_s

__all__ = ["COMMUNICATION", "PATIENCE_S", "Emit", "JobScale", "RankStep", "Ranks", "join_job"]

logger = logging.getLogger("flopmeter")

PATIENCE_S = 1.0
"""What rank 0 gives the others' last packets at the end of the run."""
MOST_STEPS = 4096
"""While a packet waits to be sent, the interval after it grows to this many steps at most, then takes its place."""


Emit: TypeAlias = Callable[..., None]
"""Writes an event to the record: its name, what the sinks get of it (metrics by key, or None), and its fields."""


def join_job(
    model: nn.Module | None, settings: Distributed, phase: Callable[[], int], emit: Emit, device: str = "cpu"
) -> Ranks | None:
    """This process's part in a job of several; None when it is alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    return Ranks(model, settings, phase, emit, device)


class Ranks:
    """One rank's part. `add` and `add_device` take numbers; everything else happens on the exchange's thread."""

    def __init__(
        self, model: nn.Module | None, settings: Distributed, phase: Callable[[], int], emit: Emit, device: str
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_writer = self.rank == 0
        """Whether this rank keeps the job's record."""
        self.memory_bytes = math.nan
        """The newest sample of the memory in use."""
        self.on_count: Callable[[Mapping[str, Any]], None] | None = None
        """Told what rank 0 has counted, where it holds for this rank too."""
        self.layout: Layout = layout_of(model, self.rank, self.world_size, settings.data_parallel_size)
        self.scale = self._usual_scale(device)
        self.blocking = Blocking(model, phase)
        self._every, self._at_least_s = settings.statistics_every, settings.statistics_s
        self._emit = emit
        self.measures = self.is_writer or self.layout.is_uneven
        """Whether this rank must count its FLOPs itself."""
        self._is_alike = True
        self._hosts: list[str] = []
        self._sharers = [1] * self.world_size
        self._is_broken = False
        self._watch = StragglerWatch()
        # Of the thread that trains, which is this one; known from the second look on.
        self._starvation = Rate(partial(waited_s, get_native_id()), time.monotonic)
        ask(self._starvation)
        self._interval = self._new_interval(1)
        self._heard = Heard(self.world_size)
        prefix = next_prefix()
        self.exchange = Exchange(
            self.rank,
            self.world_size,
            Greeting(
                host=socket.gethostname(), device=device, digest=self.layout.digest, is_uneven=self.layout.is_uneven
            ),
            lambda: Mailbox(own_connection(), prefix),
            on_joined=self._on_joined,
            on_packets=self._on_packets,
            on_plan=self._on_plan,
            on_off=self._on_off,
            join_s=settings.join_s,
        )

    def start(self) -> None:
        """Begin to listen and to talk."""
        self.blocking.attach()
        self.exchange.start()
        if self.is_writer and self.layout.note:
            self._emit("warning", message=self.layout.note)

    def add(self, step: RankStep, *, is_typical: bool = True) -> None:
        """Take a step; one that was measured or warmed up does not represent the rank."""
        if self._is_broken:
            return
        interval = self._interval
        try:
            self.exchange.note_first_step()
            if is_typical:
                interval.add(step)
            is_full = is_typical and interval.num_steps >= self._every and interval.seconds >= self._at_least_s
            if is_full and (not self.exchange.is_behind or interval.num_steps >= MOST_STEPS):
                self.exchange.post(self._packed())
                self._interval = self._new_interval(interval.index + 1)
        except Exception as error:  # noqa: BLE001 - the step must reach the record all the same
            self._is_broken = True  # nothing more is told of this rank; the others need not wait for it
            self.exchange.post(LAST_WORD)
            self._on_off(f"{type(error).__name__}: {error}")

    def add_device(self, phase_s: Mapping[str, float]) -> None:
        """Take a step as the device went through it, by phase; `COMMUNICATION` is one of them."""
        self._interval.add_device(phase_s)

    def note_resources(self, metrics: Mapping[str, float]) -> None:
        """Take a sample of the machine: the memory in it is compared between ranks."""
        host_bytes = metrics.get("resource/process_memory_bytes", math.nan)
        self.memory_bytes = metrics.get("resource/gpu_memory_bytes", host_bytes)

    def publish(self, count: Mapping[str, Any]) -> None:
        """Rank 0 has counted: let the others know."""
        self.exchange.publish(count)

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """The run is over; bounded in time whatever the others do."""
        self.blocking.detach()
        self.exchange.close(patience_s, LAST_WORD if self._is_broken else self._packed(is_last=True))

    def _packed(self, *, is_last: bool = False) -> bytes:
        self._interval.memory_bytes = self.memory_bytes
        starved_share = ask(self._starvation)
        self._interval.starved_share = math.nan if starved_share is None else starved_share
        return self._interval.pack(is_last=is_last)

    def _new_interval(self, number: int) -> Interval:
        return Interval(index=number, weight=1.0 if self.layout.counts_tokens else 0.0)

    def _usual_scale(self, device: str) -> JobScale:
        """Until the ranks have spoken: all work as rank 0 does."""
        if not self.is_writer:
            return JobScale(flop=1.0, tokens=1.0, samples=1.0, devices=1.0)
        size = float(self.world_size)
        num_groups = size / self.layout.num_sharing
        sharers = float(os.environ.get("LOCAL_WORLD_SIZE", 1)) if device == "cpu" else 1.0
        return JobScale(flop=size, tokens=num_groups, samples=num_groups, devices=size / sharers)

    def _on_joined(self, greetings: list[Greeting]) -> None:
        devices = [(greeting.host, greeting.device) for greeting in greetings]
        self._hosts = [greeting.host for greeting in greetings]
        number = Counter(devices)
        self._sharers = [number[device] for device in devices]
        is_uneven = any(greeting.is_uneven for greeting in greetings)
        self._is_alike = not is_uneven and len({greeting.digest for greeting in greetings}) == 1
        if not self._is_alike:
            self._emit("warning", message="the ranks do not do the same work: each counts its own FLOPs")

    def _on_plan(self, plan: Plan, count: Mapping[str, Any] | None) -> None:
        self.measures = plan.is_uneven or plan.digest != self.layout.digest
        if count is not None and not self.measures and self.on_count is not None:
            self.on_count(count)

    def _on_packets(self, table: Table) -> None:
        is_missing, is_all_new, is_complete = self._heard.update(table, time.monotonic())
        if not is_complete and table["is_last"][0] != 1:
            return  # a spread over some of the ranks would name the wrong one
        fields = describe(table, is_missing)
        self._emit("ranks", metrics_of(fields), **fields)
        for rank in fields["missing"]:
            for name in ("model_flop", "tokens_processed", "samples"):  # its device is still there, its work is not
                table[name][rank] = 0.0
        self.scale = scale_of(table, self._sharers, self.scale, is_alike=self._is_alike)
        if is_all_new and (straggler := self._watch.update(table)) is not None:
            host = self._hosts[straggler.rank] if straggler.rank is not None and self._hosts else None
            self._emit("straggler", host=host, **asdict(straggler))

    def _on_off(self, reason: str) -> None:
        self.measures = True
        logger.warning("rank %d: no statistics of the other ranks from here on: %s", self.rank, reason)
        self._emit("warning", message=f"no statistics of the other ranks from here on: {reason}")
