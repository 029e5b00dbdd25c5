"""The image's health check, which must find the server wherever its settings put it."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from server.settings import PREFIX
from tests.live import free_port

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "docker/health.py"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert self.headers["Host"] == "127.0.0.1"
        self.send_response({"/live": 200, "/ready": 503}.get(self.path, 404))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class OnIPv6(http.server.HTTPServer):
    address_family = socket.AF_INET6


class OnUnixSocket(http.server.HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "", 0


@contextlib.contextmanager
def serving(
    kind: type[http.server.HTTPServer] = http.server.HTTPServer, address: Any = ("127.0.0.1", 0), certificate: str = ""
) -> Iterator[str]:
    """Serve with `Handler`; yields the port."""
    with kind(address, Handler) as server:
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield str(server.server_port)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def health(monkeypatch, tmp_path) -> ModuleType:
    """Return the script as a module, in a container without settings whose first process is a shell."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("health", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "COMMAND_LINE", tmp_path / "cmdline")
    first_process(module, "sh", "-c", "pequod serve --port 1")
    monkeypatch.setattr(sys, "argv", ["health.py"])
    return module


def first_process(health: ModuleType, *words: str) -> None:
    health.COMMAND_LINE.write_bytes(b"".join(word.encode() + b"\0" for word in words))


def run(*paths: str, **environment: str) -> int:
    # A proxy of the environment must not be asked for the container's own port.
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "http_proxy": "http://127.0.0.1:9", **environment}
    return subprocess.run([sys.executable, SCRIPT, *paths], env=env, check=False, timeout=60).returncode


def test_the_exit_code_is_0_only_for_a_response_with_status_200():
    with serving() as port:
        assert run(PEQUOD_PORT=port) == 0
        assert run("/live", PEQUOD_PORT=port) == 0
        assert run("/ready", PEQUOD_PORT=port) == 1
        assert run("/live", PEQUOD_PORT=str(free_port())) == 1


def test_the_port_may_be_in_the_settings_file(health, monkeypatch, tmp_path):
    with serving() as port:
        (tmp_path / "pequod.toml").write_text(f'host = "0.0.0.0"\nport = {port}\n')
        monkeypatch.setenv("PEQUOD_CONFIG", str(tmp_path / "pequod.toml"))
        assert health.main() == 0
        monkeypatch.setenv("PEQUOD_PORT", str(free_port()))  # comes before the file
        assert health.main() == 1


@pytest.mark.parametrize(
    "before", [["/opt/pequod/bin/python", "/opt/pequod/bin/pequod"], ["/sbin/docker-init", "--", "pequod"]]
)
def test_flags_of_the_first_process_count(health, monkeypatch, before):
    with serving() as port:
        monkeypatch.setenv("PEQUOD_PORT", str(free_port()))
        first_process(health, *before, "serve", "builtin", "--api-key", "xxxxxxxx", "--port", port)
        assert health.main() == 0


@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_server_on_ipv6_is_found(health, monkeypatch, host):
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(serving(OnIPv6, ("::1", 0)))
        except OSError:
            pytest.skip("this machine has no IPv6")
        monkeypatch.setenv("PEQUOD_HOST", host)
        monkeypatch.setenv("PEQUOD_PORT", port)
        assert health.main() == 0


def test_a_server_on_a_unix_socket_is_found(health, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # an absolute path may be too long for a socket
    with serving(OnUnixSocket, "socket"):
        monkeypatch.setenv("PEQUOD_UDS", "socket")
        assert health.main() == 0
        sys.argv.append("/ready")
        assert health.main() == 1
    os.unlink("socket")
    assert health.main() == 1


def test_a_certificate_in_flags_or_variables_means_tls(health, monkeypatch, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    file = str(tmp_path / "both.pem")
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=llm.example.org"]
    subprocess.run([*request, "-keyout", file, "-out", tmp_path / "c.pem"], check=True, capture_output=True)
    with open(file, "a") as both:
        both.write((tmp_path / "c.pem").read_text())
    with serving(certificate=file) as port:
        monkeypatch.setenv("PEQUOD_PORT", port)
        assert health.main() == 1
        first_process(health, "python", "pequod", "serve", "--ssl-certfile", file)
        assert health.main() == 0
        first_process(health, "sh")
        monkeypatch.setenv("PEQUOD_SSL_CERTFILE", file)
        assert health.main() == 0


def test_settings_that_no_server_can_have_are_named(health, monkeypatch, capsys):
    monkeypatch.setenv("PEQUOD_PORT", "http")
    assert health.main() == 1
    assert capsys.readouterr().out.startswith("/live: PEQUOD_PORT http is not a whole number")
