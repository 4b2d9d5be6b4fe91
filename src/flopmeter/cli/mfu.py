"""Which MFU hides behind a published tokens per second, and what would another paper have called it?"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from flopmeter.cli._choice import choose
from flopmeter.cli._peak import stated_peak, with_cure
from flopmeter.conventions import (
    CONVENTIONS,
    LARGEST_SIZE,
    MODELS,
    NAMED,
    RECOMPUTE_MODES,
    Architecture,
    Recompute,
    read_config,
)
from flopmeter.errors import ConfigError, UnknownDeviceError, did_you_mean
from flopmeter.text import percent, plural, rate, utilisation

_CURE = "give --peak-flop-per-s instead of --device, or a name that flopmeter devices lists"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What one published line says about a run."""

    arch: Architecture
    seq: int
    tokens_per_s: float
    """Of the whole job."""
    gpus: int
    peak: dict[str, Any]
    """`flop_per_s` of one GPU, with its dtype, device, source and note."""
    recompute: Recompute

    def model_flop_per_s(self, convention: str) -> float:
        """Of one GPU."""
        return self._per_gpu(CONVENTIONS[convention].model_flop_per_token(self.arch, self.seq))

    def hardware_flop_per_s(self, convention: str) -> float:
        """Of one GPU."""
        return self._per_gpu(CONVENTIONS[convention].hardware_flop_per_token(self.arch, self.seq, self.recompute))

    def _per_gpu(self, flop_per_token: float) -> float:
        return flop_per_token * self.tokens_per_s / self.gpus


def command(
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")],
    gpus: Annotated[int, typer.Option(help="GPUs of the whole job.")],
    model: Annotated[
        str | None, typer.Option(help="A config.json, its folder, or a name such as llama-3.1-8b.")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="The sizes, as layers=32,hidden=4096,... (see above)."),
    ] = None,
    tokens_per_second: Annotated[float | None, typer.Option(help="Of the whole job, not of one GPU.")] = None,
    step_time: Annotated[float | None, typer.Option(help="Seconds of a step; needs --global-batch.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences in a step, of the whole job.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device whose peak is on file, e.g. 'NVIDIA H100 80GB HBM3'.")
    ] = None,
    peak_flop_per_s: Annotated[
        float | None, typer.Option(help="Dense peak of one GPU in FLOP/s (989e12), not --device.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of the matmuls: bf16, fp16, fp8, ...")] = "bf16",
    recompute: Annotated[
        str, typer.Option(help="Activation recomputation: none, full or selective. For HFU.")
    ] = "none",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """MFU and HFU of a run that somebody published, under every named convention.

    Example: flopmeter mfu --model llama-3.1-8b --seq 8192 --gpus 8
    --tokens-per-second 80000 --device "NVIDIA H100 80GB HBM3" --dtype bf16

    --arch takes layers, hidden, heads, ffn, vocab, and where they apply
    kv_heads, head_dim, gated=false (two MLP matrices, not three), tied=true,
    params (replaces the derived N), window, experts, active_experts,
    expert_ffn, shared_experts, dense_layers.
    """
    _positive("--seq", seq)
    _positive("--gpus", gpus)
    run = _Run(
        arch=_find_architecture(model, arch),
        seq=seq,
        tokens_per_s=_find_throughput(tokens_per_second, step_time, global_batch, seq),
        gpus=gpus,
        peak=_find_peak(device, peak_flop_per_s, dtype),
        recompute=choose("--recompute", recompute, RECOMPUTE_MODES),
    )
    result = _describe(run)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print_table(run, result)
    if result["warning"]:
        typer.echo(result["warning"], err=True)


def _find_architecture(model: str | None, arch: str | None) -> Architecture:
    if (model is None) == (arch is None):
        raise typer.BadParameter("give either --model or --arch, the sizes of the model")
    try:
        return _parse_architecture(arch) if arch is not None else _load_model(str(model))
    except ConfigError as error:
        raise typer.BadParameter(f"{'--model' if arch is None else '--arch'}: {error}") from None


def _load_model(model: str) -> Architecture:
    if model.lower() in MODELS:
        return MODELS[model.lower()]
    if Path(model).exists():
        return read_config(Path(model))
    hint = did_you_mean(model.lower(), MODELS)
    raise ConfigError(f"{model!r} is neither a file nor a model known by name ({hint}): give its sizes with --arch")


def _parse_architecture(text: str) -> Architecture:
    values: dict[str, Any] = {}
    known = [field.name for field in fields(Architecture)]
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ConfigError(f"{item.strip()!r} is not of the form key=value")
        if key not in known:
            raise ConfigError(f"unknown key {key!r}: {did_you_mean(key, known)}")
        if key in values:
            raise ConfigError(f"{key} is given twice")
        values[key] = _parse_value(value)
    missing = [key for key in ("layers", "hidden", "heads", "ffn", "vocab") if key not in values]
    if missing:
        raise ConfigError(f"{', '.join(missing)} missing")
    return Architecture(**values)


