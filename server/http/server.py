"""Server: uvicorn with a drain. The first signal lets running requests finish, the second ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from engine import ConfigError, Engine, EngineError, EngineInfo, ModelError

from ..settings import Settings, with_flags
from .connection import Connection

ACCEPTS_PER_ITERATION = 16
CLOSE_S = 5  # for connections that stay open after the drain has ended every stream
MARGIN_S = 6  # beyond --drain-seconds, for streams to end: a second more than AppState.drained gives them

log = logging.getLogger("pequod")


def address(listener: socket.socket) -> tuple[str, int] | Path:
    """The address of a listening socket: host and port, or the path of a Unix socket."""
    name: Any = listener.getsockname()
    return Path(name) if listener.family == socket.AF_UNIX else (name[0], name[1])


class Display(Protocol):
    """Shows the user that the model is loading and that the server is ready; the module cli/banner.py is one."""

    def loading(self, engine: Engine, settings: Settings) -> AbstractAsyncContextManager[None]:
        """Show the progress of loading until the context ends."""

    def announce(
        self, info: EngineInfo, settings: Settings, where: tuple[str, int] | Path, seconds: float, has_template: bool
    ) -> None:
        """Show that the server is ready, and its address."""


class Server(uvicorn.Server):
    """Serves an app on a listening socket until it is drained, or until the engine fails."""

    def __init__(
        self,
        app: FastAPI,
        engine: Engine,
        settings: Settings,
        started: float,
        display: Display,
        *,
        max_connections: int | None = None,
    ) -> None:
        """`started`: when the process was started, time.monotonic(). `max_connections`: at a time; None: no limit."""
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                root_path=settings.root_path,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                timeout_keep_alive=settings.timeout_keep_alive,
                timeout_graceful_shutdown=CLOSE_S + 1,  # then it cancels requests, with a traceback for each
                limit_concurrency=max_connections,  # for Connection, which limits connections with it
            )
        )
        self.state = app.state.pequod
        self.engine = engine
        self.settings = settings
        self.started_at = started
        self.display = display
        self.failure: tuple[str, int] | None = None  # message and exit code
        self.signals = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.tasks: list[asyncio.Task[None]] = []

    def serve_on(self, listener: socket.socket) -> tuple[str, int] | None:
        """Serve until a signal or a failure. Return the message and the exit code of a failure.

        The exit code is 2 if the model or a setting cannot be used, and 1 if the engine failed for good.
        """
        # The event loop accepts one connection per descriptor and iteration, and iterations are long under load.
        # Duplicates of the descriptor let it accept more.
        duplicates = [listener.dup() for _ in range(ACCEPTS_PER_ITERATION - 1)]
        try:
            self.run(sockets=[listener, *duplicates])
        finally:
            for duplicate in duplicates:
                duplicate.close()
        return self.failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, which returns at once; the model is loaded in the background."""
        await super().startup(sockets)
        assert sockets
        self.tasks.append(asyncio.create_task(self._watch(address(sockets[0])), name="watch"))
        self.loop = asyncio.get_running_loop()
        # A closed terminal drains the server like SIGTERM, unless `nohup` ignores the signal.
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.handle_exit)
        if self.signals:  # received before there was an event loop
            self._drain()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections. Those whose clients do not read their responses are cut off after CLOSE_S."""
        late = asyncio.get_running_loop().call_later(CLOSE_S, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    def _cut_off(self) -> None:
        connections = [*self.server_state.connections]
        if connections:
            fields = {"connections": len(connections)}
            log.warning("cut off connections whose clients do not read", extra={"fields": fields})
        for connection in connections:
            connection.transport.abort()  # wakes the senders, whose requests then end

    async def _watch(self, where: tuple[str, int] | Path) -> None:
        """Show the banner when the model is ready; end the server if loading or, later, the engine fails."""
        try:
            async with self.display.loading(self.engine, self.settings):
                model = await self.state.ready()
        except EngineError as error:
            self._fail(error, 2 if isinstance(error, ModelError | ConfigError) else 1)
            return
        except Exception as error:
            log.exception("the model could not be loaded")
            self._fail(f"the model could not be loaded: {type(error).__name__}", 1)
            return
        seconds = time.monotonic() - self.started_at
        self.display.announce(model.info, self.settings, where, seconds, model.prompts.has_template)
        await self.state.failure.wait()
        self._fail(self.state.failed, 1)

    def _fail(self, reason: object, code: int) -> None:
        if not self.signals:
            self.failure = (with_flags(reason), code)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; end the process at the second (the engine process ends when its socket closes).

        SIGHUP never counts as the second one, since shell and system may each send one.
        """
        if self.signals and sig == signal.SIGHUP:
            return
        self.signals += 1
        if self.signals > 1:
            with contextlib.suppress(OSError):
                if self.settings.uds is not None:
                    self.settings.uds.unlink()
            os._exit(128 + sig)
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if not any(task.get_name() == "drain" for task in self.tasks):
            self.tasks.append(asyncio.create_task(self._finish(), name="drain"))

    async def _finish(self) -> None:
        """Let running requests finish within --drain-seconds; the server still responds meanwhile."""
        fields = {"open_choices": self.state.limits.open_choices, "max_seconds": self.settings.drain_seconds}
        log.info("draining", extra={"fields": fields})
        self.state.begin_drain()
        try:
            async with asyncio.timeout(self.settings.drain_seconds + MARGIN_S):
                await self.state.drained(self.settings.drain_seconds)
        except TimeoutError:
            log.warning("open requests did not end in time")
        finally:
            self.should_exit = True
