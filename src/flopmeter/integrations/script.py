"""How is a program measured that knows nothing of flopmeter? `flopmeter run` has `install` called once torch is there.

From then on torch tells of every optimizer step and every backward pass, and nothing else is hooked until an optimizer
steps after a backward pass. Two steps show which modules the loop calls; then a `TrainingMonitor` is attached to those.
When the program goes on to train something else, that gets a record of its own.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from functools import wraps
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopmeter.errors import sign_warnings
from flopmeter.hook_hiding import hide_frame, replace_attribute
from flopmeter.torch_compat import graph_task_id, outside_compiler, skip_in_compiler

if TYPE_CHECKING:
    from flopmeter.integrations._training import Training
    from flopmeter.monitor import TrainingMonitor

logger = logging.getLogger("flopmeter")

MAX_RECORDS = 16
FREE_LOOKS, LOOK_SHARE = 4, 1e-3
"""Looks at all objects that are taken as soon as they are wanted, and the share of the time for those after them: a
loop may make a new optimizer for each of its steps."""
NUM_LASTING = 3
"""Of what `follow` undoes at the end; what comes behind is undone when something is measured."""
NO_OPTIMIZER = "no optimizer of torch has stepped in this process; processes that it starts are not measured"
NO_TORCH_OPTIMIZER = (
    "{} and no step of a torch optimizer: where the loop updates its weights, write monitor.log_step(step), after "
    "monitor = flopmeter.watch(model) before the loop"
)
_T = TypeVar("_T")


def install(settings: str) -> None:
    """Measure whatever this process trains from now on.

    Args:
        settings: As JSON: `output_dir`, `config` (a mapping) and `is_quiet`.
    """
    sign_warnings()
    program = Program(**json.loads(settings))
    program.follow()

    def finish() -> None:
        try:
            program.finish()
        except Exception as error:  # noqa: BLE001 - the program may have taken apart what we would need
            logger.warning("the record could not be closed: %s: %s", type(error).__name__, error)

    atexit.register(finish)


class Program:
    """Everything that one process trains, one thing after the other."""

    def __init__(self, output_dir: str, config: dict[str, Any], is_quiet: bool) -> None:
        self.num_optimizer_steps = 0
        self.num_passes = 0
        """Backward passes until something is measured."""
        self._output_dir, self._config, self._is_quiet = output_dir, config, is_quiet
        self._pid = os.getpid()
        self._thread: int | None = None
        self._training: Training | None = None
        self._num_records = 0
        self._num_missed = 0
        self._gone: set[Hashable] = set()
        self._num_looks = 0
        self._look_again_s = 0.0
        self._has_more = False
        self._is_idle = False
        self._last_words = ""
        self._undo: list[Callable[[], None]] = []
        self._reason = NO_OPTIMIZER

    def follow(self) -> None:
        """Have torch tell of every optimizer step and every backward pass."""
        self._undo = [
            register_optimizer_step_pre_hook(self.on_optimizer).remove,
            register_optimizer_step_post_hook(self.on_optimizer_end).remove,
            _follow_gradient_scalers(self),
            *(_follow_passes(self, name) for name in ("backward", "grad")),
        ]

    @property
    def _is_measuring(self) -> bool:
        return self._training is not None and self._training.monitor is not None

    def on_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step."""
        training = self._training
        if training is not None and training.monitor is not None and training.last_told() is not optimizer:
            self.guarded(training.on_any_optimizer, optimizer)

    def on_optimizer_end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""
        self.num_optimizer_steps += 1
        if not self._is_measuring:
            self.guarded(self._learn, optimizer)

    def on_skipped(self, optimizer: Any) -> None:
        """A gradient scaler has kept an optimizer from stepping."""
        training = self._training if self._is_measuring else None
        self.guarded(self._learn if training is None else training.on_skipped, optimizer)

    def finish(self) -> None:
        """The program is over: close the record, and say in one line what was found."""
        if os.getpid() != self._pid:
            return
        self._is_idle = True  # a thread that still trains begins nothing from here on
        for undo in self._undo:
            undo()
        if self._training is not None:
            with suppress(KeyboardInterrupt):  # who presses Ctrl-C again does not want to wait
                self._last_words = self._training.finish() or self._last_words
        if self._reason is NO_OPTIMIZER and self.num_passes and not self.num_optimizer_steps:
            self._reason = NO_TORCH_OPTIMIZER.format(f"{self.num_passes:,} backward pass{'es' * (self.num_passes > 1)}")
        said = self._last_words or f"nothing to measure: {self._reason}"
        if self._num_records > 1:
            beyond = "; those after it were not measured" if self._has_more else ""
            said += f" (the last of {self._num_records} trainings{beyond})"
        has_failed = hasattr(sys, "last_type")  # python has told of it: that is why there is nothing
        is_said = not self._is_quiet and bool(self._last_words or not has_failed)
        if is_said and os.environ.get("RANK", "0") == "0" and sys.stderr is not None:
            with suppress(OSError, ValueError):  # the program may have closed it
                print(f"flopmeter: {said}", file=sys.stderr)

    def guarded(self, action: Callable[[_T], None], argument: _T) -> None:
        """Do something where the program trains, and nowhere else; a mistake of ours ends the measuring, not more."""
        is_here = self._thread is None or threading.get_ident() == self._thread or graph_task_id() != -1
        if self._is_idle or not is_here or os.getpid() != self._pid:
            return  # a forked worker, or a thread beside the one that trains
        try:
            action(argument)
        except Exception as error:  # noqa: BLE001 - the program comes first
            self._reason = f"{type(error).__name__}: {error}"
            self._is_idle = True
            logger.warning("flopmeter run is switched off (%s); the program goes on", self._reason)

    def start_anew(self, num_missed: int, gone: Collection[Hashable]) -> None:
        """The program trains something else now: close this record, and look again.

        Args:
            num_missed: Steps of it that are in no record. The turn that brought it out is told again.
            gone: Keys of the optimizers whose training is over.
        """
        assert self._training is not None
        self._last_words = self._training.finish()
        self._num_missed = num_missed
        self._gone.update(gone)
        self._training = self._thread = None

    def _learn(self, optimizer: Any) -> None:
        found = self._training
        num_lost = found.num_lost(optimizer) if found is not None else 0
        if found is not None and num_lost and monotonic() >= self._look_again_s:
            found.finish()
            self._training, self._num_missed = None, num_lost
        if self._training is None:
            if not self.num_passes:
                return  # called before the training begins: by a checkpoint that is loaded, or to quieten a scheduler
            self._look()
        if self._training is not None:
            self._training.note(optimizer)

    def _look(self) -> None:
        is_measured = _is_measured_already()
        if is_measured:
            self._reason = "the program uses flopmeter itself"
        self._has_more = self._num_records >= MAX_RECORDS
        self._is_idle = is_measured or self._has_more
        if self._is_idle:
            return
        from flopmeter.integrations._training import Training

        start_s = monotonic()
        self._training = Training(self, self._num_missed, self._gone)
        self._num_looks += 1
        end_s = monotonic()
        self._look_again_s = end_s if self._num_looks < FREE_LOOKS else end_s + (end_s - start_s) / LOOK_SHARE
        self._reason = "the program ended before its training loop was understood"

    def new_monitor(self) -> TrainingMonitor:
        """The monitor of the training that begins here, with a folder of its own."""
        from flopmeter.monitor import TrainingMonitor

        while len(self._undo) > NUM_LASTING:
            self._undo.pop()()
        self._thread = threading.get_ident()
        self._num_records += 1
        folder = self._output_dir if self._num_records == 1 else f"{self._output_dir}-{self._num_records}"
        is_job = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = os.environ.get("RANK", "0")  # launched together, but each for itself
        return TrainingMonitor(folder if is_job or rank == "0" else f"{folder}-rank{rank}", self._config)


