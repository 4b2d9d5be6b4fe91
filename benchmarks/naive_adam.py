"""An optimizer as one writes it by hand: a Python loop over parameters, a new tensor for every step of the formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


class NaiveAdam(Optimizer):
    """Adam (Kingma and Ba, 2015, algorithm 1), piece by piece.

    Args:
        num_slices: Pieces in which each parameter is updated: more of them cost more, and change nothing.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, lr: float, num_slices: int) -> None:
        super().__init__(parameters, {"lr": lr})
        self._num_slices = num_slices
        self._num_steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters."""
        loss = closure() if closure is not None else None
        self._num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group["lr"])
        return loss

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        tensors = (parameter, grad, state["mean"], state["square"])
        for piece, slope, mean, square in zip(*(t.view(-1).chunk(self._num_slices) for t in tensors), strict=True):
            mean.copy_(_BETAS[0] * mean + (1 - _BETAS[0]) * slope)
            square.copy_(_BETAS[1] * square + (1 - _BETAS[1]) * slope * slope)
            corrected = mean / (1 - _BETAS[0] ** self._num_steps)
            scale = (square / (1 - _BETAS[1] ** self._num_steps)).sqrt() + _EPSILON
            piece.copy_(piece - lr * corrected / scale)
