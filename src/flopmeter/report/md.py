"""The report as Markdown, for an issue, a pull request or a wiki."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from flopmeter.report._charts import Table, tables_of
from flopmeter.report._sentences import SECTIONS, method_rows, remarks_of, run_line, step_text
from flopmeter.text import percent, plain, sentence, signed, utilisation

_SPECIAL = re.compile(r"([\\`*_\[\]|<>~&#])")


def render(facts: dict[str, Any]) -> str:
    """Headline, waterfall, findings, phases and method, as tables that GitHub renders."""
    tables = tables_of(facts)
    blocks = [
        f"# {escaped(facts['run']['name'])}",
        escaped(run_line(facts["run"])),
        f"**{escaped(facts['headline']['verdict'])}**" if facts["headline"]["verdict"] else "",
        _headline(facts),
        *_section(SECTIONS["waterfall"], tables["waterfall"]),
        *_findings(facts["findings"]),
        *_section(SECTIONS["phases"], tables["phases"]),
        *_section("FLOPs by operator", tables["operators"]),
        *_section(SECTIONS["ranks"], tables["ranks"]),
        *_section("Stragglers", tables["stragglers"]),
        *_method(facts),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: no tag, link, mention or table cell comes out of it."""
    return _SPECIAL.sub(r"\\\1", text).replace("@", "@\u200b")


def _headline(facts: dict[str, Any]) -> str:
    headline = facts["headline"]
    rate = "tokens" if headline["tokens_per_second"] is not None else "samples"
    figures = {
        "MFU in steady steps": utilisation(headline["mfu"]),
        "HFU": utilisation(headline["hfu"]),
        f"{rate} per second": plain(headline[f"{rate}_per_second"]),
        "step time": step_text(facts),
        "goodput": percent(headline["goodput"]),
    }
    return _rows([list(figures), ["---:"] * len(figures), list(figures.values())])


def _section(title: str, table: Table) -> list[str]:
    if not table["rows"]:
        return []
    columns = table["columns"]
    rule = ["---:" if column["is_number"] else "---" for column in columns]
    cells = ([escaped(cell) for cell in row] for row in table["rows"])
    return [f"## {title}", _rows([[column["title"] for column in columns], rule, *cells])]


def _rows(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _findings(findings: list[dict[str, Any]]) -> list[str]:
    blocks = [f"## {SECTIONS['findings']}"] if findings else []
    for place, finding in enumerate(findings, start=1):
        if not finding["is_cause"]:
            blocks += [f"{escaped(sentence(finding['title']))}", "\n".join(_bullets(finding))]
            continue
        gain = f" ({signed(finding['gain']['expected'])} steps per second expected)" if finding["gain"] else ""
        lines = [f"{place}. **{escaped(finding['title'])}**{gain}"]
        blocks.append("\n".join(lines + [f"   {line}" for line in _bullets(finding)]))
    return blocks


def _bullets(finding: dict[str, Any]) -> list[str]:
    return [f"- {escaped(text)}" for text in (*finding["evidence"], *finding["advice"])]


def _method(facts: dict[str, Any]) -> list[str]:
    rows = [f"- {name}: {escaped(text)}" for name, text in method_rows(facts)]
    other = facts["method"]["elsewhere"]
    if not other["reason"]:
        shown = ", ".join(f"{row['name']} {utilisation(row['mfu'])}" for row in other["rows"])
        rows.append(f"- The same run under other conventions: {shown}")
    return [f"## {SECTIONS['method']}", "\n".join(rows + [f"- {escaped(text)}" for text in remarks_of(facts)])]