def _is_measured_already() -> bool:
    """Whether the program has a monitor of its own at work."""
    module = sys.modules.get("flopmeter.monitor")
    if module is None:
        return False  # nobody can have made one: that spares a look at all objects
    return any(item.is_running for item in gc.get_objects() if issubclass(type(item), module.TrainingMonitor))


for _name in ("on_optimizer", "on_optimizer_end"):  # where a program compiles its optimizer's step
    setattr(Program, _name, _hook := outside_compiler(getattr(Program, _name)))
    _hook._torchdynamo_disable = True


def _follow_passes(program: Program, name: str) -> Callable[[], None]:
    """Count backward passes until something is measured: an optimizer that steps before them trains nothing."""
    original = getattr(torch.autograd, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        program.num_passes += 1
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            hide_frame(error)
            raise

    skip_in_compiler(run.__code__, and_callees=False)
    return replace_attribute(torch.autograd, name, run)


def _follow_gradient_scalers(program: Program) -> Callable[[], None]:
    """A scaler that finds an overflow does not call the optimizer: no hook would tell of that step."""
    original = torch.amp.GradScaler.step

    @wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = program.num_optimizer_steps
        try:
            result = original(self, optimizer, *args, **kwargs)
        except BaseException as error:
            hide_frame(error)  # no frame of ours in the program's traceback
            raise
        if program.num_optimizer_steps == before:
            program.on_skipped(optimizer)
        return result

    return replace_attribute(torch.amp.GradScaler, "step", step)
