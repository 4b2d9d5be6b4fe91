"""What do the times, losses and bytes of some processes say about a change?

Gains are ratios of the time of a sample, and intervals hold 95 %. Where a change is switched on and off in one process,
each block of steps with it is compared with the blocks before and behind it; the interval is Wilcoxon's, of the signed
ranks of these ratios, which a few blocks that another program slowed down do not upset. Where it takes a process of its
own, one value a process is compared round by round, and the interval is Student's. Processes of the very same program
differ: `PROCESS_SPREAD` is added to either side of an interval that has seen one process only. On a CPU, where the
training thread does all the work, its waits for a core are left out: other programs cause them. What the intervals
leave out: another machine, other data, a longer run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

from flopmeter.diagnosis import Gain
from flopmeter.text import amount, percent, signed
from flopmeter.trials import EARLY_STEPS, Losses, Row

SETTLE = 1
"""Steps at the beginning of a block that belong to neither side."""
PROCESS_SPREAD, BUSY_SPREAD = 0.02, 0.06
"""By so much two processes of one program may differ in speed, in either direction: on an idle machine, and what comes
to it where the training thread waits for a core all the time, since others use its caches."""
OTHERS = 0.02
"""Share of the training thread's time that its program's other threads and processes may use to be left alone."""
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
"""Student's t, two-sided, for 1 to 18 degrees of freedom."""
GRADIENT_FACTOR, LOSS_FACTOR, LATER_FACTOR = 40.0, 8.0, 25.0
"""How much larger than one operation's rounding the error of a whole pass may be: of gradients, of the first loss that
differs, of those behind it, which training has driven apart."""
LEAST_GRADIENT, LEAST_LOSS, LEAST_LATER = 1e-3, 1e-4, 1e-2
"""What sums in another order come to in fp32, whatever the change."""
MAX_SHOWN = 10.0
"""Ten times their size apart: nothing is left to compare."""
MIN_GROWTH_BYTES, MIN_GROWTH_SHARE, MIN_RISES = 12e6, 0.75, 3
"""Memory keeps growing when it has grown by so much, has done so in most of several blocks, and by more in an ordinary
one of them than the unchanged program in any."""


def block_s(block: Mapping[str, Any], *, is_wall: bool = False) -> float:
    """Mean time of a step in a block, its first ones left out; the training thread's waits for a core, too, or not.

    Steps with a pause, to evaluate or to save, are left out where others are there.
    """
    steps = list(zip(block["seconds"], block["waited"], block["is_pause"], strict=True))
    steps = [step for step in steps[SETTLE:] if not step[2]] or steps
    return fmean(wall_s - (0.0 if is_wall else waited_s) for wall_s, waited_s, _ in steps)


def must_be_wall(processes: Iterable[Mapping[str, Any]]) -> bool:
    """Whether waits for a core must count: others than the training thread do some of the work, and may wait as well.

    On a GPU, too, where a wait may be hidden behind what the device does.
    """
    blocks = [block for seen in processes for block in timed(seen)]
    own_s = sum(sum(block["seconds"]) - sum(block["waited"]) for block in blocks)
    is_gpu = any(seen["facts"]["device"] != "cpu" for seen in processes)
    return is_gpu or sum(block["others_cpu_s"] for block in blocks) > OTHERS * own_s


