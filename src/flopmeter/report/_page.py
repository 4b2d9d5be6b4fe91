"""How does HTML become one file that works offline and runs nothing but our own two scripts?

    figures = figures_of(facts)
    page("My run", body_of(facts, figures), figures)

`body_of` is the part that a live page renders again from fresh facts; `page.js` puts it and the figures in place.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from flopmeter import __version__, text
from flopmeter.errors import MissingLibraryError
from flopmeter.report._charts import CHARTS, Figure, tables_of
from flopmeter.report._sentences import sentences_of

FOLDER = Path(__file__).with_name("_assets")


def body_of(facts: dict[str, Any], figures: dict[str, Figure]) -> str:
    """The report's sections as HTML, every text of the run escaped."""
    values = {"facts": facts, "figures": figures, "charts": CHARTS, "tables": tables_of(facts), "version": __version__}
    html = str(template("run.html").render(values | sentences_of(facts)))
    return html.replace(" %", "&nbsp;%")  # a figure and its sign stay on one line


def page(title: str, body: str, figures: dict[str, Figure]) -> str:
    """The whole document. `body` must be escaped already, and hold a button with the id `theme`."""
    from markupsafe import Markup

    scripts = [plotly_script(), asset("page.js")]
    values = {
        "title": title,
        "version": __version__,
        "policy": content_policy(scripts),
        "style": Markup(asset("page.css")),
        "body": Markup(body),
        "figures": Markup(safe_json(figures)),
        "scripts": [Markup(script) for script in scripts],
    }
    return str(template("page.html").render(values))


def content_policy(scripts: list[str]) -> str:
    """Only these very scripts may run, and nothing may be loaded or sent.

    Styles may be inline, because plotly writes them into its drawings; a style cannot run anything.
    """
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    rules = ("default-src 'none'", f"script-src {hashes}", "style-src 'unsafe-inline'", "img-src data: blob:")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))


def safe_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(name: str) -> str:
    """A file of the page: its style, its script."""
    return (FOLDER / name).read_text(encoding="utf-8")


@cache
def plotly_script() -> str:
    """plotly's own script, as its Python package brings it."""
    try:
        get_plotlyjs = import_module("plotly.offline").get_plotlyjs
    except ImportError:
        raise MissingLibraryError("plotly", needed_for="the HTML report") from None
    return str(get_plotlyjs())


@cache
def template(name: str) -> Any:
    """A template of the page, which escapes whatever is put into it."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise MissingLibraryError("jinja2", needed_for="the HTML report") from None
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        name: getattr(text, name) for name in ("percent", "utilisation", "seconds", "plain", "signed", "sentence")
    }
    return environment.get_template(name)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
