"""How do people watch runs while they grow?  A small server that reads a folder and can do nothing else.

    from flopmeter.serve import make_app

    app = make_app(Path("runs"))        # an ASGI application, for a server of your own

Pages are the report's own, drawn again as the run file grows; the file is read on from where reading stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopmeter.errors import FlopmeterError, MissingLibraryError, RecordError
from flopmeter.serve.folder import Folder
from flopmeter.serve.shelf import Shelf

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger("flopmeter")

DEFAULT_HOST = "127.0.0.1"
MAX_COMPARED = 8
_ASSETS = {"page.css": "text/css", "live.css": "text/css", "page.js": "text/javascript", "live.js": "text/javascript"}


def make_app(root: Path, *, host: str = DEFAULT_HOST, token: str | None = None) -> Starlette:
    """The application that shows the runs under `root`.

    Args:
        host: Address at which it will listen; it answers under no other name.
        token: What readers have to show; None lets everybody in who can reach it.

    Raises:
        RecordError: `root` is not a folder.
        MissingLibraryError: starlette, plotly or jinja2 is not installed.
    """
    if not root.is_dir():
        raise RecordError(f"{root} is not a folder: give the folder that holds your runs")
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.gzip import GZipMiddleware
        from starlette.routing import Route
    except ImportError:
        raise MissingLibraryError("starlette", needed_for="flopmeter serve", extra="serve") from None
    from flopmeter.report._page import plotly_script, template
    from flopmeter.serve.guard import Guard

    plotly_script()  # a library that is missing is told now, not to the first reader
    template("live.html")
    views = _Views(Shelf(Folder(root)))
    routes = {
        "/": views.runs,
        "/runs": views.runs_news,
        "/run/{name}": views.run,
        "/run/{name}/news": views.run_news,
        "/compare": views.compare,
        "/assets/{name}": views.asset,
    }
    return Starlette(
        routes=[Route(path, views.safe(view)) for path, view in routes.items()],
        middleware=[Middleware(Guard, host=host, token=token), Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={404: _not_found},
    )


class _Views:
    """One method per address. They are plain functions: the server runs each in a thread of its own."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def safe(self, view: Callable[[Request], Response]) -> Callable[[Request], Response]:
        """The view, with a line in answer to a run that cannot be shown: one bad record must not end the server."""

        def answer(request: Request) -> Response:
            try:
                return view(request)
            except FlopmeterError as error:
                message = str(error).replace(f"{self._shelf.folder.root}/", "")
                return _text(message, 404 if isinstance(error, RecordError) else 500)
            except Exception as error:  # noqa: BLE001
                logger.warning("%r cannot be shown: %.200r", request.url.path, error)
                return _text(f"this cannot be shown: flopmeter stumbled over the record ({type(error).__name__})", 500)

        return answer

    def runs(self, request: Request) -> Response:
        from flopmeter.serve.pages import whole_page

        part, revision = self._runs_part()
        return _html(whole_page(part, kind="runs", feed="/runs", revision=revision))

    def runs_news(self, request: Request) -> Response:
        part, revision = self._runs_part()
        return _news(request, part, revision)

    def _runs_part(self) -> tuple[dict[str, Any], str]:
        from flopmeter.serve.pages import digest, runs_part

        folder = self._shelf.folder
        part = runs_part(folder.root.name or str(folder.root), self._shelf.glances(), folder.is_cut)
        return part, digest(part["body"])

    def run(self, request: Request) -> Response:
        from flopmeter.serve.pages import waiting_part, whole_page

        name = request.path_params["name"]
        opened = self._shelf.open(name)
        if opened.is_busy(lambda: self._run_part(name)):
            waiting = whole_page(waiting_part(*opened.tail.progress()), kind="wait", feed="", revision="")
            return _html(waiting, {"Refresh": "1"})
        revision, part = self._run_part(name)
        return _html(whole_page(part, kind="run", feed=f"/run/{name}/news", revision=revision))

    def run_news(self, request: Request) -> Response:
        revision, part = self._run_part(request.path_params["name"])
        return _news(request, part, revision)

    def _run_part(self, name: str) -> tuple[str, dict[str, Any]]:
        from flopmeter.serve.pages import run_part

        open_run = self._shelf.open(name)
        state = self._shelf.state_of(name)
        revision, part = open_run.made(f"page, {state}", partial(run_part, state=state))
        return f"{revision}-{state}", part

    def compare(self, request: Request) -> Response:
        """Several runs, the oldest as the baseline unless another is named."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(names) <= MAX_COMPARED:
            return _text(f"choose 2 to {MAX_COMPARED} different runs to compare", 400)
        from flopmeter.compare import compare
        from flopmeter.report import _compare_page as drawn
        from flopmeter.report._series import series_of
        from flopmeter.serve.pages import make_part, whole_page

        tails = {name: self._shelf.open(name).tail for name in names}
        with ExitStack() as stack:
            # Locks are always taken in the same order, so that two comparisons cannot wait for each other.
            opened = {name: stack.enter_context(tails[name].run())[0] for name in sorted(names)}
            names.sort(
                key=lambda name: (name != request.query_params.get("baseline"), opened[name].headers[0].started_at)
            )
            runs = [opened[name] for name in names]
            comparison = compare(runs)
            figures = drawn.comparison_figures(comparison, [series_of(run) for run in runs])
        chosen = "&".join(f"run={name}" for name in names)
        links, swaps = [f"/run/{name}" for name in names], [f"/compare?{chosen}&baseline={name}" for name in names]
        body = drawn.comparison_body(comparison, figures, links, swaps)
        part = make_part(drawn.comparison_title(comparison), body, figures, "compare")
        return _html(whole_page(part, kind="compare", feed="", revision=""))

    def asset(self, request: Request) -> Response:
        from starlette.responses import Response

        from flopmeter.report._page import asset, plotly_script

        name = request.path_params["name"]
        if name == "plotly.js":
            kept = {"Cache-Control": "private, max-age=31536000, immutable"}
            return Response(plotly_script(), media_type="text/javascript", headers=kept)
        if name not in _ASSETS:
            return _text("there is no such page", 404)
        return Response(asset(name), media_type=_ASSETS[name])


def _html(text: str, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import HTMLResponse

    return HTMLResponse(text, headers=headers)


def _text(message: str, status: int) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(f"{message}\n", status)


def _news(request: Request, part: dict[str, Any], revision: str) -> Response:
    """What changed; when nothing did, only how the run is and when to ask again."""
    from starlette.responses import Response

    from flopmeter.serve.pages import news

    is_same = request.query_params.get("revision") == revision
    text = news(part, revision, request.query_params.get("known", ""), is_same=is_same)
    return Response(text, media_type="application/json")


def _not_found(request: Request, error: Exception) -> Response:
    return _text("there is no such page", 404)
