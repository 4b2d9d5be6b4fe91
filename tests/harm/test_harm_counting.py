"""Counting changes nothing: not the model, not the user's patches and tools, not the tensors that they keep."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from flopmeter import CountError, count_flops, watch
from training.utils.monitor import calculate_precise_mfu

ROWS, WIDTH, LENGTH = 4, 8, 6
UNIT = 2 * ROWS * WIDTH * WIDTH
"""One square linear layer on ROWS rows, one direction."""
SETTINGS = {"overhead_budget": 0.5, "profile_steps": False, "report": False}
SILENT_DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
"""Where a graph breaks, torch's compiler looks at it."""
NUM_STEPS = 8
"""More than warm-up has: the step after it is observed."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()


def train(
    folder: Path,
    model: Any,
    batch: Mapping[str, Any] | torch.Tensor,
    *,
    after: Callable[[int], None] = lambda step: None,
    around: Callable[[int, Callable[[], None]], None] = lambda step, run: run(),
    num_steps: int = NUM_STEPS,
) -> list[dict[str, Any]]:
    """A whole run by the public door; gives the lines of its record."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    monitor = watch(model, optimizer, output_dir=folder, config={"monitoring": SETTINGS})

    def one_step() -> None:
        out = model(**batch) if isinstance(batch, Mapping) else model(batch)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(num_steps):
        around(step, one_step)
        after(step)
    monitor.finish_training()
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


def counts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("event") == "count"]


def observed(lines: list[dict[str, Any]]) -> list[int]:
    """Which steps were observed, from 0."""
    steps = [line for line in lines if line.get("kind", "step") == "step"]
    return [place for place, line in enumerate(steps) if "observed" in line.get("marks", ())]


class Keeper(nn.Module):
    """Leaves something in every kind of place that a forward pass can reach."""

    def __init__(self, looks_at_values: bool = False) -> None:
        super().__init__()
        self.looks_at_values = looks_at_values
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Module()
        self.inner.kept = None
        self.hidden = [nn.Linear(WIDTH, WIDTH)]  # in a list: not registered
        self.aux: torch.Tensor | None = None
        self.to_go = 1
        self.calls = 0
        self.total = torch.zeros(())
        self.list: list[Any] = []
        self.dict: dict[str, Any] = {"old": 1, "gone": 2}
        self.deque: deque[Any] = deque([1, 2], maxlen=2)
        self.set = {1}
        self.nested: dict[str, list[Any]] = {"inside": []}
        self.state = (torch.zeros(WIDTH), [])
        self.helper = SimpleNamespace(last=None, calls=0)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.hidden[0](self.layer(x)) + self.state[0]
        if self.looks_at_values and float(y.detach().sum()) > 1e9:
            raise ValueError("too large")
        self.aux = self.inner.kept = self.new = y.mean()
        if hasattr(self, "to_go"):
            del self.to_go
        self.calls += 1
        self.total += 1
        self.state[0].add_(1)
        self.state[1].append(y)
        self.list.append(y)
        self.dict["old"], self.dict["new"] = y, 3
        self.dict.pop("gone", None)
        self.deque.append(y)
        self.set.add(2)
        self.nested["inside"].append(y)
        self.helper.last, self.helper.calls = y, self.helper.calls + 1
        self.mean = 0.5 * self.mean + 0.5 * y.detach().flatten(0, -2).mean(0)
        if "late" not in self._buffers:
            self.register_buffer("late", y.detach(), persistent=False)
            self.made = nn.Identity()
        return y


