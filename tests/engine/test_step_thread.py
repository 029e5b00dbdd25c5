"""StepThreads: calls run one after another, and what becomes of their results."""

import asyncio
import gc
import threading
import weakref

import pytest

from engine.step_thread import LoopThread, ModelThread
from tests.live import WAIT_S


class Result:
    """What a call returns. A weak reference shows whether it still exists."""


@pytest.fixture
async def thread():
    thread = ModelThread()
    yield thread
    await asyncio.wait_for(thread.close(), WAIT_S)


async def test_calls_run_in_the_order_in_which_they_were_queued_and_on_one_thread(thread):
    names: list[str] = []
    calls = [
        thread.call(lambda number: (names.append(threading.current_thread().name), number)[1], n) for n in range(9)
    ]
    assert await asyncio.gather(*calls) == list(range(9))
    assert set(names) == {"model"}


async def test_the_loops_own_thread_calls_at_once_and_results_come_when_the_loop_goes_on():
    thread, calls = LoopThread(), []
    one, two = (thread.call(lambda number: (calls.append(number), 2 * number)[1], number) for number in (1, 2))
    assert calls == [1, 2] and not one.done() and not two.done()
    assert await asyncio.gather(one, two) == [2, 4]


@pytest.mark.parametrize("thread", [ModelThread(), LoopThread()])
async def test_the_caller_gets_what_a_call_raises_and_the_next_one_runs(thread):
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 / 0)
    assert await thread.call(lambda: "next") == "next"


@pytest.mark.parametrize("thread", [ModelThread(), LoopThread()])
async def test_a_call_that_raises_what_futures_refuse_fails_all_the_same(thread):
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(thread.call(lambda: next(iter(()))), WAIT_S)


async def test_a_call_whose_caller_was_cancelled_still_ends_before_the_next_one(thread):
    go, ended = threading.Event(), []
    waiting = thread.call(lambda: (go.wait(WAIT_S), ended.append(1)))
    waiting.cancel()
    after = thread.call(lambda: list(ended))
    go.set()
    assert await after == [1]


async def test_nothing_of_a_call_is_kept_while_the_thread_waits(thread):
    argument = Result()
    kept = [weakref.ref(argument)]
    result = await thread.call(lambda _: Result(), argument)
    kept.append(weakref.ref(result))
    del argument, result
    await thread.call(lambda: None)
    gc.collect()
    assert [each() for each in kept] == [None, None]


async def test_a_thread_can_be_closed_twice_and_takes_no_call_after_that():
    thread = ModelThread()
    call = thread.call(lambda: 1)
    for _ in range(2):
        await asyncio.wait_for(thread.close(), WAIT_S)
    assert await call == 1
    with pytest.raises(RuntimeError, match="closed"):
        thread.call(lambda: 1)


async def test_a_thread_without_calls_can_be_closed():
    await asyncio.wait_for(ModelThread().close(), WAIT_S)


def test_the_thread_outlives_an_event_loop_that_was_closed_during_a_call():
    thread, go = ModelThread(), threading.Event()

    async def leave() -> None:
        thread.call(go.wait, WAIT_S)

    async def answer() -> int:
        result = await asyncio.wait_for(thread.call(lambda: 1), WAIT_S)
        await thread.close()
        return result

    asyncio.run(leave())
    go.set()
    assert asyncio.run(answer()) == 1
