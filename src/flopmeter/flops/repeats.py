"""Which products does a custom autograd function compute a second time in its backward pass?

Chunked losses (TRL, Liger) and fused layers throw their products away and make them again, with gradients switched off:
to the dispatcher that looks like gradient work. But a product of the forward pass has at most two gradients, each of
which takes as many FLOPs as the product itself. What a function's backward pass does beyond that is recomputation.

Not seen: a repeat that takes the place of a gradient which nobody wants (a frozen weight), and one that is cut into
chunks of another size than the forward pass was.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from torch.autograd.function import BackwardCFunction

GRADIENTS_PER_PRODUCT = 2
COMPILED = "CompiledFunctionBackward"
"""The compiler's own function, which holds a whole model: what it makes again is told by the uncompiled twin."""


class Repeats:
    """Notes the products inside custom functions; a function's forward and backward pass share a sequence number."""

    def __init__(self) -> None:
        self._forward: Counter[tuple[int, float]] = Counter()
        self._backward: dict[tuple[int, float], list[int]] = defaultdict(list)

    def see_forward(self, sequence: int, flop: float) -> None:
        """A product without gradients, after the node of this number was made."""
        self._forward[sequence, flop] += 1

    def see_backward(self, node: Any, flop: float, position: int) -> None:
        """A product in a node's backward pass; `position` names it in the answer of `find`."""
        if isinstance(node, BackwardCFunction) and type(node).__name__ != COMPILED:
            self._backward[node._sequence_nr(), flop].append(position)

    def find(self) -> set[int]:
        """Positions of the products that were made before."""
        found: set[int] = set()
        for key, positions in self._backward.items():
            num_forward = self._forward[key]
            if num_forward:
                found |= set(positions[: max(0, len(positions) - GRADIENTS_PER_PRODUCT * num_forward)])
        return found