def picture(value: Any) -> Any:
    """What an object holds, by identity, and tensors by value too."""
    if isinstance(value, torch.Tensor):
        return (
            id(value),
            value.is_meta,
            None if value.is_meta else value.tolist(),
            id(value.grad) if value.is_leaf else None,
        )
    if isinstance(value, dict):
        return id(value), [(key, picture(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return id(value), [picture(item) for item in value]
    if isinstance(value, set):
        return id(value), sorted(map(repr, value))
    if isinstance(value, (nn.Module, SimpleNamespace)):
        return id(value), picture(vars(value))
    return repr(value) if isinstance(value, (int, str, type(None))) else id(value)


def by_count(model: nn.Module) -> float:
    return count_flops(model, torch.zeros(2, ROWS // 2, WIDTH)).model_flop


def by_facade(model: nn.Module) -> float:
    return calculate_precise_mfu(model, 2, ROWS // 2, 1.0)


def by_profiler(model: nn.Module) -> float:
    return calculate_precise_mfu(model, 2, ROWS // 2, 1.0, "profiler")


@pytest.mark.parametrize("looks_at_values", [False, True], ids=["on shapes", "for real"])
@pytest.mark.parametrize("count", [by_count, by_facade, by_profiler])
def test_a_count_leaves_everything_that_modules_hold_as_it_was(
    count: Callable[[nn.Module], float], looks_at_values: bool
) -> None:
    model = Keeper(looks_at_values)
    model(torch.zeros(2, ROWS // 2, WIDTH))  # holds tensors with a history by now
    del model.late, model.made
    before = picture(model)
    assert count(model) > 0
    assert picture(model) == before


def test_the_gradient_of_a_count_stays_out_of_what_a_module_has_kept_of_the_last_step() -> None:
    class Carrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.carried = torch.zeros(ROWS, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.carried = self.layer(x + self.carried)
            return self.carried

    model, x = Carrying(), torch.zeros(ROWS, WIDTH)
    loss = model(x).sum()
    count_flops(model, x)
    loss.backward()  # its graph is whole
    assert model.layer.weight.grad is not None


def test_a_compiled_model_that_keeps_a_tensor_trains_on_after_its_twin_was_counted(tmp_path: Path) -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.aux: torch.Tensor | None = None
            self.list: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            self.aux = y.square().mean()
            self.list.append(self.aux)
            return y.sum() + self.aux

    model, values = Auxiliary(), []

    def read(step: int) -> None:
        values.append(model.aux.item())
        values.append(sum(model.list).item())
        model.list.clear()

    lines = train(tmp_path, torch.compile(model, backend="eager"), torch.randn(ROWS, WIDTH), after=read)
    assert len(values) == 2 * NUM_STEPS
    assert "twin" in counts(lines)[0]["method"]


NOTED: list[bool] = []


@torch._dynamo.disable
def note(y: torch.Tensor) -> None:
    NOTED.append(y.is_meta)


class Wary(nn.Module):
    """Looks at values, so that it cannot be counted on shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        note(y)
        if torch.isnan(y).any():
            raise ValueError("not a number")
        return y


@SILENT_DYNAMO
def test_the_twin_never_runs_the_model_for_real_and_the_record_says_why_there_is_none(tmp_path: Path) -> None:
    NOTED.clear()
    lines = train(tmp_path, torch.compile(Wary(), backend="eager"), torch.randn(ROWS, WIDTH))
    assert NOTED.count(False) == NUM_STEPS
    assert NOTED.count(True) > 0  # it was tried
    assert any("twin could not be counted" in sentence for sentence in counts(lines)[0]["left_out"])
    assert len([line for line in lines if line.get("kind", "step") == "step"]) == NUM_STEPS


def test_the_facade_in_smart_mode_estimates_what_it_cannot_count_without_running_it() -> None:
    NOTED.clear()
    assert calculate_precise_mfu(Wary(), 2, ROWS // 2, 1.0) > 0
    assert NOTED
    assert all(NOTED)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """A group of this process alone; gives how many collectives have reached it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group._get_sequence_number_for_group
    dist.destroy_process_group()


class ReduceInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(grad.clone())
        return grad


def all_reduce(y: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(mean := y.detach().mean(0))
    return y - mean


def of_known_values(y: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(torch.ones(()))
    return y


def caught(y: torch.Tensor) -> torch.Tensor:
    try:
        dist.all_reduce(y.detach().clone())
    except Exception:  # noqa: BLE001 - as user code may do
        return y
    return y


def objects(y: torch.Tensor) -> torch.Tensor:
    dist.all_gather_object([None], {"rows": y.shape[0]})
    return y


def barrier(y: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    return y


def functional_reduce(y: torch.Tensor) -> torch.Tensor:
    return y + functional.all_reduce(y.detach(), "sum", dist.group.WORLD)


class Talking(nn.Module):
    def __init__(self, talk: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.talk = talk

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.talk(self.layer(x))


@pytest.mark.filterwarnings("ignore")  # torch warns of its own barrier and of its functional collectives
@pytest.mark.parametrize(
    "talk", [all_reduce, of_known_values, caught, objects, barrier, functional_reduce, ReduceInBackward.apply]
)
def test_a_collective_in_a_count_raises_and_never_reaches_its_group(
    group: Callable[[], int], talk: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    before = group()
    with pytest.raises(CountError, match="ranks"):
        count_flops(Talking(talk), torch.zeros(ROWS, WIDTH))
    assert group() == before
    dist.all_reduce(torch.ones(()))
    assert group() == before + 1  # it is what counts them


@SILENT_DYNAMO
def test_the_twin_of_a_compiled_model_sends_nothing_to_its_group(group: Callable[[], int], tmp_path: Path) -> None:
    class Checked(Talking):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if torch.isnan(y).any():
                raise ValueError("not a number")
            return y

    before = group()
    reached: list[int] = []
    model = torch.compile(Checked(torch._dynamo.disable(all_reduce)), backend="eager")
    lines = train(tmp_path, model, torch.randn(ROWS, WIDTH), after=lambda step: reached.append(group() - before))
    assert reached == list(range(1, NUM_STEPS + 1))
    assert any("ranks" in sentence for sentence in counts(lines)[0]["left_out"])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.query(x).unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q)


def test_a_count_calls_the_users_own_attention_and_leaves_it_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = F.scaled_dot_product_attention, []

    def mine(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args[0].is_meta)
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", mine)
    x = torch.zeros(2, LENGTH, WIDTH)
    linear, pair_products = 2 * 2 * LENGTH * WIDTH**2, 2 * (2 * 2 * LENGTH**2 * WIDTH)
    assert count_flops(Attention(), x, training=False).model_flop == linear + pair_products
    assert calls == [True]
    assert F.scaled_dot_product_attention is mine


def test_an_attention_of_the_users_that_fails_on_shapes_is_counted_as_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("no pointer")

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    linear, pair_products = 2 * 2 * LENGTH * WIDTH**2, 2 * (2 * 2 * LENGTH**2 * WIDTH)
    count = count_flops(Attention(), torch.zeros(2, LENGTH, WIDTH))
    assert count.forward_flop == linear + pair_products
    assert count.method == "meta"
    assert F.scaled_dot_product_attention is kernel


def test_a_patch_made_within_an_observed_run_stands_and_is_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original, calls = F.scaled_dot_product_attention, []

    def mine(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args[0].is_meta)
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", torch._dynamo.disable(mine))
    patched = F.scaled_dot_product_attention
    lines = train(tmp_path, torch.compile(Attention(), backend="eager"), torch.randn(2, LENGTH, WIDTH))
    assert "twin" in counts(lines)[0]["method"]
    assert calls.count(False) == NUM_STEPS
    assert F.scaled_dot_product_attention is patched


class Spelled(nn.Module):
    """Attention in plain products, which keeps all that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mask = torch.ones(LENGTH, LENGTH).tril().bool()
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.query(x)
        scores = torch.bmm(q, q.transpose(1, 2)) / WIDTH**0.5
        masked = scores.masked_fill(~self.mask, float("-inf"))
        weights = masked.softmax(-1)
        out = torch.bmm(weights, q)
        self.kept = {"scores": scores, "masked": masked, "weights": weights, "hidden": out, "mask": self.mask}
        self.kept |= {f"copy of {name}": tensor.detach().clone() for name, tensor in self.kept.items()}
        return out


def test_tensors_kept_from_an_observed_step_carry_nothing_of_ours(tmp_path: Path) -> None:
    model, kept = Spelled(), []

    def keep(step: int) -> None:
        for name, tensor in model.kept.items():
            copies = (tensor, tensor.detach(), tensor.detach().clone(), tensor[0], tensor.detach().view(-1))
            kept.extend((f"{name} {place} of step {step}", copy_) for place, copy_ in enumerate(copies))

    def run(step: int, one_step: Callable[[], None]) -> None:
        one_step()
        with torch.no_grad():  # copies that are made while the step is still observed
            keep(step)

    lines = train(tmp_path, model, torch.randn(2, LENGTH, WIDTH), around=run)
    assert observed(lines)
    for name, tensor in kept:
        assert vars(tensor) == {}, name
        file = io.BytesIO()
        torch.save({name: tensor.detach()}, file)
        assert b"flopmeter" not in file.getvalue()
        file.seek(0)
        torch.load(file, weights_only=True)
    assert vars(copy.deepcopy(model.kept["weights"].detach())) == {}
    assert b"flopmeter" not in pickle.dumps(model.kept["weights"].detach())
    # As exact as ever: of LENGTH^2 pairs the mask lets LENGTH(LENGTH+1)/2 through.
    linear, pairs = 2 * 2 * LENGTH * WIDTH**2, LENGTH * (LENGTH + 1) // 2
    products = 2 * 2 * 2 * pairs * WIDTH
    assert counts(lines)[0]["forward_flop"] == linear + products
    assert counts(lines)[0]["backward_flop"] == linear + 2 * products


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of scripting, by torch
def test_a_scripted_part_does_not_end_measuring(tmp_path: Path) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), scripted, nn.Linear(WIDTH, WIDTH, bias=False))
    lines = train(tmp_path, model, torch.randn(ROWS, WIDTH))
    assert observed(lines)
    # Three forward products; backward twice that, but for the gradient of the input.
    assert counts(lines)[0]["model_flop"] == 3 * UNIT + 5 * UNIT
    assert not [line for line in lines if line.get("event") == "warning" and "measur" in line["message"]]


class Watcher(TorchFunctionMode):
    """A tool of the user's: notes every call, and stops at one that the training loop does not make."""

    def __init__(self, allowed: set[str] | None = None) -> None:
        super().__init__()
        self.names: list[str] = []
        self.allowed = allowed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f"{getattr(func, '__name__', func)} {getattr(getattr(func, '__self__', None), '__name__', '')}"
        self.names.append(name)
        if self.allowed is not None and name not in self.allowed:
            raise RuntimeError(f"{name} is not allowed here")
        return func(*args, **(kwargs or {}))


class Counted(torch.Tensor):
    """A tensor class of the user's."""

    calls: list[str] = []  # noqa: RUF012 - shared by all, as it is meant

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(str(getattr(func, "__name__", func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(input_ids)) * attention_mask.unsqueeze(-1)


def text_loop(folder: Path | None, tool: Any, make: Callable[[torch.Tensor], torch.Tensor], mode: str) -> list[Any]:
    """Train with or without a monitor inside the tool; everything that can be told to a monitor is told."""
    torch.manual_seed(0)
    model, lines = Text(), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    ids = make(torch.randint(0, 16, (ROWS, LENGTH)))
    mask = make(torch.ones(ROWS, LENGTH, dtype=torch.long))
    with tool:
        monitor = None
        if folder is not None:
            settings = {**SETTINGS, "mfu_calculation_mode": mode, "dataset_metrics_every": 1}
            monitor = watch(model, optimizer, output_dir=folder, config={"monitoring": settings})
        for step in range(NUM_STEPS):
            logits = model(input_ids=ids, attention_mask=mask)
            loss = logits.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.log_step(step, loss=loss, grad_norm=loss, attention_mask=mask)
                monitor.update_dataset_metrics("text", loss, logits, ids)
        if monitor is not None:
            monitor.finish_training()
            lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return lines


@pytest.mark.parametrize("mode", ["smart", "estimate"])
def test_a_function_mode_of_the_users_sees_no_call_of_ours(tmp_path: Path, mode: str) -> None:
    alone = Watcher()
    text_loop(None, alone, torch.Tensor.clone, mode)
    beside = Watcher(allowed=set(alone.names))  # whatever else is called raises
    lines = text_loop(tmp_path, beside, torch.Tensor.clone, mode)
    assert beside.names == alone.names
    steps = [line for line in lines if line.get("kind", "step") == "step"]
    assert len(steps) == NUM_STEPS
    assert mode == "estimate" or counts(lines)
    assert not [line for line in lines if line.get("event") == "warning"]


def test_a_tensor_class_of_the_users_sees_no_call_of_ours(tmp_path: Path) -> None:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(Counted)

    Counted.calls.clear()
    text_loop(None, nullcontext(), make, "smart")
    alone = list(Counted.calls)
    Counted.calls.clear()
    lines = text_loop(tmp_path, nullcontext(), make, "smart")
    assert Counted.calls == alone
    assert counts(lines)


@pytest.mark.parametrize("make", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_no_step_is_observed_beside_a_profiler_of_the_users(tmp_path: Path, make: Callable[[], Any]) -> None:
    seen: list[set[str]] = []

    def run(step: int, one_step: Callable[[], None]) -> None:
        if 1 <= step < NUM_STEPS:
            with make() as profile:  # begins when the step before has ended, and the next may be observed already
                one_step()
            seen.append({event.name for event in getattr(profile, "profiler", profile).function_events})
        else:
            one_step()

    lines = train(tmp_path, nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH), around=run, num_steps=NUM_STEPS + 16)
    assert all("aten::addmm" in names for names in seen)
    assert not [name for names in seen for name in names if "DispatchMode" in name]
    assert observed(lines)
    assert min(observed(lines)) >= NUM_STEPS
    assert counts(lines)[0]["forward_flop"] == UNIT


def test_no_step_is_observed_beside_a_profiler_that_another_thread_runs(tmp_path: Path) -> None:
    begun, over = threading.Event(), threading.Event()

    def profile() -> None:
        with torch.profiler.profile():
            begun.set()
            over.wait(60)

    other = threading.Thread(target=profile)

    def run(step: int, one_step: Callable[[], None]) -> None:
        if step == 0:
            other.start()
            assert begun.wait(60)
        if step == NUM_STEPS:
            over.set()
            other.join()
        one_step()

    lines = train(tmp_path, nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH), around=run, num_steps=NUM_STEPS + 16)
    assert observed(lines)
    assert min(observed(lines)) >= NUM_STEPS


def test_recomputation_is_not_negative_where_a_compiler_hides_its_work(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(checkpoint(lambda y: self.first(y).relu(), x, use_reentrant=False))

    def hiding(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with _disable_current_modes():
                return graph(*args)

        return run

    lines = train(tmp_path, torch.compile(Checkpointed(), backend=hiding), torch.randn(ROWS, WIDTH))
    assert counts(lines)[0]["forward_flop"] == 2 * UNIT
    assert counts(lines)[0]["recompute_flop"] == UNIT


def test_an_idle_expert_beside_images_is_read_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(10, WIDTH)

        def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
            rows = self.table(input_ids).flatten(0, 1)
            return self.expert(rows[:0]).sum() + self.expert(rows).sum() + pixel_values.sum()

    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "pixel_values": torch.zeros(4, WIDTH)}
    with caplog.at_level(logging.WARNING, "flopmeter"):
        lines = train(tmp_path, Experts(), batch)
    assert observed(lines)
    assert "cannot be read" not in caplog.text


def test_point_wise_operators_are_not_called_uncounted_matrix_work(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x).abs() + 1
            return torch.lgamma(y) + torch.cummax(y, 1)[0] + torch.digamma(y)

    assert counts(train(tmp_path, Odd(), torch.randn(ROWS, WIDTH)))[0]["uncounted"] == {}
