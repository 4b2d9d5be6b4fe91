"""How do ranks leave notes for each other without anybody ever waiting?

Notes lie in the store that the job already has, under a prefix of ours. Only `set` and `multi_set` (nobody answers
them), `check`, and `multi_get` of notes that are known to be there are used: no call that waits for another rank, and
nothing on a process group, where a rank that skips our turn would pair it with a gradient. Notes are overwritten, never
added, so the store does not grow.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from flopmeter.torch_compat import default_store

TIMEOUT_S = 20.0
"""After so long a call to a store that hangs raises, in our own thread."""

_numbers = count()


class Mailbox:
    """Notes by name. Not for the training thread: a call may take as long as `TIMEOUT_S` when the store's host hangs.

    Args:
        store: Any torch store; tests pass one of their own.
        prefix: Set apart restarts of a job and monitors of a process, so that no stale note is read.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self.num_calls: Counter[str] = Counter()
        """Calls to the store, by its method."""
        self._store: Any = dist.distributed_c10d.PrefixStore(prefix, store)

    def put(self, notes: Mapping[str, bytes]) -> None:
        """Leave these notes, in one call."""
        if len(notes) == 1:
            self.num_calls["set"] += 1
            for name, note in notes.items():
                self._store.set(name, note)
            return
        self.num_calls["multi_set"] += 1
        self._store.multi_set(list(notes), list(notes.values()))

    def has(self, names: Sequence[str]) -> bool:
        """Whether all of these notes are there."""
        self.num_calls["check"] += 1
        return bool(self._store.check(list(names)))

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Notes that `has` has seen, in one call. On any other it would wait, up to the timeout."""
        self.num_calls["multi_get"] += 1
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
