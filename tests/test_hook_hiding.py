"""What is put into torch goes without a trace, and what is made of a measured model is what it would be without us."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from flopmeter import watch
from flopmeter.flops.observe import observe
from flopmeter.hook_hiding import OwnHook, hide_hooks, replace_attribute, surround_backward

CONFIG = {"monitoring": {"peak_flop_per_s": 1e12, "sinks": [], "report": False}}
ORIGINALS = nn.Module.__getstate__, DistributedDataParallel.__getstate__, torch.jit._recursive.create_script_module


class WithState(nn.Linear):
    """Has a word of its own in what is saved of it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.cache: Any = lambda: None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "cache"}


class WithTuple(nn.Linear):
    """Saves more than a mapping."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def __getstate__(self) -> tuple[dict[str, Any], str]:
        return self.__dict__.copy(), "more"

    def __setstate__(self, state: tuple[dict[str, Any], str]) -> None:
        self.__dict__.update(state[0])


class WithReduce(nn.Linear):
    """Says itself how it is made anew."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        super().__init__(4, 4)
        self.__dict__.update(state or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return WithReduce, (self.__dict__.copy(),)


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def with_hook_of_its_own() -> nn.Module:
    model = plain()
    model.register_forward_hook(nullify, with_kwargs=True, always_call=True)
    return model


def nullify(*_: Any) -> None:
    return None


HOOKLESS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "hooks of its own": with_hook_of_its_own,
    "own __getstate__": WithState,
    "compiled": lambda: torch.compile(plain(), backend="eager"),  # type: ignore[return-value]
}
INERT = {"a tuple": WithTuple, "own __reduce__": WithReduce}


def num_hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def check_copies(model: nn.Module, before: list[int]) -> None:
    file = saved(model)
    assert b"flopmeter" not in file
    for twin in (copy.copy(model), copy.deepcopy(model), torch.load(io.BytesIO(file), weights_only=False)):
        assert num_hooks(twin)[0] == before[0]
        assert twin(torch.ones(2, 4)).shape == (2, 4)
    assert num_hooks(copy.deepcopy(model)) == before
    assert num_hooks(AveragedModel(model).module) == before


@pytest.mark.parametrize("kind", HOOKLESS)
def test_copies_of_a_watched_model_have_no_hooks_of_ours(tmp_path: Path, kind: str) -> None:
    model = HOOKLESS[kind]()
    before = num_hooks(model)
    monitor = watch(model, output_dir=tmp_path, config=CONFIG)
    check_copies(model, before)
    with observe(model):
        check_copies(model, before)
    monitor.finish_training()
    assert num_hooks(model) == before
    assert (nn.Module.__getstate__, torch.jit._recursive.create_script_module) == (ORIGINALS[0], ORIGINALS[2])


@pytest.mark.usefixtures("one_rank")
def test_copies_of_a_model_in_ddp_have_no_hooks_of_ours(tmp_path: Path) -> None:
    model = DistributedDataParallel(plain())
    monitor = watch(model, output_dir=tmp_path, config=CONFIG)
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    monitor.finish_training()
    assert [sum(num_hooks(twin)) for twin in twins] == [0, 0]
    assert DistributedDataParallel.__getstate__ is ORIGINALS[1]


@pytest.mark.parametrize("kind", INERT)
def test_where_the_class_makes_its_copies_itself_hooks_are_inert_and_need_no_flopmeter(
    tmp_path: Path, kind: str
) -> None:
    model = INERT[kind]()
    with watch(model, output_dir=tmp_path, config=CONFIG):
        file = saved(model)
        assert b"flopmeter" not in file
        for twin in (copy.deepcopy(model), torch.load(io.BytesIO(file), weights_only=False)):
            assert not any(isinstance(hook, OwnHook) for hook in twin._forward_hooks.values())
            assert twin(torch.ones(2, 4)).shape == (2, 4)


def test_a_file_is_byte_for_byte_the_same(tmp_path: Path) -> None:
    model = plain()
    before = pickle.dumps(model)
    with watch(model, output_dir=tmp_path, config=CONFIG):
        assert pickle.dumps(model) == before


def _count_hooks(model: nn.Module, answer: Any) -> None:
    answer.put(sum(num_hooks(model)))


