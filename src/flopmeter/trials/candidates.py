"""Which changes can be tried from outside? A function each, and what else is known above it; a user's own in a file.

A function is given the `Trial` (see `inside.py`) in the program's own process. One with a `yield` in it is switched on
and off at the boundaries of steps: what stands before the `yield` puts the change in, what stands behind it takes the
change out. One without is called once, before the program imports anything else, and stays for the whole of a process.
The first line of its docstring names the change, the others say what to watch out for.

    # my.py, for  flopmeter try --candidates my.py train.py
    def channels_last(trial):
        \"\"\"Convolutions in channels-last order.\"\"\"
        for model in trial.models:
            model.to(memory_format=torch.channels_last)
        yield
        for model in trial.models:
            model.to(memory_format=torch.contiguous_format)

Torch is imported inside the functions: the table itself is read where there is none.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Any, NamedTuple

from flopmeter.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from flopmeter.diagnosis import Diagnosis
    from flopmeter.trials.inside import Trial

FP32, TF32, BF16 = 2.0**-23, 2.0**-10, 2.0**-8
"""Relative error of one operation in these formats."""
MAX_WORKERS, PREFETCH, MORE_SAMPLES = 4, 4, 2
MAX_WAITED = 0.2
"""Share of its time that the training thread waits for a core, above which more threads would wait, too."""


class Seen(NamedTuple):
    """What the first look at the unchanged program showed."""

    facts: Mapping[str, Any]
    """Of `Trial`: its device, loaders, optimizers and trainer."""
    diagnosis: Diagnosis | None
    """None where the program left no record."""
    record: Mapping[str, Any]
    """The event `facts` of the record."""

    def share(self, part: str) -> float:
        """Of the wall time, by the waterfall; 0 where it is not told."""
        parts = self.diagnosis.waterfall.parts if self.diagnosis is not None else ()
        return max(sum(row.share for row in parts if row.name == part), 0.0)


Change = Callable[["Trial"], "Iterator[None] | None"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One change that can be tried."""

    change: Change
    """Puts it in from outside."""
    misfit: Callable[[Seen], str] = lambda seen: ""
    """Why there is nothing to try in this program or on this device; "" where it fits."""
    prepare: Callable[[Trial], None] = lambda trial: None
    """Called first of all in a process in which it will be switched on."""
    rules: tuple[str, ...] = ()
    """Findings whose predicted gain is this change's."""
    saves: Mapping[str, float] = field(default_factory=dict)
    """Where there is no finding: the share of each part of the waterfall that the change is expected to save."""
    code: Mapping[str, str] = field(default_factory=dict)
    """What to write, by trainer; "" for a loop of one's own. Names in braces are filled in from what was seen."""
    rounding: float = FP32
    """Relative error of one operation that the change may bring; 0 where every number should stay the same."""
    samples: float = 1.0
    """Samples a step, over the unchanged program's."""

    @property
    def name(self) -> str:
        """As users type it after `--only`."""
        return self.change.__name__

    @property
    def what(self) -> str:
        """The change, in half a sentence."""
        return (inspect.getdoc(self.change) or self.name).partition("\n")[0].rstrip(".")

    @property
    def watch_out(self) -> str:
        """What may go wrong with it."""
        return " ".join((inspect.getdoc(self.change) or "").partition("\n")[2].split())

    @property
    def is_switched(self) -> bool:
        """Whether it can be taken out again within a process."""
        return inspect.isgeneratorfunction(self.change)


CANDIDATES: dict[str, Candidate] = {}
"""Every change by its name."""


def _candidate(code: Mapping[str, str] | str, **more: Any) -> Callable[[Change], Change]:
    def take(change: Change) -> Change:
        codes = {"": code} if isinstance(code, str) else code
        CANDIDATES[change.__name__] = Candidate(change=change, code=codes, **more)
        return change

    return take


# The loader


def _wanted_workers(is_iterable: bool) -> int:
    """A stream that does not share itself out would repeat itself in each of several workers."""
    return 1 if is_iterable else MAX_WORKERS


