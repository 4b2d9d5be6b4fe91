"""What do the steps of a trace show besides times and FLOPs: the longest kernels, host syncs, eager attention?"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Any

import msgspec

from flopmeter.traces.counting import Counting
from flopmeter.traces.kernels import short_name
from flopmeter.traces.steps import StepTime, Window
from flopmeter.traces.timeline import Timeline

MAX_TOP = 20
MIN_ATTENTION_LENGTH = 64
"""A square of scores smaller than this costs nothing, whoever computes it."""

_FUSED = re.compile(r"aten::_fused_(adam|adamw|sgd|adagrad)|Optimizer\.step#.*Fused")


def top_kernels(timeline: Timeline, windows: list[Window]) -> tuple[tuple[str, float, int], ...]:
    """The longest kernels (outermost operators on a CPU) of all steps: name, seconds, calls."""
    events = timeline.device_events
    columns = (events.start_us, events.end_us, events.name) if len(events) else timeline.outermost()
    names = timeline.kernel_names if len(events) else timeline.operator_names
    first_us, last_us = windows[0].start_us, windows[-1].end_us
    found: dict[str, list[float]] = {}
    for start_us, end_us, name in zip(*columns, strict=True):
        if first_us <= start_us < last_us:
            total = found.setdefault(short_name(names[name]), [0.0, 0])
            total[0] += (end_us - start_us) * 1e-6
            total[1] += 1
    longest = sorted(found.items(), key=lambda item: -item[1][0])[:MAX_TOP]
    return tuple((name, seconds, int(calls)) for name, (seconds, calls) in longest)


def find_facts(
    timeline: Timeline, windows: list[Window], times: tuple[StepTime, ...], counting: Counting, is_cpu: bool
) -> dict[str, Any]:
    """A typical step in the words of the event `facts`: means over the steps."""
    num_steps = len(times)
    by_dtype: dict[str, float] = {}
    for step in counting.steps:
        for dtype, flop in step.hardware.items():
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + flop / num_steps
    facts: dict[str, Any] = {
        "num_ops": round(sum(time.num_launches for time in times) / num_steps),
        "num_optimizer_ops": round(sum(time.num_optimizer_launches for time in times) / num_steps),
        "host_syncs": {} if is_cpu else _host_syncs(timeline, windows),
        "matmul_dtypes": by_dtype,
        "tf32": counting.has_tf32,
        "optimizer": _optimizer_kind(timeline),
        "is_compiled": any(name.startswith("triton_") for name in timeline.kernel_names),
    }
    attention = _eager_attention(timeline, windows)
    return facts | ({"eager_attention": attention} if attention else {})


def _in_steps(instants: list[float], windows: list[Window]) -> list[float]:
    starts = [window.host_us for window in windows]
    places = [(bisect_right(starts, instant) - 1, instant) for instant in instants]
    return [instant for place, instant in places if place >= 0 and instant < windows[place].host_end_us]


def _host_syncs(timeline: Timeline, windows: list[Window]) -> dict[str, int]:
    calls = {name: len(_in_steps(instants, windows)) for name, instants in timeline.waits.items()}
    return {name: -(-number // len(windows)) for name, number in calls.items() if number}


def _optimizer_kind(timeline: Timeline) -> str | None:
    if not len(timeline.optimizer):
        return None
    if any(_FUSED.search(name) for name in timeline.optimizer_ops):
        return "fused"
    return "foreach" if any("_foreach_" in name for name in timeline.optimizer_ops) else "for-loop"


def _eager_attention(timeline: Timeline, windows: list[Window]) -> dict[str, Any] | None:
    """Softmax over a square of scores: attention made of plain operators, the scores written to memory."""
    lengths: list[int] = []
    inside = set(_in_steps([instant for instant, _ in timeline.softmaxes], windows))
    for instant, shapes in timeline.softmaxes:
        shape = _first_shape(shapes) if instant in inside else []
        if len(shape) >= 3 and shape[-1] == shape[-2] >= MIN_ATTENTION_LENGTH:
            lengths.append(shape[-1])
    if not lengths:
        return None
    return {"calls": -(-len(lengths) // len(windows)), "length": max(lengths), "modules": []}


def _first_shape(shapes: bytes) -> list[int]:
    try:
        return msgspec.json.decode(shapes, type=list[list[int]])[0]
    except (msgspec.MsgspecError, IndexError):
        return []
