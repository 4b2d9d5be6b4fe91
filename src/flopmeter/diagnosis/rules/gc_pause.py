"""Python's garbage collector stops the training thread, again and again.

How we know. The interpreter tells when a collection begins and ends; the record has their number and their time. A
collection walks all objects that the process holds, so it grows with the dataset in memory; with many ranks each one
stops all of them in turn.

What to do. import gc; gc.collect(); gc.freeze() once the model and the data are loaded moves all that exists out of
the collector's sight. gc.disable() with a gc.collect() every few hundred steps, on all ranks at the same step, ends
the rest (torchtitan and Megatron do so). Raising the thresholds helps too: gc.set_threshold(50_000, 20, 100). Keep
samples in numpy arrays or Arrow tables rather than in lists of Python objects.

The gain takes the collections as gone (expected and high), or half of them (low).
"""

from __future__ import annotations

import math

from flopmeter.columns import known
from flopmeter.diagnosis._evidence import MAX_COUNT, Evidence
from flopmeter.diagnosis._finding import Finding, NotCheckedError
from flopmeter.text import percent, seconds

MIN_SHARE = 0.03
"""A healthy loop spends well under a percent on it; one full collection in a run of seconds may reach two."""


def check(evidence: Evidence) -> Finding | None:
    """Look for time spent on collecting garbage."""
    events = evidence.window.events("gc")
    if not events:
        raise NotCheckedError("garbage collections were not recorded (event `gc`)")
    lost_s = evidence.window.gc_s
    num = math.fsum(known((event.get("num") for event in events), MAX_COUNT))
    longest_s = max(known(event.get("longest_s") for event in events), default=math.nan)
    share = lost_s / evidence.wall_s
    if share < MIN_SHARE:
        return None
    longest = "" if math.isnan(longest_s) else f", the longest of {seconds(longest_s)}"
    return Finding(
        rule="gc_pause",
        title=f"Python's garbage collector takes {percent(share)} of the time",
        lost=share,
        evidence=(f"{num:.0f} collections in {seconds(lost_s)}{longest}, in {evidence.num_steps} steps",),
        advice=(
            "gc.collect(); gc.freeze() once model and data are loaded",
            "gc.disable(), and gc.collect() every few hundred steps, on all ranks at the same step",
        ),
        gain=evidence.gain(lost_s, low_s=lost_s / 2, high_s=lost_s),
    )
