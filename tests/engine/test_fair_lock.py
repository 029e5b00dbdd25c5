"""FairLock: callers take turns, and a cancelled request delays no other."""

import asyncio

import pytest

from engine.fair_lock import FairLock


async def hold(lock: FairLock, caller: str, order: list[str], name: str, go: asyncio.Event | None = None) -> None:
    async with lock.turn(caller):
        order.append(name)
        if go is not None:
            await go.wait()


async def started(*tasks: asyncio.Task) -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_callers_alternate_and_keep_their_order():
    lock, order, go = FairLock(), [], asyncio.Event()
    first = asyncio.create_task(hold(lock, "a", order, "a0", go))
    await started()
    line = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2"), ("c", "c1")]
    tasks = [asyncio.create_task(hold(lock, caller, order, name)) for caller, name in line]
    await started()
    assert lock.num_waiting == 6
    go.set()
    await asyncio.gather(first, *tasks)
    assert order == ["a0", "a1", "b1", "c1", "a2", "b2", "a3"]
    assert lock.num_waiting == 0


async def test_lock_has_one_holder():
    lock, inside = FairLock(), 0

    async def work(caller: str) -> None:
        nonlocal inside
        async with lock.turn(caller):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(work("ab"[i % 2]) for i in range(50)))


async def test_cancelled_request_leaves_the_queue():
    lock, order, go = FairLock(), [], asyncio.Event()
    first = asyncio.create_task(hold(lock, "a", order, "a0", go))
    await started()
    gone = asyncio.create_task(hold(lock, "a", order, "gone"))
    last = asyncio.create_task(hold(lock, "b", order, "b"))
    await started()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert lock.num_waiting == 1
    go.set()
    await asyncio.gather(first, last)
    assert order == ["a0", "b"]


async def test_lock_acquired_during_cancellation_goes_to_the_next_request():
    lock, order, go = FairLock(), [], asyncio.Event()
    first = asyncio.create_task(hold(lock, "a", order, "a0", go))
    await started()
    gone = asyncio.create_task(hold(lock, "b", order, "gone"))
    last = asyncio.create_task(hold(lock, "c", order, "c"))
    await started()
    go.set()
    await asyncio.sleep(0)  # the holder releases: the turn is given, and its new owner has not run yet
    gone.cancel()
    await asyncio.gather(first, last)
    assert order == ["a0", "c"]
    async with asyncio.timeout(5), lock.turn("d"):
        pass


async def test_release_skips_requests_cancelled_at_the_same_time():
    lock, order, go = FairLock(), [], asyncio.Event()
    first = asyncio.create_task(hold(lock, "a", order, "a0", go))
    await started()
    gone = [asyncio.create_task(hold(lock, caller, order, "gone")) for caller in "bbc"]
    last = asyncio.create_task(hold(lock, "c", order, "c"))
    await started()
    go.set()
    for task in gone:  # none of them has run when the holder releases
        task.cancel()
    await asyncio.gather(first, last, *gone, return_exceptions=True)
    assert order == ["a0", "c"] and lock.num_waiting == 0
    async with asyncio.timeout(5), lock.turn("d"):
        pass


async def test_error_in_the_holder_releases_the_lock():
    lock = FairLock()
    with pytest.raises(ValueError):
        async with lock.turn("a"):
            raise ValueError
    async with asyncio.timeout(5), lock.turn("b"):
        pass
