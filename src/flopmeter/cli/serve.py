"""`flopmeter serve`: watch runs in the browser while they grow."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from flopmeter.errors import FlopmeterError, MissingLibraryError

MAX_CONNECTIONS, MAX_WAITING = 200, 100
"""With more connections that ask for nothing, the one that has waited longest is closed: they keep nobody out."""
IDLE_S = 10.0
"""A connection without a request for so long is closed, also one that sends its request byte by byte."""


def command(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs, at any depth.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8484,
    host: Annotated[
        str, typer.Option(help="Address to listen at. Any but this machine's own needs the token that is printed.")
    ] = "127.0.0.1",
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token here too: other users of this machine can reach it.")
    ] = False,
) -> None:
    """Show the runs of a folder as live pages: the list, each run as it grows, runs side by side.

    Example: flopmeter serve runs --port 8484
    """
    from flopmeter.serve import make_app
    from flopmeter.serve.guard import is_loopback

    secret = secrets.token_urlsafe(32) if token or not is_loopback(host) else None
    app = make_app(folder, host=host, token=secret)
    try:
        import uvicorn
    except ImportError:
        raise MissingLibraryError("uvicorn", needed_for="flopmeter serve", extra="serve") from None
    with _listen(host, port) as listener:
        typer.echo(f"Runs in {folder}: {_address(listener, host, secret)}  (Ctrl-C ends)")
        quiet: Any = {"log_level": "warning", "access_log": False, "server_header": False, "lifespan": "off"}
        settings = uvicorn.Config(app, ws="none", limit_concurrency=MAX_CONNECTIONS, http=_protocol(), **quiet)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[listener])


def _protocol() -> type[asyncio.Protocol]:
    """HTTP as uvicorn speaks it, without its patience: a connection that asks for nothing is closed."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    waiting: dict[Any, None] = {}
    """Connections without a whole request, the oldest first."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()
            self.loop.call_later(IDLE_S, self._close_if_idle)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                waiting.pop(self, None)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # else another request had come already
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            waiting.pop(self, None)
            super().connection_lost(exc)

        def _wait(self) -> None:
            waiting[self] = None
            if len(waiting) > MAX_WAITING:
                oldest = next(iter(waiting))
                del waiting[oldest]
                oldest.transport.close()

        def _close_if_idle(self) -> None:
            if self in waiting:
                self.transport.close()
            elif not self.transport.is_closing():
                self.loop.call_later(IDLE_S, self._close_if_idle)

    return Protocol


def _listen(host: str, port: int) -> socket.socket:
    """A socket that already listens: a port in use is told at once, and the printed address answers from the start."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror:
        raise FlopmeterError(f"there is no address {host!r}: give one of this machine's, or 0.0.0.0 for all") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} is in use: stop what uses it, or take another with --port (0 takes a free one)"
            raise FlopmeterError(message) from None
        raise FlopmeterError(f"cannot listen at {host}, port {port}: {error.strerror}") from None
    return listener


def _address(listener: socket.socket, host: str, token: str | None) -> str:
    """What to open in the browser; with the token in it, which is shown only here."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
