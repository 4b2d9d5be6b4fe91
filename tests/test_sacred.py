"""A run with us is the run without us: bit for bit, in all four modes, whatever the program does to its own model.

This file is also the program that trains: `python tests/test_sacred.py MODE FOLDER` goes through every scenario in one
process and prints what the program saw (losses, gradients, parameters, random states, calls of its own hooks). The
tests compare what it saw in each mode with what it saw in `plain`, where flopmeter is not even imported.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

MODES = ("estimate", "smart", "profiler", "hybrid")
NUM_STEPS, BATCH, LENGTH, WIDTH = 12, 4, 6, 8
TIMEOUT_S = 600
TRAINING_PROGRAM = Path(__file__)

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)  # the first test waits for all of the processes


class Program:
    """What a scenario is given: a way to be watched, which in `plain` does nothing, and a place for what it saw."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.seen: list[tuple[str, Any]] = []
        self._mode = mode
        self._folder = folder
        self._monitor: Any = None

    def watch(self, model: nn.Module, optimizer: Any = None, loader: Any = None) -> None:
        if self._mode == "plain":
            return
        from flopmeter import watch

        settings = {
            "peak_flop_per_s": 1e12, "sinks": [], "report": False, "mfu_calculation_mode": self._mode,
            "flops_profile_freq": 4, "overhead_budget": 0.5,
        }  # fmt: skip
        self._monitor = watch(model, optimizer, loader, output_dir=self._folder, config={"monitoring": settings})

    def log(self, step: int, loss: torch.Tensor) -> None:
        if self._monitor is None:
            return
        self._monitor.log_step(step, loss=loss, learning_rate=0.1, extra_loss=loss)
        if step % 4 == 3:
            self._monitor.latest(wait_s=20)  # so that the background knows of these steps, and one is sampled

    def saw(self, what: str, value: Any) -> None:
        self.seen.append((what, digest(value)))

    def saw_step(self, model: nn.Module, loss: torch.Tensor) -> None:
        self.saw("loss", loss)
        self.saw("gradients", [parameter.grad for parameter in model.parameters()])
        self.saw("random state", random_state())

    def finish(self) -> list[str]:
        """End the run; gives which kinds of steps were measured in it."""
        self.saw("random state before the end", random_state())
        if self._monitor is None:
            return []
        self._monitor.finish_training()
        from flopmeter import load_run

        run = load_run(self._folder)
        marks = {mark for marks in run.marks.values() for mark in marks} & {"observed", "profiled"}
        told = [event.get("message", "") for event in run.named("warning")]
        problems = [message for message in told if "failed" in message and "another profiler started" not in message]
        sampled = ["sampled"] if run.named("profile") else []
        return [f"{len(run)} steps", *sorted(marks), *sampled, *problems]


def digest(value: Any) -> Any:
    """Something that fits in a line and differs where a single bit does."""
    if isinstance(value, torch.Tensor):
        kept = value.detach().contiguous().view(-1).view(torch.uint8) if value.numel() else value
        text = hashlib.sha256(kept.numpy().tobytes()).hexdigest()[:12]
        return f"{value.dtype} {tuple(value.shape)} {value.device} {value.requires_grad} {text}"
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()[:12]
    if isinstance(value, (list, tuple)):
        return [digest(item) for item in value]
    if isinstance(value, dict):
        return {str(key): digest(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (str, int, bool)) else repr(value)


def random_state() -> str:
    states = (torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), repr(numpy.random.get_state()))
    return hashlib.sha256(repr(states).encode()).hexdigest()[:12]