def test_a_model_that_is_sent_to_a_spawned_process_brings_no_hooks(tmp_path: Path) -> None:
    model = plain()
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    with watch(model, output_dir=tmp_path, config=CONFIG):
        child = context.Process(target=_count_hooks, args=(model, answer))
        child.start()
        assert answer.get(timeout=120) == 0
        child.join()


def test_hooks_that_are_asked_for_twice_stay_hidden_until_the_last_is_gone() -> None:
    first, second = hide_hooks(nn.Linear(2, 2)), hide_hooks(nn.Linear(2, 2))
    first()
    first()
    assert nn.Module.__getstate__ is not ORIGINALS[0]
    second()
    assert nn.Module.__getstate__ is ORIGINALS[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_watched_model_becomes_torchscript_and_keeps_its_marks(tmp_path: Path) -> None:
    model = plain()
    batch = torch.ones(2, 4)
    with watch(model, output_dir=tmp_path, config=CONFIG):
        before = num_hooks(model)
        with observe(model):
            scripts = torch.jit.script(model), torch.jit.script(copy.deepcopy(model)), torch.jit.trace(model, batch)
        assert num_hooks(model) == before == [2, 0, 0, 0]
        assert all(torch.equal(script(batch), model(batch)) for script in scripts)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_torchscript_refuses_it_refuses_as_before(tmp_path: Path) -> None:
    model = with_hook_of_its_own()
    with pytest.raises(Exception, match="variable number of arguments") as before:
        torch.jit.script(model)
    with watch(model, output_dir=tmp_path, config=CONFIG):
        with pytest.raises(Exception, match="variable number of arguments") as refusal:
            torch.jit.script(model)
        assert num_hooks(model)[0] == 3
    assert str(refusal.value) == str(before.value)


def test_the_original_comes_back() -> None:
    owner = SimpleNamespace(run="original")
    undo = replace_attribute(owner, "run", "ours")
    assert owner.run == "ours"
    undo()
    assert owner.run == "original"


def test_what_somebody_else_has_put_there_meanwhile_stays() -> None:
    owner = SimpleNamespace(run="original")
    undo = replace_attribute(owner, "run", "ours")
    owner.run = "theirs"
    undo()
    assert owner.run == "theirs"


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_whoever_of_us_goes_last_puts_back_what_was_there_before_all(order: tuple[int, ...]) -> None:
    owner = SimpleNamespace(run="original")
    undos = [replace_attribute(owner, "run", object()) for _ in range(3)]
    for place in order:
        undos[place]()
    assert owner.run == "original"


class Passes:
    """Notes of each backward pass whether it builds a graph, and that it ended."""

    def __init__(self) -> None:
        self.seen: list[bool | str] = []

    @contextmanager
    def __call__(self, builds_graph: bool) -> Iterator[None]:
        self.seen.append(builds_graph)
        try:
            yield
        finally:
            self.seen.append("end")


def test_every_backward_pass_is_surrounded_and_tells_whether_it_builds_a_graph() -> None:
    engine, passes = torch.autograd._engine_run_backward, Passes()
    x = torch.ones(2, requires_grad=True)
    undo = surround_backward(passes)
    x.square().sum().backward()
    torch.autograd.grad(x.square().sum(), x, create_graph=True)
    undo()
    x.sum().backward()
    assert passes.seen == [False, "end", True, "end"]
    assert torch.autograd._engine_run_backward is engine


def fail(gradient: torch.Tensor) -> None:
    raise StopIteration("the user's own")


def test_an_error_in_a_backward_pass_goes_through_as_it_is() -> None:
    passes = Passes()
    x = torch.ones(2, requires_grad=True)
    y = x.sum()
    y.register_hook(fail)
    undo = surround_backward(passes)
    try:
        with pytest.raises(StopIteration, match="the user's own"):
            y.backward()
    finally:
        undo()
    assert passes.seen == [False, "end"]


def test_one_replacement_under_two_names_goes_from_both_whoever_goes_first() -> None:
    class Place:
        call = other = original = staticmethod(lambda: 0)

    def first() -> None: ...
    def second() -> None: ...

    original = Place.call
    undo = [replace_attribute(Place, name, value) for value in (first, second) for name in ("call", "other")]
    for own in undo:  # the first ones while the second ones stand on them
        own()
    assert Place.call is Place.other is original
