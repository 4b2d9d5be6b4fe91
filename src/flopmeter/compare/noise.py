"""How differently could this number have come out by chance alone?

Steps are not independent: a slow disk or a busy neighbour slows many in a row. So whole blocks of neighbouring steps
are drawn anew, not single ones: the circular block bootstrap (Politis and Romano 1992), with the block length of
Politis and White (2004, as corrected in 2009), never below the cube root of the number of steps. The draws are seeded:
the same runs give the same answer.

What it leaves out: whatever stays the same within a run and differs between two of them (another machine, another
neighbour, another temperature). Only runs that are repeated can show that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

CONFIDENCE = 0.99
"""Of the interval. A dozen figures are compared at once: at 0.95 two equal runs would often differ in one of them."""
MIN_STEPS = 20
MIN_BLOCKS = 6
MAX_CELLS = 1000
NUM_DRAWS = 1999


class Ratio(NamedTuple):
    """A figure that is a sum over a sum, step by step: tokens over seconds, seconds over steps."""

    above: list[float]
    below: list[float]

    def value(self) -> float | None:
        """The figure itself; None when nothing stands below the line."""
        below = math.fsum(self.below)
        return math.fsum(self.above) / below if below > 0 else None


def redraw(ratio: Ratio, seed: str) -> list[float] | None:
    """What the figure might have been, `NUM_DRAWS` times; None when the steps are too few to tell."""
    value = ratio.value()
    if value is None or len(ratio.below) < MIN_STEPS:
        return None
    cells = _in_cells(ratio)
    length = block_length([above - value * below for above, below in zip(*cells, strict=True)])
    num_cells, num_blocks = len(cells.below), math.ceil(len(cells.below) / length)
    if num_blocks < MIN_BLOCKS:
        return None
    above, below = _block_sums(cells.above, length), _block_sums(cells.below, length)
    # Drawing k blocks varies by (k - 1) / k too little, which a wider step from the centre makes good.
    widen = math.sqrt(num_blocks / (num_blocks - 1))
    source, places = random.Random(seed), range(num_cells)
    draws = []
    for _ in range(NUM_DRAWS):
        starts = source.choices(places, k=num_blocks)
        below_sum = sum(map(below.__getitem__, starts))
        drawn = sum(map(above.__getitem__, starts)) / below_sum if below_sum > 0 else value
        draws.append(value + widen * (drawn - value))
    return draws


def interval(draws: Sequence[float]) -> tuple[float, float]:
    """The middle `CONFIDENCE` of the draws."""
    ordered = sorted(draws)
    cut = round((1 - CONFIDENCE) / 2 * (len(ordered) + 1))
    return ordered[max(cut - 1, 0)], ordered[-max(cut, 1)]


def block_length(series: Sequence[float]) -> int:
    """Steps that have to stay together for a series that is correlated with itself."""
    n = len(series)
    shortest, longest = math.ceil(math.pow(n, 1 / 3)), max(math.ceil(min(3 * math.sqrt(n), n / 3)), 1)
    covariance = _autocovariances(series, min(math.ceil(math.sqrt(n)) + 5, n - 1))
    if covariance[0] <= 0:
        return shortest
    reach = 2 * max(_memory(covariance, n), 1)
    window = [(lag, min(1.0, 2 * (1 - lag / reach)) * c) for lag, c in enumerate(covariance[: reach + 1])]
    spectrum = window[0][1] + 2 * sum(c for _, c in window[1:])
    slope = 2 * sum(lag * c for lag, c in window)
    if not (spectrum > 0 and math.isfinite(slope / spectrum)):  # the smallest numbers there are have no square
        return shortest
    best = math.pow(1.5 * (slope / spectrum) ** 2 * n, 1 / 3)
    return max(shortest, min(math.ceil(best), longest))


def _memory(covariance: Sequence[float], n: int) -> int:
    """The lag after which five correlations in a row are no larger than chance makes them."""
    bound = 2 * math.sqrt(math.log10(n) / n) * covariance[0]
    quiet = 0
    for lag, value in enumerate(covariance[1:], start=1):
        quiet = quiet + 1 if abs(value) < bound else 0
        if quiet == 5:
            return lag - 5
    return len(covariance) - 1


def _autocovariances(series: Sequence[float], num_lags: int) -> list[float]:
    n, mean = len(series), math.fsum(series) / len(series)
    centred = [value - mean for value in series]
    return [sum(map(float.__mul__, centred, centred[lag:])) / n for lag in range(num_lags + 1)]


def _in_cells(ratio: Ratio) -> Ratio:
    """A long run as at most `MAX_CELLS` stretches of equally many steps: the cost no longer grows with the run."""
    width = math.ceil(len(ratio.below) / MAX_CELLS)
    return ratio if width == 1 else Ratio(_sums(ratio.above, width), _sums(ratio.below, width))


def _sums(values: list[float], width: int) -> list[float]:
    return [math.fsum(values[start : start + width]) for start in range(0, len(values), width)]


def _block_sums(values: list[float], length: int) -> list[float]:
    """The sum of the block that begins at each place, going round at the end."""
    running = [0.0, *accumulate([*values, *values[:length]])]
    return [running[start + length] - running[start] for start in range(len(values))]
