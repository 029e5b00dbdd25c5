"""Compiling grammars: the cache's size, cached errors, no delay for other requests, aborts."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import pytest
from msgspec.structs import replace

from engine import ErrorCode, LocalEngine
from engine.grammar import GrammarError, GrammarsBusy
from engine.grammar import compiler as compiler_module
from engine.grammar.grammars import Grammars
from tests.engine.grammars import CONFIG, SCHEMA, deltas, output, request
from tests.live import WAIT_S


class Held:
    """Blocks compilation, of large grammars only or of all, until `go` is set."""

    def __init__(self, monkeypatch, *, large_only: bool = False) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        make = Grammars._make

        def wait(grammars, compiler, asked):
            if not large_only or compiler is grammars.slow:
                self.begun.set()
                assert self.go.wait(WAIT_S)
            return make(grammars, compiler, asked)

        monkeypatch.setattr(Grammars, "_make", wait)


async def test_compiled_grammars_are_kept_within_bytes(monkeypatch):
    monkeypatch.setattr("engine.grammar.compiler.CACHED_BYTES", 3 * (64 << 10) + 10_000)
    monkeypatch.setattr("engine.grammar.grammars.LARGE", 1 << 20)
    grammars = Grammars(CONFIG, 2048)
    for i in (0, 1, 2, 0, 3):
        await grammars.compile(request(1, ("regex", f"a{i}")))
    assert [text for _, text in grammars.quick.known] == ["a2", "a0", "a3"]
    for i in range(3):
        await grammars.compile(request(1, ("choice", json.dumps([f"value {i} {k}" for k in range(3000)]))))
    assert len(grammars.quick.known) == 1
    grammars.close()


async def test_without_the_library_only_requests_with_a_grammar_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "engine.grammar.grammars")
    async with LocalEngine(CONFIG) as engine:
        refused = await deltas(engine, request(1, ("regex", "a+")))
        assert (refused[-1].finish_reason, refused[-1].field) == ("error", "grammar")
        assert refused[-1].error == "grammars need llguidance, which is not installed"
        assert (await output(engine, request(2, None)))[0]


async def test_invalid_grammar_is_compiled_once(monkeypatch):
    tried = []
    grammars = Grammars(CONFIG, 2048)
    compiled = compiler_module.compiled
    monkeypatch.setattr(compiler_module, "compiled", lambda *args: (tried.append(args), compiled(*args))[1])
    for _ in range(3):
        with pytest.raises(GrammarError):
            await grammars.compile(request(1, ("lark", "start: nothing")))
    grammars.close()
    assert len(tried) == 1


async def test_small_grammar_does_not_wait_for_large_ones(monkeypatch):
    held = Held(monkeypatch, large_only=True)
    large = ("choice", json.dumps(["whale" * 1000]))
    grammars = Grammars(CONFIG, 2048)
    waiting = asyncio.create_task(grammars.compile(request(1, large)))
    await asyncio.to_thread(held.begun.wait, WAIT_S)
    matcher = await asyncio.wait_for(grammars.compile(request(2, ("choice", '["a"]'))), WAIT_S)
    assert not matcher.is_accepting and not waiting.done()
    held.go.set()
    await waiting
    grammars.close()


async def test_grammar_that_waits_too_long_is_a_server_error(monkeypatch):
    monkeypatch.setattr("engine.grammar.grammars.WAIT_S", 0.05)
    held = Held(monkeypatch)
    async with LocalEngine(CONFIG) as engine:
        [delta] = await deltas(engine, request(1, SCHEMA))
        assert (delta.finish_reason, delta.code, delta.field) == ("error", ErrorCode.GRAMMARS_BUSY, None)
        held.go.set()


async def test_an_output_that_has_begun_waits_for_its_grammar_without_a_limit(monkeypatch):
    """After a restart of the engine the grammars of all open requests are compiled again."""
    monkeypatch.setattr("engine.grammar.grammars.WAIT_S", 0.05)
    held, grammars = Held(monkeypatch), Grammars(CONFIG, 2048)
    resumed = replace(request(1, ("regex", "(?s:.*)")), output_ids=(65,))
    waiting = asyncio.create_task(grammars.compile(resumed))
    with pytest.raises(GrammarsBusy):
        await grammars.compile(request(2, ("regex", "(?s:.*)")))
    assert not waiting.done()
    held.go.set()
    assert (await waiting).is_accepting
    grammars.close()


async def test_abort_during_compilation_ends_the_request(monkeypatch):
    held = Held(monkeypatch)
    async with LocalEngine(CONFIG) as engine:
        seen = []
        send = engine._receive
        engine._receive = lambda deltas, stats: (seen.extend(deltas), send(deltas, stats))
        task = asyncio.create_task(deltas(engine, request(1, SCHEMA)))
        await asyncio.to_thread(held.begun.wait, WAIT_S)
        free = await output(engine, request(2, None, max_tokens=5, stop_ids=()))
        assert free[1] == "length", "nobody else waits for it"
        engine.abort(1)
        assert [(delta.id, delta.finish_reason) for delta in seen if delta.id == 1] == [(1, "abort")]
        held.go.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await output(engine, request(1, SCHEMA)))[1] == "stop", "the id is free again"
        assert [delta.finish_reason for delta in seen if delta.id == 1 and delta.finish_reason] == ["abort", "stop"]
        assert not engine._loop.grammars._matchers and not engine._loop._compiling


async def test_an_engine_that_closes_does_not_wait_for_a_grammar(monkeypatch):
    held = Held(monkeypatch)
    try:
        async with asyncio.timeout(WAIT_S / 2):
            async with LocalEngine(CONFIG) as engine:
                task = asyncio.create_task(deltas(engine, request(1, SCHEMA)))
                await asyncio.to_thread(held.begun.wait, WAIT_S)
            with pytest.raises(Exception, match="closed"):
                await task
            assert not [each for each in asyncio.all_tasks() if each.get_name() == "grammar"]
    finally:
        held.go.set()


async def test_an_id_is_not_used_twice_while_its_grammar_compiles(monkeypatch):
    held = Held(monkeypatch)
    async with LocalEngine(CONFIG) as engine:
        told = []
        engine._loop.outbox.send = lambda deltas, stats: told.extend(deltas)
        engine._loop.add(request(1, SCHEMA))
        engine._loop.add(request(1, SCHEMA))
        assert [delta.finish_reason for delta in told] == ["error"]
        held.go.set()
