"""`pequod serve`: the HTTP server, from the socket to the drain."""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import resource
import socket
import ssl
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from . import Parser, UsageError, add_settings, settings_from, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine import Child

    from ...settings import Settings

BACKLOG = 2048  # connections held by the kernel until they are accepted
OPEN_FILES = 65536
# Not for connections: a new engine's process, files, the store. Without them a restart would fail when it is needed.
SPARE_DESCRIPTORS = 96


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod serve [MODEL] [flags]"
    parser.description = "Serve a model over the OpenAI HTTP API. Without MODEL: the small built-in one."
    add_settings(parser, "model", "engine", "http", "limits", "logs")


def run(arguments: argparse.Namespace, child: Child | None = None) -> int:
    """Serve until a signal comes: 0 after the drain, 2 when the model or a setting is impossible, 1 when it died.

    `child`: the engine's process, where it was started before this module was imported.
    """
    began = time.monotonic()
    settings = settings_from(arguments).settings
    check_tls(settings)
    with listen(settings) as listener:
        return serve(settings, listener, began, child)


def serve(settings: Settings, listener: socket.socket, began: float, child: Child | None = None) -> int:
    """Run the app on a listening socket."""
    from engine import ProcessEngine

    most_connections = raise_open_files() - SPARE_DESCRIPTORS
    engine = ProcessEngine(settings.engine_config(), child, settings.stall_seconds)

    gc.disable()  # nothing of what is imported is garbage; looking for it took a tenth of the time
    from ...app import build_app
    from ...http.server import Server
    from ...observability import logs
    from .. import banner

    lines = logs.configure(settings.log_format, settings.log_level)
    app = build_app(settings, engine)
    server = Server(app, engine, settings, began, banner, max_connections=max(1, most_connections))
    gc.freeze()  # what was imported stays: later collections need not look at it
    gc.enable()
    try:
        failure = server.serve_on(listener)
    finally:
        lines.close()  # before the last words
    if failure is None:
        return 0
    warn(failure[0])
    return failure[1]


def raise_open_files() -> int:
    """Allow as many open files as the system lets this process have, and return their number.

    A shell's usual 1,024 are few where each connection is one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def check_tls(settings: Settings) -> None:
    """A certificate that cannot be used is an error now and not at the first connection."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            settings.ssl_certfile, settings.ssl_keyfile, password=lambda: ""
        )
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or error
        raise UsageError(f"the TLS certificate {settings.ssl_certfile} cannot be used: {reason}") from None


@contextlib.contextmanager
def listen(settings: Settings) -> Iterator[socket.socket]:
    """A listening socket: clients that come while the server starts are held, not refused."""
    listener = _listen_unix(settings.uds) if settings.uds is not None else _listen_tcp(settings.host, settings.port)
    try:
        yield listener
    finally:
        listener.close()
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"--host {host} is no address of this machine: {error.strerror}") from None
    family, kind, protocol, _, place = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} of {host} is in use; choose another with --port") from None
        if error.errno == errno.EACCES:
            raise UsageError(f"port {port} may not be opened by this user; choose one above 1023 with --port") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--host {host} is no address of this machine") from None
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def _listen_unix(path: Path) -> socket.socket:
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UsageError(f"--uds {path} is a file that is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            if probe.connect_ex(str(path)) == 0:
                raise UsageError(f"--uds {path} is in use by another server")
        path.unlink()  # left behind by a server that was killed
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {path}: {error.strerror}") from None
    return listener
