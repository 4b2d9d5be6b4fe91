"""The training waits for data, and the loader is waiting too: the disk, the network or a lock is the brake.

How we know. Every step measures how long the loop sat in the loader's `next`; on a GPU only the part in which the
device ran dry counts. Meanwhile the loader used little CPU time: its workers (or, without workers, the training
process during the wait) were idle more than half of the time. So it is not computing that takes long, but reading.
Where CPU time was not recorded, the wait is reported here and the cause is left open.

What to do. Without workers, give the loader some: DataLoader(..., num_workers=4, persistent_workers=True,
prefetch_factor=4, pin_memory=True), so that batches are read ahead while the model computes. With workers, read less
and in larger pieces: keep data on a local disk, memory-map it (numpy.memmap, datasets' Arrow files) or pack samples
into shards (WebDataset, Parquet) instead of millions of small files; raise num_workers, since waiting workers cost no
CPU.

The gain assumes that the wait goes away entirely (expected), or by half (low).
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import BUSY_SHARE, Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.text import percent, seconds

MIN_SHARE = 0.05
"""One step in twenty: below that, prefetching has nothing left to win, and hiccups of a disk come and go."""


def check(evidence: Evidence) -> Finding | None:
    """Look for a wait in which the loader does not compute."""
    share, wait_s = evidence.share("data_wait"), evidence.seconds("data_wait")
    busy = evidence.loader_busy
    if share < MIN_SHARE or (busy is not None and busy >= BUSY_SHARE):
        return None
    has_workers = bool(evidence.resource("resource/num_workers"))
    more = "raise num_workers (waiting workers cost no CPU)" if has_workers else "set num_workers=4 (it is 0 now)"
    return Finding(
        rule="data_stall",
        title=f"the steps wait for data for {percent(share)} of the time, and the loader is not computing",
        lost=share,
        evidence=(
            f"{seconds(wait_s / evidence.num_steps)} of every step are spent waiting for the next batch",
            evidence.loader_evidence(),
        ),
        advice=(
            f"DataLoader: {more}, with persistent_workers=True and prefetch_factor=4",
            "read from a local disk, memory-map the data (numpy.memmap, Arrow) or pack it into shards",
            "tokenize and decode ahead of the run, so that less has to be read",
        ),
        gain=evidence.gain(wait_s, low_s=wait_s / 2, high_s=wait_s),
    )
