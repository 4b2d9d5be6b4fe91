"""What share of the wall time since the first start went into steps that count, and where did the rest go?

    from flopmeter import load_run
    from flopmeter.goodput import goodput

    goodput(load_run("runs/mine")).share        # 0.87

The wall time runs from the first header to the last line of the file and splits into parts that add up to it:

    productive      steps whose work is still in the model; warm-up steps train it too, so they belong here
    lost steps      steps that a restart threw away: those after the checkpoint from which it resumed
    measuring       what an observed or profiled step took beyond its like: the step counts, the surplus does not
    pauses          by name, wherever they fell, in lost stretches as well; an inner one counts once.
                    What the loop does besides training, by role (a rollout, a reference model), is among them
    restarts        from the last step or pause of one start to the header of the next
    start-up        from a header to the beginning of its first step, pauses aside
    other           what is left: steps without a duration, time between steps, what happened after the last step

Which steps a restart threw away is told from the program's own numbers (`log_step`, a trainer's callback). Where the
program tells none, as under `flopmeter run`, each start counts from 1, all steps count as kept, and `note` says so.

Left out: a killed run misses its last lines (the flush bound), and their time shows as restart. Which start a step
belongs to is told from its time of day, so a restart on a machine whose clock is behind may hide lost steps.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from flopmeter.columns import LATEST_S, LONGEST_S, number_or_nan, sound

if TYPE_CHECKING:
    from flopmeter.record import Run

NUM_NEIGHBOURS = 5
"""Unmarked steps on either side that a measured step is held against."""
REACH = 200
"""Steps on either side among which those of the same work are looked for."""
SAME_WORK = 0.01
"""FLOPs that differ by no more are the same work."""
_OF_THE_LOOP = ("training/loss", "training/epoch", "training/lr", "training/grad_norm")
UNNUMBERED = "what restarts threw away is not known: the program tells no step numbers (log_step does)"
TOLERANCE = 0.01
"""Share of the wall time by which the parts may exceed it (clocks are adjusted) before no share is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Where the wall time of a run went. All parts, `other_s` included, add up to `wall_s`."""

    share: float | None
    """`productive_s / wall_s`; None when no wall time is known or the parts contradict it (see `note`)."""
    wall_s: float
    """From the first header to the last line."""
    productive_s: float
    """Steps whose work was kept, without the surplus of measuring."""
    lost_steps_s: float
    """Steps that a restart threw away, whether or not they have been redone yet."""
    measuring_s: float
    """Surplus of observed and profiled steps over the median of unmarked steps around them that did the same."""
    pause_s: Mapping[str, float]
    """Seconds by name of the pause (evaluation, checkpoint) or role (rollout)."""
    roles: tuple[str, ...] = ()
    """Names among them that are roles."""
    restart_s: float
    """Downtime between starts."""
    start_up_s: float
    """Between each header and the beginning of its first step; while there is none yet, up to the last line."""
    other_s: float
    """The remainder. Below zero where the clock was set back while the run went on."""
    num_starts: int
    """Headers that say when; 1 where none does."""
    num_steps: int
    """Steps whose work was kept."""
    num_lost_steps: int
    """Steps that a restart threw away."""
    note: str = ""
    """What makes the numbers less than certain."""


class Pause(NamedTuple):
    """One stop of the training."""

    name: str
    own_s: float
    """Without the pauses inside it."""
    end_s: float
    """Unix time; NaN where the record does not say."""
    is_role: bool = False
    """Whether it is what the loop did for another purpose than training; it may stand for many times."""


class _Start(NamedTuple):
    """One header, and what was written until the next."""

    at_s: float
    steps: range
    pauses: list[Pause]
    end_s: float


def goodput(run: Run) -> Goodput:
    """Split the wall time of a run; never raises, whatever the record holds."""
    step_s = run.column("perf/step_time")
    pauses = find_pauses(run.events)
    starts = _starts(run, step_s, pauses)
    pauses = [pause for pause in pauses if not pause.end_s <= starts[0].at_s]  # before the wall time began
    are_numbered = _are_numbered(run, starts)
    kept, lost = _judge_steps(run.step, starts, are_numbered)
    measuring_s = max(math.fsum(_surpluses(run, step_s, kept)), 0.0)
    parts = {
        "productive_s": _time_of(kept, step_s) - measuring_s,
        "lost_steps_s": _time_of(lost, step_s),
        "measuring_s": measuring_s,
        "restart_s": _total(after.at_s - before.end_s for before, after in pairwise(starts)),
        "start_up_s": _total(_start_up_s(run.time, step_s, start) for start in starts),
    }
    pause_s = by_name(pauses)
    wall_s = max(start.end_s for start in starts) - starts[0].at_s
    other_s = wall_s - math.fsum([*parts.values(), *pause_s.values()])
    doubt = ""
    if wall_s <= 0:
        doubt = "the record shows no wall time: it has no dated line after its start"
    elif other_s < -TOLERANCE * wall_s:
        doubt = (
            f"the parts exceed the wall time by {-other_s:.1f} s: the clock was set back, or two runs share the file"
        )
    num_untimed = len(step_s) - len(sound(step_s, LONGEST_S))
    untimed = f"{num_untimed} steps have no duration; their time is in other" if num_untimed else ""
    return Goodput(
        share=None if doubt else parts["productive_s"] / wall_s,
        wall_s=wall_s,
        pause_s=pause_s,
        roles=tuple(dict.fromkeys(pause.name for pause in pauses if pause.is_role)),
        other_s=other_s,
        num_starts=len(starts),
        num_steps=sum(map(len, kept)),
        num_lost_steps=sum(map(len, lost)),
        note="; ".join(filter(None, [doubt, untimed, "" if all(are_numbered[1:]) else UNNUMBERED])),
        **parts,
    )


def kept_steps(run: Run) -> list[range]:
    """Positions of the steps whose work is still in the model."""
    starts = _starts(run, run.column("perf/step_time"), [])
    return _judge_steps(run.step, starts, _are_numbered(run, starts))[0]


def _are_numbered(run: Run, starts: Iterable[_Start]) -> list[bool]:
    """What the loop logs has its own number of the step; without it, the number is one that we have counted."""
    told = [column for key in _OF_THE_LOOP if (column := run.columns.get(key)) is not None]
    return [any(value == value for column in told for value in column[at.start : at.stop]) for _, at, *_ in starts]


def find_pauses(events: Iterable[Mapping[str, Any]]) -> list[Pause]:
    """All pauses, each without those inside it: an inner one is over, and written, before the outer one."""
    result: list[Pause] = []
    outermost: list[tuple[float, float]] = []
    for event in events:
        duration_s, end_s = (
            number_or_nan(event.get("duration_s"), LONGEST_S),
            number_or_nan(event.get("time"), LATEST_S),
        )
        if event.get("event") != "pause" or math.isnan(duration_s):
            continue
        if event.get("is_role") is True or event.get("name") == "no_grad":  # none has another in it
            result.append(Pause(str(event.get("name")), duration_s, end_s, True))
            continue
        inner_s = 0.0
        while outermost and end_s - duration_s <= outermost[-1][0] <= end_s:
            inner_s += outermost.pop()[1]
        outermost.append((end_s - duration_s / 2, duration_s))
        result.append(Pause(str(event.get("name")), max(duration_s - inner_s, 0.0), end_s))
    return result


def by_name(pauses: Iterable[Pause]) -> dict[str, float]:
    """Seconds of the pauses of each name."""
    total_s: dict[str, float] = {}
    for pause in pauses:
        total_s[pause.name] = total_s.get(pause.name, 0.0) + pause.own_s
    return total_s


def _starts(run: Run, step_s: array[float], pauses: Iterable[Pause]) -> list[_Start]:
    """The run, cut where each header says that it began; there is always one."""
    known = [at_s for header in run.headers if (at_s := number_or_nan(header.started_at, LATEST_S)) > 0]
    # A start is never dated before the one before it, whatever the clock of its machine said.
    at = list(accumulate(known or [_beginning(run.time, step_s)], max))
    steps = _cut(run.time, at)
    inside: list[list[Pause]] = [[] for _ in at]
    for pause in pauses:
        inside[max(bisect_right(at, pause.end_s) - 1, 0)].append(pause)
    dated = [sound(run.time[part.start : part.stop], LATEST_S) for part in steps]
    ends = [
        max(at_s, max(times, default=0.0), _latest(pause.end_s for pause in paused))
        for at_s, times, paused in zip(at, dated, inside, strict=True)
    ]
    # Other lines only date the end of the run: some are made just before the header that they follow.
    lines = (*run.events, run.summary or {})
    ends[-1] = max(ends[-1], _latest(number_or_nan(line.get("time"), LATEST_S) for line in lines))
    return [_Start(*parts) for parts in zip(at, steps, inside, ends, strict=True)]


def _beginning(time: array[float], step_s: array[float]) -> float:
    """When the first dated step began, for a record that does not say when it started."""
    begins = (
        end_s - (duration_s if 0 <= duration_s < LONGEST_S else 0.0)
        for end_s, duration_s in zip(time, step_s, strict=True)
    )
    return next(_moments(begins), 0.0)


def _cut(time: array[float], at: list[float]) -> list[range]:
    """The steps of each start; one without a date stays with those before it."""
    cuts = [0]
    for at_s in at[1:]:
        cuts.append(next((place for place in range(cuts[-1], len(time)) if time[place] >= at_s), len(time)))
    return [range(first, stop) for first, stop in pairwise([*cuts, len(time)])]


def _judge_steps(
    numbers: array[int], starts: Iterable[_Start], are_numbered: Iterable[bool]
) -> tuple[list[range], list[range]]:
    """Steps that were kept, and steps that were lost: a start that begins at step n throws away n and all after it.

    Only as far back as the numbers fall without a jump: where a loop counts anew in each epoch, older epochs are safe.
    """
    kept: list[range] = []
    lost: list[range] = []
    for start, is_numbered in zip(starts, are_numbered, strict=True):
        if not start.steps:
            continue
        resumed_at, above = numbers[start.steps.start], math.inf
        while kept and is_numbered:
            steps = kept.pop()
            stop = steps.stop
            while stop > steps.start and resumed_at <= numbers[stop - 1] <= above:
                stop -= 1
                above = numbers[stop]
            lost.append(range(stop, steps.stop))
            if stop > steps.start:
                kept.append(range(steps.start, stop))
                break
        kept.append(start.steps)
    return kept, lost


def surplus_s(run: Run, step_s: array[float], place: int, within: range, otherwise_s: float) -> float:
    """What a marked step took beyond the nearest unmarked ones of the same work; below zero where it was fast.

    Args:
        within: Positions of the steps that it may be held against.
        otherwise_s: What it is held against where none did the same work. If its work was another, as its FLOPs tell,
            it has no surplus below zero: it was shorter because it did less.
    """
    flop = run.columns.get("perf/model_flop")
    if flop is None or not 0 < flop[place] < math.inf:
        return step_s[place] - otherwise_s
    alike_s: list[float] = []
    for near in chain.from_iterable((place - distance, place + distance) for distance in range(1, REACH + 1)):
        is_ordinary = near in within and near not in run.marks and 0 <= step_s[near] < LONGEST_S
        if is_ordinary and abs(flop[near] - flop[place]) <= SAME_WORK * flop[place]:
            alike_s.append(step_s[near])
            if len(alike_s) == 2 * NUM_NEIGHBOURS:
                break
    return step_s[place] - median(alike_s) if alike_s else max(step_s[place] - otherwise_s, 0.0)


def _surpluses(run: Run, step_s: array[float], kept: Iterable[range]) -> Iterator[float]:
    """What each measured step took beyond the unmarked steps around it; nothing where there are none to compare."""
    measured = [place for place, marks in run.marks.items() if "observed" in marks or "profiled" in marks]
    for steps in kept:
        for place in filter(steps.__contains__, measured):
            around = range(max(place - NUM_NEIGHBOURS, steps.start), min(place + NUM_NEIGHBOURS + 1, steps.stop))
            usual_s = [step_s[near] for near in around if near not in run.marks and 0 <= step_s[near] < LONGEST_S]
            if usual_s and 0 <= step_s[place] < LONGEST_S:
                yield surplus_s(run, step_s, place, steps, median(usual_s))


def _start_up_s(time: array[float], step_s: array[float], start: _Start) -> float:
    if not start.steps:
        return start.end_s - start.at_s - sum(pause.own_s for pause in start.pauses)
    first = start.steps.start
    paused_s = sum(pause.own_s for pause in start.pauses if pause.end_s <= time[first])
    return time[first] - step_s[first] - paused_s - start.at_s


def _time_of(parts: Iterable[range], step_s: array[float]) -> float:
    return _total(math.fsum(sound(step_s[steps.start : steps.stop], LONGEST_S)) for steps in parts)


def _total(durations_s: Iterable[float]) -> float:
    """Sum of the durations that can be ones; a negative one comes of a clock that was set back."""
    return math.fsum(duration_s for duration_s in durations_s if 0 < duration_s < LONGEST_S)


def _moments(times_s: Iterable[float]) -> Iterator[float]:
    return (time_s for time_s in times_s if 0 < time_s < LATEST_S)


def _latest(times_s: Iterable[float]) -> float:
    return max(_moments(times_s), default=0.0)
