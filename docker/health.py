"""Exit code 0 when the server in this container responds with status 200 at a path (default /live), for health checks.

The address comes from where the server takes it: its flags, the environment and the TOML file.
"""

from __future__ import annotations

import http.client
import os
import pathlib
import socket
import ssl
import sys

from server.cli.commands import Parser, UsageError, serve, settings_from
from server.settings import Settings
from server.settings_values import SettingsError

TIMEOUT_S = 4.0  # with the imports, under the five seconds after which the container engine kills this process
# The command line of the container's first process: the server, or a small init with the server's words after its own.
COMMAND_LINE = pathlib.Path("/proc/1/cmdline")
# Where a server that listens on all addresses is reached.
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def flags() -> list[str]:
    """Return the flags of `pequod serve` in COMMAND_LINE; none if it runs something else, such as a shell."""
    words = COMMAND_LINE.read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    for i, word in enumerate(words[:-1]):
        if (os.path.basename(word), words[i + 1]) == ("pequod", "serve"):
            return words[i + 2 :]
    return []


def settings() -> Settings:
    """Return the server's settings. Raises UsageError or SettingsError."""
    parser = Parser(prog="pequod serve", add_help=False)
    serve.add_arguments(parser)
    return settings_from(parser.parse(flags())).settings


def connect(found: Settings) -> socket.socket:
    """Connect to the server. Raises OSError."""
    if found.uds is not None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(found.uds))
    else:
        connection = socket.create_connection((LOOPBACK.get(found.host, found.host), found.port), TIMEOUT_S)
    if found.ssl_certfile is None:
        return connection
    return ssl._create_unverified_context().wrap_socket(connection)  # the certificate names the public host


def status(path: str) -> int:
    """Return the status of the server's response. Raises OSError and HTTPException where there is none."""
    # Any server accepts an IP address in the Host header.
    connection = http.client.HTTPConnection("127.0.0.1")
    connection.sock = connect(settings())
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def main() -> int:
    path = sys.argv[1] if len(sys.argv) > 1 else "/live"
    try:
        found = status(path)
    except (OSError, http.client.HTTPException, UsageError, SettingsError) as error:
        print(f"{path}: {error}")
        return 1
    print(f"{path}: {found}")
    return 0 if found == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