def global_state() -> dict[str, Any]:
    """Switches of torch's and Python's that a training may depend on."""
    return {
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "profiler": torch._C._autograd._profiler_enabled(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "tracing": (sys.gettrace() is None, sys.getprofile() is None),
    }


class Attention(nn.Module):
    """Heads by `F.scaled_dot_product_attention`, looked up at each call as most models do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Attention, dropout and a small network, with whatever a scenario keeps on the side."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.attention = Attention()
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.dropout(x + self.attention(x)))


def batches(num: int = NUM_STEPS, samples: int = BATCH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(samples, LENGTH, WIDTH, generator=generator) for _ in range(num)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def draw() -> None:
    """What a program draws for itself between steps."""
    random.random()
    numpy.random.rand()
    torch.rand(1)


def train(
    program: Program, model: Any, optimizer: Any, data: Any, each: Callable[[int], None] = lambda _: None
) -> None:
    """The usual loop."""
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        program.saw_step(model, loss)
        optimizer.step()
        program.log(step, loss)
        each(step)
        draw()
    program.saw("parameters", list(model.parameters()))


SCENARIOS: dict[str, Callable[[Program], None]] = {}


def scenario(function: Callable[[Program], None]) -> Callable[[Program], None]:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def a_usual_loop(program: Program) -> None:
    model = Net()
    optimizer = sgd(model)
    program.watch(model, optimizer)
    train(program, model, optimizer, batches(2 * NUM_STEPS))


@scenario
def a_monitor_that_is_told_of_its_model(program: Program) -> None:
    if program._mode != "plain":
        from flopmeter import TrainingMonitor

        settings = {"peak_flop_per_s": 1e12, "sinks": [], "report": False, "mfu_calculation_mode": program._mode}
        program._monitor = TrainingMonitor(program._folder, {"monitoring": settings}, flops_profile_freq=4)
    model = Net()
    optimizer = sgd(model)
    if program._monitor is not None:
        program._monitor.set_model_ref(model)
    train(program, model, optimizer, batches())


def hook_everything(program: Program, model: nn.Module) -> None:
    """Hooks of every kind that a module and a parameter can have; some of them change what they are given."""
    calls: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_, **__: calls.append(name)

    for name, module in model.named_modules():
        module.register_forward_pre_hook(note(f"{name} pre"))
        module.register_forward_pre_hook(note(f"{name} pre with keywords"), with_kwargs=True)
        module.register_forward_hook(note(f"{name} after"))
        module.register_forward_hook(note(f"{name} first after"), prepend=True)
        module.register_full_backward_pre_hook(note(f"{name} backward pre"))
        module.register_full_backward_hook(note(f"{name} backward"))
    model.register_forward_hook(lambda module, args, out: out * 1.25)
    for name, parameter in model.named_parameters():
        parameter.register_hook(note(f"{name} gradient"))
        parameter.register_hook(lambda gradient: gradient * 0.5)
        parameter.register_post_accumulate_grad_hook(note(f"{name} accumulated"))
    program.saw("hooks", calls)
    program.calls = calls  # type: ignore[attr-defined]


def train_with_hooked_losses(program: Program, model: Any, optimizer: Any) -> None:
    """Hooks on losses before the first backward pass, and on one loss after it: a later loss knows nothing of them."""
    calls = program.calls  # type: ignore[attr-defined]
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        hidden = model(batch)
        hidden.register_hook(lambda gradient: calls.append("hidden"))
        loss = hidden.square().mean()
        if step % 3 == 1:
            loss.register_hook(lambda gradient, step=step: calls.append(f"loss {step}"))
        if step in (4, 8):
            loss.backward(retain_graph=True)
            optimizer.zero_grad()
            loss.register_hook(lambda gradient: gradient * 0)
            loss.register_hook(lambda gradient, step=step: calls.append(f"again {step}"))
        loss.backward()
        program.saw_step(model, loss)
        program.saw("calls", calls)
        calls.clear()
        optimizer.step()
        program.log(step, loss)
    program.saw("parameters", list(model.parameters()))


@scenario
def hooks_on_losses_parameters_and_modules(program: Program) -> None:
    model = Net()
    hook_everything(program, model)
    optimizer = sgd(model)
    calls = program.calls  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    program.watch(model, optimizer)
    model.register_forward_hook(lambda *_: calls.append("came after us"))
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    train_with_hooked_losses(program, model, optimizer)
    handle.remove()
    program.saw("calls", calls)


class Keeping(Net):
    """Keeps tensors in plain attributes, as models with auxiliary losses, caches or attention maps do."""

    def __init__(self) -> None:
        super().__init__()
        self.aux: Any = None
        self.kept: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        self.kept["weights"] = torch.softmax(y.detach() @ y.detach().transpose(1, 2), -1)
        self.attention.last = y.detach()
        return y + self.aux


def train_keeping(program: Program, model: Any, net: Keeping) -> None:
    optimizer = sgd(net)
    program.watch(model, optimizer)

    def look(step: int) -> None:
        program.saw("auxiliary loss", net.aux.item())
        program.saw("attributes", sorted(name for module in net.modules() for name in vars(module)))
        kept = {**net.kept, "last": net.attention.last, "aux": net.aux.detach().clone()}
        program.saw("kept", kept)
        program.saw("on the tensors", [sorted(vars(value)) for value in kept.values()])
        file = io.BytesIO()
        torch.save(kept, file)
        file.seek(0)
        program.saw("loaded", torch.load(file, weights_only=True))

    train(program, model, optimizer, batches(), look)


@scenario
def attributes_on_modules(program: Program) -> None:
    net = Keeping()
    train_keeping(program, net, net)


@scenario
def attributes_on_compiled_modules(program: Program) -> None:
    net = Keeping()
    train_keeping(program, torch.compile(net, backend="aot_eager"), net)


@contextmanager
def own_attention(program: Program) -> Iterator[None]:
    original, num_calls = F.scaled_dot_product_attention, [0]

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        num_calls[0] += not args[0].is_meta  # the twin of a compiled model is counted on shapes, and calls it
        return original(*args, **kwargs) * 1.5

    F.scaled_dot_product_attention = attention
    try:
        yield
        program.saw("still in place", F.scaled_dot_product_attention is attention)
        program.saw("calls", num_calls[0])
    finally:
        F.scaled_dot_product_attention = original


@scenario
def a_patched_attention(program: Program) -> None:
    with own_attention(program):
        model = Net()
        optimizer = sgd(model)
        program.watch(model, optimizer)
        train(program, model, optimizer, batches())


@scenario
def a_patched_attention_in_a_compiled_model(program: Program) -> None:
    with own_attention(program):
        model = Net()
        optimizer = sgd(model)
        compiled = torch.compile(model, backend="eager")
        program.watch(compiled, optimizer)
        patched = F.scaled_dot_product_attention

        def look(step: int) -> None:
            program.saw("still in place", F.scaled_dot_product_attention is patched)

        train(program, compiled, optimizer, batches(), look)
        eager = copy.deepcopy(model)
        program.saw("of a copy", eager(batches(1)[0]))


class Failing(Net):
    """Runs out of memory when it is told to, in the middle of its forward pass."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.attention(x)
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("out of memory")
        return self.layers(self.dropout(y))


@scenario
def a_retried_forward_pass(program: Program) -> None:
    model = Failing()
    optimizer = sgd(model)
    program.watch(model, optimizer)
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        model.fails = step in (3, 7)
        frames: list[str] = []
        try:
            out = model(batch)
        except torch.OutOfMemoryError as error:
            frame: Any = error.__traceback__
            while frame is not None:
                frames.append(frame.tb_frame.f_globals["__name__"].partition(".")[0])
                frame = frame.tb_next
            out = model(batch[: BATCH // 2])
        program.saw("whose frames the error has", [name for name in frames if name != "torch"])
        loss = out.square().mean()
        loss.backward()
        program.saw_step(model, loss)
        optimizer.step()
        program.log(step, loss)
    program.saw("parameters", list(model.parameters()))


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from all three generators, in the worker that it was sent to."""

    def __len__(self) -> int:
        return NUM_STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(LENGTH, WIDTH) + random.random() + float(numpy.random.rand())


def seed_worker(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)


@scenario
def a_shuffled_loader(program: Program) -> None:
    model, loader = Net(), DataLoader(Noisy(), BATCH, shuffle=True)
    optimizer = sgd(model)
    program.watch(model, optimizer, loader)
    train(program, model, optimizer, loader)


@scenario
def loader_workers(program: Program) -> None:
    model, loader = Net(), DataLoader(Noisy(), BATCH, shuffle=True, num_workers=2, worker_init_fn=seed_worker)
    optimizer = sgd(model)
    program.watch(model, optimizer, loader)
    train(program, model, optimizer, loader)


class Checkpointed(Net):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(dropout=0.5)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda y: self.dropout(y + self.attention(y)), x, use_reentrant=self.use_reentrant)
        return checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


@scenario
def checkpointing(program: Program) -> None:
    model = Checkpointed(use_reentrant=False)
    optimizer = sgd(model)
    program.watch(model, optimizer)
    train(program, model, optimizer, batches())


@scenario
def reentrant_checkpointing(program: Program) -> None:
    model = Checkpointed(use_reentrant=True)
    optimizer = sgd(model)
    program.watch(model, optimizer)
    train(program, model, optimizer, [batch.requires_grad_() for batch in batches()])


@scenario
def autocast_and_a_gradient_scaler(program: Program) -> None:
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    optimizer = sgd(model)
    program.watch(model, optimizer)
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).float().square().mean()
        scaler.scale(loss * (float("inf") if step in (3, 8) else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        program.saw_step(model, loss)
        scaler.step(optimizer)
        scaler.update()
        program.saw("scale", scaler.get_scale())
        program.log(step, loss)
    program.saw("parameters", list(model.parameters()))
    program.saw("optimizer", optimizer.state_dict())


@scenario
def accumulated_gradients(program: Program) -> None:
    model = Net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    program.watch(model, optimizer)
    for step, batch in enumerate(batches(2 * NUM_STEPS)):
        loss = model(batch).square().mean() / 2
        loss.backward()
        if step % 2:
            program.saw_step(model, loss)
            program.saw("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            program.log(step // 2, loss)
        if step % 8 == 7:
            model.eval()
            with torch.no_grad():
                program.saw("evaluation", model(batch))
            with torch.inference_mode():
                program.saw("inference", model(batch).clone())
            model.train()
    program.saw("parameters", list(model.parameters()))


def saw_graphs(program: Program) -> None:
    from torch._dynamo.utils import counters

    program.saw("graphs", dict(counters["stats"]))
    program.saw("breaks", sorted(counters["graph_break"]))


@scenario
def a_compiled_model(program: Program) -> None:
    net = Net(dropout=0.0)
    model = torch.compile(net, backend="aot_eager", fullgraph=True)
    optimizer = sgd(net)
    program.watch(model, optimizer)
    train(program, model, optimizer, batches())
    saw_graphs(program)


@scenario
def a_module_compiled_in_place_that_breaks(program: Program) -> None:
    class Breaking(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.attention(x)
            torch._dynamo.graph_break()
            return self.layers(y)

    model = Breaking()
    model.compile(backend="aot_eager")
    optimizer = sgd(model)
    program.watch(model, optimizer)
    train(program, model, optimizer, batches())
    saw_graphs(program)


@scenario
def a_model_compiled_by_inductor(program: Program) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    model = torch.compile(net)
    optimizer = sgd(net)
    program.watch(model, optimizer)
    train(program, model, optimizer, batches())
    saw_graphs(program)


@scenario
def copies_and_files_of_the_model(program: Program) -> None:
    model = Net()
    optimizer = sgd(model)
    program.watch(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    copies: list[nn.Module] = []

    def keep(step: int) -> None:
        average.update_parameters(model)
        copies.append(copy.deepcopy(model))
        file = io.BytesIO()
        torch.save(model, file)
        program.saw("file", file.getvalue())
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        state = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, state)
        program.saw("state", state.getvalue())
        twin = copies[-1]
        program.saw("hooks of a copy", [len(twin._forward_hooks), len(twin._forward_pre_hooks)])

    train(program, model, optimizer, batches(), keep)
    program.saw("average", [average(batches(1)[0]), list(average.parameters())])
    program.saw("of the copies", [twin.eval()(batches(1)[0]) for twin in copies])


class FunctionNames(TorchFunctionMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__qualname__", None) or str(func))
        return func(*args, **(kwargs or {}))


class OperatorNames(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def train_inside(program: Program, mode: Any, names: list[str]) -> None:
    """Some steps wholly inside the program's own mode, some with forward and backward in it, some with none."""
    model = Net()
    optimizer = sgd(model)
    program.watch(model, optimizer)
    for step, batch in enumerate(batches(2 * NUM_STEPS)):
        with mode() if step % 6 == 1 else nullcontext():
            optimizer.zero_grad()
            with mode() if step % 2 == 0 else nullcontext():
                loss = model(batch).square().mean()
                loss.backward()
            program.saw_step(model, loss.detach())
            optimizer.step()
        program.log(step, loss)
        # While any profiler is on, torch itself marks an optimizer's step by an operator: ours in a profiled step.
        program.saw("calls", [name for name in names if "record_function" not in name.lower()])
        names.clear()
    program.saw("parameters", list(model.parameters()))


@scenario
def a_function_mode_of_the_program(program: Program) -> None:
    names: list[str] = []
    train_inside(program, lambda: FunctionNames(names), names)


@scenario
def a_dispatch_mode_of_the_program(program: Program) -> None:
    names: list[str] = []
    train_inside(program, lambda: OperatorNames(names), names)


@scenario
def a_profiler_of_the_program(program: Program) -> None:
    """Its own operators, and each as often as without us."""
    model = Net()
    optimizer = sgd(model)
    program.watch(model, optimizer)
    for step, batch in enumerate(batches(2 * NUM_STEPS)):
        inside = torch.autograd.profiler.profile(use_cpu=True) if step % 2 else nullcontext()
        optimizer.zero_grad()
        with inside as profiler:
            loss = model(batch).square().mean()
            loss.backward()
        program.saw_step(model, loss)
        optimizer.step()
        program.log(step, loss)
        if profiler is not None:
            counts = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("aten::")}
            program.saw("operators", dict(sorted(counts.items())))
    program.saw("parameters", list(model.parameters()))


@scenario
def lbfgs_with_a_closure(program: Program) -> None:
    model = Net(dropout=0.0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    program.watch(model, optimizer)
    num_calls = 0
    for step, batch in enumerate(batches()):

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        program.saw_step(model, loss)
        program.log(step, loss.detach())
    program.saw("calls", num_calls)
    program.saw("parameters", list(model.parameters()))


@scenario
def second_derivatives_and_saved_tensors(program: Program) -> None:
    """A gradient penalty, `torch.func`, and the program's own hooks on saved tensors."""
    model = Net(dropout=0.0)
    optimizer = sgd(model)
    program.watch(model, optimizer)
    packed: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        batch.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model.layers(batch).square().mean() + model.layers(model.dropout(batch)).mean()
            (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
            total = loss + slope.square().sum() + model(batch.detach()).mean()
        total.backward()
        program.saw_step(model, total)
        program.saw("slope", slope)
        program.saw("packed", packed)
        packed.clear()
        optimizer.step()
        program.log(step, total)
    parameters = dict(model.named_parameters())
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model.layers, p, batch.detach()).mean())(
        {name.removeprefix("layers."): value.detach() for name, value in parameters.items() if "layers" in name}
    )
    program.saw("of a function", gradients)
    program.saw("parameters", list(model.parameters()))


def go_through(mode: str, folder: Path, names: list[str]) -> None:
    """Every scenario in this process, one line of JSON for each."""
    for name in names:
        program = Program(mode, folder / name)
        error = ""
        measured: list[str] = []
        begin_scenario()
        try:
            SCENARIOS[name](program)
            measured = program.finish()
            program.saw("switches", global_state())
        except Exception as raised:  # noqa: BLE001 - it is what the test compares
            error = f"{type(raised).__name__}: {raised}"[:300]
            if program._monitor is not None:
                program._monitor.finish_training()
        print(json.dumps({"name": name, "seen": program.seen, "measured": measured, "error": error}), flush=True)


def begin_scenario() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()


def go_through_ddp(folder: Path) -> None:
    """All modes, one after the other, on this rank; without us first."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for mode in ("plain", *MODES):
        begin_scenario()
        program, error = Program(mode, folder / mode), ""
        measured: list[str] = []
        try:
            net = Net()
            model = DistributedDataParallel(net)
            hook_everything(program, net)
            optimizer = sgd(model)
            program.watch(model, optimizer)
            torch.manual_seed(rank)
            train_with_hooked_losses(program, model, optimizer)
            measured = program.finish() if rank == 0 or mode == "plain" else finish_other_rank(program)
        except Exception as raised:  # noqa: BLE001 - as above
            error = f"{type(raised).__name__}: {raised}"[:300]
        print(json.dumps({"name": mode, "seen": program.seen, "measured": measured, "error": error}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


def finish_other_rank(program: Program) -> list[str]:
    program.saw("random state before the end", random_state())
    program._monitor.finish_training()
    return []


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if sys.argv[1] == "ddp":
        go_through_ddp(Path(sys.argv[2]))
    else:
        go_through(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or list(SCENARIOS))
    sys.exit(0)


def answers_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    found = {}
    for line in out.splitlines():
        if line.startswith('{"name"'):
            answer = json.loads(line)
            found[answer["name"]] = answer
    found["the process"] = {"code": process.returncode, "stderr": err[-3000:]}
    return found


def start(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What the program saw in each mode; two processes at a time."""
    folder = tmp_path_factory.mktemp("sacred")

    def run(mode: str) -> dict[str, Any]:
        return answers_of(start([sys.executable, str(TRAINING_PROGRAM), mode, str(folder / mode)]))

    with ThreadPoolExecutor(2) as pool:
        found = {mode: pool.submit(run, mode) for mode in ("plain", *MODES)}
    return lambda mode: found[mode].result()


def assert_same(plain: dict[str, Any], ours: dict[str, Any]) -> None:
    for place, (before, after) in enumerate(zip(plain["seen"], ours["seen"], strict=False)):
        assert after == before, f"{before[0]} differs (what was seen, number {place})"
    assert ours["error"] == plain["error"]
    assert len(ours["seen"]) == len(plain["seen"]) > 0


def assert_measured(mode: str, answer: dict[str, Any]) -> None:
    """It was no idle watching: a step was really observed or profiled."""
    assert answer["measured"], answer["error"]
    num_steps, *kinds = answer["measured"]
    assert num_steps in (f"{NUM_STEPS} steps", f"{2 * NUM_STEPS} steps", f"{NUM_STEPS - 2} steps")  # or two overflows
    expected = {"estimate": (), "smart": ("observed",), "profiler": ("profiled",)}.get(mode, ("observed", "profiled"))
    assert set(kinds) <= {"observed", "profiled", "sampled"}
    assert any(kind in kinds for kind in expected) if expected else not kinds


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_with_us_is_the_run_without_us(answers: Callable[[str], dict[str, Any]], mode: str, name: str) -> None:
    plain, ours = answers("plain"), answers(mode)
    assert name in ours, ours["the process"]["stderr"]
    assert plain[name]["error"] == ""
    assert_same(plain[name], ours[name])
    assert_measured(mode, ours[name])


@pytest.mark.parametrize("mode", ["plain", *MODES])
def test_the_process_ends_as_it_wants_to(answers: Callable[[str], dict[str, Any]], mode: str) -> None:
    assert answers(mode)["the process"] | {"stderr": ""} == {"code": 0, "stderr": ""}


def test_a_usual_loop_has_a_step_sampled_beside_the_observed_ones(
    answers: Callable[[str], dict[str, Any]],
) -> None:
    assert "sampled" in answers("smart")["a_usual_loop"]["measured"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    program = [sys.executable, str(TRAINING_PROGRAM), "ddp", str(folder)]
    both = [start(program, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(answers_of, both))


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_train_as_without_us(ranks: list[dict[str, Any]], mode: str) -> None:
    for answer in ranks:
        assert mode in answer, answer["the process"]["stderr"]
        assert answer["plain"]["error"] == ""
        assert_same(answer["plain"], answer[mode])
    assert_measured(mode, ranks[0][mode])


RUN_UNCHANGED = ("loader_workers", "accumulated_gradients", "hooks_on_losses_parameters_and_modules")


@pytest.fixture(scope="module")
def unchanged(answers: Callable[[str], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same program under `flopmeter run`, which gives each of its trainings a record of its own."""
    folder = tmp_path_factory.mktemp("unchanged")
    settings = folder / "settings.yaml"
    settings.write_text("monitoring: {flops_profile_freq: 2, peak_flop_per_s: 1.0e+12, sinks: [], report: false}\n")
    flopmeter = [sys.executable, "-m", "flopmeter", "run", "--config", str(settings), "-o", str(folder / "run")]
    found = answers_of(start([*flopmeter, str(TRAINING_PROGRAM), "plain", str(folder), *RUN_UNCHANGED]))
    from flopmeter import load_run

    runs = [load_run(path) for path in sorted(folder.glob("run*/run.jsonl"))]
    found["marks"] = [{mark for marks in run.marks.values() for mark in marks} for run in runs]
    return found


@pytest.mark.parametrize("name", RUN_UNCHANGED)
def test_an_unchanged_program_trains_as_without_us(
    answers: Callable[[str], dict[str, Any]], unchanged: dict[str, Any], name: str
) -> None:
    assert name in unchanged, unchanged["the process"]["stderr"]
    assert unchanged["the process"]["code"] == 0
    *before, (_, switches) = answers("plain")[name]["seen"]
    *after, (_, switches_then) = unchanged[name]["seen"]
    assert_same({"seen": before, "error": ""}, {"seen": after, "error": unchanged[name]["error"]})
    # Nobody told of the end: the next step may be observed already.
    assert switches_then | {"dispatch modes": 0} == switches
    assert len(unchanged["marks"]) == len(RUN_UNCHANGED)
    assert any("observed" in marks for marks in unchanged["marks"])