def timed(seen: Mapping[str, Any], on: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Blocks of a process that were timed to their end, those with just these changes where any are named."""
    wanted = None if on is None else list(on)
    rows = [block for block in seen["blocks"] if block["kind"] == "timed" and "memory_bytes" in block]
    return [block for block in rows if wanted is None or block["on"] == wanted]


def process_s(seen: Mapping[str, Any], *, is_wall: bool = True) -> float:
    """Time of a step in a process without switching: the median block, so that a slow one does not count."""
    return median(block_s(block, is_wall=is_wall) for block in timed(seen))


def block_spread(seen: Mapping[str, Any]) -> float:
    """Relative spread of the times of a process's blocks."""
    logs = [math.log(block_s(block)) for block in timed(seen)]
    return stdev(logs) if len(logs) > 1 else 0.0


def waited_share(processes: Iterable[Mapping[str, Any]]) -> float:
    """Of its time the training thread waited for a core."""
    blocks = [block for seen in processes for block in seen["blocks"]]
    return sum(sum(block["waited"]) for block in blocks) / max(sum(sum(block["seconds"]) for block in blocks), 1e-9)


def process_spread(processes: Iterable[Mapping[str, Any]]) -> float:
    """By how much two processes may differ."""
    return PROCESS_SPREAD + BUSY_SPREAD * waited_share(processes)


def switched_gain(
    processes: Sequence[Mapping[str, Any]], on: Sequence[str], samples: float, *, is_wall: bool = False
) -> Gain | None:
    """From processes in which the change was switched on and off."""
    ratios = []
    for seen in processes:
        rows = timed(seen)
        for before, block, behind in zip(rows, rows[1:], rows[2:], strict=False):
            if block["on"] == list(on) and before["on"] == behind["on"] == []:
                first, own, last = (math.log(block_s(one, is_wall=is_wall)) for one in (before, block, behind))
                ratios.append((first + last) / 2 - own)
    if len(ratios) < 3:
        return None
    middle, down, up = _signed_ranks(ratios)
    spread = process_spread(processes) / math.sqrt(len(processes))
    return _interval(middle, math.hypot(down, spread), math.hypot(up, spread), samples)


def process_gain(
    ratios: Sequence[float], samples: float, spread: float = PROCESS_SPREAD, block_spread: float = 0.0
) -> Gain | None:
    """From processes that took turns.

    Args:
        ratios: In each round the unchanged program's time of a step over the one with the change.
        spread: By how much two processes of one program may differ.
        block_spread: Relative spread of the blocks within a process: all that there is to go by after one round.
    """
    if not ratios:
        return None
    middle, half = _student([math.log(ratio) for ratio in ratios])
    least = 8 * PROCESS_SPREAD + 2 * block_spread if len(ratios) == 1 else 2 * spread
    half = max(half, least / math.sqrt(len(ratios)))
    return _interval(middle, half, half, samples)


def _interval(middle: float, down: float, up: float, samples: float) -> Gain:
    low, expected, high = (samples * math.exp(value) - 1 for value in (middle - down, middle, middle + up))
    return Gain(low=low, expected=expected, high=high)


def _student(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its interval; 0 of one value."""
    num = len(values)
    half = T_95[min(num - 1, len(T_95)) - 1] * stdev(values) / math.sqrt(num) if num > 1 else 0.0
    return fmean(values), half


def _signed_ranks(values: Sequence[float]) -> tuple[float, float, float]:
    """Hodges and Lehmann's middle, and how far its interval reaches on either side; below six values Student's.

    By how many means of pairs the interval is cut on either side: the normal approximation of Wilcoxon's table, which
    is one too small in places, so on the safe side.
    """
    num = len(values)
    if num < 6:
        middle, half = _student(values)
        return middle, half, half
    means = sorted((a + b) / 2 for place, a in enumerate(values) for b in values[place:])
    cut = max(math.floor(num * (num + 1) / 4 - 1.96 * math.sqrt(num * (num + 1) * (2 * num + 1) / 24)), 1)
    middle = median(means)
    return middle, middle - means[cut - 1], means[-cut] - middle


def is_narrow(gain: Gain | None) -> bool:
    """Within two points or a tenth of the gain on either side: more rounds would tell little more."""
    return gain is not None and (gain.high - gain.low) / 2 <= max(0.02, 0.1 * abs(gain.expected))


# Harm


def judge_losses(
    own: Mapping[str, Any], unchanged: Sequence[Mapping[str, Any]], rounding: float, samples: float
) -> tuple[Losses, str]:
    """Whether a process learned the same as the unchanged program, and how that is said."""
    plain = [seen for seen in unchanged if seen["losses"]]
    if samples != 1:
        return "not comparable", "another batch, so other losses"
    if not plain or not own["losses"]:
        return "unknown", "no loss was seen: backward() was not called on one number"
    losses, gradients = (_apart(own[key], plain[0][key]) for key in ("losses", "gradients"))
    num = min(len(own["losses"]), len(plain[0]["losses"]))
    if not any(losses) and not any(gradients):
        return "same", f"bit for bit, {num} losses"
    usual = [max(_apart(seen["losses"], plain[0]["losses"]), default=0.0) for seen in plain[1:]]
    worst = max(losses, default=0.0)
    if any(usual) and worst <= 2 * max(usual):
        return "rounding", f"no further apart than the unchanged program's own runs ({_size(max(usual))})"
    first_loss, first_gradient = (next(filter(None, rows), 0.0) for rows in (losses, gradients))
    allowed = (
        (first_gradient, max(GRADIENT_FACTOR * rounding, LEAST_GRADIENT)),
        (first_loss, max(LOSS_FACTOR * rounding, LEAST_LOSS)),
        (worst, max(LATER_FACTOR * rounding, LEAST_LATER)),
    )
    is_fine = bool(rounding) and all(value <= most for value, most in allowed)
    is_dropout = not is_fine and (own.get("facts") or {}).get("has_dropout")
    text = f"losses up to {_size(worst)} apart, first gradients {_size(first_gradient)} apart"
    text += f"; the unchanged program's own runs {_size(max(usual))}" if any(usual) else ""
    text += "" if usual else "; the unchanged program ran only once, so how far its own runs differ is not known"
    text += "; the model has dropout, which may have drawn other numbers" if is_dropout else ""
    return ("rounding", f"within rounding: {text}") if is_fine else ("different", text)


def _apart(own: Sequence[Any], other: Sequence[Any]) -> list[float]:
    """Relative distance of each pair of numbers, or of vectors; infinite where one is not a number."""
    found = []
    for one, two in zip(own, other, strict=False):
        a, b = (value if isinstance(value, list) else [value] for value in (one, two))
        if len(a) != len(b):
            found.append(math.inf)
            continue
        size = math.sqrt(sum(value * value for value in b))
        distance = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))
        is_same = all(x == y or (x != x and y != y) for x, y in zip(a, b, strict=True))
        found.append(0.0 if is_same else distance / size if size and math.isfinite(distance) else math.inf)
    return found


def _size(share: float) -> str:
    if not share < MAX_SHOWN:
        return "beyond all measure"
    if share == 0:
        return "0 %"
    return percent(share, 1) if share >= 1e-3 else f"{share:.1g} of their size"


def judge_memory(
    runs: Sequence[Sequence[Mapping[str, Any]]], unchanged: Sequence[Mapping[str, Any]], on: Sequence[str]
) -> tuple[float | None, str]:
    """Highest use with the change, and how that is said; whether it keeps growing, other than without, in each run.

    Args:
        runs: With the change: the processes of each.
    """
    own = [seen for run in runs for seen in run]
    peaks = [block["peak_bytes"] for seen in own for block in timed(seen, on) if block["peak_bytes"] is not None]
    plain = [block["peak_bytes"] for seen in unchanged for block in timed(seen, []) if block["peak_bytes"] is not None]
    if not peaks or not plain:
        return None, "not known"
    text = f"{amount(max(peaks), 'B')} ({signed(max(peaks) / max(plain) - 1)})"
    usual = [_rises(timed(seen, [])) for seen in (*unchanged, *(own if on else ()))]

    def growth(blocks: Sequence[Mapping[str, Any]]) -> float:
        """Bytes a step."""
        found, steps = 0.0, sum(len(block["seconds"]) for block in blocks) / max(len(blocks), 1)
        for at, num in enumerate((steps - EARLY_STEPS, steps)):
            rises = _rises(blocks)[at]
            largest = max((abs(rise) for rows in usual for rise in rows[at]), default=0.0)
            is_steady = len(rises) >= MIN_RISES and fmean(rise > 0 for rise in rises) >= MIN_GROWTH_SHARE
            if is_steady and sum(rises) >= MIN_GROWTH_BYTES and median(rises) > largest:
                found = max(found, median(rises) / max(num, 1))
        return found

    grows = min(max(growth(timed(seen, on)) for seen in run) for run in runs)
    return max(peaks), text + (f", and grows by {amount(grows, 'B')} a step" if grows else "")


def _rises(blocks: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Bytes by which the memory in use grew within each block, and from one to the next."""
    ends = [block["memory_bytes"] or 0.0 for block in blocks]
    inside = [end - (block["early_bytes"] or 0.0) for end, block in zip(ends, blocks, strict=True)]
    return inside, [later - earlier for earlier, later in pairwise(ends)]


def settle(row: Row) -> None:
    """Say whether the interval leaves a choice."""
    if row.gain is not None:
        row.outcome = "faster" if row.gain.low > 0 else "slower" if row.gain.high < 0 else "no difference"
