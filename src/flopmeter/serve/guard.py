"""Who may read, and what may a page of ours do in the browser?  Every request and every answer passes here.

Only reading (GET, HEAD). Only under a host name that is ours, so that no foreign site can reach us by pointing its own
name at this address. Never on behalf of another site. With a token where other machines can reach us. And a page of
ours loads nothing from elsewhere and runs no script but its own.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flopmeter.report._page import asset, policy

HEADERS = {
    "Content-Security-Policy": f"{policy(is_live=True)}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Server": "flopmeter",
}


class Guard:
    """Stands before the application.

    Args:
        host: Address that the server listens at; one of this machine only is reached by its loopback names alone.
        token: What a reader has to show; None lets everybody in who gets here.
    """

    def __init__(self, app: ASGIApp, *, host: str, token: str | None) -> None:
        self._app = app
        self._token = token
        self._is_local = is_loopback(host)
        others = set() if self._is_local else {socket.gethostname().lower()}
        self._names = {"127.0.0.1", "localhost", "::1", host.lower()} | others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in the application's place, or let the request through and put our headers on the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self._refusal(Request(scope)) or self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("flopmeter only answers GET and HEAD\n", 405, {"Allow": "GET, HEAD"})
        if not self._is_our_name(request.headers.get("host", "")):
            return PlainTextResponse("this is not a host name of this server\n", 421)
        told = request.headers
        # Another site had it fetched; following a link to one of our pages is fine.
        is_visit = (told.get("sec-fetch-mode"), told.get("sec-fetch-dest")) == ("navigate", "document")
        is_foreign = told.get("sec-fetch-site") in ("cross-site", "same-site") and not is_visit
        if is_foreign or told.get("origin") not in (None, f"{request.url.scheme}://{told.get('host', '')}"):
            return PlainTextResponse("requests from other sites are refused\n", 403)
        return self._check_token(request) if self._token is not None else None

    def _is_our_name(self, host: str) -> bool:
        with suppress(ValueError):
            name = (urlsplit(f"//{host}").hostname or "").lower()
            return name in self._names or (not self._is_local and _is_address(name))
        return False

    def _check_token(self, request: Request) -> Response | None:
        """None for a reader who has shown the token; a page that keeps it as a cookie when it came in the address."""
        cookie = f"flopmeter_{request.url.port or 80}"
        given = parse_qs(request.url.query).get("token", [""])[0]
        if self._is_token(given):
            # A redirect would still count as coming from the site of the link, and the cookie would be withheld.
            answer = HTMLResponse(asset("welcome.html"))
            answer.set_cookie(cookie, given, httponly=True, samesite="strict", path="/")
            return answer
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        shown = [bearer.strip() if scheme.lower() == "bearer" else "", request.cookies.get(cookie, "")]
        if any(map(self._is_token, shown)):
            return None
        refusal = "a token is needed: open the address that flopmeter serve printed\n"
        return PlainTextResponse(refusal, 401, {"WWW-Authenticate": "Bearer"})

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._token or "").encode())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    """Whether it is a number and not a name: names can be pointed anywhere, numbers cannot."""
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False
