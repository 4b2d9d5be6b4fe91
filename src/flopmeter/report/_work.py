"""Where did the FLOPs go: by module, operator and dtype, as the last counted step says?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flopmeter.record import Run
from flopmeter.text import clean, number

MAX_OPERATORS = 12
SMALLEST_SHARE = 0.002
"""Modules below this share of all FLOPs are shown as one with their siblings."""
MAX_NODES = 600


def work_of(run: Run) -> dict[str, Any] | None:
    """The last count of the run, made ready to show; None when nothing was counted."""
    count = run.last("count")
    model_flop = number(count.get("model_flop"))
    if not model_flop or model_flop <= 0:
        return None
    parts = ("forward_flop", "backward_flop", "recompute_flop", "optimizer_flop", "hardware_flop")
    return {
        "model_flop": model_flop,
        **{name: number(count.get(name)) for name in parts},
        "by_module": _tree(_flop(count.get("by_module"))),
        "by_op": _largest(_flop(count.get("by_op"))),
        "by_dtype": _largest(_flop(count.get("by_dtype"))),
    }


def _flop(values: Any) -> dict[str, float]:
    """Name to FLOPs, sound entries only."""
    items = values.items() if isinstance(values, Mapping) else ()
    return {str(name): flop for name, value in items if (flop := number(value)) is not None and flop > 0}


def _largest(flop: dict[str, float]) -> list[dict[str, Any]]:
    ordered = sorted(flop.items(), key=lambda item: -item[1])
    shown = [{"name": clean(name, 80), "flop": value} for name, value in ordered[:MAX_OPERATORS]]
    rest = sum(value for _, value in ordered[MAX_OPERATORS:])
    return [*shown, {"name": f"{len(ordered) - MAX_OPERATORS} others", "flop": rest}] if rest else shown


def _tree(flop: dict[str, float]) -> list[dict[str, Any]]:
    """Nodes of a tree with their totals: `id`, `parent`, `label`, `flop`. Small ones are merged with their siblings."""
    total = sum(flop.values())
    if not total:  # a profiled step does not tell modules apart
        return []
    totals: dict[tuple[str, ...], float] = {(): total}
    for path, value in flop.items():
        parts = tuple(clean(part, 60) for part in path.split(".")[:12]) if path else ()
        for depth in range(1, len(parts) + 1):
            totals[parts[:depth]] = totals.get(parts[:depth], 0.0) + value
    shown = sorted((path for path in totals if totals[path] >= SMALLEST_SHARE * total), key=lambda p: -totals[p])
    nodes = [_node(path, totals[path]) for path in shown[:MAX_NODES]]
    return nodes + list(_rests({node["id"]: node for node in nodes}, nodes))


def _node(path: tuple[str, ...], flop: float) -> dict[str, Any]:
    parent = "/".join(("model", *path[:-1])) if path else ""
    return {"id": "/".join(("model", *path)), "parent": parent, "label": path[-1] if path else "model", "flop": flop}


def _rests(by_id: dict[str, dict[str, Any]], nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a module did itself or in children too small to show, where some of its children are shown."""
    inside: dict[str, float] = {}
    for node in nodes:
        inside[node["parent"]] = inside.get(node["parent"], 0.0) + node["flop"]
    return [
        {"id": f"{name}/·rest", "parent": name, "label": "itself and small parts", "flop": rest}
        for name, shown in inside.items()
        if name in by_id and (rest := by_id[name]["flop"] - shown) > 1e-6 * by_id[name]["flop"]
    ]
