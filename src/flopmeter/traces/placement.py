"""What was each kernel for: which phase launched it, and was it a product? On a CPU the operators are the work.

A kernel runs long after its launch, so it belongs to the phase in which it was launched. Phases are known from marks
that torch itself makes: nodes of the autograd engine are the backward pass, `Optimizer.step` annotations the optimizer,
operators that make autograd nodes the forward pass; such an operator inside the backward pass is recomputation (or a
backward pass that builds a graph, which looks the same in a trace). The rest is "other".
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable

from flopmeter.devices.kernels import is_matmul
from flopmeter.profiling.recorded import Activity, Cover, Phase
from flopmeter.traces.timeline import DeviceEvents, Spans, Timeline

_NOTHING = Cover(())


class Host:
    """The host's side of one trace, ready to be asked about instants."""

    def __init__(self, timeline: Timeline) -> None:
        steps = timeline.steps or timeline.device_steps
        main = next(iter(steps.values()))[2] if steps else -1
        self.fetches = Cover(_on_thread(timeline.fetches, main))
        if main < 0:  # the thread that trains is the one that makes most of the graph
            main = max(Counter(timeline.graph_making.thread).items(), key=lambda item: item[1], default=(-1, 0))[0]
        self._optimizer = _by_thread(timeline.optimizer)
        self._nodes = _by_thread(timeline.nodes)
        self._engine_threads = self._nodes.keys() - {main}
        self._graph_making = _by_thread(timeline.graph_making)
        self._products = _by_thread(
            (op.start, op.end, op.thread) for op in timeline.operators if op.formula and not op.formula.composite
        )
        self._forward = _forward_stretches(timeline, main)

    def phase(self, thread: int, instant: float) -> Phase:
        """The phase that a call at this instant belongs to; recomputation is among the backward pass."""
        if thread in self._engine_threads or self._nodes.get(thread, _NOTHING).holds(instant):
            return "backward"
        if self._optimizer.get(thread, _NOTHING).holds(instant):
            return "optimizer"
        return "forward" if self._forward.holds(instant) else "other"

    def is_repeated(self, thread: int, instant: float) -> bool:
        """Whether a call at this instant of the backward pass does forward work again."""
        return self._graph_making.get(thread, _NOTHING).holds(instant)

    def is_in_product(self, thread: int, instant: float) -> bool:
        """Whether a call at this instant was made by an operator that multiplies matrices."""
        return self._products.get(thread, _NOTHING).holds(instant)


def _forward_stretches(timeline: Timeline, main: int) -> Cover:
    """From the first to the last operator of each forward pass: nothing of another phase lies between the two."""
    marks = (timeline.nodes, timeline.optimizer, timeline.fetches)
    others = Cover((start, end) for spans in marks for start, end, _ in spans)
    stretches: dict[int, tuple[float, float]] = {}
    for start, end in sorted(_on_thread(timeline.graph_making, main)):
        if not others.holds(start):
            before = bisect_right(others.starts, start)
            first, last = stretches.get(before, (start, end))
            stretches[before] = (first, max(end, last))
    return Cover(stretches.values())


def _by_thread(rows: Iterable[tuple[float, float, int]]) -> dict[int, Cover]:
    found: dict[int, list[tuple[float, float]]] = {}
    for start, end, thread in rows:
        found.setdefault(thread, []).append((start, end))
    return {thread: Cover(stretches) for thread, stretches in found.items()}


def _on_thread(spans: Spans, thread: int) -> list[tuple[float, float]]:
    """The stretches of one thread; of all when the thread is not known."""
    return [(start, end) for start, end, owner in spans if thread in (owner, -1)]


def place(timeline: Timeline, host: Host) -> DeviceEvents:
    """Join what ran with what the host was doing: on the accelerator, or on the host itself where there is none."""
    if not len(timeline.device_events):
        return _operators(timeline, host)
    placed = timeline.device_events
    for position, correlation in enumerate(placed.correlation):
        launch_us, thread = timeline.launches.get(correlation, (math.nan, -1))
        phase: Phase = host.phase(thread, launch_us) if thread >= 0 else "other"
        placed.launch_us.append(launch_us)
        placed.thread.append(thread)
        placed.phase.append(phase)
        if placed.activity[position] == Activity.OTHER_COMPUTE:
            is_product = is_matmul(timeline.kernel_names[placed.name[position]])
            placed.activity[position] = _purpose(host, phase, thread, launch_us, is_product)
    return placed


def _purpose(host: Host, phase: Phase, thread: int, instant: float, is_product: bool) -> Activity:
    if phase == "optimizer":
        return Activity.OPTIMIZER
    if phase == "backward" and host.is_repeated(thread, instant):
        return Activity.RECOMPUTE
    if is_product or host.is_in_product(thread, instant):
        return Activity.MATMUL
    return Activity.OTHER_COMPUTE


def _operators(timeline: Timeline, host: Host) -> DeviceEvents:
    """Operators of a CPU, and waits for data. They nest: a product is charged before what surrounds it."""
    spans, fetches = timeline.dispatched, host.fetches
    num_fetches = len(fetches.starts)
    placed = DeviceEvents(
        start_us=spans.start_us + array("d", fetches.starts),
        end_us=spans.end_us + array("d", fetches.ends),
        launch_us=spans.start_us + array("d", [math.nan]) * num_fetches,
        thread=spans.thread + array("l", [-1]) * num_fetches,
    )
    for start_us, _, thread in spans:
        phase = host.phase(thread, start_us)
        placed.phase.append(phase)
        placed.activity.append(_purpose(host, phase, thread, start_us, False))
    placed.phase += ["other"] * num_fetches
    placed.activity.extend([Activity.DATA] * num_fetches)
    return placed
