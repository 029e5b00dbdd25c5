"""Servers as child processes, and their use of memory and CPU time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from ... import settings
from ...child import child_environment
from ..commands import Failure, warn

if TYPE_CHECKING:
    from ...settings_sources import Loaded

POLL_S = 0.01
NOTICE_S = 15.0  # after which bench prints that it is still waiting for the server
STOP_S = 40.0  # more than a Pequod drains by default
# A server that takes less than this share of a core has done what it does without requests, such as taking memory.
QUIET_SHARE, QUIET_S, QUIET_LIMIT_S = 0.1, 0.5, 30.0
LOG_LINES = 5  # of a dead server's log, for the error
# Settings of a measured Pequod that are chosen here, because only this process must find it.
LISTENING = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "step_log")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Child:
    """A server that was started here. Its output goes to a file; `stop` ends it and its children.

    `{folder}` in a word of the command is replaced by a folder that exists as long as this object.
    """

    def __init__(self, command: Sequence[str], url: str, ready: str, environment: Mapping[str, str]) -> None:
        self.url = url
        self._ready = ready  # path that responds with 200 when the server is ready
        self._folder = tempfile.TemporaryDirectory(prefix="pequod-bench-")
        self.folder = Path(self._folder.name)
        self.command = [word.replace("{folder}", str(self.folder)) for word in command]
        self.began = time.perf_counter()
        with (self.folder / "log").open("wb") as log:
            try:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,  # Ctrl-C is for the measurement, which then stops the server
                )
            except OSError as error:
                self._folder.cleanup()
                raise Failure(f"{self.command[0]} cannot be started: {error.strerror}") from None
        self.pid = self.process.pid

    @property
    def log(self) -> str:
        """The server's output so far."""
        return (self.folder / "log").read_text(errors="replace")

    async def ready(self, limit_s: float) -> tuple[float, float]:
        """Return the seconds from the start until the port responded and until the server was ready. Raises Failure."""
        import httpx

        port, is_noticed = None, False
        # trust_env: a proxy of the environment need not reach this machine's loopback address.
        async with httpx.AsyncClient(base_url=self.url, timeout=10, trust_env=False) as client:
            while (elapsed := time.perf_counter() - self.began) < limit_s:
                if self.process.poll() is not None:
                    raise Failure(self.died())
                if elapsed > NOTICE_S and not is_noticed:
                    is_noticed = True
                    warn(f"waiting for {self.url}{self._ready} of the server that was started; {self._last_lines()}")
                with contextlib.suppress(httpx.TransportError):
                    status = (await client.get(self._ready)).status_code
                    elapsed = time.perf_counter() - self.began
                    port = port or elapsed
                    if status == 200:
                        return port, elapsed
                await asyncio.sleep(POLL_S)
        raise Failure(f"the server was not ready after {limit_s:.0f} s; {self._last_lines()}")

    async def quiet(self) -> None:
        """Wait until the server does next to nothing, but no longer than QUIET_LIMIT_S."""
        until = time.perf_counter() + QUIET_LIMIT_S
        used, share = cpu_seconds(self.pid), 1.0
        while share > QUIET_SHARE and time.perf_counter() < until:
            await asyncio.sleep(QUIET_S)
            before, used = used, cpu_seconds(self.pid)
            share = (used - before) / QUIET_S

    def died(self) -> str:
        """Return why the server is gone, in a sentence."""
        return f"the server ended with code {self.process.poll()}; {self._last_lines()}"

    def _last_lines(self) -> str:
        lines = [line for line in self.log.splitlines() if line.strip()][-LOG_LINES:]
        return "its last lines:\n  " + "\n  ".join(lines) if lines else "it wrote nothing"

    def stop(self) -> None:
        """Stop the server with SIGTERM, and with SIGKILL if that takes too long."""
        pids = tree(self.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        for pid in pids:  # only its own children; one that has ended is no error
            if pid == self.pid or _is_in_session(pid, self.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._folder.cleanup()


def pequod(model: str, flags: Sequence[str], variables: Mapping[str, str] | None = None) -> Child:
    """Start a Pequod on a free port; its step log is `steps.jsonl` in its folder."""
    port = free_port()
    command = [sys.executable, "-m", "server", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--step-log", "{folder}/steps.jsonl", *flags]
    return Child(command, f"http://127.0.0.1:{port}", "/ready", environment() | dict(variables or {}))


def flags(loaded: Loaded) -> list[str]:
    """Return settings as flags of `pequod serve`, from wherever they come, but for those of `variables`.

    So a configuration file need not be read again, which may have addresses to listen on.
    """
    words: list[str] = []
    for name, value in _given(loaded):
        kind, flag = settings.shape(name)[0], settings.flag(name)
        if kind is bool:
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif kind is not list and name not in settings.SECRET:
            words.append(f"{flag}={value}")  # in one word, as a value may begin with a hyphen
    return words


def variables(loaded: Loaded) -> dict[str, str]:
    """Return the keys and the lists among the settings as environment variables.

    All users and results see a command line, and a list of flags can neither be empty nor have commas in its values.
    """
    found = {}
    for name, value in _given(loaded):
        if name in settings.SECRET or settings.shape(name)[0] is list:
            text = json.dumps([_plain(each) for each in value]) if isinstance(value, list) else str(_plain(value))
            found[settings.PREFIX + name.upper()] = text
    return found


def _given(loaded: Loaded) -> Iterator[tuple[str, Any]]:
    """Yield the settings that are not defaults, without addresses to listen on."""
    for name, source in loaded.sources.items():
        if source != "default" and name not in ("model", *LISTENING):
            yield name, getattr(loaded.settings, name)


def _plain(value: Any) -> Any:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def environment() -> dict[str, str]:
    """Return the environment of a measured Pequod: this process's, without addresses to listen on."""
    excluded = {settings.PREFIX + name.upper() for name in (*LISTENING, "config")}
    return {name: value for name, value in child_environment().items() if name.upper() not in excluded}


def tree(pid: int) -> list[int]:
    """Return the ids of a process and its descendants; only its own without /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def _is_in_session(pid: int, leader: int) -> bool:
    try:
        return os.getsid(pid) == leader
    except OSError:
        return False


def peak_bytes(pid: int | None) -> int | None:
    """Return the sum of the peak resident memory of a process and its descendants; None if it is not known."""
    total = 0
    for each in tree(pid) if pid is not None else []:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total or None


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its living descendants have used."""
    ticks = 0
    for each in tree(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
