"""The gate: a grammar that harms the library affects only its own request, and callers take turns."""

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
    """Return the error message about a grammar; None if it is valid."""
    try:
        await gate.check(Grammar(kind, text, "f"), caller)
    except ApiError as error:
        assert (error.status, error.param) == (400, "f"), error
        return error.message
    return None


def slow(number: int) -> str:
    """Return a grammar that exceeds QUICK_S, different for each number."""
    return rule_chain("{}+", "T", 1200 + number)


@pytest.fixture
async def gate():
    gate = Gate()
    yield gate
    await gate.checker.close()


@pytest.mark.parametrize("name", DEEP)
async def test_deep_grammar_fails_at_most_its_own_request(name, gate):
    kind, make = DEEP[name]
    await verdict(gate, "regex", "a")
    pid = gate.checker._process.pid
    found = await verdict(gate, kind, make())
    assert found is None or "'f'" in found
    assert await verdict(gate, "regex", "[a-z]+") is None
    assert gate.checker._process.pid == pid, "the checker's process has died"


async def test_grammar_that_fails_after_its_forced_beginning_is_refused_before_the_engine_has_it(monkeypatch, gate):
    """The engine would take half a second for it between two steps, each time."""
    monkeypatch.setattr(gate_module, "SLOW_S", 60.0)  # on a slow machine it would be refused for its time
    for text in (
        DEEP["repeated rules"][1](),
        rule_chain("({})+", length=300),
        'start: "b" r0\n' + rule_chain("({})+", length=300)[10:],
    ):
        assert "items" in (await verdict(gate, "lark", text) or "")
    assert await verdict(gate, "lark", rule_chain("({})+", length=3)) is None


async def test_the_error_of_a_regular_expression_has_the_librarys_reason(gate):
    for kind, text in (
        ("regex", "a(b"),
        ("lark", "start: /a(b/"),
        ("json_schema", '{"type": "string", "pattern": "a(b"}'),
    ):
        assert "unclosed group" in (await verdict(gate, kind, text) or "")


async def test_grammar_that_takes_too_long_is_checked_once(monkeypatch, gate):
    monkeypatch.setattr(gate_module, "SLOW_S", 0.1)
    checked = []
    check = gate.checker.check
    gate.checker.check = lambda *args: (checked.append(args[2]), check(*args))[1]
    for _ in range(2):
        assert TOO_LONG in await verdict(gate, "lark", slow(3000))
    assert checked == [gate_module.QUICK_S, 0.1]


async def test_grammar_that_fills_the_memory_is_refused(monkeypatch, gate):
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
    mine = asyncio.create_task(check("mine", "regex", "[a-z]+", "another"))
    own = asyncio.create_task(check("own", "regex", "[a-z]*", "attacker"))
    await asyncio.gather(mine, own)
    assert order[0] == "mine", "other callers take turns with one that sends many"
    # Nor does a caller's own quick grammar wait for all of its slow ones: each of them is first checked as a quick one.
    assert "bomb 9" not in order
    for bomb in bombs:
        bomb.cancel()
    await asyncio.gather(*bombs, return_exceptions=True)


async def test_killed_checker_is_restarted_and_the_grammar_checked_again(gate):
    assert await verdict(gate, "regex", "a") is None
    first = gate.checker._process.pid
    waiting = asyncio.create_task(verdict(gate, "lark", slow(500)))
    await asyncio.sleep(0.05)
    os.kill(first, signal.SIGKILL)
    assert await waiting in (None, f"Invalid 'f': {TOO_LONG}.")
    assert gate.checker._process.pid != first


async def test_checker_that_cannot_be_started_is_a_503(monkeypatch, gate):
    def refuse(*args):
        raise OSError("no processes left")

    monkeypatch.setattr(gate_module, "spawn", refuse)
    with pytest.raises(ApiError) as caught:
        await gate.check(Grammar("regex", "a", "f"), "a")
    assert (caught.value.status, caught.value.code) == (503, "grammars_unavailable")


async def test_long_wait_is_a_503_with_retry_after(monkeypatch, gate):
    monkeypatch.setattr(gate_module, "WAIT_S", 0.01)
    with pytest.raises(ApiError) as caught:
        await gate.check(Grammar("lark", slow(0), "f"), "a")
    assert (caught.value.status, caught.value.code) == (503, "grammars_busy")
    assert caught.value.retry_after


async def test_check_is_cancelled_when_its_last_waiter_disconnects(gate):
    tasks = [asyncio.create_task(verdict(gate, "lark", slow(1))) for _ in range(2)]
    following = asyncio.create_task(verdict(gate, "lark", slow(2)))
    await asyncio.sleep(0.02)
    tasks[0].cancel()
    await asyncio.sleep(0)
    assert gate._checking, "another request waits for it"
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await following
    assert not gate._checking


async def test_closed_gate_ends_the_checker_which_has_no_secrets(gate, monkeypatch):
    monkeypatch.setenv("PEQUOD_API_KEY", "canary")
    await verdict(gate, "regex", "a")
    pid = gate.checker._process.pid
    status = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"PEQUOD_API_KEY" not in status
    await gate.checker.close()
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Waiting:
    """A checker whose verdicts the test sets."""

    def __init__(self) -> None:
        self.verdicts: list[asyncio.Future[Verdict]] = []

    async def check(self, kind: str, text: str, cpu_s: float) -> Verdict:
        self.verdicts.append(asyncio.get_running_loop().create_future())
        return await self.verdicts[-1]

    async def close(self) -> None:
        pass


async def test_cancelled_check_keeps_its_turn_until_the_fork_has_ended(gate):
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


async def test_request_after_the_last_waiter_left_starts_a_new_check():
    gate = Gate()
    gate.checker = Waiting()
    grammar = Grammar("regex", "a", "f")
    first = asyncio.create_task(gate.check(grammar, "a"))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.create_task(gate.check(grammar, "a"))
    await asyncio.sleep(0.01)
    gate.checker.verdicts[-1].set_result(Verdict(1, None, 0.5, "done"))
    assert (await second).compile_s == 0.5
    assert first.cancelled()


async def test_killed_check_is_retried_and_its_verdict_not_cached():
    gate = Gate()
    gate.checker = Waiting()
    grammar = Grammar("regex", "a", "f")
    for ends, status in ((("killed", "killed"), 503), (("killed", "done"), None), ((), None)):
        checking = asyncio.create_task(gate.check(grammar, "a"))
        for ended in ends:
            await asyncio.sleep(0.01)
            problem = TOO_LARGE if ended == "killed" else None
            gate.checker.verdicts[-1].set_result(Verdict(1, problem, 0.0, ended))
        if status is None:
            assert await checking
        else:
            with pytest.raises(ApiError) as refused:
                await checking
            assert refused.value.status == status
