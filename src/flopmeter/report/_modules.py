"""Which modules need the FLOPs? Their tree as rows, equal layers folded into one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from msgspec import Struct, structs

from flopmeter.text import clean

SMALLEST_SHARE = 0.002
"""Modules below this share of all FLOPs are one row with their siblings."""
MAX_LEVELS = 12
MAX_ROWS = 200


class Module(Struct, frozen=True, kw_only=True):
    """A row of the tree: a module, or a run of equal ones."""

    name: str
    depth: int
    """0 for the model itself."""
    flop: float
    """Of all that it stands for, inner modules included."""
    share: float = 1.0
    """Of the model's."""

    @property
    def label(self) -> str:
        """The name, further to the right the deeper it is."""
        return "\u2003" * self.depth + self.name


@dataclass(slots=True)
class Node:
    """A module in the tree, or a run of equal ones."""

    name: str
    own_flop: float = 0.0
    children: dict[str, Node] = field(default_factory=dict)
    num_equal: int = 1

    @property
    def flop(self) -> float:
        """Of all that it stands for."""
        return self.num_equal * (self.own_flop + sum(child.flop for child in self.children.values()))

    def shape(self) -> Any:
        """Equal for modules that take the same FLOPs in the same places."""
        inner = [(child.name, child.shape()) for child in self.children.values()]
        return self.num_equal, self.own_flop, tuple(inner)


def modules_of(by_module: Mapping[str, float]) -> tuple[Module, ...]:
    """The tree from the model on, in its own order; empty where modules are not told apart."""
    root = tree(by_module)
    if not root.children:
        return ()
    rows = islice(_rows(replace(root, name="model"), 0, 1, SMALLEST_SHARE * root.flop), MAX_ROWS)
    return tuple(structs.replace(row, share=row.flop / root.flop) for row in rows)


def _rows(node: Node, depth: int, times: int, least_flop: float) -> Iterator[Module]:
    yield Module(name=clean(node.name, 80), depth=depth, flop=times * node.flop)
    times *= node.num_equal
    large = [child for child in node.children.values() if times * child.flop >= least_flop]
    for child in large:
        yield from _rows(child, depth + 1, times, least_flop)
    rest = times * (node.flop / node.num_equal - sum(child.flop for child in large))
    if large and rest > 1e-6 * times * node.flop:
        yield Module(name="(itself and small parts)", depth=depth + 1, flop=rest)


def tree(by_module: Mapping[str, float]) -> Node:
    """FLOPs by path as a tree; neighbours that differ only in their number are one node."""
    root = Node("")
    for path, flop in by_module.items():
        node = root
        for name in levels(path)[:MAX_LEVELS]:
            node = node.children.setdefault(name, Node(name))
        node.own_flop += flop
    return _fold(root)


def levels(path: str) -> list[str]:
    """Names from the root on; a number stays with the list that it is in: ["model", "layers.0", "mlp"]."""
    return re.findall(r"[^.]+(?:\.\d+(?![^.]))*", path)


def _fold(node: Node) -> Node:
    folded: list[Node] = []
    for child in map(_fold, node.children.values()):
        last = folded[-1] if folded else None
        if last is not None and _is_next(last, child):
            last.num_equal += 1
            last.name = f"{last.name.partition(' ')[0]} ... {child.name} ({last.num_equal} x)"
        else:
            folded.append(child)
    return replace(node, children={child.name: child for child in folded})


def _is_next(last: Node, child: Node) -> bool:
    stem = _stem(child.name)
    is_neighbour = bool(stem) and stem == _stem(last.name.partition(" ")[0])
    return is_neighbour and replace(child, num_equal=last.num_equal).shape() == last.shape()


def _stem(name: str) -> str:
    """The list that a numbered module is in, "layers." or "."; empty for one with a name of its own."""
    match = re.fullmatch(r"(.*\.)?\d+", name)
    return (match[1] or ".") if match else ""
