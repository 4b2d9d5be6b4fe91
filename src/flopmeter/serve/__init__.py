"""How do people watch runs while they grow?  A small server that reads a folder and can do nothing else.

    from flopmeter.serve import make_app

    app = make_app(Path("runs"))        # an ASGI application, for a server of your own

Pages are the report's own, made again as the run file grows; the file is read on from where reading stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from msgspec import Struct

from flopmeter.compare import compare
from flopmeter.errors import FlopmeterError, MissingLibraryError, RecordError
from flopmeter.record import Run
from flopmeter.report._compare import comparison_page
from flopmeter.report._model import report_of, timeline_of
from flopmeter.report._page import body, body_of, data_of, document, safe_json
from flopmeter.serve.runs import STATES, Glance, Runs
from flopmeter.text import clean, plural, utilisation

try:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route

    from flopmeter.serve.guard import Guard
except ImportError:
    raise MissingLibraryError("starlette", needed_for="flopmeter serve", extra="serve") from None

logger = logging.getLogger("flopmeter")

MAX_COMPARED = 8
SHORTEST_S, LONGEST_S = 2.0, 300.0
"""Between two questions of the browser: ten times what the answer took to make, within these bounds."""


class Part(Struct, frozen=True, kw_only=True):
    """What a page is made of, and what is sent when it changes."""

    title: str
    body: str
    data: Any = None
    again_s: float = SHORTEST_S


def make_app(root: Path, *, host: str = "127.0.0.1", token: str | None = None) -> Starlette:
    """The application that shows the runs under `root`.

    Args:
        host: Address at which it will listen; it answers under no other name.
        token: What readers have to show; None lets everybody in who can reach it.

    Raises:
        RecordError: `root` is not a folder.
    """
    if not root.is_dir():
        raise RecordError(f"{root} is not a folder: give the folder that holds your runs")
    views = _Views(Runs(root))
    places = {views.runs: ("/", "/news"), views.run: ("/run/{name}", "/run/{name}/news"), views.compare: ("/compare",)}
    return Starlette(
        routes=[Route(path, views.safe(view)) for view, paths in places.items() for path in paths],
        middleware=[Middleware(Guard, host=host, token=token), Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={404: lambda request, error: _message("there is no such page", 404)},
    )


class _Views:
    """One method per kind of page. They are plain functions: the server runs each in a thread of its own."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def safe(self, view: Callable[[Request], Response]) -> Callable[[Request], Response]:
        """The view, with a line in answer to a run that cannot be shown: one bad record must not end the server."""

        def answer(request: Request) -> Response:
            try:
                return view(request)
            except FlopmeterError as error:
                message = str(error).replace(f"{self._runs.root}/", "")
                return _message(message, 404 if isinstance(error, RecordError) else 500)
            except Exception as error:  # noqa: BLE001
                logger.warning("%r cannot be shown: %.200r", request.url.path, error)
                return _message(f"this cannot be shown: flopmeter cannot read the record ({type(error).__name__})", 500)

        return answer

    def runs(self, request: Request) -> Response:
        glances = self._runs.glances()
        part = list_part(self._runs.root.name or str(self._runs.root), glances, self._runs.is_cut)
        revision = blake2b(part.body.encode(), digest_size=6).hexdigest()
        state = "running" if any(glance.state == "running" for glance in glances) else "finished"
        return _answer(request, part, revision, (state, "Up to date"), "/news")

    def run(self, request: Request) -> Response:
        name = request.path_params["name"]
        opened, state = self._runs.open(name), self._runs.state_of(name)
        look = partial(opened.made, run_part, state)
        if opened.is_busy(look):
            read, size = opened.progress()
            page = document("Reading the run", body("waiting.html", num_read=read, num_bytes=size))
            return HTMLResponse(page, headers={"Refresh": "1"})
        revision, part = look()
        return _answer(request, part, revision, (state, STATES[state]), f"/run/{name}/news")

    def compare(self, request: Request) -> Response:
        """Several runs, the oldest as the baseline unless another is named."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(names) <= MAX_COMPARED:
            return _message(f"choose 2 to {MAX_COMPARED} different runs to compare", 400)
        tails, baseline = {name: self._runs.open(name) for name in names}, request.query_params.get("baseline")
        with ExitStack() as stack:
            # Locks are always taken in the same order, so that two comparisons cannot wait for each other.
            opened = {name: stack.enter_context(tails[name].run())[0] for name in sorted(names)}
            names.sort(key=lambda name: (name != baseline, opened[name].headers[0].started_at))
            runs = [opened[name] for name in names]
            chosen = "&".join(f"run={name}" for name in names)
            links, swaps = [f"/run/{name}" for name in names], [f"/compare?{chosen}&baseline={name}" for name in names]
            title, html, data = comparison_page(compare(runs), [timeline_of(run) for run in runs], links, swaps)
        return _answer(request, Part(title=title, body=html, data=data), "", ("finished", ""), "")


def run_part(run: Run) -> Part:
    """The sections and charts of one run, as they are now."""
    started = time.perf_counter()
    report = report_of(run)
    html, data = body_of(report), data_of(report)
    again_s = round(min(max(10 * (time.perf_counter() - started), SHORTEST_S), LONGEST_S), 1)
    return Part(title=report.about.name, body=html, data=data, again_s=again_s)


def list_part(folder: str, glances: Sequence[Glance], is_cut: bool) -> Part:
    """The list of runs."""
    now_s, num_running = time.time(), sum(glance.state == "running" for glance in glances)
    line = f"{plural(len(glances), 'run')}, {num_running:,} running"
    rows = [(glance, trend(glance.recent_mfu), ago(now_s - glance.updated_at)) for glance in glances]
    html = body("runs.html", folder=clean(folder, 80), line=line, rows=rows, states=STATES, is_cut=is_cut)
    return Part(title=f"{clean(folder, 80)}: runs", body=html)


def trend(values: Sequence[float | None]) -> tuple[str, str]:
    """Points of a small line, 120 wide and 30 high, from 0 to a little above the largest value; and what it shows."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    top = max((value for _, value in known), default=0.0)
    if len(known) < 2 or top <= 0:
        return "", ""
    across, least = 116 / (len(values) - 1), min(value for _, value in known)
    points = " ".join(f"{2 + across * place:.1f},{28 - 25 * max(value, 0.0) / top:.1f}" for place, value in known)
    return points, f"MFU of the last {len(known)} steps: {utilisation(least)} to {utilisation(top)}"


def ago(age_s: float) -> str:
    """How long ago, in one unit."""
    if age_s < 10:
        return "now"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= size:
            return f"{age_s // size:,.0f} {unit} ago"
    return f"{age_s // 10 * 10:.0f} s ago"


def _answer(request: Request, part: Part, revision: str, state: tuple[str, str], feed: str) -> Response:
    """The page, or what is new in it; when nothing is, only how the run is and when to ask again."""
    if not request.url.path.endswith("/news"):
        live = {"feed": feed, "revision": revision, "state": state[0], "text": state[1]}
        return HTMLResponse(document(part.title, part.body, part.data, live))
    news: dict[str, Any] = {"revision": revision, "state": state[0], "text": state[1], "again_s": part.again_s}
    if request.query_params.get("revision") != revision:
        news |= {"body": part.body, "data": part.data}
    return Response(safe_json(news), media_type="application/json")


def _message(message: str, status: int) -> Response:
    """A page of one line, in the look of the others."""
    live = {"feed": "", "revision": "", "state": "lost", "text": ""}
    return HTMLResponse(document("flopmeter", body("message.html", message=clean(message, 400)), None, live), status)
