"""Does a step of the same shape take the same FLOPs each time? Where it does not, its counts are averaged.

Layers that are dropped at random, early exits and tokens that skip layers make them differ; one count would stand for
all steps until the next, and be off by as much as that one was odd.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import replace
from statistics import fmean

from flopmeter.flops.flop_count import FlopCount
from flopmeter.flops.workload import Workload

MAX_SHAPES, MAX_COUNTS = 32, 8
"""Only the latest count, so that a model that changes for good is followed."""
SAME = 0.01
"""Counts that differ by no more are the same; the last one stands."""


class Counts:
    """The latest counts of each workload."""

    def __init__(self) -> None:
        self.difference = 0.0
        """From the least to the most of the last workload, as a share of its mean; 0 where they agree."""
        self._by_workload: OrderedDict[Workload, deque[FlopCount]] = OrderedDict()

    def add(self, count: FlopCount, workload: Workload) -> FlopCount:
        """Take a count; gives what to expect of a step with this workload."""
        counts = self._by_workload.pop(workload, None) or deque(maxlen=MAX_COUNTS)
        counts.append(replace(count, by_op={}, by_module={}))
        self._by_workload[workload] = counts
        if len(self._by_workload) > MAX_SHAPES:
            self._by_workload.popitem(last=False)
        flop = [each.model_flop for each in counts]
        mean = fmean(flop)
        difference = (max(flop) - min(flop)) / mean if mean else 0.0
        self.difference = difference if difference > SAME else 0.0
        if not self.difference:
            return count
        *others, last = counts
        average = sum(others, last) * (1 / len(counts))  # all that is no number is the last one's
        return replace(average, uncounted=last.uncounted, coverage=last.coverage, left_out=last.left_out)
