"""How many FLOPs does a step of this model take, and which part of the model takes them?"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from flopmeter.cli._choice import choose
from flopmeter.errors import ConfigError, CountError, FlopmeterError, MissingLibraryError, refuse_old_torch
from flopmeter.text import amount, percent

if TYPE_CHECKING:
    from flopmeter.flops.flop_count import FlopCount

Axis = Literal["module", "op", "dtype"]
ConventionName = Literal["exact", "full"]
DEPTH = 4
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="A config.json or its folder, a transformers type with sizes (llama:layers=32,hidden=4096,...), "
            "a published name (llama-3-70b), or package.module:function.",
            show_default=False,
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, max=10**9, help="Samples in the batch.")] = 1,
    seq: Annotated[
        int, typer.Option(min=1, max=10**9, help="Tokens of a sample; pixels on a side for a plain conv net.")
    ] = 2048,
    train: Annotated[bool, typer.Option("--train/--forward", help="Forward and backward, or forward alone.")] = True,
    by: Annotated[str, typer.Option(help="Split the FLOPs by module, op or dtype.")] = "module",
    depth: Annotated[
        int | None, typer.Option(min=1, help="Levels of modules to show. Default: 4; with --json all of them.")
    ] = None,
    convention: Annotated[
        str, typer.Option(help="exact: pairs that the mask lets through. full: all pairs.")
    ] = "exact",
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights: fp32, bf16, fp16 or fp64. Default: as the config says, else bf16."),
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute the activations of every layer.")
    ] = False,
    symbolic: Annotated[
        bool, typer.Option("--symbolic", help="Also give the FLOPs as a formula of batch size B and length S.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """FLOPs of a model that need not fit this machine: it is run on shapes, no weight is allocated.

    Example: flopmeter count llama-3-70b --batch 1 --seq 8192 --by module

    Sizes have short names (layers, hidden, heads, kv_heads, head_dim, ffn,
    vocab, window, experts, active_experts, expert_ffn, tied) or the config's
    own; parts of a config take a dot, as in text_config.hidden_size=1024.
    """
    axis: Axis = choose("--by", by, get_args(Axis))
    kind: ConventionName = choose("--convention", convention, get_args(ConventionName))
    _refuse_missing_file(model)
    _refuse_missing_libraries(model)
    weights = dtype if dtype is None else choose("--dtype", dtype, _DTYPES)
    answer = _count(_Question(model, batch, seq, train, kind, weights, checkpointing, symbolic))
    if as_json:
        typer.echo(json.dumps(answer.as_dict(depth)))
    else:
        _show(answer, axis, depth or DEPTH)


def _refuse_missing_file(model: str) -> None:
    """A path to nothing is no misspelt model; told before torch is loaded."""
    path = model if Path(model).exists() else model.partition(":")[0]
    is_path = path.endswith(".json") or any(sign in path for sign in (os.sep, os.altsep) if sign)
    if is_path and not Path(path).exists():
        raise ConfigError(
            f"there is no file {path!r}: name a config.json or its folder, or a model by its name or type"
        )


def _refuse_missing_libraries(model: str) -> None:
    """All that this model needs and is absent, in one message; told before torch is loaded."""
    _, colon, tail = model.partition(":")
    is_function = bool(colon) and "=" not in tail and not Path(model).exists()
    missing = [name for name in ("torch", *(() if is_function else ("transformers",))) if find_spec(name) is None]
    if missing:
        needed_for = "flopmeter count" if "torch" in missing else f"flopmeter count {model}"
        raise MissingLibraryError(" and ".join(missing), needed_for=needed_for, extra=",".join(missing))
    refuse_old_torch()


@dataclass(frozen=True, slots=True)
class _Question:
    model: str
    batch: int
    seq: int
    train: bool
    convention: ConventionName
    dtype: str | None
    checkpointing: bool
    symbolic: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """The count, and what it was of."""

    question: _Question
    class_name: str
    num_parameters: int
    num_trainable: int
    num_tokens: int | None
    """Text tokens in the batch, None for a model without text."""
    count: FlopCount
    formula_lengths: tuple[int, int] | None
    """The two lengths at which the formula was counted."""
    seconds: Mapping[str, float]
    """Time by stage: load (libraries and model), count, formula."""

    def as_dict(self, depth: int | None = None) -> dict[str, Any]:
        """For JSON; modules down to that depth, what is below counted to them."""
        asked = asdict(self.question)
        sizes = {"class": self.class_name, "parameters": self.num_parameters, "trainable": self.num_trainable}
        per_token = self.count.model_flop / self.num_tokens if self.num_tokens else None
        counted = {"model_flop": self.count.model_flop, "flop_per_token": per_token, **asdict(self.count)}
        if depth is not None:
            counted["by_module"] = _cut(self.count.by_module, depth)
        extent = {"tokens": self.num_tokens, "formula_lengths": self.formula_lengths}
        return {**asked, **sizes, **counted, **extent, "seconds": dict(self.seconds)}


def _count(question: _Question) -> _Answer:
    from rich.console import Console

    clock, found = _Clock(), None
    with Console(stderr=True).status(f"Building {question.model} without weights ...") as status:
        model = _load(question)
        clock.lap("load")
        status.update("Counting ...")
        inputs, count = _run(model, question)
        clock.lap("count")
        if question.symbolic:
            status.update("Looking for a formula ...")
            found = _find_formula(model, question, count)
            clock.lap("formula")
    parameters = list(model.parameters())
    return _Answer(
        question=question,
        class_name=type(model).__name__,
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        num_tokens=next((value.numel() for value in inputs.values() if _is_text(value)), None),
        count=replace(count, formula=found[0] if found else None),
        formula_lengths=found[1] if found else None,
        seconds=clock.laps,
    )


def _load(question: _Question) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    from flopmeter.flops.models import load_model

    dtype = getattr(torch, _DTYPES[question.dtype]) if question.dtype else None
    return load_model(question.model, dtype=dtype, checkpointing=question.checkpointing)


def _run(model: Any, question: _Question) -> tuple[dict[str, Any], FlopCount]:
    from flopmeter.flops.inputs import build_inputs
    from flopmeter.flops.side_count import count_flops

    inputs = build_inputs(model, question.batch, question.seq)
    try:
        return inputs, count_flops(model, inputs, training=question.train, convention=question.convention)
    except CountError:
        longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if not isinstance(longest, int) or question.seq <= longest:
            raise
        told = f"{type(model).__name__} has positions for {longest} tokens, not for {question.seq}"
        raise ConfigError(f"{told}: --seq {longest} is the longest that fits") from None


def _find_formula(model: Any, question: _Question, count: FlopCount) -> tuple[str, tuple[int, int]] | None:
    """The expression, and the two lengths at which it was counted."""
    from flopmeter.flops.prediction import expression

    other = replace(question, batch=question.batch + 1, seq=max(question.seq // 2, 16))
    try:
        check = _run(model, other)[1]
    except FlopmeterError:
        return None
    found = expression(count, (question.batch, question.seq), check, (other.batch, other.seq))
    return (found, (other.seq, question.seq)) if found is not None else None


def _is_text(value: Any) -> bool:
    """Token ids: whole numbers, one row for each sample."""
    return hasattr(value, "dim") and value.dim() == 2 and not value.is_floating_point()


class _Clock:
    """Seconds of one stage after the other."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage], self._since = now - self._since, now


