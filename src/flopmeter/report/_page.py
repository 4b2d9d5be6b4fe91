"""How does a body of HTML become one file that works offline and runs nothing but our own script?

    document(title, body_of(report), data_of(report))

Every text of a run is escaped by the templates, and a policy in the page lets no script run but our own. A live page
takes the body and the data again, and puts what is new in place.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flopmeter import __version__, text
from flopmeter.report import _texts
from flopmeter.report._model import Report

FOLDER = Path(__file__).with_name("_assets")


def body_of(report: Report) -> str:
    """The sections of a run."""
    values = {"report": report, "texts": _texts, "tables": _texts.tables(report), "data": data_of(report)}
    return body("run.html", **values)


def body(name: str, **values: Any) -> str:
    """A template of the page, filled in; a number and its sign stay on one line."""
    html: str = environment().get_template(name).render(version=__version__, **values)
    return html.strip().replace(" %", "&nbsp;%")


def data_of(report: Report) -> dict[str, Any]:
    """What the script draws: lines over the steps, and the ranks' own work times. Equal axes are sent once."""
    told: dict[str, Any] = msgspec.to_builtins(report.timeline)
    axes: list[list[int]] = []
    for line in told["lines"]:
        axes += [] if line["step"] in axes else [line["step"]]
        line["step"] = axes.index(line["step"])
    told |= {"axes": axes, "place": report.about.place}
    if report.ranks and report.ranks.own_s:
        slow = [(row.rank, row.since_step) for row in report.ranks.stragglers if row.rank is not None]
        told["ranks"] = {"steps": report.ranks.steps, "own_s": report.ranks.own_s, "slow": slow}
    return told


def document(title: str, body: str, data: Any = None, live: dict[str, Any] | None = None) -> str:
    """The document around sections.

    Args:
        body: Escaped already, with a button that has the id `theme`.
        data: What the script draws.
        live: For a page that a server goes on feeding: `feed` (address of the news), `revision`, `state`, `text`.
    """
    values = {"title": title, "policy": policy(live is not None), "body": body, "data": safe_json(data), "live": live}
    assets = {"style": asset("page.css"), "script": asset("page.js"), "version": __version__}
    return environment().get_template("page.html").render(values | assets)


def policy(is_live: bool) -> str:
    """What a browser may do in the page: nothing but show it, and run the one script.

    Styles may be inline, because bars have their widths there; a style cannot run anything.
    """
    digest = base64.b64encode(hashlib.sha256(asset("page.js").encode()).digest()).decode()
    rules = ["default-src 'none'", f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'", "img-src data:"]
    rules += ["base-uri 'none'", "form-action 'self'" if is_live else "form-action 'none'"]
    return "; ".join([*rules, *(["connect-src 'self'"] if is_live else [])])


def safe_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    told = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return told.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(name: str) -> str:
    """A file of the page: its style, its script."""
    return (FOLDER / name).read_text(encoding="utf-8")


@cache
def environment() -> Environment:
    """The templates of the page, which escape whatever is put into them."""
    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ("amount", "percent", "utilisation", "seconds", "plain", "signed", "sentence")
    made.filters |= {name: getattr(text, name) for name in names}
    return made
