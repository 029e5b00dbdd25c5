"""Measures what it costs the server to stream tokens, with an engine that costs it nothing.

    python -m benchmarks.streams --streams 64 --interval-ms 30,2 --json benchmarks/results/streams.json

The engine is a process that sends one token of every open request at each interval, in the same messages as ours, and
computes nothing. The clients are bare sockets that count events. So what is left is the server: HTTP, detokenization,
events and metrics. Each round measures it and, as the limit of the HTTP library, a bare ASGI app that writes the same
bytes to as many clients at the same interval. The server has the first of this process's processors and everything else
the second.

`us_per_event` is CPU time of the server's process per event, in microseconds. A server that has less time than an
event per token needs puts several tokens into one: `tokens_per_event`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import uvicorn
import uvloop
from msgspec.structs import replace

from engine import EngineInfo, EngineRequest, RequestStats, StepStats, TokenDelta, channel
from engine.client import Client
from server.app import build_app
from server.http.connection import Connection
from server.settings import Settings
from tests.fakes import INFO, model_folder

from .traffic import about, write

QUESTION = {"role": "user", "content": "Count to a thousand and tell me a story about it."}
READY_S = 60


class Metronome(Client):
    """An engine in another process that sends each request its prompt again and again, a token per interval."""

    def __init__(self, interval_s: float) -> None:
        super().__init__()
        self.interval_s = interval_s

    async def _run(self) -> None:
        ours, theirs = socket.socketpair()
        process = multiprocessing.get_context("fork").Process(
            target=tick, args=(ours, theirs, self.interval_s), daemon=True
        )
        process.start()
        theirs.close()
        self.channel = channel.Channel(channel.Upward)
        await self.channel.open(ours)
        self.info: EngineInfo | None = replace(INFO, max_seqs=4096, max_len=1 << 20, num_blocks=1 << 20)
        self.status.phase = "ready"
        self._settled.set()
        while isinstance(message := await self.channel.receive(), channel.Tokens):
            self._receive(channel.unpack(message), message.stats)

    def _send_add(self, request: EngineRequest) -> None:
        self.channel.send(channel.Add(request))

    def _send_abort(self, request_id: int) -> None:
        self.channel.send(channel.Abort(request_id))


def tick(theirs: socket.socket, sock: socket.socket, interval_s: float) -> None:
    """Send a token of each request at each interval, until the other side closes."""
    theirs.close()  # this process has a copy, which would keep the other side open
    on_processor(1)
    asyncio.run(_tick(sock, interval_s))


async def _tick(sock: socket.socket, interval_s: float) -> None:
    link = channel.Channel(channel.Downward)
    await link.open(sock)
    requests: dict[int, EngineRequest] = {}
    counts: dict[int, int] = {}

    async def read() -> None:
        while (message := await link.receive()) is not None:
            if isinstance(message, channel.Add):
                requests[message.request.id], counts[message.request.id] = message.request, 0
            elif isinstance(message, channel.Abort):
                requests.pop(message.id, None)

    reading = asyncio.create_task(read())
    due, step = time.monotonic(), 0
    while not reading.done():
        due = max(due + interval_s, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        deltas = []
        for request in list(requests.values()):
            deltas.append(next_token(request, counts[request.id]))
            counts[request.id] += 1
            if deltas[-1].finish_reason:
                del requests[request.id]
        if deltas:
            step += 1
            link.send(channel.pack(deltas, stats_of(step, [delta.id for delta in deltas])))
            await link.drained()


def next_token(request: EngineRequest, count: int) -> TokenDelta:
    """Return the token after the first `count`."""
    ids, now = request.prompt_ids, time.monotonic()
    is_last = count + 1 == request.params.max_tokens
    stats = RequestStats(
        prompt_tokens=len(ids), cached_tokens=0, output_tokens=count + 1, arrived=now, scheduled=now, first_token=now,
        last_token=now,
    )  # fmt: skip
    return TokenDelta(
        id=request.id,
        token_ids=(ids[count % len(ids)],),
        finish_reason="length" if is_last else None,
        stats=stats if is_last or not count else None,
    )


def stats_of(step: int, ids: list[int]) -> StepStats:
    """Return the statistics of a step that has computed one token of each request."""
    return StepStats(
        step=step, time=time.time(), rows=tuple((id, 1) for id in ids), budget=8192, prompt_tokens=0,
        decode_tokens=len(ids), output_tokens=len(ids), running=len(ids), waiting=0, blocks_free=1, blocks_cached=0,
        blocks_held=1, blocks_total=2, preempted=0, prefix_queries=0, prefix_hits=0,
        seconds={"forward": 0.001, "sample": 0.0001},
    )  # fmt: skip


def on_processor(number: int) -> None:
    """Keep this process on one of the processors that it may use, if there are several."""
    usable = sorted(os.sched_getaffinity(0) | set(range(os.cpu_count() or 1)))
    os.sched_setaffinity(0, {usable[number % len(usable)]})


def run_server(port: int, interval_s: float, _: bytes) -> None:
    """Run the app of `pequod serve` on the metronome."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(model=str(model_folder(Path(folder) / "model")), served_model_name=["fake"])
        listen(build_app(settings, Metronome(interval_s)), port, Connection)


