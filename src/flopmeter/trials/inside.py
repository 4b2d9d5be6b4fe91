"""What happens inside a process of the program that is tried? Changes are switched, steps timed, and it ends by itself.

`install` is called in the program's own process as soon as torch is imported. A plan says which changes are on for how
many steps; behind the last block the program is ended, whatever it is doing: its loader's workers go with it, and the
ranks of a job wait for each other. What was seen goes to `rank<N>.json` in the trial's folder.
A step is a turn of the optimizer that stepped first; it begins and ends behind that optimizer.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from copy import deepcopy
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset

from flopmeter.devices.cpu import read_cpu
from flopmeter.hook_hiding import replace_attribute
from flopmeter.resources import waited_s
from flopmeter.trials import EARLY_STEPS, NOTHING_SEEN, write_whole
from flopmeter.trials.candidates import all_modules, load_candidates, spelled_out

NUM_LOSSES, NUM_GRADIENTS = 24, 4
"""Steps whose first loss is noted, and steps whose gradients are."""
BEFORE_BLOCKS = 2
"""Turns of the first optimizer before the plan begins: by then all that the loop uses has been seen."""
MAX_LOADERS = 20
PROJECTED = 1 << 16
"""Elements of a gradient that its signature is made of."""
RANKS_WAIT_S, END_WAIT_S = 20.0, 60.0
"""How long a rank waits for the others at the end, and then for what the program has registered for its exit."""
_RANK, _NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Trial:
    """One process of the program: what a change is given, and what was seen.

    Args:
        settings: By name:
            place: Folder for what was seen, and for files that the program would save elsewhere.
            free: Folder in which the program may write as it likes: its own copy; "" where it runs in place.
            plan: Blocks one after the other, each with `on` (names of changes), `steps`, and `kind`.
            whole: Changes that are on for the whole of the process.
            candidates: A user's file of changes, or "".
            until: For the first look: `min_steps`, `min_s`, `max_s` in place of the last block's `steps`; else None.
            finds_models: Whether to see which modules the loop calls.
            began_s: When the process was started, by the clock on the wall.
            parent: Process that started this one; with its end this one ends.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.models: list[nn.Module] = []
        """What the loop calls for training, the outermost modules only."""
        self.optimizers: list[Optimizer] = []
        """All that have stepped."""
        self.device = "cpu"
        """Kind of the device that the first parameter is on."""
        self.compiled: dict[int, Any] = {}
        """What `nn.Module.compile` made, by the id of the module: it is made once, however often it is switched."""
        self.keeps_activations = False
        """Whether activation checkpoints do nothing."""
        self.has_paused = False
        """Whether the program has begun to evaluate, or has saved, since the last step."""
        self.place = Path(settings["place"])
        self._settings, self._plan = settings, settings["plan"]
        self._candidates = load_candidates(settings["candidates"])
        self._pid = os.getpid()
        self._block, self._first, self._num_passes = -1, 0, 0
        self._last_s = self._start_s = self._waited_s = self._others_cpu_s = 0.0
        self._on: dict[str, Iterator[None]] = {}
        self._contexts: list[Callable[[], AbstractContextManager[Any]]] = []
        """What the forward side of a step runs in."""
        self._entered = ExitStack()
        self._stop_finding: Callable[[], None] = lambda: None
        self._is_redirected = self._is_over = False
        self.seen = deepcopy(NOTHING_SEEN)

    # For changes

    def around_forward(self, context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
        """Have all of a step but backward passes and updates run in a context, as `with` around model and loss does."""
        self._contexts.append(context)
        self._enter_forward()

        def undo() -> None:
            self._contexts.remove(context)
            self._enter_forward()

        return undo

    def change_arguments(self, kind: type, change: Callable[[dict[str, Any]], None]) -> None:
        """Have a constructor called with other arguments: `change` is given them by name, and each must have one."""
        original = kind.__init__  # type: ignore[misc]
        signature = inspect.signature(original)

        @wraps(original)
        def init(*args: Any, **kwargs: Any) -> None:
            given = dict(signature.bind(*args, **kwargs).arguments)
            own = given.pop("self")
            change(given)
            original(own, **given)

        replace_attribute(kind, "__init__", init)

    # What the hooks call

    def start(self) -> None:
        """Put everything in, before the program imports what it needs."""
        register_optimizer_step_pre_hook(self._on_optimizer)
        register_optimizer_step_post_hook(self._on_optimizer_end)
        self._follow_backward()
        _redirect(self, torch, "save")
        with suppress(ImportError):
            import safetensors.torch

            _redirect(self, safetensors.torch, "save_file")
            _redirect(self, safetensors.torch, "save_model")
        self.change_arguments(DataLoader, self._note_loader)
        original = nn.Module.train

        @wraps(original)
        def train(module: nn.Module, mode: bool = True) -> nn.Module:
            self.has_paused |= not mode  # to evaluate
            return original(module, mode)

        replace_attribute(nn.Module, "train", train)
        if self._settings["finds_models"]:
            self._stop_finding = self._follow_calls()
        atexit.register(self._at_exit)
        for name in {*self._settings["whole"], *(name for block in self._plan for name in block["on"])}:
            self._candidates[name].prepare(self)
        for name in self._settings["whole"]:
            self._switch_on(name)

    def _is_here(self) -> bool:
        return not self._is_over and os.getpid() == self._pid

    def _follow_backward(self) -> None:
        original = torch.autograd.backward

        @wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_here():
                return original(tensors, *args, **kwargs)
            if not self._is_redirected:  # by now the program has imported what it saves by
                self._is_redirected = True
                for module, name, method in _LATE:
                    if (kind := getattr(sys.modules.get(module), name, None)) is not None:
                        _redirect(self, kind, method)
            if not self._num_passes and self.seen["num_steps"] < NUM_LOSSES:
                first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
                if isinstance(first, torch.Tensor) and first.numel() == 1:
                    self.seen["losses"].append(float(first.detach()))
            self._num_passes += 1
            self._entered.close()
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self._enter_forward()

        replace_attribute(torch.autograd, "backward", backward)

    def _follow_calls(self) -> Callable[[], None]:
        """See which modules with weights are called from outside of all others."""
        original, depth = nn.Module.__call__, 0

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            is_new = depth == 0 and module.training and torch.is_grad_enabled() and self._is_here()
            is_new = is_new and not any(module is known for known in self.models)
            if is_new and any(parameter.requires_grad for parameter in module.parameters()):
                self.models.append(module)
            depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                depth -= 1

        return replace_attribute(nn.Module, "__call__", call)

    def _note_loader(self, given: dict[str, Any]) -> None:
        if self._is_here() and given.get("batch_sampler") is None and len(self.seen["loaders"]) < MAX_LOADERS:
            row = {key: given.get(key) for key in ("batch_size", "num_workers", "pin_memory")}
            row["is_iterable"] = isinstance(given.get("dataset"), IterableDataset)
            self.seen["loaders"].append(row)

    def _on_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_here():
            return
        self._entered.close()
        key = _key(optimizer)
        if (not self._first or key == self._first) and len(self.seen["gradients"]) < NUM_GRADIENTS:
            self.seen["gradients"].append(_signature(optimizer))

    def _on_optimizer_end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_here():
            return
        self._enter_forward()
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        self._first = self._first or _key(optimizer)
        if _key(optimizer) != self._first or not self._num_passes:
            return  # another one's turn, or a wrapper's that has stepped already
        self.seen["num_steps"] += 1
        self._num_passes = 0
        try:
            self._on_step(optimizer)
        except Exception as error:  # noqa: BLE001 - a change that fails is a result
            self._end(error)

    def _on_step(self, optimizer: Optimizer) -> None:
        now_s, waited_s = _clock()
        if os.getppid() != self._settings["parent"]:  # whoever asked is gone
            self._end()
        if self.seen["num_steps"] <= BEFORE_BLOCKS:
            if self.seen["num_steps"] == BEFORE_BLOCKS:
                self.device = next((p.device.type for g in optimizer.param_groups for p in g["params"]), "cpu")
                self.seen |= {"startup_s": time.time() - self._settings["began_s"], "facts": self._facts()}
                self._start_s = now_s
                self._stop_finding()
                self._next_block()
            return
        block = self.seen["blocks"][-1]
        block["seconds"].append(now_s - self._last_s)
        block["waited"].append(waited_s - self._waited_s)
        block["is_pause"].append(self.has_paused)
        self.has_paused = False
        self._last_s, self._waited_s = now_s, waited_s
        if len(block["seconds"]) == EARLY_STEPS:
            block["early_bytes"] = _memory(self.device)["memory_bytes"]
        if self._is_last(len(block["seconds"]), now_s - self._start_s):
            if self.device != "cpu":
                getattr(torch, self.device).synchronize()
                block["seconds"][-1] += time.perf_counter() - now_s
            block |= {**_memory(self.device), "others_cpu_s": _others_cpu_s() - self._others_cpu_s}
            self._write()  # what is known should the process be ended for taking too long
            self._next_block()

    def _is_last(self, num: int, past_s: float) -> bool:
        """Whether the block ends with this step, its `num`th."""
        until = self._settings["until"]
        if until is None:
            return bool(num >= self._plan[self._block]["steps"])
        stop = self.place / "last_step"  # in the first look all ranks must end at the same step
        has_seen = num >= until["min_steps"] and past_s >= until["min_s"]
        if _RANK == 0 and not stop.exists() and (has_seen or past_s >= until["max_s"]):
            write_whole(stop, str(num + 2 * (_NUM_RANKS > 1)))
        return stop.exists() and num >= int(stop.read_text())

    def _next_block(self) -> None:
        self._block += 1
        if self._block == len(self._plan):
            self.seen["is_whole"] = True
            self._end()
        block = self._plan[self._block]
        self.seen["blocks"].append(
            {"on": block["on"], "kind": block["kind"], "seconds": [], "waited": [], "is_pause": []}
        )
        for name in [name for name in self._on if name not in block["on"]]:
            next(self._on.pop(name), None)  # to its end
        for name in block["on"]:
            if name not in self._on:
                self._switch_on(name)
        if self.device != "cpu":
            getattr(torch, self.device).synchronize()
            getattr(torch, self.device).reset_peak_memory_stats()
        else:
            with suppress(OSError):  # Linux only: the highest resident set begins anew
                Path("/proc/self/clear_refs").write_text("5")
        self._others_cpu_s = _others_cpu_s()
        self._last_s, self._waited_s = _clock()

    def _switch_on(self, name: str) -> None:
        """A generator is run to its `yield`; any other function is called."""
        change = self._candidates[name].change(self)
        if change is not None:
            next(change)
            self._on[name] = change

    def _enter_forward(self) -> None:
        self._entered.close()
        for context in self._contexts:
            self._entered.enter_context(context())

    def _facts(self) -> dict[str, Any]:
        """What the program does, as far as changes care. One look at all objects finds the modules that train."""
        cpu = read_cpu()
        dropouts = [one for one in all_modules() if type(one).__name__.startswith("Dropout") and one.training]
        return {
            "device": self.device,
            "num_threads": torch.get_num_threads(),
            "num_cores": max(int(cpu.cores) // _NUM_RANKS, 1),
            "has_bf16": torch.cuda.is_bf16_supported(including_emulation=False) if self.device == "cuda"
            else self.device != "cpu" or bool(cpu.flags & {"avx512_bf16", "amx_bf16", "bf16"}),
            "tf32": torch.get_float32_matmul_precision() != "highest",
            "trainer": _trainer(),
            "optimizers": [
                {"name": type(o).__name__, "is_torch": type(o).__module__.startswith("torch.optim"),
                 "fused": group.get("fused")}
                for o in self.optimizers for group in o.param_groups[:1]
            ],
            "spells_attention_out": bool(spelled_out()),
            "has_dropout": any(getattr(one, "p", 0) for one in dropouts),
        }  # fmt: skip

    # The end

    def _at_exit(self) -> None:
        """The program has ended by itself: before its plan was done, or in an error."""
        if self._is_here():
            error = getattr(sys, "last_value", None)
            self._is_over = True
            self._write(error)

    def _end(self, error: Exception | None = None) -> None:
        """End the process here and now: a program that catches every exception would not let it be ended by one."""
        for change in self._on.values():
            with suppress(Exception):
                next(change, None)
        self._is_over = True
        self._write(error)
        until_s = time.monotonic() + RANKS_WAIT_S
        while time.monotonic() < until_s and not all((self.place / f"over{r}").exists() for r in range(_NUM_RANKS)):
            time.sleep(0.01)
        watch = threading.Timer(END_WAIT_S, os._exit, (0,))
        watch.daemon = True
        watch.start()
        with suppress(BaseException):  # records are closed, and workers ended
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0)

    def _write(self, error: BaseException | None = None) -> None:
        self.seen["error"] = self.seen["error"] or (f"{type(error).__name__}: {error}" if error is not None else "")
        write_whole(self.place / f"rank{_RANK}.json", json.dumps(self.seen))
        if self._is_over:
            (self.place / f"over{_RANK}").touch()


def install(settings: str) -> None:
    """Begin a trial in this process.

    Args:
        settings: Of `Trial`, as JSON.
    """
    trial = Trial(json.loads(settings))
    try:
        trial.start()
    except Exception as error:  # noqa: BLE001 - a change that fails is a result
        trial._end(error)


def _key(optimizer: Optimizer) -> int:
    """Names an optimizer by its first parameter, so that a wrapper of it is the same."""
    return next((id(parameter) for group in optimizer.param_groups for parameter in group["params"]), 0)


def _signature(optimizer: Optimizer) -> list[float]:
    """One number a gradient: its projection on a fixed vector. They differ by as much as the gradients do."""
    numbers = []
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or gradient.is_sparse:
                    continue
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                part = local.detach().reshape(-1)[:PROJECTED].double()
                wave = torch.arange(part.numel(), dtype=torch.float64, device=part.device).mul_(0.7548776662).cos_()
                numbers.append(float(part @ wave))
    return numbers


def _memory(device: str) -> dict[str, float | None]:
    """Bytes in use now, and the most since the peak was forgotten; None where nobody tells."""
    if device != "cpu":
        place = getattr(torch, device)
        return {"memory_bytes": place.memory_allocated(), "peak_bytes": place.max_memory_allocated()}
    status: dict[str, float] = {}
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(("VmHWM", "VmRSS")):
                status[line[:5]] = float(line.split()[1]) * 1024
    return {"memory_bytes": status.get("VmRSS"), "peak_bytes": status.get("VmHWM")}


def _clock() -> tuple[float, float]:
    """The time, and for how long this thread has waited for a core up to it: no wait lies between the two."""
    thread = threading.get_native_id()
    try:
        for _ in range(5):
            before_s, now_s = waited_s(thread), time.perf_counter()
            if before_s == waited_s(thread):
                break
        return now_s, before_s
    except (OSError, ValueError, IndexError):  # nobody tells
        return time.perf_counter(), 0.0


def _others_cpu_s() -> float:
    """CPU time of the program's other threads and of all that it has started; 0 where nobody tells."""
    session, ticks = os.getsid(0), 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # has ended meanwhile
            words = path.read_text().rpartition(")")[2].split()
            if int(words[3]) == session and path.parent.name != str(os.getpid()):
                ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK") + time.process_time() - time.thread_time()


def _trainer() -> str:
    """Whose training loop this is: transformers, lightning, accelerate, or "" for the program's own; from the stack."""
    frame: Any = sys._getframe(1)
    found = ""
    while frame is not None:
        own = frame.f_locals.get("self")
        for kind in type(own).__mro__ if own is not None else ():
            root = kind.__module__.partition(".")[0]
            if kind.__name__ == "Trainer" and root in ("transformers", "lightning", "pytorch_lightning"):
                return "transformers" if root == "transformers" else "lightning"
            found = "accelerate" if kind.__name__ == "AcceleratedOptimizer" else found
        frame = frame.f_back
    return found


# Nothing that is tried may write over what the user has saved


_LATE = (
    ("torch.distributed.checkpoint.filesystem", "FileSystemWriter", "__init__"),
    ("torch.distributed.checkpoint.filesystem", "FileSystemWriter", "reset"),  # it is given the place once more
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", "save_pretrained"),
    ("transformers.processing_utils", "ProcessorMixin", "save_pretrained"),
    ("transformers.configuration_utils", "PreTrainedConfig", "save_pretrained"),
    ("peft.peft_model", "PeftModel", "save_pretrained"),
    ("diffusers.models.modeling_utils", "ModelMixin", "save_pretrained"),
)
"""Methods that save, by class, patched once the program has imported them: they are too slow to import in vain."""


def _redirect(trial: Trial, owner: Any, name: str) -> None:
    """Have a function that saves write into the trial's folder, unless it writes into the program's copy anyway.

    The place is its second argument, a method's first, or has one of the usual names.
    """
    original = getattr(owner, name)
    keys = ("f", "filename", "save_directory", "checkpoint_id", "path")

    @wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        trial.has_paused = True
        args = tuple(_elsewhere(trial, value) if at == 1 else value for at, value in enumerate(args))
        return original(*args, **{key: _elsewhere(trial, v) if key in keys else v for key, v in kwargs.items()})

    replace_attribute(owner, name, save)


def _elsewhere(trial: Trial, path: Any) -> Any:
    if not isinstance(path, (str, os.PathLike)):
        return path
    wanted = os.path.realpath(os.fspath(path))  # beside a copy lie links to what is beside the folder
    allowed = [os.path.realpath(folder) for folder in (trial.place, trial._settings["free"]) if folder]
    if any(wanted == folder or wanted.startswith(folder + os.sep) for folder in allowed):
        return path
    target = trial.place / "saved" / wanted.lstrip(os.sep).replace(":", "")
    target.parent.mkdir(parents=True, exist_ok=True)
    trial.seen["saved"][wanted] = str(target)
    return type(path)(target) if isinstance(path, Path) else str(target)