def _no_loader(fits: Callable[[Mapping[str, Any]], bool], otherwise: str) -> Callable[[Seen], str]:
    """A misfit: the program has no loader of this kind."""

    def misfit(seen: Seen) -> str:
        loaders = seen.facts["loaders"]
        return "" if any(map(fits, loaders)) else otherwise if loaders else "the program makes no DataLoader"

    return misfit


@_candidate(
    {
        "": f"DataLoader(..., num_workers={{workers}}, persistent_workers=True, prefetch_factor={PREFETCH})",
        "transformers": "TrainingArguments(..., dataloader_num_workers={workers}, dataloader_persistent_workers=True, "
        f"dataloader_prefetch_factor={PREFETCH})",
    },
    misfit=_no_loader(
        lambda row: (row["num_workers"] or 0) < _wanted_workers(row["is_iterable"]), "its loader has workers"
    ),
    rules=("data_stall", "cpu_preprocessing"),
    saves={"data_wait": 0.95},
    rounding=0.0,
)
def loader_workers(trial: Trial) -> None:
    """Workers load ahead.

    Each worker holds the dataset; random augmentation draws other numbers; a script needs `if __name__ == "__main__":`.
    """
    from torch.utils.data import DataLoader, IterableDataset

    def change(given: dict[str, Any]) -> None:
        wanted = _wanted_workers(isinstance(given.get("dataset"), IterableDataset))
        if (given.get("num_workers") or 0) < wanted:
            given |= {"num_workers": wanted, "persistent_workers": True, "prefetch_factor": PREFETCH}

    trial.change_arguments(DataLoader, change)


_not_pinned = _no_loader(lambda row: not row["pin_memory"], "its loader pins already")


@_candidate(
    'DataLoader(..., pin_memory=True), and batch.to("{device}", non_blocking=True)',
    misfit=lambda seen: "pinned memory is for copies to a GPU" if seen.facts["device"] == "cpu" else _not_pinned(seen),
    saves={"host_to_device": 0.5},
    rounding=0.0,
)
def pin_memory(trial: Trial) -> None:
    """Batches lie in pinned memory.

    It cannot be swapped out.
    """
    from torch.utils.data import DataLoader

    trial.change_arguments(DataLoader, lambda given: given.update(pin_memory=True))


@_candidate(
    {
        "": "DataLoader(..., batch_size={batch})",
        "transformers": "TrainingArguments(..., per_device_train_batch_size={batch})",
    },
    misfit=_no_loader(lambda row: isinstance(row["batch_size"], int), "no DataLoader is given the size of a batch"),
    rules=("kernel_launch", "optimizer_heavy"),
    saves={"launch_gaps": 0.45, "optimizer": 0.45, "exposed_communication": 0.45},
    samples=MORE_SAMPLES,
)
def larger_batch(trial: Trial) -> None:
    """Twice the batch.

    Other gradients: the learning rate and the number of steps want to be chosen anew.
    """
    from torch.utils.data import DataLoader

    def change(given: dict[str, Any]) -> None:
        if given.get("batch_sampler") is None and given.get("batch_size", 1) is not None:
            given["batch_size"] = MORE_SAMPLES * given.get("batch_size", 1)

    trial.change_arguments(DataLoader, change)


# The numbers


def _no_bf16(seen: Seen) -> str:
    dtypes = seen.record.get("matmul_dtypes") or {}
    if not seen.facts["has_bf16"]:
        return "this device multiplies bf16 no faster than fp32"
    return "its matmuls are not in fp32" if dtypes and not {"fp32", "float32"} & dtypes.keys() else ""


@_candidate(
    {
        "": 'with torch.autocast("{device}", dtype=torch.bfloat16):  # around model and loss, not backward()',
        "transformers": "TrainingArguments(..., bf16=True)",
        "lightning": 'Trainer(..., precision="bf16-mixed")',
        "accelerate": 'Accelerator(..., mixed_precision="bf16")',
    },
    misfit=_no_bf16,
    rules=("fp32_matmul",),
    saves={"ideal": 0.25, "matmul_below_peak": 0.25},
    rounding=BF16,
)
def bf16(trial: Trial) -> Iterator[None]:
    """bf16 autocast.

    A loss or norm of one's own may need fp32: compare a longer run.
    """
    import torch

    undo = trial.around_forward(lambda: torch.autocast(trial.device, dtype=torch.bfloat16))
    yield
    undo()