def run_bare(port: int, interval_s: float, event: bytes) -> None:
    """Run an ASGI app that writes `event` as often as the request's max_tokens says."""
    waiters: list[asyncio.Future[None]] = []

    async def metronome() -> None:
        while True:
            await asyncio.sleep(interval_s)
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            waiters.clear()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            while (message := await receive())["type"] == "lifespan.startup":
                app.ticks = asyncio.create_task(metronome())  # type: ignore[attr-defined]
                await send({"type": "lifespan.startup.complete"})
            await send({"type": message["type"] + ".complete"})
            return
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(json.loads(message["body"])["max_tokens"] if message["body"] else 0):
            waiters.append(asyncio.get_running_loop().create_future())
            await waiters[-1]
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    listen(app, port, "httptools")


def listen(app: Any, port: int, http: Any) -> None:
    on_processor(0)
    config = uvicorn.Config(app, port=port, loop="uvloop", http=http, lifespan="on", log_config=None, access_log=False)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run()


class Reader(asyncio.Protocol):
    """Sends one request and counts the events of its response."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.is_done = asyncio.get_running_loop().create_future()
        self.num_events = 0
        self.first_event = b""
        self.times: list[float] = []
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        transport.write(f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.num_events += data.count(b"data: {")
        if not self.first_event and (start := data.find(b'data: {"id"')) >= 0 and b'"content":"' in data[start:]:
            self.first_event = data[start : data.index(b"\n\n", start) + 2]
        self._rest = (self._rest + data)[-64:]
        if b"[DONE]" in self._rest and not self.is_done.done():
            self.is_done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_done.done():
            self.is_done.set_exception(ConnectionError(f"a stream was cut off: {self._rest!r}"))


async def read(port: int, streams: int, tokens: int) -> list[Reader]:
    """Read streams until all have ended."""
    sent = {"model": "fake", "messages": [QUESTION], "max_tokens": tokens, "stream": True}
    body, loop = json.dumps(sent).encode(), asyncio.get_running_loop()
    pairs = [await loop.create_connection(lambda: Reader(body), "127.0.0.1", port) for _ in range(streams)]
    await asyncio.gather(*(reader.is_done for _, reader in pairs))
    for transport, _ in pairs:
        transport.close()
    return [reader for _, reader in pairs]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process without its children."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def reach(port: int) -> None:
    """Wait until a short stream is answered."""
    end = time.monotonic() + READY_S
    while True:
        try:
            await read(port, 1, 2)
            return
        except OSError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.1)


def measure(
    target: Callable[[int, float, bytes], None], streams: int, tokens: int, interval_s: float, event: bytes
) -> tuple[dict[str, float], bytes]:
    """Start a server, read its streams, and return what they cost it and one of its events."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=target, args=(port, interval_s, event))
    process.start()
    try:
        return uvloop.run(_measure(process, port, streams, tokens))
    finally:
        os.kill(process.pid or 0, signal.SIGINT)
        process.join(10)
        process.kill()


async def _measure(process: BaseProcess, port: int, streams: int, tokens: int) -> tuple[dict[str, float], bytes]:
    await reach(port)
    pid = process.pid or 0
    before = cpu_seconds(pid)
    readers = await read(port, streams, tokens)
    used = cpu_seconds(pid) - before
    began = min(reader.times[0] for reader in readers)
    seconds = max(reader.times[-1] for reader in readers) - began
    events = sum(reader.num_events for reader in readers)
    found = {
        "tokens_per_s": streams * tokens / seconds,
        "tokens_per_event": streams * tokens / events,
        "us_per_event": used / events * 1e6,
        "us_per_token": used / (streams * tokens) * 1e6,
    }
    return found, readers[0].first_event


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--interval-ms", default="30,2", help="time per token of a stream, comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    header = about()  # names all processors
    on_processor(1)
    results = []
    for interval in map(float, args.interval_ms.split(",")):
        ours, bare = [], []
        for _ in range(args.rounds):
            found, event = measure(run_server, args.streams, args.tokens, interval / 1e3, b"")
            ours.append(found)
            bare.append(measure(run_bare, args.streams, args.tokens, interval / 1e3, event)[0])
        middle = {name: statistics.median(each[name] for each in ours) for name in ours[0]}
        limit = statistics.median(each["us_per_event"] for each in bare)
        ratio = statistics.median(a["us_per_event"] / b["us_per_event"] for a, b in zip(ours, bare, strict=True))
        print(
            f"{args.streams} streams, a token each {interval:g} ms: {middle['tokens_per_s']:,.0f} tokens/s,"
            f" {middle['tokens_per_event']:.2f} per event, {middle['us_per_event']:.0f} µs of CPU time per event,"
            f" {ratio:.1f} times that of a bare app ({limit:.0f} µs)"
        )
        results.append({"interval_ms": interval, "rounds": ours, "bare": bare, **middle, "times_bare": ratio})
    write({**header, "streams": args.streams, "tokens": args.tokens, "results": results}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
