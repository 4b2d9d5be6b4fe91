"""`flopmeter explain`: what does a finding mean, how do we know, and what is to be done?"""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(
    name: Annotated[str | None, typer.Argument(help="A rule, such as data_stall. Default: list them all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: name to text.")] = False,
) -> None:
    """Explain a rule of `flopmeter diagnose`, or list them all.

    Example: flopmeter explain data_stall
    """
    from flopmeter.diagnosis import RULES, explain

    names = list(RULES) if name is None else [name]
    texts = {each: explain(each) for each in names}
    if as_json:
        typer.echo(json.dumps(texts))
    elif name is not None:
        typer.echo(f"{name}\n\n{texts[name]}")
    else:
        for each, text in texts.items():
            typer.echo(f"{each:22} {text.partition(chr(10))[0]}")
