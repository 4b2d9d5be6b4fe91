"""`flopmeter run`: measure a training program as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer
from typer.core import TyperCommand

from flopmeter.cli._options import choose
from flopmeter.errors import ConfigError, FlopmeterError, refuse_old_torch

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""Whatever follows the program's name, or -m, belongs to the program."""

_WITH_VALUE = ("-o", "--output-dir", "--config", "--mode", "--sinks")
_STARTUP = Path(__file__).resolve().parents[1] / "integrations" / "_startup"
_SETTINGS = "FLOPMETER_RUN"


class Command(TyperCommand):
    """Takes `-mMODULE` for `-m MODULE`, as python does, and not for options of ours written together."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        position = 0
        while position < len(args) and args[position].startswith("-") and not args[position].startswith("-m"):
            position += 2 if args[position] in _WITH_VALUE else 1
        if position < len(args) and args[position][:2] == "-m" != args[position]:
            args = [*args[:position], "-m", args[position][2:], *args[position + 1 :]]
        return super().parse_args(ctx, args)


def command(
    program: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT|-m MODULE [ARGS]...", help="What python would be given.")
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Folder for the run file and the report; default runs/NAME-TIME."),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="Settings: a YAML file or a preset.")] = None,
    mode: Annotated[str | None, typer.Option(help="smart, estimate, profiler or hybrid.")] = None,
    sinks: Annotated[str | None, typer.Option(help="Where numbers go meanwhile, such as console,tensorboard.")] = None,
    keep_trace: Annotated[
        bool, typer.Option("--keep-trace", help="Keep the profile of the last sampled step: trace.json, for Perfetto.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing at the end.")] = False,
) -> None:
    """Run a training script unchanged and measure it. Options of ours come before the script's name.

    Example: flopmeter run train.py --lr 3e-4

    Under torchrun: torchrun ... -m flopmeter run train.py

    FLOPMETER=off in the environment runs it without measuring.
    """
    arguments = program or []
    if not arguments or arguments == ["-m"]:
        raise typer.BadParameter("there is nothing to run: give a script, or -m and a module's name")
    if arguments[0].startswith("-") and arguments[0] not in ("-", "-m"):
        raise typer.BadParameter(f"No such option: {arguments[0]}")
    if mode is not None:
        from flopmeter.config.sections import Mode

        choose("--mode", mode, get_args(Mode))
    environment = dict(os.environ)
    if environment.get("FLOPMETER", "").lower() not in ("off", "0", "false", "no"):
        refuse_old_torch()
        settings = {
            "output_dir": str((output_dir or _default_folder(arguments)).absolute()),
            "config": _settings(config, mode, sinks, keep_trace=keep_trace),
            "is_quiet": quiet,
        }
        _arrange(environment, settings)
    _become([sys.executable, *_interpreter_options(sys.orig_argv, sys.argv), *arguments], environment)


def _default_folder(program: list[str]) -> Path:
    script = "stdin" if program[0] == "-" else Path(program[0]).stem
    name = program[1].rpartition(".")[2] if program[0] == "-m" else script
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _settings(config: str | None, mode: str | None, sinks: str | None, *, keep_trace: bool) -> dict[str, Any]:
    """All settings as one mapping, checked before the program starts. Without a file, nothing is printed meanwhile."""
    changed: dict[str, Any] = {"mfu_calculation_mode": mode} if mode is not None else {}
    changed |= {"keep_trace": True} if keep_trace else {}
    if sinks is not None or config is None:
        changed["sinks"] = [name.strip() for name in (sinks or "").split(",") if name.strip()]
    if config is None and mode is None and sinks is None:
        return {"monitoring": changed}
    from flopmeter.config import MonitorConfig
    from flopmeter.sinks import check_sinks

    settings = MonitorConfig.load(config).as_written()
    settings["monitoring"] = {**settings.get("monitoring", {}), **changed}
    loaded = MonitorConfig.load(settings)
    check_sinks(loaded.sink_names, imports=False)
    if not loaded.monitoring.patches:
        raise ConfigError("monitoring.patches: flopmeter run is given no objects to hook; use watch() for that")
    return settings


def _arrange(environment: dict[str, str], settings: dict[str, Any]) -> None:
    """Have Python import our `sitecustomize` before the program starts."""
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise FlopmeterError("python's options -E, -I and -S keep flopmeter out of the program: leave them away")
    others = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(_STARTUP), *([others] if others else [])])
    environment[_SETTINGS] = json.dumps(settings, default=str)


def _interpreter_options(original: list[str], arguments: list[str]) -> list[str]:
    """Options that were given to python itself, such as -u and -W, for the program's python."""
    before = original[1 : len(original) - (len(arguments) - 1)]
    options = before[:-1]  # without what was run: the command's file, or the module's name
    if options and options[-1].startswith("-") and options[-1].endswith("m"):  # -m flopmeter, or -um flopmeter
        merged = options.pop()[:-1]
        options += [merged] if merged != "-" else []
    return options


def _become(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """From here on this process is the program: its signals, exit code, input and output are its own."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as it is where it was closed: `2>&-`
            stream.flush()
    if os.name == "posix":
        os.execve(arguments[0], arguments, environment)
    sys.exit(subprocess.call(arguments, env=environment))
