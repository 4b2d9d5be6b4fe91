"""What does TraceML add to a tiny step? Run by `overhead.py` under TraceML's launcher; prints one line of JSON.

Its patches stay in place for the plain blocks, which do without its step context: what they cost there is not seen.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext

import torch
import traceml_ai as traceml

from overhead import TinyLoop, steady_costs


class TinyTraced(TinyLoop):
    def __init__(self) -> None:
        super().__init__()
        self._step: AbstractContextManager[None] = nullcontext()

    def _open(self) -> None:
        self._step = traceml.trace_step(self.model)
        self._step.__enter__()

    def switch(self, *, is_on: bool) -> None:
        self._step.__exit__(None, None, None)
        self._step = nullcontext()
        if is_on:
            self._open()

    def after_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        self._step.__exit__(None, None, None)
        self._open()

    def close(self) -> None:
        self._step.__exit__(None, None, None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    traceml.init(mode="auto")
    print(json.dumps(steady_costs(int(sys.argv[1]), {"traceml": TinyTraced()})), flush=True)
