"""The engine's process: `python -m engine.worker FD PARENT`. Only ProcessEngine starts it.

It reads its socket from the start, also while it loads: end of file means that the server has died, and this process
then ends.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import time
import traceback
from importlib import import_module

from . import channel, types
from .kernels.triton_files import begin_to_hash
from .loop import EngineLoop
from .process import begin_child, freeze
from .step_thread import ModelThread
from .types import EngineError, StepStats, TokenDelta

HEARTBEAT_S = 0.5

# Makes torch request huge pages for large tensors: a gigabyte of weights then causes 500 page faults instead of
# 260,000, which took longer than packing the weights. torch reads it when it is imported.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class _Outbox:
    def __init__(self, pipe: channel.Channel) -> None:
        self._pipe = pipe

    def started(self, ids: list[int]) -> None:
        if ids:
            self._pipe.send(channel.Started(ids))

    def send(self, deltas: list[TokenDelta], stats: StepStats | None) -> None:
        self._pipe.send(channel.pack(deltas, stats))

    async def drained(self) -> None:
        await self._pipe.drained()
        await self._pipe.read_on()


class _Worker:
    def __init__(self, pipe: channel.Channel) -> None:
        self.pipe = pipe
        self.model_thread = ModelThread()
        self.loop: EngineLoop | None = None
        self.share = 0.0

    async def main(self) -> int:
        gc.disable()  # imports and loading leave no garbage; collections took a tenth of the start
        # Importing torch takes over a second, and does not depend on the config.
        self.imported = self.model_thread.call(import_module, "engine.build")
        load = await self.pipe.receive()
        if load is None:
            return 0  # the server died before it sent a config
        assert isinstance(load, channel.Load)
        if load.config.device != "cpu":
            begin_to_hash()  # while torch is imported
        tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]
        engine = asyncio.create_task(self._engine(load))
        try:
            await engine
        except EngineError as error:
            # The closest base class that the server knows.
            kind = next(cls.__name__ for cls in type(error).__mro__ if hasattr(types, cls.__name__))
            self.pipe.send(channel.Failed(kind, str(error)))
            await asyncio.sleep(0)
            self.pipe.close()
            return 2
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            for task in tasks:
                task.cancel()
        return 0

    async def _engine(self, load: channel.Load) -> None:
        await self.imported  # raises why it failed; a second import of the module would raise another error
        from .build import assemble

        outbox = _Outbox(self.pipe)
        engine, info = await assemble(load.config, outbox, self.model_thread, self._progress, again=load.again)
        freeze()
        self.loop = engine
        self.pipe.send(channel.Ready(info, engine.scheduler.config))
        await engine.run()

    def _progress(self, share: float) -> None:
        self.share = share

    async def _beat(self) -> None:
        while True:
            stalled_s = self.loop.stalled_s() if self.loop else 0.0
            self.pipe.send(channel.Alive("ready" if self.loop else "loading", self.share, stalled_s))
            await asyncio.sleep(HEARTBEAT_S)

    async def _listen(self) -> None:
        try:
            await self._receive_all()
        except Exception:
            traceback.print_exc()
            os._exit(1)  # an engine that no longer listens must not look alive
        os._exit(0)  # the server died or closed: what the model thread still computes is not needed

    async def _receive_all(self) -> None:
        while (message := await self.pipe.receive()) is not None:
            assert self.loop is not None, "a request came before the engine was ready"
            match message:
                case channel.Add():
                    self.loop.add(message.request)
                case channel.Abort():
                    self.loop.abort(message.id)


def main() -> None:
    fd, _ = begin_child(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    async def run() -> int:
        pipe = channel.Channel(channel.Downward)
        await pipe.open(socket.socket(fileno=fd))
        return await _Worker(pipe).main()

    code = asyncio.run(run())
    time.sleep(0)
    os._exit(code)  # a failed process must not wait for a model thread that hangs


if __name__ == "__main__":
    main()
