"""How is a program measured that knows nothing of flopmeter? `flopmeter run` has `install` called once torch is there.

From then on torch tells of every optimizer step, and nothing else is hooked until the first one. The first steps show
what is trained: which optimizers take turns, and which modules the loop calls. Then a `TrainingMonitor` is attached to
those. When the program goes on to train something else, that gets a record of its own.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import wraps
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopmeter.errors import sign_warnings
from flopmeter.torch_compat import graph_task_id, outside_compiler

if TYPE_CHECKING:
    from flopmeter.integrations._discovery import Discovery
    from flopmeter.integrations._session import Session

logger = logging.getLogger("flopmeter")

MAX_RECORDS = 16
FREE_LOOKS, LOOK_SHARE = 4, 1e-3
"""Looks at all objects that are taken as soon as they are wanted, and the share of the time for those after them: a
loop may make a new optimizer for each of its steps."""
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
        self._output_dir = output_dir
        self._config = config
        self._is_quiet = is_quiet
        self._pid = os.getpid()
        self._thread: int | None = None
        self._discovery: Discovery | None = None
        self._session: Session | None = None
        self._num_records = 0
        self._num_missed = 0
        self._gone: set[Hashable] = set()
        self._num_looks = 0
        self._look_again_s = 0.0
        self._has_more = False
        self._is_idle = False
        self._last_words = ""
        self._undo: list[Callable[[], None]] = []
        self._reason = "no optimizer of torch has stepped in this process; processes that it starts are not measured"

    def follow(self) -> None:
        """Have torch tell of every optimizer step."""
        self._undo = [
            register_optimizer_step_pre_hook(self.on_optimizer).remove,
            register_optimizer_step_post_hook(self.on_optimizer_end).remove,
            _follow_gradient_scalers(self),
        ]

    def on_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step."""
        if self._session is not None and self._session.last_told() is not optimizer:
            self.guarded(self._announce, optimizer)

    def on_optimizer_end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""
        self.num_optimizer_steps += 1
        if self._session is None:
            self.guarded(self._learn, optimizer)

    def on_skipped(self, optimizer: Any) -> None:
        """A gradient scaler has kept an optimizer from stepping."""
        self.guarded(self._learn if self._session is None else self._session.on_skipped, optimizer)

    def finish(self) -> None:
        """The program is over: close the record, and say in one line what was found."""
        if os.getpid() != self._pid:
            return
        self._is_idle = True  # a thread that still trains begins nothing from here on
        for undo in self._undo:
            undo()
        if self._session is not None:
            with suppress(KeyboardInterrupt):  # who presses Ctrl-C again does not want to wait
                self._last_words = self._session.finish()
        said = self._last_words or f"nothing to measure: {self._reason}"
        if self._num_records > 1:
            beyond = "; those after it were not measured" if self._has_more else ""
            said += f" (the last of {self._num_records} trainings{beyond})"
        has_failed = hasattr(sys, "last_type")  # python has told of it: that is why there is nothing
        is_said = not self._is_quiet and bool(self._last_words or not has_failed)
        if is_said and os.environ.get("RANK", "0") == "0" and sys.stderr is not None:
            with suppress(OSError, ValueError):  # the program may have closed it
                print(f"flopmeter: {said}", file=sys.stderr)

    def _is_ours(self) -> bool:
        """Not a forked worker, and not a thread beside the one that trains."""
        is_here = self._thread is None or threading.get_ident() == self._thread or (graph_task_id() != -1)
        return is_here and not self._is_idle and os.getpid() == self._pid

    def guarded(self, action: Callable[[_T], None], argument: _T) -> None:
        """Do something where the program trains, and nowhere else; a mistake of ours ends the measuring, not more."""
        if not self._is_ours():
            return
        try:
            action(argument)
        except Exception as error:  # noqa: BLE001 - the program comes first
            self._give_up(f"{type(error).__name__}: {error}")

    def start_anew(self, num_missed: int, gone: Collection[Hashable]) -> None:
        """The program trains something else now: close this record, and learn again.

        Args:
            num_missed: Steps of it that are in no record. The turn that brought it out is told again.
            gone: Keys of the optimizers whose training is over.
        """
        assert self._session is not None
        self._last_words = self._session.finish()
        self._num_missed = num_missed
        self._gone.update(gone)
        self._session = None
        self._thread = None

    def _announce(self, optimizer: Any) -> None:
        if self._session is not None:
            self._session.on_any_optimizer(optimizer, is_in_backward=(graph_task_id() != -1))

    def _learn(self, optimizer: Any) -> None:
        is_in_backward = graph_task_id() != -1
        found = self._discovery
        num_lost = found.num_lost(optimizer) if found is not None and not is_in_backward else 0
        if found is not None and num_lost and monotonic() >= self._look_again_s:
            found.close()
            self._discovery, self._num_missed = None, num_lost
        if self._discovery is None:
            self._begin()
        if self._discovery is not None:
            self._discovery.note(optimizer, is_in_backward=is_in_backward)

    def _begin(self) -> None:
        is_measured = _is_measured_already()
        if is_measured:
            self._reason = "the program uses flopmeter itself"
        self._has_more = self._num_records >= MAX_RECORDS
        self._is_idle = is_measured or self._has_more
        if self._is_idle:
            return
        _import_apart("flopmeter.integrations._session")
        from flopmeter.integrations._discovery import Discovery

        start_s = monotonic()
        self._discovery = Discovery(self._attach, self._num_missed, self._gone, is_in_backward=(graph_task_id() != -1))
        self._num_looks += 1
        end_s = monotonic()
        self._look_again_s = end_s if self._num_looks < FREE_LOOKS else end_s + (end_s - start_s) / LOOK_SHARE
        self._reason = "the program ended before its training loop was understood"

    def _attach(self) -> None:
        from flopmeter.integrations._session import Session

        assert self._discovery is not None
        found, self._discovery = self._discovery, None
        found.close()
        self._thread = threading.get_ident()
        self._num_records += 1
        self._session = Session(found, self._folder(), self._config, self)

    def _folder(self) -> str:
        folder = self._output_dir if self._num_records == 1 else f"{self._output_dir}-{self._num_records}"
        is_job = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = os.environ.get("RANK", "0")  # launched together, but each for itself
        return folder if is_job or rank == "0" else f"{folder}-rank{rank}"

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._is_idle = True
        logger.warning("flopmeter run is switched off (%s); the program goes on", reason)


