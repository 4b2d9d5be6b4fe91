"""What was the host doing when it launched a kernel: which step, which phase of it, and inside a product or not?

A kernel runs long after its launch, so it belongs to the step and the phase in which it was launched. Phases are told
from marks that torch itself makes: nodes of the autograd engine are the backward pass, `Optimizer.step` annotations the
optimizer, operators that make autograd nodes the forward pass; such an operator inside the backward pass is
recomputation (or a backward pass that builds a graph, which a trace does not tell apart). The rest is "other".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from flopmeter.traces.operators import Operator
from flopmeter.traces.timeline import Spans, Timeline

Phase = Literal["forward", "backward", "optimizer", "other"]


class Cover:
    """Stretches of time, merged; answers whether an instant lies in one."""

    def __init__(self, stretches: Iterable[tuple[float, float]]) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        for start, end in sorted(stretches):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.starts.append(start)
                self.ends.append(end)

    def holds(self, instant: float) -> bool:
        position = bisect_right(self.starts, instant) - 1
        return position >= 0 and instant < self.ends[position]

    def overlap(self, start: float, end: float) -> float:
        """How much of the stretch from `start` to `end` is covered."""
        total = 0.0
        position = max(0, bisect_right(self.starts, start) - 1)
        while position < len(self.starts) and self.starts[position] < end:
            total += max(0.0, min(end, self.ends[position]) - max(start, self.starts[position]))
            position += 1
        return total


class Host:
    """The host's side of one trace, ready to be asked about instants."""

    def __init__(self, timeline: Timeline) -> None:
        steps = timeline.steps or timeline.device_steps
        self.main_thread = next(iter(steps.values()))[2] if steps else -1
        self._optimizer = _by_thread(timeline.optimizer)
        self._nodes = _by_thread(timeline.nodes)
        self._engine_threads = {thread for thread in self._nodes if thread != self._busiest(timeline)}
        self._graph_making = _by_thread(timeline.graph_making)
        self._products = _by_thread(_spans(op for op in timeline.operators if not op.formula.composite))
        self.fetches = Cover(_on_thread(timeline.fetches, self.main_thread))
        self._forward = self._forward_stretches(timeline)

    def phase(self, thread: int, instant: float) -> Phase:
        """The phase that a call at this instant belongs to."""
        if thread in self._engine_threads or _holds(self._nodes, thread, instant):
            return "backward"
        if _holds(self._optimizer, thread, instant):
            return "optimizer"
        return "forward" if self._forward.holds(instant) else "other"

    def is_repeated(self, thread: int, instant: float) -> bool:
        """Whether a call at this instant does forward work again inside the backward pass."""
        return _holds(self._graph_making, thread, instant) and self.phase(thread, instant) == "backward"

    def is_in_product(self, thread: int, instant: float) -> bool:
        """Whether a call at this instant was made by an operator that multiplies matrices."""
        return _holds(self._products, thread, instant)

    def _busiest(self, timeline: Timeline) -> int:
        """The thread that trains: that of the steps, else the one that makes most of the graph."""
        if self.main_thread >= 0:
            return self.main_thread
        made = Counter(timeline.graph_making.thread).most_common(1)
        return made[0][0] if made else -1

    def _forward_stretches(self, timeline: Timeline) -> Cover:
        """From the first to the last operator of each forward pass: nothing of another phase lies between the two."""
        main = self._busiest(timeline)
        others = Cover(
            [
                *zip(timeline.nodes.start_us, timeline.nodes.end_us, strict=True),
                *zip(timeline.optimizer.start_us, timeline.optimizer.end_us, strict=True),
                *zip(timeline.fetches.start_us, timeline.fetches.end_us, strict=True),
            ]
        )
        stretches: list[tuple[float, float]] = []
        passed = -2
        for start, end in sorted(_on_thread(timeline.graph_making, main)):
            if others.holds(start):
                continue
            before = bisect_right(others.starts, start)
            if stretches and before == passed:
                stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
            else:
                stretches.append((start, end))
            passed = before
        return Cover(stretches)


def _by_thread(spans: Spans) -> dict[int, Cover]:
    found: dict[int, list[tuple[float, float]]] = {}
    for start, end, thread in zip(spans.start_us, spans.end_us, spans.thread, strict=True):
        found.setdefault(thread, []).append((start, end))
    return {thread: Cover(stretches) for thread, stretches in found.items()}


def _on_thread(spans: Spans, thread: int) -> list[tuple[float, float]]:
    """The stretches of one thread; of all when the thread is not known."""
    rows = zip(spans.start_us, spans.end_us, spans.thread, strict=True)
    return [(start, end) for start, end, owner in rows if thread in (owner, -1)]


def _spans(operators: Iterable[Operator]) -> Spans:
    spans = Spans()
    for operator in operators:
        spans.add(operator.start_us, operator.end_us, operator.thread)
    return spans


def _holds(covers: dict[int, Cover], thread: int, instant: float) -> bool:
    cover = covers.get(thread)
    return cover is not None and cover.holds(instant)
