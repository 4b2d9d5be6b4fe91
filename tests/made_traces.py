"""Small traces made by hand, whose answers can be worked out on paper. Times are microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

A100 = "NVIDIA A100-SXM4-80GB"
MAIN, ENGINE = 1, 2
"""Threads: the one that trains, and autograd's."""


class MadeTrace:
    """Collects events; `write` makes a file of them."""

    def __init__(self, *, device: str | None = A100, rank: int | None = None, world_size: int | None = None) -> None:
        self.head: dict[str, Any] = {"schemaVersion": 1}
        if device is not None:
            self.head["deviceProperties"] = [{"id": 0, "name": device}]
        if rank is not None:
            self.head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
        self.events: list[dict[str, Any]] = []
        self._num_launches = 0

    def add(self, cat: str, name: str, ts: float, dur: float, tid: Any = MAIN, **args: Any) -> None:
        place = {"pid": 9, "tid": tid, "ts": ts, "dur": dur}
        self.events.append({"ph": "X", "cat": cat, "name": name, **place, "args": args})

    def step(self, number: int, ts: float, dur: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", ts, dur)

    def fetch(self, ts: float, dur: float) -> None:
        self.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", ts, dur)

    def op(
        self,
        name: str,
        ts: float,
        dur: float,
        dims: list[Any] | None = None,
        values: list[str] | None = None,
        dtype: str = "float",
        tid: int = MAIN,
        makes_node: bool = False,
    ) -> None:
        """An operator; an argument of shape [] is no tensor."""
        args: dict[str, Any] = {"External id": 1}
        if dims is not None:
            args |= {"Input Dims": dims, "Input type": [dtype if shape else "Scalar" for shape in dims]}
        if values is not None:
            args["Concrete Inputs"] = values
        if makes_node:
            args |= {"Sequence number": 7, "Fwd thread id": 0}
        self.add("cpu_op", name, ts, dur, tid, **args)

    def node(self, name: str, ts: float, dur: float, tid: int = ENGINE) -> None:
        """A node of the backward pass."""
        self.add("cpu_op", f"autograd::engine::evaluate_function: {name}", ts, dur, tid)

    def kernel(
        self, name: str, ts: float, dur: float, launch: float | None, *, tid: int = MAIN, cat: str = "kernel"
    ) -> None:
        """A kernel, and the call that launched it; no call when `launch` is None."""
        self._num_launches += 1
        if launch is not None:
            self.add("cuda_runtime", "cudaLaunchKernel", launch, 1, tid, correlation=self._num_launches)
        self.add(cat, name, ts, dur, 7, device=0, stream=7, correlation=self._num_launches)

    def copy(self, name: str, ts: float, dur: float, launch: float | None) -> None:
        self.kernel(name, ts, dur, launch, cat="gpu_memcpy")

    def text(self, indent: int | None = 2) -> str:
        return json.dumps({**self.head, "traceEvents": self.events, "traceName": "made.json"}, indent=indent)

    def write(self, folder: Path, name: str = "made.json") -> Path:
        path = folder / name
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path
