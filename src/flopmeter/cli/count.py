"""How many FLOPs does a step of this model take, and which part of the model takes them?"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from flopmeter.cli._options import Json, choose
from flopmeter.errors import ConfigError, CountError, MissingLibraryError, refuse_old_torch
from flopmeter.report._modules import Node, levels, tree
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
    as_json: Json = False,
) -> None:
    """FLOPs of a model that need not fit this machine: it is run on shapes, no weight is allocated.

    Example: flopmeter count llama-3-70b --batch 1 --seq 8192 --by module

    Sizes have short names (layers, hidden, heads, kv_heads, head_dim, ffn,
    vocab, window, experts, active_experts, expert_ffn, tied) or the config's
    own; parts of a config take a dot, as in text_config.hidden_size=1024.
    """
    axis: Axis = choose("--by", by, get_args(Axis))
    kind: ConventionName = choose("--convention", convention, get_args(ConventionName))
    _refuse_what_is_missing(model)
    weights = dtype if dtype is None else choose("--dtype", dtype, _DTYPES)
    answer = _count(_Question(model, batch, seq, train, kind, weights, checkpointing))
    if as_json:
        by_module = answer["by_module"] if depth is None else _cut(answer["by_module"], depth)
        typer.echo(json.dumps({**answer, "by_module": by_module}))
    else:
        _show(answer, axis, depth or DEPTH)


def _refuse_what_is_missing(model: str) -> None:
    """A path to nothing is no misspelt model, and a library that is absent is named; both before torch is loaded."""
    name, _, tail = model.partition(":")
    path = model if Path(model).exists() else name
    if (path.endswith(".json") or "/" in path or os.sep in path) and not Path(path).exists():
        raise ConfigError(
            f"there is no file {path!r}: name a config.json or its folder, or a model by its name or type"
        )
    is_function = bool(tail) and "=" not in tail and not Path(model).exists()
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


def _count(question: _Question) -> dict[str, Any]:
    """The question, the count, and what it was of."""
    from rich.console import Console

    start_s = time.perf_counter()
    with Console(stderr=True).status(f"Building {question.model} without weights ...") as status:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        import torch

        from flopmeter.flops.models import load_model

        dtype = getattr(torch, _DTYPES[question.dtype]) if question.dtype else None
        model = load_model(question.model, dtype=dtype, checkpointing=question.checkpointing)
        status.update("Counting ...")
        inputs, count = _run(model, question)
    parameters = list(model.parameters())
    # Token ids: whole numbers, one row for each sample.
    num_tokens = next((v.numel() for v in inputs.values() if v.dim() == 2 and not v.is_floating_point()), None)
    return {
        **asdict(question),
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "model_flop": count.model_flop,
        "flop_per_token": count.model_flop / num_tokens if num_tokens else None,
        **{name: value for name, value in asdict(count).items() if name != "needs"},
        "formula": count.formula,
        "tokens": num_tokens,
        "seconds": time.perf_counter() - start_s,
    }


def _run(model: Any, question: _Question) -> tuple[dict[str, Any], FlopCount]:
    from flopmeter.flops.count import count_flops
    from flopmeter.flops.inputs import build_inputs

    inputs = build_inputs(model, question.batch, question.seq)
    try:
        return inputs, count_flops(model, inputs, training=question.train, convention=question.convention)
    except CountError:
        longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if not isinstance(longest, int) or question.seq <= longest:
            raise
        told = f"{type(model).__name__} has positions for {longest} tokens, not for {question.seq}"
        raise ConfigError(f"{told}: --seq {longest} is the longest that fits") from None


def _cut(by_module: Mapping[str, float], depth: int) -> dict[str, float]:
    """The same FLOPs by the modules of the first levels."""
    cut: dict[str, float] = {}
    for path, flop in by_module.items():
        name = ".".join(levels(path)[:depth])
        cut[name] = cut.get(name, 0.0) + flop
    return cut


def _rows(node: Node, depth: int, guide: str = "") -> Iterator[tuple[str, float]]:
    """Names with the lines of the tree before them, and FLOPs."""
    children = list(node.children.values())
    if children and node.own_flop and depth:
        children.append(Node("(itself)", node.own_flop))
    for index, child in enumerate(children if depth else ()):
        is_last = index == len(children) - 1
        yield f"{guide}{'└─ ' if is_last else '├─ '}{child.name}", child.flop
        for name, flop in _rows(child, depth - 1, guide + ("   " if is_last else "│  ")):
            yield name, flop * child.num_equal


def _show(answer: dict[str, Any], axis: Axis, depth: int) -> None:
    from flopmeter.report._terminal import grid_of, make_console

    console, total = make_console(), answer["model_flop"]
    if axis == "module":
        rows = [(answer["class"], total), *_rows(tree(answer["by_module"]), depth)]
    else:
        rows = [*sorted(answer[f"by_{axis}"].items(), key=lambda item: -item[1]), ("total", total)]
    told = ((name, _flop(flop), percent(flop / total) if total else "") for name, flop in rows)
    console.print(grid_of((axis, "FLOP#", "share#"), told))
    console.print()
    for line in _summary(answer):
        console.print(line, soft_wrap=True)


def _summary(answer: dict[str, Any]) -> Iterator[str]:
    frozen = answer["parameters"] - answer["trainable"]
    yield f"{answer['parameters']:,} parameters" + (f", {frozen:,} of them frozen" if frozen else "")
    both = f", backward {_flop(answer['backward_flop'])}, training {_flop(answer['model_flop'])}"
    yield f"forward {_flop(answer['forward_flop'])}" + (both if answer["train"] else "")
    if answer["recompute_flop"]:
        ran = _flop(answer["hardware_flop"])
        yield f"recomputed {_flop(answer['recompute_flop'])}, so that the hardware runs {ran}"
    if answer["tokens"]:
        yield f"per token {_flop(answer['flop_per_token'])}, of {answer['tokens']:,} tokens"
    else:
        yield f"per sample {_flop(answer['model_flop'] / answer['batch'])}"
    if answer["formula"]:
        yield f"grows as {answer['formula']}"
    coverage = "" if answer["coverage"] is None else f", coverage {percent(answer['coverage'])}"
    yield f"{answer['convention']} convention, counted on {answer['method']}{coverage}; in {answer['seconds']:.1f} s"
    if answer["uncounted"]:
        yield "not counted: " + ", ".join(f"{op} ({calls} x)" for op, calls in answer["uncounted"].items())
    yield from (f"left out: {sentence}" for sentence in answer["left_out"])


_flop = partial(amount, unit="FLOP", digits=4)
