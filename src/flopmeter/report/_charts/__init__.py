"""What is drawn, and which numbers stand behind it? One file in this folder per chart, named as its place in the page.

A chart has

    SECTION, ORDER      the section of the page that it stands in, and where in that section
    CAPTION             what its table is called
    table(facts)        the same facts as rows of text, for screen readers, copying and Markdown
    figure(facts)       a plotly figure as a plain dictionary, None where the facts allow none; a table alone has none
    describe(facts)     with a figure: what is read out in its place
    HEADING             optional: stands above it, where a section has several

No plotly is needed to make a figure. Colours are written as tokens (`@blue`), which the page resolves for its light or
dark theme; they follow Okabe and Ito, whose colours stay apart for colour-blind readers. Nothing is told by colour
alone: symbols, patterns, labels and the table under each chart say the same.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from flopmeter.report._charts._shapes import Figure, Table, plain_text

__all__ = ["CHARTS", "Figure", "Table", "figures_of", "plain_text", "tables_of"]

_MODULES = {name: import_module(f"{__name__}.{name}") for _, name, _ in iter_modules(__path__) if name[0] != "_"}
CHARTS: dict[str, ModuleType] = dict(sorted(_MODULES.items(), key=lambda item: item[1].ORDER))
"""Every chart by its name."""


def figures_of(facts: dict[str, Any]) -> dict[str, Figure]:
    """Every figure that the facts allow, by the name of its chart."""
    drawn = {name: chart.figure(facts) for name, chart in CHARTS.items() if hasattr(chart, "figure")}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def tables_of(facts: dict[str, Any]) -> dict[str, Table]:
    """Every table, by the name of its chart; one without data has no rows."""
    return {name: chart.table(facts) for name, chart in CHARTS.items()}
