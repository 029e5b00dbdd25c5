"""LocalEngine: the engine in this process."""

from __future__ import annotations

import asyncio

from .client import Client
from .config import EngineConfig, check
from .loop import EngineLoop
from .step_thread import ModelThread
from .types import EngineDied, EngineError, EngineRequest, StepStats, TokenDelta


class LocalEngine(Client):
    """The engine on the caller's event loop, for tests and offline use. Use as `async with LocalEngine(config)`.

    On CUDA each step blocks that loop, and the engine's device must stay the current one of its thread.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.config = check(config)
        self._model_thread = ModelThread()
        self._loop: EngineLoop | None = None

    async def __aenter__(self) -> LocalEngine:
        await self.start()
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> None:
        from .build import assemble

        self.status.phase = "loading"
        try:
            self._loop, info = await assemble(
                self.config, _LocalOutbox(self), self._model_thread, self._progress, again=False
            )
            self.info = info
            self.status.phase, self.status.share = "ready", 1.0
            self._settled.set()
            for entry in list(self._open.values()):
                self._send(entry)
            await self._loop.run()
        except EngineError as error:
            self._fail(error)
        except Exception as error:
            self._fail(EngineDied(f"the engine failed: {type(error).__name__}: {error}"))
            raise

    def _progress(self, share: float) -> None:
        self.status.share = share

    def _send_add(self, request: EngineRequest) -> None:
        assert self._loop is not None
        self._loop.add(request)

    def _send_abort(self, request_id: int) -> None:
        assert self._loop is not None
        self._loop.abort(request_id)

    async def close(self) -> None:
        await super().close()
        await self._model_thread.close()


class _LocalOutbox:
    def __init__(self, client: LocalEngine) -> None:
        self._client = client

    def started(self, ids: list[int]) -> None:
        """Do nothing: only a supervisor, which outlives the engine, needs this."""

    def send(self, deltas: list[TokenDelta], stats: StepStats | None) -> None:
        self._client._receive(deltas, stats)

    async def drained(self) -> None:
        # Readers share this event loop. Let them run once per step, or a burst of steps would starve them.
        await asyncio.sleep(0)