def _parse_value(text: str) -> int | bool | str:
    """A whole number (8e9 is one) or a truth value; anything else stays text, for the architecture to refuse by key."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
        return int(text) if text.isdecimal() else int(number) if number.is_integer() else text
    except (ValueError, OverflowError):
        return text


def _find_throughput(
    tokens_per_second: float | None, step_time: float | None, global_batch: int | None, seq: int
) -> float:
    if (tokens_per_second is None) == (step_time is None and global_batch is None):
        raise typer.BadParameter("give either --tokens-per-second, or --step-time and --global-batch")
    if tokens_per_second is not None:
        return _positive("--tokens-per-second", tokens_per_second)
    if step_time is None or global_batch is None:
        raise typer.BadParameter(f"{'--step-time' if step_time is None else '--global-batch'} is missing")
    return _positive("--global-batch", global_batch) * seq / _positive("--step-time", step_time)


def _find_peak(device: str | None, peak_flop_per_s: float | None, dtype: str) -> dict[str, Any]:
    if (device is None) == (peak_flop_per_s is None):
        raise typer.BadParameter("give either --device, whose peak is looked up, or --peak-flop-per-s")
    if peak_flop_per_s is not None:
        flop_per_s = stated_peak(peak_flop_per_s)
        return {"flop_per_s": flop_per_s, "dtype": dtype, "device": None, "source": "user", "note": ""}
    from flopmeter.devices import peak_flops

    try:
        peak = peak_flops(device, dtype)
    except ConfigError as error:
        raise typer.BadParameter(f"--dtype: {error}") from None
    except UnknownDeviceError as error:
        raise with_cure(error, _CURE) from None
    return {key: getattr(peak, key) for key in ("flop_per_s", "dtype", "device", "source", "note")}


def _positive(option: str, value: float) -> float:
    if not 0 < value <= LARGEST_SIZE:
        raise typer.BadParameter(f"{option} must be a positive number up to {LARGEST_SIZE:.0e}")
    return value


def _describe(run: _Run) -> dict[str, Any]:
    peak = run.peak["flop_per_s"]
    mfu = {name: run.model_flop_per_s(name) / peak for name in CONVENTIONS}
    hfu = {name: run.hardware_flop_per_s(name) / peak for name in CONVENTIONS}
    arch = run.arch
    sizes = {key: value for key, value in asdict(arch).items() if value or isinstance(value, bool)}
    return {
        "mfu": mfu["exact"],
        "hfu": hfu["exact"],
        "flop_per_s_per_gpu": run.model_flop_per_s("exact"),
        "hardware_flop_per_s_per_gpu": run.hardware_flop_per_s("exact"),
        "conventions": {name: mfu[name] for name in NAMED},
        "other_conventions": {name: mfu[name] for name in mfu if name not in NAMED},
        "hfu_conventions": hfu,
        "warning": _explain_impossible(hfu["exact"]),
        "recompute": run.recompute,
        "tokens_per_s": run.tokens_per_s,
        "seq": run.seq,
        "gpus": run.gpus,
        "peak": run.peak,
        "arch": {**sizes, "kv_heads": arch.kv_heads or arch.heads, "head_dim": arch.head_channels},
        "matmul_params": arch.num_matmul_params,
        "params": arch.num_params,
    }


def _explain_impossible(hfu: float) -> str | None:
    if hfu <= 1:
        return None
    return (
        f"impossible: {percent(hfu)} of the peak. Likely the run had more GPUs than --gpus, a faster dtype or device "
        "than the peak is for, tokens per second that count padding, or other sizes"
    )


def _whose(peak: dict[str, Any]) -> str:
    """The device that the peak is of, and who says so where that is not the table."""
    if not peak["device"]:
        return "given"
    return f"{peak['device']}; peak {peak['note']}" if peak["source"] == "user" else str(peak["device"])


def _print_table(run: _Run, result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    peak, arch = run.peak, run.arch
    console.print(
        f"{run.tokens_per_s:,.0f} tokens/s on {plural(run.gpus, 'GPU')} "
        f"of {rate(peak['flop_per_s'], 6)} "
        f"({peak['dtype']}, {_whose(peak)}); N = {arch.num_params:,}, P = {arch.num_matmul_params:,}, "
        f"seq {run.seq}, recompute {run.recompute}. TFLOP/s are model FLOPs of one GPU.",
        highlight=False,
        markup=False,
    )
    if peak["note"] and peak["source"] != "user":
        console.print(f"peak: {peak['note']}", highlight=False, markup=False)
    table = Table(box=box.SIMPLE)
    table.add_column("convention", no_wrap=True)
    for heading in ("MFU", "HFU", "TFLOP/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("charges: used by")
    for name, convention in CONVENTIONS.items():
        table.add_row(
            name,
            utilisation((result["conventions"] | result["other_conventions"])[name]),
            utilisation(result["hfu_conventions"][name]),
            f"{run.model_flop_per_s(name) / 1e12:.1f}",
            f"{convention.meaning}: {convention.used_by}",
        )
    console.print(table)
