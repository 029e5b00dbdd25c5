"""The gate: whatever a grammar does to the library that compiles it, one request is refused, and callers take turns."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from server.grammar import checker as gate_module
from server.grammar.checker import Gate
from server.grammar.checker_worker import TOO_LARGE, TOO_LONG, Verdict
from server.grammar.schemas import Grammar
from server.http.errors import ApiError
from tests.live import alive
from tests.server.grammar.shapes import DEEP, rule_chain


async def verdict(gate: Gate, kind: str, text: str, caller: str = "a") -> str | None:
    """What is wrong with a grammar; None: nothing."""
    try:
        await gate.check(Grammar(kind, text, "f"), caller)
    except ApiError as error:
        assert (error.status, error.param) == (400, "f"), error
        return error.message
    return None


def slow(number: int) -> str:
    """A grammar that takes longer than the quick ones may, and is like no other."""
    return rule_chain("{}+", "T", 1200 + number)


@pytest.fixture
async def gate():
    gate = Gate()
    yield gate
    await gate.close()


@pytest.mark.parametrize("name", DEEP)
async def test_a_deep_grammar_costs_its_own_request_at_most(name, gate):
    kind, make = DEEP[name]
    await verdict(gate, "regex", "a")
    pid = gate.checker._process.pid
    found = await verdict(gate, kind, make())
    assert found is None or "'f'" in found
    assert await verdict(gate, "regex", "[a-z]+") is None
    assert gate.checker._process.pid == pid, "the checker's process has died"


async def test_what_takes_too_long_is_refused_once(monkeypatch, gate):
    monkeypatch.setattr(gate_module, "SLOW_S", 0.1)
    checked = []
    check = gate.checker.check
    gate.checker.check = lambda *args: (checked.append(args[2]), check(*args))[1]
    for _ in range(2):
        assert TOO_LONG in await verdict(gate, "lark", slow(3000))
    assert checked == [gate_module.QUICK_S, 0.1]


async def test_what_fills_the_memory_is_refused(monkeypatch, gate):
    monkeypatch.setattr(gate_module, "SLOW_S", 20.0)
    code = "import server.grammar.checker_worker as checker; checker.MEMORY_BYTES = 1 << 20; checker.main()"

    def with_little_memory(module: str, fd: int, *arguments: str) -> subprocess.Popen:
        assert module == "server.grammar.checker_worker"
        command = [sys.executable, "-c", code, str(fd), str(os.getpid()), *arguments]
        return subprocess.Popen(command, pass_fds=[fd], cwd=Path(__file__).parents[3])

    monkeypatch.setattr(gate_module, "spawn", with_little_memory)
    assert TOO_LARGE in await verdict(gate, "lark", slow(3000))


async def test_quick_grammars_do_not_wait_for_slow_ones(gate):
    order = []

    async def check(name: str, kind: str, text: str, caller: str) -> None:
        await verdict(gate, kind, text, caller)
        order.append(name)

    bombs = [asyncio.create_task(check(f"bomb {i}", "lark", slow(i), "attacker")) for i in range(10)]
    await asyncio.sleep(0)
    mine = asyncio.create_task(check("mine", "regex", "[a-z]+", "somebody"))
    own = asyncio.create_task(check("own", "regex", "[a-z]*", "attacker"))
    await asyncio.gather(mine, own)
    assert order[0] == "mine", "other callers take turns with whoever sends many"
    assert len(order) <= 5, "and one's own quick one does not wait until one's slow ones are done"
    for bomb in bombs:
        bomb.cancel()
    await asyncio.gather(*bombs, return_exceptions=True)


async def test_a_killed_checker_is_replaced_and_the_request_is_answered(gate):
    assert await verdict(gate, "regex", "a") is None
    first = gate.checker._process.pid
    waiting = asyncio.create_task(verdict(gate, "lark", slow(500)))
    await asyncio.sleep(0.05)
    os.kill(first, signal.SIGKILL)
    assert await waiting in (None, f"Invalid 'f': {TOO_LONG}.")
    assert gate.checker._process.pid != first


async def test_a_checker_that_cannot_be_started_is_no_fault_of_the_client(monkeypatch, gate):
    def refuse(*args):
        raise OSError("no processes left")

    monkeypatch.setattr(gate_module, "spawn", refuse)
    with pytest.raises(ApiError) as caught:
        await gate.check(Grammar("regex", "a", "f"), "a")
    assert (caught.value.status, caught.value.code) == (503, "grammars_unavailable")


async def test_whoever_waits_too_long_is_told_to_come_back(monkeypatch, gate):
    monkeypatch.setattr(gate_module, "WAIT_S", 0.01)
    with pytest.raises(ApiError) as caught:
        await gate.check(Grammar("lark", slow(0), "f"), "a")
    assert (caught.value.status, caught.value.code) == (503, "grammars_busy")
    assert caught.value.retry_after


async def test_the_check_of_a_grammar_ends_with_the_last_who_waits_for_it(gate):
    tasks = [asyncio.create_task(verdict(gate, "lark", slow(1))) for _ in range(2)]
    behind = asyncio.create_task(verdict(gate, "lark", slow(2)))
    await asyncio.sleep(0.02)
    tasks[0].cancel()
    await asyncio.sleep(0)
    assert gate._checking, "somebody else waits for it"
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await behind
    assert not gate._checking


async def test_the_checker_ends_with_its_parent(gate, monkeypatch):
    monkeypatch.setenv("PEQUOD_API_KEY", "canary")
    await verdict(gate, "regex", "a")
    pid = gate.checker._process.pid
    status = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"PEQUOD_API_KEY" not in status
    await gate.close()
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Waiting:
    """A checker whose verdicts come when the test says so."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[Verdict]] = []

    async def check(self, kind: str, text: str, cpu_s: float) -> Verdict:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    async def close(self) -> None:
        pass


async def test_who_hangs_up_keeps_its_turn_until_the_fork_has_ended(gate):
    await verdict(gate, "regex", "a")
    checker = gate.checker
    checker._writer, real = SimpleNamespace(write=lambda data: None), checker._writer
    checking = asyncio.create_task(checker.check("regex", "b", 1.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    [waiting] = checker._pending.values()
    checking.cancel()
    await asyncio.sleep(0.01)
    assert not checking.done(), "the fork still runs"
    waiting.set_result(Verdict(1, None, 0.0, "done"))
    with pytest.raises(asyncio.CancelledError):
        await checking
    checker._writer = real


async def test_who_comes_as_the_last_one_hangs_up_begins_anew():
    gate = Gate()
    gate.checker = Waiting()
    grammar = Grammar("regex", "a", "f")
    first = asyncio.create_task(gate.check(grammar, "a"))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.create_task(gate.check(grammar, "a"))
    await asyncio.sleep(0.01)
    gate.checker.asked[-1].set_result(Verdict(1, None, 0.5, "done"))
    assert (await second).compile_s == 0.5
    assert first.cancelled()


async def test_a_check_that_is_killed_is_tried_again_and_not_remembered_as_bad():
    gate = Gate()
    gate.checker = Waiting()
    grammar = Grammar("regex", "a", "f")
    for ends, status in ((("killed", "killed"), 503), (("killed", "done"), None), ((), None)):
        checking = asyncio.create_task(gate.check(grammar, "a"))
        for ended in ends:
            await asyncio.sleep(0.01)
            problem = TOO_LARGE if ended == "killed" else None
            gate.checker.asked[-1].set_result(Verdict(1, problem, 0.0, ended))
        if status is None:
            assert await checking
        else:
            with pytest.raises(ApiError) as refused:
                await checking
            assert refused.value.status == status
