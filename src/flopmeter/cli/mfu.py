"""Which MFU hides behind a published tokens per second, and what would another paper have called it?"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from flopmeter.cli._options import Json, choose, stated_peak, with_fix
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

_FIX = "give --peak-flop-per-s instead of --device, or a name that flopmeter peak --list shows"


def command(
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")],
    gpus: Annotated[int, typer.Option(help="GPUs of the whole job.")],
    model: Annotated[
        str | None, typer.Option(help="A config.json, its folder, or a name such as llama-3.1-8b.")
    ] = None,
    arch: Annotated[str | None, typer.Option(help="The sizes, as layers=32,hidden=4096,... (see above).")] = None,
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
    as_json: Json = False,
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
    sizes = _find_architecture(model, arch)
    tokens_per_s = _find_throughput(tokens_per_second, step_time, global_batch, seq)
    peak = _find_peak(device, peak_flop_per_s, dtype)
    mode = choose("--recompute", recompute, RECOMPUTE_MODES)
    result = _describe(sizes, seq, gpus, tokens_per_s, peak, mode)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print_table(result)
    if result["warning"]:
        typer.echo(result["warning"], err=True)


def _find_architecture(model: str | None, arch: str | None) -> Architecture:
    if (model is None) == (arch is None):
        raise typer.BadParameter("give either --model or --arch, the sizes of the model")
    try:
        if model is None:
            return _parse_architecture(str(arch))
        if model.lower() in MODELS:
            return MODELS[model.lower()]
        if Path(model).exists():
            return read_config(Path(model))
    except ConfigError as error:
        raise typer.BadParameter(f"{'--model' if arch is None else '--arch'}: {error}") from None
    known = did_you_mean(model.lower(), MODELS)
    raise typer.BadParameter(
        f"--model: {model!r} is neither a file nor a model known by name ({known}): give its sizes with --arch"
    )


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
        raise with_fix(error, _FIX) from None
    return {key: getattr(peak, key) for key in ("flop_per_s", "dtype", "device", "source", "note")}


def _positive(option: str, value: float) -> float:
    if not 0 < value <= LARGEST_SIZE:
        raise typer.BadParameter(f"{option} must be a positive number up to {LARGEST_SIZE:.0e}")
    return value


def _describe(
    arch: Architecture, seq: int, gpus: int, tokens_per_s: float, peak: dict[str, Any], recompute: Recompute
) -> dict[str, Any]:
    """MFU and HFU of one GPU under every convention, and what they follow from."""
    tokens_per_gpu = tokens_per_s / gpus
    rates = {name: rule.model_flop_per_token(arch, seq) * tokens_per_gpu for name, rule in CONVENTIONS.items()}
    hardware = {
        name: rule.hardware_flop_per_token(arch, seq, recompute) * tokens_per_gpu for name, rule in CONVENTIONS.items()
    }
    mfu, hfu = ({name: value / peak["flop_per_s"] for name, value in of.items()} for of in (rates, hardware))
    impossible = (
        f"impossible: {percent(hfu['exact'])} of the peak. Likely the run had more GPUs than --gpus, a faster dtype or "
        "device than the peak is for, tokens per second that count padding, or other sizes"
    )
    sizes = {key: value for key, value in asdict(arch).items() if value or isinstance(value, bool)}
    return {
        "mfu": mfu["exact"],
        "hfu": hfu["exact"],
        "flop_per_s_per_gpu": rates["exact"],
        "hardware_flop_per_s_per_gpu": hardware["exact"],
        "conventions": {name: mfu[name] for name in NAMED},
        "other_conventions": {name: mfu[name] for name in mfu if name not in NAMED},
        "hfu_conventions": hfu,
        "warning": impossible if hfu["exact"] > 1 else None,
        "recompute": recompute,
        "tokens_per_s": tokens_per_s,
        "seq": seq,
        "gpus": gpus,
        "peak": peak,
        "arch": {**sizes, "kv_heads": arch.kv_heads or arch.heads, "head_dim": arch.head_channels},
        "matmul_params": arch.num_matmul_params,
        "params": arch.num_params,
    }


def _print_table(result: dict[str, Any]) -> None:
    from flopmeter.report._terminal import grid_of, make_console

    console, peak, mfu = make_console(), result["peak"], result["conventions"] | result["other_conventions"]
    is_stated = peak["source"] == "user"
    whose = f"{peak['device']}; peak {peak['note']}" if peak["device"] and is_stated else peak["device"] or "given"
    console.print(
        f"{result['tokens_per_s']:,.0f} tokens/s on {plural(result['gpus'], 'GPU')} of {rate(peak['flop_per_s'], 6)} "
        f"({peak['dtype']}, {whose}); N = {result['params']:,}, P = {result['matmul_params']:,}, "
        f"seq {result['seq']}, recompute {result['recompute']}. TFLOP/s are model FLOPs of one GPU."
    )
    if peak["note"] and not is_stated:
        console.print(f"peak: {peak['note']}")
    rows = (
        (
            *(name, utilisation(mfu[name]), utilisation(result["hfu_conventions"][name])),
            f"{mfu[name] * peak['flop_per_s'] / 1e12:.1f}",
            f"{rule.meaning}: {rule.used_by}",
        )
        for name, rule in CONVENTIONS.items()
    )
    console.print(grid_of(("convention", "MFU#", "HFU#", "TFLOP/s#", "counts: used by"), rows))
