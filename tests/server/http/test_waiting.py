"""A time limit on a coroutine that may have nothing to wait for."""

import asyncio

import pytest

from server.http.waiting import within


async def test_a_coroutine_that_does_not_wait_gets_no_timer(monkeypatch):
    async def at_once():
        return 7

    monkeypatch.setattr(asyncio, "timeout", None)
    assert await within(1, at_once()) == 7


async def test_an_error_before_it_waits_is_raised():
    async def fails():
        raise OSError("broken pipe")

    with pytest.raises(OSError, match="broken pipe"):
        await within(1, fails())


async def test_a_coroutine_that_waits_several_times_goes_on_where_it_was():
    seen = []

    async def waits():
        for each in range(3):
            await asyncio.sleep(0 if each == 1 else 0.001)
            seen.append(each)
        return "end"

    assert await within(5, waits()) == "end"
    assert seen == [0, 1, 2]


async def test_an_error_of_what_it_waits_for_reaches_it():
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_exception, ValueError("no"))

    async def waits():
        try:
            await future
        except ValueError:
            await asyncio.sleep(0)
            return "caught"

    assert await within(5, waits()) == "caught"


async def wait_forever(ended):
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(True)


async def test_one_that_takes_too_long_is_cancelled():
    ended = []
    with pytest.raises(TimeoutError):
        await within(0.01, wait_forever(ended))
    assert ended


async def test_cancelling_the_task_cancels_it():
    ended = []
    task = asyncio.create_task(within(60, wait_forever(ended)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended
