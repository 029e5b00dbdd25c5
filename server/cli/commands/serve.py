"""`pequod serve`: runs the HTTP server, from opening the socket to draining it."""

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

from . import Parser, UsageError, add_settings, chat_model, settings_from, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine import Child

    from ...settings import Settings

BACKLOG = 2048  # connections that the kernel queues until they are accepted
OPEN_FILES = 65536
# Reserved for the process of a restarted engine, files and the store: at the limit of connections they still work.
SPARE_DESCRIPTORS = 96


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod serve [MODEL] [flags]"
    parser.description = (
        "Serve a model over the OpenAI HTTP API. Without MODEL: smollm2 if it is on this machine, see `pequod pull`,"
        " else the small built-in one."
    )
    add_settings(parser, "model", "engine", "http", "limits", "logs")


def run(arguments: argparse.Namespace, child: Child | None = None) -> int:
    """Serve until a signal. Returns 0 after the drain, 2 if the model or a setting is invalid, 1 if the server failed.

    `child`: the engine's process, if it was started before this module was imported.
    """
    began = time.monotonic()
    settings = settings_from(arguments, default_model=chat_model).settings
    check_tls(settings)
    with listen(settings) as listener:
        return serve(settings, listener, began, child)


def serve(settings: Settings, listener: socket.socket, began: float, child: Child | None = None) -> int:
    """Run the app on a listening socket and return the exit code."""
    from engine import ProcessEngine

    max_connections = max(1, raise_open_files() - SPARE_DESCRIPTORS)
    engine = ProcessEngine(settings.engine_config(), child, settings.stall_seconds)

    gc.disable()  # imports create no garbage, and collections took a tenth of their time
    from ...app import build_app
    from ...http.server import Server
    from ...observability import logs
    from .. import banner

    lines = logs.configure(settings.log_format, settings.log_level)
    app = build_app(settings, engine)
    server = Server(app, engine, settings, began, banner, max_connections=max_connections)
    gc.freeze()  # later collections skip the imported objects, which stay
    gc.enable()
    try:
        failure = server.serve_on(listener)
    finally:
        lines.close()  # writes the queued log lines, before the message below
    if failure is None:
        return 0
    warn(failure[0])
    return failure[1]


def raise_open_files() -> int:
    """Raise this process's limit of open files, of which each connection is one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def check_tls(settings: Settings) -> None:
    """Raise UsageError if the certificate is unusable: otherwise the first connection would fail."""
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
    """Open a listening socket. Clients that connect while the server starts wait, and are not refused."""
    listener = _listen_unix(settings.uds) if settings.uds is not None else listen_tcp(settings.host, settings.port)
    try:
        yield listener
    finally:
        listener.close()
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)


def listen_tcp(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises UsageError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    family, kind, protocol, _, address = addresses[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} of {host} is in use; choose another with --port") from None
        if error.errno == errno.EACCES:
            raise UsageError(f"this user may not open port {port}; choose one above 1023 with --port") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--host {host} is not an address of this machine") from None
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def _listen_unix(path: Path) -> socket.socket:
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UsageError(f"--uds {path} is a file, not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            if probe.connect_ex(str(path)) == 0:
                raise UsageError(f"--uds {path} is in use by another server")
        path.unlink()  # the socket of a server that was killed
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {path}: {error.strerror}") from None
    return listener
