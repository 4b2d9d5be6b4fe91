"""What does the browser get to see?  The report's own page, fed again and again, and the list that leads to it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from flopmeter import __version__
from flopmeter.columns import LATEST_S
from flopmeter.record import Run
from flopmeter.report._charts import Figure, figures_of
from flopmeter.report._facts import facts_of
from flopmeter.report._page import body_of, safe_json, template
from flopmeter.serve.glance import Glance
from flopmeter.text import clean, utilisation

SHORTEST_S, LONGEST_S = 2.0, 300.0
"""Between two questions of the browser: ten times what the answer took to make, within these bounds."""

STATE_TEXTS = {"running": "Live", "finished": "Finished", "stopped": "Silent: stopped or killed", "runs": "Up to date"}

Part = dict[str, Any]


def run_part(run: Run, state: str) -> Part:
    """The sections and charts of one run, as they are now."""
    started = time.perf_counter()
    facts = facts_of(run)
    figures = figures_of(facts)
    part = make_part(facts["run"]["name"], body_of(facts, figures), figures, state)
    return part | {"again_s": round(min(max(10 * (time.perf_counter() - started), SHORTEST_S), LONGEST_S), 1)}


def make_part(title: str, body: str, figures: Mapping[str, Figure], state: str) -> Part:
    """What a page is made of, and what is sent when it changes."""
    texts = {name: json.dumps(figure, allow_nan=False, separators=(",", ":")) for name, figure in figures.items()}
    return {
        "title": title,
        "body": body,
        "figures": dict(figures),
        "marks": {name: digest(text) for name, text in texts.items()},
        "state": state,
        "state_text": STATE_TEXTS.get(state, ""),
        "again_s": SHORTEST_S,
    }


def digest(text: str) -> str:
    """A short text that changes with a long one."""
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def news(part: Part, revision: str, known: str, *, is_same: bool) -> str:
    """As JSON what a page lacks: charts that it has already are left out, and everything when nothing changed."""
    state = {name: part[name] for name in ("state", "state_text", "again_s")} | {"revision": revision}
    if is_same:
        return json.dumps(state)
    has = dict(pair.partition(":")[::2] for pair in known.split(","))
    figures = {name: figure for name, figure in part["figures"].items() if has.get(name) != part["marks"][name]}
    return json.dumps(state | {"body": part["body"], "marks": part["marks"], "figures": figures}, allow_nan=False)


def whole_page(part: Part, *, kind: str, feed: str, revision: str) -> str:
    """The document around the sections."""
    from markupsafe import Markup

    return str(
        template("live.html").render(
            title=part["title"],
            kind=kind,
            feed=feed,
            revision=revision,
            state=part["state"],
            state_text=part["state_text"],
            body=Markup(part["body"]),
            figures=Markup(safe_json(part["figures"])),
            has_charts=kind in ("run", "compare"),
            plotly_version=plotly_version(),
        )
    )


def runs_part(folder: str, glances: Sequence[Glance], is_cut: bool) -> Part:
    """The list of runs."""
    now_s = time.time()
    num_running = sum(glance.state == "running" for glance in glances)
    count_line = f"{len(glances):,} runs, {num_running:,} running" if len(glances) != 1 else "1 run"
    body = template("runs.html").render(
        folder=clean(folder, 80),
        count_line=count_line,
        runs=[_line(glance, now_s) for glance in glances],
        is_cut=is_cut,
        version=__version__,
    )
    html = str(body).replace(" %", "&nbsp;%")
    return make_part(f"{clean(folder, 80)}: runs", html, {}, "running" if num_running else "runs")


def _line(glance: Glance, now_s: float) -> dict[str, Any]:
    ranks = clean(f"{glance.world_size:,} ranks", 20) if glance.world_size > 1 else ""
    written_at = min(max(glance.updated_at, 0.0), LATEST_S)
    shown = ("name", "title", "state", "mfu", "step_s", "tokens_per_s", "last_step", "loss", "problem")
    known = [mfu for mfu in glance.recent_mfu if mfu is not None]
    return {name: getattr(glance, name) for name in shown} | {
        "what": " · ".join(filter(None, (glance.model, glance.device, ranks))),
        "trend": trend(glance.recent_mfu),
        "trend_text": f"MFU of the last {len(known)} steps: {utilisation(min(known))} to {utilisation(max(known))}"
        if known
        else "",
        "updated": datetime.fromtimestamp(written_at, timezone.utc).isoformat(timespec="seconds"),
        "ago": ago(now_s - glance.updated_at),
    }


def waiting_part(num_read: int, num_bytes: int) -> Part:
    """What is shown while a long file is read for the first time."""
    body = template("waiting.html").render(num_read=num_read, num_bytes=num_bytes)
    return make_part("Reading the run", str(body), {}, "wait")


def trend(values: Sequence[float | None]) -> str:
    """Points of a small line, 120 wide and 30 high, from 0 to a little above the largest value."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    top = max((value for _, value in known), default=0.0)
    if len(known) < 2 or top <= 0:
        return ""
    across = 116 / (len(values) - 1)
    return " ".join(f"{2 + across * place:.1f},{28 - 25 * max(value, 0.0) / top:.1f}" for place, value in known)


def ago(age_s: float) -> str:
    """How long ago, in one unit."""
    if age_s < 10:
        return "now"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= size:
            return f"{age_s // size:,.0f} {unit} ago"
    return f"{age_s:.0f} s ago"


def plotly_version() -> str:
    """Of the Python package that brings the script: the browser keeps the script as long as this stays the same."""
    from importlib.metadata import version

    return version("plotly")
