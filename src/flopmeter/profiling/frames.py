"""Which lines of the loop's own code take its time? The training thread's frames, read in short bursts.

    frames = FrameWatch(event, budget=0.005)
    frames.start_run()         # on the training thread
    frames.note_step(12)       # in the background: a burst begins on a thread of its own when it is time
    frames.close()

A stack tells what the loop is at: data, a model, autograd, an optimizer, a checkpoint; all else is its own code. A
place is named by the line of the loop, which is the deepest function that also calls the model, and by the line that it
had come to outside torch, numpy and Python's own library. Only code and line numbers are kept, never a frame: a frame
holds the program's tensors.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

logger = logging.getLogger("flopmeter")

FIRST_STEP = 3
RATE_HZ, NUM_SAMPLES = 50, 200
"""Of a burst, which so takes four seconds and some 10 ms of CPU time."""
BUDGET_SHARE = 0.1
"""Of the overhead budget, for bursts after the first; each gap is twice the one before."""
LATE_S = 0.03
"""Python code gives the interpreter away within 5 ms: who had to wait so much longer, while the process computed,
waited for native code."""
MAX_ROWS = 10
MAX_DEPTH = 200

_OURS = str(Path(__file__).resolve().parents[1])
_STDLIB = sysconfig.get_path("stdlib")
_KINDS = {
    "torch/utils/data/dataloader.py": ("__next__",),
    "torch/nn/modules/module.py": ("_call_impl", "_wrapped_call_impl"),
    "torch/_tensor.py": ("backward",),
    "torch/autograd/__init__.py": ("backward", "grad"),
    "torch/optim/optimizer.py": ("wrapper",),
    "torch/serialization.py": ("save",),
    "torch/distributed/checkpoint/state_dict_saver.py": ("save", "async_save"),
    "transformers/generation/utils.py": ("generate",),
}
"""Functions below which it is not the loop's own code that runs."""

Stack = list[tuple[CodeType, int]]
"""Code and line, the innermost first."""


class FrameWatch:
    """Reads where the training thread is, now and then.

    Args:
        event: Writes an event to the run file; called in the background.
        budget: Share of the time that all measuring may take.
    """

    def __init__(self, event: Callable[..., None], budget: float) -> None:
        self._event = event
        self._budget = budget
        self._training = 0
        self._burst: threading.Thread | None = None
        self._closing = threading.Event()
        self._gap_s = self._next_s = 0.0
        self._num_all = self._num_told = 0
        self._loop: set[CodeType] = set()
        """Functions that call the model, the optimizer or the loader."""
        self._own: Counter[tuple[tuple[tuple[CodeType, int], ...], bool]] = Counter()

    def start_run(self) -> None:
        """The run begins, on this thread."""
        if getattr(sys, "_is_gil_enabled", lambda: True)():  # without it, frames change while they are read
            self._training = threading.get_ident()

    def note_step(self, index: int) -> None:
        """An ordinary step was digested, `index` were before it: begin a burst if it is time for one."""
        if index < FIRST_STEP or not self._training or time.monotonic() < self._next_s or self._closing.is_set():
            return
        if self._burst is None or not self._burst.is_alive():
            self._next_s = float("inf")
            burst = threading.Thread(target=self._run, name="flopmeter-frames", daemon=True)
            burst.start()
            self._burst = burst  # started: `close` may come from the training thread at any time

    def close(self) -> None:
        """The run is over: tell what was seen."""
        self._closing.set()
        if self._burst is not None:
            self._burst.join(1.0)

    def _run(self) -> None:
        try:
            self._sample()
        except Exception as error:  # noqa: BLE001 - switched off: the time of the next burst never comes
            logger.warning("the loop's own code is not looked into any more: %s: %s", type(error).__name__, error)

    def _sample(self) -> None:
        began_s, computed_s = time.monotonic(), time.process_time()
        for num in range(NUM_SAMPLES):
            # Not in step with the loop: waits of half to one and a half periods, by the golden ratio.
            if self._closing.wait((0.5 + num * 0.618034 % 1) / RATE_HZ):
                break
            now_s, cpu_s = time.monotonic(), time.process_time()
            elapsed_s = now_s - began_s
            late_s = elapsed_s - 1.5 / RATE_HZ
            is_native = late_s > LATE_S and cpu_s - computed_s > 0.7 * elapsed_s
            began_s, computed_s = now_s, cpu_s
            if not self.note(self._stack(), round(elapsed_s * RATE_HZ) if is_native else 1, is_native=is_native):
                break  # the thread has ended
        if self._num_all > self._num_told:
            self._num_told, num_own = self._num_all, sum(self._own.values())
            top = [[place, round(share, 3)] for place, share in self.rows()]
            self._event("frames", num=self._num_all, own_share=round(num_own / self._num_all, 3), top=top)
        self._gap_s = max(2 * self._gap_s, time.thread_time() / (BUDGET_SHARE * self._budget) if self._budget else 1e9)
        self._next_s = time.monotonic() + self._gap_s

    def _stack(self) -> Stack:
        frame: FrameType | None = sys._current_frames().get(self._training)
        found: Stack = []
        while frame is not None and len(found) < MAX_DEPTH:
            found.append((frame.f_code, frame.f_lineno or 0))
            frame = frame.f_back
        return found

    def note(self, stack: Stack, weight: int = 1, *, is_native: bool = False) -> bool:
        """Take one sample in; False where there is none."""
        if not stack:
            return False
        if stack[0][0].co_filename.startswith(_OURS) or any("flopmeter/flops/" in c.co_filename for c, _ in stack):
            return True  # our own time, or a step that is measured
        self._num_all += weight
        files = [code.co_filename.replace("\\", "/").rpartition("site-packages/")[2] for code, _ in stack]
        kinds = [at for at, (code, _) in enumerate(stack) if code.co_name in _KINDS.get(files[at], ())]
        if kinds:
            self._loop.update(code for code, _ in stack[kinds[-1] + 1 :])
        else:
            self._own[tuple(stack), is_native] += weight
        return True

    def rows(self) -> list[tuple[str, float]]:
        """Places of the loop's own code with their shares of it, the largest first."""
        lines: Counter[str] = Counter()
        inner: dict[str, Counter[str]] = {}
        for (stack, is_native), weight in self._own.items():
            at = next((at for at, (code, _) in enumerate(stack) if code in self._loop), None)
            deepest = next((at for at, (code, _) in enumerate(stack) if not _is_plain(code)), len(stack) - 1)
            line = _named(*stack[deepest if at is None else at])
            lines[line] += weight
            leaf = "" if _named(*stack[deepest]) == line else f", in {_named(*stack[deepest])}"
            inner.setdefault(line, Counter())[leaf + (" (native code)" if is_native else "")] += weight
        total = sum(lines.values())
        return [(line + inner[line].most_common(1)[0][0], num / total) for line, num in lines.most_common(MAX_ROWS)]


def _is_plain(code: CodeType) -> bool:
    """Whether it is Python's, torch's, numpy's or ours, and so tells little by itself."""
    name = code.co_filename
    package = name.rpartition("site-packages/")[2].partition("/")[0]
    is_library = package in ("torch", "numpy") or (name.startswith(_STDLIB) and "site-packages" not in name)
    return is_library or name.startswith((_OURS, "<"))


def _named(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line}"