def _is_measured_already() -> bool:
    """Whether the program has a monitor of its own at work."""
    module = sys.modules.get("flopmeter.monitor")
    if module is None:
        return False  # nobody can have made one: that spares a look at all objects
    return any(item.is_running for item in gc.get_objects() if issubclass(type(item), module.TrainingMonitor))


def _import_apart(name: str) -> None:
    """Import a module on another thread, because malloc gives each thread memory of its own.

    What is imported here stays. Among the holes that the activations of the first step have left it would keep those of
    all later steps apart, which was measured as 0.3 % of a step.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(import_module, name).result()


for _name in ("on_optimizer", "on_optimizer_end"):  # where a program compiles its optimizer's step
    setattr(Program, _name, _hook := outside_compiler(getattr(Program, _name)))
    _hook._torchdynamo_disable = True


def _follow_gradient_scalers(program: Program) -> Callable[[], None]:
    """A scaler that finds an overflow does not call the optimizer: no hook would tell of that step."""
    original = torch.amp.GradScaler.step

    @wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = program.num_optimizer_steps
        try:
            result = original(self, optimizer, *args, **kwargs)
        except BaseException as error:
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next  # no frame of ours in the program's traceback
            raise
        if program.num_optimizer_steps == before:
            program.on_skipped(optimizer)
        return result

    def undo() -> None:
        if torch.amp.GradScaler.step is step:
            torch.amp.GradScaler.step = original  # type: ignore[method-assign]

    torch.amp.GradScaler.step = step  # type: ignore[method-assign]
    return undo
