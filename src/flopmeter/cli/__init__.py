"""The `flopmeter` command: one file in this folder per subcommand, named as users type it.

Each file holds a function `command`; its docstring is the help text. Nothing heavy is imported at the top of such a
file, so that `flopmeter --help` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated

import typer

from flopmeter import __version__
from flopmeter.errors import ConfigError, FlopmeterError

_EPILOG = "Start with:  flopmeter demo"
_GROUPS = {
    **dict.fromkeys(("demo", "run", "try"), "Measure"),
    **dict.fromkeys(("report", "compare", "serve"), "Read"),
    **dict.fromkeys(("count", "mfu", "peak", "doctor"), "Look up"),
}
"""Headings of the help, by subcommand, in their order."""


def build_app() -> typer.Typer:
    """The command-line application with every subcommand of this folder."""
    app = typer.Typer(
        name="flopmeter", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich", epilog=_EPILOG
    )
    app.callback()(_app_options)
    found = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
    for name in sorted(found, key=lambda name: (*_GROUPS, name).index(name)):
        plugin = import_module(f"{__name__}.{name}")
        kind, settings = getattr(plugin, "Command", None), getattr(plugin, "CONTEXT_SETTINGS", None)
        app.command(name, cls=kind, context_settings=settings, rich_help_panel=_GROUPS.get(name))(plugin.command)
    return app


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"flopmeter {__version__}")
        raise typer.Exit


def _app_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """The true MFU of any PyTorch training run, and why it is not higher."""


def main() -> None:
    """Entry point. A terminal or pipe that cannot show a sign gets a question mark, not an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.exit(_run())


def _run() -> int:
    """The exit code: 2 for wrong use or a wrong setting, 1 for a failure. An error is one line on stderr."""
    try:
        exit_code = build_app()(standalone_mode=False) or 0
        sys.stdout.flush()
        return exit_code
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return _complain("stopped", 130)
    except typer.TyperException as error:
        message = error.format_message()
        return _complain(f"{message} (see --help)", 2) if message else 2  # no text: the help was shown
    except FlopmeterError as error:
        if "--debug" in sys.argv[1:2]:
            traceback.print_exc()
        return _complain(str(error), 2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        return _complain("stopped", 130)
    except BrokenPipeError:
        return _leave_closed_pipe()
    except Exception as error:  # noqa: BLE001 - the last resort: whatever comes here is a mistake of ours
        if "--debug" in sys.argv[1:2]:
            traceback.print_exc()
        told = " ".join(f"{type(error).__name__}: {error}"[:300].split())
        command = " ".join(sys.argv[1:2])
        print(f"flopmeter: this is a bug: {told}; `flopmeter --debug {command} ...` shows it", file=sys.stderr)
        return 1
    except SystemExit as stop:  # rich makes one of a closed pipe
        if isinstance(stop.__context__, BrokenPipeError):
            return _leave_closed_pipe()
        raise


def _leave_closed_pipe() -> int:
    """Whoever read our output has seen enough, as `head` does; what is left goes nowhere, without a word at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _complain(message: str, exit_code: int) -> int:
    print(f"flopmeter: error: {' '.join(message.split())}", file=sys.stderr)
    return exit_code
