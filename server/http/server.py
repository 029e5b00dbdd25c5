"""GracefulServer: uvicorn whose first signal lets running answers end, and whose second one does not wait."""

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

ACCEPTS_PER_TURN = 16
KEEP_ALIVE_S = 30
CLOSE_S = 5  # for connections that linger after the drain has ended every stream
MARGIN_S = 10  # over --drain-seconds, for streams to end themselves; then they are left

log = logging.getLogger("pequod")


def address(listener: socket.socket) -> tuple[str, int] | Path:
    """Where a listening socket is: host and port, or the path of a Unix socket."""
    name: Any = listener.getsockname()
    return Path(name) if listener.family == socket.AF_UNIX else (name[0], name[1])


class Display(Protocol):
    """Where the server shows that the model loads and that it is ready; the module cli/banner.py is one."""

    def loading(self, engine: Engine, settings: Settings) -> AbstractAsyncContextManager[None]:
        """Show how far the model is loaded, until the context ends."""

    def announce(
        self,
        info: EngineInfo,
        settings: Settings,
        where: tuple[str, int] | Path,
        seconds: float,
        has_template: bool,
    ) -> None:
        """Show that the server is ready, and at which address."""


class GracefulServer(uvicorn.Server):
    """Serves an app on a listening socket; `run` gives the exit code.

    0 after a drain, 2 when the model or a setting turned out to be impossible, 1 when the engine died for good.
    """

    def __init__(
        self,
        app: FastAPI,
        engine: Engine,
        settings: Settings,
        began: float,
        display: Display,
        *,
        most_connections: int | None = None,
    ) -> None:
        """`began`: when the process was started, time.monotonic(). `most_connections`: at a time; None: no bound."""
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
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
                limit_concurrency=most_connections,  # Connection takes it for connections alone
            )
        )
        self.state = app.state.pequod
        self.engine = engine
        self.settings = settings
        self.began = began
        self.display = display
        self.failure: tuple[str, int] | None = None  # sentence and exit code
        self.signals = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.tasks: list[asyncio.Task[None]] = []

    def serve_on(self, listener: socket.socket) -> tuple[str, int] | None:
        """Serve until a signal or a failure; gives the failure's sentence and exit code."""
        # The event loop accepts one connection of a socket in each of its turns, which are long when much is streamed.
        # Under the same socket's further descriptors it accepts as many more.
        doubles = [listener.dup() for _ in range(ACCEPTS_PER_TURN - 1)]
        try:
            self.run(sockets=[listener, *doubles])
        finally:
            for double in doubles:
                double.close()
        return self.failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, which returns at once, and load the model behind it."""
        await super().startup(sockets)
        assert sockets
        self.tasks.append(asyncio.create_task(self._watch(address(sockets[0])), name="watch"))
        self.loop = asyncio.get_running_loop()
        # A terminal that is closed drains the server like SIGTERM, unless `nohup` has it ignored.
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.handle_hang_up)
        if self.signals:  # it came before there was a loop to drain on
            self._drain()

    async def _watch(self, where: tuple[str, int] | Path) -> None:
        """Show the banner when the model answers; end the server when it never will."""
        try:
            async with self.display.loading(self.engine, self.settings):
                model = await self.state.ready()
        except EngineError as error:
            self._give_up(error, 2 if isinstance(error, ModelError | ConfigError) else 1)
            return
        except Exception as error:
            log.exception("the model could not be loaded")
            self._give_up(f"the model could not be loaded: {type(error).__name__}", 1)
            return
        has_template = model.prompts.has_template
        self.display.announce(model.info, self.settings, where, time.monotonic() - self.began, has_template)
        await self.state.failure.wait()
        self._give_up(self.state.failed, 1)

    def _give_up(self, reason: object, code: int) -> None:
        if not self.signals:
            self.failure = (with_flags(reason), code)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the second ends the process (the engine's ends when its socket closes)."""
        self.signals += 1
        if self.signals > 1:
            with contextlib.suppress(OSError):
                if self.settings.uds is not None:
                    self.settings.uds.unlink()
            os._exit(128 + sig)
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._drain)

    def handle_hang_up(self, sig: int, frame: FrameType | None) -> None:
        """The first one drains. Shell and system may each send one, so that a further one does not end the process."""
        if not self.signals:
            self.handle_exit(sig, frame)

    def _drain(self) -> None:
        if not any(task.get_name() == "drain" for task in self.tasks):
            self.tasks.append(asyncio.create_task(self._finish(), name="drain"))

    async def _finish(self) -> None:
        """Let the running answers end, within --drain-seconds; the port answers meanwhile."""
        fields = {"open_answers": self.state.limits.open_choices, "at_most_seconds": self.settings.drain_seconds}
        log.info("draining", extra={"fields": fields})
        self.state.begin_drain()
        try:
            async with asyncio.timeout(self.settings.drain_seconds + MARGIN_S):
                await self.state.drained(self.settings.drain_seconds)
        except TimeoutError:
            log.warning("open answers did not end in time")
        finally:
            self.should_exit = True
