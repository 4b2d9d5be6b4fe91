"""The run gets slower as it goes on, without a change in its work.

How we know. FLOPs per second of computing (waits for data left out, so that a slow disk does not show here) of the
last fifth of the steps against the first fifth, as medians, with the fifth in the middle in between; the fall must
exceed both a threshold and the usual variation of steps. A run of minutes is not judged, since it is still warming
up, unless the monitor itself saw the MFU fall and stay down (event `regime`).

What to do. A GPU that gets hot or hits its power cap: nvidia-smi -q -d PERFORMANCE. A list or a graph that grows:
losses kept with their graph (use loss.detach()), metrics appended in every step, hooks registered again and again.
Memory that fragments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Loader workers that leak memory until the
machine swaps. Another job on the same machine. Compare the sampled steps before and after.

The gain is that of running at the first fifth's speed all along (expected and high), or half of the way (low).
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Sequence
from itertools import repeat
from statistics import median

from flopmeter.columns import sound
from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding, NotCheckedError
from flopmeter.text import percent, utilisation

MIN_FALL = 0.07
"""Seven percent: clocks of a warm GPU settle two or three percent lower than those of a cold one."""
MIN_STEPS = 50
"""Ten steps in each fifth, so that a median means something."""
MIN_LENGTH_S = 900.0
"""A quarter of an hour: before, caches, clocks and other people's jobs explain every drift."""
MAX_WAIT = 0.99
"""Share of a step that may have been spent on waiting for data."""
MIN_SIGMAS = 2.0
"""The fall in units of the usual distance of a step from its median."""


def check(evidence: Evidence) -> Finding | None:
    """Look for a fall of computing speed over the run."""
    has_regime = bool(evidence.window.events("regime"))
    if evidence.wall_s < MIN_LENGTH_S and not has_regime:
        raise NotCheckedError(f"the run is shorter than {MIN_LENGTH_S / 60:.0f} minutes")
    speed = _speeds(evidence)
    if len(speed) < MIN_STEPS:
        raise NotCheckedError(f"{len(speed)} ordinary steps have an MFU, and it takes {MIN_STEPS} to tell")
    fifth = len(speed) // 5
    first, middle, last = (median(speed[at : at + fifth]) for at in (0, 2 * fifth, len(speed) - fifth))
    spread = median(abs(value - first) for value in speed[:fifth])
    fall = 1 - last / first if first > 0 else 0.0
    if fall < MIN_FALL or first - last < MIN_SIGMAS * spread or not last <= middle <= first:
        return None
    slow_s = math.fsum(max(1 - value / first, 0.0) for value in speed) / len(speed) * evidence.wall_s
    return Finding(
        rule="slow_sag",
        title=f"computing has become {percent(fall)} slower since the run began",
        lost=slow_s / evidence.wall_s,
        evidence=(
            f"MFU while computing: {utilisation(first)} in the first fifth, {utilisation(middle)} in the middle, "
            f"{utilisation(last)} in the last",
            *_regimes(evidence),
        ),
        advice=(
            "look at GPU temperature, clocks and throttle reasons: nvidia-smi -q -d PERFORMANCE",
            "look for what grows: tensors kept with their graph (use loss.detach()), lists, hooks, worker memory",
        ),
        gain=evidence.gain(slow_s, low_s=slow_s / 2, high_s=slow_s),
    )


def _speeds(evidence: Evidence) -> Sequence[float]:
    """MFU of the ordinary steps as if they had not waited for data."""
    mfu, waits = map(evidence.window.values, ("perf/mfu", "perf/data_wait_share"))
    if sound(waits, MAX_WAIT) is not waits:
        waits = array("d", map(_usable, waits))
    return sound(array("d", map(operator.truediv, mfu, map(operator.sub, repeat(1.0), waits))), math.inf)


def _usable(wait: float) -> float:
    """An unknown wait is none; NaN for one that leaves too little of the step to judge by."""
    return 0.0 if math.isnan(wait) else wait if 0 <= wait < MAX_WAIT else math.nan


def _regimes(evidence: Evidence) -> tuple[str, ...]:
    events = evidence.window.events("regime")[-3:]
    return tuple(f"the monitor saw it fall at step {str(event.get('since_step'))[:20]}" for event in events)
