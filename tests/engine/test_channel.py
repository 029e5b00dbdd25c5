"""Channel: messages arrive unchanged, and a dead peer is detected."""

import asyncio
import socket
import threading
import time

import msgspec
import pytest

from engine import channel
from engine.config import EngineConfig
from engine.types import EngineRequest, ErrorCode, RequestStats, SamplingParams, StepStats, TokenDelta, TokenLogprob
from tests.live import WAIT_S


async def pair() -> tuple[channel.Channel, channel.Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    server, engine = channel.Channel(channel.Upward), channel.Channel(channel.Downward)
    await server.open(ours)
    await engine.open(theirs)
    return server, engine, theirs


async def test_messages_arrive_unchanged():
    server, engine, _ = await pair()
    params = SamplingParams(max_tokens=3, seed=2**64 - 1, logit_bias={5: -100.0}, stop_ids=(1, 2), logprobs=2)
    request = EngineRequest(id=7, prompt_ids=(1, 2, 3), params=params, output_ids=(4,), cache_salt="s")
    downward = [
        channel.Load(EngineConfig(model="m", kv_cache_memory=1 << 40), again=True),
        channel.Add(request),
        channel.Abort(7),
    ]
    for message in downward:
        server.send(message)
    assert [await engine.receive() for _ in downward] == downward
    upward = [channel.Alive("loading", 0.25), channel.Started([7]), channel.Failed("ModelError", "no weights")]
    for message in upward:
        engine.send(message)
    assert [await server.receive() for _ in upward] == upward


async def test_all_that_has_come_is_read_at_once_also_a_prompt_of_many_reads(monkeypatch):
    monkeypatch.setattr(channel, "REST_S", WAIT_S)
    ours, theirs = socket.socketpair()
    engine = channel.Channel(channel.Downward)
    await engine.open(theirs)
    prompt = tuple(range(100_000, 1_000_000))  # 4.5 MB
    request = EngineRequest(id=1, prompt_ids=prompt, params=SamplingParams(max_tokens=1))
    bodies = [msgspec.msgpack.encode(message) for message in (channel.Abort(2), channel.Add(request))]
    frames = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    received: list[object] = []

    async def listen() -> None:
        while (message := await engine.receive()) is not None:
            received.append(message)

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)

    def send() -> None:
        ours.sendall(frames[:1000])
        time.sleep(0.05)
        ours.sendall(frames[1000:])

    sending = threading.Thread(target=send)
    sending.start()
    while not received:
        await engine.read_on()
    assert received == [channel.Abort(2), channel.Add(request)]
    await engine.read_on()  # with nothing to read
    sending.join()
    ours.close()
    await asyncio.wait_for(listening, WAIT_S)


def test_deltas_survive_packing_into_columns():
    entry = TokenLogprob(-0.1234567890123456789, (1, 2), (-0.1, -2.5))
    deltas = [
        TokenDelta(id=1, token_ids=(5,)),
        TokenDelta(id=2, token_ids=(6, 7), logprobs=(entry, entry)),
        TokenDelta(id=3, finish_reason="error", error="why", code=ErrorCode.GRAMMARS_BUSY),
        TokenDelta(id=5, finish_reason="stop", embedding=bytes(range(256))),
        TokenDelta(
            id=4,
            token_ids=(8,),
            finish_reason="stop",
            stats=RequestStats(prompt_tokens=3, cached_tokens=1, output_tokens=2, arrived=0.5),
        ),
    ]
    stats = StepStats(
        step=1,
        time=2.0,
        rows=((1, 1), (2, 2)),
        budget=64,
        prompt_tokens=2,
        decode_tokens=1,
        running=2,
        waiting=0,
        blocks_free=1,
        blocks_cached=2,
        blocks_held=3,
        blocks_total=6,
        preempted=0,
        prefix_queries=0,
        prefix_hits=0,
        seconds={"forward": 0.1},
    )
    decoder = msgspec.msgpack.Decoder(channel.Upward)
    tokens = decoder.decode(msgspec.msgpack.encode(channel.pack(deltas, stats)))
    assert channel.unpack(tokens) == deltas
    assert tokens.stats == stats


async def test_dead_peer_is_end_of_file_even_within_a_frame():
    server, _, theirs = await pair()
    theirs.sendall((100).to_bytes(4, "little") + b"abc")
    theirs.close()
    assert await server.receive() is None


async def test_malformed_frame_is_refused():
    server, _, theirs = await pair()
    body = msgspec.msgpack.encode(["Nonsense", 1])
    theirs.sendall(len(body).to_bytes(4, "little") + body)
    with pytest.raises(msgspec.ValidationError):
        await server.receive()


async def test_sender_waits_while_its_peer_does_not_read():
    server, engine, _ = await pair()
    big = channel.Failed("ModelError", "x" * (channel.HIGH_WATER + (4 << 20)))
    engine.send(big)
    waiting = asyncio.create_task(engine.drained())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert await server.receive() == big
    await asyncio.wait_for(waiting, WAIT_S)
