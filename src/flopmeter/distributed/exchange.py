"""Who says what to whom, and when? The protocol between the ranks, run by a thread of its own on each of them.

    join        each rank leaves a greeting; when rank 0 has seen them all, it leaves the plan. No plan, no statistics.
    interval    each rank leaves one packet every N steps, over its last one; rank 0 then reads the newest of each.
    count       rank 0 leaves what it counted beside a new plan; the others look at the plan once per interval.

Notes lie in the store that the job already has, under a prefix of ours. Only `set` and `multi_set` (nobody answers
them), `check`, and `multi_get` of notes that are known to be there are used: no call that waits for another rank, and
nothing on a process group, where a rank that skips our turn would pair it with a gradient. Notes are overwritten, never
added, so the store does not grow.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch.distributed as dist

from flopmeter.distributed.packet import NO_PACKET, Table, unpack
from flopmeter.torch_compat import default_store

logger = logging.getLogger("flopmeter")

TIMEOUT_S = 20.0
"""After so long a call to a store that hangs raises, in our own thread."""
FIRST_POLL_S, LONGEST_POLL_S = 0.05, 1.0
CLOSING_POLL_S = 0.02
EXIT_S = 5.0
"""So long may a call to the store keep a process that ends. Python ends a thread where it next takes the interpreter;
if that is on the way out of a store's call, C++ cannot unwind and aborts the process."""


_numbers = count()


class Plan(NamedTuple):
    """What rank 0 has decided; the others read it."""

    has_statistics: bool
    """Whether packets are exchanged at all."""
    digest: str
    """Shape of rank 0's model: its count holds where it is the same."""
    is_uneven: bool = False
    """Every rank counts for itself."""
    version: int = 0
    """Counts that rank 0 has published so far."""


class Greeting(NamedTuple):
    """What a rank says of itself when it joins."""

    host: str
    device: str
    """Names the device among those of the host; ranks that share one give the same name."""
    digest: str
    """Shape of the rank's model and of its place in the mesh."""
    is_uneven: bool = False
    """Whether its work depends on where a router sends tokens."""


class Mailbox:
    """Notes by name. Not for the training thread: a call may take as long as `TIMEOUT_S` when the store's host hangs.

    Args:
        store: Any torch store; tests pass one of their own.
        prefix: Set apart restarts of a job and monitors of a process, so that no stale note is read.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store: Any = dist.distributed_c10d.PrefixStore(prefix, store)

    def put(self, notes: Mapping[str, bytes]) -> None:
        """Leave these notes, in one call."""
        if len(notes) == 1:
            self._store.set(*next(iter(notes.items())))
        else:
            self._store.multi_set(list(notes), list(notes.values()))

    def has(self, names: Sequence[str]) -> bool:
        """Whether all of these notes are there."""
        return bool(self._store.check(list(names)))

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Notes that `has` has seen, in one call. On any other it would wait, up to the timeout."""
        return [bytes(note) for note in self._store.multi_get(list(names))]


def next_prefix() -> str:
    """A prefix that every rank comes to by itself, as long as all make their monitors in the same order."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"flopmeter/{restart}/{next(_numbers)}"


def own_connection() -> Any:
    """The job's store, over a connection of our own where it can give one. May take a while: not for training."""
    store: Any = default_store()
    try:
        own = store.clone()
        usual = store.timeout
        own.set_timeout(timedelta(seconds=TIMEOUT_S))
        if store.timeout != usual:  # an in-process store's copy is the store itself
            own.set_timeout(usual)
    except (AttributeError, NotImplementedError, RuntimeError):
        return store
    return own