def _no_tf32(seen: Seen) -> str:
    if seen.facts["device"] != "cuda":
        return "TF32 is a format of NVIDIA's GPUs"
    return "TF32 is on" if seen.facts["tf32"] else _no_bf16(seen)


@_candidate(
    {"": 'torch.set_float32_matmul_precision("high")', "transformers": "TrainingArguments(..., tf32=True)"},
    misfit=_no_tf32,
    rules=("fp32_matmul",),
    saves={"ideal": 0.2, "matmul_below_peak": 0.2},
    rounding=TF32,
)
def tf32(trial: Trial) -> Iterator[None]:
    """TF32 matmuls."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


# The model


@_candidate(
    {"": "model.compile()  # before the loop", "transformers": "TrainingArguments(..., torch_compile=True)"},
    misfit=lambda seen: "the program compiles already" if seen.record.get("is_compiled") else "",
    rules=("memory_bound", "kernel_launch", "eager_attention"),
    saves={"non_matmul": 0.4, "launch_gaps": 0.4},
)
def compile(trial: Trial) -> Iterator[None]:
    """torch.compile.

    The first steps take minutes; shapes that keep changing compile anew; dropout draws other numbers.
    """
    if not trial.models:
        raise RuntimeError("no module was seen that the loop calls")
    models = [getattr(model, "module", model) for model in trial.models]  # DDP calls what it wraps
    if any(type(model).__module__.startswith("torch.nn.modules") for model in models):
        raise RuntimeError("a module of torch.nn's own is not compiled in place: write torch.compile(model)")
    for model in models:
        if id(model) not in trial.compiled:
            model.compile()
            trial.compiled[id(model)] = model._compiled_call_impl
        model._compiled_call_impl = trial.compiled[id(model)]
    yield
    for model in models:
        model._compiled_call_impl = None


_FUSED = ("fused_attn", "flash", "use_flash", "use_sdpa")
"""Attributes by which models of timm, nanoGPT and their like choose torch's own attention."""


def all_modules() -> list[nn.Module]:
    """Of this process."""
    from torch import nn

    return [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]


def spelled_out() -> list[tuple[Any, str, Any]]:
    """Where a model chooses to spell attention out: owner, attribute, and the other choice."""
    found: dict[int, tuple[Any, str, Any]] = {}
    for module in all_modules():
        config = module.__dict__.get("config")
        if getattr(config, "_attn_implementation", None) == "eager" and getattr(module, "_supports_sdpa", True):
            found[id(config)] = (config, "_attn_implementation", "sdpa")
        found |= {id(module): (module, name, True) for name in _FUSED if module.__dict__.get(name) is False}
    return list(found.values())


@_candidate(
    {
        "": "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "transformers": 'from_pretrained(..., attn_implementation="sdpa")',
    },
    misfit=lambda seen: "" if seen.facts["spells_attention_out"] else "no model with a switch spells attention out",
    rules=("eager_attention",),
    saves={"non_matmul": 0.2},
)
def sdpa(trial: Trial) -> Iterator[None]:
    """Fused attention, where the model has a switch for it.

    Attention weights are no longer to be had; dropout in attention draws other numbers.
    """
    places = [(owner, name, getattr(owner, name), value) for owner, name, value in spelled_out()]
    for owner, name, _, value in places:
        setattr(owner, name, value)
    yield
    for owner, name, before, _ in places:
        setattr(owner, name, before)


_OF_CHECKPOINT = ("context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state", "use_reentrant")


def _can_keep_activations(trial: Trial) -> None:
    """Before the program imports it: a checkpoint that can be told to do nothing."""
    from torch.utils import checkpoint

    original = checkpoint.checkpoint

    @wraps(original)
    def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not trial.keeps_activations:
            return original(function, *args, **kwargs)
        return function(*args, **{key: value for key, value in kwargs.items() if key not in _OF_CHECKPOINT})

    checkpoint.checkpoint = checkpointed


