"""The report as Markdown, for an issue, a pull request or a wiki."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flopmeter import text
from flopmeter.report import _texts
from flopmeter.report._model import Report
from flopmeter.report._page import FOLDER

_SPECIAL = re.compile(r"([\\`*_\[\]|<>~&#])")


def render(report: Report) -> str:
    """Number, fix, findings, tables and method, as GitHub renders them."""
    return markdown("report.md", report=report, texts=_texts, tables=_texts.tables(report))


def markdown(name: str, **values: Any) -> str:
    """A template filled in; whatever is put into it is shown as it is."""
    made = Environment(loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, finalize=escaped)
    made.trim_blocks = made.lstrip_blocks = True
    made.filters |= {"utilisation": text.utilisation, "sentence": text.sentence}
    return re.sub(r"\n{3,}", "\n\n", made.get_template(name).render(values)).strip() + "\n"


def escaped(value: Any) -> str:
    """Text that Markdown shows as it is: no tag, link, mention or table cell comes out of it."""
    return _SPECIAL.sub(r"\\\1", str(value)).replace("@", "@\u200b")
