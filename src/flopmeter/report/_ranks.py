"""Which rank was slow, and when? The ranks' own work time over the run, made small enough for a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flopmeter.record import Run
from flopmeter.report._thin import buckets
from flopmeter.text import clean, number, rounded

MAX_CELLS = 150_000
MAX_COLUMNS = 200
MAX_ROWS = 1024
MAX_STRAGGLERS = 100
_QUANTITIES = ("step_s", "own_s", "blocked_s", "data_wait_s", "forward_s", "backward_s", "optimizer_s", "memory_bytes")


def ranks_of(run: Run) -> dict[str, Any] | None:
    """Own work time by rank and interval, the spread of the last interval, and stragglers; None for a single rank."""
    events = run.named("ranks")
    if not events:
        return None
    columns, steps = _columns(events)
    return {
        "world_size": number(events[-1].get("world_size")) or run.header.world_size,
        "num_rows": len(columns[0]) if columns else 0,
        "step": steps,
        "own_s": columns,
        "stats": _stats(events[-1].get("stats")),
        "missing": [rank for rank in _list(events[-1].get("missing")) if isinstance(rank, int)][:MAX_STRAGGLERS],
        "stragglers": [_straggler(event) for event in run.named("straggler")[-MAX_STRAGGLERS:]],
    }


def _columns(events: list[dict[str, Any]]) -> tuple[list[list[float | None]], list[int]]:
    """One column per stretch of intervals, each rank with its slowest interval of the stretch."""
    sound = [event for event in events if _list(event.get("own_s_by_rank"))]
    num_rows = max((len(event["own_s_by_rank"]) for event in sound), default=0)
    if not 0 < num_rows <= MAX_ROWS:
        return [], []
    columns, steps = [], []
    for part in buckets(len(sound), min(MAX_COLUMNS, max(MAX_CELLS // num_rows, 1))):
        inside = [sound[place] for place in part]
        columns.append([_slowest(inside, rank) for rank in range(num_rows)])
        steps.append(int(number(inside[-1].get("after_step")) or 0))
    return columns, steps


def _slowest(events: list[dict[str, Any]], rank: int) -> float | None:
    rows = (event["own_s_by_rank"] for event in events)
    known = [own_s for row in rows if rank < len(row) and (own_s := number(row[rank])) is not None]
    return rounded(max(known, default=None))


def _stats(stats: Any) -> list[dict[str, Any]]:
    known = stats if isinstance(stats, Mapping) else {}
    return [
        {"quantity": name, **{field: number(known[name].get(field)) for field in ("min", "mean", "max", "argmax")}}
        for name in _QUANTITIES
        if isinstance(known.get(name), Mapping)
    ]


def _straggler(event: dict[str, Any]) -> dict[str, Any]:
    texts = {name: clean(event.get(name) or "", 80) for name in ("host", "phase", "cause")}
    return {**texts, **{name: number(event.get(name)) for name in ("rank", "extra_s", "since_step")}}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
