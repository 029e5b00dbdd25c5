"""A real server process on a free port, for tests that must see what users see."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import httpx

from tests.paced import PACE_FILE

START_S = 120.0
# Long enough for any machine: only a test that fails waits so long.
WAIT_S = 60.0
RESTART_S = 240.0  # the same for what waits until an engine has been started again
ENGINES = (b"engine.worker", b"tests.paced")  # their modules


def held_port() -> socket.socket:
    """A socket on a free port, which nobody else is given while it is open; our servers can listen there all the same
    (both set SO_REUSEADDR, and this one does not listen)."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def free_port() -> int:
    with held_port() as sock:
        port: int = sock.getsockname()[1]
        return port


class Server:
    """`pequod serve` as a child: use as a context manager; `url`, `client`, `engine_pid`, `log`."""

    def __init__(
        self,
        *args: str,
        wait: bool = True,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        python: str | None = None,
        prefix: tuple[str, ...] = (),
        module: str = "server",
    ) -> None:
        """`prefix`: a command that runs the server's, such as prlimit. `module`: what runs in the place of `server`."""
        self._held = held_port()
        self.port: int = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # Lives as long as this object.
        self._log = tempfile.NamedTemporaryFile("w+b", prefix="pequod-", suffix=".log")
        command = [*prefix, python or sys.executable, "-m", module, "serve", "--port", str(self.port), *args]
        self.process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=cwd or pathlib.Path(__file__).parent.parent,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "PEQUOD_MODEL": "builtin", **(env or {})},
        )
        self.client = httpx.Client(base_url=self.url, timeout=120)
        keys = [value for flag, value in itertools.pairwise(args) if flag == "--api-key"]
        self._authorization = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.stop()
                raise

    @property
    def log(self) -> str:
        return pathlib.Path(self._log.name).read_text(errors="replace")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/ready").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"the server was not ready after {START_S} s:\n{self.log}")

    @property
    def engine_pid(self) -> int:
        """The engine's process, found as the operating system shows it."""
        for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError):
                fields = path.read_text().rpartition(")")[2].split()
                command = (path.parent / "cmdline").read_bytes()
                if int(fields[1]) == self.process.pid and any(name in command for name in ENGINES) and fields[0] != "Z":
                    return int(path.parent.name)
        raise LookupError("the server has no engine")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 when there is none."""
        total = 0.0
        response = self.client.get("/metrics", headers=self._authorization)
        assert response.status_code == 200, response.text
        for line in response.text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total += float(value)
        return total

    def stop(self, sig: int = signal.SIGTERM, timeout: float = 40.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(sig)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.client.close()
        self._held.close()
        return self.process.returncode

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGKILL if self.process.poll() is None else signal.SIGTERM)
        self._log.close()


class PacedServer(Server):
    """A server whose engine waits before each step for as long as a test says.

    A long answer of it is still under way when the test looks, also on a machine where the test is the slower one.
    """

    def __init__(self, *args: str, step_s: float = 0.0, env: dict[str, str] | None = None, **more: Any) -> None:
        self._pace = tempfile.NamedTemporaryFile("w", prefix="pequod-", suffix=".pace")
        self.pace(step_s)
        super().__init__(*args, env={PACE_FILE: self._pace.name, **(env or {})}, module="tests.paced", **more)

    def pace(self, step_s: float) -> None:
        """Wait for so many seconds before each step from now on."""
        pathlib.Path(self._pace.name).write_text(str(step_s))

    @contextlib.contextmanager
    def paced(self, step_s: float = 0.02) -> Iterator[None]:
        """Wait before each step meanwhile."""
        self.pace(step_s)
        try:
            yield
        finally:
            self.pace(0)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(check, seconds: float = WAIT_S, every: float = 0.02):
    """Wait until `check()` is true; gives its value, or fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = check()
        if value:
            return value
        time.sleep(every)
    raise AssertionError(f"not true within {seconds} s: {check}")


@contextlib.contextmanager
def server(*args: str, **kwargs) -> Iterator[Server]:
    with Server(*args, **kwargs) as running:
        yield running