@dataclass(slots=True)
class _Node:
    """A module in the tree, or a run of equal ones."""

    name: str
    own_flop: float = 0.0
    children: dict[str, _Node] = field(default_factory=dict)
    num_equal: int = 1

    @property
    def flop(self) -> float:
        """Of all that it stands for."""
        return self.num_equal * (self.own_flop + sum(child.flop for child in self.children.values()))

    def shape(self) -> Any:
        """Equal for modules that take the same FLOPs in the same places."""
        inner = [(child.name, child.shape()) for child in self.children.values()]
        return self.num_equal, self.own_flop, tuple(inner)


def _tree(by_module: Mapping[str, float]) -> _Node:
    root = _Node("")
    for path, flop in by_module.items():
        node = root
        for name in _levels(path):
            node = node.children.setdefault(name, _Node(name))
        node.own_flop += flop
    return _fold(root)


def _cut(by_module: Mapping[str, float], depth: int) -> dict[str, float]:
    """The same FLOPs by the modules of the first levels."""
    cut: dict[str, float] = {}
    for path, flop in by_module.items():
        name = ".".join(_levels(path)[:depth])
        cut[name] = cut.get(name, 0.0) + flop
    return cut


def _levels(path: str) -> list[str]:
    """Names from the root on; a number stays with the list that it is in: ["model", "layers.0", "mlp"]."""
    return re.findall(r"[^.]+(?:\.\d+(?![^.]))*", path)


