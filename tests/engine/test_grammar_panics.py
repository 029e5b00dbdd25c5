"""A panic of the grammar library fails only the request with that grammar."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from engine import LocalEngine
from engine.batch import Batch, Row
from engine.grammar import grammars as grammars_module
from engine.grammar.compiler import STACKS, thread_with_large_stack
from engine.grammar.grammars import PANICKED, Grammars
from tests.engine.grammars import CONFIG, SCHEMA, deltas, output, request
from tests.server.grammar.shapes import DEEP


class PanicException(BaseException):
    """Like pyo3's: not an Exception."""


class Panics:
    """The library, panicking from the n-th call of a method on."""

    def __init__(self, library, method: str, at: int) -> None:
        self._library, self._method, self._left = library, method, at

    def __getattr__(self, name: str):
        return self._called if name == self._method else getattr(self._library, name)

    def _called(self, *args):
        self._left -= 1
        if self._left <= 0:
            raise PanicException("called `Option::unwrap()` on a `None` value")
        return getattr(self._library, self._method)(*args)


@pytest.fixture
def panics(monkeypatch):
    """Make the library of request 1 panic."""

    def install(method: str, at: int = 1) -> None:
        make = Grammars._make

        def with_panics(grammars, compiler, asked):
            matcher = make(grammars, compiler, asked)
            if asked.id == 1:
                matcher.library = Panics(matcher.library, method, at)
            return matcher

        monkeypatch.setattr(Grammars, "_make", with_panics)

    return install


@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("compute_ff_tokens", 1),  # before the request is in line
        ("is_stopped", 1),
        ("unsafe_compute_mask_ptr", 1),
        ("unsafe_compute_mask_ptr", 3),
        ("consume_token", 2),
        ("consume_tokens", 1),
        ("is_accepting", 2),
        ("is_error", 1),
    ],
)
async def test_panic_fails_only_its_request(panics, method, at):
    async with asyncio.timeout(240):
        async with LocalEngine(CONFIG) as engine:
            alone = [await output(engine, request(i, grammar)) for i, grammar in ((2, SCHEMA), (3, None))]
            panics(method, at)
            failed, *others = await asyncio.gather(
                deltas(engine, request(1, SCHEMA)), output(engine, request(2, SCHEMA)), output(engine, request(3, None))
            )
            assert (failed[-1].finish_reason, failed[-1].error, failed[-1].field) == (
                "error",
                PANICKED.message,
                "grammar",
            )
            assert others == alone
            assert not engine._loop._compiling
            engine._loop.scheduler.check()
            assert (await output(engine, request(4, SCHEMA)))[1] == "stop"


async def test_panic_among_parallel_masks_fails_only_its_row(monkeypatch):
    class Pool:
        def unsafe_compute_mask_ptr(self, libraries, *_):
            for library, _ in libraries:
                library.unsafe_compute_mask_ptr(0, 0)

    monkeypatch.setattr(grammars_module, "MANY_ROWS", 2)
    grammars = Grammars(CONFIG, 2048)
    grammars._executor = Pool()
    for i in range(3):
        grammars.add(i, await grammars.compile(request(i, ("regex", "ab"))))
    grammars._matchers[1].library = Panics(grammars._matchers[1].library, "unsafe_compute_mask_ptr", 1)
    batch = Batch(1, [Row(i, 0, [1], [], 1) for i in range(3)])
    masks = grammars.masks(batch, grammars.rows(batch))
    assert [grammars._matchers[i].has_failed for i in range(3)] == [False, True, False]
    assert (masks.bits[1] == -1).all(), "it draws like any row, and nobody sees what"
    assert np.array_equal(masks.bits[0], masks.bits[2]) and 0 < np.unpackbits(masks.bits[0].view(np.uint8)).sum() < 9
    grammars.close()


async def test_an_interrupt_is_no_panic():
    grammars = Grammars(CONFIG, 2048)
    matcher = await grammars.compile(request(1, SCHEMA))

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        matcher._ask(interrupted, None)
    assert not matcher.has_failed
    grammars.close()


@pytest.mark.parametrize("name", DEEP)
async def test_deep_grammar_does_not_overflow_the_stack(name, monkeypatch):
    """Compiled without validation, as when the engine is used alone."""
    kind, make = DEEP[name]
    if name == "repeated terminals":
        pytest.skip("compiles for 20 seconds, and is refused before it gets here")
    monkeypatch.setattr(grammars_module, "WAIT_S", 600.0)  # a slow machine must not refuse it for the time it takes
    async with LocalEngine(CONFIG) as engine:
        [*_, last] = await deltas(engine, request(1, (kind, make()), max_tokens=4))
        assert last.finish_reason in ("stop", "length") or last.field == "grammar", last
        assert (await output(engine, request(2, None, max_tokens=3, stop_ids=())))[1] == "length"


def test_smaller_stack_is_used_if_a_large_one_is_refused(monkeypatch):
    sizes = []

    def size(wanted: int = 0) -> int:
        sizes.append(wanted)
        return 0

    monkeypatch.setattr("threading.stack_size", size)
    started = iter([RuntimeError, RuntimeError, None])
    submit = grammars_module.Compiler.__init__.__globals__["ThreadPoolExecutor"].submit

    def scarce(self, *args):
        if (error := next(started)) is not None:
            raise error("can't start new thread")
        return submit(self, *args)

    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor.submit", scarce)
    thread_with_large_stack("test").shutdown()
    assert sizes == [0, *STACKS, 0]
