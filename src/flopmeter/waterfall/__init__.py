"""Where did the wall time go, in parts that lead from 100 % down to the observed MFU?

    from flopmeter import load_run

    for part in load_run("runs/mine").waterfall().parts:
        print(part.name, part.seconds, part.share)

The wall time of a window is the time of its steps and of the pauses between the first and the last of them. A window
that covers the whole run begins after warm-up. Parts, in this order; those that the record cannot tell are left out:

    ideal                   the model's FLOPs at the device's peak; its share is the MFU over wall time
    recompute               what activation checkpointing computes again
    matmul_below_peak       matmul time beyond the ideal; below zero where the peak is understated
    non_matmul              element-wise operators, norms, softmax, copies inside forward and backward
    optimizer               the update of the weights
    exposed_communication   waiting for other ranks' gradients, not hidden behind computing
    launch_gaps             nothing ran while the host prepared the next operator
    data_wait               waiting for the next batch
    host_to_device          copying it to the device
    pauses                  evaluation, checkpoints, garbage collection, and what our own measured steps took longer
    unexplained             what is left, below zero where parts overlap

Each part is measured by itself, none is clipped and none is scaled to fill what another leaves, so that `unexplained`
says how far the measurements fit together. Waits and the optimizer come from every step; what lies inside forward and
backward comes from sampled steps, in seconds a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flopmeter.waterfall.split import Split
from flopmeter.waterfall.window import Window

if TYPE_CHECKING:
    from flopmeter.record import Run

__all__ = ["LABELS", "PART_NAMES", "Part", "Waterfall", "assemble", "waterfall"]

LABELS = {
    "ideal": "Useful work at peak",
    "recompute": "Recomputation",
    "matmul_below_peak": "Matmuls below peak",
    "non_matmul": "Other operators",
    "optimizer": "Optimizer",
    "exposed_communication": "Exposed communication",
    "launch_gaps": "Launch gaps",
    "data_wait": "Waiting for data",
    "host_to_device": "Host to device",
    "pauses": "Pauses",
    "unexplained": "Unexplained",
}
"""What people read where the code says the part's name; the report, `diagnose` and `compare` all say this."""
PART_NAMES = tuple(LABELS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One slice of the wall time."""

    name: str
    """One of `PART_NAMES`."""
    seconds: float
    """In the whole window."""
    share: float
    """Of the wall time: MFU points as a fraction."""
    how: str
    """How it was obtained."""
    uncertainty_s: float
    """How far off it may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waterfall:
    """The wall time of a window, split; the parts add up to it."""

    wall_s: float
    """Steps and pauses; 0 when no step has a duration."""
    mfu: float | None
    """Over wall time, pauses included: the share of `ideal`. None when unknown."""
    parts: tuple[Part, ...]
    """In the order of `PART_NAMES`."""
    note: str = ""
    """What is missing, and why."""
    num_steps: int = 0
    """Steps of the window."""

    def seconds(self, name: str) -> float | None:
        """Seconds of a part; None when it is not known."""
        return next((part.seconds for part in self.parts if part.name == name), None)

    def share(self, name: str) -> float | None:
        """Share of the wall time of a part; None when it is not known."""
        return next((part.share for part in self.parts if part.name == name), None)


def waterfall(run: Run, start: int | None = None, stop: int | None = None) -> Waterfall:
    """Split the wall time of the steps at positions `start` up to `stop`; never raises, whatever the record holds."""
    return assemble(Split(Window(run, start, stop)))


def assemble(split: Split) -> Waterfall:
    """Put the measured parts together, with what they leave."""
    window = split.window
    if not window.timed:
        return Waterfall(wall_s=0.0, mfu=None, parts=(), note="no step of the window has a duration")
    wall_s = window.steps_s + math.fsum(window.pauses_s.values())
    found = {name: slice_ for name, measure in split.measures.items() if (slice_ := measure()) is not None}
    found["unexplained"] = split.remainder(wall_s, found)
    parts = tuple(
        Part(name=name, seconds=s.seconds, share=s.seconds / wall_s, how=s.how, uncertainty_s=s.uncertainty_s)
        for name, s in ((name, found[name]) for name in PART_NAMES if name in found)
    )
    mfu = parts[0].share if "ideal" in found else None
    return Waterfall(wall_s=wall_s, mfu=mfu, parts=parts, note=split.note(), num_steps=len(window))