def _fold(node: _Node) -> _Node:
    """Put neighbours that differ only in their number into one node."""
    folded: list[_Node] = []
    for child in map(_fold, node.children.values()):
        last = folded[-1] if folded else None
        if last is not None and _is_next(last, child):
            last.num_equal += 1
            last.name = f"{last.name.partition(' ')[0]} ... {child.name} ({last.num_equal} x)"
        else:
            folded.append(child)
    return replace(node, children={child.name: child for child in folded})


def _is_next(last: _Node, child: _Node) -> bool:
    stem = _stem(child.name)
    is_neighbour = bool(stem) and stem == _stem(last.name.partition(" ")[0])
    return is_neighbour and replace(child, num_equal=last.num_equal).shape() == last.shape()


def _stem(name: str) -> str:
    """The list that a numbered module is in, "layers." or "."; empty for one with a name of its own."""
    match = re.fullmatch(r"(.*\.)?\d+", name)
    return (match[1] or ".") if match else ""


def _rows(node: _Node, depth: int, guide: str = "") -> Iterator[tuple[str, float]]:
    """Names with the lines of the tree before them, and FLOPs."""
    children = list(node.children.values())
    if children and node.own_flop and depth:
        children.append(_Node("(itself)", node.own_flop))
    for index, child in enumerate(children if depth else ()):
        is_last = index == len(children) - 1
        yield f"{guide}{'└─ ' if is_last else '├─ '}{child.name}", child.flop
        for name, flop in _rows(child, depth - 1, guide + ("   " if is_last else "│  ")):
            yield name, flop * child.num_equal


def _show(answer: _Answer, axis: Axis, depth: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=120)
    count, total = answer.count, answer.count.model_flop
    table = Table(box=box.SIMPLE)
    table.add_column(axis, overflow="fold")
    table.add_column("FLOP", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    if axis == "module":
        rows = [(answer.class_name, total), *_rows(_tree(count.by_module), depth)]
    else:
        parts: Mapping[str, float] = count.by_op if axis == "op" else count.by_dtype
        rows = [*sorted(parts.items(), key=lambda item: -item[1]), ("total", total)]
    for name, flop in rows:
        table.add_row(name, _flop(flop), percent(flop / total) if total else "")
    console.print(table)
    for line in _summary(answer):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _summary(answer: _Answer) -> Iterator[str]:
    count, asked = answer.count, answer.question
    frozen = answer.num_parameters - answer.num_trainable
    yield f"{answer.num_parameters:,} parameters" + (f", {frozen:,} of them frozen" if frozen else "")
    yield f"forward {_flop(count.forward_flop)}" + (
        f", backward {_flop(count.backward_flop)}, training {_flop(count.model_flop)}" if asked.train else ""
    )
    if count.recompute_flop:
        yield f"recomputed {_flop(count.recompute_flop)}, so that the hardware runs {_flop(count.hardware_flop)}"
    if answer.num_tokens:
        yield f"per token {_flop(count.model_flop / answer.num_tokens)}, of {answer.num_tokens:,} tokens"
    else:
        yield f"per sample {_flop(count.model_flop / asked.batch)}"
    if answer.formula_lengths:
        yield f"formula {count.formula}, counted at S = {answer.formula_lengths[0]} and {answer.formula_lengths[1]}"
    elif asked.symbolic:
        yield "formula none: the FLOPs are no polynomial in batch size and length"
    coverage = "" if count.coverage is None else f", coverage {percent(count.coverage)}"
    times = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in answer.seconds.items())
    yield f"{count.convention} convention, counted on {count.method}{coverage}; {times}"
    if count.uncounted:
        yield "not counted: " + ", ".join(f"{op} ({calls} x)" for op, calls in count.uncounted.items())
    yield from (f"left out: {sentence}" for sentence in count.left_out)


def _flop(value: float) -> str:
    return amount(value, "FLOP", 4)