class Exchange:
    """One rank's side. `post`, `publish` and `close` only hand over; all calls to the store are made by its thread.

    Args:
        connect: Opens the mailbox; called on the thread.
        on_joined: Rank 0: everybody's greeting, in rank order.
        on_packets: Rank 0: everybody's newest packet, as a table.
        on_plan: The others: the plan, and rank 0's count when it is a new one.
        on_off: Why there are no statistics from here on.
        join_s: Patience of the handshake, from the first step of this rank that ended.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        greeting: Greeting,
        connect: Callable[[], Mailbox],
        *,
        on_joined: Callable[[list[Greeting]], None],
        on_packets: Callable[[Table], None],
        on_plan: Callable[[Plan, Mapping[str, Any] | None], None],
        on_off: Callable[[str], None],
        join_s: float,
    ) -> None:
        self.mailbox: Any = None
        """The mailbox, once the thread has opened it."""
        self.plan: Plan | None = None
        self.cpu_s = 0.0
        """CPU time of the thread."""
        self._rank, self._world_size, self._greeting = rank, world_size, greeting
        self._connect, self._join_s = connect, join_s
        self._on_joined, self._on_packets, self._on_plan, self._on_off = on_joined, on_packets, on_plan, on_off
        # One each at most: what is handed over takes the place of what still waits, and only the thread takes it out.
        self._packets: deque[bytes] = deque(maxlen=1)
        self._counts: deque[Mapping[str, Any]] = deque(maxlen=1)
        self._seen_version = 0
        self._first_step_s: float | None = None
        self._is_off = False
        self._patience_s: float | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flopmeter-ranks", daemon=True)

    def start(self) -> None:
        """Begin the handshake, in the background."""
        self._thread.start()
        atexit.register(self._end_with_process)

    def note_first_step(self) -> None:
        """A step of this rank has ended: from here on the others are expected to be there."""
        if self._first_step_s is None:
            self._first_step_s = time.monotonic()

    @property
    def is_behind(self) -> bool:
        """Whether a packet waits to be sent."""
        return bool(self._packets) and self._thread.is_alive()

    def post(self, packet: bytes) -> None:
        """Hand over what this rank has to say; it takes the place of a packet that has not left yet."""
        self._packets.append(packet)
        self._wake.set()

    def publish(self, count: Mapping[str, Any]) -> None:
        """Hand over what rank 0 has counted; of two that are waiting only the newer one goes out."""
        self._counts.append(count)
        self._wake.set()

    def close(self, patience_s: float, packet: bytes) -> None:
        """Leave, with a last word; rank 0 gives those of the others `patience_s` to arrive."""
        self._packets.append(packet)
        self._patience_s = patience_s
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(patience_s + 1.0)
        if not self._thread.is_alive():
            atexit.unregister(self._end_with_process)

    def _end_with_process(self) -> None:
        if self._thread.is_alive():  # not in a forked child, where its locks may be held for ever
            self._patience_s = self._patience_s or 0.0
            self._wake.set()
            self._thread.join(EXIT_S)

    def _run(self) -> None:
        poll_s = FIRST_POLL_S
        try:
            self._greet()
            while self._patience_s is None and not self._is_off:
                self._wake.clear()
                self._turn()
                self.cpu_s = time.thread_time()
                if self._patience_s is None and not self._is_off:
                    self._wake.wait(poll_s if self._is_waiting() else None)
                poll_s = min(2 * poll_s, LONGEST_POLL_S)
            if not self._is_off:
                self._leave()
        except Exception as error:  # noqa: BLE001 - the job comes first; the reason is told
            if self._patience_s is None:  # when all are leaving, the store goes with the first of them
                line = (str(error).splitlines() or [""])[0][:200]
                self._switch_off(f"{type(error).__name__}: {line}")
        self.cpu_s = time.thread_time()

    def _is_waiting(self) -> bool:
        """Whether to look again soon: until the plan, and outside rank 0 the first count, are there."""
        if self._rank == 0:
            return self.plan is None
        return self._seen_version == 0 and not self._is_late()

    def _is_late(self) -> bool:
        """Rank 0 gives up first, so that it can tell the others."""
        patience_s = self._join_s if self._rank == 0 else 2 * self._join_s
        return self._first_step_s is not None and time.monotonic() - self._first_step_s > patience_s

    def _greet(self) -> None:
        self.mailbox = self._connect()
        hello = json.dumps(self._greeting._asdict()).encode()
        # In one call, the greeting last: who sees it may read the packet.
        self.mailbox.put({f"packet/{self._rank}": NO_PACKET, f"hello/{self._rank}": hello})

    def _turn(self) -> None:
        if self._rank == 0 and self.plan is None:
            self._gather()
        if self._rank != 0:
            self._look_at_plan()
        elif self._counts and self.plan is not None:
            self._set_plan(self.plan, self._counts.popleft())
        if not self._packets:
            return
        packet = self._packets.popleft()
        if self._is_off or (self.plan is not None and not self.plan.has_statistics):
            return
        self.mailbox.put({f"packet/{self._rank}": packet})
        if self.plan is not None and self._patience_s is None and self._rank == 0:
            self._on_packets(self._read())

    def _gather(self) -> None:
        """Rank 0: has everybody come?"""
        names = [f"hello/{rank}" for rank in range(self._world_size)]
        if self.mailbox.has(names):
            greetings = [Greeting(**json.loads(note)) for note in self.mailbox.read(names)]
            is_uneven = any(greeting.is_uneven for greeting in greetings)
            self._on_joined(greetings)
            self._set_plan(Plan(has_statistics=True, digest=self._greeting.digest, is_uneven=is_uneven))
        elif self._is_late():
            absent = [rank for rank, name in enumerate(names) if not self.mailbox.has([name])]
            self._set_plan(Plan(has_statistics=False, digest=self._greeting.digest))
            listed = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
            self._on_off(f"rank {listed} did not join within {self._join_s:g} s: does it run without the monitor?")

    def _set_plan(self, plan: Plan, count: Mapping[str, Any] | None = None) -> None:
        if count is not None:
            plan = plan._replace(version=plan.version + 1)
        notes = {"count": json.dumps(count).encode()} if count is not None else {}
        self.mailbox.put({**notes, "plan": json.dumps(plan._asdict()).encode()})
        self.plan = plan

    def _look_at_plan(self) -> None:
        """The others: is there a plan, and a new count? Without a plan for too long each counts for itself."""
        if self.plan is None and not self.mailbox.has(["plan"]):
            if self._is_late():
                self._switch_off(
                    f"rank 0 did not answer within {2 * self._join_s:g} s: does it run without the monitor?"
                )
            return
        plan = Plan(**json.loads(self.mailbox.read(["plan"])[0]))
        is_new = plan.version != self._seen_version
        if is_new or self.plan is None:
            count = json.loads(self.mailbox.read(["count"])[0]) if is_new else None
            self._seen_version, self.plan = plan.version, plan
            self._on_plan(plan, count)

    def _read(self) -> Table:
        names = [f"packet/{rank}" for rank in range(self._world_size)]
        return unpack(self.mailbox.read(names), self._world_size)

    def _leave(self) -> None:
        """The run is over. Everybody's last packet is still to come; those who are quick enough are in the record."""
        assert self._patience_s is not None
        deadline_s = time.monotonic() + self._patience_s
        self._turn()
        while self._rank == 0 and self.plan is None and time.monotonic() < deadline_s:
            time.sleep(CLOSING_POLL_S)
            self._turn()
        if self.plan is None or not self.plan.has_statistics or self._rank != 0:
            return
        table = self._read()
        while any(is_last != 1 for is_last in table["is_last"]) and time.monotonic() < deadline_s:
            time.sleep(CLOSING_POLL_S)
            table = self._read()
        self._on_packets(table)

    def _switch_off(self, reason: str) -> None:
        self._is_off = True
        self._on_off(reason)
