"""How long was this rank blocked in collectives, and in which phase?

    blocking = Blocking(model, phase)
    blocking.attach()
    ...
    blocking.take()          # nanoseconds by phase since the last call

Three places, each private to torch and looked for before it is used:

- `Work.wait`, where every collective that Python starts ends up: FSDP2's gathers and scatters, a loop's own reductions;
- the first use of a tensor that is still on its way (`AsyncCollectiveTensor`): tensor parallelism;
- DDP, which waits in C++. A callback that is queued when the backward pass begins runs when its work is done and before
  DDP waits for its buckets; what is left until `backward` returns is exposed communication.

On a GPU none of these blocks the host: the queue waits, not the thread. There the same callback sets a mark on the
device's timeline, and the numbers of the host are not given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopmeter.devices import devices_of
from flopmeter.hook_hiding import replace_attribute
from flopmeter.schema import PHASES
from flopmeter.torch_compat import (
    DisableTorchFunction,
    async_collective_tensor,
    graph_task_id,
    queue_callback,
    uses_compiled_autograd,
)

logger = logging.getLogger("flopmeter")

_BACKWARD = PHASES.index("backward")


class Blocking:
    """Adds up blocked time on the thread that created it, and inside the backward passes that it starts.

    Args:
        model: The object that the loop calls.
        phase: Gives the phase that runs now, as an index into `schema.PHASES`; a larger one is a pause.
    """

    def __init__(self, model: nn.Module | None, phase: Callable[[], int]) -> None:
        self.on_backward_computed: Callable[[], None] | None = None
        """Called when a backward pass of DDP has done its work, before gradients are waited for. Must not raise."""
        self.is_on = True
        """Whether functions of torch may be replaced: without that nothing is known."""
        self._phase = phase
        self._is_ddp = any(isinstance(m, DistributedDataParallel) for m in model.modules()) if model else False
        self._is_on_host = devices_of(model)[0].type == "cpu"
        self._thread = get_ident()
        self._blocked_ns = [0] * (len(PHASES) + 1)
        self._is_inside = False
        self._computed_ns: int | None = None
        self._at_computed_ns = 0
        self._has_missed_one = False
        self._handle: Any = None
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Start listening; what this torch does not have is left out."""
        if not self.is_on:
            return
        self._patch(getattr(dist, "Work", None), "wait")
        for name in ("wait", "trigger_wait"):
            self._patch(async_collective_tensor(), name)
        self._patch(DistributedDataParallel, "_sync_buffers")

    def detach(self) -> None:
        """Take everything away again. Safe to call twice."""
        while self._undo:
            self._undo.pop()()

    def take(self) -> tuple[int, ...] | None:
        """Nanoseconds by phase since the last call; None where the host cannot tell."""
        blocked, self._blocked_ns = self._blocked_ns, [0] * (len(PHASES) + 1)
        is_known = self.is_on and self._is_on_host and not self._has_missed_one
        self._has_missed_one = False
        return tuple(blocked[: len(PHASES)]) if is_known else None

    def on_backward(self, roots: Any) -> None:
        """A backward pass from these tensors begins."""
        self._computed_ns = None
        if not self._is_ddp or uses_compiled_autograd():
            self._has_missed_one = self._is_ddp
            return
        root = roots[0] if isinstance(roots, (tuple, list)) and roots else roots
        try:
            with DisableTorchFunction():  # a mode of the user's sees nothing of ours
                if isinstance(root, torch.Tensor) and root.grad_fn is not None:
                    # Each loss has hooks of its own: what the user adds to one must not run on another.
                    self._handle = root.register_hook(self._queue)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - from here it would end the user's backward pass
            self._give_up(error)

    def on_backward_end(self) -> None:
        """It is over: what passed since its work was done was waiting for gradients. The loss is as it was."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._computed_ns is not None:
            waited_ns = perf_counter_ns() - self._computed_ns
            # In place of, not on top of, waits that were seen meanwhile.
            self._blocked_ns[_BACKWARD] = self._at_computed_ns + waited_ns
            self._computed_ns = None
        elif self._is_ddp:
            self._has_missed_one = True

    def _queue(self, grad: torch.Tensor) -> None:
        try:
            queue_callback(self._note_computed)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_ddp = False
        logger.warning("exposed communication is not measured: %s: %s", type(error).__name__, error)

    def _note_computed(self) -> None:
        self._computed_ns = perf_counter_ns()
        self._at_computed_ns = self._blocked_ns[_BACKWARD]
        if self.on_backward_computed is not None:
            self.on_backward_computed()

    def _patch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name, None)
        if original is None:
            logger.info("this torch has no %s: waits there are not seen", name)
            return

        def waiting(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # a constant to the compiler: it sees the original and nothing else
                return original(*args, **kwargs)
            is_ours = get_ident() == self._thread or graph_task_id() != -1
            if self._is_inside or not is_ours:
                return original(*args, **kwargs)
            self._is_inside = True
            start_ns = perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._is_inside = False
                self._blocked_ns[min(self._phase(), len(PHASES))] += perf_counter_ns() - start_ns

        self._undo.append(replace_attribute(owner, name, waiting))