@_candidate(
    {
        "": "call the layer itself in the place of torch.utils.checkpoint.checkpoint(layer, ...)",
        "transformers": "TrainingArguments(..., gradient_checkpointing=False)",
    },
    prepare=_can_keep_activations,
    misfit=lambda seen: "" if seen.share("recompute") > 0.01 else "nothing is computed a second time",
    rules=("recompute",),
    saves={"recompute": 1.0},
)
def no_checkpointing(trial: Trial) -> Iterator[None]:
    """No activation checkpointing.

    Takes more memory: see there.
    """
    trial.keeps_activations = True
    yield
    trial.keeps_activations = False


# The update and the host


def _no_fused(seen: Seen) -> str:
    has_form = ("Adam", "AdamW", "SGD", "Adagrad")
    rows = [row for row in seen.facts["optimizers"] if row["is_torch"] and row["name"] in has_form]
    if not rows:
        return "its optimizer has no fused form"
    return "its optimizer is fused" if all(row["fused"] for row in rows) else ""


@_candidate(
    {
        "": "torch.optim.{optimizer}(..., fused=True)",
        "transformers": 'TrainingArguments(..., optim="adamw_torch_fused")',
    },
    misfit=_no_fused,
    rules=("optimizer_heavy",),
    saves={"optimizer": 0.5},
)
def fused_optimizer(trial: Trial) -> Iterator[None]:
    """The whole update in one kernel."""
    import torch

    groups = [(one, group) for one in trial.optimizers for group in one.param_groups if "fused" in group]
    before = [(group["fused"], group.get("foreach")) for _, group in groups]

    def set_all(values: Iterable[tuple[Any, Any]], *, is_fused: bool) -> None:
        for (optimizer, group), (fused, foreach) in zip(groups, values, strict=True):
            group["fused"], group["foreach"] = fused, foreach
            for parameter in group["params"]:
                step = optimizer.state.get(parameter, {}).get("step")
                if isinstance(step, torch.Tensor):  # a fused update counts its steps on the device
                    place = parameter.device if is_fused or group.get("capturable") else torch.device("cpu")
                    optimizer.state[parameter]["step"] = step.to(place, torch.float32)

    if not groups:
        raise RuntimeError("no optimizer has a fused form")
    set_all([(True, False)] * len(groups), is_fused=True)
    yield
    set_all(before, is_fused=False)


@_candidate("gc.collect(); gc.freeze(); gc.disable()  # before the loop", rules=("gc_pause",), rounding=0.0)
def gc_frozen(trial: Trial) -> Iterator[None]:
    """No garbage collection.

    A loop that makes cycles of objects needs gc.collect() now and then, on all ranks at the same step.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def _has_threads(seen: Seen) -> str:
    num, cores = seen.facts["num_threads"], seen.facts["num_cores"]
    if seen.facts["device"] != "cpu":
        return "a GPU computes"
    if num >= cores:
        return f"{num} threads, {cores} cores"
    return "other programs hold the cores" if seen.facts["waited_share"] > MAX_WAITED else ""


@_candidate(
    "torch.set_num_threads({threads})  # or OMP_NUM_THREADS={threads}, which torchrun sets to 1",
    misfit=_has_threads,
    saves={"ideal": 0.3, "matmul_below_peak": 0.3, "non_matmul": 0.2},
)
def threads(trial: Trial) -> Iterator[None]:
    """A thread for each core."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(trial.seen["facts"]["num_cores"])
    yield
    torch.set_num_threads(before)


def load_candidates(path: str = "") -> dict[str, Candidate]:
    """All changes by their names: ours, and the public functions of a user's file.

    Raises:
        ConfigError: The file cannot be run, or has no function.
    """
    if not path:
        return CANDIDATES
    try:
        found = run_path(path)
    except Exception as error:
        raise ConfigError(f"--candidates {path}: {type(error).__name__}: {error}") from error
    own = {
        name: Candidate(change=value, code={"": f"{name} of {Path(path).name}"})
        for name, value in found.items()
        if inspect.isfunction(value) and value.__module__ == found["__name__"] and not name.startswith("_")
    }
    if not own:
        raise ConfigError(f"--candidates {path}: there is no function in it whose name has no _ before it")
    return {**CANDIDATES, **own}
