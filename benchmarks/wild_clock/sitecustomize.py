"""When did a program's optimizers step, and where did a few steps spend their time? A clock that is not flopmeter's.

Python imports this file by itself where its folder is on PYTHONPATH. `WILD_CLOCK` names the file for the times of the
steps; with `WILD_READING`, `WILD_READ_STEPS` steps after the eighth run under torch.profiler, their shares go to that
file, and the program ends there. With `WILD_STEPS` it ends behind so many steps.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

FIRST_READ, NUM_READ = 8, int(os.environ.get("WILD_READ_STEPS", "4"))
MATRIX = ("aten::mm", "addmm", "bmm", "convolution", "flash_attention", "mkldnn_rnn", "mkl_linear", "_slow_conv2d")


class Clock(importlib.abc.MetaPathFinder):
    """Waits for torch's optimizers to be imported, then notes each of their steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, float, float]] = []
        self.profiler: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Hook in behind the import of the one module."""
        if fullname != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.register_optimizer_step_post_hook(self.note)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def note(self, optimizer: object, *_: object) -> None:
        """One optimizer has stepped."""
        self.steps.append((id(optimizer), time.perf_counter(), time.process_time(), waited_s()))
        if len(self.steps) == int(os.environ.get("WILD_STEPS", "0")):
            self.write()
            os._exit(0)
        if not os.environ.get("WILD_READING"):
            return
        own = sum(step[0] == self.steps[0][0] for step in self.steps)
        if own == FIRST_READ and self.profiler is None:
            from torch.profiler import ProfilerActivity, profile

            self.profiler = profile(activities=[ProfilerActivity.CPU])
            self.profiler.start()
        elif own == FIRST_READ + NUM_READ:
            self.profiler.stop()
            Path(os.environ["WILD_READING"]).write_text(json.dumps(shares(self.profiler.events())))
            os._exit(0)

    def write(self) -> None:
        """Keep the times of the first rank."""
        if self.steps and os.environ.get("RANK", "0") == "0":
            Path(os.environ["WILD_CLOCK"]).write_text(json.dumps(self.steps))


def waited_s() -> float:
    """For how long this thread was ready to run and had no core; 0 where Linux does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def shares(events: Any) -> dict[str, Any]:
    """Of a step's wall time: by kind of work, and the longest operators. What no event covers is Python's own time.

    Medians over the steps: on a busy machine the thread is off its core in some of them, for longer than they take.
    """
    threads = Counter(event.thread for event in events)
    own = [event for event in events if event.thread == threads.most_common(1)[0][0]]
    ends = sorted(event.time_range.end for event in own if event.name.startswith("Optimizer.step#"))
    ends = ends[:: max(round(len(ends) / NUM_READ), 1)]
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(ends) - 1))
    by_name: Counter[str] = Counter()
    for event in own:
        step = bisect_left(ends, event.time_range.start) - 1
        if not 0 <= step < len(ends) - 1:
            continue
        names = [event.name]
        above = event.cpu_parent
        while above is not None:
            names.append(above.name)
            above = above.cpu_parent
        self_us = event.self_cpu_time_total
        by_name[event.name] += self_us
        if any(name.startswith("Optimizer.") for name in names):
            by_kind["optimizer"][step] += self_us
        elif any(name.startswith("enumerate(DataLoader)") for name in names):
            by_kind["loader"][step] += self_us
        elif any(part in event.name for part in MATRIX):
            by_kind["matrix"][step] += self_us
        else:
            by_kind["other operators"][step] += self_us
    told_us = [sum(kind[step] for kind in by_kind.values()) for step in range(len(ends) - 1)]
    by_kind["python"] = [end - begin - told for (begin, end), told in zip(pairwise(ends), told_us, strict=True)]
    typical_us = Counter({kind: median(us) for kind, us in by_kind.items()})
    step_us, total_us = sum(typical_us.values()), ends[-1] - ends[0]
    return {
        "step_s": step_us / 1e6,
        "shares": {name: round(us / step_us, 4) for name, us in typical_us.most_common()},
        "longest": {name: round(us / total_us, 4) for name, us in by_name.most_common(8)},
        "events_per_step": len(events) / NUM_READ,
    }


if os.environ.get("WILD_CLOCK"):
    clock = Clock()
    sys.meta_path.insert(0, clock)
    atexit.register(clock.write)
